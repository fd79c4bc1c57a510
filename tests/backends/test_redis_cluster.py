"""The Redis store in a cluster, on three real masters."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import pytest
import redis
from one_ledger import OneLedger
from openings import opening
from redis.connection import Connection
from redis.crc import key_slot
from redis_groups import RedisCluster
from servers import RedisServer, free_port, wait_until

from mapstate import opaque, open_reader
from mapstate.backends import resolve
from mapstate.backends.redis import RedisClusterBackend, RedisClusterStore
from mapstate.backends.redis.cluster_writer import by_slot_group
from mapstate.backends.redis.connection import command
from mapstate.backing_map import Backend, IBackingMap
from mapstate.capabilities import (
    Checkup,
    Claims,
    FencedWrites,
    FenceToken,
    LedgerReads,
    LedgerStore,
    Reports,
    Rewrites,
    Scan,
    SpreadFences,
)
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    FencedError,
    KeyEncodingError,
    MissingBatchesError,
    StaleBatchError,
    StoreAuthError,
    StoreFullError,
    StoreRestartedError,
    StoreUnavailableError,
    TooLargeError,
    UsageError,
)
from mapstate.maps import OpaqueMap
from mapstate.maps.serialized import SerializedMap
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger_record import Attempt, Commit
from mapstate.serializers import RecordCodec, serializer

pytestmark = pytest.mark.redis

OPEN = FenceToken(1, 7, nonce="0a")
LATER = FenceToken(1, 8, nonce="0b")
OPENING = opening()
KEYS = [f"user-{at}" for at in range(300)]


def opened(url: str, ttl: float | None = None, state: str = "visits", **changes: Any) -> RedisClusterStore:
    query = "&".join(f"{name}={value}" for name, value in changes.items())
    return RedisClusterBackend.from_url(f"{url}{'&' if '?' in url else '?'}{query}").open(state, ttl=ttl)


def move(store: RedisClusterStore, fence: FenceToken) -> None:
    before = [one.token for one in store.fences()]
    assert all(one.token == fence for one in store.move_fences(before, fence))


@pytest.fixture
def store(cluster_url: str) -> RedisClusterStore:
    one = opened(cluster_url)
    move(one, OPEN)
    return one


@pytest.fixture
def side_door(redis_cluster: RedisCluster) -> Iterator[redis.RedisCluster]:
    client = redis_cluster.client()
    yield client
    client.close()


@pytest.fixture
def prefix(cluster_url: str) -> str:
    return cluster_url.rpartition("prefix=")[2]


def scanned(store: RedisClusterStore, page_size: int = 1000) -> set[str]:
    return {key for page in store.scan(page_size) for key in page}


def count(store: Any, ledger: OneLedger, attempt: Attempt, keys: list[str]) -> None:
    """What a task does: adds one to each key."""
    codec = RecordCodec(serializer("json"), "visits", "opaque", OPENING.fields, ledger.record.field_counts)
    state = OpaqueMap(SerializedMap(store.writer(attempt.token), codec), attempt.view, written_once=True)
    state.begin_commit(attempt.txid)
    add = lambda bases, news: [(base or 0) + new for base, new in zip(bases, news, strict=True)]  # noqa: E731
    for start in range(0, len(keys), 100):
        chunk = keys[start : start + 100]
        state.multi_combine(chunk, [1] * len(chunk), add)


def commit(ledger: OneLedger, attempt: Attempt) -> None:
    ledger.commit(Commit(batch_id=attempt.batch_id, txid=attempt.txid, owner="q"))


# The map


def test_the_store_has_every_capability(store, cluster_url):
    for capability in (
        *(IBackingMap, LedgerStore, LedgerReads, FencedWrites, SpreadFences),
        *(Claims, Scan, Reports, Checkup),
    ):
        assert isinstance(store, capability)
    assert isinstance(store.writer(OPEN), Rewrites)
    assert isinstance(resolve(cluster_url), Backend)
    assert resolve(cluster_url).shared_between_processes


def test_records_come_in_the_order_of_the_keys_and_absent_ones_as_none(store):
    for one in (store, store.writer(OPEN)):
        one.multi_put(["c", "a", "b", "a"], [b"3", b"first", b"2", b"1"])
        assert one.multi_get(["a", "x", "c", "b", "a"]) == [b"1", None, b"3", b"2", b"1"]
        assert one.multi_get([]) == []
        one.multi_put([], [])


def test_keys_of_any_text_and_records_of_any_bytes_come_back_unchanged(store, cluster_url):
    keys = ["", " ", ":", "a:b", "*", "{x}", "}:", "é", "\U0001f600", "\r\n$3\r\n", "\0", "%b%d", "x" * 100_000, "\\N"]
    values = [b"", b"\r\n", b"\0", bytes(range(256)), b"$-1\r\n", b"%b", b"v" * 1_000_000, b"-"]
    values = [values[at % len(values)] + b"%d" % at * (at % 2) for at in range(len(keys))]
    expiring = opened(cluster_url, ttl=100)
    for one in (store, store.writer(OPEN), expiring, expiring.writer(OPEN)):
        one.multi_put(keys, values)
        assert one.multi_get(keys) == values
        store.writer(OPEN).multi_rewrite(keys, values[::-1])
        assert one.multi_get(keys) == values[::-1]
    assert scanned(store) == set(keys)


@pytest.mark.parametrize("groups", [1, 2, 64])
def test_chunks_of_many_sizes_come_back_unchanged(cluster_url, groups):
    store = opened(cluster_url, buckets=groups)
    move(store, OPEN)
    one = store.writer(OPEN)
    for size in (1, 2, 9, 10, 100, 1999, 2000, 2001, 5000):  # around what Lua unpacks at once
        keys = [f"{'k' * (at % 23)}{at}" for at in range(size)]
        values = [b"v" * (at % 101) for at in range(size)]
        one.multi_put(keys, values)
        assert one.multi_get(keys[::-1]) == values[::-1]


def test_what_cannot_be_stored_is_refused_before_anything_is_sent(cluster_url):
    store = opened(cluster_url, max_value_bytes=10)
    move(store, OPEN)
    for one in (store, store.writer(OPEN)):
        with pytest.raises(TooLargeError, match="'b' has 11 bytes"):
            one.multi_put(["a", "b"], [b"1", b"v" * 11])
        with pytest.raises(KeyEncodingError, match=r"\\ud800"):
            one.multi_put(["a", "\ud800"], [b"1", b"2"])
        with pytest.raises(UsageError, match="2 keys but 1 values"):
            one.multi_put(["a", "b"], [b"1"])
    assert store.multi_get(["a", "b"]) == [None, None]


def test_redis_keys_are_laid_out_as_documented(store, prefix, side_door):
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    store.writer(attempt.token).multi_put(["user-42"], [b"[1000,1,null]"])
    store.claim(1000, 3, "me")
    store.keep_report(b"r", 9)
    names = {key.decode().removeprefix(prefix) for key in side_door.scan_iter(f"{prefix}*")}
    fences = {name for name in names if name.endswith("fence")}
    assert fences == {f"visits!{{{number}}}fence" for number in range(64)}
    (record,) = (name for name in names if name.startswith("visits:"))
    group = int(record.split("{")[1].split("}")[0])
    assert record == f"visits:{{{group}}}:user-42"
    assert names - fences - {record} == {f"{{visits}}!{one}" for one in ("ledger", "buckets", "claims", "reports")}
    fence = f"1:1000:{attempt.token.nonce}".encode()
    assert side_door.get(f"{prefix}visits!{{{group}}}fence") == fence
    commit(ledger, attempt)
    assert side_door.get(f"{prefix}visits!{{{group}}}fence") == fence + b":closed"
    assert side_door.get(f"{prefix}{{visits}}!buckets") == b"64"
    assert side_door.cluster_keyslot(f"{prefix}{record}") == store._groups[group].slot


def test_states_and_prefixes_do_not_mix(cluster_url):
    stores = [opened(cluster_url, state=state) for state in ("a", "aa", "a.b")] + [
        opened(cluster_url + "more", state="a")
    ]
    for at, one in enumerate(stores):
        one.multi_put(["k"], [b"%d" % at])
        move(one, FenceToken(1, at))
    for at, one in enumerate(stores):
        assert one.multi_get(["k"]) == [b"%d" % at]
        assert scanned(one) == {"k"}
        one.writer(FenceToken(1, at)).multi_put(["k"], [b"%d" % at])


@pytest.mark.parametrize("name", ["a:b", "a!ledger", "a{b}", "}"])
def test_a_state_name_that_could_be_anothers_key_or_choose_a_slot_is_refused(cluster_url, name):
    with pytest.raises(ConfigurationError, match="cannot name a state"):
        opened(cluster_url, state=name)


def test_records_expire_from_their_last_write_and_nothing_else_does(cluster_url, prefix, side_door):
    store = opened(cluster_url, ttl=100.5)
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    store.writer(attempt.token).multi_put(KEYS[:50], [b"v"] * 50)
    commit(ledger, attempt)
    ttls = {key: side_door.pttl(key) for key in side_door.scan_iter(f"{prefix}*")}
    assert len(ttls) == 50 + 64 + 2
    for key, ttl in ttls.items():
        assert 60_000 < ttl <= 100_500 if b"visits:" in key else ttl == -1


def test_a_vacuum_keeps_the_time_that_a_record_has_left(cluster_url, prefix, side_door):
    store = opened(cluster_url, ttl=100)
    move(store, OPEN)
    store.writer(OPEN).multi_put(["a", "b"], [b"v", b"v"])
    opened(cluster_url).writer(OPEN).multi_rewrite(["a", "b", "c"], [b"w", None, b"w"])
    assert store.multi_get(["a", "b", "c"]) == [b"w", None, None]
    (key,) = side_door.scan_iter(f"{prefix}visits:*")
    assert 0 < side_door.pttl(key) <= 100_000


# Round trips


class Sent:
    """How often each node was sent something, and how long that was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: Counter[int] = Counter()
        send = Connection.send_packed_command

        def counted(conn: Any, command: Any, **options: Any) -> Any:
            self.times[conn.port] += 1
            return send(conn, command, **options)

        monkeypatch.setattr(Connection, "send_packed_command", counted)


