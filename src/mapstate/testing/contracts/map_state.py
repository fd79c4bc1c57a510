"""The contract of the three map states over a store: Trident's behaviour, without its defects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mapstate.backing_map import IBackingMap
from mapstate.errors import StaleBatchError
from mapstate.maps import MapState, NonTransactionalMap, OpaqueMap, SnapshottableMap, TransactionalMap
from mapstate.testing.contracts.backing_map import BackingMapContract
from mapstate.testing.contracts.driver import FIELDS


def plus(number: int) -> Callable[[int | None], int | None]:
    """An updater."""
    return lambda value: number if value is None else value + number


def add(state: MapState[int], number: int, key: str = "a") -> int | None:
    """Add to one key. Returns its new value."""
    return state.multi_update([key], [plus(number)])[0]


def get(state: MapState[int], key: str = "a") -> int | None:
    """The value of one key."""
    return state.multi_get([key])[0]


class MapStateContract(BackingMapContract):
    """Trident's rules, with plain increasing txids. Fixtures as for `BackingMapContract`."""

    @pytest.fixture
    def opaque(self, store: IBackingMap[str, Any]) -> OpaqueMap[int]:
        """Over the store under test."""
        return OpaqueMap(self.records_of(store, "opaque", FIELDS))

    @pytest.fixture
    def transactional(self, store: IBackingMap[str, Any]) -> TransactionalMap[int]:
        """Over the store under test."""
        return TransactionalMap(self.records_of(store, "transactional", FIELDS))

    @pytest.fixture
    def non_transactional(self, store: IBackingMap[str, Any]) -> NonTransactionalMap[int]:
        """Over the store under test."""
        return NonTransactionalMap(self.records_of(store, "non-transactional", FIELDS))

    def test_an_opaque_batch_builds_on_itself_and_its_replay_starts_from_before_it(
        self, opaque: OpaqueMap[int]
    ) -> None:
        opaque.begin_commit(1)
        assert get(opaque) is None
        assert [add(opaque, 1), add(opaque, 2)] == [1, 3]
        opaque.commit(1)
        opaque.begin_commit(1)
        assert get(opaque) is None
        assert add(opaque, 2) == 2
        opaque.commit(1)
        opaque.begin_commit(2)
        assert get(opaque) == 2
        assert [add(opaque, 3), add(opaque, 1)] == [5, 6]
        opaque.commit(2)
        assert get(opaque) == 6

    def test_a_transactional_replay_keeps_what_is_in_already(self, transactional: TransactionalMap[int]) -> None:
        state = transactional
        state.begin_commit(1)
        assert get(state) is None
        assert [add(state, 1), add(state, 2)] == [1, 3]
        state.commit(1)
        state.begin_commit(1)
        assert get(state) == 3
        assert [add(state, 1), add(state, 2)] == [3, 3]
        state.commit(1)
        state.begin_commit(2)
        assert [add(state, 3), add(state, 1)] == [6, 7]
        state.commit(2)
        assert get(state) == 7

    def test_a_transactional_replay_finishes_what_a_crash_left_half_done(
        self, transactional: TransactionalMap[int]
    ) -> None:
        state = transactional
        state.begin_commit(0)
        assert add(state, 5, "a") == 5  # it died before "b"
        state.begin_commit(0)
        assert state.multi_update(["a", "b"], [plus(5), plus(7)]) == [5, 7]
        state.commit(0)
        assert state.multi_get(["a", "b"]) == [5, 7]

    def test_a_non_transactional_map_counts_a_replay_again(self, non_transactional: NonTransactionalMap[int]) -> None:
        for expected in (1, 2):
            non_transactional.begin_commit(1)
            assert add(non_transactional, 1) == expected
            non_transactional.commit(1)
        assert get(non_transactional) == 2

    def test_zero_is_a_txid_and_a_value_like_any_other(
        self, opaque: OpaqueMap[int], transactional: TransactionalMap[int]
    ) -> None:
        for key, state in (("opaque", opaque), ("transactional", transactional)):
            state.begin_commit(0)
            assert add(state, 0, key) == 0
            state.commit(0)
            assert get(state, key) == 0
        opaque.begin_commit(0)
        assert get(opaque, "opaque") is None
        assert add(opaque, 5, "opaque") == 5

    def test_updates_of_a_repeated_key_apply_in_order(self, opaque: OpaqueMap[int]) -> None:
        opaque.begin_commit(0)
        assert opaque.multi_update(["a", "b", "a", "a"], [plus(1), plus(10), plus(2), plus(3)]) == [1, 10, 3, 6]
        opaque.commit(0)
        assert opaque.multi_get(["b", "a", "b"]) == [10, 6, 10]

    def test_many_keys_of_a_batch_get_their_own_totals(self, opaque: OpaqueMap[int]) -> None:
        keys = [f"user-{i}" for i in range(3000)]
        for txid in range(3):
            opaque.begin_commit(txid)
            opaque.multi_update(keys, [plus(i) for i in range(3000)])
            opaque.commit(txid)
        assert opaque.multi_get(keys) == [3 * i for i in range(3000)]

    def test_a_removed_key_is_absent_and_its_replay_still_knows_what_it_was(self, opaque: OpaqueMap[int]) -> None:
        opaque.begin_commit(0)
        assert add(opaque, 5) == 5
        opaque.commit(0)
        for _ in range(2):
            opaque.begin_commit(1)
            assert get(opaque) == 5
            assert opaque.multi_update(["a"], [lambda _: None]) == [None]
        opaque.commit(1)
        assert get(opaque) is None
        opaque.begin_commit(2)
        assert add(opaque, 1) == 1

    def test_a_batch_behind_the_state_raises_and_writes_nothing(
        self, opaque: OpaqueMap[int], transactional: TransactionalMap[int]
    ) -> None:
        for key, state in (("opaque", opaque), ("transactional", transactional)):
            state.begin_commit(5)
            add(state, 10, key)
            state.commit(5)
            state.begin_commit(4)
            with pytest.raises(StaleBatchError):
                state.multi_update([f"{key} new", key], [plus(1), plus(1)])
            state.begin_commit(6)
            assert state.multi_get([f"{key} new", key]) == [None, 10]

    def test_an_ungrouped_state_is_one_value(self, store: IBackingMap[str, Any]) -> None:
        single = SnapshottableMap(OpaqueMap(self.records_of(store, "opaque", FIELDS)), key="\\G")
        assert single.get() is None
        for txid in range(3):
            single.begin_commit(txid)
            assert single.update(plus(2)) == 2 * txid + 2
            single.commit(txid)
        assert single.get() == 6
