"""Plain JSON, the default: readable in the store's own shell, and the form of storm-redis.

NaN and the infinities are the words "NaN", "Infinity" and "-Infinity"; decimals, dates and timestamps
are strings, binary is base64.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mapstate.serializers.serializer import Serializer

__all__ = ["JsonSerializer"]

_encoder = msgspec.json.Encoder()


class JsonSerializer(Serializer):
    """``[8,6,4]``."""

    name = "json"
    float_words = True

    def encode_all(self, items: list[Any]) -> list[bytes]:
        """See `Serializer.encode_all`. One call: no JSON document has a line break of its own."""
        return _encoder.encode_lines(items).split(b"\n")[:-1]

    def decoder(self, kind: Any) -> Any:
        """See `Serializer.decoder`."""
        return msgspec.json.Decoder(kind)
