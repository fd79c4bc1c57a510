"""What is Redis' own in its store, on a real server; the rest is in test_contract_redis.py."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import quote

import pytest
import redis
import trustme
import uvloop
from one_ledger import OneLedger
from openings import opening
from servers import CuttingProxy, Forwarder, GivenRedis, TlsFront, free_port, wait_until

from mapstate import opaque, open_reader
from mapstate.backends import resolve
from mapstate.backends.redis import RedisBackend, RedisStore, connection
from mapstate.capabilities import FenceToken
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    FencedError,
    KeyEncodingError,
    MapStateError,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreRestartedError,
    StoreUnavailableError,
    TooLargeError,
)
from mapstate.event_loop import on_loop
from mapstate.protocol.ledger_record import Commit

pytestmark = pytest.mark.redis

OPENING = opening()

OPEN = FenceToken(1, 7)
LATER = FenceToken(1, 8)
SECRET = "s3cret/:@#?%é"


def opened(url: str, state: str = "visits", ttl: float | None = None, **changes: Any) -> RedisStore:
    query = "&".join(f"{name}={value}" for name, value in changes.items())
    return RedisBackend.from_url(f"{url}{'&' if '?' in url else '?'}{query}").open(state, ttl=ttl)


def move(store: RedisStore, fence: FenceToken) -> None:
    """Moves the fence, as a driver does: with the ledger."""
    found = store.load()
    assert store.swap(f"ledger at {fence}".encode(), None if found is None else found[1], fence) is not None


def writer(store: RedisStore, token: FenceToken = OPEN) -> Any:
    return store.writer(token)


@pytest.fixture
def store(redis_url: str) -> RedisStore:
    one = opened(redis_url)
    move(one, OPEN)
    return one


@pytest.fixture
def proxy(redis_url: str) -> Iterator[CuttingProxy]:
    with CuttingProxy(redis_url) as one:
        yield one


@pytest.fixture
def side_door(redis_server: GivenRedis) -> Iterator[redis.Redis]:
    with redis_server.client() as client:
        yield client


@pytest.fixture
def prefix(redis_url: str) -> str:
    return redis_url.rpartition("prefix=")[2]


def scanned(store: RedisStore, page_size: int = 1000) -> set[str]:
    """The keys of a scan; while Redis grows its table, SCAN gives some of them twice."""
    return {key for page in store.scan(page_size) for key in page}


def both(store: RedisStore) -> list[Any]:
    return [store, writer(store)]


# The map


def test_no_keys_ask_nothing_of_the_server():
    store = opened(f"redis://127.0.0.1:{free_port()}", retries=0)
    for one in both(store):
        assert one.multi_get([]) == []
        one.multi_put([], [])


def test_keys_of_any_text_and_records_of_any_bytes_come_back_unchanged(store, redis_url):
    keys = ["", " ", ":", "a:b", "*", "é", "\U0001f600", "\r\n$3\r\n", "\0", "%b%d", "x" * 100_000, "\\N", "日本"]
    values = [b"", b"\r\n", b"\0", bytes(range(256)), b"$-1\r\n", b"%b", b"v" * 1_000_000, b"+OK\r\n"]
    values = [values[at % len(values)] + b"%d" % at * (at % 2) for at in range(len(keys))]
    for one in (*both(store), opened(redis_url, ttl=100)):
        one.multi_put(keys, values)
        assert one.multi_get(keys) == values
    assert scanned(store) == set(keys)


def test_chunks_of_many_sizes_come_back_unchanged(store):
    one = writer(store)
    for count in (1, 2, 9, 10, 99, 100, 1000, 5000):
        keys = [f"{'k' * (at % 23)}{at}" for at in range(count)]
        values = [b"v" * (at % 101) for at in range(count)]
        one.multi_get(keys)
        one.multi_put(keys, values)
        assert one.multi_get(keys) == values
        assert one.multi_get(keys[::-1]) == values[::-1]


def test_a_key_that_is_not_unicode_is_refused(store):
    for one in both(store):
        with pytest.raises(KeyEncodingError, match=r"\\ud800"):
            one.multi_get(["a", "\ud800"])
        with pytest.raises(KeyEncodingError, match=r"\\ud800"):
            one.multi_put(["a", "\ud800"], [b"1", b"2"])
    assert store.multi_get(["a"]) == [None]


def test_redis_keys_are_laid_out_as_documented(store, prefix, side_door):
    writer(store).multi_put(["user-42"], [b"[7,1,null]"])
    store.claim(7, 3, "me")
    assert side_door.get(f"{prefix}visits:user-42") == b"[7,1,null]"
    assert side_door.get(f"{prefix}visits!ledger") == store.load()[0]
    assert side_door.get(f"{prefix}visits!fence") == b"1:7"
    assert side_door.hgetall(f"{prefix}visits!claims") == {b"7/3": b"me"}
    assert side_door.get(f"{prefix}visits!layout") == b"string"
    assert len(set(side_door.scan_iter(f"{prefix}*"))) == 5
    move(store, FenceToken(1, 7, closed=True))
    assert side_door.get(f"{prefix}visits!fence") == b"1:7:closed"


def test_states_and_prefixes_do_not_mix(redis_url):
    stores = [
        opened(redis_url, "a"),
        opened(redis_url, "aa"),
        opened(redis_url, "a.b"),
        opened(redis_url + "more", "a"),
    ]
    for at, one in enumerate(stores):
        one.multi_put(["k"], [b"%d" % at])
        move(one, FenceToken(1, at))
    for at, one in enumerate(stores):
        assert one.multi_get(["k"]) == [b"%d" % at]
        assert scanned(one) == {"k"}
        writer(one, FenceToken(1, at)).multi_put(["k"], [b"%d" % at])


@pytest.mark.parametrize("name", ["a:b", "a!ledger", ":"])
def test_a_state_name_that_could_be_anothers_key_is_refused(redis_url, name):
    with pytest.raises(ConfigurationError, match="cannot name a state"):
        opened(redis_url, name)


@pytest.mark.parametrize("limit", [10, 1000])
def test_what_is_too_large_is_refused_before_anything_is_sent(proxy, limit):
    store = opened(proxy.url, max_value_bytes=limit)
    move(store, OPEN)
    one = writer(store)
    one.multi_get(["a"])
    sent = proxy.requests
    for put in (store.multi_put, one.multi_put):
        with pytest.raises(TooLargeError, match=rf"'visits'.*'b'.*{limit + 1} bytes.*{limit}") as caught:
            put(["a", "b"], [b"1", b"v" * (limit + 1)])
        assert caught.value.key == "b"
        with pytest.raises(TooLargeError, match=rf"'visits'.*{limit + 1} bytes"):
            put(["a", "k" * (limit + 1)], [b"1", b"2"])
    assert proxy.requests == sent
    one.multi_put(["a", "b"], [b"1", b"v" * limit])
    assert store.multi_get(["b"]) == [b"v" * limit]


def test_a_put_beyond_what_redis_takes_at_once_says_so(store, monkeypatch):
    monkeypatch.setattr("mapstate.backends.redis.layout._MOST_BYTES", 1000)
    with pytest.raises(TooLargeError, match="chunk_size"):
        writer(store).multi_put(["a", "b"], [b"v" * 600, b"v" * 600])
    assert store.multi_get(["a", "b"]) == [None, None]


def test_a_put_of_more_words_than_the_server_takes_says_so(store, side_door):
    keys, most = [f"user-{at}" for at in range(600_000)], "1,048,576 words"
    before_7 = int(side_door.info("server")["redis_version"].split(".")[0]) < 7
    with pytest.raises(StoreUnavailableError, match=most) if before_7 else nullcontext():
        store.multi_put(keys, [b"x"] * len(keys))
    assert store.multi_get([keys[0], keys[-1]]) == [None if before_7 else b"x"] * 2


# The fence


@pytest.mark.parametrize(
    "fence", [FenceToken(1, 8), FenceToken(2, 7), FenceToken(1, 7, closed=True), FenceToken(2, 6, closed=True)]
)
@pytest.mark.parametrize("ttl", [None, 100])
def test_an_attempt_that_is_not_the_fence_writes_nothing(redis_url, fence, ttl):
    store = opened(redis_url, ttl=ttl)
    move(store, OPEN)
    one, between = writer(store), writer(store)
    between.multi_get(["a"])
    move(opened(redis_url), fence)
    for put in (one, between):
        with pytest.raises(FencedError, match=f"txid 7 of epoch 1.*at {fence.epoch}:{fence.txid}") as caught:
            put.multi_put(["a", "b"], [b"1", b"2"])
        assert (caught.value.txid, caught.value.state) == (7, "visits")
        with pytest.raises(FencedError):
            put.multi_put(["a", "b"], [b"1", b"2"])
    assert store.multi_get(["a", "b"]) == [None, None]


def test_a_fenced_attempt_learns_it_from_its_next_get(store, redis_url):
    one = writer(store)
    one.multi_put(["a"], [b"1"])
    move(opened(redis_url), LATER)
    with pytest.raises(FencedError):
        one.multi_get(["a"])


def test_a_fence_that_is_flushed_between_get_and_put_stops_the_put(store, prefix, side_door):
    one = writer(store)
    one.multi_get(["a"])
    side_door.delete(f"{prefix}visits!fence")
    with pytest.raises(FencedError, match="gone"):
        one.multi_put(["a"], [b"1"])
    assert store.multi_get(["a"]) == [None]


def test_a_fence_that_is_touched_and_not_moved_does_not_stop_the_put(store, prefix, side_door):
    one = writer(store)
    one.multi_get(["a"])
    side_door.set(f"{prefix}visits!fence", "1:7")
    one.multi_put(["a"], [b"1"])
    assert store.multi_get(["a"]) == [b"1"]


def test_where_an_acl_forbids_multi_nothing_is_written_unguarded(store, side_door, redis_url):
    user = f"no-multi-{os.getpid()}"
    side_door.execute_command("ACL", "SETUSER", user, "on", ">pw", "~*", "+@all", "-multi")
    try:
        limited = replace(resolve(redis_url), username=user, password="pw").open("visits")
        assert limited.load() == store.load()
        one = writer(limited)
        with pytest.raises(StoreAuthError):
            one.multi_put(["a"], [b"1"])
        with pytest.raises(StoreAuthError):
            one.multi_get(["a"])
        with pytest.raises(StoreAuthError):
            limited.swap(b"mine", store.load()[1], LATER)
        before = store.load()
        with pytest.raises(StoreAuthError):
            limited.probe()
        assert (store.load(), store.multi_get(["-"])) == (before, [None])
        assert store.multi_get(["a"]) == [None]
        assert store.load()[0] != b"mine"
        writer(store).multi_put(["a"], [b"1"])  # the fence has not moved
    finally:
        side_door.execute_command("ACL", "DELUSER", user)


def test_a_writer_holds_a_connection_only_from_get_to_put(proxy):
    store = opened(proxy.url)
    move(store, OPEN)
    for at in range(5):
        one = writer(store)
        one.multi_get(["a"])
        one.multi_put(["a"], [b"%d" % at])
        one = writer(store)
        one.multi_get(["a"])
        one.close()
        one.close()
        with pytest.raises(FencedError):
            writer(store, LATER).multi_get(["a"])
    assert proxy.accepted == 1


def test_a_writer_that_is_dropped_between_get_and_put_leaves_no_connection_behind(store, redis_url):
    writer(store).multi_get(["a"])
    pool = resolve(redis_url).pool()
    assert not pool._in_use_connections


def test_states_that_lie_elsewhere_on_one_server_share_its_connections(redis_url):
    backends = [
        resolve(redis_url),
        resolve(redis_url.replace("prefix=", "prefix=other-")),
        resolve(f"{redis_url}&layout=hash"),
    ]
    assert len({id(one.pool()) for one in backends}) == 1
    assert resolve(f"{redis_url}&socket_timeout=1").pool() is not backends[0].pool()


# The ledger


def test_a_swap_that_loses_keeps_the_claims_and_one_that_wins_drops_them(store):
    store.claim(7, 0, "me")
    assert store.swap(b"x", b"another version", LATER) is None
    assert store.claim(7, 0, "you") == "me"
    move(store, LATER)
    assert store.claim(7, 0, "you") == "you"


def run_at_once(calls: list[Callable[[], object]]) -> None:
    """Runs them in threads; raises what one of them raised."""
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_a_ledger_that_is_no_text_in_redis_is_an_error_and_not_absent(store, prefix, side_door):
    side_door.delete(f"{prefix}visits!ledger")
    side_door.lpush(f"{prefix}visits!ledger", "x")
    for call in (store.load, lambda: store.swap(b"x", None, LATER), lambda: store.multi_get_with_ledger(["a"])):
        with pytest.raises(StoreError, match="WRONGTYPE"):
            call()


def test_claims_that_are_no_hash_are_an_error_inside_exec_and_not_a_holder(store, prefix, side_door):
    side_door.set(f"{prefix}visits!claims", "x")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        store.claim(7, 0, "me")


def test_a_connection_is_not_used_again_after_an_error_and_not_kept_either(proxy, prefix, side_door):
    store = opened(proxy.url, "visits")
    side_door.set(f"{prefix}visits!claims", "x")
    for times in (1, 2, 3):
        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.claim(7, 0, "me")
        assert proxy.accepted == times
        assert not resolve(proxy.url).pool()._in_use_connections


# TTL


@pytest.mark.parametrize("fenced", [True, False])
def test_records_expire_from_their_last_write_and_nothing_else_does(redis_url, prefix, side_door, fenced):
    store = opened(redis_url, ttl=100.5)
    move(store, OPEN)
    one = writer(store) if fenced else store
    store.claim(7, 0, "me")
    keys = [f"k{at}" for at in range(50)]
    for _ in range(2):
        started = time.monotonic()
        one.multi_put(keys, [b"v"] * 50)
        left = [side_door.pttl(f"{prefix}visits:{key}") for key in keys]
        passed = (time.monotonic() - started) * 1000
        assert max(left) <= 100_500
        assert min(left) >= 100_500 - passed - 2  # both clocks tick in milliseconds
        for key in keys:
            side_door.pexpire(f"{prefix}visits:{key}", 60_000)
    assert one.multi_get(keys) == [b"v"] * 50
    for name in ("ledger", "fence", "claims", "layout"):
        assert side_door.pttl(f"{prefix}visits!{name}") == -1


def test_without_a_ttl_records_stay(store, prefix, side_door):
    writer(store).multi_put(["a"], [b"1"])
    assert side_door.pttl(f"{prefix}visits:a") == -1


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), 1e11])
def test_a_ttl_that_cannot_be_is_refused(redis_url, ttl):
    with pytest.raises(ConfigurationError, match="ttl"):
        opened(redis_url, ttl=ttl)


@pytest.mark.parametrize("ttl", [0.0001, 1e10])
def test_the_shortest_and_the_longest_ttl_are_taken(redis_url, ttl):
    opened(redis_url, ttl=ttl).multi_put(["a"], [b"1"])


# Scan


def test_a_scan_lists_every_key_of_the_state_and_nothing_else(redis_url, redis_server):
    store = opened(redis_url)
    keys = {f"user-{at}" for at in range(2500)} | {"é", "a:b", "*"}
    store.multi_put(sorted(keys), [b"v"] * len(keys))
    for other in ("visits2", "visit", "visits.x"):
        opened(redis_url, other).multi_put(["no", "visits:no"], [b"v"] * 2)
    move(store, OPEN)
    store.claim(7, 0, "me")
    for size in (1, 100, 10_000):
        assert scanned(store, size) == keys
        assert all(store.scan(size))
    assert len(list(store.scan(100))) > 10


def test_pattern_characters_in_a_name_are_just_characters(redis_url):
    odd = opened(redis_url, "v[ab]*?\\^s")
    odd.multi_put(["k"], [b"v"])
    for name in ("va", "vb", "v[ab]xx\\^s"):
        opened(redis_url, name).multi_put(["no"], [b"v"])
    assert scanned(odd) == {"k"}


def test_a_key_that_is_not_ours_is_an_error_in_a_scan(store, prefix, side_door):
    side_door.set(f"{prefix}visits:".encode() + b"\xff", "x")
    with pytest.raises(CorruptRecordError, match="UTF-8"):
        list(store.scan(10))


# Round trips


def test_each_call_is_one_round_trip_and_swap_is_two(proxy):
    store = opened(proxy.url)
    move(store, OPEN)
    one = writer(store)
    keys, values, ledger = [f"k{at}" for at in range(100)], [b"v"] * 100, store.load()[1]
    for trips, call in [
        (1, lambda: store.multi_get_with_ledger(keys)),
        (1, lambda: store.multi_get_with_ledger([])),
        (1, store.load),
        (1, lambda: store.multi_get(keys)),
        (1, lambda: store.claim(7, 0, "me")),
        (1, lambda: one.multi_get(keys)),
        (1, lambda: one.multi_put(keys, values)),
        (2, lambda: one.multi_put(keys, values)),  # no get came before it
        (2, lambda: store.swap(b"next", ledger, LATER)),
    ]:
        before = proxy.round_trips
        call()
        assert proxy.round_trips - before == trips
    assert store.load()[0] == b"next"


def test_a_reader_asks_once_to_open_and_once_per_read(proxy):
    ledger = OneLedger.open(opened(proxy.url), OPENING)
    ledger.begin(0)
    with open_reader(proxy.url, "visits") as reader:
        for _ in range(2):
            before = proxy.round_trips
            assert reader.multi_get(["a", "b"]) == [None, None]
            assert proxy.round_trips - before == 1


# Networks that fail


def cut_points(proxy: CuttingProxy, direction: str, call: Callable[[], object]) -> range:
    """Every place where this call could be cut, measured by running it once."""
    before = getattr(proxy, direction)
    call()
    return range(getattr(proxy, direction) - before)


@pytest.mark.parametrize("ttl", [None, 100])
@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_a_put_that_is_cut_anywhere_is_whole_or_nothing_and_says_so(proxy, redis_url, side_door, direction, ttl):
    store, looking = opened(proxy.url, ttl=ttl, retries=0), opened(redis_url)
    prefix = redis_url.rpartition("prefix=")[2]
    move(looking, OPEN)
    keys, old = ["a", "b", "c"], [b"old-old"] * 3  # as long as the new ones
    looking.multi_put(keys, old)

    def put(value: bytes) -> None:
        one = writer(store)
        one.multi_get(keys)
        one.multi_put(keys, [value] * 3)

    put(b"new-000")  # makes the connection
    outcomes = set()
    for at in cut_points(proxy, direction, lambda: put(b"new-000")):
        looking.multi_put(keys, old)
        new = [b"new-%03d" % at] * 3
        store.load()  # a fresh connection, before the cut
        proxy.cut(direction, at)
        with pytest.raises(StoreUnavailableError):
            put(new[0])
        found = looking.multi_get(keys)
        assert found in (old, new)
        outcomes.add(found == new)
        if found == new and ttl is not None:
            assert all(0 < side_door.pttl(f"{prefix}visits:{key}") <= 100_000 for key in keys)
    assert outcomes == ({False} if direction == "requests" else {False, True})


@pytest.mark.parametrize("ttl", [None, 100])
@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_a_put_that_is_cut_and_retried_succeeds(proxy, redis_url, direction, ttl):
    store, looking = opened(proxy.url, ttl=ttl, retries=3), opened(redis_url)
    move(looking, OPEN)

    def put(value: bytes) -> None:
        one = writer(store)
        one.multi_get(["a", "b"])
        one.multi_put(["a", "b"], [value] * 2)

    put(b"new-000")
    for at in cut_points(proxy, direction, lambda: put(b"new-000"))[::11]:
        proxy.cut(direction, at)
        put(b"new-%03d" % at)
        assert not proxy.is_armed
        assert looking.multi_get(["a", "b"]) == [b"new-%03d" % at] * 2


@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_a_put_that_is_cut_while_the_fence_moves_never_overwrites_the_next_attempt(proxy, redis_url, direction):
    store, looking = opened(proxy.url, retries=2), opened(redis_url)

    def put(value: bytes) -> None:
        one = writer(store)
        one.multi_get(["a"])
        one.multi_put(["a"], [value])

    def next_attempt() -> None:
        move(looking, LATER)
        writer(looking, LATER).multi_put(["a"], [b"theirs"])

    move(looking, OPEN)
    put(b"mine")
    for at in cut_points(proxy, direction, lambda: put(b"mine"))[::5]:
        move(looking, OPEN)
        store.load()
        proxy.cut(direction, at, next_attempt)
        with pytest.raises(FencedError):
            put(b"mine")
        assert not proxy.is_armed
        assert looking.multi_get(["a"]) == [b"theirs"]


def test_a_put_that_arrives_after_the_fence_moved_is_not_applied(proxy, redis_url):
    store, looking = opened(proxy.url, retries=0, socket_timeout=2), opened(redis_url)
    move(looking, OPEN)
    one = writer(store)
    one.multi_get(["a"])
    proxy.hold("requests")
    with pytest.raises(StoreUnavailableError):
        one.multi_put(["a"], [b"mine"])
    move(looking, LATER)
    proxy.pass_on()
    wait_until(lambda: proxy.late.endswith((b"*-1\r\n", b"$-1\r\n")), "EXEC says that it did nothing")
    assert looking.multi_get(["a"]) == [None]


def test_a_get_that_is_cut_anywhere_never_gives_wrong_records(proxy, redis_url):
    store, looking = opened(proxy.url, retries=1), opened(redis_url)
    looking.multi_put(["a", "b"], [b"1", b"2"])
    for direction in ("requests", "replies"):
        store.load()
        for at in cut_points(proxy, direction, lambda: store.multi_get(["a", "x", "b"]))[::4]:
            proxy.cut(direction, at)
            assert store.multi_get(["a", "x", "b"]) == [b"1", None, b"2"]
            assert not proxy.is_armed


def test_a_swap_that_is_cut_anywhere_is_whole_or_nothing_and_the_ledger_tells_which(proxy, redis_url, rounds):
    store, looking = opened(proxy.url, retries=2), opened(redis_url)
    move(looking, OPEN)
    for direction in ("requests", "replies"):
        length = len(cut_points(proxy, direction, lambda: move(store, OPEN)))
        outcomes = set()
        for at in range(0, length, rounds(11, 3)):
            found = store.load()[1]
            looking.claim(7, 0, "me")
            fence, record = FenceToken(2, at), b"ledger %03d %s" % (at, direction.encode())
            proxy.cut(direction, at)
            try:
                outcome: Any = store.swap(record, found, fence) is not None
            except StoreUnavailableError:
                outcome = "unknown"
            proxy.disarm()
            written = looking.load()[0] == record
            outcomes.add((outcome, written))
            assert (looking.claim(7, 0, "you") == "you") == written
            if written:
                writer(looking, fence).multi_get(["a"])
            else:
                with pytest.raises(FencedError):
                    writer(looking, fence).multi_get(["a"])
            move(looking, OPEN)
        assert outcomes >= {(True, True), ("unknown", direction == "replies")}
        assert (False, True) not in outcomes
        assert (True, False) not in outcomes


def test_an_unfenced_put_whose_reply_is_lost_is_not_sent_again(proxy, redis_url):
    store, looking = opened(proxy.url), opened(redis_url)
    store.load()
    proxy.cut("replies", 3, lambda: looking.multi_put(["a"], [b"theirs"]))
    with pytest.raises(StoreUnavailableError):
        store.multi_put(["a"], [b"mine"])
    assert looking.multi_get(["a"]) == [b"theirs"]


def test_a_server_that_is_down_is_reported_in_bounded_time():
    port = free_port()
    store = opened(f"redis://127.0.0.1:{port}")
    for call in (
        store.load,
        lambda: store.multi_get(["a"]),
        lambda: store.swap(b"x", None, OPEN),
        lambda: writer(store).multi_put(["a"], [b"1"]),
    ):
        start = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=f"127.0.0.1:{port}.*server's log") as caught:
            call()
        assert 0.2 < time.monotonic() - start < 10
        assert caught.value.store == f"127.0.0.1:{port}"


def test_a_server_that_never_answers_is_reported_in_bounded_time(proxy, redis_url):
    store = opened(proxy.url, socket_timeout=0.2, retries=50)
    move(opened(redis_url), OPEN)
    one = writer(store)
    proxy.hold("replies")
    for call in (store.load, lambda: one.multi_get(["a"]), lambda: one.multi_put(["a"], [b"1"])):
        start = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            call()
        assert 0.2 < time.monotonic() - start < 10
    proxy.pass_on()

    def loaded():
        with suppress(StoreUnavailableError):  # a busy machine may be slower than 0.2 s
            return store.load()

    wait_until(loaded, "the server answers again")


def test_where_idle_connections_died_in_silence_one_new_try_is_enough(proxy):
    store = opened(proxy.url, socket_timeout=2, retries=1)
    move(store, OPEN)
    writers = [writer(store) for _ in range(5)]
    for one in writers:
        one.multi_get(["a"])
    for one in writers:
        one.close()
    assert proxy.accepted == 5
    proxy.freeze()
    writers[0].multi_put(["a"], [b"1"])
    assert store.multi_get(["a"]) == [b"1"]


def test_a_host_that_does_not_exist_is_a_store_error():
    for host in ("no-such-host.invalid", "a" * 70, "a..b"):
        with pytest.raises(StoreUnavailableError, match=host):
            opened(f"redis://{host}", retries=0).load()


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR \xff\r\n", b"-ODD\r\n"])
def test_what_is_no_redis_is_a_store_error(said):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer = threading.Thread(target=lambda: answer_all(listener, said))
        answer.start()
        with pytest.raises(StoreError):
            opened(f"redis://127.0.0.1:{listener.getsockname()[1]}", retries=0).load()
        answer.join()


def answer_all(listener: socket.socket, answer: bytes) -> None:
    conn, _ = listener.accept()
    with conn:
        while conn.recv(4096):
            conn.sendall(answer)


def test_a_server_that_was_restarted_is_used_again_at_once(start_redis):
    server = start_redis(appendonly="yes", appendfsync="always")
    store = opened(server.url)
    move(store, OPEN)
    one = writer(store)
    one.multi_put(["a"], [b"1"])
    one.multi_get(["a"])
    server.kill()
    server.restart()
    one.multi_put(["a"], [b"2"])
    assert store.multi_get(["a"]) == [b"2"]
    assert store.load() is not None


# Users, passwords and secrets


def test_a_wrong_password_is_refused_at_once(start_redis):
    right, wrong = token_hex(8), token_hex(8)
    server = start_redis(requirepass=right)
    assert opened(server.url).load() is None
    for login in ("", f":{wrong}@", f"default:{wrong}@", f"nobody:{right}@"):
        with CuttingProxy(f"redis://{login}127.0.0.1:{server.port}") as proxy:
            with pytest.raises(StoreAuthError, match=f"127.0.0.1:{proxy.port} refused the password, or") as caught:
                opened(proxy.url).load()
            assert proxy.accepted == 1
        assert not [secret for secret in (wrong, right) if secret in everything_in(caught.value)]


def test_an_attempt_is_not_committed_to_a_server_that_was_started_again(start_redis):
    """It has the ledger with the attempt in flight, and may have lost what the attempt wrote after that."""
    server = start_redis(appendonly="yes", appendfsync="always")
    store = opened(server.url)
    ledger = OneLedger.open(store, OPENING)
    attempt = ledger.begin(0)
    store.writer(attempt.token).multi_put(["a"], [b"1"])
    server.restart()
    with pytest.raises(StoreRestartedError):
        ledger.commit(Commit(batch_id=0, txid=attempt.txid, owner="q"))
    again = ledger.begin(0)
    ledger.commit(Commit(batch_id=0, txid=again.txid, owner="q"))
    assert ledger.record.dead == ((attempt.txid, attempt.txid),)


def test_a_user_that_may_not_ask_for_the_servers_incarnation_commits_all_the_same_and_is_warned(start_redis, caplog):
    server = start_redis()
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "job", "on", f">{SECRET}", "~*", "+@all", "-info")
        store = opened(server.url.replace("://", f"://job:{quote(SECRET, safe='')}@"))
        ledger = OneLedger.open(store, OPENING)
        ledger.commit(Commit(batch_id=0, txid=ledger.begin(0).txid, owner="q"))
        assert store.load()[1][1] is None
    warnings = [one.getMessage() for one in caplog.records if "may not run INFO" in one.getMessage()]
    assert len(warnings) == 1  # at the begin


def test_a_user_of_an_acl_does_what_it_may(start_redis):
    server = start_redis()
    with server.client() as admin:
        for user, rights in (("job", ["+@all", "-@dangerous"]), ("service", ["+get", "+mget", "+scan"])):
            admin.execute_command("ACL", "SETUSER", user, "on", f">{SECRET}", "~app/*", *rights)
    password = quote(SECRET, safe="")
    job = opened(f"redis://job:{password}@127.0.0.1:{server.port}?prefix=app/")
    move(job, OPEN)
    writer(job).multi_put(["a"], [b"1"])
    assert job.claim(7, 0, "me") == "me"
    service = opened(f"redis://service:{password}@127.0.0.1:{server.port}?prefix=app/")
    ledger = service.load()[0]
    assert service.multi_get_with_ledger(["a"]) == (ledger, [b"1"], ledger)
    assert scanned(service) == {"a"}
    outside = opened(f"redis://job:{password}@127.0.0.1:{server.port}?prefix=other/")
    for call in (
        outside.load,
        lambda: outside.multi_put(["a"], [b"1"]),
        lambda: service.multi_put(["a"], [b"2"]),
        lambda: service.swap(b"x", ledger, LATER),
        lambda: writer(service).multi_put(["a"], [b"2"]),
        lambda: service.claim(7, 1, "me"),
    ):
        with pytest.raises(StoreAuthError, match="MULTI, EXEC, DISCARD and INFO") as caught:
            call()
        assert SECRET not in everything_in(caught.value)
    assert service.multi_get(["a"]) == [b"1"]
    assert service.load()[0] == ledger


def everything_in(error: BaseException) -> str:
    """What an error shows, also of the errors behind it, and after a journey."""
    shown = []
    chain: list[BaseException | None] = [error, pickle.loads(pickle.dumps(error))]
    while chain:
        one = chain.pop()
        if one is not None:
            shown += ["".join(traceback.format_exception(one)), repr(one), str(one), repr(one.args), repr(vars(one))]
            chain += [one.__cause__, one.__context__]
    return "\n".join(shown)


def test_no_password_is_shown_anywhere(start_redis):
    for password in ("hunter2", SECRET):
        coded = quote(password, safe="")
        backend = RedisBackend.from_url(f"redis://user:{coded}@127.0.0.1:{free_port()}/3?retries=0&prefix=app/")
        assert backend.password == password
        shown = [repr(backend), str(backend), f"{backend}", repr(opaque(backend, "visits")), repr(backend.open("v"))]
        shown += [repr(pickle.loads(pickle.dumps(backend))), repr(backend.pool())]
        assert "redis://user:***@127.0.0.1:" in shown[0]
        with pytest.raises(StoreUnavailableError) as caught:
            backend.open("v").load()
        shown.append(everything_in(caught.value))
        assert not [text for text in shown if password in text or coded in text]


def test_a_password_out_of_the_environment_is_in_no_pickled_spec(start_redis, monkeypatch):
    password = token_hex(8)
    server = start_redis(requirepass=password)
    backend = RedisBackend.from_url(f"redis://default@127.0.0.1:{server.port}/0?password_env=A_VARIABLE")
    pickled = pickle.dumps(opaque(backend, "visits"))
    assert password.encode() not in pickled
    assert RedisBackend.from_url(repr(backend).split("'")[1]) == backend
    for value, why in ((None, "not set"), ("", "empty")):
        monkeypatch.delenv("A_VARIABLE", raising=False) if value is None else monkeypatch.setenv("A_VARIABLE", value)
        with pytest.raises(ConfigurationError, match=f"A_VARIABLE, which is {why} on {socket.gethostname()}"):
            pickle.loads(pickled).open().load()
    monkeypatch.setenv("A_VARIABLE", password)
    store = pickle.loads(pickled).open()
    store.multi_put(["a"], [b"1"])
    assert store.multi_get(["a"]) == [b"1"]
    for url in (f"redis://me:{password}@h?password_env=A_VARIABLE", "redis://h?password_env="):
        with pytest.raises(ConfigurationError, match="password_env") as caught:
            RedisBackend.from_url(url)
        assert password not in everything_in(caught.value)
    server.stop()
    with pytest.raises(StoreUnavailableError) as refused:
        store.load()
    assert password not in everything_in(refused.value)


@pytest.mark.parametrize("size", [b"$2147483648", b"*2147483648", b"$9223372036854775807", b"*9223372036854775807"])
def test_a_server_that_announces_more_than_fits_into_memory_is_an_error_of_the_store(size):
    """In a process that may have 4 GiB: what the announced reply would take is asked of the system at once."""
    code = """
