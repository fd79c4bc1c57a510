"""The value of a key with rolling windows, which is tiles of time; what undoes a batch; and the form of its records.

A record is ``[txid, value, undo]``. A value is ``[has_base, steps, column, ...]``: the differences of the tiles'
starts, which are small numbers, and a column for each field. Instead of the whole value before, the undo has only the
tiles that its batch changed, folded ones included: ``[gone, has_base, steps, column, ...]``, null for a new key. A
removed key has null for its value, and all tiles before in its undo. The value before is made of the undo when somebody
asks for it, which is while a batch runs, and after one that does not count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from mapstate.schema import Field, StateType
from mapstate.serializers.value_types import TXID, Convert, WireForm, from_wire, to_wire, wire_type

BASE = -(1 << 62)
"""The tile of all rows that are older than each window with a length. Only where there is a lifetime."""


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
    """The value before a batch, in a record that was read: what its undo makes of the value after it."""

    __slots__ = ("_after", "_more", "_undo")

    def __init__(self, after: Tiles, undo: Callable[[], Undo], more: int = 0) -> None:
        self._after = after
        self._undo = undo
        self._more = more

    def tiles(self) -> Tiles:
        """The tiles. Each call makes them."""
        (starts, columns), (gone, back) = self._after, self._undo()
        starts, columns = list(starts), [list(column) for column in columns]
        for start in gone:
            at = starts.index(start)
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
        return Tiles(starts, columns).widened(len(columns) + self._more)

    def widened(self, fields: int) -> Earlier:
        """With nulls for the fields that were added since."""
        return Earlier(self._after, self._undo, fields - len(self._after.columns))


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


class TileLayout:
    """The form of records with the first fields only. See `mapstate.serializers.serializer.RecordCodec`."""

    def __init__(self, decoder: Any, form: WireForm, state_type: StateType, fields: Sequence[Field]) -> None:  # noqa: ARG002
        self.count = len(fields)
        self._native = form.native
        columns = tuple(list[wire_type(field.type, form)] for field in fields)  # type: ignore[misc]
        tiles = (bool, list[int], *columns)
        places = tuple[tiles] | None, tuple[(list[int | None], *tiles)] | None  # type: ignore[valid-type]
        record = tuple[(*places, TXID)] if self._native else tuple[(TXID, *places)]  # type: ignore[valid-type]
        self.decode: Callable[[Any], Any] = decoder(record).decode
        self._to_wire = [to_wire(field.type, form) for field in fields]
        self._from_wire = [from_wire(field.type, form) for field in fields]
        self._converts = any(self._from_wire)

    def out_of(self, record: Any) -> list[Any]:
        """A record's document. ``record`` has the value before, of which the undo is made."""
        txid, *both = record
        after, before = map(tiles_of, both)
        undo = None
        if before is not None:
            gone, back = ([], before) if after is None else undo_of(before, after)
            undo = [[None if start == BASE else start for start in gone], *self._packed(back)]
        value = None if after is None else self._packed(after)
        return [value, undo, txid] if self._native else [txid, value, undo]

    def into(self, document: Any) -> tuple[int, Tiles | None, Tiles | Earlier | None]:
        """The record of a document. Raises ValueError where columns differ in length."""
        value, undo, txid = document if self._native else (document[1], document[2], document[0])
        after = None if value is None else self._unpacked(value)
        if undo is None:
            return txid, after, None
        if after is None:
            return txid, None, self._unpacked(undo[1:])
        _check_lengths(*undo[1:])
        return txid, after, Earlier(after, partial(self._undo, undo))

    def _undo(self, undo: Sequence[Any]) -> Undo:
        gone, *value = undo
        return Undo([BASE if start is None else start for start in gone], self._unpacked(value))

    def _packed(self, tiles: Tiles) -> list[Any]:
        starts, columns = tiles
        has_base = starts[:1] == [BASE]
        starts = starts[has_base:]
        steps = [*starts[:1], *(later - start for start, later in pairwise(starts))]
        return [has_base, steps, *map(_converted, self._to_wire, columns)]

    def _unpacked(self, value: Sequence[Any]) -> Tiles:
        has_base, steps, *columns = value
        starts = list(accumulate(steps))
        if has_base:
            starts.insert(0, BASE)
        _check_lengths(has_base, steps, *columns)
        if self._converts:
            columns = [*map(_converted, self._from_wire, columns)]
        return Tiles(starts, columns)


def _converted(convert: Convert | None, column: list[Any]) -> list[Any]:
    return column if convert is None else [*map(convert, column)]


def _check_lengths(has_base: bool, steps: list[int], *columns: list[Any]) -> None:
    count = len(steps) + has_base
    for column in columns:
        if len(column) != count:
            raise ValueError(f"{count} tiles, and {len(column)} values")
