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
from mapstate.serializers.value_types import TXID, VALUES_AT, RecordLayout, WireForm

_UNREADABLE = (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError)


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
        form, make = WireForm(serializer.float_words, serializer.native), TileLayout if in_tiles else RecordLayout
        self._layouts: list[tuple[int, Any]] = [
            (txid, make(serializer.decoder, form, state_type, fields[:count])) for txid, count in field_counts
        ]
        self._now = self._layouts[-1][1]
        self._fields = len(fields)
        self._txid_at = -1 if serializer.native else 0
        if len(field_counts) > 1:
            values = (serializer.undecoded,) * len(VALUES_AT[state_type])
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
