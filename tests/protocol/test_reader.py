"""Reading without Spark: whole batches only, whoever writes meanwhile."""

from __future__ import annotations

import contextlib
import math
import pickle
from decimal import Decimal
from typing import Any

import pytest
from driven_reader import WAYS, reads_of
from hypothesis import given, settings
from hypothesis import strategies as st
from one_ledger import OneLedger

from mapstate.aggregators import Avg, Count, Sum
from mapstate.backends.memory import MemoryBackend
from mapstate.backends.sqlite import SqliteBackend
from mapstate.capabilities import Scan
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    KeyEncodingError,
    LedgerLostError,
    StaleBatchError,
    StateNotFoundError,
    StoreUnavailableError,
    UnknownColumnError,
    UsageError,
)
from mapstate.keys import KeyCodec
from mapstate.maps import NonTransactionalMap, OpaqueMap, TransactionalMap
from mapstate.maps.serialized import SerializedMap
from mapstate.protocol.ledger_record import Commit, OpenRequest, encode_ledger
from mapstate.protocol.records import OpaqueValue
from mapstate.protocol.stored_ledger import LEDGER_KEY, decode_ledger, ledger_store
from mapstate.protocol.upkeep import begin_drop
from mapstate.schema import Field, KeyField
from mapstate.serializers import RecordCodec, serializer

START = 1000
VISITS = Field("visits", "Count", "bigint")
BYTES = Field("bytes", "Sum(bytes)", "bigint")
STATE = "visits_by_user"
USER = (KeyField("user", "string"),)
MAPS = {"opaque": OpaqueMap, "transactional": TransactionalMap, "non-transactional": NonTransactionalMap}


class PlainStore:
    """A third party's: two methods, and a way to list its keys."""

    def __init__(self):
        self.records = {}

    def multi_get(self, keys):
        return [self.records.get(key) for key in keys]

    def multi_put(self, keys, values):
        self.records.update(zip(keys, values, strict=True))

    def scan(self, page_size):
        keys = list(self.records)
        for at in range(0, len(keys), page_size):
            yield keys[at : at + page_size]


class PlainBackend:
    shared_between_processes = False

    def __init__(self):
        self.store: Any = PlainStore()

    def open(self, state, *, ttl=None):
        return self.store


open_reader: Any = None
StateReader: Any = None


