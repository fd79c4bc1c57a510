"""Records as plain values, for a store with types of its own. See `mapstate.capabilities.NativeRecords`.

Decimals, dates and timestamps are text, as in JSON.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, get_args

import msgspec

from mapstate.serializers.serializer import Serializer


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
    parts = [(f"part{at}", part) for at, part in enumerate(get_args(kind))]
    return msgspec.defstruct("Record", parts, array_like=True, forbid_unknown_fields=True)
