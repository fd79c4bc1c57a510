"""The value of a key with rolling windows: tiles of time, and what undoes the batch that wrote them last.

A record keeps, instead of the whole value before, only the tiles that its batch changed, folded ones included. The
value before is made of them when somebody asks for it, which is while a batch runs, and after one that does not count.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple


class Tiles(NamedTuple):
    """Disjoint tiles: the first unit of each, ascending, and a column of values for each field.

    A record that was read may be kept, so nobody changes its tiles in place.
    """

    starts: list[int]
    columns: list[list[Any]]

    def widened(self, fields: int) -> Tiles:
        """With nulls for the fields that were added since."""
        more = [[None] * len(self.starts) for _ in range(fields - len(self.columns))]
        return Tiles(self.starts, [*self.columns, *more])


class Undo(NamedTuple):
    """What makes the value before out of a value: the tiles that go, and those that come back as they were."""

    gone: list[int]
    back: Tiles


class Earlier:
    """The value before a batch, in a record that was read."""

    __slots__ = ("_after", "_undo")

    def __init__(self, after: Tiles, undo: Undo) -> None:
        self._after = after
        self._undo = undo

    def tiles(self) -> Tiles:
        """The tiles. Each call makes them."""
        (starts, columns), (gone, back) = self._after, self._undo
        starts, columns = list(starts), [list(column) for column in columns]
        for start in gone:
            at = bisect_left(starts, start)
            for column in (starts, *columns):
                del column[at]
        for place, start in enumerate(back.starts):
            at = bisect_left(starts, start)
            if at == len(starts) or starts[at] != start:
                starts.insert(at, start)
                for column in columns:
                    column.insert(at, None)
            for column, old in zip(columns, back.columns, strict=True):
                column[at] = old[place]
        return Tiles(starts, columns)

    def widened(self, fields: int) -> Earlier:
        """With nulls for the fields that were added since."""
        return Earlier(self._after.widened(fields), Undo(self._undo.gone, self._undo.back.widened(fields)))


def tiles_of(value: Any) -> Any:
    """The tiles of a committed value, as the one rule gives it; None for an absent key."""
    return value.tiles() if isinstance(value, Earlier) else value


def undo_of(before: Tiles, after: Tiles) -> Undo:
    """What makes ``before`` out of ``after``.

    A value that is not the same object comes back: equal ones may be different, as 0.0 and -0.0.
    """
    new = {start: at for at, start in enumerate(after.starts)}
    old = set(before.starts)
    pairs = list(zip(before.columns, after.columns, strict=True))
    back = [
        at
        for at, start in enumerate(before.starts)
        if start not in new or any(was[at] is not now[new[start]] for was, now in pairs)
    ]
    return Undo(
        [start for start in after.starts if start not in old],
        Tiles([before.starts[at] for at in back], [[column[at] for at in back] for column in before.columns]),
    )
