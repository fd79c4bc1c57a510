"""The one part of a scan of one Redis, for a DataFrame: each key once, whatever becomes of the table meanwhile."""

from __future__ import annotations

import threading
from itertools import chain

import pytest
from servers import RedisServer, find_redis

from mapstate.backends import resolve
from mapstate.errors import StoreUnavailableError

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def server():
    assert find_redis() is not None
    with RedisServer().start() as one:
        yield one


@pytest.fixture
def made(server):
    """Makes a state of so many keys, alone in its database but for ``others``."""

    def make(count, others=0, layout="string"):
        with server.client() as client:
            client.flushdb()
        store = resolve(f"{server.url}?layout={layout}{'&buckets=500' * (layout == 'packed')}").open("visits")
        other = resolve(server.url).open("visits2")
        for at in range(0, max(count, others), 10_000):
            texts = [f"user-{number}" for number in range(at, at + 10_000)]
            for one, most in ((store, count), (other, others)):
                some = texts[: max(0, most - at)]
                one.multi_put(some, [b"[1,2,3]"] * len(some))
        return store

    return make


def keys_of(store, page_size=1000):
    (part,) = store.scan_parts(4)
    return list(chain.from_iterable(store.scan_part(part, page_size)))


@pytest.mark.parametrize("count", [0, 1, 16_384, 70_000])
def test_each_key_is_in_the_part(made, count):
    assert sorted(keys_of(made(count))) == sorted(f"user-{number}" for number in range(count))


@pytest.mark.parametrize("page_size", [1, 7, 100, 100_000])
@pytest.mark.parametrize("layout", ["string", "packed", "hash"])
def test_the_size_of_a_page_and_the_layout_do_not_matter(made, page_size, layout):
    count = 20_000 if page_size > 7 or layout != "string" else 10_500
    found = keys_of(made(count, others=10_000, layout=layout), page_size)
    assert len(found) == len(set(found)) == count


def test_a_table_that_grows_meanwhile_gives_no_key_twice(made, server):
    store = made(12_000)
    ended = threading.Event()

    def grow():
        with server.client() as client:
            for at in range(10**6):
                client.mset({f"other-{at}-{number}": "" for number in range(500)})
                if ended.is_set():
                    return

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        found = keys_of(store, 300)
    finally:
        ended.set()
        writer.join()
    assert sorted(found) == sorted(f"user-{number}" for number in range(12_000))


@pytest.mark.parametrize("left", [3, 400, 9_000])
def test_a_table_that_shrinks_meanwhile_gives_each_key_once_or_the_scan_says_that_it_cannot_tell(made, server, left):
    store = made(60_000)
    pages = store.scan_part("", 1000)
    found = next(pages)
    with server.client() as client:
        for at in range(left, 60_000, 10_000):
            client.delete(*(f"visits:user-{number}" for number in range(at, min(60_000, at + 10_000))))
    try:
        found += chain.from_iterable(pages)
    except StoreUnavailableError as error:
        assert "moved its keys about" in str(error)  # noqa: PT017
    else:
        assert len(found) == len(set(found))
        assert {f"user-{number}" for number in range(left)} <= set(found)


def test_a_key_that_comes_twice_ends_the_scan_with_an_error(made, monkeypatch):
    store = made(3)
    monkeypatch.setattr(store, "scan", lambda _: iter([["user-0", "user-1"], ["user-0", "user-2"]]))
    pages = store.scan_part("", 1000)
    assert [*chain(next(pages), next(pages))] == ["user-0", "user-1", "user-0", "user-2"]
    with pytest.raises(StoreUnavailableError, match="moved its keys about"):
        next(pages)


@pytest.mark.parametrize("layout", ["string", "packed&buckets=500", "hash"])
def test_a_restart_meanwhile_ends_the_scan_with_an_error(start_redis, layout):
    server = start_redis()
    store = resolve(f"{server.url}?layout={layout}").open("visits")
    store.multi_put([f"user-{number}" for number in range(12_000)], [b"[1,2,3]"] * 12_000)
    pages = store.scan_part("", 1000)
    assert next(pages)
    server.restart()
    with pytest.raises(StoreUnavailableError, match="restarted or failed over"):
        list(pages)
