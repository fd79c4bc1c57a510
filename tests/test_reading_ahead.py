"""What is read ahead is what a read would find, and every put stays under the fence."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import pytest
from redis.connection import ConnectionPool
from redis.exceptions import ConnectionError as Unreachable

from mapstate import errors
from mapstate.backends import resolve
from mapstate.backing_map import FenceToken, ReadsAhead, SpreadFences

pytestmark = pytest.mark.redis
OPEN = FenceToken(1, 7, nonce="a")
CHUNKS = [[f"user-{chunk}-{at}" for at in range(50)] for chunk in range(4)]


@pytest.fixture(params=["string", "hash", "packed&buckets=30", "cluster"])
def place(request):
    """The URL of a store, and the servers that it is on."""
    if request.param == "cluster":
        return request.getfixturevalue("cluster_url"), request.getfixturevalue("redis_cluster").masters
    return f"{request.getfixturevalue('redis_url')}&layout={request.param}", [request.getfixturevalue("redis_server")]


@pytest.fixture
def store(place):
    found = resolve(place[0]).open("visits")
    move(found, OPEN)
    yield found
    found.close()


def move(store, token):
    """Has the fence at a token, as the ledger's write or what follows it does."""
    found = store.load()
    assert store.swap(b"{}", found and found[1], token) is not None
    if isinstance(store, SpreadFences):
        store.move_fences([fence.token for fence in store.fences()], token)


def in_use(store):
    backend = store._backend
    pools = [backend.pool()] if hasattr(backend, "pool") else map(backend.pool_to, store._cluster.known())
    return sum(len(pool._in_use_connections) for pool in pools)


def drop_connections(place):
    for server in place[1]:
        with server.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)


def test_every_chunk_finds_what_is_stored_and_is_stored(store):
    store.multi_put(CHUNKS[1], [b"before"] * 50)
    writer = store.writer(OPEN)
    assert isinstance(writer, ReadsAhead)
    writer.read_ahead(CHUNKS[0])
    for at, chunk in enumerate(CHUNKS):
        if at + 1 < len(CHUNKS):
            writer.read_ahead(CHUNKS[at + 1])
        assert writer.multi_get(chunk) == [b"before" if at == 1 else None] * 50
        writer.multi_put(chunk, [b"%d" % at] * 50)
    writer.close()
    assert [store.multi_get(chunk) for chunk in CHUNKS] == [[b"%d" % at] * 50 for at in range(4)]
    assert in_use(store) == 0


def test_a_fence_that_moved_after_the_read_refuses_the_put(store):
    writer = store.writer(OPEN)
    writer.read_ahead(CHUNKS[0])
    writer.read_ahead(CHUNKS[1])
    writer.multi_get(CHUNKS[0])
    move(store, OPEN._replace(txid=8))
    with pytest.raises(errors.FencedError):
        writer.multi_put(CHUNKS[0], [b"late"] * 50)
    writer.close()
    assert store.multi_get(CHUNKS[0]) == [None] * 50
    assert in_use(store) == 0


def test_a_fence_that_moved_between_two_chunks_refuses_the_second(store):
    writer = store.writer(OPEN)
    writer.read_ahead(CHUNKS[0])
    writer.read_ahead(CHUNKS[1])
    writer.multi_get(CHUNKS[0])
    writer.multi_put(CHUNKS[0], [b"in time"] * 50)
    assert writer.multi_get(CHUNKS[1]) == [None] * 50  # was read ahead
    move(store, OPEN._replace(closed=True))
    with pytest.raises(errors.FencedError):
        writer.multi_put(CHUNKS[1], [b"late"] * 50)
    assert store.multi_get(CHUNKS[1]) == [None] * 50


def test_an_attempt_that_is_fenced_already_reads_nothing_ahead(store):
    writer = store.writer(OPEN._replace(txid=6))

    def read():
        writer.read_ahead(CHUNKS[0])
        writer.multi_get(CHUNKS[0])  # in a cluster it shows here

    with pytest.raises(errors.FencedError):
        read()
    assert in_use(store) == 0


def test_a_fence_that_was_touched_and_left_as_it_was_refuses_nothing(store):
    writer = store.writer(OPEN)
    writer.read_ahead(CHUNKS[0])
    writer.read_ahead(CHUNKS[1])
    for chunk in CHUNKS[:2]:
        assert writer.multi_get(chunk) == [None] * 50
        move(store, OPEN)
        writer.multi_put(chunk, [b"v"] * 50)
        assert store.multi_get(chunk) == [b"v"] * 50
    writer.close()


