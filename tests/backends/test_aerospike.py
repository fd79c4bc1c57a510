"""The Aerospike store, on the stand-in, and on a real server where there is one."""

from __future__ import annotations

import datetime as dt
import math
import os
import pickle
import random
import threading
from contextlib import suppress
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import aerospike
import pyarrow as pa
import pytest
from aerospike_stand_in import Fault, StandInBackend, StandInClient
from one_ledger import OneLedger
from servers import free_port

from mapstate import Count, newStream, non_transactional, opaque, open_reader, transactional
from mapstate.aggregators import CombinerAggregator
from mapstate.aggregators.fields import Fields
from mapstate.backends import resolve
from mapstate.backends.aerospike import AerospikeBackend
from mapstate.backends.aerospike.operations import judge
from mapstate.backends.aerospike.records import CLAIMS, Records
from mapstate.backends.aerospike.store import AerospikeStore
from mapstate.backing_map import Backend, IBackingMap
from mapstate.capabilities import (
    Checkup,
    Claims,
    FencedWrites,
    FenceToken,
    FilteredWrites,
    LedgerStore,
    NativeRecords,
    Reports,
    Rewrites,
    Scan,
)
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    FencedError,
    KeyEncodingError,
    SerializationError,
    StaleBatchError,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreLostError,
    StoreRestartedError,
    StoreUnavailableError,
    TooLargeError,
    UsageError,
)
from mapstate.keys import KeyCodec
from mapstate.maps import NonTransactionalMap, OpaqueMap
from mapstate.maps.serialized import SerializedMap
from mapstate.operations.doctor import examine
from mapstate.operations.drop import drop
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger_record import Commit, OpenRequest
from mapstate.schema import Field, KeyField
from mapstate.serializers import RecordCodec, serializer
from mapstate.serializers.blocks import BlockCodec
from mapstate.spark.executor.task import BatchTask, TaskReport
from mapstate.testing import FaultyStore

TOKEN = FenceToken(1, 7)
START = 1000
N = Field("n", "Sum(n)", "bigint")
SECRET = "s3cret/:@#?%é"
SOME_KEYS = [
    "a",
    "b\0c",
    "\0",
    "é\0",
    "é",
    "日本",
    "\U0001f600",
    " ",
    ":",
    "x" * 5000,
    "5",
    5,
    0,
    -1,
    2**63 - 1,
    -(2**63),
]


@pytest.fixture
def store(place: Any) -> AerospikeStore:
    return place.backend().open("visits")


def scanned(store: AerospikeStore, page_size: int = 1000) -> list[Any]:
    return [key for page in store.scan(page_size) for key in page]


# The map


def test_the_store_declares_what_it_can_and_what_it_cannot(place, store):
    for capability in (IBackingMap, LedgerStore, FilteredWrites, Claims, Scan, Reports, Checkup):
        assert isinstance(store, capability)
    assert not isinstance(store, FencedWrites)
    assert isinstance(store.filtered_writer(TOKEN), Rewrites)
    assert isinstance(place.backend(), Backend)
    assert isinstance(place.backend(), NativeRecords)
    assert place.backend().shared_between_processes


def test_records_come_in_the_order_of_the_keys_and_absent_ones_as_none(store):
    for one in (store, store.filtered_writer(TOKEN)):
        one.multi_put(["c", "a", 0], [[3, 7], [1, 7], [0, 7]])
        assert one.multi_get(["a", "x", "c", 0, 1]) == [[1, 7], None, [3, 7], [0, 7], None]


def test_a_repeated_key_is_answered_at_each_place_and_keeps_its_last_value(store):
    for at, one in enumerate((store, store.filtered_writer(TOKEN))):
        one.multi_put(["a", "b", "a"], [[-1, 7], [2, 7], [at, 7]])
        assert one.multi_get(["a", "b", "a"]) == [[at, 7], [2, 7], [at, 7]]


def test_no_keys_ask_nothing_of_the_server():
    store = AerospikeBackend.from_url(f"aerospike://127.0.0.1:{free_port()}/test/s").open("s")
    for one in (store, store.filtered_writer(TOKEN)):
        assert one.multi_get([]) == []
        one.multi_put([], [])
    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        AerospikeBackend.from_url(f"aerospike://127.0.0.1:{free_port()}/test/s?retries=0").open("s").multi_get(["a"])


def test_keys_of_any_text_and_integers_of_64_bits_are_different_keys(store):
    store.multi_put(SOME_KEYS, [[at, 7] for at in range(len(SOME_KEYS))])
    assert store.multi_get(SOME_KEYS) == [[at, 7] for at in range(len(SOME_KEYS))]
    assert {(type(key), key) for key in scanned(store)} == {(type(key), key) for key in SOME_KEYS}


@pytest.mark.parametrize("key", ["\ud800", 2**63, -(2**63) - 1])
def test_a_key_that_the_client_cannot_take_is_refused(store, key):
    """Text that is no Unicode would kill the process."""
    for one in (store, store.filtered_writer(TOKEN)):
        with pytest.raises(KeyEncodingError):
            one.multi_get(["a", key])
        with pytest.raises(KeyEncodingError):
            one.multi_put(["a", key], [[1, 7], [2, 7]])
    assert store.multi_get(["a"]) == [None]


def test_more_keys_than_values_are_refused(store):
    for one in (store, store.filtered_writer(TOKEN)):
        with pytest.raises(UsageError, match="2 keys but 1 values"):
            one.multi_put(["a", "b"], [[1, 7]])
    assert store.multi_get(["a", "b"]) == [None, None]


def test_keys_are_asked_for_in_parts(stand_in):
    store = stand_in.backend(batch_size=100).open("visits")
    stand_in.cluster.calls.clear()
    keys = [f"k{at}" for at in range(250)]
    store.multi_put(keys, [[at, 7] for at in range(250)])
    assert store.multi_get(keys) == [[at, 7] for at in range(250)]
    assert stand_in.cluster.calls == [("batch_write", size) for size in (100, 100, 50)] + [
        ("batch_read", size) for size in (100, 100, 50)
    ]


def test_the_place_of_a_key_is_made_once_from_its_get_to_its_put(stand_in, monkeypatch):
    writer = stand_in.backend().open("visits").filtered_writer(TOKEN)
    made = []
    monkeypatch.setattr(Records, "place", lambda self, key, make=Records.place: made.append(key) or make(self, key))
    for keys in (["a", "b"], ["b", 1]):
        writer.multi_get(keys)
        writer.multi_put(keys, [[1, 7], [2, 7]])
    assert made == ["a", "b", "b", 1]


def test_a_put_of_other_keys_than_were_read_goes_to_its_own_records(store):
    writer = store.filtered_writer(TOKEN)
    keys = ["a", "b"]
    writer.multi_get(keys)
    keys[1] = "c"
    writer.multi_put(keys, [[1, 7], [2, 7]])
    writer.multi_get(keys)
    writer.multi_put(["d", "c", "d"], [[0, 7], [3, 7], [4, 7]])
    assert store.multi_get(["a", "b", "c", "d"]) == [[1, 7], None, [3, 7], [4, 7]]