@pytest.fixture(scope="module", params=list(WAYS), autouse=True)
def way(request):
    """Each test reads from a thread, and on an event loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mapstate.backends.memory._stores", {})  # states of one name are new for each
        for name, value in WAYS[request.param].items():
            patch.setitem(globals(), name, value)
        yield


@pytest.fixture(params=["memory", "sqlite", "plain"])
def backend(request, tmp_path):
    return {
        "memory": lambda: MemoryBackend(str(tmp_path)),
        "sqlite": lambda: SqliteBackend(str(tmp_path / "reader.db")),
        "plain": PlainBackend,
    }[request.param]()


class Job:
    """What a streaming query does to a state, without Spark: counts per key, batch by batch."""

    def __init__(self, backend, *, kind="opaque", fields=(VISITS,), keys=USER, **opening):
        self.store = backend.open(STATE)
        self.kind = kind
        self.keys = KeyCodec(keys)
        self.ledger = OneLedger.open(
            self.store,
            OpenRequest(
                **{
                    "state": STATE,
                    "type": kind,
                    "serializer": "json",
                    "keys": keys,
                    "fields": fields,
                    "owner": "query-1",
                    "clock_txid": START,
                }
                | opening
            ),
        )

    def attempt(self, values, batch_id=None):
        """Begins and writes: each key gets its value added, field by field; None removes it."""
        record = self.ledger.record
        attempt = self.ledger.begin(record.owners[record.owner] if batch_id is None else batch_id)
        self.write(attempt, values)
        return attempt

    def write(self, attempt, values, store=None):
        record = self.ledger.record
        codec = RecordCodec(serializer("json"), STATE, self.kind, record.fields, record.field_counts)
        records = SerializedMap(store or self.store, codec)
        views = () if self.kind == "non-transactional" else (attempt.view,)
        state = MAPS[self.kind](records, *views)
        state.begin_commit(attempt.txid)
        texts = [self.keys.encode(key) for key in values]
        state.multi_update(texts, [lambda old, new=new: self._add(old, new) for new in values.values()])

    @staticmethod
    def _add(old, new):
        if old is None or new is None:
            return new
        if isinstance(new, tuple):
            return tuple(b if a is None else a + b for a, b in zip(old, new, strict=True))
        return old + new

    def commit(self, attempt, **more):
        owner = self.ledger.record.owner
        self.ledger.commit(Commit(batch_id=attempt.batch_id, txid=attempt.txid, owner=owner, **more))

    def batch(self, values):
        attempt = self.attempt(values)
        self.commit(attempt)
        return attempt

    def vacuum(self):
        """As a vacuum does it: what is dead becomes what it stands for, under a txid that will count."""
        operator = self.ledger.operator
        attempt = operator.begin_operator("vacuum")
        codec = RecordCodec(serializer("json"), STATE, "opaque", (VISITS,), [(0, 1)])
        for page in list(self.store.scan(10)):
            keys = [key for key in page if key != LEDGER_KEY]
            records = codec.loads(keys, self.store.multi_get(keys))
            values = attempt.view.values(records, attempt.txid)
            dead = {
                key: value
                for key, record, value in zip(keys, records, values, strict=True)
                if record[0] not in attempt.view
            }
            self.store.multi_put(
                list(dead), codec.dumps([OpaqueValue(attempt.txid, one, one) for one in dead.values()])
            )
        operator.commit_vacuum(attempt.txid)


@contextlib.contextmanager
def reading(backend, **options):
    with open_reader(backend, STATE, **options) as reader:
        yield reader


def counts(reader, *keys):
    return [value and value["visits"] for value in reader.multi_get(keys)]


# Whole batches


def test_committed_values_are_read_and_absent_keys_are_none(backend):
    job = Job(backend)
    job.batch({"a": 1, "b": 2})
    with reading(backend) as reader:
        assert reader.get("a") == {"visits": 1}
        assert reader.get(("b",)) == reader.get(["b"]) == {"visits": 2}
        assert reader.get("no") is None
        assert reader.multi_get(["b", "no", "a", "b"]) == [{"visits": 2}, None, {"visits": 1}, {"visits": 2}]
        assert reader.multi_get([]) == []
        job.batch({"a": 5})
        assert counts(reader, "a", "b") == [6, 2]


def test_an_attempt_in_flight_is_invisible_until_it_commits_and_then_whole(backend):
    job = Job(backend)
    job.batch({"a": 1, "b": 1})
    with reading(backend) as reader, reading(backend, consistency="latest") as latest:
        attempt = job.attempt({"a": 10, "c": 10})
        assert counts(reader, "a", "b", "c") == [1, 1, None]
        assert counts(latest, "a", "b", "c") == [11, 1, 10]
        job.commit(attempt)
        assert counts(reader, "a", "b", "c") == counts(latest, "a", "b", "c") == [11, 1, 10]


def test_a_batch_that_died_and_was_replayed_with_other_keys_leaves_no_phantom(backend):
    job = Job(backend)
    job.batch({"a": 10})
    job.attempt({"a": 1, "b": 1})
    with reading(backend) as reader:
        assert counts(reader, "a", "b") == [10, None]
        job = Job(backend)
        job.batch({"b": 1})
        assert counts(reader, "a", "b") == [10, 1]
        job.batch({"a": 1})
        assert counts(reader, "a", "b") == [11, 1]
        assert list(reader.scan()) == [(("a",), {"visits": 11}), (("b",), {"visits": 1})]


def test_batch_zero_is_a_batch(backend):
    job = Job(backend, clock_txid=0)
    with reading(backend) as reader:
        attempt = job.attempt({"a": 0})
        assert attempt.txid == attempt.batch_id == 0
        assert reader.get("a") is None
        job.commit(attempt)
        assert reader.get("a") == {"visits": 0}


def test_a_rollback_is_visible_at_once(backend):
    job = Job(backend)
    job.batch({"a": 1})
    job.batch({"a": 1, "b": 1})
    with reading(backend) as reader:
        assert counts(reader, "a", "b") == [2, 1]
        job.ledger.rolled_back()
        assert counts(reader, "a", "b") == [1, None]
        job.batch({"b": 7})
        assert counts(reader, "a", "b") == [1, 7]


def test_a_removed_key_is_absent_and_comes_back_if_the_removal_died(backend):
    job = Job(backend)
    job.batch({"a": 1, "b": 1})
    attempt = job.attempt({"a": None})
    with reading(backend) as reader:
        assert counts(reader, "a") == [1]
        job.commit(attempt)
        assert counts(reader, "a", "b") == [None, 1]
        assert [key for key, _ in reader.scan()] == [("b",)]
        job.attempt({"b": None})
        job.batch({"a": 3})
        assert counts(reader, "a", "b") == [3, 1]


def test_a_reset_state_is_empty_at_once(backend):
    Job(backend).batch({"a": 1})
    with reading(backend) as reader, reading(backend, consistency="latest") as latest:
        assert counts(reader, "a") == counts(latest, "a") == [1]
        job = Job(backend, owner="query-2", on_new_owner="reset")
        assert counts(reader, "a") == counts(latest, "a") == [None]
        assert list(reader.scan()) == []
        job.batch({"a": 7})
        assert counts(reader, "a") == [7]


@pytest.mark.parametrize("kind", ["transactional", "non-transactional"])
def test_states_that_keep_nothing_older_are_read_latest(backend, kind):
    job = Job(backend, kind=kind)
    job.batch({"a": 1})
    job.attempt({"a": 1})
    with reading(backend) as reader:
        assert counts(reader, "a", "no") == [2, None]
        assert list(reader.scan()) == [(("a",), {"visits": 2})]


def test_vacuum_changes_nothing_that_is_read(backend):
    job = Job(backend)
    job.batch({"a": 1, "b": 1})
    job.attempt({"a": 5, "c": 5})
    job.batch({"b": 1})
    with reading(backend) as reader:
        before = sorted(reader.scan())
        assert before == [(("a",), {"visits": 1}), (("b",), {"visits": 2})]
        job.vacuum()
        assert reader.ledger().rewrites == 1
        assert sorted(reader.scan()) == before
        assert counts(reader, "a", "b", "c") == [1, 2, None]
        job.batch({"a": 1})
        assert counts(reader, "a", "b") == [2, 2]


def test_a_state_is_read_as_it_was_before_its_last_batch_until_something_begins_after_it(backend):
    job = Job(backend)
    job.batch({"a": 1, "b": 1})
    job.batch({"a": 1, "b": None, "c": 1})
    with StateReader(backend, STATE, "committed", {}, before=("query-1", 1)) as reader:
        assert counts(reader, "a", "b", "c") == [1, 1, None]
        job.attempt({"a": 5})  # keeps 2 as the value before
        with pytest.raises(UsageError, match="began since"):
            counts(reader, "a", "b", "c")


def test_a_vacuum_that_did_not_end_has_dropped_what_was_before_the_last_batch(backend):
    job = Job(backend)
    job.batch({"a": 1})
    job.batch({"a": None})
    job.ledger.operator.begin_operator("vacuum")
    with (
        StateReader(backend, STATE, "committed", {}, before=("query-1", 1)) as reader,
        pytest.raises(UsageError, match="began since"),
    ):
        counts(reader, "a")


# While others write


class Interleaved:
    """A store in which something happens between a reader's ledger and its records."""

    def __init__(self, inner):
        self.inner = inner
        self.before_records = []
        self.after_records = []
        self.reads = 0

    def load(self):
        return ledger_store(self.inner).load()

    def swap(self, record, expected, fence):
        return ledger_store(self.inner).swap(record, expected, fence)

    def multi_get(self, keys):
        self.reads += 1
        if self.before_records:
            self.before_records.pop(0)()
        found = self.inner.multi_get(keys)
        if self.after_records:
            self.after_records.pop(0)()
        return found

    def multi_put(self, keys, values):
        self.inner.multi_put(keys, values)

    def scan(self, page_size):
        return self.inner.scan(page_size)