@pytest.mark.parametrize("when", ["asked", "got", "put"])
def test_a_connection_that_breaks_costs_a_read_and_no_record(store, place, when):
    store.multi_put(CHUNKS[1], [b"before"] * 50)
    writer = store.writer(OPEN)
    writer.read_ahead(CHUNKS[0])
    writer.read_ahead(CHUNKS[1])
    if when == "asked":
        drop_connections(place)
    assert writer.multi_get(CHUNKS[0]) == [None] * 50
    if when == "got":
        drop_connections(place)
    writer.multi_put(CHUNKS[0], [b"0"] * 50)
    if when == "put":
        drop_connections(place)
    assert writer.multi_get(CHUNKS[1]) == [b"before"] * 50
    writer.multi_put(CHUNKS[1], [b"1"] * 50)
    writer.close()
    assert [store.multi_get(chunk) for chunk in CHUNKS[:2]] == [[b"0"] * 50, [b"1"] * 50]
    assert in_use(store) == 0


def test_a_read_that_cannot_be_sent_ahead_is_left_to_the_get(store, monkeypatch):
    writer = store.writer(OPEN)
    with monkeypatch.context() as patch:

        def fails(*args, **options):
            raise Unreachable("for now")

        patch.setattr(ConnectionPool, "get_connection", fails)
        writer.read_ahead(CHUNKS[0])
    assert writer.multi_get(CHUNKS[0]) == [None] * 50
    writer.close()
    assert in_use(store) == 0


def test_a_get_of_other_keys_works_as_if_nothing_had_been_said(store):
    store.multi_put(CHUNKS[2], [b"there"] * 50)
    writer = store.writer(OPEN)
    writer.read_ahead(CHUNKS[0])
    writer.read_ahead(CHUNKS[1])
    assert writer.multi_get(CHUNKS[2]) == [b"there"] * 50
    writer.multi_put(CHUNKS[2], [b"new"] * 50)
    assert writer.multi_get(CHUNKS[1]) == [None] * 50
    assert store.multi_get(CHUNKS[2]) == [b"new"] * 50
    writer.close()
    assert in_use(store) == 0


def test_a_put_without_a_get_is_stored_with_reads_under_way(store):
    writer = store.writer(OPEN)
    writer.read_ahead(CHUNKS[0])
    writer.multi_put(CHUNKS[1], [b"1"] * 50)
    assert writer.multi_get(CHUNKS[0]) == [None] * 50
    writer.multi_rewrite(CHUNKS[1], [b"2"] * 50)
    writer.close()
    assert store.multi_get(CHUNKS[1]) == [b"2"] * 50


def test_keys_that_change_after_they_were_read_ahead_are_read_again(store):
    store.multi_put(["other"], [b"there"])
    writer = store.writer(OPEN)
    keys = ["mine"]
    writer.read_ahead(keys)
    keys[0] = "other"
    assert writer.multi_get(keys) == [b"there"]
    keys[0] = "third"
    writer.multi_put(keys, [b"v"])
    assert store.multi_get(["mine", "other", "third"]) == [None, b"there", b"v"]


def test_a_writer_that_is_closed_leaves_no_connection_half_read(store):
    writer = store.writer(OPEN)
    writer.read_ahead(CHUNKS[0])
    writer.close()
    writer.close()
    assert in_use(store) == 0
    assert store.multi_get(CHUNKS[0]) == [None] * 50


def test_after_a_large_put_nothing_is_read_ahead(store):
    writer = store.writer(OPEN)
    for chunk in CHUNKS[:2]:
        writer.read_ahead(chunk)
    writer.multi_get(CHUNKS[0])
    writer.multi_put(CHUNKS[0], [b"x" * 400_000] * 50)
    writer.multi_get(CHUNKS[1])
    writer.read_ahead(CHUNKS[2])
    assert not writer._asked
    writer.multi_put(CHUNKS[1], [b"small"] * 50)
    writer.read_ahead(CHUNKS[2])
    assert writer._asked
    writer.close()


def test_a_fork_reads_nothing_from_what_its_parent_has_under_way(store):
    store.multi_put([*CHUNKS[0], *CHUNKS[1]], [b"0"] * 50 + [b"1"] * 50)
    writer = store.writer(OPEN)
    writer.read_ahead(CHUNKS[0])
    child = os.fork()
    if child == 0:
        found = None
        with suppress(Exception):
            found = writer.multi_get(CHUNKS[0])
        os._exit(0 if found == [b"0"] * 50 else 1)
    assert os.waitpid(child, 0)[1] == 0
    started = time.monotonic()
    assert writer.multi_get(CHUNKS[0]) == [b"0"] * 50
    assert time.monotonic() - started < store._backend.socket_timeout / 2  # it waits for no reply that somebody took
    writer.multi_put(CHUNKS[0], [b"2"] * 50)
    writer.close()
    assert store.multi_get(CHUNKS[0]) == [b"2"] * 50
