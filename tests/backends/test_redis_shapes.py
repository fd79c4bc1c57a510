"""The Redis store behind sentinels, behind a socket, and with its records in hashes."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis
from one_ledger import OneLedger
from openings import opening
from servers import GivenRedis

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.backends.redis import RedisSentinelBackend, RedisUnixBackend
from mapstate.backends.redis.connection import command
from mapstate.capabilities import FenceToken, Swap
from mapstate.errors import (
    ConfigurationError,
    FencedError,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreRestartedError,
    StoreUnavailableError,
    TooLargeError,
)
from mapstate.findings import Finding
from mapstate.maps import OpaqueMap
from mapstate.maps.serialized import SerializedMap
from mapstate.operations.drop import drop
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger_record import Attempt, Commit
from mapstate.serializers import RecordCodec, serializer

pytestmark = pytest.mark.redis

OPEN, LATER = FenceToken(1, 7), FenceToken(1, 8)
OPENING = opening()
KEYS = [f"user-{at}" for at in range(50)]


def move(store: Any, fence: FenceToken) -> None:
    found = store.load()
    assert store.swap(f"ledger at {fence}".encode(), None if found is None else found[1], fence) is not None


def count(store: Any, ledger: OneLedger, attempt: Attempt, keys: list[str]) -> None:
    codec = RecordCodec(serializer("json"), "visits", "opaque", OPENING.fields, ledger.record.field_counts)
    state: Any = OpaqueMap(SerializedMap(store.writer(attempt.token), codec), attempt.view, written_once=True)
    state.begin_commit(attempt.txid)
    state.multi_combine(
        keys, [1] * len(keys), lambda bases, news: [(a or 0) + b for a, b in zip(bases, news, strict=True)]
    )


def commit(ledger: OneLedger, attempt: Attempt) -> None:
    ledger.commit(Commit(batch_id=attempt.batch_id, txid=attempt.txid, owner="q"))


# Sentinels


def test_a_failover_within_an_attempt_ends_it_and_the_next_one_counts_right(start_sentinels):
    pair = start_sentinels()
    store: Any = resolve(pair.url).open("visits")
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    count(store, ledger, attempt, KEYS)
    commit(ledger, attempt)
    attempt = ledger.begin(1)
    count(store, ledger, attempt, KEYS[:20])
    with pair.primary.client() as client:
        assert client.wait(1, 10_000) == 1
    pair.fail_over()
    count(store, ledger, attempt, KEYS[20:])  # on the replica, under the fence that it has
    with pytest.raises(StoreRestartedError):
        commit(ledger, attempt)
    attempt = ledger.begin(1)
    count(store, ledger, attempt, KEYS)
    commit(ledger, attempt)
    with open_reader(pair.url, "visits") as reader:
        assert reader.multi_get(KEYS) == [{"n": 2}] * len(KEYS)


@pytest.mark.full
def test_a_primary_that_failed_over_takes_no_writes_and_the_new_one_does(start_sentinels):
    pair = start_sentinels(requirepass="s3cret")
    store: Any = resolve(pair.url).open("visits")
    move(store, OPEN)
    one = store.writer(OPEN)
    one.multi_get(["a"])
    with pair.primary.client() as client:
        assert client.wait(1, 10_000) == 1
    pair.hand_over()
    one.multi_put(["a"], [b"1"])
    with pair.replica.client() as client:
        assert client.get("visits:a") == b"1"
    assert store.multi_get(["a"]) == [b"1"]


def test_a_name_that_no_sentinel_knows_is_a_store_error(start_sentinels):
    pair = start_sentinels(sentinels=1)
    url = pair.url.replace("/mymaster/", "/other/") + "?retries=1"
    with pytest.raises(StoreUnavailableError, match=r"other \(sentinels"):
        resolve(url).open("visits").multi_get(["a"])


def test_a_sentinel_url_says_it_all():
    url = "rediss+sentinel://me:p%40ss@a:1,[::1]/mymaster/3?sentinel_login=true&ssl_cert_reqs=none&layout=hash"
    backend = resolve(url)
    assert backend == RedisSentinelBackend(
        sentinels=(("a", 1), ("::1", 26379)),
        master="mymaster",
        db=3,
        username="me",
        password="p@ss",
        tls=True,
        ssl_cert_reqs="none",
        sentinel_login=True,
        layout="hash",
    )
    assert "p@ss" not in repr(backend)
    assert "p%40ss" not in repr(backend)
    assert "p@ss" not in repr(backend.pool())
    plain = "redis+sentinel://a:1,b:2/mymaster/0?retries=3"
    assert resolve(repr(resolve(plain)).split("'")[1]) == resolve(plain)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://a", "master is the name"),
        ("redis+sentinel:///mymaster", "sentinels is one or more"),
        ("redis+sentinel://a/mymaster/hunter2", "no URL like redis\\+sentinel"),
    ],
)
def test_a_sentinel_url_that_cannot_be_is_refused_with_the_reason(url, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        resolve(url)
    assert "hunter2" not in str(caught.value)


# A socket


def test_a_state_behind_a_socket(start_redis, tmp_path):
    path = tmp_path / "r.sock"
    server = start_redis(unixsocket=str(path), requirepass="s3cret")
    for scheme in ("unix", "redis+unix"):
        backend = resolve(f"{scheme}://:s3cret@{path}?db=3&prefix={scheme[:4]}")
        store: Any = backend.open("visits")
        move(store, OPEN)
        store.writer(OPEN).multi_put(["a"], [b"1"])
        with redis.Redis(port=server.port, db=3, password="s3cret") as client:
            assert client.get(f"{scheme[:4]}visits:a") == b"1"
        assert "s3cret" not in repr(backend)
    with pytest.raises(StoreAuthError, match="r.sock"):
        resolve(f"unix://:wr0ng@{path}").open("visits").multi_get(["a"])
    with pytest.raises(StoreUnavailableError, match="gone.sock"):
        resolve(f"unix://{tmp_path}/gone.sock?retries=0").open("visits").multi_get(["a"])


def test_a_socket_url_names_a_path_and_no_host():
    assert resolve("unix:///run/r.sock?db=2") == RedisUnixBackend(path="/run/r.sock", db=2)
    assert resolve(repr(resolve("unix:///run/r%20s.sock?db=2")).split("'")[1]).path == "/run/r s.sock"
    for url, message in (
        ("unix://host/r.sock", "no URL like unix"),
        ("unix://", "a whole one"),
        ("unix:///r.sock?ssl_cert_reqs=none", "ssl_"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            resolve(url)


def test_tls_behind_a_socket_is_refused_and_not_passed_over():
    with pytest.raises(ConfigurationError, match="tls is for an address: behind a socket there is none, not True"):
        RedisUnixBackend(path="/run/r.sock", tls=True)


# A server of another kind than the URL names, and one that a job cannot use


def test_a_probe_names_a_server_of_another_kind(start_redis, start_sentinels, redis_cluster):
    server, pair = start_redis(), start_sentinels()
    sentinel = pair.url.partition("://")[2].partition("/")[0].partition(",")[0]
    node = redis_cluster.url.partition("://")[2].partition(",")[0].partition("?")[0].partition("/")[0]
    own = f"127.0.0.1:{server.port}"
    for url, message in (
        (f"redis://{own}/99", "has no database of this number"),
        (f"redis://{sentinel}/0", r"A sentinel answers so: use redis\+sentinel://"),
        (f"redis+cluster://{sentinel}", r"A sentinel answers so: use redis\+sentinel://"),
        (f"redis+sentinel://{own}/mymaster/0", "is no sentinel"),
        (f"redis://{node}/0", r"belongs to a cluster, and redis:// speaks to one server: use redis\+cluster://"),
        (f"redis://{node}/3", r"belongs to a cluster, which has no databases: use redis\+cluster://"),
        (f"redis+cluster://{own}", "is one server and no cluster: use redis://"),
    ):
        with pytest.raises(StoreError, match=message) as caught:
            resolve(url).open("visits").probe()
        assert "something else may use" not in str(caught.value)


def test_a_probe_finds_a_replica_and_a_user_who_only_reads_and_changes_nothing(start_redis, redis_cluster):
    server, replica = start_redis(), start_redis()
    with replica.client() as admin:
        admin.replicaof("127.0.0.1", server.port)
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "reader", "on", ">s3cret", "~*", "+@read", "+@connection", "+info")
    store: Any = resolve(f"redis://127.0.0.1:{server.port}").open("visits")
    store.probe()
    assert store.load() is None
    with server.client() as admin:
        assert admin.dbsize() == 0
    move(store, OPEN)
    store.writer(OPEN).multi_put(["-"], [b"1"])
    store.probe()
    assert (store.load()[0], store.multi_get(["-"])) == (f"ledger at {OPEN}".encode(), [b"1"])
    with pytest.raises(StoreAuthError, match="refused the user, the password or a command"):
        resolve(f"redis://reader:s3cret@127.0.0.1:{server.port}").open("visits").probe()
    with pytest.raises(StoreUnavailableError, match="takes no writes: it is a replica"):
        resolve(f"redis://127.0.0.1:{replica.port}?retries=0").open("visits").probe()
    clustered: Any = resolve(redis_cluster.url).open("probed")
    clustered.probe()
    assert clustered.load() is None


# A hash, and many of them


@pytest.fixture(params=["hash", "packed&buckets=20"])
def url(request: Any, redis_url: str) -> str:
    return f"{redis_url}&layout={request.param}"


@pytest.fixture
def side_door(redis_server: GivenRedis) -> Iterator[redis.Redis]:
    with redis_server.client() as client:
        yield client


@pytest.fixture
def name(redis_url: str) -> str:
    return redis_url.rpartition("prefix=")[2] + "visits"


def test_records_lie_in_one_hash(redis_url, name, side_door):
    store: Any = resolve(f"{redis_url}&layout=hash").open("visits")
    move(store, OPEN)
    keys = ["c", "a", "", "é", "\r\n", "a|b", "!ledger"]
    values = [b"%d" % at for at in range(6)] + [bytes(range(256)) * 1000]
    for one in (store, store.writer(OPEN)):
        one.multi_put(keys, values)
        assert one.multi_get([*keys[::-1], "no", "a"]) == [*values[::-1], None, values[1]]
        assert one.multi_get([]) == []
        one.multi_put([], [])
    assert side_door.hgetall(name) == {key.encode(): value for key, value in zip(keys, values, strict=True)}
    beside = {f"{name}{one}" for one in ("!ledger", "!fence", "!layout")}
    assert {key.decode() for key in side_door.scan_iter(f"{name}*")} == {name, *beside}
    assert store.multi_get_with_ledger(["c"]) == (store.load()[0], [b"0"], store.load()[0])


def test_records_lie_in_their_hash_shard_in_redis_short_form(redis_url, name, side_door):
    store: Any = resolve(f"{redis_url}&layout=packed&buckets=100").open("visits")
    move(store, OPEN)
    keys = ["c", "a", "", "é", "\r\n", "a|b", "!ledger", *KEYS]
    for one in (store, store.writer(OPEN)):
        one.multi_put(keys, [key.encode() * 2 for key in keys])
        assert one.multi_get([*keys[::-1], "no", "a"]) == [*(key.encode() * 2 for key in keys[::-1]), None, b"aa"]
        assert one.multi_get([]) == []
        one.multi_put([], [])
    for key in keys:
        hash_name = f"{name}:{zlib.crc32(key.encode()) % 100:02}"
        assert side_door.hget(hash_name, key) == key.encode() * 2
        assert side_door.object("encoding", hash_name) in (b"listpack", b"ziplist")
    assert sorted(key for page in store.scan(70) for key in page) == sorted(keys)
    assert side_door.exists(name) == 0


def test_who_makes_a_state_with_packed_records_is_told_what_to_take_and_who_has_one_is_not(redis_url, caplog):
    plain: Any = resolve(redis_url).open("plain")
    store: Any = resolve(f"{redis_url}&layout=packed&buckets=7").open("visits")
    swaps = [Swap(plain, b"{}", None, OPEN), Swap(store, b"{}", None, OPEN)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning, match=r"'visits' is made with layout=packed.*blocks=.*leave layout out"):
            plain.swap_all(swaps)
        assert plain.load() is store.load() is None, "where it is an error, it comes before anything is written"
        store.probe()
        for layout in ("string", "hash"):
            move(resolve(f"{redis_url}&layout={layout}").open(layout), OPEN)
    caplog.clear()
    with pytest.warns(DeprecationWarning, match="layout=packed"):
        assert plain.swap_all(swaps) is not None
    assert [record.getMessage()[:25] for record in caplog.records] == ["state 'visits' is made wi"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again: Any = resolve(f"{redis_url}&layout=packed&buckets=7").open("visits")
        assert again.swap(b"{}", again.load()[1], LATER) is not None
        again.writer(LATER).multi_put(["a"], [b"1"])
        assert again.multi_get_with_ledger(["a"]) == (b"{}", [b"1"], b"{}")


def test_a_server_without_memory_takes_none_of_a_packed_chunk(start_redis):
    """What a script writes could be half of a chunk; Redis refuses a script before its first write, or not at all."""
    server = start_redis()
    store: Any = resolve(f"{server.url}?layout=packed&buckets=50").open("visits")
    move(store, OPEN)
    store.writer(OPEN).multi_put(["first"], [b"1"])
    with server.client() as admin:
        admin.config_set("maxmemory", "100kb")  # less than an empty server has
    with pytest.raises(StoreFullError, match="is full"):
        store.writer(OPEN).multi_put(["first", *KEYS], [b"2"] * (1 + len(KEYS)))
    assert store.multi_get(["first", *KEYS]) == [b"1"] + [None] * len(KEYS)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("layout=packed", "buckets is given with layout=packed"),
        ("buckets=7", "and only there, not 7"),
        ("layout=hash&buckets=7", "and only there, not 7"),
        ("layout=packed&buckets=0", "buckets is from 1 to"),
        ("layout=packed&buckets=7&records=visits", "records is for the layouts of storm-redis"),
        ("layout=tight", "layout is string, hash or packed"),
    ],
)
def test_a_url_of_a_layout_that_cannot_be_is_refused_with_the_reason(parameters, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(f"redis://localhost?{parameters}")


def packing(store: Any) -> list[Finding]:
    return [one for one in store.checkup(60) if one.subject == "packing"]


def test_a_checkup_looks_at_hashes_all_over_a_state_for_the_short_form(redis_url):
    store: Any = resolve(f"{redis_url}&layout=packed&buckets=1000").open("visits")
    assert packing(store) == []  # there is none yet
    keys = [f"user-{at}" for at in range(5000)]
    store.multi_put(keys, [b"1"] * len(keys))
    (found,) = packing(store)
    assert (found.severity, found.advice) == ("ok", "")
    long = [key for key in keys if zlib.crc32(key.encode()) % 1000 >= 500]
    store.multi_put(long, [b"x" * 1000] * len(long))
    (found,) = packing(store)
    assert found.severity == "warning"
    assert found.found == "25 of 50 hashes looked at are kept as hashtable"
    assert "hash-max-listpack-value" in found.advice
    assert packing(resolve(redis_url).open("other")) == []


def test_a_checkup_says_that_it_may_not_see_the_form(start_redis):
    server = start_redis()
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "me", "on", ">s3cret", "~*", "+@all", "-object")
    (found,) = packing(resolve(f"redis://me:s3cret@127.0.0.1:{server.port}?layout=packed&buckets=5").open("visits"))
    assert found.severity == "warning"
    assert "OBJECT ENCODING" in found.found


@pytest.mark.parametrize("page_size", [1, 7, 1000])
def test_a_scan_passes_over_many_empty_hashes_and_finds_what_is_between_them(redis_url, page_size):
    store: Any = resolve(f"{redis_url}&layout=packed&buckets=4500").open("visits")
    assert list(store.scan(page_size)) == []
    store.multi_put(KEYS, [b"1"] * len(KEYS))
    pages = list(store.scan(page_size))
    assert sorted(key for page in pages for key in page) == sorted(KEYS)
    assert all(pages)


def test_a_put_into_a_hash_is_fenced_and_not_disturbed_by_others(url):
    store: Any = resolve(url).open("visits")
    move(store, OPEN)
    one, other = store.writer(OPEN), store.writer(OPEN)
    one.multi_get(["a"])
    other.multi_put(["b"], [b"2"])  # the same hash, between get and put
    one.multi_put(["a"], [b"1"])
    one.multi_get(["a"])
    move(store, LATER)
    for call in (
        lambda: one.multi_put(["a"], [b"late"]),
        lambda: one.multi_get(["a"]),
        lambda: one.multi_rewrite(["a", "b"], [None, b"late"]),
    ):
        with pytest.raises(FencedError):
            call()
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]


def test_batches_in_a_hash_are_counted_scanned_and_vacuumed(url):
    store: Any = resolve(url).open("visits")
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    count(store, ledger, attempt, KEYS)
    commit(ledger, attempt)
    count(store, ledger, ledger.begin(1), KEYS[:30])
    attempt = ledger.begin(1)
    count(store, ledger, attempt, KEYS[20:])
    commit(ledger, attempt)
    with open_reader(url, "visits") as reader:
        assert reader.multi_get(KEYS) == [{"n": 1}] * 20 + [{"n": 2}] * 30
        assert vacuum(url, "visits", page_size=7).rewritten == 20
        assert dict(reader.scan(7)) == {(key,): {"n": 1 if at < 20 else 2} for at, key in enumerate(KEYS)}
    assert json.loads(store.multi_get(["user-0"])[0])[1:] == [1, 1]
    store.writer(OPEN)
    move(store, OPEN)
    store.writer(OPEN).multi_rewrite(["user-0", "user-1", "user-2"], [None, b"x", None])
    assert store.multi_get(["user-0", "user-1", "user-2"]) == [None, b"x", None]
    assert [one.subject for one in store.checkup(60)]


def test_a_hash_has_no_ttl(url):
    with pytest.raises(ConfigurationError, match=r"layout=\w+ has no ttl"):
        resolve(url).open("visits", ttl=10)


def test_a_state_is_opened_in_the_layout_in_which_it_was_made_and_in_no_other(redis_url, start_redis):
    """Its ledger would be found all the same, its records would not, and the next batch would count from nothing."""
    bare = start_redis().url
    for made, others in (
        (f"{redis_url}s/", [f"{redis_url}s/&layout=hash"]),
        (f"{redis_url}h/&layout=hash", [f"{redis_url}h/"]),
        (f"{redis_url}p/&layout=packed&buckets=7", [f"{redis_url}p/", f"{redis_url}p/&layout=packed&buckets=8"]),
        (f"{bare}?records=visits", [bare, f"{bare}?layout=hash", f"{bare}?layout=hash&records=visits"]),
    ):
        store: Any = resolve(made).open("visits")
        ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
        count(store, ledger, attempt, KEYS)
        commit(ledger, attempt)
        for another in others:
            with pytest.raises(ConfigurationError, match=r"was made with layout .*Nothing was written"):
                OneLedger.open_and_begin(resolve(another).open("visits"), OPENING, 1)
            with pytest.raises(ConfigurationError, match="was made with layout"):
                resolve(another).open("visits").swap(b"{}", store.load()[1], LATER)
            with pytest.raises(ConfigurationError, match="was made with layout"):
                open_reader(another, "visits")
        ledger, attempt = OneLedger.open_and_begin(store, OPENING, 1)
        count(store, ledger, attempt, KEYS)
        commit(ledger, attempt)
        with open_reader(made, "visits") as reader:
            assert reader.multi_get(KEYS) == [{"n": 2}] * len(KEYS)
        store._server.tell(command(b"DEL", store._ledger), 1)
        for another in others:  # also where the ledger is lost: adopt and drop would find a part of the records
            with pytest.raises(ConfigurationError, match="was made with layout .*delete the key '.*!layout'"):
                resolve(another).open("visits").load()
        assert store.load() is None


def test_records_that_others_may_be_among_are_not_dropped():
    kept = {"visits": None, "": None, "visits:": "drop"}
    for records, name in kept.items():
        store: Any = resolve(f"redis://h/0?records={records}").open("visits")
        assert getattr(store.drop, "__name__", None) == name


def test_an_open_reader_seeks_no_records_where_they_were_before_the_state_was_made_again(redis_url):
    """The ledger of any layout has the same name, and is found."""
    seven, eight = (f"{redis_url}p/&layout=packed&buckets={number}" for number in (7, 8))

    def make(url: str, start: int) -> None:
        store: Any = resolve(url).open("visits")
        ledger, attempt = OneLedger.open_and_begin(store, msgspec.structs.replace(OPENING, clock_txid=start), 0)
        count(store, ledger, attempt, KEYS)
        commit(ledger, attempt)

    make(seven, 1_000)
    with open_reader(seven, "visits") as reader:
        assert reader.multi_get(KEYS) == [{"n": 1}] * len(KEYS)
        drop(seven, "visits")
        make(eight, 2_000)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="was made with layout"):
                reader.multi_get(KEYS)
        drop(eight, "visits")
        make(seven, 3_000)
        assert reader.multi_get(KEYS) == [{"n": 1}] * len(KEYS)


def test_what_is_too_large_for_a_hash_is_refused(url):
    store: Any = resolve(f"{url}&max_value_bytes=10").open("visits")
    with pytest.raises(TooLargeError, match="'b' has 11 bytes"):
        store.multi_put(["a", "b"], [b"1", b"v" * 11])
    assert store.multi_get(["a"]) == [None]
