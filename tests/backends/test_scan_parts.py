"""Parts of a scan of one Redis: whatever its table has become, each key is in one part."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
from servers import RedisServer, find_redis

from mapstate.backends import resolve
from mapstate.backends.redis.layout import StringLayout
from mapstate.backends.redis.operations import TablePart, cursor_at, place_of
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


def keys_of(store, parts, page_size=1000):
    return [key for part in parts for page in store.scan_part(part, page_size) for key in page]


@pytest.mark.parametrize("count", [0, 1, 4_999, 10_000, 16_384, 40_001, 70_000])
@pytest.mark.parametrize("most", [1, 2, 3, 8, 16])
def test_each_key_is_in_one_part(made, count, most):
    store = made(count)
    parts = store.scan_parts(most)
    assert len(parts) <= most
    assert len(parts) > 1 or most == 1 or count < 10_000
    assert sorted(keys_of(store, parts)) == sorted(f"user-{number}" for number in range(count))


@pytest.mark.parametrize("page_size", [1, 7, 100, 100_000])
@pytest.mark.parametrize(("layout", "parts"), [("string", 4), ("packed", 4), ("hash", 1)])
def test_the_size_of_a_page_and_the_layout_do_not_matter(made, page_size, layout, parts):
    store = made(20_000 if page_size > 7 or layout != "string" else 10_500, others=10_000, layout=layout)
    planned = store.scan_parts(4)
    assert len(planned) == parts
    found = keys_of(store, planned, page_size)
    assert len(found) == len(set(found)) == (20_000 if page_size > 7 or layout != "string" else 10_500)


@pytest.mark.parametrize("seed", range(6))
def test_a_table_that_grows_meanwhile_moves_no_key_to_another_part(made, server, seed):
    store = made(12_000)
    own = {f"user-{number}" for number in range(12_000)}
    parts = store.scan_parts(4)
    random.Random(seed).shuffle(parts)
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
        found = keys_of(store, parts, 300)
    finally:
        ended.set()
        writer.join()
    assert sorted(found) == sorted(own)


@pytest.mark.parametrize("left", [0, 3, 400, 9_000])
def test_a_table_that_has_shrunk_has_each_key_in_one_part_or_the_scan_says_that_it_cannot_tell(made, server, left):
    store = made(60_000)
    parts = store.scan_parts(8)
    with server.client() as client:
        for at in range(left, 60_000, 10_000):
            client.delete(*(f"visits:user-{number}" for number in range(at, min(60_000, at + 10_000))))
        remaining = client.dbsize()
    assert remaining == left
    try:
        found = keys_of(store, parts)
    except StoreUnavailableError as error:
        assert "moved its keys about" in str(error)  # noqa: PT017
    else:
        assert sorted(found) == sorted(f"user-{number}" for number in range(left))


def test_parts_end_with_the_server_that_they_were_planned_on(start_redis):
    server = start_redis()
    store = resolve(server.url).open("visits")
    store.multi_put([f"user-{number}" for number in range(12_000)], [b"[1,2,3]"] * 12_000)
    first, second = store.scan_parts(2)
    assert list(store.scan_part(first, 1000))
    server.restart()
    with pytest.raises(StoreUnavailableError, match="restarted or failed over"):
        list(store.scan_part(second, 1000))


def test_a_place_is_a_cursor_with_its_bits_in_reverse():
    assert [place_of(b"%d" % cursor) for cursor in (0, 1, 2, 3)] == [0, 1 << 63, 1 << 62, 3 << 62]
    for place in (0, 1, 5 << 60, (1 << 64) - 1):
        assert place_of(cursor_at(place)) == place


def test_what_a_scan_has_passed_is_told_by_its_cursors():
    half = 1 << 63
    few, many, behind = (cursor_at(half + (slots << 44)) for slots in (-3, -5001, 1))
    server = SimpleNamespace(state="s", settings=SimpleNamespace(address="there"))
    part = TablePart(server, StringLayout("s", 100, b"s:", None), half)
    assert part.scan(few, 1000).endswith(b"COUNT\r\n$1\r\n1\r\n")
    assert part.scan(many, 1000).endswith(b"COUNT\r\n$3\r\n500\r\n")
    assert part.step(many, few, [b"a"]) == (few, [b"a"])
    assert part.step(few, cursor_at(half), [b"a"]) == (None, [b"a"])
    assert part.step(few, behind, [b"a"]) == (None, []), "what it found is behind empty slots and the end"
    assert part.step(few, b"0", [b"a"]) == (None, [])
    for before, after in ((many, behind), (few, many), (few, few)):
        with pytest.raises(StoreUnavailableError, match="moved its keys about"):
            part.step(before, after, [b"a"])