def test_a_filter_is_given_to_the_client_once_for_each_batch(stand_in, monkeypatch):
    """The client compiles a filter anew for each policy that holds one."""
    writes = []

    def seen(self, batch, policy, write=StandInClient.batch_write):
        writes.append((policy, [one.policy for one in batch.batch_records]))
        return write(self, batch, policy)

    monkeypatch.setattr(StandInClient, "batch_write", seen)
    writer = stand_in.backend(batch_size=2).open("visits").filtered_writer(TOKEN)
    writer.multi_put(["a", "b", "c"], [[1, 7], [2, 7], [3, 7]])
    assert [("expressions" in policy, len(each)) for policy, each in writes] == [(True, 2), (True, 1)]
    assert not any("expressions" in own for _, each in writes for own in each)


def test_records_are_laid_out_for_other_clients(place, store):
    store.multi_put(["user-42", 42], [[4, 3, 7], [4, 7]])
    assert place.bins("user-42") == {"record": [4, 3, 7]}
    assert place.bins(42) == {"record": [4, 7]}
    place.backend(bin="b").open("visits").multi_put(["user-7"], [[1, 7]])
    assert place.bins("user-7") == {"b": [1, 7]}


def test_a_record_of_something_else_is_corrupt_and_not_absent(place, store):
    place.client.put(place.place("a"), {"other": 1})
    with pytest.raises(CorruptRecordError, match=r"'a'.*no bin 'record'"):
        store.multi_get(["a"])


def test_a_state_that_has_no_set_in_the_url_has_its_own(stand_in):
    backend = StandInBackend.from_url(f"aerospike://127.0.0.1:{stand_in.cluster.port}/test")
    backend.open("visits").multi_put(["a"], [[1, 7]])
    backend.open("bytes").multi_put(["a"], [[2, 7]])
    assert stand_in.client.get(("test", "visits", "a"))[2] == {"record": [1, 7]}
    assert backend.open("bytes").multi_get(["a"]) == [[2, 7]]


def test_a_set_holds_one_state(place):
    Job(place.backend(), state="one")
    with pytest.raises(CorruptRecordError, match="ledger of state 'one'"):
        Job(place.backend(), state="two")


def test_a_record_that_is_too_large_is_named(store):
    with pytest.raises(TooLargeError, match="1 of 2 keys failed, the first is 'large'") as caught:
        store.multi_put(["a", "large"], [[1, 7], ["x" * 2**20, 7]])
    assert caught.value.key == "large"
    store.multi_put(["large"], [["x" * 1_000_000, 7]])
    assert store.multi_get(["large"]) == [["x" * 1_000_000, 7]]


# The filter


def test_a_record_of_a_later_txid_is_not_replaced(store):
    store.multi_put(["later", "same", "earlier"], [[1, None, 8], [1, None, 7], [1, None, 6]])
    writer = store.filtered_writer(TOKEN)
    with pytest.raises(FencedError, match=r"txid 7 of epoch 1.*'later'") as caught:
        writer.multi_put(["absent", "later"], [[2, None, 7], [2, None, 7]])
    assert (caught.value.txid, caught.value.state) == (7, "visits")
    writer.multi_put(["same", "earlier"], [[2, 1, 7], [2, 1, 7]])
    assert store.multi_get(["later", "same", "earlier"]) == [[1, None, 8], [2, 1, 7], [2, 1, 7]]


def test_a_block_of_a_later_txid_is_not_replaced(store):
    blocks = BlockCodec("visits", [Field("n", "Count", "bigint")], 5, native=True)
    before, now = blocks.block(b"a\nb\n", [1, 2]), blocks.block(b"a\nb\n", [1, 3])
    late, writer = (SerializedMap(store.filtered_writer(FenceToken(1, txid)), blocks) for txid in (6, 7))
    writer.multi_put(["0", "1"], [(7, now, before), (7, now, None)])
    with pytest.raises(FencedError, match=r"txid 6 of epoch 1"):
        late.multi_put(["0"], [(6, before, None)])
    (txid, value, earlier), second = writer.multi_get(["0", "1"])
    assert (txid, blocks.values(value), blocks.values(earlier), second[2]) == (7, [1, 3], [1, 2], None)


def test_a_late_writer_can_create_which_is_why_the_one_rule_calls_it_dead(store):
    store.filtered_writer(TOKEN).multi_put(["a"], [[5, None, 7]])
    assert store.multi_get(["a"]) == [[5, None, 7]]


def test_a_refused_record_in_a_later_part_refuses_the_put(place):
    store = place.backend(batch_size=2).open("visits")
    store.multi_put(["k4"], [[1, 8]])
    with pytest.raises(FencedError, match="'k4'"):
        store.filtered_writer(TOKEN).multi_put([f"k{at}" for at in range(5)], [[at, 7] for at in range(5)])


def test_a_record_that_is_no_list_with_a_txid_is_not_replaced(place, store):
    place.client.put(place.place("a"), {"record": "text"})
    with pytest.raises(FencedError, match="or is no list"):
        store.filtered_writer(TOKEN).multi_put(["a"], [[1, 7]])


def test_a_rewrite_replaces_what_is_there_keeps_its_ttl_and_brings_nothing_back(place):
    store = place.backend().open("visits", ttl=1000)
    store.multi_put(["a", "later"], [[1, 6], [1, 8]])
    forever = place.backend().open("visits")
    writer = forever.filtered_writer(TOKEN)
    writer.multi_rewrite(["a", "gone"], [[2, 7], [2, 7]])
    assert store.multi_get(["a", "gone"]) == [[2, 7], None]
    assert 0 < place.ttl("a") <= 1000
    with pytest.raises(FencedError):
        writer.multi_rewrite(["later"], [[2, 7]])
    with pytest.raises(UsageError, match="leave its record"):
        writer.multi_rewrite(["a"], [None])
    assert store.multi_get(["a"]) == [[2, 7]]


# Claims


def test_the_first_to_claim_has_it(place, store):
    assert store.claim(7, 3, "one") == "one"
    assert place.backend().open("visits").claim(7, 3, "two") == "one"
    assert store.claim(7, 3, "one") == "one"
    assert [store.claim(*at, "two") for at in ((7, 4), (8, 3))] == ["two", "two"]


def test_claims_of_two_sets_do_not_mix(place):
    other = place.set + "b"
    assert place.backend().open("s").claim(7, 3, "one") == "one"
    assert place.backend(set=other).open("s").claim(7, 3, "two") == "two"


