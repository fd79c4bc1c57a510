"""How many different keys a scan lists: for readers that count, and for a vacuum."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from mapstate.keys import StoreKey

__all__ = ["DistinctKeys"]


class DistinctKeys:
    """Counts keys, each once, though a scan may give one twice. Keeps 8 bytes per key; not thread-safe.

    Not guaranteed: two keys whose 64-bit hashes are equal count once.
    """

    def __init__(self) -> None:
        self._hashes = [array("q") for _ in range(_PARTS)]

    def update(self, keys: Sequence[StoreKey]) -> None:
        """Adds some keys."""
        parts = self._hashes
        texts = keys if set(map(type, keys)) == {str} else map(str, keys)  # of ints the hashes of -1 and -2 are equal
        for number in map(hash, texts):
            parts[number % _PARTS].append(number)

    def __len__(self) -> int:
        return sum(len(set(part)) for part in self._hashes)


_PARTS = 256  # only one of them is a set at one time, which takes ten times the memory
