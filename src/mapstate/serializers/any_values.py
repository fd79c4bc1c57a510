"""Values of the type ``any``: those of a user's own aggregator."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from mapstate.errors import SerializationError, shown


def any_to_native(value: Any) -> Any:
    """The value, or its MessagePack if it has bytes or a NUL. So stored bytes are always MessagePack."""
    check_plain(value, float_words=False)
    return msgspec.msgpack.encode(value) if _has_bytes_or_nul(value) else value


def _has_bytes_or_nul(value: Any) -> bool:
    kind = type(value)
    if kind is str:
        return b"\0" in value.encode()  # raises for text that cannot be UTF-8
    if kind is list:
        return any(map(_has_bytes_or_nul, value))
    if kind is dict:
        return any(map(_has_bytes_or_nul, value)) or any(map(_has_bytes_or_nul, value.values()))
    return kind is bytes


def native_to_any(value: Any) -> Any:
    """The value that `any_to_native` has stored."""
    return msgspec.msgpack.decode(value) if isinstance(value, bytes | bytearray) else value


def check_plain(value: Any, *, float_words: bool) -> Any:
    """Return the value if a serializer reads it back unchanged. Raises SerializationError if not."""
    kind = type(value)
    if kind in (type(None), bool, str):
        return value
    if kind is int and -(1 << 63) <= value < 1 << 63:
        return value
    if kind is float and (math.isfinite(value) or not float_words):
        return value
    if kind is bytes and not float_words:
        return value
    if kind is list:
        for item in value:
            check_plain(item, float_words=float_words)
        return value
    if kind is dict and all(type(key) is str for key in value):
        for item in value.values():
            check_plain(item, float_words=float_words)
        return value
    raise SerializationError(
        f"{shown(value)} ({kind.__name__}) cannot be stored and come back the same: an own aggregator may "
        "accumulate None, bool, str, int of 64 bits, finite float, list, and dict with str keys"
        f"{'' if float_words else ', and bytes'}",
    )
