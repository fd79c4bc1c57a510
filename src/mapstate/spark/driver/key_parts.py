"""Keys part after part, for a store that keeps parts of them together: `Backend.key_order` where it is a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mapstate.schema import KeyField

if TYPE_CHECKING:
    from pyspark.sql import Column


def by_part(parts: int, keys: Sequence[KeyField], places: Sequence[Column]) -> Column:
    """A number by which rows with the key columns ``places`` are sorted, by part and then by a hash. Driver."""
    from pyspark.sql import functions as F

    text = F.concat_ws("|", *(_text(place, key.type) for place, key in zip(places, keys, strict=True)))
    part = F.pmod(F.crc32(text), F.lit(parts))
    return F.shiftleft(part, 48).bitwiseOR(F.shiftrightunsigned(F.xxhash64(*places), 16))


def _text(place: Column, kind: str) -> Column:
    """A key column as `KeyCodec` writes it; not for nulls and what it escapes, whose parts come out of order."""
    from pyspark.sql import functions as F

    if kind == "timestamp":
        utc = F.to_utc_timestamp(place, F.current_timezone())
        return F.date_format(utc, "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'")
    return place.cast("string")
