"""How many different keys a scan lists: for readers that count, and for a vacuum."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any


class DistinctKeys:
    """Counts keys, each once, though a scan may give one twice. Keeps 8 bytes per key; not thread-safe.

    To tell the number takes up to 100 MB more. Not guaranteed: two keys whose 64-bit hashes are equal count once.
    """

    def __init__(self) -> None:
        self._hashes = array("q")

    def update(self, keys: Sequence[Any]) -> None:
        """Adds some keys, as the store has them."""
        try:
            "".join(keys)  # the fastest way to ask whether all are texts
        except TypeError:
            keys = list(map(str, keys))  # of ints the hashes of -1 and -2 are equal
        self._hashes.extend(map(hash, keys))

    def __len__(self) -> int:
        passes = 1 + len(self._hashes) // _MOST_AT_ONCE
        if passes == 1:
            return len(set(self._hashes))
        return sum(len({one for one in self._hashes if one % passes == at}) for at in range(passes))


_MOST_AT_ONCE = 1 << 20  # hashes in a set, which takes ten times the memory