class InterleavedBackend:
    shared_between_processes = True

    def __init__(self, inner):
        self.store = Interleaved(inner.open(STATE))

    def open(self, state, *, ttl=None):
        return self.store


@pytest.fixture
def overtaken(backend):
    """A job, a reader, and the store between them."""
    job = Job(backend)
    job.batch({"a": 1, "b": 1})
    between = InterleavedBackend(backend)
    with open_reader(between, STATE) as reader:
        yield job, reader, between.store


def test_a_reader_that_is_overtaken_reads_again_and_never_half_of_a_batch(overtaken):
    job, reader, store = overtaken
    store.before_records = [lambda: job.batch({"a": 1, "b": 1})]
    assert counts(reader, "a", "b") == [2, 2]
    assert store.reads == 2
    store.before_records = [lambda: job.batch({"a": 1, "b": 1})] * 3
    assert counts(reader, "a", "b") == [5, 5]


def test_a_reader_between_begin_and_commit_sees_the_batch_before(overtaken):
    job, reader, store = overtaken
    attempt = job.attempt({"a": 1, "b": 1})
    store.before_records = [lambda: job.commit(attempt)]
    assert counts(reader, "a", "b") == [1, 1]  # as of its ledger, which is a whole batch
    assert counts(reader, "a", "b") == [2, 2]


def test_a_reader_that_met_a_rollback_and_another_batch_reads_again(overtaken):
    job, reader, store = overtaken
    job.batch({"a": 1})

    def roll_back_and_go_on():
        job.ledger.rolled_back()
        job.batch({"b": 5})

    store.before_records = [roll_back_and_go_on]
    assert counts(reader, "a", "b") == [1, 6]


