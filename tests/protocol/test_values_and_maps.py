"""The one rule, the three map states, and the wrappers of backing maps, without any store."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mapstate.aggregators.fields import Fields
from mapstate.aggregators.sums import Count
from mapstate.backing_map import IBackingMap
from mapstate.errors import LedgerLostError, StaleBatchError, StoreUnavailableError, UsageError
from mapstate.keys import GLOBAL_KEY, contains_none
from mapstate.maps import (
    CachedMap,
    MicroBatchBackingMap,
    NonTransactionalMap,
    OpaqueMap,
    SnapshottableMap,
    TransactionalMap,
    TransactionStatus,
)
from mapstate.protocol.records import CommitView, OpaqueValue, TransactionalValue
from mapstate.schema import Field


@given(st.lists(st.sampled_from([None, 0, 0.0, False, "", b"", (), b"record", (1, None, None), 7])))
def test_whether_a_chunk_has_nones_is_told_from_what_is_false(items):
    assert contains_none(items) == any(one is None for one in items)


class DictMap:
    """A backing map over a dict that notes its calls and fails when told to."""

    def __init__(self, **records):
        self.records: dict[Any, Any] = dict(records)
        self.gets = []
        self.puts = []
        self.fails = False
        self.during_put = None

    def multi_get(self, keys):
        self.gets.append(list(keys))
        if self.fails:
            raise StoreUnavailableError("told to fail")
        return [self.records.get(key) for key in keys]

    def multi_put(self, keys, values):
        self.puts.append((list(keys), list(values)))
        if self.during_put is not None:
            self.during_put()
        if self.fails:
            raise StoreUnavailableError("told to fail")
        self.records.update(zip(keys, values, strict=True))


def plus(number):
    return lambda value: number if value is None else value + number


def add(state, number, key="a"):
    return state.multi_update([key], [plus(number)])[0]


def get(state, key="a"):
    return state.multi_get([key])[0]


# The one rule


def test_zero_is_a_txid_like_any_other():
    opaque, transactional = DictMap(), DictMap()
    for state in (OpaqueMap(opaque), TransactionalMap(transactional)):
        state.begin_commit(0)
        assert add(state, 0) == 0
        state.commit(0)
        assert get(state) == 0
    assert opaque.records == {"a": (0, 0, None)}
    assert transactional.records == {"a": (0, 0)}
    assert 0 in CommitView(0)
    assert 0 not in CommitView(None)
    assert CommitView(0).values([OpaqueValue(0, 0, 7)], 1) == [0]


def test_a_replay_of_batch_zero_starts_from_nothing():
    state = OpaqueMap(DictMap())
    for _ in range(2):
        state.begin_commit(0)
        assert add(state, 5) == 5


@st.composite
def views(draw):
    """Views, legal ones: dead ranges ascending, disjoint, between the start and the last."""
    floor, first = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    start = max(floor, first)
    last = draw(st.none() | st.integers(start, 30))
    dead = []
    if last is not None:
        edges = sorted(draw(st.sets(st.integers(start, last - 1), max_size=8))) if last > start else []
        edges = edges[: len(edges) // 2 * 2]
        dead = list(zip(edges[::2], edges[1::2], strict=True))
    newest = draw(st.integers(start - 1 if last is None else last, 32))
    return last, dead, floor, first, newest


def slow_value(record, view):
    """The rule as a table, row by row, from sets."""
    if record is None:
        return None
    last, dead, floor, first, newest = view
    txid, curr, prev = record
    buried = {t for low, high in dead for t in range(low, high + 1)}
    counts = set() if last is None else set(range(last + 1)) - buried
    if txid < floor:
        return None
    if txid < first:
        return LedgerLostError
    if txid > newest:
        return StaleBatchError
    return curr if txid in counts else prev


@settings(max_examples=400)
@given(views(), st.lists(st.none() | st.integers(0, 34), max_size=12))
def test_the_one_rule_agrees_with_its_table(view, txids):
    last, dead, floor, first, newest = view
    records = [None if t is None else OpaqueValue(t, ("curr", at), ("prev", at)) for at, t in enumerate(txids)]
    wanted = [slow_value(record, view) for record in records]
    committed = CommitView(last, dead, floor, first)
    failure = next((one for one in wanted if isinstance(one, type)), None)
    if failure is None:
        assert committed.values(records, newest) == wanted
    else:
        with pytest.raises(failure):
            committed.values(records, newest)
    buried = {t for low, high in dead for t in range(low, high + 1)}
    assert [t in committed for t in range(35)] == [
        last is not None and t <= last and t not in buried for t in range(35)
    ]


@given(views())
def test_a_view_is_pickled_unchanged(view):
    committed = CommitView(*view[:4])
    again = pickle.loads(pickle.dumps(committed))
    assert again == committed
    assert hash(again) == hash(committed)
    assert [t in again for t in range(35)] == [t in committed for t in range(35)]


def test_an_orphaned_record_reads_as_its_previous_value_for_ever():
    view = CommitView(9, dead=[(3, 5), (7, 7)])
    assert [t in view for t in range(11)] == [True] * 3 + [False] * 3 + [True, False, True, True, False]
    assert view.values([OpaqueValue(4, "curr", "prev")], 100) == ["prev"]


def test_replay_that_omits_a_key_leaves_no_phantom():
    backing = DictMap()
    for txid, view, keys in ((0, CommitView(None), "ab"), (1, CommitView(0), "ab"), (2, CommitView(0), "b")):
        state = OpaqueMap(backing, view)
        state.begin_commit(txid)
        state.multi_update(list(keys), [plus(1)] * len(keys))  # txid 1 dies; txid 2 has no "a" any more
    view = CommitView(2, dead=[(1, 1)])
    state = OpaqueMap(backing, view)
    assert state.multi_get(["a", "b"]) == [1, 2]
    state.begin_commit(3)
    assert add(state, 1, "a") == 2


# Map states


@pytest.mark.parametrize(
    ("kind", "record"),
    [(OpaqueMap, OpaqueValue(5, 10, 9)), (TransactionalMap, TransactionalValue(5, 10))],
)
@pytest.mark.parametrize("written_once", [False, True])
def test_a_batch_behind_the_state_raises_and_writes_nothing(kind, record, written_once):
    backing = DictMap(old=record)
    state = kind(backing, written_once=written_once)
    state.begin_commit(4)
    for call in (
        lambda: state.multi_update(["new", "old"], [plus(1), plus(1)]),
        lambda: state.multi_put(["new", "old"], [1, 1]),
    ):
        with pytest.raises(StaleBatchError):
            call()
    assert backing.puts == []
    assert backing.records == {"old": record}


@pytest.mark.parametrize("kind", [OpaqueMap, TransactionalMap, NonTransactionalMap])
def test_lists_of_unequal_lengths_are_refused_and_write_nothing(kind):
    backing = DictMap()
    state = kind(backing)
    state.begin_commit(0)
    for call in (
        lambda: state.multi_update(["a", "b"], [plus(1)]),
        lambda: state.multi_update(["a"], [plus(1), plus(2)]),
        lambda: state.multi_put(["a", "b"], [1]),
        lambda: CachedMap(backing, 5).multi_put(["a"], []),
        lambda: MicroBatchBackingMap(backing, 5).multi_put(["a"], []),
    ):
        with pytest.raises(UsageError):
            call()
    assert backing.puts == []


@pytest.mark.parametrize("kind", [OpaqueMap, TransactionalMap, NonTransactionalMap])
@pytest.mark.parametrize("written_once", [False, True])
def test_updaters_of_a_repeated_key_apply_in_order_and_write_once(kind, written_once):
    backing = DictMap()
    state = kind(backing) if kind is NonTransactionalMap else kind(backing, written_once=written_once)
    state.begin_commit(0)
    out = state.multi_update(["a", "b", "a", "a"], [lambda v: "1", lambda v: "x", lambda v: v + "2", lambda v: v + "3"])
    assert out == ["1", "x", "12", "123"]
    [(keys, _)] = backing.puts
    assert keys == ["a", "b"]
    state.commit(0)
    assert state.multi_get(["b", "a", "b"]) == ["x", "123", "x"]


@pytest.mark.parametrize("kind", [OpaqueMap, TransactionalMap, NonTransactionalMap])
def test_of_a_repeated_key_in_a_put_the_last_value_stays(kind):
    state = kind(DictMap())
    state.begin_commit(0)
    state.multi_put(["a", "b", "a"], [1, 2, 3])
    state.commit(0)
    assert state.multi_get(["a", "b"]) == [3, 2]


@pytest.mark.parametrize("kind", [OpaqueMap, TransactionalMap, NonTransactionalMap])
def test_no_keys_are_no_error(kind):
    state = kind(DictMap())
    state.begin_commit(0)
    assert state.multi_update([], []) == []
    assert state.multi_get([]) == []
    state.multi_put([], [])


def test_a_second_update_knows_what_was_written_from_what_it_wrote_and_not_from_the_txid():
    backing = DictMap(a=OpaqueValue(7, 100, 1))  # another try of this attempt wrote it
    state = OpaqueMap(backing, CommitView(6))
    state.begin_commit(7)
    assert add(state, 1) == 2
    assert add(state, 1) == 3
    assert backing.records == {"a": (7, 3, 1)}


def test_a_put_that_failed_leaves_nothing_to_build_on():
    backing = DictMap(a=OpaqueValue(0, 1, None))
    state = OpaqueMap(backing)
    state.begin_commit(1)
    backing.during_put = lambda: setattr(backing, "fails", True)
    with pytest.raises(StoreUnavailableError):
        add(state, 1)
    backing.during_put, backing.fails = None, False
    assert get(state) == 1
    assert add(state, 1) == 2


def test_a_map_that_was_promised_one_write_per_key_remembers_nothing():
    backing = DictMap()
    state = OpaqueMap(backing, CommitView(None), written_once=True)
    state.begin_commit(0)
    assert add(state, 1) == 1
    assert add(state, 2) == 2  # the promise was broken; the record is still one attempt's
    assert backing.records == {"a": (0, 2, None)}


def test_a_transactional_replay_writes_only_what_is_missing():
    backing = DictMap(a=TransactionalValue(3, 10))
    state = TransactionalMap(backing)
    state.begin_commit(3)
    assert state.multi_update(["a", "b"], [plus(5), plus(5)]) == [10, 5]
    assert backing.puts == [(["b"], [(3, 5)])]
    state.multi_put(["a"], [99])
    assert state.multi_get(["a"]) == [10]


def test_a_removed_key_leaves_a_tombstone_that_still_knows_the_value_before():
    backing = DictMap()
    state = OpaqueMap(backing)
    state.begin_commit(0)
    add(state, 5)
    state.commit(0)
    state.begin_commit(1)
    assert state.multi_update(["a"], [lambda value: None]) == [None]
    assert backing.records == {"a": (1, None, 5)}
    state.begin_commit(1)  # that attempt died
    assert get(state) == 5
    assert state.multi_update(["a"], [lambda value: None]) == [None]
    state.commit(1)
    assert get(state) is None
    state.begin_commit(2)
    assert add(state, 1) == 1
    assert backing.records == {"a": (2, 1, None)}


def test_records_below_the_floor_are_absent_and_those_older_than_the_ledger_are_refused():
    for kind, old in ((OpaqueMap, OpaqueValue(5, 50, 40)), (TransactionalMap, TransactionalValue(5, 50))):
        state = kind(DictMap(a=old), CommitView(None, floor=10))
        state.begin_commit(10)
        assert get(state) is None
        assert add(state, 1) == 1
        state = kind(DictMap(a=old), CommitView(None, first_txid=10))
        state.begin_commit(10)
        with pytest.raises(LedgerLostError):
            get(state)
        with pytest.raises(LedgerLostError):
            add(state, 1)


@pytest.mark.parametrize("kind", [OpaqueMap, TransactionalMap, NonTransactionalMap])
def test_calls_outside_a_batch_are_refused(kind):
    backing = DictMap()
    state = kind(backing)
    assert state.status is TransactionStatus.IDLE
    for call in (
        lambda: add(state, 1),
        lambda: state.multi_put(["a"], [1]),
        lambda: state.multi_combine(["a"], [1], lambda bases, partials: partials),
        lambda: state.commit(0),
    ):
        with pytest.raises(UsageError):
            call()
    state.begin_commit(0)
    assert state.status is TransactionStatus.BEGUN
    with pytest.raises(UsageError):
        state.commit(1)
    state.commit(0)
    assert state.status is TransactionStatus.IDLE
    with pytest.raises(UsageError):
        state.commit(0)
    with pytest.raises(UsageError):
        add(state, 1)
    assert backing.puts == []


@pytest.mark.parametrize("txid", [-1, True, "1", 1.0, None])
def test_a_txid_is_an_int_from_zero_up(txid):
    with pytest.raises(UsageError):
        OpaqueMap(DictMap()).begin_commit(txid)


def test_beginning_again_without_a_commit_is_another_attempt():
    state = OpaqueMap(DictMap())
    state.begin_commit(1)
    add(state, 1)
    state.begin_commit(1)
    assert get(state) is None
    assert add(state, 1) == 1


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from("abc"), max_size=5)), max_size=12))
def test_an_opaque_map_holds_the_sum_of_the_attempts_that_were_committed(attempts):
    """Each attempt has a txid of its own and may die; what it wrote must never count."""
    backing, wanted, last, dead = DictMap(), {}, None, []
    counting = Fields([Field("n", "Count", "bigint")], {"n": Count()})
    for txid, (commits, keys) in enumerate(attempts):
        state = OpaqueMap(backing, CommitView(last, dead), written_once=True)
        state.begin_commit(txid)
        folded = {key: keys.count(key) for key in keys}
        state.multi_combine(list(folded), list(folded.values()), counting.combine_all)
        if commits:
            low = 0 if last is None else last + 1
            dead, last = dead + ([(low, txid - 1)] if low < txid else []), txid
            for key, count in folded.items():
                wanted[key] = wanted.get(key, 0) + count
        read = OpaqueMap(backing, CommitView(last, dead)).multi_get(list("abc"))
        assert read == [wanted.get(key) for key in "abc"]


# Wrappers


def test_wrappers_are_backing_maps():
    assert isinstance(CachedMap(DictMap(), 1), IBackingMap)
    assert isinstance(MicroBatchBackingMap(DictMap(), 1), IBackingMap)


def test_a_cache_asks_once_for_what_is_there_and_for_what_is_not():
    backing = DictMap(a=1)
    cache = CachedMap(backing, 10)
    assert cache.multi_get(["a", "no", "a"]) == [1, None, 1]
    assert cache.multi_get(["no", "a"]) == [None, 1]
    assert backing.gets == [["a", "no"]]
    cache.clear()
    assert cache.multi_get(["a"]) == [1]
    assert len(backing.gets) == 2


def test_a_cache_is_filled_only_after_the_delegates_put():
    backing = DictMap(a=1)
    cache = CachedMap(backing, 10)
    cache.multi_get(["a", "b"])
    seen = []
    backing.during_put = lambda: seen.append(cache.multi_get(["a", "b"]))
    cache.multi_put(["a", "b"], [2, 3])
    assert seen == [[1, None]]
    assert cache.multi_get(["a", "b"]) == [2, 3]
    assert len(backing.gets) == 2  # the first, and the one during the put


def test_a_cache_drops_the_keys_of_a_put_that_failed():
    backing = DictMap(a=1)
    cache = CachedMap(backing, 10)
    cache.multi_get(["a"])
    backing.fails = True
    with pytest.raises(StoreUnavailableError):
        cache.multi_put(["a"], [2])
    backing.fails = False
    backing.records["a"] = 2  # it had been applied after all
    assert cache.multi_get(["a"]) == [2]


def test_a_cache_keeps_the_most_recently_used():
    backing = DictMap(a=1, b=2, c=3)
    cache = CachedMap(backing, 2)
    assert cache.multi_get(["a", "b", "c"]) == [1, 2, 3]
    backing.gets.clear()
    assert cache.multi_get(["b"]) == [2]
    assert cache.multi_get(["c"]) == [3]
    assert backing.gets == []
    cache.multi_put(["x", "y", "z"], [7, 8, 9])
    assert cache.multi_get(["z", "x"]) == [9, 7]
    assert backing.gets == [["x"]]


@pytest.mark.parametrize("max_entries", [0, -1])
def test_a_cache_without_room_is_refused_before_anything_is_written(max_entries):
    with pytest.raises(UsageError):
        CachedMap(DictMap(), max_entries)


calls = st.one_of(
    st.tuples(st.just("get"), st.lists(st.integers(0, 5), max_size=6)),
    st.tuples(
        st.sampled_from(["put", "lost put", "failed put"]),
        st.lists(st.tuples(st.integers(0, 5), st.integers()), max_size=6),
    ),
)


@settings(max_examples=200)
@given(st.integers(1, 4), st.lists(calls, max_size=15))
def test_a_cache_reads_as_its_delegate_does_whatever_fails(max_entries, script):
    backing = DictMap()
    cache = CachedMap(backing, max_entries)
    for kind, records in script:
        if kind == "get":
            assert cache.multi_get(records) == [backing.records.get(key) for key in records]
            continue
        keys, values = [key for key, _ in records], [value for _, value in records]
        backing.fails = kind != "put"
        if kind == "lost put":
            backing.records.update(records)
        if backing.fails:
            with pytest.raises(StoreUnavailableError):
                cache.multi_put(keys, values)
        else:
            cache.multi_put(keys, values)
        backing.fails = False
    assert cache.multi_get(range(6)) == [backing.records.get(key) for key in range(6)]


def test_micro_batches_are_bounded_and_in_order():
    backing = DictMap()
    micro = MicroBatchBackingMap(backing, 2)
    micro.multi_put(list("abcde"), [1, 2, 3, 4, 5])
    assert [keys for keys, _ in backing.puts] == [["a", "b"], ["c", "d"], ["e"]]
    assert micro.multi_get([*"edcba", "no"]) == [5, 4, 3, 2, 1, None]
    assert [len(keys) for keys in backing.gets] == [2, 2, 2]
    assert micro.multi_get([]) == []
    with pytest.raises(UsageError):
        MicroBatchBackingMap(backing, 0)


def test_micro_batches_stop_at_the_first_error():
    backing = DictMap()
    backing.fails = True
    with pytest.raises(StoreUnavailableError):
        MicroBatchBackingMap(backing, 1).multi_put(["a", "b"], [1, 2])
    assert len(backing.puts) == 1


@pytest.mark.parametrize("kind", [OpaqueMap, TransactionalMap, NonTransactionalMap])
def test_an_ungrouped_state_is_one_value_under_the_empty_key(kind):
    backing = DictMap()
    one = SnapshottableMap(kind(backing))
    assert one.get() is None
    with pytest.raises(UsageError):
        one.update(plus(1))
    one.begin_commit(0)
    assert one.update(plus(1)) == 1
    assert one.update(plus(2)) == 3
    one.commit(0)
    one.begin_commit(1)
    one.set(0)
    one.commit(1)
    assert one.get() == 0
    assert list(backing.records) == [GLOBAL_KEY]
