"""The wire formats, by name: plain JSON, MessagePack, and the values of a store with types of its own.

JSON is the default: it is readable in the store's own shell, and the form of storm-redis. NaN and the infinities are
the words "NaN", "Infinity" and "-Infinity"; decimals, dates and timestamps are strings, binary is base64. MessagePack
is smaller for most values, and has bytes and all floats.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mapstate.errors import ConfigurationError
from mapstate.serializers.native import NativeSerializer
from mapstate.serializers.serializer import Serializer

_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


class JsonSerializer(Serializer):
    """``[8,6,4]``."""

    name = "json"
    float_words = True

    def encode_all(self, items: list[Any]) -> list[bytes]:
        """See `Serializer.encode_all`. One call for all items, because no JSON document has a line break."""
        return _json.encode_lines(items).split(b"\n")[:-1]

    def decoder(self, kind: Any) -> Any:
        return msgspec.json.Decoder(kind)


class MessagePackSerializer(Serializer):
    """The same arrays as JSON's, in MessagePack."""

    name = "msgpack"
    float_words = False

    def encode_all(self, items: list[Any]) -> list[bytes]:
        return list(map(_msgpack.encode, items))

    def decoder(self, kind: Any) -> Any:
        return msgspec.msgpack.Decoder(kind)


_KINDS: tuple[type[Serializer], ...] = (JsonSerializer, MessagePackSerializer, NativeSerializer)
_BY_NAME = {kind.name: kind for kind in _KINDS}


def serializer(name: str) -> Serializer:
    """The serializer by its name in a spec or a ledger. Raises ConfigurationError."""
    if name not in _BY_NAME:
        raise ConfigurationError(f"there is no serializer {name!r}; there is {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]()