def test_a_key_purged_while_it_was_read_is_never_reported_absent_against_its_own_ledger():
    """Its ledger says 1; then the key is removed and purged; then its record is asked for, and is absent."""
    backend = PlainBackend()
    job = Job(backend)
    job.batch({"a": 1, "b": 1})
    between = InterleavedBackend(backend)
    text = job.keys.encode("a")

    def remove_and_purge_and_write_b():
        job.batch({"a": None})
        del backend.store.records[text]
        operator = job.ledger.operator
        operator.commit_vacuum(operator.begin_operator("vacuum").txid)

    with open_reader(between, STATE) as reader:
        between.store.before_records = [remove_and_purge_and_write_b]
        assert counts(reader, "a", "b") == [None, 1]
        assert between.store.reads == 2


class PieceByPiece(PlainStore):
    """Asks for one key after the other; something may happen ahead of each."""

    def __init__(self):
        super().__init__()
        self.ahead_of = {}

    def multi_get(self, keys):
        return [self._get(key) for key in keys]

    def _get(self, key):
        self.ahead_of.pop(key, bool)()
        return self.records.get(key)


def test_a_state_that_was_emptied_and_begun_anew_while_it_was_read_is_never_shown_in_pieces():
    backend = PlainBackend()
    backend.store = store = PieceByPiece()
    job = Job(backend)
    job.batch({"a": 1, "b": 1})

    def empty_and_begin_anew():
        store.records.clear()
        Job(backend, clock_txid=2 * START).batch({"c": 1})

    with open_reader(backend, STATE) as reader:
        store.ahead_of[job.keys.encode("b")] = empty_and_begin_anew
        assert counts(reader, "a", "b") == [None, None]


def test_a_state_whose_drop_began_while_it_was_read_is_never_shown_in_pieces():
    backend = PlainBackend()
    backend.store = store = PieceByPiece()
    job = Job(backend)
    job.batch({"a": 1, "b": 1})

    def drop_a_part():
        record, version = ledger_store(store).load()
        dropped = begin_drop(decode_ledger(record, STATE), STATE, "session", 2 * START)
        assert ledger_store(store).swap(encode_ledger(dropped), version, dropped.fence()) is not None
        del store.records[job.keys.encode("b")]

    with open_reader(backend, STATE) as reader:
        store.ahead_of[job.keys.encode("b")] = drop_a_part
        assert counts(reader, "a", "b") == [None, None]


def test_fields_added_while_a_reader_reads_are_no_damage(backend):
    Job(backend).batch({"a": 1, "b": 1})
    between = InterleavedBackend(backend)
    with open_reader(between, STATE) as reader:
        assert reader.get("a") == {"visits": 1}
        between.store.before_records = [
            lambda: Job(backend, fields=(VISITS, BYTES)).batch({"a": (1, 50), "c": (1, 60)})
        ]
        assert reader.multi_get(["a", "b", "c"]) == [
            {"visits": 2, "bytes": 50},
            {"visits": 1, "bytes": None},
            {"visits": 1, "bytes": 60},
        ]


def test_a_reader_opened_before_a_field_was_added_shows_it(backend):
    Job(backend).batch({"a": 1, "b": 1})
    with reading(backend) as reader:
        assert reader.get("a") == {"visits": 1}
        job = Job(backend, fields=(VISITS, BYTES))
        assert reader.get("a") == {"visits": 1, "bytes": None}
        job.batch({"a": (1, 50)})
        assert reader.multi_get(["a", "b"]) == [{"visits": 2, "bytes": 50}, {"visits": 1, "bytes": None}]
        assert dict(reader.scan()) == {("a",): {"visits": 2, "bytes": 50}, ("b",): {"visits": 1, "bytes": None}}


def test_a_ledger_that_stays_behind_its_records_is_an_error(backend):
    job = Job(backend)
    job.batch({"a": 1})
    codec = RecordCodec(serializer("json"), STATE, "opaque", (VISITS,), [(0, 1)])
    job.store.multi_put([job.keys.encode("a")], codec.dumps([OpaqueValue(START + 50, 1, None)]))
    with reading(backend) as reader, pytest.raises(StaleBatchError):
        reader.get("a")


class Counting:
    """A store that counts its reads of records."""

    def __init__(self, store):
        self._store = store
        self.reads = 0
        if hasattr(store, "multi_get_with_ledger"):
            self.multi_get_with_ledger = self.counted("multi_get_with_ledger")
        self.multi_get = self.counted("multi_get")

    def counted(self, name):
        def call(keys):
            self.reads += keys != [LEDGER_KEY]
            return getattr(self._store, name)(keys)

        return call

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.mark.parametrize("kind", ["opaque", "transactional"])
def test_a_record_from_the_future_is_asked_for_a_few_times_and_named_with_both_txids(backend, kind):
    job = Job(backend, kind=kind)
    job.batch(dict.fromkeys("abcd", 1))
    for key in "bd":
        record = b"[77777,1]" if kind == "transactional" else b"[77777,1,null]"
        job.store.multi_put([job.keys.encode(key)], [record])
    with reading(backend) as reader:
        counting = Counting(reads_of(reader).store)
        reads_of(reader).store = counting
        with pytest.raises(StaleBatchError, match=rf"'b'.*txid 77777.*above {START} \(1 more") as caught:
            reader.multi_get(list("abcd"))
        assert (caught.value.keys, caught.value.found, caught.value.newest) == (["b", "d"], 77777, START)
        assert counting.reads <= 10
        seen, counting.reads = {}, 0
        with pytest.raises(CorruptRecordError, match="2 keys cannot be read: 'b', 'd'. All other keys were read"):
            seen.update(reader.scan(2))
        assert seen == {("a",): {"visits": 1}, ("c",): {"visits": 1}}
        assert counting.reads <= 15  # the pauses are those of one read, however many pages there are


