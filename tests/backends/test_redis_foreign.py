"""Redis keys that something else has made under a state's name: told, and never written over."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from one_ledger import OneLedger
from openings import opening
from redis.connection import Connection

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.backends.redis.cluster_writer import by_slot_group
from mapstate.capabilities import FenceToken, SpreadFences
from mapstate.errors import CorruptRecordError
from mapstate.maps import OpaqueMap
from mapstate.maps.serialized import SerializedMap
from mapstate.operations.adopt import adopt
from mapstate.operations.doctor import examine
from mapstate.operations.drop import drop
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger_record import Commit
from mapstate.serializers import RecordCodec, serializer

pytestmark = pytest.mark.redis

OPENING = opening()
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
        self._groups = self.store._groups if cluster else None
        request.addfinalizer(self.client.close)

    def name(self, key: str) -> str:
        """Of the Redis key."""
        if self._groups is None:
            return f"{self.prefix}visits:{key}"
        [part] = by_slot_group([key], len(self._groups))
        return f"{self.prefix}visits:{{{part.group}}}:{key}"

    def count(self, batch_id: int, keys: list[str], *, commit: bool = True) -> None:
        """A batch that adds one to each key."""
        ledger, attempt = OneLedger.open_and_begin(self.store, OPENING, batch_id)
        codec = RecordCodec(serializer("json"), "visits", "opaque", OPENING.fields, ledger.record.field_counts)
        writer: Any = self.store.writer(attempt.token)
        state: Any = OpaqueMap(SerializedMap(writer, codec), attempt.view, written_once=True)
        state.begin_commit(attempt.txid)
        state.multi_combine(
            keys, [1] * len(keys), lambda old, new: [(a or 0) + b for a, b in zip(old, new, strict=True)]
        )
        writer.close()
        if commit:
            ledger.commit(Commit(batch_id=batch_id, txid=attempt.txid, owner=OPENING.owner))

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
    with pytest.raises(CorruptRecordError, match=r"'user-0'.*is a list.*not overwritten") as caught:
        put(writer, KEYS)
    assert caught.value.key == "user-0"
    assert place.client.lrange(place.name(KEYS[0]), 0, -1) == [b"theirs"]
    place.client.delete(place.name(KEYS[0]))
    assert writer.multi_get(KEYS[:1]) == [None]
    put(writer, KEYS)
    assert place.store.multi_get(KEYS) == [b"mine"] * len(KEYS)


def test_a_key_of_another_type_that_is_made_between_get_and_put_is_not_replaced(place, writer):
    assert writer.multi_get(KEYS) == [None] * len(KEYS)
    place.client.rpush(place.name(KEYS[3]), "theirs")
    with pytest.raises(CorruptRecordError, match="'user-3'"):
        put(writer, KEYS)
    assert place.client.lrange(place.name(KEYS[3]), 0, -1) == [b"theirs"]


def test_records_that_another_writer_of_the_attempt_makes_meanwhile_are_replaced_as_in_any_layout(place, writer):
    assert writer.multi_get(KEYS) == [None] * len(KEYS)
    for key in KEYS[:9]:
        place.client.set(place.name(key), "other")
    put(writer, KEYS)
    assert place.store.multi_get(KEYS) == [b"mine"] * len(KEYS)


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


def test_a_scan_a_vacuum_and_the_doctor_pass_keys_of_another_type_and_name_them(place):
    place.count(0, [*KEYS, "gone"])
    place.count(1, KEYS[:1], commit=False)
    place.count(1, KEYS[1:2])
    place.client.delete(place.name("gone"))
    names = [place.name(key) for key in ("odd-1", "odd-2", "gone")] + [place.name("x").encode() + b"\xff"]
    for name in names:
        place.client.rpush(name, "theirs")
    expected = {(key,): {"n": 1 + (key == KEYS[1])} for key in KEYS}
    seen = {}
    with open_reader(place.url, "visits") as reader:
        for read in (lambda: reader.get("odd-1"), lambda: reader.multi_get([*KEYS, "odd-1"])):
            with pytest.raises(CorruptRecordError, match=r"'odd-1'.*is a list"):
                read()
        with pytest.raises(CorruptRecordError, match=r"4 keys cannot be read.*odd-1") as caught:
            seen.update(reader.scan(7))
    assert seen == expected
    assert {"gone", "odd-1", "odd-2"} < set(caught.value.keys)
    [error] = [one for one in examine(place.url, "visits") if (one.severity, one.subject) == ("error", "records")]
    assert error.found.startswith("4 keys cannot be read")
    done = vacuum(place.url, "visits")
    assert (done.rewritten, done.dropped, done.unreadable) == (1, 0, 4)
    assert {"gone", "odd-1", "odd-2"} < set(done.unreadable_keys)
    assert [place.client.lrange(name, 0, -1) for name in names] == [[b"theirs"]] * 4
    with open_reader(place.url, "visits") as reader:
        assert dict(zip(KEYS, reader.multi_get(KEYS), strict=True)) == {key: expected[key,] for key in KEYS}


def test_a_hash_of_packed_records_that_is_none_is_named_and_passed(redis_url, redis_server):
    """Its records cannot be read, and whoever asks for one of them is told."""
    url = f"{redis_url}&layout=packed&buckets=5"
    prefix = redis_url.rpartition("prefix=")[2]
    store: Any = resolve(url).open("visits")
    store.multi_put(KEYS, [b"1"] * len(KEYS))
    with redis_server.client() as client:
        lost = {key.decode() for key in client.hkeys(f"{prefix}visits:3")}
        client.delete(f"{prefix}visits:3")
        client.rpush(f"{prefix}visits:3", "theirs")
        found: set[str] = set()
        with pytest.raises(CorruptRecordError, match="visits:3'") as caught:
            found.update(key for page in store.scan(7) for key in page)
        assert (caught.value.count, found) == (1, set(KEYS) - lost)
        assert 0 < len(lost) < len(KEYS)
        assert client.lrange(f"{prefix}visits:3", 0, -1) == [b"theirs"]


def test_an_adoption_is_refused_where_a_key_is_of_another_type(redis_url, redis_server):
    records = redis_url.rpartition("prefix=")[2] + "visits:"
    url = f"{redis_url.partition('?')[0]}?records={records}"
    with redis_server.client() as client:
        client.set(f"{records}a", "[1,2,null]")
        client.rpush(f"{records}odd", "theirs")
        with pytest.raises(CorruptRecordError, match=r"'odd'.*is a list"):
            adopt(url, "visits", type="opaque", keys=OPENING.keys, fields=OPENING.fields)
        assert not client.exists(f"{records}!ledger")
        client.delete(f"{records}odd")
    assert adopt(url, "visits", type="opaque", keys=OPENING.keys, fields=OPENING.fields).records == 1


@pytest.mark.parametrize("where", WHERE)
def test_a_state_that_is_dropped_leaves_what_is_somebody_elses_and_says_so(request, where):
    place = Place(request, where)
    place.count(0, KEYS)
    place.client.rpush(place.name("a-list"), "mine")
    odd = place.name("odd").encode().replace(b"odd", b"\xff\xfe")
    place.client.set(odd, "mine too")
    done = drop(place.url, "visits")
    assert (done.records, done.foreign) == (len(KEYS), 2)
    assert sorted(done.foreign_keys) == sorted(["a-list", repr(b"\xff\xfe" if where.startswith("cluster") else odd)])
    assert place.client.lrange(place.name("a-list"), 0, -1) == [b"mine"]
    assert place.client.get(odd) == b"mine too"
    assert [name for name in map(place.name, KEYS) if place.client.exists(name)] == []
    assert place.store.load() is None
    place.client.delete(odd, place.name("a-list"))
