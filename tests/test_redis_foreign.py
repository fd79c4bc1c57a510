"""Redis keys that something else has made under a state's name: told, and never written over."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.connection import Connection

from mapstate.backends import resolve
from mapstate.backends.redis.buckets import in_groups
from mapstate.backing_map import FenceToken, SpreadFences
from mapstate.errors import CorruptRecordError

pytestmark = pytest.mark.redis

OPEN = FenceToken(1, 7, nonce="a")
KEYS = [f"user-{at}" for at in range(40)]
WHERE = ["string", "string with a ttl", "cluster", "cluster with a ttl"]


class Place:
    """A state in a layout, and a way past it."""

    def __init__(self, request: pytest.FixtureRequest, where: str) -> None:
        cluster = where.startswith("cluster")
        self.url = request.getfixturevalue("cluster_url" if cluster else "redis_url")
        self.ttl = 100.0 if where.endswith("ttl") else None
        self.store: Any = resolve(self.url).open("visits", ttl=self.ttl)
        server = request.getfixturevalue("redis_cluster" if cluster else "redis_server")
        self.client: Any = server.client()
        self.prefix = self.url.rpartition("prefix=")[2]
        self._buckets = self.store._buckets if cluster else None
        request.addfinalizer(self.client.close)

    def name(self, key: str) -> str:
        """Of the Redis key."""
        if self._buckets is None:
            return f"{self.prefix}visits:{key}"
        [group] = in_groups([key], len(self._buckets))
        return f"{self.prefix}visits:{{{group.bucket}}}:{key}"

    def move(self, token: FenceToken) -> None:
        found = self.store.load()
        assert self.store.swap(b"{}", found and found[1], token) is not None
        if isinstance(self.store, SpreadFences):
            self.store.move_fences([fence.token for fence in self.store.fences()], token)


@pytest.fixture(params=WHERE)
def place(request):
    return Place(request, request.param)


@pytest.fixture
def writer(place):
    place.move(OPEN)
    one = place.store.writer(OPEN)
    yield one
    one.close()


def put(writer: Any, keys: list[str], value: bytes = b"mine") -> None:
    writer.multi_put(keys, [value] * len(keys))
    writer.flush()


@pytest.mark.parametrize("others", ["absent", "present", "some of each"])
def test_a_key_of_another_type_is_refused_and_not_replaced(place, writer, others):
    there = {"absent": [], "present": KEYS[1:], "some of each": KEYS[1:20]}[others]
    if there:
        put(writer, there, b"before")
    place.client.rpush(place.name(KEYS[0]), "theirs")
    assert writer.multi_get(KEYS)[0] is None  # all that MGET says
    with pytest.raises(CorruptRecordError, match=r"'user-0'.*is a list.*not written over") as caught:
        put(writer, KEYS)
    assert caught.value.key == "user-0"
    assert place.client.lrange(place.name(KEYS[0]), 0, -1) == [b"theirs"]
    place.client.delete(place.name(KEYS[0]))
    assert writer.multi_get(KEYS[:1]) == [None]
    put(writer, KEYS)
    assert place.store.multi_get(KEYS) == [b"mine"] * len(KEYS)


def test_a_key_that_somebody_makes_between_get_and_put_is_not_replaced(place, writer):
    assert writer.multi_get(KEYS) == [None] * len(KEYS)
    place.client.set(place.name(KEYS[3]), "theirs")
    with pytest.raises(CorruptRecordError, match="'user-3'"):
        put(writer, KEYS)
    assert place.client.get(place.name(KEYS[3])) == b"theirs"


def test_what_was_read_ahead_is_refused_at_the_next_put_or_the_flush(place, writer):
    place.client.rpush(place.name(KEYS[0]), "theirs")
    writer.read_ahead(KEYS[:20])
    writer.read_ahead(KEYS[20:])
    assert writer.multi_get(KEYS[:20]) == [None] * 20

    def rest() -> None:
        writer.multi_put(KEYS[:20], [b"mine"] * 20)
        writer.multi_get(KEYS[20:])
        writer.multi_put(KEYS[20:], [b"mine"] * 20)
        writer.flush()

    with pytest.raises(CorruptRecordError, match="'user-0'"):
        rest()
    assert place.client.lrange(place.name(KEYS[0]), 0, -1) == [b"theirs"]


def test_a_put_of_more_or_of_fewer_keys_than_were_read_guards_those_that_were_absent(place, writer):
    for keys in (KEYS[:2], KEYS[:30]):
        place.client.rpush(place.name(KEYS[1]), "theirs")
        assert writer.multi_get(KEYS[:10]) == [None] * 10
        with pytest.raises(CorruptRecordError, match="'user-1'"):
            put(writer, keys)
        assert place.client.lrange(place.name(KEYS[1]), 0, -1) == [b"theirs"]
        for key in KEYS:
            place.client.delete(place.name(key))


def test_of_a_repeated_new_key_the_last_record_stays(place, writer):
    keys = ["a", "b", "a", "c", "b"]
    assert writer.multi_get(keys) == [None] * 5
    writer.multi_put(keys, [b"1", b"2", b"3", b"4", b"5"])
    writer.flush()
    assert writer.multi_get(["a", "b", "c"]) == [b"3", b"5", b"4"]


@pytest.mark.parametrize("ahead", [False, True])
def test_new_keys_whose_reply_is_lost_are_put_again_and_are_nobody_elses(place, writer, monkeypatch, ahead):
    """The second sending finds what the first has written."""
    put(writer, KEYS[:5], b"before")
    if ahead:
        writer.read_ahead(KEYS[:20])
        writer.read_ahead(KEYS[20:])
    keys = KEYS[:20]
    assert writer.multi_get(keys) == [b"before"] * 5 + [None] * 15
    read, sent, lost = Connection.read_response, Connection.send_packed_command, []

    def send(conn: Any, packed: Any, *args: Any, **more: Any) -> None:
        sent(conn, packed, *args, **more)
        if b"mine" in b"".join(packed) and not lost:
            lost.append(conn)

    def lose(conn: Any, *args: Any, **more: Any) -> Any:
        reply = read(conn, *args, **more)
        if conn in lost and (lost[1:] or reply not in (b"OK", b"QUEUED")):
            conn.disconnect()
            lost[:] = [None, None]
            raise redis.exceptions.ConnectionError("cut")
        return reply

    monkeypatch.setattr(Connection, "send_packed_command", send)
    monkeypatch.setattr(Connection, "read_response", lose)
    writer.multi_put(keys, [b"mine"] * 20)
    writer.flush()
    assert lost == [None, None]
    assert place.store.multi_get(keys) == [b"mine"] * 20


def test_a_read_of_a_key_of_another_type_raises_whether_few_or_many_are_read(place):
    many = [f"user-{at}" for at in range(200)]
    place.store.multi_put(many[:150], [b"1"] * 150)
    place.client.hset(place.name("odd"), "a", "1")
    for keys in (["odd"], ["no", "odd"], [*many[:3], "odd"], [*many[:150], "odd"], [*many, "odd"]):
        for read in (place.store.multi_get, place.store.multi_get_with_ledger):
            with pytest.raises(CorruptRecordError, match=r"'odd'.*is a hash") as caught:
                read(keys)
            assert caught.value.keys == ["odd"]
    for keys in (many, many[140:]):
        expected = [b"1" if key in many[:150] else None for key in keys]
        assert place.store.multi_get(keys) == expected
        assert place.store.multi_get_with_ledger(keys)[1] == expected