def test_a_key_of_another_schema_is_named_and_ends_no_scan(backend):
    job = Job(backend, keys=(KeyField("n", "int"),))
    job.batch({1: 1, 2: 2})
    record = job.store.multi_get(["1"])[0]
    job.store.multi_put(["no number", "01|2"], [record, record])
    seen = {}
    with reading(backend) as reader, pytest.raises(CorruptRecordError, match="2 keys.*'no number'"):
        seen.update(reader.scan(1))
    assert seen == {(1,): {"visits": 1}, (2,): {"visits": 2}}


def test_a_scan_names_ten_keys_and_counts_the_rest(backend):
    job = Job(backend)
    job.batch({f"k{at}": at for at in range(60)})
    odd = [f"k{at}" for at in range(0, 60, 2)]
    job.store.multi_put(odd, [b"nothing"] * len(odd))
    with reading(backend) as reader, pytest.raises(CorruptRecordError, match="30 keys.* and 20 more") as caught:
        list(reader.scan(9))
    assert (len(caught.value.keys), caught.value.count) == (10, 30)


def test_records_older_than_their_ledger_are_an_error(backend):
    job = Job(backend)
    codec = RecordCodec(serializer("json"), STATE, "opaque", (VISITS,), [(0, 1)])
    job.store.multi_put([job.keys.encode("a")], codec.dumps([OpaqueValue(START - 1, 1, None)]))
    for consistency in ("committed", "latest"):
        with reading(backend, consistency=consistency) as reader:
            with pytest.raises(LedgerLostError):
                reader.get("a")
            with pytest.raises(LedgerLostError):
                list(reader.scan())


def test_a_damaged_record_is_an_error_with_state_and_key_and_spoils_no_other(backend):
    job = Job(backend)
    job.batch({"a": 1, "b": 1})
    job.store.multi_put([job.keys.encode("b")], [b"damage"])
    with reading(backend) as reader:
        with pytest.raises(CorruptRecordError) as caught:
            reader.multi_get(["a", "b"])
        assert (caught.value.state, caught.value.key) == (STATE, "b")
        assert counts(reader, "a") == [1]


def test_a_record_with_a_txid_that_never_was_is_damage_and_not_an_absent_key(backend):
    job = Job(backend)
    job.batch({"a": 1})
    job.store.multi_put([job.keys.encode("a")], [b"[-1,1,null]"])
    with reading(backend) as reader, pytest.raises(CorruptRecordError):
        reader.get("a")


# Keys


def test_keys_of_several_columns_and_types():
    import datetime as dt

    backend = MemoryBackend("several")
    keys = (KeyField("user", "string"), KeyField("day", "date"), KeyField("score", "double"))
    day = dt.date(2026, 11, 21)
    Job(backend, keys=keys).batch({("a|b", day, math.nan): 1, (None, None, 0.0): 2})
    with reading(backend) as reader:
        assert counts(reader, ("a|b", day, math.nan), (None, None, -0.0)) == [1, 2]
        assert {key[:2] for key, _ in reader.scan()} == {("a|b", day), (None, None)}


@pytest.mark.parametrize("key", [1, ("a", "b"), (), b"a", ["a", "b"], [], [["a"]], True, 1.5], ids=repr)
def test_a_key_that_does_not_fit_the_schema_is_refused_with_the_schema(key):
    backend = MemoryBackend("wrong keys")
    Job(backend)
    with reading(backend) as reader, pytest.raises(KeyEncodingError, match="user string"):
        reader.multi_get(["a", key])


def test_the_ungrouped_state_has_one_key():
    backend = MemoryBackend("ungrouped")
    Job(backend, keys=()).batch({(): 3})
    with reading(backend) as reader:
        assert reader.get(()) == {"visits": 3}
        assert list(reader.scan()) == [((), {"visits": 3})]


# Scans


def test_a_scan_gives_every_key_once_whatever_the_page_size(backend):
    Job(backend).batch({f"user-{at}": at for at in range(25)})
    with reading(backend) as reader:
        for page_size in (1, 7, 25, 1000):
            scanned = list(reader.scan(page_size))
            assert len(scanned) == 25
            assert dict(scanned) == {(f"user-{at}",): {"visits": at} for at in range(25)}