import resource, sys
from mapstate.backends import resolve
from mapstate.errors import StoreError
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
store = resolve(sys.argv[1]).open("s")
for call in (store.load, lambda: store.multi_get(["a"]), lambda: store.multi_get_with_ledger(["a"])):
    try:
        call()
    except StoreError as error:
        print(type(error).__name__, error)
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_each() -> None:
            for _ in range(3):
                with suppress(OSError):
                    answer_all(listener, size + b"\r\n")

        threading.Thread(target=answer_each, daemon=True).start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}?retries=0&socket_timeout=0.5"
        done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("state 's': Redis at") == 3


@pytest.mark.parametrize("length", [16, 400])
def test_a_server_that_repeats_the_password_in_its_error_does_not_spread_it(length):
    """Of a long one Redis repeats the beginning."""
    password = token_hex(length // 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        said = f"-ERR unknown command `AUTH`, with args beginning with: `{password[:128]}`, \r\n".encode()
        answer = threading.Thread(target=lambda: answer_all(listener, said))
        answer.start()
        with pytest.raises(StoreError, match="unknown command") as caught:
            opened(f"redis://:{password}@127.0.0.1:{listener.getsockname()[1]}", retries=0).load()
        answer.join()
    assert password[:16] not in everything_in(caught.value)


# Stores that are full, or not the primary


@pytest.mark.parametrize("ttl", [None, 1000])
def test_a_full_store_takes_a_put_whole_or_not_at_all(start_redis, ttl):
    server = start_redis(maxmemory="6mb", maxmemory_policy="noeviction")
    store = opened(server.url, ttl=ttl)
    move(store, OPEN)
    one = writer(store)
    refused = [fill(one, "fenced"), fill(store, "unfenced")]
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
    for put in (one.multi_put, store.multi_put, lambda keys, values: store.swap(b"x", store.load()[1], LATER)):
        with pytest.raises(StoreFullError, match="maxmemory"):
            put(refused[0], [b"v"] * 100)
    assert [store.multi_get(keys) for keys in refused] == [[None] * 100] * 2
    assert store.load()[0] != b"x"
    with server.client() as client:
        client.config_set("maxmemory", "0")
    one.multi_put(refused[0], [b"v"] * 100)


def fill(one: Any, name: str) -> list[str]:
    """Puts chunks of 100 keys until the store is full; the keys that it did not take."""
    for chunk in range(1000):
        keys = [f"{name}-{chunk}-{at}" for at in range(100)]
        one.multi_get(keys)
        try:
            one.multi_put(keys, [b"v" * 1000] * 100)
        except StoreFullError:
            return keys
    pytest.fail("it took everything")


def test_a_store_that_cannot_save_to_disk_is_full(start_redis):
    server = start_redis(dbfilename="taken.rdb")
    (server.directory / "taken.rdb").mkdir()
    store = opened(server.url)
    move(store, OPEN)
    with server.client() as client:
        client.config_set("save", "3600 1")
        client.bgsave()
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "the snapshot fails")
    with pytest.raises(StoreFullError, match="MISCONF"):
        writer(store).multi_put(["a"], [b"1"])
    assert store.multi_get(["a"]) == [None]


