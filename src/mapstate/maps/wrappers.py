"""Wrappers: a cache and bounded calls for any backing map, and the one value of an ungrouped aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from cachetools import LRUCache

from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.errors import UsageError
from mapstate.keys import GLOBAL_KEY
from mapstate.maps.opaque import MapState, Updater

K = TypeVar("K")
V = TypeVar("V")

_MISSING: Any = object()


class CachedMap(Generic[K, V]):
    """Keep the ``max_entries`` most recently used entries of ``backing``, with those of absent keys.

    The cache is right only while nobody else writes the same keys. A put fills it after ``backing`` succeeded; keys of
    a failed put are not cached. ``hits``, ``misses`` and ``puts`` count keys.
    """

    def __init__(self, backing: IBackingMap[K, V], max_entries: int) -> None:
        if max_entries < 1:
            raise UsageError(f"max_entries is the size of a cache, at least 1, not {max_entries}")
        self.backing = backing
        self.hits = self.misses = self.puts = 0
        self._entries: LRUCache[K, V | None] = LRUCache(max_entries)

    def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        """See `IBackingMap.multi_get`. One call of ``backing``, for the keys that are not cached."""
        entries = self._entries
        out = [entries.get(key, _MISSING) for key in keys]
        missing = list(dict.fromkeys(key for key, value in zip(keys, out, strict=True) if value is _MISSING))
        self.misses += len(missing)
        self.hits += len(keys) - len(missing)
        if missing:
            fetched = dict(zip(missing, self.backing.multi_get(missing), strict=True))
            out = [fetched[key] if value is _MISSING else value for key, value in zip(keys, out, strict=True)]
            entries.update(fetched)
        return out

    def multi_put(self, keys: Sequence[K], values: Sequence[V]) -> None:
        check_lengths(keys, values, "values")
        for key in keys:
            self._entries.pop(key, None)
        self.backing.multi_put(keys, values)
        self._entries.update(zip(keys, values, strict=True))
        self.puts += len(keys)

    def clear(self) -> None:
        """Remove all entries from the cache."""
        self._entries.clear()


class MicroBatchBackingMap(Generic[K, V]):
    """Split calls of ``backing`` into parts of at most ``max_keys`` keys, in order, up to the first error."""

    def __init__(self, backing: IBackingMap[K, V], max_keys: int) -> None:
        if max_keys < 1:
            raise UsageError(f"max_keys is the size of a call, at least 1, not {max_keys}")
        self._backing = backing
        self._max_keys = max_keys

    def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        out: list[V | None] = []
        for i in range(0, len(keys), self._max_keys):
            out += self._backing.multi_get(keys[i : i + self._max_keys])
        return out

    def multi_put(self, keys: Sequence[K], values: Sequence[V]) -> None:
        check_lengths(keys, values, "values")
        for i in range(0, len(keys), self._max_keys):
            self._backing.multi_put(keys[i : i + self._max_keys], values[i : i + self._max_keys])


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
