"""Encode and decode the records of each state type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec

from mapstate.errors import CorruptRecordError, SerializationError, cut, shown
from mapstate.schema import Field, StateType
from mapstate.serializers.tiles import TileLayout
from mapstate.serializers.value_types import TXID, Array, Convert, WireForm, each, from_wire, to_wire, wire_type

_UNREADABLE = (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError)
_VALUES_AT: dict[StateType, tuple[int, ...]] = {"non-transactional": (), "transactional": (1,), "opaque": (1, 2)}


class Serializer(ABC):
    """A wire format. It has no state, and only its ``name`` is sent to executors.

    ``float_words``  the format has no NaN and no infinities, so they are words
    ``native``       documents are values, not bytes: for stores with `mapstate.capabilities.NativeRecords`
    ``undecoded``    the type for a part of a document that is skipped
    """

    name: ClassVar[str]
    float_words: ClassVar[bool]
    native: ClassVar[bool] = False
    undecoded: ClassVar[Any] = msgspec.Raw

    @abstractmethod
    def encode_all(self, items: list[Any]) -> list[Any]:
        """Encode one document per item."""

    @abstractmethod
    def decoder(self, kind: Any) -> Any:
        """An object whose ``decode(data)`` reads documents of the type ``kind``, or raises MsgspecError."""


class RecordCodec:
    """Encode and decode the records of one state, a chunk at a time. Every task and every reader makes one.

    ``field_counts`` is the ledger's: by its txid, a record from before a field was added has fewer values. Records of
    rolling windows are ``in_tiles``.
    """

    def __init__(
        self,
        serializer: Serializer,
        state: str,
        state_type: StateType,
        fields: Sequence[Field],
        field_counts: Sequence[tuple[int, int]],
        *,
        in_tiles: bool = False,
    ) -> None:
        self._state = state
        self._encode_all = serializer.encode_all
        form, make = WireForm(serializer.float_words, serializer.native), TileLayout if in_tiles else _Layout
        self._layouts: list[tuple[int, Any]] = [
            (txid, make(serializer.decoder, form, state_type, fields[:count])) for txid, count in field_counts
        ]
        self._now = self._layouts[-1][1]
        self._fields = len(fields)
        self._txid_at = -1 if serializer.native else 0
        if len(field_counts) > 1:
            values = (serializer.undecoded,) * len(_VALUES_AT[state_type])
            parts = (*values, TXID) if serializer.native else (TXID, *values)
            self._txid = serializer.decoder(tuple[parts])  # type: ignore[valid-type]

    def dumps(self, records: Sequence[Any]) -> list[Any]:
        """Encode one document per record. Raises SerializationError."""
        out_of = self._now.out_of
        try:
            return self._encode_all(list(records) if out_of is None else list(map(out_of, records)))
        except SerializationError as error:
            raise SerializationError(f"state {self._state!r}: {error.message}", state=self._state) from error
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise SerializationError(
                f"state {self._state!r}: a value cannot be encoded: {cut(error)}", state=self._state
            ) from error

    def loads(self, keys: Sequence[Any], data: Sequence[Any]) -> list[Any]:
        """Decode the records; None stays None. Raises CorruptRecordError, with all such keys in ``keys``."""
        if len(self._layouts) > 1:
            load = self._load_by_txid
            try:
                return [None if item is None else load(key, item) for key, item in zip(keys, data, strict=True)]
            except CorruptRecordError:
                return self._each(load, keys, data)
        decode, into = self._now.decode, self._now.into
        try:
            if all(data) or None not in data:  # no Python code per record, if none has to be converted
                decoded = map(decode, data)
                return list(decoded) if into is None else list(map(into, decoded))
            if into is None:
                return [None if item is None else decode(item) for item in data]
            return [None if item is None else into(decode(item)) for item in data]
        except _UNREADABLE:
            return self._each(partial(self._load, self._now), keys, data)

    @staticmethod
    def _each(load: Callable[[Any, Any], Any], keys: Sequence[Any], data: Sequence[Any]) -> list[Any]:
        """Load each record by itself. Raises the error of the first unreadable record, with the keys of all."""
        out: list[Any] = []
        errors: list[CorruptRecordError] = []
        for key, item in zip(keys, data, strict=True):
            try:
                out.append(None if item is None else load(key, item))
            except CorruptRecordError as error:
                errors.append(error)
        if errors:
            errors[0].facts["keys"] = [error.key for error in errors]
            raise errors[0]
        return out

    def _load(self, layout: Any, key: Any, data: Any) -> Any:
        try:
            record = layout.decode(data)
            return record if layout.into is None else layout.into(record)
        except _UNREADABLE as error:
            raise self._corrupt(key, data, error) from error

    def _load_by_txid(self, key: Any, data: Any) -> Any:
        try:
            txid = self._txid.decode(data)[self._txid_at]
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
        if isinstance(self._now, TileLayout):
            return value.widened(self._fields)
        if count == 1:
            value = value if value == (None,) else (value,)
        return tuple(value) + (None,) * (self._fields - count)

    def _corrupt(self, key: Any, data: Any, error: Exception) -> CorruptRecordError:
        return CorruptRecordError(
            f"state {self._state!r}, key {shown(key)}: the stored record {shown(data)} cannot be read ({cut(error)}). "
            "It was not written by this state; nothing was overwritten. Restore the key, or delete it if its value is "
            "lost.",
            state=self._state,
            key=str(key),
        )


class _Layout:
    """The form of records with the first fields only: those of a time before fields were added."""

    def __init__(self, decoder: Any, form: WireForm, state_type: StateType, fields: Sequence[Field]) -> None:
        array: Array = list if form.native else tuple
        self.count = len(fields)
        if self.count == 1:
            kind = wire_type(fields[0].type, form)
            value: Any = kind if kind is Any or fields[0].type.startswith("struct<") else kind | tuple[None]
            out_of = _unless_null(to_wire(fields[0].type, form), array)
            into = _unless_null(from_wire(fields[0].type, form), tuple)
        else:
            value = tuple[tuple(wire_type(field.type, form) for field in fields)] | None  # type: ignore[misc]
            out_of = each([to_wire(field.type, form) for field in fields], array)
            into = each([from_wire(field.type, form) for field in fields], tuple)
        places = _VALUES_AT[state_type]
        self.out_of: Convert | None
        self.into: Convert | None
        if form.native:
            record = tuple[(*(value for _ in places), TXID)] if places else tuple[value]  # type: ignore[misc]
            self.out_of, self.into = _txid_last(out_of, places), _txid_first(into, places)
        else:
            record = tuple[(TXID, *(value for _ in places))] if places else value  # type: ignore[misc]
            self.out_of, self.into = _at_places(out_of, places), _at_places(into, places)
        self.decode = decoder(record).decode


def _unless_null(convert: Convert | None, array: Array) -> Convert | None:
    if convert is None and array is tuple:
        return None
    own, null = convert or _as_it_is, array((None,))
    return lambda value: value if value is None else null if value == (None,) else own(value)


def _at_places(convert: Convert | None, places: tuple[int, ...]) -> Convert | None:
    """The conversion of a record by the conversion of its values."""
    if convert is None or not places:
        return convert
    if len(places) == 1:
        return lambda record: (record[0], convert(record[1]))
    return lambda record: (record[0], convert(record[1]), convert(record[2]))


def _txid_last(convert: Convert | None, places: tuple[int, ...]) -> Convert:
    """The conversion of a record to its native form, with the txid last."""
    own = convert or _as_it_is
    if not places:
        return lambda value: [own(value)]
    if len(places) == 1:
        return lambda record: [own(record[1]), record[0]]
    return lambda record: [own(record[1]), own(record[2]), record[0]]


def _txid_first(convert: Convert | None, places: tuple[int, ...]) -> Convert:
    """The conversion of a native form to its record, with the txid first."""
    own = convert or _as_it_is
    if not places:
        return lambda native: own(native[0])
    if len(places) == 1:
        return lambda native: (native[1], own(native[0]))
    return lambda native: (native[2], own(native[0]), own(native[1]))


def _as_it_is(value: Any) -> Any:
    return value
