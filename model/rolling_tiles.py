"""The arithmetic of rolling windows, as small as it can be: a key's tiles, and what is right without any.

It shares nothing with the library, so that each can be held against the other. All times are numbers. A value is a
tuple of tiles in the order of time; tiles do not overlap, and each reaches up to where a later cut is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

__all__ = [
    "NEVER",
    "Aggregates",
    "Definition",
    "Row",
    "Tiles",
    "Undo",
    "Window",
    "folded",
    "right",
    "slice_of",
    "undo",
    "undone",
]

NEVER = -(10**9)
"""Before all times: where a lifetime begins, and the tile of all that is older than the other windows."""


class Row(NamedTuple):
    """A row of input. ``number`` is a power of -3 of its own, so a sum tells which rows are in it, and how often."""

    key: int
    time: int
    number: int


class Aggregates(NamedTuple):
    """What a tile has of its rows, and what an answer has of a window's."""

    rows: int
    total: int
    least: int
    most: int

    def join(self, other: Aggregates) -> Aggregates:
        """Of the rows of both."""
        return Aggregates(
            self.rows + other.rows,
            self.total + other.total,
            min(self.least, other.least),
            max(self.most, other.most),
        )


Tiles = tuple[tuple[int, Aggregates], ...]
"""Where each tile begins, and its aggregates."""

Undo = tuple[tuple[int, ...], Tiles] | None
"""What a batch did to a value: the tiles that it made, and those that it changed or folded, as they were."""


class Window(NamedTuple):
    """A trailing window, ``length`` long or longer by less than ``step``; without a length it is the lifetime."""

    length: int | None
    step: int = 1

    def begin(self, end: int) -> int:
        """The first time of the window that ends at ``end``."""
        return NEVER if self.length is None else (end - self.length) // self.step * self.step


class Definition(NamedTuple):
    """The windows of a state. Each ends at a multiple of ``unit``."""

    windows: tuple[Window, ...]
    unit: int = 1
    lag: int = 0
    retention: int = 0

    @property
    def has_lifetime(self) -> bool:
        """Whether rows of any age count in some window."""
        return any(window.length is None for window in self.windows)

    def floor(self, time: int) -> int:
        """The last end of windows at or before a time."""
        return time // self.unit * self.unit

    def is_cut(self, time: int, horizon: int) -> bool:
        """Whether a window that ends at ``horizon`` or later begins or ends at this time."""
        if time % self.unit == 0 and time >= horizon:
            return True
        return any(
            time % window.step == 0 and time >= window.begin(horizon)
            for window in self.windows
            if window.length is not None
        )

    def tile(self, time: int, horizon: int) -> int | None:
        """Where the tile of a time begins: at the last cut. None if no window has the time any more."""
        steps = {self.unit, *(window.step for window in self.windows)}
        cuts = [cut for cut in (time // step * step for step in steps) if self.is_cut(cut, horizon)]
        return max(cuts, default=NEVER if self.has_lifetime else None)

    def has_cuts_of(self, window: Window, horizon: int) -> bool:
        """Whether tiles that were folded at ``horizon`` or earlier can answer one more window."""
        if window.step % self.unit or horizon == NEVER:
            return window.step % self.unit == 0
        if window.length is None:
            return self.has_lifetime
        first = window.begin(horizon)
        return any(
            own.length is not None and window.step % own.step == 0 and own.begin(horizon) <= first
            for own in self.windows
        )

    def can_become(self, other: Definition, horizon: int) -> bool:
        """Whether a restart may bring the other definition."""
        added = [window for window in other.windows if window not in self.windows]
        return self.unit == other.unit and all(self.has_cuts_of(window, horizon) for window in added)


def of_row(row: Row) -> Aggregates:
    """A single row's."""
    return Aggregates(1, row.number, row.number, row.number)


def joined(pieces: Iterable[tuple[int | None, Aggregates]]) -> Tiles:
    """Tiles from pieces in any order; a piece without a tile is dropped."""
    tiles: dict[int, Aggregates] = {}
    for start, own in pieces:
        if start is not None:
            tiles[start] = tiles[start].join(own) if start in tiles else own
    return tuple(sorted(tiles.items()))


@lru_cache(1 << 14)  # worlds that are explored fold the same over and over
def folded(definition: Definition, horizon: int, value: Tiles, rows: tuple[Row, ...] = ()) -> Tiles:
    """A value with more rows, and without the cuts that no window needs from ``horizon`` on."""
    old = [(definition.tile(start, horizon), own) for start, own in value]
    return joined([*old, *((definition.tile(row.time, horizon), of_row(row)) for row in rows)])


def undo(before: Tiles | None, after: Tiles) -> Undo:
    """What makes ``before`` from ``after``. None: there was no value."""
    if before is None:
        return None
    old, new = dict(before), dict(after)
    return tuple(sorted(new.keys() - old.keys())), tuple(tile for tile in before if new.get(tile[0]) != tile[1])


def undone(after: Tiles, how: Undo) -> Tiles | None:
    """The value before."""
    if how is None:
        return None
    made, were = how
    return tuple(sorted(({start: own for start, own in after if start not in made} | dict(were)).items()))


def slice_of(tiles: Tiles, begin: int, until: int | None) -> Aggregates | None:
    """What tiles say of the times from ``begin`` to ``until``: tiles count by where they begin."""
    found = [own for start, own in tiles if begin <= start and (until is None or start < until)]
    return reduce(Aggregates.join, found) if found else None


def right(rows: Sequence[Row], window: Window, end: int, until: int) -> Aggregates | None:
    """What is right of one key, from its rows alone. A live window reaches past its end, ``until`` a unit later."""
    begin = window.begin(end)
    numbers = [row.number for row in rows if begin <= row.time < until]
    return Aggregates(len(numbers), sum(numbers), min(numbers), max(numbers)) if numbers else None
