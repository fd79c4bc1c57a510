"""A digest of rows, by which a correction that comes again is told from another one. Driver."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from mapstate.aggregators.columns import column_of
from mapstate.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_NESTED = ("array", "map", "struct")
_AS_JSON = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def check_digest(state: str, rows: DataFrame) -> None:
    """Raises ConfigurationError for a column by which rows cannot be told apart."""
    for field in rows.schema.fields:
        if (why := _why_no_digest(field.dataType)) is not None:
            raise ConfigurationError(
                f"the rows of a correction of {state!r} cannot be told apart by {field.name}, which has {why}. "
                "Nothing was written. Give newStream a DataFrame without it, or with its to_json."
            )


def _why_no_digest(kind: DataType) -> str | None:
    """What in a type has no text of its own as JSON; None without any."""
    parts = [getattr(kind, name) for name in ("keyType", "elementType", "valueType") if hasattr(kind, name)]
    parts += [field.dataType for field in getattr(kind, "fields", ())]
    if kind.typeName() == "variant":
        return "a variant"
    if hasattr(kind, "keyType") and parts[0].typeName() in ("binary", "struct", "array", "map", "variant"):
        return f"a map with keys of type {parts[0].simpleString()}"
    return next((why for why in map(_why_no_digest, parts) if why is not None), None)


def digest_of(rows: DataFrame) -> str:
    """A digest of the rows, in whatever order they come and whatever the session's time zone is."""
    from pyspark.sql import functions as F

    def text_of(name: str, kind: str) -> Column:
        return F.to_json(column_of(name), _AS_JSON) if kind.startswith(_NESTED) else column_of(name)

    fields = [(field.name, field.dataType.simpleString()) for field in rows.schema.fields]
    nulls = [column_of(name).isNull() for name, _ in fields]  # a hash passes over nulls
    values = [text_of(name, kind) for name, kind in fields]
    sums = [F.sum(F.xxhash64(F.lit(seed), *nulls, *values).cast("decimal(38,0)")) for seed in (1, 2)]
    (digest,) = rows.agg(F.count(F.lit(1)), *sums).collect()
    text = ",".join(map(str, [*(name for name, _ in fields), *digest]))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