def test_a_scan_of_an_empty_state_is_empty(backend):
    Job(backend)
    with reading(backend) as reader:
        assert list(reader.scan()) == []


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_a_page_has_at_least_one_key(backend, number):
    Job(backend).batch({"a": 1})
    with reading(backend) as reader, pytest.raises(UsageError, match="an int from 1 to"):
        list(reader.scan(number))


def test_a_scan_goes_on_while_others_write(backend):
    job = Job(backend)
    job.batch({f"user-{at:02}": 1 for at in range(10)})
    with reading(backend) as reader:
        seen = []
        for key, value in reader.scan(2):
            seen.append((key[0], value["visits"]))
            if len(seen) == 4:
                job.batch({"user-01": 1, "user-09": 1, "user-99": 1})
        assert dict(seen) | {"user-99": 1} == {f"user-{at:02}": 1 for at in range(9)} | {"user-09": 2, "user-99": 1}


def test_a_store_that_cannot_list_its_keys_says_so():
    class NoScan:
        def __init__(self):
            self.records = {}

        multi_get = PlainStore.multi_get
        multi_put = PlainStore.multi_put

    backend = PlainBackend()
    backend.store = NoScan()
    assert not isinstance(backend.store, Scan)
    Job(backend).batch({"a": 1})
    with reading(backend) as reader:
        assert counts(reader, "a") == [1]
        with pytest.raises(UsageError):
            list(reader.scan())


# Columns and tables

TWO = (VISITS, BYTES)


def test_a_scan_gives_the_columns_that_are_asked_for_in_their_order(backend):
    Job(backend, fields=TWO).batch({"a": (1, 50), "b": (2, 60)})
    with reading(backend) as reader:
        assert dict(reader.scan(1, columns=["bytes"])) == {("a",): {"bytes": 50}, ("b",): {"bytes": 60}}
        assert [list(fields) for _, fields in reader.scan(columns=("bytes", "visits"))] == [["bytes", "visits"]] * 2
        assert dict(reader.scan(columns=[])) == {("a",): {}, ("b",): {}}


def test_a_column_that_the_state_lacks_is_named_with_those_it_has(backend):
    Job(backend, fields=TWO).batch({"a": (1, 50)})
    with reading(backend) as reader:
        for read in (
            lambda columns: list(reader.scan(columns=columns)),
            lambda columns: reader.to_arrow(columns=columns),
        ):
            with pytest.raises(UnknownColumnError, match="no field 'user'; it has visits, bytes") as caught:
                read(["visits", "user"])
            assert caught.value.column == "user"
            with pytest.raises(UsageError, match="list of field names"):
                read("visits")