def test_a_replica_is_no_store_to_write_to(start_redis):
    server = start_redis()
    store = opened(server.url, retries=1)
    move(store, OPEN)
    one = writer(store)
    one.multi_get(["a"])
    with server.client() as client:
        client.replicaof("127.0.0.1", str(free_port()))
    for call in (
        lambda: one.multi_put(["a"], [b"1"]),
        lambda: store.multi_put(["a"], [b"1"]),
        lambda: store.swap(b"x", store.load()[1], LATER),
    ):
        with pytest.raises(StoreUnavailableError, match="replica"):
            call()
    assert store.multi_get(["a"]) == [None]


def test_a_server_without_its_replicas_takes_no_writes(start_redis):
    server = start_redis(min_replicas_to_write="1")
    with pytest.raises(StoreUnavailableError, match="NOREPLICAS"):
        opened(server.url, retries=0).multi_put(["a"], [b"1"])


# Processes


def run_python(code: str, *args: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_fork_after_use_shares_no_connection_with_its_parent(store, redis_url):
    code = """
import os, signal, sys, threading
from mapstate.backends.redis import RedisBackend
from mapstate.capabilities import FenceToken
from mapstate.errors import FencedError

backend = RedisBackend.from_url(sys.argv[1])
store = backend.open("visits")
token = FenceToken(1, 7)
writer, late = store.writer(token), store.writer(token)
writer.multi_get(["mine"])          # two connections under watch, and another in the pool
late.multi_get(["late"])
store.multi_put(["a"], [b"1"])
children = []
for child in range(3):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        for at in range(200):
            key = f"{child}-{at}"
            store.multi_put([key], [key.encode()])
            assert store.multi_get([key]) == [key.encode()]
        for one in (writer, late):  # the parent's, whose watch has to outlive this
            one.multi_put([f"writer-{child}"], [b"1"])
            one.close()
        store.close()
        os._exit(0)
    children.append(pid)
for at in range(200):
    store.multi_put([f"p-{at}"], [b"p%d" % at])
    assert store.multi_get([f"p-{at}"]) == [b"p%d" % at]
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
writer.multi_put(["mine"], [b"1"])
assert store.multi_get(["mine", "0-199", "1-199", "2-199"]) == [b"1", b"0-199", b"1-199", b"2-199"]
assert store.multi_get([f"writer-{child}" for child in range(3)]) == [b"1"] * 3
assert store.swap(b"next", store.load()[1], FenceToken(1, 8))
try:
    late.multi_put(["late"], [b"1"])
except FencedError:
    assert store.multi_get(["late"]) == [None]
else:
    raise AssertionError("unguarded")

# A lock of the pool that another thread holds in the moment of the fork stays locked in the child.
held, done = threading.Event(), threading.Event()
def hold():
    with backend.pool()._lock:
        held.set()
        done.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    assert store.multi_get(["mine"]) == [b"1"]
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
done.set()
holder.join()
assert status == 0, status
"""
    run_python(code, redis_url)


def test_threads_share_a_store(store):
    def work(thread: int) -> None:
        one = writer(store)
        for at in range(50):
            keys = [f"{thread}-{at}-{n}" for n in range(10)]
            one.multi_get(keys)
            one.multi_put(keys, [key.encode() for key in keys])
            assert store.multi_get(keys) == [key.encode() for key in keys]

    run_at_once([lambda thread=thread: work(thread) for thread in range(8)])


def test_threads_that_make_their_pools_at_once_do_not_disturb_each_other():
    before = sys.getswitchinterval()
    owners = [[RedisBackend(host=f"{name}{at}") for at in range(600)] for name in "abcdef"]
    sys.setswitchinterval(1e-6)
    try:
        run_at_once([lambda own=own: [one.pool() for one in own] for own in owners])
    finally:
        sys.setswitchinterval(before)
        for own in owners:
            for one in own:
                connection._pools.pop((os.getpid(), one.reached, None), None)


def test_a_store_that_was_closed_can_be_used_again_and_disturbs_no_other(store, redis_url):
    other = opened(redis_url)
    one = writer(other)
    one.multi_get(["a"])
    store.close()
    store.close()
    one.multi_put(["a"], [b"1"])
    assert store.multi_get(["a"]) == [b"1"]


# TLS


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(redis_url: str, authority: trustme.CA, tmp_path: Path) -> Iterator[TlsFront]:
    """TLS in front of Redis; ``ca.pem`` is in tmp_path."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with TlsFront(redis_url, context) as front:
        yield front


def test_tls_reaches_the_same_state(tls, store, tmp_path):
    secured = opened(tls.url, ssl_ca_certs=tmp_path / "ca.pem")
    one = writer(secured)
    keys = [f"k{at}" for at in range(5000)]
    one.multi_get(keys)
    one.multi_put(keys, [key.encode() * 20 for key in keys])
    assert store.multi_get(keys) == secured.multi_get(keys) == [key.encode() * 20 for key in keys]
    assert tls.accepted > 0


def test_a_certificate_of_an_unknown_authority_is_refused(tls, tmp_path):
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    for options in ({}, {"ssl_ca_certs": tmp_path / "other.pem"}):
        with pytest.raises(StoreUnavailableError, match=r"(?i)certificate verify failed"):
            opened(tls.url, retries=0, **options).load()
    opened(tls.url, ssl_cert_reqs="none").load()


def test_a_certificate_for_another_host_is_refused(tls, tmp_path):
    elsewhere = tls.url.replace("127.0.0.1", "localhost")
    with pytest.raises(StoreUnavailableError, match=r"(?i)hostname"):
        opened(elsewhere, retries=0, ssl_ca_certs=tmp_path / "ca.pem").load()
    opened(elsewhere, ssl_ca_certs=tmp_path / "ca.pem", ssl_check_hostname="false").load()


def test_a_client_certificate_is_shown_where_it_is_asked_for(tls, authority, tmp_path):
    tls._context.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(tls._context)
    mine = authority.issue_cert("me@example.org")
    mine.cert_chain_pems[0].write_to_path(str(tmp_path / "me.pem"))
    mine.private_key_pem.write_to_path(str(tmp_path / "me.key"))
    with pytest.raises(StoreUnavailableError):
        opened(tls.url, retries=0, ssl_ca_certs=tmp_path / "ca.pem").load()
    names = {"ssl_ca_certs": "ca.pem", "ssl_certfile": "me.pem", "ssl_keyfile": "me.key"}
    opened(tls.url, **{name: tmp_path / file for name, file in names.items()}).load()


def test_a_certificate_file_that_is_not_there_is_named(tls, tmp_path):
    store = opened(tls.url, ssl_ca_certs=tmp_path / "gone.pem")
    with pytest.raises(ConfigurationError, match=r"ssl_ca_certs.*gone\.pem"):
        store.load()


def test_tls_to_a_server_without_it_is_a_store_error(redis_url):
    with pytest.raises(StoreUnavailableError):
        opened(redis_url.replace("redis://", "rediss://"), retries=0, socket_timeout=0.5).load()


# URLs


def test_a_url_says_it_all():
    url = (
        "rediss://me:p%40ss%2F%25@redis.example.org:7000/3?prefix=app/&socket_timeout=2.5&socket_connect_timeout=1"
        "&retries=0&max_value_bytes=100&ssl_ca_certs=/a%20b.pem&ssl_cert_reqs=optional&ssl_check_hostname=False"
    )
    assert resolve(url) == RedisBackend(
        host="redis.example.org",
        port=7000,
        db=3,
        username="me",
        password="p@ss/%",
        tls=True,
        prefix="app/",
        socket_timeout=2.5,
        socket_connect_timeout=1.0,
        retries=0,
        max_value_bytes=100,
        ssl_ca_certs="/a b.pem",
        ssl_cert_reqs="optional",
        ssl_check_hostname=False,
    )


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("redis://", RedisBackend()),
        ("redis://localhost:6379/0", RedisBackend()),
        ("redis:///2", RedisBackend(db=2)),
        ("redis://:pw@h", RedisBackend(host="h", password="pw")),
        ("redis://user:@h", RedisBackend(host="h", username="user", password="")),
        ("redis://[::1]:7000", RedisBackend(host="::1", port=7000)),
    ],
)
def test_what_a_url_leaves_out_has_a_default(url, same):
    assert RedisBackend.from_url(url) == same
    assert hash(RedisBackend.from_url(url)) == hash(same)
    assert pickle.loads(pickle.dumps(same)) == same


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:hunter2",
        "redis://h:99999",
        "redis://h:0",
        "redis://h/hunter2",
        "redis://h/-1",
        "redis://h/1_0",
        "redis://h/\u0663",
        "redis+sentinel://h/m/1_0",
        "redis://h:\u0663\u0663/0",
        "redis://user:hun#ter2@h",
        "redis://user:hun/ter2@h:1/0",
        "redis://user:hun?ter2@h:1/0",
        "redis://:12?hunter2=x@h:1/0",
        "redis://:12/hunter2@h:1/0",
        "redis://hunter2@h",
        "redis://hunter2:12#3@h",
        "redis://h/0#hunter2",
        "redis://[::1",
        "redis://user:hunter2@ex\u2100mple.org",
        "http://user:hunter2@h",
        "hunter2",
        "",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigurationError) as caught:
        RedisBackend.from_url(url)
    assert "ter2" not in everything_in(caught.value).partition("test_redis.py")[0]
    assert "ter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("nope=1", "no parameter 'nope'; it has prefix, socket_timeout, .*ssl_check_hostname"),
        ("prefix=a:b", "prefix .*':'"),
        ("prefix=a%2Ab", "prefix"),
        ("socket_timeout=soon", "socket_timeout cannot be 'soon'"),
        ("socket_timeout=0", "socket_timeout is a number of seconds from 0.001 to 86400"),
        ("socket_timeout=nan", "socket_timeout is"),
        ("socket_connect_timeout=inf", "socket_connect_timeout is"),
        ("retries=-1", "retries is from 0 to"),
        ("max_value_bytes=0", "max_value_bytes is from 1 to"),
        ("ssl_cert_reqs=none", "rediss://"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_with_the_reason(query, message):
    with pytest.raises(ConfigurationError, match=message):
        RedisBackend.from_url(f"redis://h/0?{query}")


@pytest.mark.parametrize(
    ("query", "message"), [("ssl_cert_reqs=maybe", "none, optional or required"), ("ssl_check_hostname=x", "'x'")]
)
def test_a_tls_parameter_that_cannot_be_is_refused_with_the_reason(query, message):
    with pytest.raises(ConfigurationError, match=message):
        RedisBackend.from_url(f"rediss://h/0?{query}")


def test_a_repr_can_be_read_back_but_for_the_password():
    for url in ("redis://h:1/2?prefix=a/&retries=1", "rediss://[::1]:7/0?ssl_cert_reqs=none"):
        assert RedisBackend.from_url(repr(RedisBackend.from_url(url)).split("'")[1]) == RedisBackend.from_url(url)


def test_opening_a_store_makes_no_connection(proxy):
    for _ in range(100):
        writer(opened(proxy.url))
    assert proxy.accepted == 0


# The servers of these tests


def test_a_server_that_is_killed_comes_back_with_what_it_kept(start_redis):
    server = start_redis(appendonly="yes", appendfsync="always")
    with server.client() as client:
        client.set("a", "1")
    server.kill()
    with pytest.raises(StoreUnavailableError):
        opened(server.url, retries=0).load()
    server.restart()
    with server.client() as client:
        assert client.get("a") == b"1"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    code = "from servers import RedisServer; import time; print(RedisServer().start().port, flush=True); time.sleep(60)"
    command, here = [sys.executable, "-c", code], Path(__file__).parents[1] / "fixtures"
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # nobody is left to remove its files
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=here, env=environment) as starter:
        port = int(starter.stdout.readline())
        assert listens(port)
        starter.kill()
    wait_until(lambda: not listens(port), "the server is gone")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Resetting(Forwarder):
    """A server that resets each connection: at once, or within the next milliseconds."""

    def _serve(self, client: socket.socket) -> None:
        with client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            time.sleep(1e-4 * (self.accepted % 30))


def test_a_connection_that_is_reset_in_any_moment_is_a_store_that_does_not_answer(redis_url):
    """uvloop raised a RuntimeError for every twentieth request here, so `mapstate serve` answered 500."""

    async def errors(store):
        found = Counter()

        async def ask():
            for _ in range(100):
                try:
                    await on_loop(store.load)
                except (MapStateError, RuntimeError) as error:
                    found[type(error)] += 1

        await asyncio.gather(*(ask() for _ in range(8)))
        return found

    with Resetting(redis_url) as server:
        backend = resolve(f"{server.url}&retries=0")
        for run in (uvloop.run, asyncio.run):
            assert run(errors(backend.on_event_loop().open("s"))) == {StoreUnavailableError: 800}
