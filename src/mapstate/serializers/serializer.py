"""How a record of each state type becomes bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from mapstate.errors import CorruptRecordError, SerializationError
from mapstate.serializers.value_types import Convert, from_wire, to_wire, wire_type
from mapstate.transitions import Field, StateType

__all__ = ["RecordCodec", "Serializer"]

_UNREADABLE = (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError)
_TXID = Annotated[int, msgspec.Meta(ge=0)]
_VALUES_AT: dict[StateType, tuple[int, ...]] = {
    "non-transactional": (),
    "transactional": (1,),
    "opaque": (1, 2),
}


class Serializer(ABC):
    """A wire format. Has no state; travels to executors by its ``name`` alone.

    ``float_words``: the format has no NaN and no infinities, so they are written as words.
    """

    name: ClassVar[str]
    float_words: ClassVar[bool]

    @abstractmethod
    def encode_all(self, items: list[Any]) -> list[bytes]:
        """One document per item."""

    @abstractmethod
    def decoder(self, kind: Any) -> Any:
        """An object with ``decode(data)``, for documents of the type ``kind``; raises MsgspecError."""


class RecordCodec:
    """Encodes and decodes the records of one state, a chunk at a time.

    ``layouts`` as in the ledger: records written before a field was added hold fewer values, which
    their txid tells. Made in every task and by every reader.
    """

    def __init__(
        self,
        serializer: Serializer,
        state: str,
        state_type: StateType,
        fields: Sequence[Field],
        layouts: Sequence[tuple[int, int]],
    ) -> None:
        self._state = state
        self._encode_all = serializer.encode_all
        self._layouts = [(txid, _Layout(serializer, state_type, fields[:count])) for txid, count in layouts]
        self._now = self._layouts[-1][1]
        self._fields = len(fields)
        if len(layouts) > 1:
            parts = [_TXID] + [msgspec.Raw] * len(_VALUES_AT[state_type])
            self._txid = serializer.decoder(tuple[tuple(parts)])  # type: ignore[misc]

    def dumps(self, records: Sequence[Any]) -> list[bytes]:
        """One document per record. Raises SerializationError."""
        out_of = self._now.out_of
        try:
            return self._encode_all(list(records) if out_of is None else [out_of(record) for record in records])
        except SerializationError as error:
            raise SerializationError(f"state {self._state!r}: {error.message}", state=self._state) from error
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise SerializationError(
                f"state {self._state!r}: a value cannot be encoded: {error}", state=self._state
            ) from error

    def loads(self, keys: Sequence[Any], data: Sequence[bytes | None]) -> list[Any]:
        """The records; None where there is none. Raises CorruptRecordError with state and key."""
        if len(self._layouts) > 1:
            return [None if one is None else self._load_by_txid(key, one) for key, one in zip(keys, data, strict=True)]
        decode, into = self._now.decode, self._now.into
        try:
            if into is None:
                return [None if one is None else decode(one) for one in data]
            return [None if one is None else into(decode(one)) for one in data]
        except _UNREADABLE:
            return [
                None if one is None else self._load(self._now, key, one) for key, one in zip(keys, data, strict=True)
            ]

    def _load(self, layout: _Layout, key: Any, data: bytes) -> Any:
        try:
            record = layout.decode(data)
            return record if layout.into is None else layout.into(record)
        except _UNREADABLE as error:
            raise self._corrupt(key, data, error) from error

    def _load_by_txid(self, key: Any, data: bytes) -> Any:
        try:
            txid = self._txid.decode(data)[0]
        except _UNREADABLE as error:
            raise self._corrupt(key, data, error) from error
        layout = next((own for start, own in reversed(self._layouts) if start <= txid), self._layouts[0][1])
        record = self._load(layout, key, data)
        if layout.count == self._fields:
            return record
        return (txid, *(self._widen(value, layout.count) for value in record[1:]))

    def _widen(self, value: Any, count: int) -> Any:
        if value is None:
            return None
        if count == 1:
            value = value if value == (None,) else (value,)
        return tuple(value) + (None,) * (self._fields - count)

    def _corrupt(self, key: Any, data: bytes, error: Exception) -> CorruptRecordError:
        shown = data[:60]
        return CorruptRecordError(
            f"state {self._state!r}, key {key!r}: the stored record {shown!r} cannot be read ({error}). It was not "
            "written by this state; nothing was overwritten. Restore the key, or delete it if its value is lost.",
            state=self._state,
            key=str(key),
        )


class _Layout:
    """How records look that hold the first so many fields."""

    def __init__(self, serializer: Serializer, state_type: StateType, fields: Sequence[Field]) -> None:
        words = serializer.float_words
        self.count = len(fields)
        if self.count == 1:
            kind = wire_type(fields[0].type, float_words=words)
            value: Any = kind if kind is Any or fields[0].type.startswith("struct<") else kind | tuple[None]
            out_of, into = (_unless_null(way(fields[0].type, float_words=words)) for way in (to_wire, from_wire))
        else:
            value = tuple[tuple(wire_type(field.type, float_words=words) for field in fields)] | None  # type: ignore[misc]
            out_of, into = (
                _in_tuple([way(field.type, float_words=words) for field in fields]) for way in (to_wire, from_wire)
            )
        places = _VALUES_AT[state_type]
        record = tuple[(_TXID, *(value for _ in places))] if places else value  # type: ignore[misc]
        self.decode = serializer.decoder(record).decode
        self.out_of = _at_places(out_of, places)
        self.into = _at_places(into, places)


def _unless_null(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda value: value if value is None or value == (None,) else convert(value)


def _in_tuple(converts: list[Convert | None]) -> Convert | None:
    if not any(converts):
        return None
    return lambda value: (
        None
        if value is None
        else tuple(part if one is None else one(part) for one, part in zip(converts, value, strict=True))
    )


def _at_places(convert: Convert | None, places: tuple[int, ...]) -> Convert | None:
    """A value's conversion, applied to each value of a record."""
    if convert is None or not places:
        return convert
    if len(places) == 1:
        return lambda record: (record[0], convert(record[1]))
    return lambda record: (record[0], convert(record[1]), convert(record[2]))
