"""The rolling windows of many keys at once, with numpy: the tiles of all keys in one array.

For values that were read in packed form, and fields of integers that are added up, or of which the least or the
greatest is asked. `mapstate.aggregators.tiles` does the rest, key by key, with the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mapstate.aggregators.extremes import Max, Min
from mapstate.aggregators.folding import adds_up, checked_sum, folded
from mapstate.serializers.packed import packed_count, unpacked_all
from mapstate.serializers.tiles import BASE, Earlier, StoredTiles, Undo

FEWEST = 16
"""Of fewer keys a loop is faster."""

_MOST = 1 << 61
"""Larger numbers are left to Python, whose integers do not wrap around."""


def numpy() -> Any:
    """The module; None where it is not installed."""
    try:
        import numpy as np
    except ImportError:
        return None
    return np


def is_packed(value: Any) -> bool:
    """Whether a committed value can be one of `ManyTiles`."""
    if type(value) is Earlier:
        return not value.more and type(value.after) is StoredTiles  # a field that came since has no column there
    return type(value) is StoredTiles


class ManyTiles:
    """The tiles of some keys, in one order: that of the keys, then that of time. For one call.

    ``fits`` is False where a loop has to do it all, because times are too far apart for one array.
    """

    def __init__(self, np: Any, values: Sequence[StoredTiles | Earlier]) -> None:
        self._np = np
        self._after: list[Any] = [value.after if isinstance(value, Earlier) else value for value in values]
        undos = [(i, value.undo()) for i, value in enumerate(values) if isinstance(value, Earlier)]
        self._back = [undo.back for _, undo in undos]
        self.fits = all(isinstance(back, StoredTiles) for back in self._back) and not any(
            BASE in undo.gone and self._after[i].base is None for i, undo in undos
        )
        if not self.fits:
            return
        self._bases = [tile.base for tile in self._after]
        owners, units, self._counts = self._units(range(len(values)), self._after)
        of_back, back, self._back_counts = self._units([i for i, _ in undos], self._back) if undos else (units,) * 3
        all_units = np.concatenate([units, back]) if undos else units
        self._low = int(all_units.min(initial=_MOST))
        high = int(all_units.max(initial=-_MOST))
        self._span = max(high - self._low, 0) + 2
        self.fits = self._low > -_MOST and high < _MOST and self._span * len(values) < _MOST
        if not self.fits:
            return
        self._origins = np.arange(len(values)) * self._span
        self._keys = self._place(owners, units)
        self.fits = bool((self._keys[1:] > self._keys[:-1]).all())  # else a loop finds which key is damaged
        self._order: Any = None
        if undos:
            self._take_back(undos, of_back, back)

    def _take_back(self, undos: Sequence[tuple[int, Undo]], of_back: Any, back: Any) -> None:
        """Leaves the tiles before the undos' batch. ``of_back`` and ``back`` are the owners and units that return."""
        np = self._np
        gone = [(i, start) for i, undo in undos for start in undo.gone if start != BASE]
        near = range(self._low, self._low + self._span)
        if not all(start in near for _, start in gone):  # they would be places of other keys
            self.fits = False
            return
        for i, undo in undos:
            if undo.back.base is not None or BASE in undo.gone:
                self._bases[i] = undo.back.base
        owners, lost = np.array(gone, np.int64).reshape(-1, 2).T
        undone = self._place(of_back, back)
        out = np.concatenate([self._place(owners, lost), undone])
        places = np.searchsorted(self._keys, out)
        is_there = np.append(self._keys, -1)[places] == out
        self._kept = np.ones(len(self._keys), bool)
        self._kept[places[is_there]] = False
        are_ascending = (undone[1:] > undone[:-1]).all()
        self.fits = bool(self.fits and is_there[: len(gone)].all() and are_ascending)
        keys = np.concatenate([self._keys[self._kept], undone])
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def _units(self, owners: Sequence[int], tiles: Sequence[StoredTiles]) -> tuple[Any, Any, Any]:
        np, starts = self._np, [tile.starts for tile in tiles]
        counts = np.array([packed_count(start, 8) for start in starts], np.int64)
        firsts = np.frombuffer(b"".join([start[:8] for start in starts]), "<q")
        steps = unpacked_all(np, [start[8:] for start in starts], counts) if starts else firsts
        return np.repeat(np.array(owners, np.int64), counts), steps + np.repeat(firsts, counts), counts

    def _place(self, owners: Any, units: Any) -> Any:
        return self._origins[owners] + (units - self._low)

    def cuts(self, bounds: Sequence[Sequence[int]]) -> Any:
        """For each bound and key the place of the key's first tile from there on.

        A bound is a unit for each key, or one for all.
        """
        most = self._span - 1
        bounded = [[min(max(unit - self._low, 0), most) for unit in units] for units in bounds]
        return self._np.searchsorted(self._keys, self._origins + self._np.array(bounded))

    def joined(
        self, field: tuple[int, Any, str], cuts: Any, high: Any, with_base: Sequence[int], nothing: Any
    ) -> list[list[Any]] | None:
        """Of one field, its place, aggregator and type, a value for each window and key; None where a loop has to.

        ``cuts`` are the places of each window's first tiles, ``high`` those behind its last ones, and ``with_base`` the
        windows that have the base tiles, too. Without a row a value is ``nothing``.
        """
        np, (i, aggregator, kind) = self._np, field
        is_sum = adds_up(aggregator, kind)

        def join(base: Any, more: Any) -> Any:
            return checked_sum(aggregator, base + more) if is_sum else folded(aggregator, kind, (base, more))

        extreme: Any = {Min: np.minimum, Max: np.maximum}.get(type(aggregator))
        columns, undone = [tile.columns[i] for tile in self._after], [tile.columns[i] for tile in self._back]
        if not {bytes}.issuperset(map(type, (*columns, *undone))) or (not is_sum and extreme is None):
            return None  # packed columns are of integers
        values = unpacked_all(np, columns, self._counts)
        if self._order is not None:
            back = unpacked_all(np, undone, self._back_counts)
            values = np.concatenate([values[self._kept], back])[self._order]
        if is_sum and max(-int(values.min(initial=0)), int(values.max(initial=0))) * len(values) >= _MOST:
            return None
        # what is joined up to each tile, or one more value, because a place may be behind the last one
        out: list[list[Any]]
        ends = np.zeros(len(values) + 1, np.int64)
        if is_sum:
            np.cumsum(values, out=ends[1:])
            out = (ends[high] - ends[cuts]).tolist()
        else:
            ends[:-1] = values
            pairs = np.stack([cuts, np.broadcast_to(high, cuts.shape)], axis=-1)
            out = extreme.reduceat(ends, pairs.ravel())[::2].reshape(cuts.shape).tolist()
        empty = cuts >= high
        for window, place in zip(*map(np.ndarray.tolist, np.nonzero(empty)), strict=True):
            out[window][place] = nothing
        bases = [(place, base[i]) for place, base in enumerate(self._bases) if base is not None] if with_base else []
        for window in with_base:
            out_of, has_none = out[window], empty[window].tolist()
            for place, held in bases:
                if held is not None:
                    out_of[place] = held if has_none[place] else join(held, out_of[place])
        return out