def commands_of(cluster: RedisCluster) -> list[Counter[str]]:
    """How often each master ran what, since it started."""
    found = []
    for node in cluster.masters:
        with node.client() as client:
            stats = client.info("commandstats")
        found.append(Counter({name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()}))
    return found


def test_a_chunk_is_one_round_trip_to_each_node_and_one_command_for_each_slot_group(store, redis_cluster, monkeypatch):
    keys = [f"user-{at}" for at in range(2000)]
    one = store.writer(OPEN)
    one.multi_put(keys, [b"v"] * 2000)  # every connection is there
    sent = Sent(monkeypatch)
    for call, expected in (
        (lambda: one.multi_get(keys), {"get": 64, "mget": 64}),
        (lambda: one.multi_put(keys, [b"v"] * 2000), {"eval": 64, "get": 64, "mset": 64}),  # the script's own too
        (lambda: store.multi_get(keys), {"mget": 64}),
    ):
        before = commands_of(redis_cluster)
        sent.times.clear()
        call()
        assert sent.times == {node.port: 1 for node in redis_cluster.masters}
        ran = sum((now - then for now, then in zip(commands_of(redis_cluster), before, strict=True)), Counter())
        assert {
            name: times for name, times in ran.items() if name not in ("info", "hello", "command", "client")
        } == expected


