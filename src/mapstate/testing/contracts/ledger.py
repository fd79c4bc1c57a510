"""The contract of a store's ledger: compare-and-set, the fence that moves with it, and claims."""

from __future__ import annotations

import pickle
from contextlib import ExitStack, suppress
from threading import Event, Thread
from typing import Any

import pytest

from mapstate import capabilities
from mapstate.backing_map import Backend, close_if_possible
from mapstate.capabilities import FenceToken, Swap
from mapstate.errors import FencedError, MapStateError, StateNotFoundError, StoreUnavailableError, UsageError
from mapstate.operations.drop import drop
from mapstate.protocol.ledger_record import Attempt, Commit, now
from mapstate.protocol.ledgers import Ledgers
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.testing.contracts.backend import BackendContract, at_once, closing, scanned
from mapstate.testing.contracts.backing_map import SideDoor
from mapstate.testing.contracts.capabilities import instead_of, needs
from mapstate.testing.contracts.driver import CountingQuery, elsewhere, opening, put_fenced, swap_once
from mapstate.testing.faults import Begins, Commits, Fail, FaultyStore

OPEN = FenceToken(1, 7)
LATER = FenceToken(1, 8)
CLOSED = FenceToken(1, 7, closed=True)
NO_LONGER = [LATER, FenceToken(2, 7), FenceToken(2, 8), CLOSED]