def test_a_table_has_the_key_columns_and_the_fields_with_the_types_of_the_ledger(backend):
    import datetime as dt

    import pyarrow as pa

    keys = (KeyField("user", "string"), KeyField("at", "timestamp"), KeyField("price", "decimal(10,2)"))
    job = Job(backend, keys=keys, fields=TWO)
    noon = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
    types = [
        ("user", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("price", pa.decimal128(10, 2)),
        ("visits", pa.int64()),
        ("bytes", pa.int64()),
    ]
    with reading(backend) as reader:
        assert reader.to_arrow().schema == pa.schema(types)
        assert len(reader.to_arrow()) == 0
        job.batch({("a", noon, Decimal("1.50")): (1, 50), (None, None, None): (2, 60)})
        for page_size in (1, 1000):
            table = reader.to_arrow(page_size)
            assert table.schema == pa.schema(types)
            assert sorted(table.to_pylist(), key=lambda row: row["visits"]) == [
                {"user": "a", "at": noon, "price": Decimal("1.50"), "visits": 1, "bytes": 50},
                {"user": None, "at": None, "price": None, "visits": 2, "bytes": 60},
            ]
        assert reader.to_arrow(columns=["bytes"]).schema == pa.schema([*types[:3], types[4]])
        frame = reader.to_pandas(columns=["visits"])
        assert sorted(frame["visits"]) == [1, 2]
        assert list(frame.columns) == ["user", "at", "price", "visits"]


def test_a_frame_of_polars_has_the_types_of_the_table(backend):
    import polars as pl

    keys = (KeyField("user", "string"), KeyField("price", "decimal(10,2)"))
    Job(backend, keys=keys, fields=TWO).batch({("a", Decimal("1.50")): (1, 2**53 + 1), (None, None): (2, None)})
    with reading(backend) as reader:
        frame = reader.to_polars()
        assert dict(frame.schema) == {
            "user": pl.String,
            "price": pl.Decimal(10, 2),
            "visits": pl.Int64,
            "bytes": pl.Int64,
        }
        assert frame.sort("visits").rows() == [("a", Decimal("1.50"), 1, 2**53 + 1), (None, None, 2, None)]
        assert reader.to_polars(1, columns=["bytes"]).columns == ["user", "price", "bytes"]


def as_of_one_batch(reader):
    """What reads Arrow's C stream gets, which an async reader has none of."""
    import pyarrow as pa

    if not hasattr(type(reader), "__arrow_c_stream__"):
        pytest.skip("the stream is read at once, which blocks an event loop")
    return {row["user"]: row["visits"] for row in pa.table(reader).to_pylist()}


def test_a_stream_of_arrow_is_as_of_one_batch_whatever_is_committed_meanwhile(backend):
    job = Job(backend)
    job.batch({"a": 1, "b": 1})
    between = InterleavedBackend(backend)
    with open_reader(between, STATE) as reader:
        assert as_of_one_batch(reader) == {"a": 1, "b": 1}
        between.store.before_records = [lambda: job.batch({"a": 10, "new": 10})]
        assert as_of_one_batch(reader) == {"a": 1, "b": 1}
        assert as_of_one_batch(reader) == {"a": 11, "b": 1, "new": 10}
        between.store.before_records = [lambda: [job.batch({"a": 1}) for _ in range(2)]]
        with pytest.raises(StaleBatchError, match="cannot be read as of batch 1 any more"):
            as_of_one_batch(reader)
        assert counts(reader, "a") == [13]


def test_an_ungrouped_state_is_a_table_of_one_row(backend):
    Job(backend, keys=()).batch({(): 3})
    with reading(backend) as reader:
        assert reader.to_arrow().to_pylist() == [{"visits": 3}]
        assert reader.to_arrow(columns=[]).num_columns == 0


def test_integers_beside_a_null_stay_exact_in_a_data_frame(backend):
    Job(backend, fields=TWO).batch({"a": (1, 2**53 + 1), "b": (1, None)})
    with reading(backend) as reader:
        frame = reader.to_pandas()
        assert dict(zip(frame["user"], frame["bytes"], strict=True)) == {"a": 2**53 + 1, "b": None}


def test_a_field_that_is_added_while_a_table_is_made_is_not_in_it(backend):
    Job(backend).batch({"a": 1, "b": 1})
    between = InterleavedBackend(backend)
    with open_reader(between, STATE) as reader:
        between.store.before_records = [lambda: Job(backend, fields=TWO).batch({"a": (1, 50)})]
        assert sorted(reader.to_arrow(1).to_pylist(), key=str) == [
            {"user": "a", "visits": 2},
            {"user": "b", "visits": 1},
        ]


# Opening


def test_a_state_that_is_not_there_is_named_and_nothing_is_made(backend, tmp_path):
    with pytest.raises(StateNotFoundError) as caught:
        open_reader(backend, STATE)
    assert caught.value.state == STATE
    assert list(tmp_path.iterdir()) == []
    Job(backend)
    if not isinstance(backend, PlainBackend):
        with pytest.raises(StateNotFoundError):
            open_reader(backend, "another")


def test_a_state_that_vanished_is_named(backend):
    Job(backend).batch({"a": 1})

    class Vanished(Interleaved):
        gone = False

        def load(self):
            return None if self.gone else super().load()

    vanished = InterleavedBackend(backend)
    vanished.store = Vanished(backend.open(STATE))
    with open_reader(vanished, STATE) as reader:
        assert counts(reader, "a") == [1]
        vanished.store.gone = True
        with pytest.raises(LedgerLostError, match="mapstate adopt"):
            reader.get("a")
        with pytest.raises(LedgerLostError, match="mapstate drop"):
            reader.ledger()


def test_a_state_that_is_made_meanwhile_has_not_lost_its_ledger(backend):
    """The reader finds no ledger, and then the first records."""

    class Late(Interleaved):
        absent = 1

        def load(self):
            self.absent -= 1
            return None if self.absent >= 0 else super().load()

    Job(backend).batch({"a": 1})
    late = InterleavedBackend(backend)
    late.store = Late(backend.open(STATE))
    with open_reader(late, STATE) as reader:
        assert counts(reader, "a") == [1]
        late.store.absent = 1
        assert reader.ledger().state == STATE
        late.store.absent = 1
        with pytest.raises(StateNotFoundError):  # it was not there, and no value was read as of another ledger
            reader.get("a")
        assert counts(reader, "a") == [1]


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 64, ".x"])
def test_a_state_has_a_plain_name(name):
    with pytest.raises(ConfigurationError):
        open_reader("memory://", name)


def test_a_consistency_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="eventual"):
        open_reader("memory://", STATE, consistency="eventual")


