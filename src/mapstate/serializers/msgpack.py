"""MessagePack: smaller than JSON for most values, and holds bytes and all floats as they are."""

from __future__ import annotations

from typing import Any

import msgspec

from mapstate.serializers.serializer import Serializer

__all__ = ["MessagePackSerializer"]

_encoder = msgspec.msgpack.Encoder()


class MessagePackSerializer(Serializer):
    """The same arrays as JSON's, in MessagePack."""

    name = "msgpack"
    float_words = False

    def encode_all(self, items: list[Any]) -> list[bytes]:
        """See `Serializer.encode_all`."""
        return list(map(_encoder.encode, items))

    def decoder(self, kind: Any) -> Any:
        """See `Serializer.decoder`."""
        return msgspec.msgpack.Decoder(kind)
