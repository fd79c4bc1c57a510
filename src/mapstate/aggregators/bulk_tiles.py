"""The rolling windows of many keys at once, with numpy: the tiles of all keys in one array.

For values that were read in packed form, and fields of integers that are added up, or of which the least or the
greatest is asked. `mapstate.aggregators.tiles` does the rest, key by key, with the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mapstate.aggregators.extremes import Max, Min
from mapstate.aggregators.folding import adds_up, folded
from mapstate.serializers.packed import packed_count, unpacked_all
from mapstate.serializers.tiles import BASE, Earlier, StoredTiles

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
    if isinstance(value, Earlier):
        return not value.more and isinstance(value.after, StoredTiles)  # a field that came since has no column there
    return isinstance(value, StoredTiles)


class ManyTiles:
    """The tiles of some keys, in one order: that of the keys, then that of time. For one call.

    ``fits`` is False where a loop has to do it all, because times are too far apart for one array.
    """

    def __init__(self, np: Any, values: Sequence[StoredTiles | Earlier]) -> None:
        self._np = np
        self._after: list[Any] = [value.after if isinstance(value, Earlier) else value for value in values]
        undos = [(at, value.undo()) for at, value in enumerate(values) if isinstance(value, Earlier)]
        self._back = [undo.back for _, undo in undos]
        self.fits = all(isinstance(back, StoredTiles) for back in self._back) and not any(
            BASE in undo.gone and self._after[at].base is None for at, undo in undos
        )
        if not self.fits:
            return
        self._bases = [one.base for one in self._after]
        owners, units, self._counts = self._units(range(len(values)), self._after)
        gone = [(at, start) for at, undo in undos for start in undo.gone]
        for at, undo in undos:
            if undo.back.base is not None or BASE in undo.gone:
                self._bases[at] = undo.back.base
        lost = np.array([start for _, start in gone if start != BASE], np.int64)
        of_lost = np.array([at for at, start in gone if start != BASE], np.int64)
        of_back, back, self._back_counts = self._units([at for at, _ in undos], self._back)
        all_units = np.concatenate([units, back])
        self._low = int(all_units.min(initial=_MOST))
        high = int(all_units.max(initial=-_MOST))
        self._span = max(high - self._low, 0) + 2
        self.fits = self._low > -_MOST and high < _MOST and self._span * len(values) < _MOST
        if not self.fits:
            return
        self._origins = np.arange(len(values)) * self._span
        self._keys = self._place(owners, units)
        are_ascending = bool((np.diff(self._keys) > 0).all())
        self._order = None
        if undos:
            undone = self._place(of_back, back)
            out = np.concatenate([undone, self._place(of_lost, lost)])
            has_all = np.isin(out[len(undone) :], self._keys).all()
            self._kept = np.flatnonzero(~np.isin(self._keys, out))
            keys = np.concatenate([self._keys[self._kept], undone])
            self._order = np.argsort(keys, kind="stable")
            self._keys = keys[self._order]
            are_ascending = are_ascending and bool(has_all and (np.diff(undone) > 0).all())
        self.fits = are_ascending  # else a loop finds which key is damaged

    def _units(self, owners: Sequence[int], tiles: Sequence[StoredTiles]) -> tuple[Any, Any, Any]:
        np, starts = self._np, [one.starts for one in tiles]
        counts = np.array([packed_count(one, 8) for one in starts], np.int64)
        firsts = np.frombuffer(b"".join([one[:8] for one in starts]), "<q")
        steps = unpacked_all(np, [one[8:] for one in starts], counts) if starts else firsts
        return np.repeat(np.array(owners, np.int64), counts), steps + np.repeat(firsts, counts), counts

    def _place(self, owners: Any, units: Any) -> Any:
        return self._origins[owners] + (units - self._low)

    def cut(self, units: Sequence[int]) -> Any:
        """Of each key the place of its first tile from its unit on; a single unit is that of all."""
        np = self._np
        bounded = [min(max(unit - self._low, 0), self._span - 1) for unit in units]
        return np.searchsorted(self._keys, self._origins + (bounded[0] if len(bounded) == 1 else np.array(bounded)))

    def joined(
        self, field: tuple[int, Any, str], windows: Sequence[tuple[Any, bool]], high: Any
    ) -> list[list[Any]] | None:
        """Of one field, its place, aggregator and type, a value for each key and window; None where a loop has to.

        A window is the places of its first tiles, and whether it has the base tiles, too. ``high`` are those behind
        its last tiles. Without a row a value is None.
        """
        np, (at, one, kind) = self._np, field
        is_sum = adds_up(one, kind)
        extreme: Any = {Min: np.minimum, Max: np.maximum}.get(type(one))
        columns, undone = [own.columns[at] for own in self._after], [own.columns[at] for own in self._back]
        if any(type(column) is not bytes for column in (*columns, *undone)) or (not is_sum and extreme is None):
            return None  # packed columns are of integers
        values = unpacked_all(np, columns, self._counts)
        if self._order is not None:
            back = unpacked_all(np, undone, self._back_counts)
            values = np.concatenate([values[self._kept], back])[self._order]
        if is_sum and max(-int(values.min(initial=0)), int(values.max(initial=0))) * len(values) >= _MOST:
            return None
        # what is joined up to each tile, or one more value, because a place may be behind the last one
        values = np.append(0, np.cumsum(values)) if is_sum else np.append(values, 0)
        joins = partial(folded, one, kind)
        out = []
        for cut, has_base in windows:
            if is_sum:
                found = (values[high] - values[cut]).tolist()
            else:
                found = extreme.reduceat(values, np.column_stack([cut, high]).ravel())[::2].tolist()
            for empty in np.flatnonzero(cut >= high).tolist():
                found[empty] = None
            for place, base in enumerate(self._bases if has_base else ()):
                if base is not None and (own := base[at]) is not None:
                    more = found[place]
                    found[place] = own if more is None else joins((own, more))
            out.append(found)
        return out
