"""Encode and decode the records of each state type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from mapstate.errors import SerializationError, cut
from mapstate.schema import Field, StateType
from mapstate.serializers.one_by_one import UNREADABLE, RecordReader
from mapstate.serializers.tiles import TileLayout
from mapstate.serializers.value_types import TXID, VALUES_AT, RecordLayout, WireForm

_json = msgspec.json.Encoder()


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


class JsonSerializer(Serializer):
    """``[8,6,4]``."""

    name = "json"
    float_words = True

    def encode_all(self, items: list[Any]) -> list[bytes]:
        """See `Serializer.encode_all`. One call for all items, because no JSON document has a line break."""
        return _json.encode_lines(items).split(b"\n")[:-1]

    def decoder(self, kind: Any) -> Any:
        return msgspec.json.Decoder(kind)


class RecordCodec:
    """Encode and decode the records of one state, a chunk at a time. Every task and every reader makes one.

    ``field_counts`` is the ledger's: by its txid, a record from before a field was added has fewer values. Records of
    rolling windows are ``in_tiles``. ``blocks`` is the codec itself where a record has many keys.
    """

    blocks: ClassVar[None] = None

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
        self._txid_of = _txid_of(serializer, state_type) if len(field_counts) > 1 else None

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
            return self._one_by_one(keys, data)
        decode, into = self._now.decode, self._now.into
        try:
            if all(data) or None not in data:  # no Python code per record, if none has to be converted
                decoded = map(decode, data)
                return list(decoded) if into is None else list(map(into, decoded))
            if into is None:
                return [None if item is None else decode(item) for item in data]
            return [None if item is None else into(decode(item)) for item in data]
        except UNREADABLE:
            return self._one_by_one(keys, data)

    def _one_by_one(self, keys: Sequence[Any], data: Sequence[Any]) -> list[Any]:
        return RecordReader(self._state, self._layouts, self._fields, self._txid_of).loads(keys, data)


def _txid_of(serializer: Serializer, state_type: StateType) -> Callable[[Any], int]:
    """What decodes the txid of a record, and skips its values."""
    values = (serializer.undecoded,) * len(VALUES_AT[state_type])
    parts = (*values, TXID) if serializer.native else (TXID, *values)
    decoder, at = serializer.decoder(tuple[parts]), -1 if serializer.native else 0  # type: ignore[valid-type]
    return lambda data: decoder.decode(data)[at]