def test_a_reader_shows_its_ledger(backend):
    job = Job(backend)
    attempt = job.attempt({"a": 1})
    job.commit(attempt, rows=9, keys=1, at="2026-11-21T10:00:00Z")
    with reading(backend) as reader:
        ledger = reader.ledger()
        assert (ledger.owner, ledger.last_commit.rows, ledger.in_flight) == ("query-1", 9, None)
        job.attempt({"a": 1})
        assert reader.ledger().in_flight.txid == attempt.txid + 1


def test_closing_twice_is_no_error(backend):
    Job(backend)
    reader = open_reader(backend, STATE)
    reader.close()
    reader.close()


def test_an_error_of_the_store_is_let_through(backend):
    Job(backend).batch({"a": 1})

    class Down(Interleaved):
        def multi_get(self, keys):
            raise StoreUnavailableError("down")

    down = InterleavedBackend(backend)
    down.store = Down(backend.open(STATE))
    with open_reader(down, STATE) as reader, pytest.raises(StoreUnavailableError):
        reader.get("a")


def test_results_are_shown_as_their_aggregators_do():
    backend = MemoryBackend("results")
    fields = (
        Field("mean", Avg("x").describe(), "struct<sum:decimal(38,0),count:bigint>"),
        Field("total", Sum("x").describe(), "bigint"),
        Field("own", "Own", "any"),
    )
    job = Job(backend, fields=fields)
    attempt = job.ledger.begin(0)
    codec = RecordCodec(serializer("json"), STATE, "opaque", fields, [(0, 3)])
    records = codec.dumps([OpaqueValue(attempt.txid, ((Decimal(3), 2), None, [1]), None)])
    job.store.multi_put(["a"], records)
    job.commit(attempt)
    with reading(backend) as reader:
        assert reader.get("a") == {"mean": 1.5, "total": None, "own": [1]}
        assert (
            str(reader.to_arrow().schema.types)
            == "[DataType(string), DataType(double), DataType(int64), DataType(string)]"
        )
        assert reader.to_arrow().to_pylist() == [{"user": "a", "mean": 1.5, "total": None, "own": "[1]"}]

    class Shown(Count):
        def result(self, value):
            return len(value)

    with reading(backend, aggregators={"own": Shown()}) as reader:
        assert reader.get("a") == {"mean": 1.5, "total": None, "own": 1}


def test_a_single_value_that_is_null_is_shown_as_null():
    backend = MemoryBackend("nulls")
    job = Job(backend, fields=(Field("total", "Sum(x)", "bigint"),))
    attempt = job.ledger.begin(0)
    job.store.multi_put(["a"], [f"[{attempt.txid},[null],null]".encode()])
    job.commit(attempt)
    with reading(backend) as reader:
        assert reader.get("a") == {"total": None}
        assert list(reader.scan()) == [(("a",), {"total": None})]


def test_a_backend_that_is_pickled_finds_the_same_state():
    backend = MemoryBackend("pickled")
    Job(backend).batch({"a": 1})
    with reading(pickle.loads(pickle.dumps(backend))) as reader:
        assert isinstance(reader, StateReader)
        assert counts(reader, "a") == [1]


# Any interleaving


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["batch", "die", "rollback", "remove", "vacuum", "restart"]),
            st.lists(st.sampled_from("abc"), unique=True, min_size=1),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 3),
)
def test_a_reader_sees_exactly_one_of_the_states_that_ever_were_committed(script, per_read):
    """Writers act between a reader's ledger and its records; what it sees must have been true once."""
    backend = PlainBackend()
    job = Job(backend)
    model: list[Any] = [{}]  # every committed state, in order
    between = InterleavedBackend(backend)
    before_last: list[Any] = [None]

    def step(kind, keys):
        now = dict(model[-1])
        if kind in ("batch", "remove"):
            job.batch(dict.fromkeys(keys, None if kind == "remove" else 1))
            before_last[0] = dict(now)
            for key in keys:
                if kind == "remove":
                    now.pop(key, None)
                else:
                    now[key] = now.get(key, 0) + 1
            model.append(now)
        elif kind == "die":
            job.attempt(dict.fromkeys(keys, 100))
            before_last[0] = None
        elif kind == "restart":
            job.ledger = Job(backend).ledger
        elif kind == "vacuum" and job.ledger.record.in_flight is None:
            job.vacuum()
            before_last[0] = None
        elif kind == "rollback" and before_last[0] is not None:
            job.ledger.rolled_back()
            model.append(before_last[0])
            before_last[0] = None

    with open_reader(between, STATE) as reader:
        for at in range(0, len(script), per_read):
            between.store.before_records = [
                lambda some=script[at : at + per_read]: [step(kind, keys) for kind, keys in some]
            ]
            first = len(model) - 1
            seen = {key: value for key, value in zip("abc", counts(reader, *"abc"), strict=True) if value is not None}
            assert seen in model[first:]
        assert {key[0]: value["visits"] for key, value in reader.scan()} == model[-1]
