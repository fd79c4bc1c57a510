"""The contract of whole batches over a store: crashes, replays, late tasks, new drivers, and readers."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import Any

import pytest

from mapstate.backing_map import Backend
from mapstate.capabilities import Claims, FenceToken, Swap
from mapstate.errors import CorruptRecordError, FencedError, StaleBatchError, StateOwnershipError, UsageError
from mapstate.operations.doctor import examine
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.reader import open_reader
from mapstate.reader.capabilities import ScansFrom, ScansParts
from mapstate.schema import StateType
from mapstate.testing.contracts.backend import BackendContract, closing
from mapstate.testing.contracts.backing_map import SideDoor
from mapstate.testing.contracts.capabilities import instead_of, needs
from mapstate.testing.contracts.driver import CountingQuery


class ReplayContract(BackendContract):
    """Batches count exactly once, and readers see whole batches. Fixtures as for `BackendContract`."""

    def query(self, store: Any, kind: StateType = "opaque", **options: Any) -> CountingQuery:
        """Start a driver."""
        return CountingQuery(store, self, kind, **options)

    def seen(self, backend: Backend, *keys: str) -> list[int | None]:
        """Return what a new reader sees."""
        with open_reader(backend, self.state) as reader:
            return [None if value is None else value["n"] for value in reader.multi_get(list(keys))]

    def test_batches_add_up(self, backend: Backend, store: Any) -> None:
        query = self.query(store)
        query.run(0, {"a": 1, "b": 2})
        query.run(1, {"b": 3, "c": 4})
        query.run(2, {})
        assert self.seen(backend, "a", "b", "c", "d") == [1, 5, 4, None]

    def test_an_attempt_is_seen_by_nobody_until_it_is_committed(self, backend: Backend, store: Any) -> None:
        query = self.query(store)
        query.run(0, {"a": 1})
        attempt = query.attempt(1)
        attempt.add({"a": 10, "b": 10})
        assert self.seen(backend, "a", "b") == [1, None]
        attempt.commit()
        assert self.seen(backend, "a", "b") == [11, 10]

    @needs("joint_ledgers")
    def test_an_attempt_goes_on_under_a_ledger_that_is_compared_alone(
        self, store: Any, backend: Backend, opened: ExitStack
    ) -> None:
        """As an alias is swapped: `JointLedgers.swap_all` gets the ledgers of two versions as they are."""
        another = closing(opened, backend.open(f"{self.state}2"))
        fence, closed = FenceToken(1, 7), FenceToken(1, 7, closed=True)
        version = store.swap(b"same", None, fence)
        claims = [store.claim(7, 0, "mine")] if isinstance(store, Claims) else []
        same = Swap(store, b"same", version, closed)
        versions = store.swap_all([Swap(another, b"one", None, closed), same])
        assert versions[1] == version
        assert [store.load(), another.load()] == [(b"same", version), (b"one", versions[0])]
        self.writer_of(store, fence).multi_put(["a"], [self.a_record(1, 7)])
        assert [store.claim(7, 0, "another") for _ in claims] == claims
        assert store.swap(b"later", version, fence) is not None
        assert another.swap_all([Swap(another, b"two", versions[0], closed), same]) is None
        assert another.load() == (b"one", versions[0])

    def test_a_replay_that_omits_a_key_leaves_no_phantom(self, backend: Backend, store: Any, other: Any) -> None:
        self.query(store).run(0, {"a": 10, "b": 20})
        self.query(store).orphan(1, {"a": 1, "new": 1})
        query = self.query(other)
        query.run(1, {"b": 1})
        assert self.seen(backend, "a", "b", "new") == [10, 21, None]
        query.run(2, {"a": 1, "new": 5})
        assert self.seen(backend, "a", "b", "new") == [11, 21, 5]

    def test_a_crash_between_two_chunks_counts_nothing_and_its_replay_counts_once(
        self, backend: Backend, store: Any
    ) -> None:
        keys = [f"k{i}" for i in range(100)]
        query = self.query(store)
        query.run(0, dict.fromkeys(keys, 1))
        for written in (0, 50, 99, 100):
            attempt = query.attempt(1)
            if written:
                attempt.add(dict.fromkeys(keys[:written], 1000))
            attempt.end()
            assert self.seen(backend, *keys) == [1] * 100
        query.run(1, dict.fromkeys(keys, 1))
        assert self.seen(backend, *keys) == [2] * 100

    def test_a_batch_that_counts_already_is_not_counted_again(self, backend: Backend, store: Any, other: Any) -> None:
        self.query(store).run(0, {"a": 1})
        again = self.query(other)
        assert again.begin(0) is None
        again.run(0, {"a": 1})
        assert self.seen(backend, "a") == [1]
        again.run(1, {"a": 1})
        assert self.seen(backend, "a") == [2]

    def test_a_transactional_replay_of_the_same_rows_counts_once(
        self, backend: Backend, store: Any, other: Any
    ) -> None:
        query = self.query(store, "transactional")
        query.run(0, {"a": 1, "b": 1})
        query.orphan(1, {"a": 1})
        self.query(other, "transactional").run(1, {"a": 1, "b": 1})
        assert self.seen(backend, "a", "b") == [2, 2]

    @needs("guarded_writes", "conditional_writes")
    def test_a_task_that_goes_on_after_its_attempt_was_begun_anew_changes_nothing(
        self, backend: Backend, store: Any, other: Any
    ) -> None:
        self.query(store).run(0, {"a": 1})
        late = self.query(store).attempt(1)
        self.query(other).run(1, {"a": 10})
        with pytest.raises((FencedError, StaleBatchError)):  # whichever it meets first
            late.add({"a": 1000})
        assert self.seen(backend, "a") == [11]

    @needs("guarded_writes", "conditional_writes")
    def test_what_a_late_task_writes_to_a_new_key_never_counts(self, backend: Backend, store: Any, other: Any) -> None:
        self.query(store).run(0, {"a": 1})
        late = self.query(store).attempt(1)
        query = self.query(other)
        query.run(1, {"a": 10})
        try:
            late.add({"new": 1000})
        except FencedError:
            assert "fenced_writes" not in self.lacking() or store.multi_get(["new"]) == [None]
        else:
            assert "fenced_writes" in self.lacking()  # it is dead, by the one rule
        late.end()
        assert self.seen(backend, "new") == [None]
        query.run(2, {"new": 5})
        assert self.seen(backend, "new") == [5]

    @needs("conditional_writes")
    def test_a_driver_that_was_replaced_commits_nothing(self, backend: Backend, store: Any, other: Any) -> None:
        attempt = self.query(store).attempt(0)
        attempt.add({"a": 1})
        newer = self.query(other)
        newer.begin(0)
        with pytest.raises(FencedError):
            attempt.commit()
        newer.run(0, {"a": 5})
        assert self.seen(backend, "a") == [5]

    def test_another_query_is_refused_unless_it_adopts_or_resets(self, backend: Backend, store: Any) -> None:
        self.query(store).run(0, {"a": 1, "b": 1})
        with pytest.raises(StateOwnershipError):
            self.query(store, owner="another").begin(0)
        self.query(store, owner="another", on_new_owner="adopt_unchecked").run(0, {"a": 1})
        assert self.seen(backend, "a", "b") == [2, 1]
        self.query(store, owner="a third", on_new_owner="reset").run(0, {"a": 7})
        assert self.seen(backend, "a", "b") == [7, None]

    def test_the_last_batch_can_be_rolled_back(self, backend: Backend, store: Any) -> None:
        query = self.query(store)
        query.run(0, {"a": 1})
        query.run(1, {"a": 10, "b": 10})
        Ledger(store, self.state).rollback()
        assert self.seen(backend, "a", "b") == [1, None]
        self.query(store).run(1, {"b": 3})
        assert self.seen(backend, "a", "b") == [1, 3]

    @needs("scan")
    def test_a_reader_scans_what_counts(self, backend: Backend, store: Any) -> None:
        query = self.query(store)
        query.run(0, {f"k{i}": i for i in range(50)})
        query.orphan(1, {"k0": 1000, "new": 1000})
        with open_reader(backend, self.state) as reader:
            assert dict(reader.scan(7)) == {(f"k{i}",): {"n": i} for i in range(50)}

    @needs("scan")
    def test_a_reader_goes_on_from_any_cursor_of_a_scan_or_gets_none(self, backend: Backend, store: Any) -> None:
        self.query(store).run(0, {f"k{i:03d}": i for i in range(50)})
        with open_reader(backend, self.state) as reader:
            pages = list(reader.pages_as_of(7))
            assert {page.ledger.last_commit.batch_id for page in pages if page.ledger.last_commit is not None} == {0}
            if not isinstance(store, ScansFrom):
                assert {page.cursor for page in pages} == {None}
                with pytest.raises(UsageError, match="cannot go on"):
                    list(reader.pages_as_of(7, cursor="7"))
                return
            seen = dict[Any, Any]()
            for page in pages:
                seen |= dict(page.rows)
                with open_reader(backend, self.state) as other:
                    rest = dict(row for left in other.pages_as_of(9, cursor=page.cursor or "") for row in left.rows)
                assert {**seen, **rest} == {(f"k{i:03d}",): {"n": i} for i in range(50)}
            assert list(reader.pages_as_of(7, cursor=pages[-1].cursor or "")) == []
            for cursor in [(page.cursor or "")[:-1] for page in pages]:
                with pytest.raises(UsageError, match="no cursor of state"):
                    list(reader.pages_as_of(7, cursor=cursor))
            for cursor in ("x", "-1", "1e3", "999999999999999999999-", "end", "\0"):
                with pytest.raises(UsageError, match="cursor"):
                    list(store.scan_from(cursor, 7))
                with pytest.raises(UsageError, match="no cursor of state"):
                    list(reader.pages_as_of(7, cursor=cursor))

    @needs("scan")
    @pytest.mark.parametrize("most", [1, 2, 7, 1000])
    def test_the_parts_of_a_scan_have_every_key_once_in_any_order(
        self, backend: Backend, store: Any, most: int
    ) -> None:
        keys = [f"k{i:03d}" for i in range(50)]
        self.query(store).run(0, {key: i for i, key in enumerate(keys)})
        pairs: list[Any] = []
        with open_reader(backend, self.state) as reader:
            parts = reader.parts(most)
        assert all(type(part) is str for part in parts)
        assert 1 <= len(parts) <= most
        for part in reversed(parts):
            with open_reader(backend, self.state) as reader:
                for fields, page_keys, values in reader.part(part, 7):
                    pairs += zip(page_keys, fields.named(values), strict=True)
        assert len(pairs) == len(keys)
        assert dict(pairs) == {(key,): {"n": i} for i, key in enumerate(keys)}
        assert isinstance(store, ScansParts) or parts == [""]

    @needs("scan")
    def test_the_ledger_knows_how_many_keys_a_scan_finds(self, backend: Backend, store: Any, other: Any) -> None:
        query = self.query(store)
        query.run(0, {f"k{i}": i for i in range(50)})
        with open_reader(backend, self.state) as reader:
            assert reader.count_keys(7)[:2] == (50, 50)
            query.orphan(1, {"k0": 1000, "phantom": 1000})
            assert reader.count_keys(7)[:2] == (50, 50)
            self.query(other).run(1, {"k0": 1, "new": 1})
            assert reader.count_keys(7)[:2] == (51, 51)
            assert reader.key_count() == 51

    @needs("scan")
    def test_records_that_cannot_be_read_are_named_and_end_no_scan(
        self, backend: Backend, store: Any, side_door: SideDoor
    ) -> None:
        self.query(store).run(0, {f"k{i:02}": i for i in range(50)})
        odd = [f"k{i:02}" for i in range(0, 50, 4)]
        for key in odd:
            side_door.write(self.state, key, self.odd_record("the word null"))
        seen: dict[Any, Any] = {}
        with open_reader(backend, self.state) as reader:
            with pytest.raises(CorruptRecordError, match="k04"):
                reader.multi_get(["k03", "k04"])
            with pytest.raises(CorruptRecordError, match="keys cannot be read") as caught:
                seen.update(reader.scan(7))
        assert seen == {(f"k{i:02}",): {"n": i} for i in range(50) if i % 4}
        assert caught.value.count >= 13  # a listing may give a key twice
        assert len(caught.value.keys) == 10
        assert set(caught.value.keys) < set(odd)
        errors = [finding.found for finding in examine(backend, self.state) if finding.severity == "error"]
        assert any("keys cannot be read" in error for error in errors), "the doctor does not say so"

    def test_a_record_with_a_txid_from_the_future_is_named_soon(
        self, backend: Backend, store: Any, side_door: SideDoor
    ) -> None:
        self.query(store).run(0, {"a": 1, "b": 2})
        side_door.write(self.state, "a", self.a_record(5, txid=10**9))
        with open_reader(backend, self.state) as reader:
            started = time.monotonic()
            with pytest.raises(StaleBatchError, match=r"'a'.*txid 1000000000.*above 1000") as caught:
                reader.multi_get(["b", "a"])
            assert caught.value.key == "a"
            assert time.monotonic() - started < 15
            assert reader.get("b") == {"n": 2}

    @needs("scan")
    def test_a_record_with_a_txid_from_the_future_ends_no_scan_and_is_found_by_the_doctor(
        self, backend: Backend, store: Any, side_door: SideDoor
    ) -> None:
        self.query(store).run(0, {"a": 1, "b": 2, "c": 3})
        for key in "ac":
            side_door.write(self.state, key, self.a_record(5, txid=10**9))
        seen: dict[Any, Any] = {}
        with open_reader(backend, self.state) as reader, pytest.raises(CorruptRecordError, match=r"keys.*'a'"):
            seen.update(reader.scan(1))
        assert seen == {("b",): {"n": 2}}
        errors = [finding.found for finding in examine(backend, self.state) if finding.severity == "error"]
        assert any("keys are newer than the ledger" in error for error in errors)

    @needs("scan", "guarded_writes", "conditional_writes")
    def test_a_vacuum_does_its_work_beside_what_it_cannot_read_and_says_so(
        self, backend: Backend, store: Any, side_door: SideDoor
    ) -> None:
        query = self.query(store)
        query.run(0, {"a": 1, "b": 1, "odd": 1, "late": 1})
        query.orphan(1, {"a": 1000, "new": 1000})
        query.run(1, {"b": 1})
        strange = {"odd": self.odd_record("the word null"), "late": self.a_record(5, txid=10**9)}
        for key, record in strange.items():
            side_door.write(self.state, key, record)
        done = vacuum(backend, self.state, page_size=2)
        assert done.unreadable >= 2
        assert sorted(done.unreadable_keys) == ["late", "odd"]
        assert {key: side_door.read(self.state, key) for key in strange} == strange
        assert read_ledger(store, self.state).dead == ()
        assert self.seen(backend, "a", "b", "new") == [1, 2, None]

    @needs("scan", "guarded_writes", "conditional_writes")
    def test_a_vacuum_changes_nothing_that_a_reader_sees(self, backend: Backend, store: Any) -> None:
        query = self.query(store)
        query.run(0, {"a": 1, "b": 1})
        query.orphan(1, {"a": 1000, "new": 1000})
        query.run(1, {"b": 1})
        assert query.record.dead
        vacuum(backend, self.state)
        assert self.seen(backend, "a", "b", "new") == [1, 2, None]
        assert read_ledger(store, self.state).dead == ()
        self.query(store).run(2, {"a": 1, "new": 1})
        assert self.seen(backend, "a", "b", "new") == [2, 2, 1]

    @instead_of("guarded_writes")
    def test_a_vacuum_is_refused(self, backend: Backend, store: Any) -> None:
        self.query(store).run(0, {"a": 1})
        with pytest.raises(UsageError, match="vacuum"):
            vacuum(backend, self.state)

    @pytest.mark.parametrize("seed", range(4))
    def test_whatever_crashes_and_comes_again_the_sum_is_that_of_the_batches_that_ended(
        self, backend: Backend, opened: ExitStack, seed: int
    ) -> None:
        """A random story: replays with other rows, new drivers, crashes at every step."""
        chance = random.Random(seed)
        wanted: dict[str, int] = {}
        store = closing(opened, backend.open(self.state))
        query = self.query(store)
        batch_id = 0
        for _ in range(30):
            if chance.random() < 0.2:
                query = self.query(store)
            counts = {key: chance.randint(1, 9) for key in chance.sample("abcdef", chance.randint(0, 4))}
            attempt = query.attempt(batch_id)
            chunks = [dict(list(counts.items())[:2]), dict(list(counts.items())[2:])]
            dies_after = chance.choice([0, 1, 2, 3, 3, 3])
            for chunk in chunks[:dies_after]:
                if chunk:
                    attempt.add(chunk)
            attempt.end()
            if dies_after == 3:
                attempt.commit()
                batch_id += 1
                for key, count in counts.items():
                    wanted[key] = wanted.get(key, 0) + count
            assert self.seen(backend, *"abcdef") == [wanted.get(key) for key in "abcdef"]
