"""A cache in front of any backing map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from cachetools import LRUCache

from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.errors import UsageError

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
