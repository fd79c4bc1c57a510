"""Bounded calls to any backing map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.errors import UsageError

K = TypeVar("K")
V = TypeVar("V")


class MicroBatchBackingMap(Generic[K, V]):
    """Split calls of ``backing`` into parts of at most ``max_keys`` keys, in order, up to the first error."""

    def __init__(self, backing: IBackingMap[K, V], max_keys: int) -> None:
        if max_keys < 1:
            raise UsageError(f"max_keys is the size of a call, at least 1, not {max_keys}")
        self._backing = backing
        self._max_keys = max_keys

    def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        out: list[V | None] = []
        for at in range(0, len(keys), self._max_keys):
            out += self._backing.multi_get(keys[at : at + self._max_keys])
        return out

    def multi_put(self, keys: Sequence[K], values: Sequence[V]) -> None:
        check_lengths(keys, values, "values")
        for at in range(0, len(keys), self._max_keys):
            self._backing.multi_put(keys[at : at + self._max_keys], values[at : at + self._max_keys])