def test_a_batch_costs_a_few_round_trips_to_each_node(store, cluster_url, redis_cluster, monkeypatch):
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    commit(ledger, attempt)
    sent = Sent(monkeypatch)
    attempt = ledger.begin(1)
    assert max(sent.times.values()) <= 4  # fences read, ledger read and written, fences raised
    sent.times.clear()
    commit(ledger, attempt)
    assert max(sent.times.values()) <= 3  # fences closed, ledger read and written
    sent.times.clear()
    store.claim(1, 0, "me")
    assert sum(sent.times.values()) == 1


# The fence


@pytest.mark.parametrize("ttl", [None, 100])
def test_an_attempt_that_is_not_the_fence_writes_nothing(cluster_url, ttl):
    store = opened(cluster_url, ttl=ttl)
    for fence in (OPEN, LATER, FenceToken(1, 7, nonce="0b"), FenceToken(2, 9), LATER._replace(closed=True, txid=10)):
        move(store, fence)
        for token in (
            FenceToken(1, 7, nonce="00"),
            FenceToken(1, 6, nonce="0a"),
            fence._replace(closed=not fence.closed),
        ):
            one = store.writer(token)
            for call in (
                lambda one=one: one.multi_put(["a", "b"], [b"1", b"2"]),
                lambda one=one: one.multi_rewrite(["a", "b"], [b"1", None]),
                lambda one=one: one.multi_get(["a", "b"]),
            ):
                with pytest.raises(FencedError, match=f"txid {token.txid} of epoch {token.epoch}") as caught:
                    call()
                assert caught.value.txid == token.txid
    assert store.multi_get(["a", "b"]) == [None, None]


