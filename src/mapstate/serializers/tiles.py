"""The value of a key with rolling windows, which is tiles of time; what undoes a batch; and the form of its records.

A record is ``[txid, value, undo]``. A value is ``[has_base, steps, column, ...]``: the differences of the tiles'
starts, which are small numbers, and a column for each field. Instead of the whole value before, the undo has only the
tiles that its batch changed, folded ones included: ``[gone, has_base, steps, column, ...]``, null for a new key. A
removed key has null for its value, and all tiles before in its undo. The value before is made of the undo when somebody
asks for it, which is while a batch runs, and after one that does not count.

In MessagePack columns of integers are packed, `mapstate.serializers.packed`, so that many records are read at once. A
value is then ``[base, starts, column, ...]``: ``base`` has the base tile's value of each field, or is null, and
``starts`` are 8 bytes of a start and the packed distances from it. Records from before that are read, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import is_not, lt
from struct import pack, unpack, unpack_from
from typing import Any, NamedTuple

from mapstate.errors import CorruptRecordError
from mapstate.schema import Field, StateType
from mapstate.serializers.packed import WIDTHS, numbers_at, packed, unpacked, with_number
from mapstate.serializers.value_types import INTEGERS, TXID, Convert, WireForm, from_wire, to_wire, wire_type

BASE = -(1 << 62)
"""The tile of all rows that are older than each window with a length. Only where there is a lifetime."""


_FAR = 1 << 62
"""Tiles that begin farther from 0 are not packed."""


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
    back: Any


class StoredTiles:
    """A value as it was read, which becomes `Tiles` when somebody asks.

    ``base``     the base tile's value of each field; None without one
    ``starts``   8 bytes of a start, and the packed distances of the others from it
    ``columns``  the values of the others, packed or as a list
    ``change``   of a value that `Edit` has made: the value before, and what makes it again
    """

    __slots__ = ("_tiles", "base", "change", "columns", "starts")

    def __init__(
        self,
        base: Sequence[Any] | None,
        starts: bytes,
        columns: Sequence[Any],
        change: tuple[StoredTiles, Undo] | None = None,
    ) -> None:
        self.base, self.starts, self.columns, self.change = base, starts, columns, change
        self._tiles: Tiles | None = None

    def units(self) -> list[int]:
        """Where the tiles begin that are no base. Raises CorruptRecordError where they are out of order."""
        (first,) = unpack_from("<q", self.starts)
        return _checked([*map(first.__add__, unpacked(self.starts[8:]))])

    def tiles(self) -> Tiles:
        """The tiles, made once: `undo_of` looks whether a value is the same."""
        if self._tiles is not None:
            return self._tiles
        starts = self.units()
        columns = [unpacked(column) if type(column) is bytes else [*column] for column in self.columns]
        if self.base is not None:
            starts.insert(0, BASE)
            for column, column_base in zip(columns, self.base, strict=True):
                column.insert(0, column_base)
        self._tiles = Tiles(starts, columns)
        return self._tiles

    def widened(self, fields: int) -> Tiles:
        """With nulls for the fields that were added since."""
        return self.tiles().widened(fields)


class Edit:
    """A value that was read, on its way to the next one: what is packed stays so, and the undo has what is changed.

    ``units`` and ``columns`` are the tiles of the next value, but for the base, which stays as it is.
    """

    __slots__ = ("_before", "_changed", "_gone", "_old", "_origin", "_steps", "columns", "units")

    def __init__(self, before: StoredTiles, units: list[int]) -> None:
        self._before, self._old, self.units = before, units, units
        self._origin = before.starts[:8]
        self._steps: Any = before.starts[8:]
        self.columns = [column if type(column) is bytes else [*column] for column in before.columns]
        self._changed: set[int] = set()
        self._gone: set[int] = set()

    def note(self, start: int) -> None:
        """Says that the tile that begins here is new, goes, or gets other values."""
        i = bisect_left(self._old, start)
        if self._old[i : i + 1] == [start]:
            self._changed.add(i)
        else:
            self._gone.add(start)

    def replace(self, first: int, end: int, start: int, values: Sequence[Any]) -> None:
        """Puts one tile in the place of those from ``first`` to ``end``, which may be none."""
        for unit in (*self.units[first:end], start):
            self.note(unit)
        if self.units is self._old:
            self.units = [*self._old]
        self.units[first:end] = [start]
        (origin,) = unpack("<q", self._origin)
        self._steps = with_number(self._steps, first, end, start - origin)
        for number, value in enumerate(values):
            self.columns[number] = with_number(self.columns[number], first, end, value)

    def done(self) -> StoredTiles:
        """The next value, which knows its undo."""
        before, places, steps = self._before, sorted(self._changed), self._steps
        back = [numbers_at(column, places) for column in before.columns]
        old = StoredTiles(None, self._origin + numbers_at(before.starts[8:], places), back)
        starts = self._origin + (steps if type(steps) is bytes else packed(steps) or b"")
        return StoredTiles(before.base, starts, self.columns, (before, Undo(sorted(self._gone), old)))


def packed_starts(starts: Sequence[int]) -> bytes | None:
    """The bytes of starts behind the base; None where they are too far apart, or too far away."""
    first = starts[0] if starts else 0
    if not -_FAR < first < _FAR:
        return None
    steps = packed([start - first for start in starts])
    return None if steps is None else pack("<q", first) + steps


class Earlier:
    """The value before a batch, in a record that was read: what its undo makes of the value after it."""

    __slots__ = ("after", "more", "undo")

    def __init__(self, after: Tiles | StoredTiles, undo: Callable[[], Undo], more: int = 0) -> None:
        self.after, self.undo, self.more = after, undo, more

    def tiles(self) -> Tiles:
        """The tiles. Each call makes them."""
        (starts, columns), (gone, stored) = tiles_of(self.after), self.undo()
        starts, columns, back = list(starts), [list(column) for column in columns], tiles_of(stored)
        for start in gone:
            if start not in starts:
                raise damaged()
            i = starts.index(start)
            for column in (starts, *columns):
                del column[i]
        for place, start in enumerate(back.starts):
            i = bisect_left(starts, start)
            if i == len(starts) or starts[i] != start:
                starts.insert(i, start)
                for column in columns:
                    column.insert(i, None)
            for column, old in zip(columns, back.columns, strict=True):
                column[i] = old[place]
        return Tiles(starts, columns).widened(len(columns) + self.more)

    def widened(self, fields: int) -> Earlier:
        """With nulls for the fields that were added since."""
        return Earlier(self.after, self.undo, fields - len(self.after.columns))


def tiles_of(value: Any) -> Any:
    """The tiles of a value that was read, or of a committed one, as the one rule gives it; None for an absent key.

    Raises CorruptRecordError for tiles that are out of order, and an undo of tiles that are not there.
    """
    return value if value is None or type(value) is Tiles else value.tiles()


def damaged() -> CorruptRecordError:
    """The error of tiles, or of an undo, that no batch has written. Who has the key names it."""
    return CorruptRecordError(
        "tiles are out of order, or an undo takes away tiles that are not there: the record was damaged, or written by "
        "another program. Restore it from a backup."
    )


def _checked(starts: list[int]) -> list[int]:
    if not all(map(lt, starts, starts[1:])):
        raise damaged()
    return starts


def undo_of(before: Tiles, after: Tiles) -> Undo:
    """What makes ``before`` out of ``after``.

    A value that is no integer, and not the same object, comes back: equal ones may be different, as 0.0 and -0.0.
    """
    new = dict(zip(after.starts, range(len(after.starts)), strict=True))
    places = [*map(new.get, before.starts)]
    changed = {i for i, place in enumerate(places) if place is None}
    for was, now in zip(before.columns, after.columns, strict=True):
        moved = [None if place is None else now[place] for place in places]
        if any(map(is_not, was, moved)):
            pairs = enumerate(zip(was, moved, strict=True))
            changed.update(i for i, (old, column) in pairs if old is not column and not _are_same_integers(old, column))
    back, old = sorted(changed), set(before.starts)
    return Undo(
        [start for start in after.starts if start not in old],
        Tiles([before.starts[i] for i in back], [[column[i] for i in back] for column in before.columns]),
    )


def _are_same_integers(value: Any, other: Any) -> bool:
    return type(value) is type(other) is int and value == other  # 1 == 1.0 == True


class TileLayout:
    """The form of records with the first fields only. See `mapstate.serializers.serializer.RecordCodec`."""

    def __init__(self, decoder: Any, form: WireForm, state_type: StateType, fields: Sequence[Field]) -> None:  # noqa: ARG002
        self.count = len(fields)
        self._native = form.native
        self._packs = not form.native and not form.float_words  # MessagePack: JSON has no bytes
        kinds = [wire_type(field.type, form) for field in fields]
        starts: Any = list[int]
        columns: list[Any] = [list[kind] for kind in kinds]  # type: ignore[valid-type]
        has_base: Any = bool
        if self._packs:
            has_base |= tuple[tuple(kinds)] | None  # type: ignore[misc]
            starts, columns = starts | bytes, [column | bytes for column in columns]
        tiles = has_base, starts, *columns
        places = tuple[tiles] | None, tuple[(list[int | None], *tiles)] | None  # type: ignore[valid-type]
        record = tuple[(*places, TXID)] if self._native else tuple[(TXID, *places)]  # type: ignore[valid-type]
        self.decode: Callable[[Any], Any] = decoder(record).decode
        self._is_packed = [self._packs and field.type in INTEGERS for field in fields]
        self._to_wire = [to_wire(field.type, form) for field in fields]
        self._from_wire = [from_wire(field.type, form) for field in fields]
        self._converts, self._encodes = any(self._from_wire), any(self._to_wire)

    def out_of(self, record: Any) -> list[Any]:
        """A record's document. ``record`` has the value before, of which the undo is made."""
        txid, after, before = record
        if type(after) is StoredTiles and after.change is not None and after.change[0] is before:
            gone, back = after.change[1]  # of MessagePack: no other form has packed values
            return [txid, self._out_of_stored(after), [gone, *self._out_of_stored(back)]]
        after, before = tiles_of(after), tiles_of(before)
        undo: Any = None
        if before is not None:
            gone, back = ([], before) if after is None else undo_of(before, after)
            undo = [[None if start == BASE else start for start in gone], *self._out_of(back)]
        value = None if after is None else self._out_of(after)
        return [value, undo, txid] if self._native else [txid, value, undo]

    def into(self, document: Any) -> tuple[int, Any, Any]:
        """The record of a document. Raises ValueError where columns differ in length."""
        value, undo, txid = document if self._native else (document[1], document[2], document[0])
        after = None
        if value is not None:
            _check_lengths(*value)
            after = self._made(*value)
        if undo is None:
            return txid, after, None
        gone, *before = undo
        _check_lengths(*before)
        if after is None:
            return txid, None, self._made(*before)
        return txid, after, Earlier(after, partial(self._undo, gone, before))

    def _undo(self, gone: Sequence[int | None], before: Sequence[Any]) -> Undo:
        return Undo([BASE if start is None else start for start in gone], self._made(*before))

    def _out_of(self, tiles: Tiles) -> list[Any]:
        starts, columns = tiles
        has_base = starts[:1] == [BASE]
        starts = starts[has_base:]
        columns = [*map(_converted, self._to_wire, columns)]
        places = packed_starts(starts) if self._packs else None
        if places is None:
            return [has_base, [*starts[:1], *(later - start for start, later in pairwise(starts))], *columns]
        base = [column[0] for column in columns] if has_base else None
        return [base, places, *self._packed([column[has_base:] for column in columns])]

    def _out_of_stored(self, tiles: StoredTiles) -> list[Any]:
        base, columns = tiles.base, tiles.columns
        if self._encodes:
            base = base and [value for (value,) in map(_converted, self._to_wire, [[value] for value in base])]
            columns = [
                column if type(column) is bytes else _converted(convert, column)
                for convert, column in zip(self._to_wire, columns, strict=True)
            ]
        return [base, tiles.starts, *(self._packed(columns) if list in map(type, columns) else columns)]

    def _packed(self, columns: Sequence[Any]) -> list[Any]:
        pairs = zip(columns, self._is_packed, strict=True)
        return [(is_packed and type(column) is list and packed(column)) or column for column, is_packed in pairs]

    def _made(self, base: Any, starts: Any, *columns: Any) -> Tiles | StoredTiles:
        joined: Any = columns
        if self._converts:
            joined = [
                column if type(column) is bytes else _converted(convert, column)
                for convert, column in zip(self._from_wire, columns, strict=True)
            ]
        if type(base) is bool:
            return Tiles(_checked([*([BASE] if base else []), *accumulate(starts)]), [*joined])
        if self._converts and base is not None:
            pairs = zip(self._from_wire, base, strict=True)
            base = [value if convert is None else convert(value) for convert, value in pairs]
        return StoredTiles(base, starts, joined)


def _converted(convert: Convert | None, column: list[Any]) -> list[Any]:
    return column if convert is None else [*map(convert, column)]


def _check_lengths(base: Any, starts: Any, *columns: Any) -> None:
    """Raises ValueError, or what else is wrong of a value that is none."""
    if type(base) is bool:
        if bytes in map(type, (starts, *columns)):
            raise ValueError("packed columns where others were announced")
        for column in columns:
            if len(column) != len(starts) + base:
                raise ValueError(f"{len(starts) + base} tiles, and {len(column)} values")
        return
    count, rest = divmod(len(starts) - 9, WIDTHS[starts[8]])
    if rest or type(starts) is not bytes:
        raise ValueError(f"{len(starts)} bytes or numbers are no packed starts")
    for column in columns:
        if len(column) != (1 + count * WIDTHS[column[0]] if type(column) is bytes else count):
            raise ValueError(f"{count} tiles, and a column of {len(column)} bytes or values")
