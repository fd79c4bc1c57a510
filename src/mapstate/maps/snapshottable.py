"""The state of an ungrouped aggregate: one value, under one key."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from mapstate.keys import GLOBAL_KEY
from mapstate.maps.map_state import MapState, Updater

V = TypeVar("V")


class SnapshottableMap(Generic[V]):
    """One value on top of a map state, as Trident's Snapshottable.

    ``key`` is the value's key, by default that of an ungrouped aggregate.
    """

    def __init__(self, state: MapState[V], key: Any = GLOBAL_KEY) -> None:
        self._state = state
        self._keys = [key]

    def begin_commit(self, txid: int) -> None:
        self._state.begin_commit(txid)

    def commit(self, txid: int) -> None:
        self._state.commit(txid)

    def get(self) -> V | None:
        """The value, None if absent."""
        return self._state.multi_get(self._keys)[0]

    def update(self, updater: Updater[V]) -> V | None:
        """Apply ``updater`` to the value, and return the new value."""
        return self._state.multi_update(self._keys, [updater])[0]

    def set(self, value: V | None) -> None:
        """Set the value."""
        self._state.multi_put(self._keys, [value])