def test_of_many_at_once_one_has_the_claim(place):
    stores = [place.backend(timeout=10 + at).open("visits") for at in range(8)]  # each a client of its own
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda at=at, one=one: found.append(one.claim(7, 0, f"h{at}")))
        for at, one in enumerate(stores)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_no_call_is_left_to_the_clients_own_timeouts(stand_in, monkeypatch):
    """Those are a second for all, and no second try of a write."""
    seen: list[tuple[str, dict[str, Any]]] = []
    check = StandInClient._check
    monkeypatch.setattr(StandInClient, "_check", lambda *args: (seen.append(args[1:]), check(*args))[1])
    store = stand_in.backend(timeout=7).open("visits")
    move(store, TOKEN)
    move(store, TOKEN)
    assert {policy["max_retries"] for kind, policy in seen if kind == "write"} == {0}, (
        "the ledger's write is tried once"
    )
    store.claim(7, 0, "me")
    store.claim(7, 0, "you")
    for one in (store, store.filtered_writer(TOKEN)):
        one.multi_put(["a"], [[1, None, 7]])
        assert one.multi_get(["a"]) == [[1, None, 7]]
    store.keep_report(b"{}", 9)
    assert store.reports() == [b"{}"]
    assert {kind for kind, _ in seen} == {"read", "write", "batch", "batch_write"}
    assert {policy["total_timeout"] for kind, policy in seen if kind != "batch_write"} == {7000}
    assert all(policy["max_retries"] > 0 for kind, policy in seen if kind in ("read", "batch"))


@pytest.mark.parametrize(("asked", "left"), [(500, 500), (0, aerospike.TTL_NEVER_EXPIRE)])
def test_claims_have_a_ttl_of_their_own_and_outlive_the_ledgers_write(place, asked, left):
    store = place.backend(claim_ttl=asked).open("visits")
    store.claim(7, 3, "one")
    move(store, TOKEN)
    ttl = place.client.get((place.namespace, CLAIMS, f"{place.set}/7/3"))[1]["ttl"]
    assert left - 60 <= ttl <= left
    assert store.claim(7, 3, "two") == "one"


def test_a_claim_whose_reply_was_lost_is_ones_own(stand_in):
    store = stand_in.backend().open("visits")
    stand_in.cluster.faults.append(Fault("put", 9, done=True))
    assert store.claim(7, 3, "one") == "one"


def test_a_namespace_that_refuses_a_ttl_says_what_to_set(stand_in):
    stand_in.cluster.ttl_allowed = False
    with pytest.raises(StoreError, match="nsup-period"):
        stand_in.backend().open("visits").claim(7, 3, "one")
    assert stand_in.backend(claim_ttl=0).open("visits").claim(7, 3, "one") == "one"


# The ledger


def move(store: Any, fence: FenceToken) -> None:
    found = store.load()
    assert store.swap(f"ledger at {fence}".encode(), None if found is None else found[1], fence) is not None


def test_a_ledger_is_changed_only_where_it_is_as_expected(place, store):
    other = place.backend().open("visits")
    assert store.load() is None
    first = store.swap(b"\0first", None, TOKEN)
    assert first is not None
    assert other.swap(b"second", None, TOKEN) is None
    assert other.load() == (b"\0first", first)
    second = other.swap(b"second", first, TOKEN)
    assert store.swap(b"third", first, TOKEN) is None
    assert store.load() == (b"second", second)


