"""The map state that keeps the bare value: the smallest and fastest, and at least once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from mapstate.backing_map import IBackingMap
from mapstate.maps.map_state import CombineAll, MapState, last_of_each

V = TypeVar("V")


class NonTransactionalMap(MapState[V]):
    """Keep bare values. A repeated batch counts again for all keys that it had written."""

    def __init__(self, backing: IBackingMap[Any, V]) -> None:
        super().__init__()
        self._backing = backing

    def multi_get(self, keys: Sequence[Any]) -> list[V | None]:
        """The latest values."""
        return self._backing.multi_get(keys)

    def multi_combine(self, keys: Sequence[Any], partials: Sequence[Any], combine_all: CombineAll) -> list[V | None]:
        self._attempt()
        values = combine_all(self._backing.multi_get(keys), list(partials))
        self._backing.multi_put(keys, values)
        return values

    def multi_put(self, keys: Sequence[Any], values: Sequence[V | None]) -> None:
        self._attempt()
        self._backing.multi_put(*last_of_each(keys, values))