def test_a_closed_token_lets_nobody_write(store):
    closed = OPEN._replace(closed=True)
    move(store, closed)
    one = store.writer(closed)
    for call in (lambda: one.multi_put(["a"], [b"1"]), lambda: one.multi_get(["a"])):
        with pytest.raises(FencedError):
            call()
    assert store.multi_get(["a"]) == [None]


def test_a_fence_that_moves_between_get_and_put_stops_the_put_in_every_slot_group(store, cluster_url):
    one = store.writer(OPEN)
    one.multi_get(KEYS)
    move(opened(cluster_url), LATER)
    with pytest.raises(FencedError):
        one.multi_put(KEYS, [b"1"] * len(KEYS))
    assert store.multi_get(KEYS) == [None] * len(KEYS)


def test_without_a_fence_nobody_writes(cluster_url):
    store = opened(cluster_url)
    with pytest.raises(FencedError, match="gone"):
        store.writer(OPEN).multi_put(["a"], [b"1"])
    assert store.multi_get(["a"]) == [None]


def test_a_move_that_comes_late_moves_nothing(store):
    before = [one.token for one in store.fences()]
    move(store, LATER)
    assert {one.token for one in store.move_fences(before, OPEN._replace(nonce="0c"))} == {LATER}
    assert {one.token for one in store.move_fences([None] * 64, OPEN)} == {LATER}


def test_a_fence_that_holds_something_else_is_an_error(store, prefix, side_door):
    side_door.set(f"{prefix}visits!{{3}}fence", "mine")
    with pytest.raises(CorruptRecordError, match="fence"):
        store.fences()


# The ledger and claims


def test_of_two_drivers_with_the_same_version_one_changes_the_ledger(cluster_url):
    one, other = opened(cluster_url), opened(cluster_url)
    assert one.load() is None
    version = one.swap(b"1", None, OPEN)
    assert one.load() == other.load() == (b"1", version)
    assert other.swap(b"mine", None, LATER) is None
    newer = other.swap(b"2", version, OPEN)
    assert newer is not None
    assert one.swap(b"mine", version, LATER) is None
    assert one.load() == (b"2", newer)
    assert one.multi_get_with_ledger(["a"]) == (b"2", [None], b"2")


