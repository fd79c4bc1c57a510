"""Records that are decoded one by one: of a state to which fields were added, or where one cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mapstate.errors import CorruptRecordError, cut, shown
from mapstate.serializers.tiles import TileLayout

UNREADABLE = (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError)
"""What the decoding of a record raises that this state did not write."""


def read_each(
    keys: Sequence[Any], data: Sequence[Any], read: Callable[[Any, Any], Any], *, state: str, noun: str, advice: str
) -> list[Any]:
    """The records, by ``read(key, item)``; None stays None. Raises the error of the first that cannot be read.

    It has all such keys in ``keys``. ``noun`` is that of a key, and ``advice`` says what becomes of it.
    """
    out: list[Any] = []
    errors: list[CorruptRecordError] = []
    for key, item in zip(keys, data, strict=True):
        try:
            out.append(None if item is None else read(key, item))
        except UNREADABLE as error:
            message = f"state {state!r}, {noun} {shown(key)}: the stored record {shown(item)} cannot be read"
            how = f"({cut(error)}). It was not written by this state, and was not overwritten. {advice}"
            errors.append(CorruptRecordError(f"{message} {how}", state=state, key=str(key)))
            errors[-1].__cause__ = error
    if errors:
        errors[0].facts["keys"] = [error.key for error in errors]
        raise errors[0]
    return out


class RecordReader:
    """Decode the records of one state. ``layouts`` are pairs (txid, layout), ascending, as in `RecordCodec`.

    ``txid_of`` decodes a record's txid alone, None where there is one layout. ``fields`` is their number now.
    """

    def __init__(self, state: str, layouts: Sequence[tuple[int, Any]], fields: int, txid_of: Any) -> None:
        self._state = state
        self._layouts = layouts
        self._fields = fields
        self._txid_of = txid_of

    def loads(self, keys: Sequence[Any], data: Sequence[Any]) -> list[Any]:
        """See `RecordCodec.loads`."""
        advice = "Restore the key, or delete it if its value is lost."
        return read_each(keys, data, self._record, state=self._state, noun="key", advice=advice)

    def _record(self, _: Any, data: Any) -> Any:
        if self._txid_of is None:
            return _decoded(self._layouts[-1][1], data)
        txid = self._txid_of(data)
        layout = next((layout for start, layout in reversed(self._layouts) if start <= txid), self._layouts[0][1])
        record = _decoded(layout, data)
        if layout.count == self._fields:
            return record
        return (txid, *(self._widened(value, layout) for value in record[1:]))

    def _widened(self, value: Any, layout: Any) -> Any:
        if value is None:
            return None
        if isinstance(layout, TileLayout):
            return value.widened(self._fields)
        if layout.count == 1:
            value = value if value == (None,) else (value,)
        return tuple(value) + (None,) * (self._fields - layout.count)


def _decoded(layout: Any, data: Any) -> Any:
    record = layout.decode(data)
    return record if layout.into is None else layout.into(record)