def test_of_two_drivers_at_once_one_changes_the_ledger(place):
    stores = [place.backend(timeout=10 + at).open("visits") for at in range(6)]
    start = threading.Barrier(len(stores))
    done: list[Any] = []

    def change(at: int, one: Any) -> None:
        start.wait()
        done.append(one.swap(b"driver %d" % at, None, TOKEN))

    threads = [threading.Thread(target=change, args=pair) for pair in enumerate(stores)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sum(one is not None for one in done) == 1


def test_a_ledger_that_is_made_anew_is_not_taken_for_the_old_one(place, store):
    """Its generation is the same again."""
    version = store.swap(b"mine", None, TOKEN)
    if place.cluster is None:
        place.client.remove(place.place("\\ledger"))
    else:
        place.cluster.records.clear()
    assert store.swap(b"next", version, TOKEN) is None
    place.backend().open("visits").swap(b"of another driver", None, TOKEN)
    assert store.swap(b"next", version, TOKEN) is None
    assert store.load()[0] == b"of another driver"


def test_a_write_between_the_read_and_the_write_of_a_swap_is_seen(stand_in):
    store = stand_in.backend().open("visits")
    version = store.swap(b"first", None, TOKEN)
    inner, other = store._cluster, stand_in.backend().open("visits")

    def overtaken() -> Any:
        if other.load()[0] == b"first":
            other.swap(b"other", other.load()[1], TOKEN)
        return inner()

    store._cluster = overtaken
    assert store.swap(b"second", version, TOKEN) is None
    assert other.load()[0] == b"other"


def test_neither_ledger_nor_reports_expire_or_are_listed(place):
    store = place.backend().open("visits", ttl=50)
    move(store, TOKEN)
    store.keep_report(b"report", 10)
    store.multi_put(["a"], [[1, 7]])
    assert place.ttl("\\ledger") == place.ttl("\\reports") == aerospike.TTL_NEVER_EXPIRE
    assert scanned(store) == ["a"]


def test_a_request_whose_reply_is_lost_is_retried(stand_in):
    job = Job(stand_in.backend())
    stand_in.cluster.faults.append(Fault("put", 9, done=True))
    attempt = job.ledger.begin(0)
    assert job.ledger.record.in_flight.txid == attempt.txid
    stand_in.cluster.faults.append(Fault("put", 9, done=True))
    job.write(attempt, a=1)
    job.commit(attempt)
    assert contents(stand_in.backend()) == {"a": 1}


def test_an_attempt_in_which_the_cluster_changed_is_not_committed(stand_in):
    job = Job(stand_in.backend())
    attempt = job.attempt(a=1)
    stand_in.cluster.key = "B2"
    with pytest.raises(StoreRestartedError):
        job.commit(attempt)
    job.batch(a=1)
    assert contents(stand_in.backend()) == {"a": 1}


def test_a_cluster_that_cannot_name_itself_is_taken_for_one(stand_in):
    stand_in.cluster.key = "ERROR::unstable-cluster"
    Job(stand_in.backend()).batch(a=1)
    assert contents(stand_in.backend()) == {"a": 1}


def test_a_set_that_was_truncated_stops_the_stream(stand_in):
    job = Job(stand_in.backend())
    job.batch(a=1)
    stand_in.cluster.records.clear()
    with pytest.raises(StoreLostError):
        job.batch(a=1)


# Time to live


def test_records_have_the_ttl_of_the_state_from_their_last_write(place):
    for ttl, left in ((2.5, 3), (1000, 1000)):
        store = place.backend().open("visits", ttl=ttl)
        for one in (store, store.filtered_writer(TOKEN)):
            one.multi_put(["a"], [[1, 7]])
            assert left - 60 <= place.ttl("a") <= left
    place.backend().open("visits").multi_put(["a"], [[1, 7]])
    assert place.ttl("a") == aerospike.TTL_NEVER_EXPIRE  # and not what the namespace has for its default


def test_what_has_expired_is_absent(stand_in):
    store = stand_in.backend().open("visits", ttl=10)
    store.multi_put(["a"], [[1, 7]])
    stand_in.cluster.now += 11
    assert store.multi_get(["a"]) == [None]
    assert scanned(store) == []


@pytest.mark.parametrize("ttl", [0, -1, 11 * 365 * 86_400])
def test_a_ttl_that_aerospike_cannot_have_is_refused(ttl):
    with pytest.raises(ConfigurationError, match="ttl"):
        AerospikeBackend.from_url("aerospike://h/test").open("s", ttl=ttl)


# Scan and reports


@pytest.mark.parametrize("page_size", [1, 7, 1000])
def test_a_scan_lists_each_key_once_in_pages(place, store, page_size):
    keys = [f"k{at}" for at in range(30)]
    store.multi_put(keys, [[1, 7]] * 30)
    move(store, TOKEN)
    pages = list(store.scan(page_size))
    assert sorted(key for page in pages for key in page) == sorted(keys)
    assert all(0 < len(page) <= page_size for page in pages)


def test_a_record_whose_key_was_not_sent_cannot_be_listed_in_silence(place, store):
    """A vacuum that passed it over would lose it."""
    place.client.put(place.place("a"), {"record": [1, 7]})
    store.multi_put(["b", "c"], [[1, 7]] * 2)
    seen = set()
    with pytest.raises(CorruptRecordError, match="without a user key, digest [0-9a-f]{40}") as caught:
        seen.update(key for page in store.scan(1) for key in page)
    assert seen == {"b", "c"}
    assert (caught.value.count, len(caught.value.keys)) == (1, 1)


def test_a_vacuum_begins_nothing_where_it_cannot_list_a_record(place):
    """Its floor would make the record absent, which may be a key that an operator has put back."""
    job, truth = messy(place.backend())
    last = job.ledger.record.last_txid
    with open_reader(place.backend(), "s") as reader:
        before = reader.ledger()
    place.client.put(place.place("restored"), {"record": [41, 41, last]})
    for _ in range(2):
        with pytest.raises(CorruptRecordError, match="without a user key"):
            vacuum(place.backend(), "s", take_over=True)
    with open_reader(place.backend(), "s") as reader:
        assert reader.ledger() == before
        assert reader.get("restored") == {"n": 41}
        assert {key: reader.get(key) for key in truth} == {key: {"n": value} for key, value in truth.items()}


def test_a_drop_ends_beside_a_record_that_it_could_not_list(place):
    Job(place.backend()).batch(a=1)
    place.client.put(place.place("other"), {"record": [1, 7]})
    done = drop(place.backend(), "s")
    assert (done.records, done.foreign) == (1, 1)
    assert place.backend().open("s").load() is None


def test_the_newest_reports_are_kept(store):
    assert store.reports() == []
    for at in range(5):
        store.keep_report(b"\0%d" % at, 3)
    assert store.reports() == [b"\x004", b"\x003", b"\x002"]


# What goes wrong


CODES = [
    (9, StoreUnavailableError),
    (-10, StoreUnavailableError),
    (11, StoreUnavailableError),
    (14, StoreUnavailableError),
    (18, StoreUnavailableError),
    (8, StoreFullError),
    (13, TooLargeError),
    (20, StoreError),
    (22, StoreError),
    (80, StoreAuthError),
    (81, StoreAuthError),
    (4, StoreError),
]


@pytest.mark.parametrize(("code", "kind"), CODES)
def test_what_the_client_says_becomes_an_error_of_ours(stand_in, code, kind):
    store = stand_in.backend(retries=0).open("visits")
    move(store, TOKEN)
    calls = {
        "batch_read": lambda: store.multi_get(["a", "b"]),
        "batch_write": lambda: store.filtered_writer(TOKEN).multi_put(["a", "b"], [[1, 7], [1, 7]]),
        "get": store.load,
        "put": lambda: move(store, TOKEN),
        "query": lambda: scanned(store),
        "info": store.load,
    }
    for method, call in calls.items():
        for fault in [Fault(method, code)] + [Fault(method, code, record=1)] * method.startswith("batch"):
            stand_in.cluster.faults.append(fault)
            with pytest.raises(kind, match=rf"'visits'.*\({code}\)") as caught:
                call()
            assert type(caught.value) is kind
            assert type(pickle.loads(pickle.dumps(caught.value))) is kind
            assert not stand_in.cluster.faults[-1].times


def test_a_whole_batch_that_failed_is_not_taken_for_one_that_did_not(stand_in):
    """Its records say 0, or are not there."""
    store = stand_in.backend(retries=0).open("visits")
    for fault in (Fault("batch_read", 9, missing=True), Fault("batch_read", 0, missing=True)):
        stand_in.cluster.faults.append(fault)
        with pytest.raises(StoreUnavailableError):
            store.multi_get(["a"])
    stand_in.cluster.faults.append(Fault("batch_write", 9))
    with pytest.raises(StoreUnavailableError, match="whole batch of 1 keys"):
        store.multi_put(["a"], [[1, 7]])
    assert store.multi_get(["a"]) == [None]


def test_trouble_that_passes_is_waited_out(stand_in):
    store = stand_in.backend().open("visits")
    stand_in.cluster.faults += [Fault("batch_write", 18, record=1), Fault("batch_read", 9, missing=True)]
    store.filtered_writer(TOKEN).multi_put(["a", "b"], [[1, 7], [2, 7]])
    assert store.multi_get(["a", "b"]) == [[1, 7], [2, 7]]


def test_the_change_of_a_ledger_is_tried_once(stand_in):
    store = stand_in.backend().open("visits")
    stand_in.cluster.faults.append(Fault("put", 9))
    with pytest.raises(StoreUnavailableError):
        store.swap(b"first", None, TOKEN)
    assert store.load() is None


# The backend


def test_a_url_says_it_all():
    backend = resolve(
        "aerospike://me:p%40ss@one:3000,[::1]:3100,three/ns/visits?bin=b&batch_size=100&timeout=2.5&claim_ttl=60"
        "&use_services_alternate=true&tls_cafile=ca.pem&tls_name=cluster"
    )
    assert backend == AerospikeBackend(
        (("one", 3000), ("::1", 3100), ("three", 3000)),
        "ns",
        "visits",
        username="me",
        password="p@ss",
        bin="b",
        batch_size=100,
        timeout=2.5,
        claim_ttl=60,
        use_services_alternate=True,
        tls_cafile="ca.pem",
        tls_name="cluster",
    )
    assert pickle.loads(pickle.dumps(backend)) == backend
    assert "p@ss" not in repr(backend)
    assert "p%40ss" not in repr(backend)
    assert "one:3000,[::1]:3100,three:3000/ns/visits?bin=b" in repr(backend)
    assert resolve("aerospike://h/ns").hosts == (("h", 3000),)


@pytest.mark.parametrize(
    "url",
    [
        "aerospike://",
        "aerospike://h",
        "aerospike://h:3000/",
        "aerospike:///ns/set",
        "aerospike://h:x/ns",
        "aerospike://h:99999/ns",
        f"aerospike://me:{SECRET}@h/ns",
        f"aerospike://me:{SECRET}",
        "aerospike://h/ns#x",
        "aerospike://h/" + "n" * 32,
        "aerospike://h/ns/" + "s" * 64,
        "aerospike://h/ns/a/b",
        "aerospike://h/ns?bin=" + "b" * 16,
        "aerospike://h/ns?batch_size=0",
        "aerospike://h/ns?batch_size=many",
        "aerospike://h/ns?timeout=0",
        "aerospike://h/ns?claim_ttl=-1",
        "aerospike://h/ns?no_such=1",
        "aerospike://h/ns?tls_name=x",
        "aerospike://me@h/ns?use_services_alternate=perhaps",
    ],
)
def test_a_url_that_cannot_be_is_refused_without_its_password(url):
    with pytest.raises(ConfigurationError) as caught:
        resolve(url)
    assert SECRET not in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_the_set_of_the_claims_is_no_state():
    with pytest.raises(ConfigurationError, match="cannot name a set"):
        resolve("aerospike://h/ns").open(CLAIMS)


def test_what_the_client_is_made_with_it_knows():
    """The real client, which looks at the names before it connects."""
    backend = resolve(
        f"aerospike://me:pw@127.0.0.1:{free_port()}/ns?use_services_alternate=true&tls_cafile=/no/such/ca&tls_name=x"
    )
    for config in (backend.config(), {k: v for k, v in backend.config().items() if k != "tls"}):
        with pytest.raises(aerospike.exception.AerospikeError) as caught:
            aerospike.client(config)
        assert caught.value.code != -2, caught.value
    assert "pw" not in repr(backend)


def test_a_password_out_of_the_environment_is_in_no_pickled_spec(monkeypatch):
    backend = resolve("aerospike://me@h/ns?password_env=A_VARIABLE")
    with pytest.raises(ConfigurationError, match="A_VARIABLE, which is not set on "):
        backend.config()
    monkeypatch.setenv("A_VARIABLE", SECRET)
    assert backend.config()["password"] == SECRET
    assert SECRET.encode() not in pickle.dumps(backend)
    assert resolve(repr(backend).split("'")[1]) == backend
    for url in (f"aerospike://me:{quote(SECRET, safe='')}@h/ns?password_env=A", "aerospike://h/ns?password_env=A"):
        with pytest.raises(ConfigurationError, match="password_env"):
            resolve(url)


def test_a_password_in_a_file_is_read_where_a_process_connects(tmp_path):
    file = tmp_path / "password"
    backend = resolve(f"aerospike://me@h/ns?password_file={file}")
    with pytest.raises(ConfigurationError, match="password_file names the file .*: No such file or directory"):
        backend.config()
    file.write_text(f"{SECRET}\n")
    assert backend.config()["password"] == SECRET
    assert resolve(repr(backend).split("'")[1]) == backend
    with pytest.raises(ConfigurationError, match="a user and a password go together"):
        resolve(f"aerospike://h/ns?password_file={file}")


def test_a_store_with_types_of_its_own_has_the_native_serializer():
    for make in (opaque, transactional, non_transactional):
        assert make("aerospike://h/ns", "s").serializer == "native"
        assert make("memory://", "s").serializer == "json"
    assert opaque("aerospike://h/ns", "s", serializer="native") == opaque("aerospike://h/ns", "s")
    assert opaque("aerospike://h/ns", "s", blocks=5).serializer == "blocks:5:native"
    with pytest.raises(ConfigurationError, match="types of its own"):
        opaque("aerospike://h/ns", "s", serializer="json")
    with pytest.raises(ConfigurationError, match="it is written as blocks:5:"):
        opaque("memory://", "s", blocks=5, serializer="blocks:5:native")
    with pytest.raises(ConfigurationError, match="stores bytes"):
        opaque("memory://", "s", serializer="native")
    with pytest.raises(ConfigurationError, match="no serializer 'pickle'"):
        opaque("aerospike://h/ns", "s", serializer="pickle")


def test_a_client_is_made_at_first_use_and_one_per_process(stand_in):
    backend = stand_in.backend(retries=1)
    assert backend.open("s") is not None
    assert backend.client() is backend.client()
    assert backend.client() is stand_in.backend(retries=1).client()
    assert backend.client() is not stand_in.backend(retries=2).client()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_after_use_has_a_client_of_its_own(place):
    store = place.backend().open("visits")
    store.multi_put(["a"], [[1, 7]])
    pid = os.fork()
    if pid == 0:
        try:
            store.multi_put(["b"], [[2, 7]])
            right = store.multi_get(["a", "b"]) == [[1, 7], [2, 7]]
        except BaseException:  # noqa: BLE001  a child must not run the rest of the tests
            right = False
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.multi_get(["a", "b"]) == [[1, 7], [2, 7]]


# Values


VALUES = {
    "bigint": [0, -1, 2**63 - 1, -(2**63)],
    "double": [0.0, -0.0, 1.5, 1e308, 5e-324, math.inf, -math.inf, math.nan, 3.0],
    "string": ["", "a", "é", "x\0y", "\0", "日本\0", "{}"],
    "boolean": [True, False],
    "binary": [b"", b"x\0y", bytes(range(256))],
    "date": [dt.date(1, 1, 1), dt.date(2026, 11, 21)],
    "timestamp": [dt.datetime(2026, 11, 21, 1, 2, 3, 4, tzinfo=dt.UTC)],
    "timestamp_ntz": [dt.datetime(2026, 11, 21, 1, 2, 3)],
    "decimal(38,2)": [Decimal("0.00"), Decimal("-1.50"), Decimal("9" * 36 + ".99")],
    "struct<sum:double,count:bigint>": [(math.nan, 3), (None, 0)],
    "struct<by:timestamp,value:string>": [(dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "x\0y")],
    "any": [[1, "a\0b", {"k\0": [b"\0", None]}], {"a": [1.5, True]}, "text", [math.nan], b"\x93", {"utf8": b"x"}],
}


@pytest.mark.parametrize("kind", ["opaque", "transactional", "non-transactional"])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_each_type_comes_back_as_it_was(store, kind, name):
    for fields in ([Field("f", "Own", name)], [Field("f", "Own", name), Field("g", "Own", name)]):
        codec = RecordCodec(serializer("native"), "visits", kind, fields, [(0, len(fields))])
        values = [value if len(fields) == 1 else (value, None) for value in VALUES[name]] + [None]
        records = {"opaque": [(7, one, None) for one in values], "transactional": [(7, one) for one in values]}.get(
            kind, values
        )
        at_work = SerializedMap(store if kind == "non-transactional" else store.filtered_writer(TOKEN), codec)
        keys = list(range(len(values)))
        at_work.multi_put(keys, records)
        assert repr(at_work.multi_get(keys)) == repr(records)


def test_a_value_that_cannot_be_held_is_refused_before_anything_is_written(store):
    for name, value in (("bigint", 2**63), ("string", "\ud800"), ("any", (1, 2)), ("any", 2**63), ("any", "\ud800")):
        codec = RecordCodec(serializer("native"), "visits", "opaque", [Field("f", "Own", name)], [(0, 1)])
        with pytest.raises(SerializationError):
            SerializedMap(store, codec).multi_put(["a", "b"], [(7, None, None), (7, value, None)])
    assert store.multi_get(["a", "b"]) == [None, None]


@pytest.mark.parametrize(
    "stored",
    [5, "text", [], [1], [1, 2], [1, 2, "x"], [1, 2, -1], ["x", None, 7], [1, None, 7, 8], b"[1,2,3]", {"a": 1}],
)
def test_what_this_state_has_not_written_is_corrupt(place, store, stored):
    place.client.put(place.place("a"), {"record": stored})
    codec = RecordCodec(serializer("native"), "visits", "opaque", [N], [(0, 1)])
    with pytest.raises(CorruptRecordError, match=r"'visits'.*'a'"):
        SerializedMap(store, codec).multi_get(["a"])


@pytest.mark.parametrize(
    ("types", "value", "stored"),
    [
        (["bigint"], 5, [5]),
        (["bigint"], (None,), [[None]]),
        (["bigint"], None, [None]),
        (["bigint", "bigint"], (4, 8), [[4, 8]]),
        (["struct<sum:double,count:bigint>"], (1.5, 2), [[1.5, 2]]),
        (["any"], [5], [[5]]),
        (["any"], 5, [5]),
    ],
)
def test_no_two_non_transactional_values_look_alike(place, store, types, value, stored):
    fields = [Field(f"f{at}", "Own", name) for at, name in enumerate(types)]
    codec = RecordCodec(serializer("native"), "visits", "non-transactional", fields, [(0, len(fields))])
    SerializedMap(store, codec).multi_put(["a"], [value])
    assert place.bins("a") == {"record": stored}
    assert SerializedMap(store, codec).multi_get(["a"]) == [value]


@pytest.mark.parametrize(("types", "bare"), [(["bigint"], 5), (["string"], "text"), (["bigint", "bigint"], [4, 8])])
def test_a_bare_value_of_a_trident_state_is_refused_and_left_as_it_is(place, store, types, bare):
    place.client.put(place.place("a"), {"record": bare})
    fields = [Field(f"f{at}", "Own", name) for at, name in enumerate(types)]
    codec = RecordCodec(serializer("native"), "visits", "non-transactional", fields, [(0, len(fields))])
    state = NonTransactionalMap(SerializedMap(store, codec))
    state.begin_commit(7)
    with pytest.raises(CorruptRecordError, match=r"'a'.*was not overwritten"):
        state.multi_combine(["b", "a"], [bare, bare], lambda bases, partials: partials)
    assert place.bins("a") == {"record": bare}
    assert store.multi_get(["b"]) == [None]


# Keys


def test_a_key_of_one_integer_column_is_an_integer(place):
    codec = KeyCodec([KeyField("k", "bigint")], native=True)
    assert codec.encode_columns([[5, None, 0, -1]], 4) == [5, "\\N", 0, -1]
    assert [codec.decode(key) for key in (5, "\\N", 0)] == [(5,), (None,), (0,)]
    with pytest.raises(KeyEncodingError, match="64 bits"):
        codec.encode(2**63)
    with pytest.raises(KeyEncodingError):
        codec.encode(True)
    with pytest.raises(KeyEncodingError):
        codec.decode("5")
    assert KeyCodec([KeyField("k", "bigint")]).encode(5) == "5"


def test_every_other_key_is_text_and_no_two_are_one():
    for fields in ([("k", "string")], [("k", "bigint"), ("l", "string")], [("k", "date")], []):
        native, text = (KeyCodec([KeyField(*one) for one in fields], native=native) for native in (True, False))
        key = (
            {"k": 5, "l": "a|b"}
            if len(fields) == 2
            else {"k": dt.date(2026, 1, 1)}
            if fields[:1] == [("k", "date")]
            else {"k": "5"}
        )
        values = tuple(key[name] for name, _ in fields)
        assert native.encode(values) == text.encode(values)
        assert native.decode(native.encode(values)) == values
        with pytest.raises(KeyEncodingError):
            native.decode(5)


# The protocol, without Spark


class Job:
    """A driver with its tasks, step by step."""

    def __init__(
        self, backend: Any, *, state: str = "s", keys: str = "string", wrap: Any = None, **changes: Any
    ) -> None:
        self.state = state
        store = backend.open(state, ttl=changes.get("ttl") or None)
        self.store = wrap(store) if wrap else store
        fields = changes.pop("fields", (N,))
        asked = {"owner": "q"} | changes
        self.schema = (KeyField("k", keys),)
        self.ledger = OneLedger.open(
            self.store,
            OpenRequest(
                state=state,
                type="opaque",
                serializer="native",
                keys=self.schema,
                fields=fields,
                clock_txid=START,
                **asked,
            ),
        )
        self.owner = asked["owner"]
        self.next = self.ledger.record.owners[self.owner]

    def write(self, attempt: Any, **values: Any) -> None:
        """What the one task of an attempt does: adds to each key; None removes it."""
        if self.store.claim(attempt.txid, 0, attempt.token.nonce) == attempt.token.nonce:
            self.put(attempt, values)

    def put(self, attempt: Any, values: Any, read: dict[str, Any] | None = None) -> None:
        """``read`` is what a late task has read, if it has."""
        record = self.ledger.record
        codec = RecordCodec(serializer("native"), self.state, "opaque", record.fields, record.field_counts)
        writer = self.store.filtered_writer(attempt.token)
        if read is not None:
            writer.multi_get = lambda keys: [read[key] for key in keys]
        state = OpaqueMap(SerializedMap(writer, codec), attempt.view, written_once=True)
        state.begin_commit(attempt.txid)
        texts = KeyCodec(self.schema, native=True).encode_columns([list(values)], len(values))
        state.multi_combine(texts, list(values.values()), _add_all)

    def attempt(self, **values: Any) -> Any:
        """Writes, and does not commit."""
        attempt = self.ledger.begin(self.next)
        self.write(attempt, **values)
        return attempt

    def commit(self, attempt: Any) -> None:
        self.ledger.commit(Commit(batch_id=self.next, txid=attempt.txid, owner=self.owner))
        self.next += 1

    def batch(self, **values: Any) -> None:
        self.commit(self.attempt(**values))


def _add_all(bases: list[Any], partials: list[Any]) -> list[Any]:
    return [None if part is None else (base or 0) + part for base, part in zip(bases, partials, strict=True)]


def contents(backend: Any, state: str = "s") -> dict[Any, Any]:
    with open_reader(backend, state) as reader:
        return {key[0]: value["n"] for key, value in reader.scan(7)}


def test_orphaned_attempts_do_not_count_and_late_writers_cannot_change_what_does(place):
    job = Job(place.backend())
    job.batch(a=1, gone=1)
    late = job.ledger.begin(job.next)
    job.batch(a=1, gone=None)
    with pytest.raises(StaleBatchError):  # its get finds a later record
        job.put(late, {"a": 100})
    job.put(late, {"phantom": 100})
    assert contents(place.backend()) == {"a": 2}
    job.batch(a=1, phantom=1)
    assert contents(place.backend()) == {"a": 3, "phantom": 1}


def test_a_writer_that_was_overtaken_between_its_get_and_its_put_is_refused(place):
    job = Job(place.backend())
    job.batch(a=1)
    late = job.ledger.begin(job.next)
    writer = job.store.filtered_writer(late.token)
    assert writer.multi_get(["a"]) == [[1, None, START]]
    job.batch(a=1)
    with pytest.raises(FencedError):
        writer.multi_put(["a"], [[100, 1, late.txid]])
    assert contents(place.backend()) == {"a": 2}


def test_a_second_try_of_a_task_writes_nothing_even_after_the_commit(place):
    """There is no fence that would stop it: its claim does."""
    job = Job(place.backend())
    attempt = job.attempt(a=1)
    job.commit(attempt)
    assert job.store.claim(attempt.txid, 0, "second try") != "second try"


def try_of_a_task(backend: Any, attempt: Any, holder: str) -> TaskReport:
    """What an executor does with one row of one partition, 100 more for "a"."""
    task = BatchTask(
        spec=opaque(backend, name="s"),
        fields=Fields((N,), {"n": Count()}),
        field_counts=((START, 1),),
        keys=(KeyField("k", "string"),),
        partials=[1],
        attempt=attempt,
        new_values=None,
    )
    batch = pa.RecordBatch.from_pydict({"k": ["a"], "partial": [100], "rows": [1]})
    report = TaskReport(partition=0, holder=holder)
    assert list(task._apply(iter([batch]), report)) == []
    return report


def test_a_try_that_comes_when_the_claim_of_the_first_has_expired_writes_nothing(stand_in):
    """Its attempt is committed, so that what it wrote would count."""
    job = Job(stand_in.backend())
    attempt = job.ledger.begin(job.next)
    assert not try_of_a_task(stand_in.backend(), attempt, "first").lost_claim
    job.commit(attempt)
    assert contents(stand_in.backend()) == {"a": 100}
    stand_in.cluster.now += 2 * 86_400
    assert try_of_a_task(stand_in.backend(), attempt, "late").lost_claim
    assert contents(stand_in.backend()) == {"a": 100}


def test_a_try_of_an_attempt_that_the_store_has_lost_writes_nothing(stand_in):
    """The same txid is given out again, under another name."""
    job = Job(stand_in.backend())
    lost: Any = job.ledger.begin(job.next)
    again = lost._replace(token=lost.token._replace(nonce="of another incarnation"))
    assert try_of_a_task(stand_in.backend(), again, "late").lost_claim


@pytest.mark.parametrize("seed", range(3))
def test_any_way_through_batches_deaths_vacuums_and_late_writers_counts_each_batch_once(stand_in, seed):
    chance = random.Random(seed)
    backend = stand_in.backend(batch_size=3)
    job, truth, late = Job(backend), dict[str, int](), list[Any]()
    users = [f"u{at}" for at in range(8)]

    def some(amount: int) -> dict[str, int | None]:
        return {user: chance.choice([amount, amount, None]) for user in chance.sample(users, chance.randint(1, 8))}

    def reading(attempt: Any) -> tuple[Any, dict[str, int | None], dict[str, Any]]:
        """A task that has read and not yet written."""
        return attempt, some(10**6), dict(zip(users, job.store.multi_get(users), strict=True))

    for _ in range(60):
        match chance.randrange(7):
            case 0:
                late.append(reading(job.attempt(**some(10**6))))
            case 1:
                late.append(reading(job.ledger.begin(job.next)))
            case 2 | 3 if late:
                attempt, values, read = chance.choice(late)
                for user, value in values.items():
                    with suppress(FencedError, StaleBatchError):
                        job.put(attempt, {user: value}, read)
            case 4:
                vacuum(backend, "s", page_size=3, take_over=True)
                job = Job(backend)
            case 5:
                job = Job(backend)
            case _:
                values = some(1)
                job.batch(**values)
                for user, value in values.items():
                    truth[user] = (truth.get(user) or 0) + 1 if value is not None else None
        assert contents(backend) == {user: value for user, value in truth.items() if value is not None}


def test_two_drivers_are_told_apart(place):
    first = Job(place.backend())
    attempt = first.attempt(a=1)
    second = Job(place.backend())
    with pytest.raises(FencedError):
        first.commit(attempt)
    second.batch(a=1)
    assert contents(place.backend()) == {"a": 1}


# Vacuum


def messy(backend: Any) -> tuple[Job, dict[str, int]]:
    job = Job(backend)
    job.batch(kept=1, dead=2, gone=3, touched=0)
    job.attempt(dead=20, phantom=5, gone=None)
    job.batch(gone=None, touched=1)
    job.attempt(left=1, touched=9)
    job.batch(kept=3)
    return job, {"kept": 4, "dead": 2, "touched": 1}


def test_a_vacuum_rewrites_every_record_keeps_tombstones_and_lifts_the_floor(place):
    _, truth = messy(place.backend())
    done = vacuum(place.backend(), "s", page_size=2)
    assert contents(place.backend()) == truth
    store = place.backend().open("s")
    keys = sorted(scanned(store))
    records = dict(zip(keys, store.multi_get(keys), strict=True))
    assert records == {key: [truth.get(key)] * 2 + [done.txid] for key in [*truth, "gone", "left", "phantom"]}
    assert (done.scanned, done.rewritten, done.dropped) == (6, 6, 0)
    with open_reader(place.backend(), "s") as reader:
        ledger = reader.ledger()
    assert (ledger.dead, ledger.floor, ledger.last_txid, ledger.in_flight) == ((), done.txid, done.txid, None)


def test_what_a_late_writer_brings_after_a_vacuum_is_absent(place):
    job, truth = messy(place.backend())
    late = job.ledger.begin(job.next)
    vacuum(place.backend(), "s", take_over=True)
    job.put(late, {"never seen": 7})
    for key in ("kept", "gone", "phantom"):
        with pytest.raises(FencedError):
            job.store.filtered_writer(late.token).multi_put([key], [[9, 9, late.txid]])
    assert contents(place.backend()) == truth
    again = Job(place.backend())
    again.batch(**{"kept": 1, "never seen": 1})
    assert contents(place.backend()) == truth | {"kept": 5, "never seen": 1}


def test_a_batch_that_begins_meanwhile_ends_the_vacuum_and_harms_nothing(place):
    job, truth = messy(place.backend())

    def begin(_: Any) -> None:
        job.batch(kept=1)

    with pytest.raises(FencedError):
        vacuum(place.backend(), "s", page_size=2, on_page=begin)
    assert contents(place.backend())["kept"] >= truth["kept"] + 1
    job.batch(touched=1)
    assert contents(place.backend()) == truth | {"kept": job.next - 4 + truth["kept"], "touched": 2}


def test_a_vacuum_keeps_the_time_that_records_have_left(place):
    job = Job(place.backend(), ttl=1000)
    job.batch(a=1)
    vacuum(place.backend(), "s")
    assert 0 < place.ttl("a") <= 1000


def test_after_the_end_of_a_ttl_a_vacuum_writes_all_records_without_one(place):
    job = Job(place.backend(), ttl=1000)
    job.batch(a=1, b=2)
    Job(place.backend(), ttl=0).batch(b=3)
    assert [0 < place.ttl(key) <= 1000 for key in "ab"] == [True, False]
    vacuum(place.backend(), "s")
    assert [0 < place.ttl(key) <= 1000 for key in "ab"] == [False, False]
    Job(place.backend()).batch(a=2)
    assert contents(place.backend()) == {"a": 3, "b": 5}


def test_a_store_of_faults_over_it_has_its_capabilities(stand_in):
    job = Job(stand_in.backend(), wrap=lambda store: FaultyStore(store, record=True))
    job.batch(a=1)
    assert isinstance(job.store, FilteredWrites)
    assert not isinstance(job.store, FencedWrites)
    assert {call.method for call in job.store.calls} >= {"claim", "multi_get", "multi_put", "swap"}


# Readers


def test_a_reader_sees_whole_batches(place):
    job = Job(place.backend())
    job.batch(a=1, b=1)
    attempt = job.attempt(a=5)
    with open_reader(place.backend(), "s") as reader:
        assert reader.multi_get(["a", "b", "x"]) == [{"n": 1}, {"n": 1}, None]
        job.commit(attempt)
        assert reader.get("a") == {"n": 6}
        assert dict(reader.scan()) == {("a",): {"n": 6}, ("b",): {"n": 1}}
        assert reader.ledger().serializer == "native"


def test_a_state_keyed_by_numbers_is_read_by_numbers(place):
    job = Job(place.backend(), keys="bigint")
    attempt = job.ledger.begin(0)
    job.put(attempt, {0: 5, -1: 6, None: 7})
    job.commit(attempt)
    with open_reader(place.backend(), "s") as reader:
        assert reader.multi_get([0, -1, (None,), 5]) == [{"n": 5}, {"n": 6}, {"n": 7}, None]
        assert dict(reader.scan(2)) == {(0,): {"n": 5}, (-1,): {"n": 6}, (None,): {"n": 7}}
    assert place.bins(0) == {"record": [5, None, attempt.txid]}


def test_a_field_that_was_added_is_null_in_older_records(place):
    job = Job(place.backend())
    job.batch(old=1)
    wider = Job(place.backend(), fields=(N, Field("text", "Last(text)", "string")))
    wider.ledger.begin(wider.next)
    with open_reader(place.backend(), "s") as reader:
        assert reader.get("old") == {"n": 1, "text": None}


# Checkup


def test_a_checkup_says_what_can_lose_what_was_acknowledged(stand_in):
    stand_in.cluster.ttl_allowed = False
    found = {one.subject: one.severity for one in stand_in.backend().open("s").checkup(86_400)}
    assert found == {
        "ttl": "error",
        "evictions": "ok",
        "consistency": "warning",
        "persistence": "warning",
        "stop writes": "ok",
    }


def test_a_checkup_of_a_namespace_that_is_well():
    well = (
        "nsup-period=120;evicted_objects=0;strong-consistency=true;storage-engine=device;stop_writes=false;"
        "clock_skew_stop_writes=false;storage-engine.commit-to-device=true"
    )
    assert {one.severity for one in judge(well, claims_expire=True)} == {"ok"}
    assert not any(one.advice for one in judge(well, claims_expire=True))
    bad = "nsup-period=0;evicted_objects=5;replication-factor=1;storage-engine=memory;clock_skew_stop_writes=true"
    findings = list(judge(bad, claims_expire=True))
    assert [one.severity for one in findings] == ["error", "error", "warning", "warning", "error"]
    assert all(one.advice for one in findings)
    assert next(iter(judge(bad, claims_expire=False))).severity == "ok"
    backed = "storage-engine=memory;storage-engine.file[0]=/data;effective_replication_factor=2"
    assert [one.severity for one in judge(backed, claims_expire=False)] == ["ok"] * 5


@pytest.mark.parametrize(
    ("settings", "severity", "said"),
    [
        ("strong-consistency=true;storage-engine.commit-to-device=true", "ok", "commit-to-device true"),
        ("strong-consistency=true;storage-engine.commit-to-device=false", "warning", "commit-to-device false"),
        ("strong-consistency=true", "warning", "commit-to-device unknown"),
        (
            "strong-consistency=true;storage-engine.commit-to-device=true;strong-consistency-allow-expunge=true",
            "ok",
            "expunge is allowed: what was removed or has expired may come back",
        ),
        ("strong-consistency=false", "ok", "2 copies of each record: a network that splits loses acknowledged writes"),
    ],
)
def test_a_checkup_says_what_each_consistency_can_lose(settings, severity, said):
    [found] = [
        one
        for one in judge(f"{settings};effective_replication_factor=2", claims_expire=True)
        if one.subject == "consistency"
    ]
    assert (found.severity, said in found.found) == (severity, True)
    assert bool(found.advice) == (severity == "warning")


def test_a_number_of_copies_that_is_not_known_is_not_taken_for_two():
    [found] = [one for one in judge("strong-consistency=false", claims_expire=True) if one.subject == "consistency"]
    assert found.severity == "warning"


def test_the_doctor_sees_the_checkup_and_misses_no_fence(place):
    Job(place.backend()).batch(a=1)
    subjects = [one.subject for one in examine(place.backend(), "s")]
    assert {"ttl", "evictions", "consistency", "persistence", "stop writes"} <= set(subjects)
    assert "store" not in subjects  # where a capability that is missing would stand


# Spark


class Longest(CombinerAggregator):
    """In plain Python, so that rows are folded key by key."""

    value_type = "string"

    def columns(self) -> tuple[str, ...]:
        return ("page",)

    def init(self, row: Any) -> Any:
        return row["page"]

    def combine(self, a: Any, b: Any) -> Any:
        return max(a, b, key=len)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("apply_on", "own"), [("driver", {}), ("executors", {"own": Longest()})], ids=["driver", "executors"]
)
def test_batches_of_spark_count_into_it(spark, stand_in, apply_on, own):
    """Keys that are integers, 0 among them; by Catalyst on the driver, row by row on executors."""
    rows = spark.createDataFrame([(0, "a"), (0, "bb"), (7, "c"), (None, "d")], "user bigint, page string")
    spec = opaque(stand_in.backend(), name="visits", apply_on=apply_on, repeat="allowed")
    seen: list[Any] = []
    counts = newStream("visits", rows).groupBy("user").persistentAggregate(spec, n=Count(), **own)
    job = counts.newValuesStream().foreachBatch(
        lambda frame, _: seen.extend((row.user, row.n) for row in frame.collect())
    )
    job(rows, 0)
    job(rows, 1)
    job(rows, 1)  # which is committed already, and read back
    longest = {"own": "bb"} if own else {}
    with open_reader(spec.backend, "visits") as reader:
        assert reader.get(0) == {"n": 4} | longest
        assert {key: value["n"] for key, value in reader.scan()} == {(0,): 4, (7,): 2, (None,): 2}
        assert [one.batch_id for one in reader.reports()] == [1, 0]
    assert sorted(seen, key=str) == sorted([(0, 2), (7, 1), (None, 1)] + 2 * [(0, 4), (7, 2), (None, 2)], key=str)
    assert stand_in.bins(0)["record"][-1] == stand_in.bins(7)["record"][-1]