def test_no_change_of_the_ledger_is_lost_among_many_drivers(cluster_url):
    rounds, drivers = 20, 4

    def count_up() -> None:
        store = opened(cluster_url)
        for _ in range(rounds):
            while True:
                found = store.load()
                number = 0 if found is None else int(found[0])
                if store.swap(b"%d" % (number + 1), None if found is None else found[1], OPEN) is not None:
                    break

    threads = [threading.Thread(target=count_up) for _ in range(drivers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened(cluster_url).load()[0] == b"%d" % (rounds * drivers)


def test_claims_outlive_the_begin_of_the_next_attempt_and_go_with_its_commit(store):
    assert store.claim(7, 0, "me") == "me"
    version = store.swap(b"1", None, LATER)
    assert store.claim(7, 0, "you") == "me"  # until its fences are closed, a task of 7 may still write
    assert store.claim(8, 0, "me") == "me"
    assert store.claim(9, 0, "me") == "me"
    assert store.swap(b"2", version, FenceToken(1, 8, closed=True)) is not None
    assert [store.claim(txid, 0, "you") for txid in (7, 8, 9)] == ["you", "you", "me"]


def test_another_number_of_slot_groups_is_refused_before_anything_is_written_or_read(store, cluster_url):
    commit(*OneLedger.open_and_begin(store, OPENING, 0))
    other, backend = opened(cluster_url, buckets=32), resolve(f"{cluster_url}&buckets=32")
    record = store.load()[0]
    for call in (
        lambda: OneLedger.open_and_begin(other, OPENING, 1),
        lambda: other.swap(b"x", None, OPEN),
        lambda: open_reader(backend, "visits"),
        lambda: vacuum(backend, "visits"),
    ):
        with pytest.raises(ConfigurationError, match="64 slot groups, and the URL says 32"):
            call()
    assert store.load()[0] == record
    store._at_ledger(command(b"DEL", store._ledger))
    with pytest.raises(ConfigurationError, match="64 slot groups, and the URL says 32.*delete the key"):
        other.load()  # else adopt and drop would find a part of the records
    assert store.load() is None


# Whole batches


def test_batches_are_counted_and_read_as_a_whole(store, cluster_url):
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    count(store, ledger, attempt, KEYS)
    commit(ledger, attempt)
    dead = ledger.begin(1)
    count(store, ledger, dead, KEYS[:200])
    with open_reader(cluster_url, "visits") as reader:
        assert reader.multi_get(KEYS) == [{"n": 1}] * len(KEYS)
        attempt = ledger.begin(1)
        with pytest.raises(FencedError):
            count(store, ledger, dead, KEYS[200:])
        count(store, ledger, attempt, KEYS[100:])
        assert reader.multi_get(KEYS) == [{"n": 1}] * len(KEYS)
        commit(ledger, attempt)
        assert reader.multi_get([*KEYS, "no"]) == [{"n": 1}] * 100 + [{"n": 2}] * 200 + [None]
        done = vacuum(cluster_url, "visits")
        assert (done.scanned, done.rewritten) == (300, 100)
        assert dict(reader.scan(50)) == {(key,): {"n": 1 if at < 100 else 2} for at, key in enumerate(KEYS)}
        ledger, attempt = OneLedger.open_and_begin(store, OPENING, 2)
        count(store, ledger, attempt, KEYS)
        commit(ledger, attempt)
        assert reader.get("user-299") == {"n": 3}


def test_a_node_that_lost_a_committed_batch_is_noticed(store, prefix, side_door):
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    fence = f"{prefix}visits!{{5}}fence"
    open_then = side_door.get(fence)
    commit(ledger, attempt)
    side_door.set(fence, open_then)  # as of a replica that lagged behind
    with pytest.raises(MissingBatchesError, match="fence 5"):
        OneLedger.open_and_begin(store, OPENING, 1)


def test_a_ledger_that_was_put_back_alone_is_noticed(store, prefix, side_door):
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    commit(ledger, attempt)
    saved = store.load()[0]
    for batch_id in (1, 2):
        commit(ledger, ledger.begin(batch_id))
    side_door.set(f"{prefix}{{visits}}!ledger", saved)
    with pytest.raises(StaleBatchError, match="older copy"):
        OneLedger.open_and_begin(store, OPENING, 1)


# A cluster that changes


def of_slot(cluster: RedisCluster, slot: int) -> tuple[RedisServer, RedisServer]:
    """Its master, and another one."""
    share = -(-16384 // 3)
    return cluster.masters[slot // share], cluster.masters[(slot // share + 1) % 3]


@pytest.fixture
def moving(redis_cluster: RedisCluster, store: RedisClusterStore) -> Iterator[tuple[int, RedisServer, RedisServer]]:
    """A slot with records, its master, and where it may go. It is where it was afterwards."""
    store.writer(OPEN).multi_put(KEYS, [b"old"] * len(KEYS))
    slot = store._groups[5].slot
    source, target = of_slot(redis_cluster, slot)
    yield slot, source, target
    redis_cluster.end_move(slot, source, target)
    redis_cluster.move_slot(slot, target, source)


def records_in(store: RedisClusterStore) -> list[bytes]:
    """The Redis keys of the records of slot group 5."""
    (keys,) = (one.keys for one in by_slot_group(KEYS, 64) if one.group == 5)
    return [store._name + f":{{5}}:{key}".encode() for key in keys]


def test_a_slot_that_moves_between_get_and_put_is_followed(store, redis_cluster, moving):
    one = store.writer(OPEN)
    assert one.multi_get(KEYS) == [b"old"] * len(KEYS)
    redis_cluster.move_slot(*moving)
    one.multi_put(KEYS, [b"new"] * len(KEYS))
    assert store.multi_get(KEYS) == [b"new"] * len(KEYS)
    store.multi_put(KEYS, [b"bare"] * len(KEYS))
    assert store.multi_get(KEYS) == [b"bare"] * len(KEYS)


def test_a_slot_whose_keys_have_all_gone_is_asked_for_at_the_other_node(store, redis_cluster, moving):
    redis_cluster.begin_move(*moving)
    while redis_cluster.move_keys(*moving):
        pass
    one = store.writer(OPEN)
    assert one.multi_get(KEYS) == [b"old"] * len(KEYS)
    one.multi_put(KEYS, [b"new"] * len(KEYS))
    assert store.multi_get(KEYS) == [b"new"] * len(KEYS)
    assert {fence.token for fence in store.fences()} == {OPEN}
    move(store, LATER)
    with pytest.raises(FencedError):
        one.multi_put(KEYS, [b"late"] * len(KEYS))
    assert store.multi_get(KEYS) == [b"new"] * len(KEYS)


def test_a_slot_of_which_half_has_gone_is_waited_for(store, redis_cluster, moving):
    redis_cluster.begin_move(*moving)
    redis_cluster.move_keys(*moving, records_in(store)[:1])
    one = store.writer(OPEN)
    ending = threading.Timer(0.3, redis_cluster.end_move, moving)
    ending.start()
    one.multi_put(KEYS, [b"new"] * len(KEYS))
    ending.join()
    assert store.multi_get(KEYS) == [b"new"] * len(KEYS)


def test_a_slot_that_stays_half_way_is_a_clear_error(store, cluster_url, redis_cluster, moving):
    redis_cluster.begin_move(*moving)
    redis_cluster.move_keys(*moving, records_in(store)[:1])
    hasty = opened(cluster_url, retries=1)
    for call in (
        lambda: hasty.writer(OPEN).multi_put(KEYS, [b"new"] * len(KEYS)),
        lambda: hasty.writer(OPEN).multi_get(KEYS),
        lambda: hasty.multi_put(KEYS, [b"new"] * len(KEYS)),
    ):
        with pytest.raises(StoreUnavailableError, match="being rearranged"):
            call()


def test_an_attempt_during_which_a_slot_moved_is_begun_anew(store, cluster_url, redis_cluster):
    ledger, attempt = OneLedger.open_and_begin(opened(cluster_url), OPENING, 0)
    slot = store._groups[5].slot
    source, target = of_slot(redis_cluster, slot)
    redis_cluster.move_slot(slot, source, target)
    try:
        with pytest.raises(StoreRestartedError):
            commit(ledger, attempt)
        again = ledger.begin(0)
        commit(ledger, again)
    finally:
        redis_cluster.move_slot(slot, target, source)


def test_a_scan_during_which_a_slot_moved_is_no_scan(store, redis_cluster, moving):
    assert scanned(store, 100) == set(KEYS)
    pages = store.scan(10)
    next(pages)
    redis_cluster.move_slot(*moving)
    with pytest.raises(StoreUnavailableError, match="scan again"):
        list(pages)
    assert scanned(store, 100) == set(KEYS)


def test_a_scan_while_a_slot_is_on_the_move_is_no_scan(store, redis_cluster, moving):
    redis_cluster.begin_move(*moving)
    with pytest.raises(StoreUnavailableError, match="scan again"):
        list(store.scan(1000))


def test_a_master_that_fails_over_within_an_attempt_ends_it_and_the_next_one_counts_right(start_cluster):
    cluster = start_cluster(replicas=1)
    store = opened(cluster.url)
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    count(store, ledger, attempt, KEYS)
    commit(ledger, attempt)
    ledger_node = key_slot(b"visits") // -(-16384 // 3)
    for at in (one for one in range(3) if one != ledger_node):
        with cluster.masters[at].client() as client:
            assert client.wait(1, 60_000) == 1
    attempt = ledger.begin(1)
    count(store, ledger, attempt, KEYS[:100])
    failing = (ledger_node + 1) % 3
    with cluster.masters[failing].client() as client:
        assert client.wait(1, 60_000) == 1
    cluster.fail_over(failing)
    count(store, ledger, attempt, KEYS[100:])  # the fence came along, so the tasks can go on
    with pytest.raises(StoreRestartedError):
        commit(ledger, attempt)
    attempt = ledger.begin(1)
    count(store, ledger, attempt, KEYS)
    commit(ledger, attempt)
    with open_reader(cluster.url, "visits") as reader:
        assert reader.multi_get(KEYS) == [{"n": 2}] * len(KEYS)


def test_a_master_that_goes_away_for_good_is_a_clear_error_in_bounded_time(start_cluster):
    cluster = start_cluster()
    store = opened(cluster.url, retries=3)
    move(store, OPEN)
    cluster.masters[1].kill()
    for call in (
        lambda: store.writer(OPEN).multi_put(KEYS, [b"1"] * len(KEYS)),
        lambda: store.multi_get(KEYS),
        store.fences,
        lambda: list(store.scan(10)),
    ):
        start = time.monotonic()
        with pytest.raises(StoreUnavailableError) as caught:
            call()
        assert time.monotonic() - start < 20
        assert str(cluster.masters[0].port) in str(caught.value)
    fresh = RedisClusterBackend.from_url(f"redis+cluster://127.0.0.1:{cluster.masters[1].port}?retries=0").open(
        "visits"
    )
    with pytest.raises(StoreUnavailableError):
        fresh.load()


def test_any_node_that_lives_is_enough_to_find_the_others(redis_cluster):
    url = f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{redis_cluster.masters[2].port}?prefix={token_hex(4)}"
    assert opened(url).multi_get(KEYS) == [None] * len(KEYS)


def test_a_server_that_is_no_cluster_says_so(start_redis):
    server = start_redis()
    with pytest.raises(Exception, match="cluster support disabled"):
        opened(server.url.replace("redis://", "redis+cluster://").removesuffix("/0")).load()


def test_a_full_node_refuses_a_put_and_takes_it_later(start_cluster):
    cluster = start_cluster(maxmemory="100mb", maxmemory_policy="noeviction")
    store = opened(cluster.url)
    move(store, OPEN)
    for node in cluster.masters:
        with node.client() as client:
            client.config_set("maxmemory", "1mb")
    with pytest.raises(StoreFullError, match="maxmemory"):
        store.writer(OPEN).multi_put(KEYS, [b"1"] * len(KEYS))
    assert store.multi_get(KEYS) == [None] * len(KEYS)
    for node in cluster.masters:
        with node.client() as client:
            client.config_set("maxmemory", "0")
    store.writer(OPEN).multi_put(KEYS, [b"1"] * len(KEYS))


def test_a_user_of_an_acl_needs_what_is_documented(start_cluster):
    cluster = start_cluster()
    rights = ["+get", "+mget", "+set", "+mset", "+del", "+hsetnx", "+hget", "+hkeys", "+hdel", "+eval", "+scan"]
    rights += [
        "+exists",
        "+type",
        "+lpush",
        "+ltrim",
        "+lrange",
        "+asking",
        "+info",
        "+cluster|slots",
        "+cluster|nodes",
    ]
    reads = ["+get", "+mget", "+scan", "+lrange", "+asking", "+info", "+cluster|slots", "+cluster|nodes"]
    for node in cluster.masters:
        with node.client() as admin:
            for user, allowed in (("job", rights), ("service", reads)):
                admin.execute_command("ACL", "SETUSER", user, "on", ">s3cret", "~*", *allowed)
    url = cluster.url.replace("://", "://job:s3cret@")
    job = opened(url)
    ledger, attempt = OneLedger.open_and_begin(job, OPENING, 0)
    job.claim(attempt.txid, 0, "me")
    count(job, ledger, attempt, KEYS)
    commit(ledger, attempt)
    job.keep_report(b"r", 9)
    vacuum(url, "visits")
    service = cluster.url.replace("://", "://service:s3cret@")
    with open_reader(service, "visits") as reader:
        assert dict(reader.scan()) == {(key,): {"n": 1} for key in KEYS}
    with pytest.raises(StoreAuthError) as caught:
        opened(service).writer(attempt.token).multi_put(["a"], [b"1"])
    assert "s3cret" not in str(caught.value)
    with pytest.raises(StoreAuthError, match="password"):
        opened(cluster.url.replace("://", "://job:wr0ng@")).load()


def test_a_checkup_looks_at_each_master(store, redis_cluster):
    store.writer(OPEN).multi_put(KEYS, [b"1"] * len(KEYS))
    found = store.checkup(86_400)
    for node in redis_cluster.masters:
        assert any(one.subject == f"127.0.0.1:{node.port} persistence" for one in found)


def test_a_fork_and_a_close_disturb_nobody(store, cluster_url):
    store.multi_put(["a"], [b"1"])
    other = pickle.loads(pickle.dumps(resolve(cluster_url))).open("visits")
    assert other.multi_get(["a"]) == [b"1"]
    store.close()
    store.close()
    assert other.multi_get(["a"]) == store.multi_get(["a"]) == [b"1"]


# URLs


def test_a_url_says_it_all():
    url = "rediss+cluster://me:p%40ss@a.example.org:7000,[::1],b?prefix=app/&buckets=16&retries=0&ssl_cert_reqs=none"
    backend = resolve(url)
    assert backend == RedisClusterBackend(
        nodes=(("a.example.org", 7000), ("::1", 6379), ("b", 6379)),
        username="me",
        password="p@ss",
        tls=True,
        prefix="app/",
        buckets=16,
        retries=0,
        ssl_cert_reqs="none",
    )
    assert "p@ss" not in repr(backend)
    assert "p%40ss" not in repr(backend)
    assert hash(backend) == hash(resolve(url))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+cluster://h/1", "no URL like redis\\+cluster"),
        ("redis+cluster://h:hunter2", "no URL like"),
        ("redis+cluster://h?buckets=0", "buckets is from 1 to 1024"),
        ("redis+cluster://h?buckets=2000", "buckets"),
        ("redis+cluster://h?layout=hash", "no parameter 'layout'"),
        ("redis+cluster://h:0", "ports from 1"),
        ("redis+cluster://h?ssl_cert_reqs=none", "rediss://"),
    ],
)
def test_a_url_that_cannot_be_is_refused_with_the_reason(url, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        resolve(url)
    assert "hunter2" not in str(caught.value)


def test_a_repr_can_be_read_back():
    for url in ("redis+cluster://h:1,[::1]:2?buckets=8", "rediss+cluster://a:6379?ssl_cert_reqs=none"):
        assert resolve(repr(resolve(url)).split("'")[1]) == resolve(url)


def test_the_cluster_of_these_tests_starts_in_a_few_seconds_and_ends_with_all_its_servers():
    start = time.monotonic()
    with RedisCluster() as cluster:
        took = time.monotonic() - start
        ports = [node.port for node in cluster.masters]
    assert took < 15  # three on a machine with nothing else to do
    for port in ports:
        wait_until(lambda port=port: not _answers(port), "the server is gone")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_spec_takes_the_chunks_that_its_store_is_best_with():
    assert opaque("redis+cluster://localhost:7000").chunk_size == 10_000
    assert opaque("redis+cluster://localhost:7000", chunk_size=5).chunk_size == 5
    assert opaque("redis://localhost").chunk_size == opaque("memory://").chunk_size == 2000
    assert pickle.loads(pickle.dumps(opaque("redis+cluster://localhost:7000"))).chunk_size == 10_000
