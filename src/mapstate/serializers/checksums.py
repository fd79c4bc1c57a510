"""The checksum of a binary value that another library reads, and that might crash on damaged bytes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

CHECKED = ":binary,crc32:bigint>"
"""The end of the type of such a value: ``struct<hll:binary,crc32:bigint>``."""


def with_checksum(data: bytes) -> tuple[bytes, int]:
    """The value of some bytes."""
    return data, zlib.crc32(data)


def verified(value: Sequence[Any] | None) -> tuple[bytes, int] | None:
    """The decoded value. Raises ValueError, from which the codec makes a CorruptRecordError."""
    if value is None:
        return None
    data, checksum = value
    if data is None or zlib.crc32(data) != checksum:
        raise ValueError("the bytes of a sketch differ from their crc32")
    return bytes(data), checksum
