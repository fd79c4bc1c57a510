"""The wire formats, by name: plain JSON, MessagePack, and the values of a store with types of its own.

JSON is the default: it is readable in the store's own shell, and the form of storm-redis. NaN and the infinities are
the words "NaN", "Infinity" and "-Infinity"; decimals, dates and timestamps are strings, binary is base64. MessagePack
is smaller for most values, and has bytes and all floats. Native records are plain values, for a store with
`mapstate.capabilities.NativeRecords`, with text as in JSON. ``blocks:N``, there ``blocks:N:native``, has many keys in
each record: `mapstate.serializers.blocks`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from mapstate.errors import ConfigurationError
from mapstate.keys import KeyCodec
from mapstate.serializers.serializer import JsonSerializer, RecordCodec, Serializer

if TYPE_CHECKING:
    from mapstate.serializers.blocks import BlockCodec

__all__ = [
    "JsonSerializer",
    "MessagePackSerializer",
    "NativeSerializer",
    "RecordCodec",
    "Serializer",
    "serializer",
]

_msgpack = msgspec.msgpack.Encoder()


class MessagePackSerializer(Serializer):
    """The same arrays as JSON's, in MessagePack."""

    name = "msgpack"
    float_words = False

    def encode_all(self, items: list[Any]) -> list[bytes]:
        return list(map(_msgpack.encode, items))

    def decoder(self, kind: Any) -> Any:
        return msgspec.msgpack.Decoder(kind)


class NativeSerializer(Serializer):
    """``[6, 4, 8]``: a list, with the txid at its end."""

    name = "native"
    float_words = False
    native = True
    undecoded = Any

    def encode_all(self, items: list[Any]) -> list[Any]:
        """See `Serializer.encode_all`: lists of plain values."""
        plain: list[Any] = msgspec.to_builtins(items, builtin_types=(bytes,))
        return plain

    def decoder(self, kind: Any) -> Any:
        return _Decoder(kind)


class _Decoder:
    def __init__(self, kind: Any) -> None:
        self._struct = _struct_of(kind)

    def decode(self, data: Any) -> Any:
        return msgspec.structs.astuple(msgspec.convert(data, self._struct, builtin_types=(bytes, bytearray)))


@lru_cache(maxsize=256)
def _struct_of(kind: Any) -> type[msgspec.Struct]:
    """A Struct for the tuple type ``kind``: msgspec reads a Struct's types once, a tuple's for each record."""
    parts = [(f"part{i}", part) for i, part in enumerate(get_args(kind))]
    return msgspec.defstruct("Record", parts, array_like=True, forbid_unknown_fields=True)


_KINDS: tuple[type[Serializer], ...] = (JsonSerializer, MessagePackSerializer, NativeSerializer)
_BY_NAME = {kind.name: kind for kind in _KINDS}


def blocks_of(name: str) -> int | None:
    """The number of blocks in the name of a serializer, in a spec or a ledger; None for another one."""
    form = re.fullmatch("blocks:([1-9][0-9]*)(:native)?", name)
    return None if form is None else int(form[1])


def serializer(name: str) -> Serializer:
    """The serializer by its name in a spec or a ledger. Raises ConfigurationError."""
    if blocks_of(name) is not None:
        name = "native" if name.endswith(":native") else "msgpack"  # of what stands beside the blocks
    if name not in _BY_NAME:
        raise ConfigurationError(f"there is no serializer {name!r}; there is {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]()


def record_codec(ledger: Any) -> RecordCodec | BlockCodec:
    """The codec of the records of a state, by its ledger. Readers and operators."""
    blocks, form = blocks_of(ledger.serializer), serializer(ledger.serializer)
    if blocks is None:
        *schema, is_rolling = ledger.state, ledger.type, ledger.fields, ledger.field_counts, ledger.rolling is not None
        return RecordCodec(form, *schema, in_tiles=is_rolling)
    from mapstate.serializers.blocks import BlockCodec

    return BlockCodec(ledger.state, ledger.fields, blocks, in_panes=ledger.windows is not None, native=form.native)


def key_codec(ledger: Any) -> KeyCodec:
    """The codec of a state's keys, by its ledger. Those in blocks are text, whatever types the store has."""
    return KeyCodec(ledger.keys, native=ledger.serializer == NativeSerializer.name)
