"""The form of records whose value is tiles: ``[txid, value, undo]``. See `mapstate.protocol.tiles`.

A value is ``[has_base, steps, column, ...]``: the differences of the tiles' starts, which are small numbers, and a
column for each field. The undo is null for a new key, else ``[gone, has_base, steps, column, ...]``. A removed key has
null for its value, and the tiles before in its undo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from mapstate.protocol.rolling import BASE
from mapstate.protocol.tiles import Earlier, Tiles, Undo, tiles_of, undo_of
from mapstate.schema import Field
from mapstate.serializers.value_types import Convert, WireForm, from_wire, to_wire, wire_type

if TYPE_CHECKING:
    from mapstate.serializers.serializer import Serializer


class TileLayout:
    """The form of records with the first fields only. See `mapstate.serializers.serializer.RecordCodec`."""

    def __init__(self, serializer: Serializer, fields: Sequence[Field], txid: Any) -> None:
        form = WireForm(float_words=serializer.float_words, native=serializer.native)
        self.count = len(fields)
        self._native = serializer.native
        columns = tuple(list[wire_type(field.type, form)] for field in fields)  # type: ignore[misc]
        tiles = (bool, list[int], *columns)
        places = tuple[tiles] | None, tuple[(list[int | None], *tiles)] | None  # type: ignore[valid-type]
        record = tuple[(*places, txid)] if self._native else tuple[(txid, *places)]  # type: ignore[valid-type]
        self.decode: Callable[[Any], Any] = serializer.decoder(record).decode
        self._to_wire = [to_wire(field.type, form) for field in fields]
        self._from_wire = [from_wire(field.type, form) for field in fields]
        self._converts = any(self._from_wire)

    def out_of(self, record: Any) -> list[Any]:
        """A record's document. ``record`` has the value before, of which the undo is made."""
        txid, after, before = record
        after, before = tiles_of(after), tiles_of(before)
        undo = None
        if before is not None:
            gone, back = ([], before) if after is None else undo_of(before, after)
            undo = [[None if start == BASE else start for start in gone], *self._packed(back)]
        value = None if after is None else self._packed(after)
        return [value, undo, txid] if self._native else [txid, value, undo]

    def into(self, document: Any) -> tuple[int, Tiles | None, Tiles | Earlier | None]:
        """The record of a document. Raises ValueError where columns differ in length."""
        value, undo, txid = document if self._native else (*document[1:], document[0])
        if value is None:
            return txid, None, None if undo is None else self._unpacked(undo[1:])
        after = self._unpacked(value)
        if undo is None:
            return txid, after, None
        gone = [BASE if start is None else start for start in undo[0]]
        return txid, after, Earlier(after, Undo(gone, self._unpacked(undo[1:])))

    def _packed(self, tiles: Tiles) -> list[Any]:
        starts, columns = tiles
        has_base = starts[:1] == [BASE]
        starts = starts[has_base:]
        steps = [*starts[:1], *(later - start for start, later in pairwise(starts))]
        return [has_base, steps, *map(_converted, self._to_wire, columns)]

    def _unpacked(self, value: Sequence[Any]) -> Tiles:
        has_base, steps, *columns = value
        starts = list(chain((BASE,), accumulate(steps))) if has_base else list(accumulate(steps))
        for column in columns:
            if len(column) != len(starts):
                raise ValueError(f"{len(starts)} tiles, and {len(column)} values")
        if self._converts:
            columns = [*map(_converted, self._from_wire, columns)]
        return Tiles(starts, columns)


def _converted(convert: Convert | None, column: list[Any]) -> list[Any]:
    return column if convert is None else [*map(convert, column)]