class LedgerContract(BackendContract):
    """A driver's hold on a state. Fixtures as for `BackendContract`, whose tests it inherits."""

    @pytest.fixture
    def another(self, backend: Backend, opened: ExitStack) -> Any:
        """Another state of the store."""
        return closing(opened, backend.open(f"{self.state}2"))

    # Compare-and-set

    @needs("conditional_writes")
    def test_there_is_no_ledger_at_first(self, store: Any) -> None:
        store.multi_put(["a"], [self.a_record(1)])
        assert store.load() is None

    @needs("conditional_writes")
    def test_a_ledger_that_was_made_is_there_for_all_with_its_version(self, store: Any, other: Any) -> None:
        version = store.swap(b"one", None, OPEN)
        assert version is not None
        assert store.load() == other.load() == (b"one", version)
        newer = other.swap(b"two", version, LATER)
        assert newer is not None
        assert newer != version
        assert store.load() == other.load() == (b"two", newer)

    @needs("conditional_writes")
    def test_a_ledger_is_not_made_twice(self, store: Any, other: Any) -> None:
        version = store.swap(b"mine", None, OPEN)
        assert other.swap(b"theirs", None, LATER) is None
        assert store.load() == (b"mine", version)

    @needs("conditional_writes")
    def test_of_two_drivers_with_one_version_one_changes_the_ledger(self, store: Any, other: Any) -> None:
        version = store.swap(b"1", None, OPEN)
        newer = other.swap(b"2", version, OPEN)
        assert newer is not None
        assert store.swap(b"late", version, LATER) is None
        assert store.load() == (b"2", newer)

    @needs("conditional_writes")
    def test_a_ledger_that_was_never_there_is_not_replaced(
        self, store: Any, backend: Backend, opened: ExitStack
    ) -> None:
        version = closing(opened, backend.open("another")).swap(b"another", None, OPEN)
        assert store.swap(b"mine", version, OPEN) is None
        assert store.load() is None

    @needs("conditional_writes")
    def test_no_change_is_lost_among_many_drivers(self, backend: Backend, store: Any) -> None:
        rounds, drivers = 15, 4

        def count_up(_: int) -> None:
            with ExitStack() as stack:
                store = closing(stack, backend.open(self.state))
                done = 0
                while done < rounds:
                    ledger = store.load()
                    number, version = (0, None) if ledger is None else (int(ledger[0]), ledger[1])
                    done += store.swap(b"%d" % (number + 1), version, OPEN) is not None

        at_once(count_up, range(drivers))
        assert store.load()[0] == b"%d" % (rounds * drivers)

    @needs("conditional_writes")
    def test_a_ledger_may_be_large_and_hold_any_text(self, store: Any, other: Any) -> None:
        record = '{"é\\u0000": "日本\U0001f600"}'.encode() + b" " * 100_000
        assert store.swap(record, None, OPEN) is not None
        assert other.load()[0] == record

    @needs("conditional_writes")
    def test_a_ledger_is_no_record_of_its_state(self, store: Any) -> None:
        store.multi_put(["a"], [self.a_record(1)])
        self.move(store, OPEN)
        assert store.multi_get(["a", "ledger", "fence", ""])[0] == self.a_record(1)
        if isinstance(store, capabilities.Scan):
            assert scanned(store) == ["a"]

    @needs("conditional_writes")
    def test_ledgers_of_two_states_do_not_mix(self, another: Any, store: Any) -> None:
        version = self.move(store, OPEN)
        assert another.load() is None
        assert another.swap(b"another", None, LATER) is not None
        ledger = store.load()
        assert ledger[1] == version
        assert ledger[0] != b"another"

    @needs("conditional_writes", "shared_between_processes")
    def test_a_ledger_is_changed_by_another_process(self, backend: Backend, store: Any) -> None:
        version = store.swap(b"first", None, OPEN)
        assert elsewhere(swap_once, backend, self.state, b"theirs", LATER) == (b"first", True)
        assert store.swap(b"mine", version, LATER) is None
        assert store.load()[0] == b"theirs"

    @needs("ledger_reads", "conditional_writes")
    def test_a_reader_gets_ledger_and_records_in_one_call(self, store: Any) -> None:
        assert store.multi_get_with_ledger(["a"]) == (None, [None], None)
        store.multi_put(["a", "b"], [self.a_record(1), self.a_record(2)])
        self.move(store, OPEN)
        ledger = store.load()[0]
        records = [self.a_record(2), None, self.a_record(1)]
        assert store.multi_get_with_ledger(["b", "x", "a"]) == (ledger, records, ledger)
        assert store.multi_get_with_ledger([]) == (ledger, [], ledger)

    @needs("reports", "conditional_writes")
    def test_reports_come_newest_first_and_the_oldest_go(self, store: Any, other: Any) -> None:
        assert store.reports() == []
        self.move(store, OPEN)
        for number in range(5):
            store.keep_report(b"%d" % number, 3)
        assert other.reports() == [b"4", b"3", b"2"]

    # Several ledgers in one write

    @needs("joint_ledgers")
    def test_ledgers_of_several_states_change_together_with_their_fences(
        self, another: Any, store: Any, other: Any, side_door: SideDoor
    ) -> None:
        assert store.commit_domain() == other.commit_domain() == another.commit_domain()
        hash(store.commit_domain())
        self.move(another, LATER)
        before = another.load()
        versions = store.swap_all([Swap(another, b"two", before[1], CLOSED), Swap(store, b"one", None, OPEN)])
        assert [(b"two", versions[0]), (b"one", versions[1])] == [another.load(), other.load()]
        assert versions[0] != before[1]
        self.writer_of(store, OPEN).multi_put(["a"], [self.a_record(1, 7)])
        with pytest.raises(FencedError):
            self.writer_of(another, LATER).multi_put(["a"], [self.a_record(1, 8)])
        assert [side_door.read(name, "a") for name in (self.state, f"{self.state}2")] == [self.a_record(1, 7), None]
        again = another.swap_all([Swap(other, b"three", versions[1], LATER), Swap(another, b"four", versions[0], OPEN)])
        assert [store.load(), another.load()] == [(b"three", again[0]), (b"four", again[1])]
        self.writer_of(another, OPEN).multi_put(["a"], [self.a_record(2, 7)])

    @needs("joint_ledgers")
    @pytest.mark.parametrize("late", [0, 1, 2])
    def test_of_several_ledgers_all_change_or_none(
        self, store: Any, other: Any, backend: Backend, opened: ExitStack, late: int
    ) -> None:
        stores = [store, *(closing(opened, backend.open(f"{self.state}{at}")) for at in (2, 3))]
        versions = [self.move(store, OPEN) for store in stores]
        fresh = [closing(opened, backend.open(f"{self.state}{at}")) for at in (4, 5)]
        self.move(stores[late], OPEN)
        before = [store.load() for store in stores]
        swaps = [Swap(store, b"late", version, LATER) for store, version in zip(stores, versions, strict=True)]
        assert store.swap_all(swaps) is None
        assert fresh[0].swap_all([Swap(fresh[0], b"late", None, LATER), *swaps]) is None
        made = [Swap(fresh[0], b"late", versions[0], OPEN), Swap(fresh[1], b"late", None, OPEN)]
        assert fresh[0].swap_all(made) is None
        assert [store.load() for store in (*stores, *fresh)] == [*before, None, None]
        for one in stores:
            self.writer_of(one, OPEN).multi_put(["a"], [self.a_record(1, 7)])
        assert other.load() == before[0]

    @needs("joint_ledgers")
    def test_no_ledger_changes_alone_where_several_change_together(self, backend: Backend, opened: ExitStack) -> None:
        """Two drivers change two ledgers, each in an order of its own. None that may change finds them apart."""
        names = [self.state, f"{self.state}2"]
        rounds, apart = 15, list[Any]()

        def count_up(order: int) -> None:
            with ExitStack() as stack:
                stores = [closing(stack, backend.open(name)) for name in names][::order]
                done = 0
                while done < rounds:
                    ledgers = [store.load() for store in stores]
                    numbers = [0 if ledger is None else int(ledger[0]) for ledger in ledgers]
                    swaps = [
                        Swap(store, b"%d" % (max(numbers) + 1), None if was is None else was[1], OPEN)
                        for store, was in zip(stores, ledgers, strict=True)
                    ]
                    if stores[0].swap_all(swaps) is not None:
                        done += 1
                        apart.extend([numbers] if len(set(numbers)) > 1 else [])

        at_once(count_up, (1, -1))
        assert apart == []
        ends = [closing(opened, backend.open(name)).load()[0] for name in names]
        assert ends == [b"%d" % (2 * rounds)] * 2

    @instead_of("joint_ledgers")
    def test_states_that_cannot_change_together_are_reconciled_by_the_next_driver(
        self, store: Any, backend: Backend, opened: ExitStack
    ) -> None:
        """Until then they may be a batch apart, where a driver died between two commits."""
        stores = [store, closing(opened, backend.open(f"{self.state}2"))]
        states = [opening(name, "opaque", self.serializer) for name in (self.state, f"{self.state}2")]
        dies = [Fail(method=method, where=Commits(0), times=None) for method in ("swap", "multi_put")]
        first, answers = Ledgers.open_and_begin([store, FaultyStore(stores[1], *dies)], states, 0, ["refuse"] * 2)
        attempts = [answer for answer in answers if isinstance(answer, Attempt)]
        with pytest.raises(StoreUnavailableError):
            first.commit([Commit(batch_id=0, txid=attempt.txid, owner="query", at=now()) for attempt in attempts])
        assert read_ledger(store, self.state).last_commit is not None
        second, _ = Ledgers.open_and_begin(stores, states, 0, ["refuse"] * 2)
        assert [record.last_commit for record in second.records] == [None, None]
        assert all(record.in_flight is not None for record in second.records)

    # The fence

    @needs("fenced_writes", "conditional_writes")
    @pytest.mark.parametrize("fence", NO_LONGER, ids=str)
    def test_an_attempt_that_is_not_the_fence_writes_nothing(
        self, store: Any, other: Any, side_door: SideDoor, fence: FenceToken
    ) -> None:
        self.move(store, OPEN)
        fresh, has_read = self.writer_of(store, OPEN), self.writer_of(store, OPEN)
        has_read.multi_get(["a", "b"])
        self.move(other, fence)
        for writer in (fresh, has_read):
            for _ in range(2):
                with pytest.raises(FencedError) as caught:
                    writer.multi_put(["a", "b"], [self.a_record(1, 7), self.a_record(2, 7)])
                assert caught.value.txid == OPEN.txid
        assert [side_door.read(self.state, key) for key in "ab"] == [None, None]

    @needs("fence_with_ledger", "conditional_writes")
    def test_tokens_are_compared_and_not_ordered(self, store: Any, other: Any, side_door: SideDoor) -> None:
        """A driver that opens a transactional state closes it below the attempt that it finds in flight."""
        self.move(store, OPEN)
        writer = self.writer_of(store, OPEN)
        self.move(other, FenceToken(2, 6, closed=True))
        with pytest.raises(FencedError):
            writer.multi_put(["a"], [self.a_record(1, 7)])
        assert side_door.read(self.state, "a") is None

    @needs("fenced_writes")
    def test_without_a_ledger_no_attempt_writes(self, store: Any, side_door: SideDoor) -> None:
        with pytest.raises(FencedError):
            self.writer_of(store, OPEN).multi_put(["a"], [self.a_record(1, 7)])
        assert side_door.read(self.state, "a") is None

    @needs("fenced_writes", "conditional_writes")
    def test_a_closed_token_lets_nobody_write(self, store: Any, side_door: SideDoor) -> None:
        self.move(store, CLOSED)
        for token in (OPEN, CLOSED):
            with pytest.raises(FencedError):
                self.writer_of(store, token).multi_put(["a"], [self.a_record(1, 7)])
        assert side_door.read(self.state, "a") is None

    @needs("fenced_writes", "conditional_writes")
    def test_an_attempt_of_the_same_number_but_another_name_writes_nothing(
        self, store: Any, side_door: SideDoor
    ) -> None:
        """A store that is restored from a copy gives out the same epoch and txid again."""
        self.move(store, FenceToken(1, 7, nonce="new"))
        with pytest.raises(FencedError):
            self.writer_of(store, FenceToken(1, 7, nonce="lost")).multi_put(["a"], [self.a_record(1, 7)])
        assert side_door.read(self.state, "a") is None
        self.writer_of(store, FenceToken(1, 7, nonce="new")).multi_put(["a"], [self.a_record(1, 7)])

    @needs("guarded_writes", "conditional_writes")
    def test_an_attempt_that_is_the_fence_writes_chunk_after_chunk(self, store: Any, other: Any) -> None:
        self.move(store, OPEN)
        writer = self.writer_of(other, OPEN)
        writer.multi_put(["a"], [self.a_record(1, 7)])  # without a get before it
        for number in range(3):
            keys = [f"{number}-{i}" for i in range(10)]
            assert writer.multi_get(keys) == [None] * 10
            writer.multi_put(keys, [self.a_record(number, 7)] * 10)
            assert writer.multi_get(keys) == [self.a_record(number, 7)] * 10
        writer.multi_get(["read and left"])
        assert writer.multi_get([]) == []
        writer.multi_put([], [])
        close_if_possible(writer)
        assert store.multi_get(["a", "2-9"]) == [self.a_record(1, 7), self.a_record(2, 7)]

    @needs("guarded_writes", "conditional_writes")
    def test_a_writer_reads_and_writes_as_its_store_does(self, store: Any, side_door: SideDoor) -> None:
        self.move(store, OPEN)
        one, two, three = (self.a_record(number, 7) for number in (1, 2, 3))
        writer = self.writer_of(store, OPEN)
        assert writer.multi_get(["a", "b", "c"]) == [None, None, None]
        writer.multi_put(["c", "a", "b", "a"], [three, two, two, one])
        assert writer.multi_get(["b", "x", "a", "c", "b"]) == [two, None, one, three, two]
        assert [side_door.read(self.state, key) for key in "abc"] == [one, two, three]
        keys = [f"{'k' * (i % 23)}{i}" for i in range(1000)]
        writer.multi_get(keys)
        writer.multi_put(keys, [self.a_record(i, 7) for i in range(1000)])
        assert writer.multi_get(keys[::-1]) == [self.a_record(i, 7) for i in reversed(range(1000))]
        close_if_possible(writer)

    @needs("guarded_writes", "conditional_writes")
    def test_what_is_put_with_reads_under_way_is_there_when_the_writer_is_flushed(
        self, store: Any, side_door: SideDoor
    ) -> None:
        """As a task does it. A writer that does not read ahead finishes each put anyway."""
        self.move(store, OPEN)
        store.multi_put(["2-1"], [self.a_record(5, 3)])
        writer = self.writer_of(store, OPEN)
        chunks = [[f"{chunk}-{i}" for i in range(3)] for chunk in range(4)]
        _read_ahead(writer, chunks[0])
        for i, chunk in enumerate(chunks):
            if i + 1 < len(chunks):
                _read_ahead(writer, chunks[i + 1])
            assert writer.multi_get(chunk) == [self.a_record(5, 3) if key == "2-1" else None for key in chunk]
            if chunk is not chunks[-1]:  # a put is what flushes as well: the last chunk goes without
                writer.multi_put(chunk, [self.a_record(i, 7)] * 3)
        _flush(writer)
        assert [side_door.read(self.state, f"{i}-{i % 3}") for i in range(4)] == [
            *(self.a_record(i, 7) for i in range(3)),
            None,
        ]
        close_if_possible(writer)

    @needs("fenced_writes", "conditional_writes")
    def test_a_put_with_reads_under_way_is_refused_at_the_latest_when_the_writer_is_flushed(
        self, store: Any, other: Any, side_door: SideDoor
    ) -> None:
        self.move(store, OPEN)
        writer = self.writer_of(store, OPEN)
        for keys in (["a"], ["b"]):
            _read_ahead(writer, keys)
        writer.multi_get(["a"])
        self.move(other, LATER)

        def put() -> None:
            writer.multi_put(["a"], [self.a_record(1, 7)])
            _flush(writer)

        with pytest.raises(FencedError):
            put()
        close_if_possible(writer)
        assert side_door.read(self.state, "a") is None

    @needs("guarded_writes", "conditional_writes")
    def test_a_writers_put_of_unequal_lengths_is_refused(self, store: Any, side_door: SideDoor) -> None:
        self.move(store, OPEN)
        with pytest.raises(UsageError):
            self.writer_of(store, OPEN).multi_put(["a", "b"], [self.a_record(1, 7)])
        assert side_door.read(self.state, "a") is None

    @needs("fenced_writes", "conditional_writes")
    def test_each_chunk_of_a_writer_is_guarded(self, store: Any, other: Any) -> None:
        self.move(store, OPEN)
        writer = self.writer_of(store, OPEN)
        writer.multi_get(["a"])
        writer.multi_put(["a"], [self.a_record(1, 7)])
        writer.multi_get(["b"])
        writer.multi_get(["c"])  # a chunk without a put
        self.move(other, LATER)
        with pytest.raises(FencedError):
            writer.multi_put(["b"], [self.a_record(2, 7)])
        assert store.multi_get(["a", "b"]) == [self.a_record(1, 7), None]

    @needs("guarded_writes", "conditional_writes")
    def test_an_older_attempt_never_replaces_what_a_later_one_wrote(
        self, store: Any, other: Any, side_door: SideDoor
    ) -> None:
        self.move(store, OPEN)
        late = self.writer_of(store, OPEN)
        late.multi_get(["a"])
        self.move(other, LATER)
        self.writer_of(other, LATER).multi_put(["a"], [self.a_record(8, 8)])
        with pytest.raises(FencedError):
            late.multi_put(["a"], [self.a_record(7, 7)])
        assert side_door.read(self.state, "a") == self.a_record(8, 8)

    @needs("guarded_writes", "conditional_writes")
    def test_writers_of_one_attempt_work_side_by_side(self, store: Any, other: Any) -> None:
        self.move(store, OPEN)
        writers = [self.writer_of(opened, OPEN) for opened in (store, other, store, other)]
        for i, writer in enumerate(writers):
            writer.multi_get([f"k{i}"])
        for i, writer in enumerate(writers):
            writer.multi_put([f"k{i}"], [self.a_record(i, 7)])
        assert store.multi_get([f"k{i}" for i in range(4)]) == [self.a_record(i, 7) for i in range(4)]

    @needs("guarded_writes", "conditional_writes")
    def test_of_concurrent_writers_none_writes_once_the_fence_has_moved(
        self, backend: Backend, store: Any, side_door: SideDoor
    ) -> None:
        """Threads write as the old attempt while it ends; afterwards each of them tries once more."""
        keys = ["a", "b", "c"]
        self.move(store, OPEN)
        started, moved = [Event() for _ in range(3)], Event()
        fenced: list[str] = []

        def write(at: int) -> None:
            store: Any = backend.open(self.state)
            try:
                last_try = False
                while not last_try:
                    last_try = moved.is_set()
                    writer = self.writer_of(store, OPEN)
                    writer.multi_get(keys)
                    writer.multi_put(keys, [self.a_record(at, 7)] * 3)
                    started[at].set()
            except FencedError:
                fenced.append("fenced")
            except MapStateError as error:
                fenced.append(repr(error))
            finally:
                started[at].set()
                close_if_possible(store)

        threads = [Thread(target=write, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for future in started:
            future.wait(60)
        self.move(store, LATER)
        self.writer_of(store, LATER).multi_put(keys, [self.a_record(8, 8)] * 3)
        moved.set()
        for thread in threads:
            thread.join()
        assert [side_door.read(self.state, key) for key in keys] == [self.a_record(8, 8)] * 3
        assert fenced == ["fenced"] * 3

    @needs("guarded_writes", "conditional_writes", "shared_between_processes")
    def test_an_attempt_in_another_process_writes_until_it_is_fenced(self, backend: Backend, store: Any) -> None:
        self.move(store, OPEN)
        assert elsewhere(put_fenced, backend, self.state, self.writes_through, OPEN, ["a"], [self.a_record(1, 7)])
        assert store.multi_get(["a"]) == [self.a_record(1, 7)]
        self.move(store, LATER)
        self.writer_of(store, LATER).multi_put(["a"], [self.a_record(8, 8)])
        assert not elsewhere(put_fenced, backend, self.state, self.writes_through, OPEN, ["a"], [self.a_record(2, 7)])
        assert store.multi_get(["a"]) == [self.a_record(8, 8)]

    @needs("guarded_writes", "conditional_writes")
    def test_a_swap_that_loses_moves_no_fence(self, store: Any, other: Any) -> None:
        version = self.move(store, OPEN)
        self.move(other, OPEN)
        assert store.swap(b"late", version, LATER) is None
        self.writer_of(store, OPEN).multi_put(["a"], [self.a_record(1, 7)])
        assert store.multi_get(["a"]) == [self.a_record(1, 7)]

    @needs("fenced_writes", "conditional_writes")
    def test_states_have_a_fence_each(self, another: Any, store: Any) -> None:
        self.move(store, OPEN)
        with pytest.raises(FencedError):
            self.writer_of(another, OPEN).multi_put(["a"], [self.a_record(1, 7)])
        self.move(another, LATER)
        self.writer_of(store, OPEN).multi_put(["a"], [self.a_record(1, 7)])
        assert another.multi_get(["a"]) == [None]

    @needs("guarded_writes", "conditional_writes")
    def test_what_a_fenced_attempt_is_told_reaches_the_driver(self, store: Any) -> None:
        self.move(store, LATER)
        self.writer_of(store, LATER).multi_put(["a"], [self.a_record(8, 8)])
        with pytest.raises(FencedError) as caught:
            self.writer_of(store, OPEN).multi_put(["a"], [self.a_record(7, 7)])
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.facts) == (str(caught.value), caught.value.facts)

    @needs("rewrites", "conditional_writes")
    def test_a_vacuum_replaces_and_removes_what_is_there_and_makes_nothing(
        self, store: Any, side_door: SideDoor
    ) -> None:
        store.multi_put(["a", "b", "c"], [self.a_record(at) for at in (1, 2, 3)])
        self.move(store, OPEN)
        writer: Any = self.writer_of(store, OPEN)
        writer.multi_get(["a", "b", "gone", "nowhere"])
        writer.multi_rewrite(["a", "b", "gone", "nowhere"], [self.a_record(9, 7), None, self.a_record(9, 7), None])
        records = [side_door.read(self.state, key) for key in ("a", "b", "c", "gone", "nowhere")]
        assert records == [self.a_record(9, 7), None, self.a_record(3), None, None]
        writer.multi_rewrite([], [])
        store.multi_put(["d"], [self.a_record(4)])
        writer.multi_rewrite(["d", "nowhere"], [None, None])
        assert store.multi_get(["d"]) == [None], "a record was not removed where no get came before"
        self.move(store, LATER)
        with pytest.raises(FencedError):
            writer.multi_rewrite(["a", "c"], [None, None])
        assert store.multi_get(["a", "c"]) == [self.a_record(9, 7), self.a_record(3)]

    # Removing a state

    @needs("drops", "conditional_writes")
    def test_a_state_that_is_dropped_leaves_nothing_and_no_other_state_is_touched(
        self, another: Any, backend: Backend, store: Any, side_door: SideDoor
    ) -> None:
        keys = [f"key {i}" for i in range(2500)]
        for dropped in (store, another):
            dropped.multi_put(keys, [self.a_record(i) for i in range(len(keys))])
            self.move(dropped, OPEN)
            if isinstance(dropped, capabilities.Claims):
                dropped.claim(7, 0, "somebody")
            if isinstance(dropped, capabilities.Reports):
                dropped.keep_report(b"report", 10)
        assert drop(backend, self.state, force=True).records == len(keys)
        assert store.load() is None
        assert [side_door.read(self.state, key) for key in keys[:3]] == [None] * 3
        assert store.multi_get(keys) == [None] * len(keys)
        if isinstance(store, capabilities.Scan):
            assert scanned(store) == []
        if isinstance(store, capabilities.Reports):
            assert (store.reports(), another.reports()) == ([], [b"report"])
        if isinstance(store, capabilities.SpreadFences):
            assert {fence.token for fence in store.fences()} == {None}
        assert another.multi_get(keys[:2]) == [self.a_record(0), self.a_record(1)]
        assert another.load() is not None
        with pytest.raises(StateNotFoundError):
            drop(backend, self.state)
        assert store.swap(b"begun anew", None, OPEN) is not None

    @needs("drops", "conditional_writes")
    def test_a_drop_ends_where_somebody_else_has_changed_the_ledger(self, store: Any, other: Any) -> None:
        version = self.move(store, OPEN)
        self.move(other, LATER)
        ledger = other.load()
        with pytest.raises(FencedError):
            list(store.drop(version, OPEN))
        assert other.load() == ledger

    @needs("drops", "conditional_writes", "fenced_writes")
    def test_what_a_driver_was_writing_is_refused_behind_a_drop(
        self, backend: Backend, store: Any, side_door: SideDoor
    ) -> None:
        store.multi_put(["a"], [self.a_record(1)])
        self.move(store, OPEN)
        writer: Any = self.writer_of(store, OPEN)
        drop(backend, self.state, force=True)
        with pytest.raises(FencedError):
            writer.multi_put(["a"], [self.a_record(2, 7)])
        assert side_door.read(self.state, "a") is None

    # Fences apart from the ledger

    @needs("fenced_writes", "conditional_writes")
    @instead_of("fence_with_ledger")
    def test_the_ledgers_write_leaves_the_fences_alone(self, store: Any, other: Any) -> None:
        before = store.fences()
        assert {fence.token for fence in before} == {None}
        assert store.swap(b"one", None, OPEN) is not None
        assert store.fences() == other.fences() == before
        with pytest.raises(FencedError):
            self.writer_of(store, OPEN).multi_put(["a"], [self.a_record(1, 7)])

    @needs("fenced_writes", "conditional_writes")
    @instead_of("fence_with_ledger")
    @pytest.mark.parametrize(
        "token", [OPEN, FenceToken(3, 2**53 + 1, nonce="0f"), FenceToken(3, 0, closed=True, nonce="0f")], ids=str
    )
    def test_a_fence_is_found_at_the_token_that_it_was_moved_to(
        self, store: Any, other: Any, token: FenceToken
    ) -> None:
        moved = store.move_fences([None] * len(store.fences()), token)
        assert {fence.token for fence in moved} == {token}
        assert store.fences() == other.fences() == moved

    @needs("fenced_writes", "conditional_writes")
    @instead_of("fence_with_ledger")
    def test_a_fence_moves_from_where_it_is_expected_and_else_stays(self, store: Any, other: Any) -> None:
        count = len(store.fences())
        store.move_fences([None] * count, OPEN)
        first = [OPEN] + [None] * (count - 1)
        moved = store.move_fences(first, LATER)
        assert [fence.token for fence in moved] == [LATER] + [OPEN] * (count - 1)
        assert store.move_fences(first, LATER) == moved  # it may be sent twice
        late = other.move_fences([None] * count, OPEN)
        assert late == store.fences() == moved

    @needs("fenced_writes", "conditional_writes")
    @instead_of("fence_with_ledger")
    def test_each_record_is_behind_the_fence_of_its_part(self, store: Any, other: Any, side_door: SideDoor) -> None:
        """Each of the two attempts, with one fence moved on, writes what the other one may not."""
        keys = [f"k{i}" for i in range(300)]
        self.move(store, OPEN)
        old, new = self.writer_of(store, OPEN), self.writer_of(other, LATER)
        old.multi_get(keys)
        other.move_fences([OPEN] + [None] * (len(store.fences()) - 1), LATER)
        for writer, record in ((old, self.a_record(7, 7)), (new, self.a_record(8, 8))):
            with pytest.raises(FencedError):
                writer.multi_put(keys, [record] * len(keys))
            for key in keys:
                with suppress(FencedError):
                    writer.multi_put([key], [record])
        records = [side_door.read(self.state, key) for key in keys]
        assert self.a_record(8, 8) in records, "300 keys, and none in the part of the first fence"
        assert all(record in (self.a_record(7, 7), self.a_record(8, 8)) for record in records)
        with pytest.raises(FencedError):
            old.multi_put([keys[records.index(self.a_record(8, 8))]], [self.a_record(7, 7)])

    @needs("fenced_writes", "conditional_writes", "claims")
    @instead_of("fence_with_ledger")
    def test_claims_outlive_the_write_that_begins_the_next_attempt(self, store: Any, other: Any) -> None:
        """Its fences are still open for the attempt before."""
        self.move(store, OPEN)
        assert store.claim(7, 0, "me") == "me"
        assert store.swap(b"next", store.load()[1], LATER) is not None
        assert other.claim(7, 0, "you") == "me"

    @needs("fenced_writes", "conditional_writes")
    @instead_of("fence_with_ledger")
    def test_a_batch_opens_all_fences_and_its_commit_closes_them(self, store: Any) -> None:
        query = CountingQuery(store, self)
        for batch_id in range(2):
            attempt = query.attempt(batch_id)
            token = attempt.attempt.token
            assert {fence.token for fence in store.fences()} == {token}
            attempt.commit()
            assert {fence.token for fence in store.fences()} == {token._replace(closed=True)}

    # Claims

    @needs("claims")
    def test_the_first_holder_of_a_claim_keeps_it(self, store: Any, other: Any) -> None:
        assert store.claim(7, 0, "me") == "me"
        assert other.claim(7, 0, "you") == "me"
        assert store.claim(7, 0, "me") == "me"
        assert other.claim(7, 1, "you") == "you"
        assert other.claim(8, 0, "you") == "you"
        assert store.claim(7, 0, "you") == "me"

    @needs("claims")
    def test_claims_of_two_states_do_not_mix(self, another: Any, store: Any) -> None:
        assert store.claim(7, 0, "me") == "me"
        assert another.claim(7, 0, "you") == "you"
        if isinstance(another, capabilities.LedgerStore):
            self.move(another, OPEN)
        assert store.claim(7, 0, "you") == "me"

    @needs("claims")
    def test_of_many_that_claim_at_once_one_holds(self, backend: Backend) -> None:
        holders = [f"h{i}" for i in range(8)]

        def claim(holder: str) -> str:
            with ExitStack() as stack:
                return str(closing(stack, backend.open(self.state)).claim(7, 0, holder))

        answers = at_once(claim, holders)
        assert answers == [answers[0]] * 8
        assert answers[0] in holders

    @needs("claims", "conditional_writes")
    def test_claims_stand_while_the_ledger_stands(self, store: Any, other: Any) -> None:
        version = self.move(store, OPEN)
        assert store.claim(7, 0, "me") == "me"
        self.move(other, OPEN)
        assert store.claim(8, 0, "me") == "me"
        assert store.swap(b"late", version, LATER) is None
        assert other.claim(8, 0, "you") == "me"

    # The library's own ledger on top

    def test_a_driver_begins_and_commits_and_the_next_one_goes_on(self, store: Any, other: Any) -> None:
        first, second = CountingQuery(store, self), CountingQuery(other, self)
        for batch_id in range(2):
            first.attempt(batch_id).commit()
        attempt = second.attempt(2)
        assert second.record.epoch == first.record.epoch + 1
        assert second.record.last_commit is not None
        assert second.record.last_commit.batch_id == 1
        with pytest.raises(FencedError):
            first.begin(2)
        attempt.commit()
        assert second.record.owners == {"query": 3}

    @needs("conditional_writes")
    def test_a_request_whose_reply_was_lost_is_retried(self, store: Any) -> None:
        faulty = FaultyStore(
            store,
            Fail(method="swap", where=Begins(1), after=True, error=StoreUnavailableError, name="begin"),
            Fail(method="swap", where=Commits(1), after=True, error=StoreUnavailableError, name="commit"),
        )
        query = CountingQuery(faulty, self)
        for batch_id in range(3):
            query.attempt(batch_id).commit()
        assert faulty.fired("begin")
        assert faulty.fired("commit")
        assert query.record.dead == ()

    @needs("conditional_writes")
    def test_of_two_drivers_that_begin_at_once_the_later_one_commits(self, store: Any, other: Any) -> None:
        second = CountingQuery(other, self)
        attempt = CountingQuery(store, self).attempt(0)
        later = second.attempt(0)
        with pytest.raises(FencedError):
            attempt.commit()
        later.commit()
        assert second.record.dead == ((attempt.attempt.txid, attempt.attempt.txid),)

    @instead_of("conditional_writes")
    def test_without_compare_and_set_the_ledger_is_a_record_that_no_reader_sees(self, store: Any) -> None:
        """Two drivers that open the state at the same moment may both succeed."""
        assert not isinstance(store, capabilities.LedgerStore)
        CountingQuery(store, self).attempt(0).commit()
        if isinstance(store, capabilities.Scan):
            assert scanned(store) == []

    @instead_of("claims")
    def test_without_claims_a_task_writes_at_once(self, store: Any) -> None:
        """A task that is tried twice with other rows can mix both tries in one attempt."""
        assert not isinstance(store, capabilities.Claims)

    @instead_of("guarded_writes")
    def test_without_a_fence_a_late_write_goes_through(self, store: Any) -> None:
        """A vacuum is refused: an orphaned record of a late writer could count after it."""
        assert self.writer_of(store, OPEN) is store


def _read_ahead(writer: Any, keys: list[str]) -> None:
    if isinstance(writer, capabilities.ReadsAhead):
        writer.read_ahead(keys)


def _flush(writer: Any) -> None:
    if isinstance(writer, capabilities.ReadsAhead):
        writer.flush()
