"""The rows of a job: one wide schema, random values with nulls at each level, and what Spark calls an equal key."""

from __future__ import annotations

import datetime as dt
import math
import os
import random
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["BASE", "COLUMNS", "KEYS", "SCHEMA", "Row", "equal_key", "plain", "random_rows", "shown", "write_file"]

_MOMENT = dt.datetime(2026, 11, 22, 10, 0, 0, 1, tzinfo=dt.UTC)
BASE = 1_577_836_800
"""The time 0 of the column ``t``, as a number of seconds, in the column ``moment``."""

_STRUCT = pa.struct([("id", pa.int32()), ("name", pa.string())])

COLUMNS: dict[str, tuple[str, pa.DataType, tuple[Any, ...]]] = {
    "s": ("string", pa.string(), ("a", "b", "", "a|b", "\\N", None)),
    "i": ("int", pa.int32(), (0, -1, 2**31 - 1, None)),
    "d": ("double", pa.float64(), (0.0, -0.0, math.nan, 1.5, None)),
    "f": ("boolean", pa.bool_(), (True, False, None)),
    "day": ("date", pa.date32(), (dt.date(1, 1, 1), dt.date(2026, 11, 22), None)),
    "at": ("timestamp", pa.timestamp("us", "UTC"), (_MOMENT, _MOMENT.replace(year=1969), None)),
    "m": ("decimal(6,2)", pa.decimal128(6, 2), (Decimal("1.50"), Decimal("-0.01"), None)),
    "raw": ("binary", pa.binary(), (b"", b"\x00a", b"\xff", None)),
    "u": (
        "struct<id:int,name:string>",
        _STRUCT,
        (None, {"id": None, "name": None}, {"id": 1, "name": None}, {"id": 1, "name": "a"}),
    ),
}
"""Columns that can be keys: the type for Spark, that for Arrow, and the values."""

KEYS = tuple(COLUMNS)
SCHEMA = ", ".join(f"{name} {ddl}" for name, (ddl, _, _) in COLUMNS.items()) + ", t bigint, v bigint, moment timestamp"
_ARROW = pa.schema(
    [(name, kind) for name, (_, kind, _) in COLUMNS.items()]
    + [("t", pa.int64()), ("v", pa.int64()), ("moment", pa.timestamp("us", "UTC"))]
)


class Row(NamedTuple):
    """A row: its key columns by name, its time, and its value. Columns that are left out are null.

    Only states with rolling windows are given rows without a time.
    """

    keys: tuple[tuple[str, Any], ...]
    t: int | None
    v: int

    def as_dict(self) -> dict[str, Any]:
        """The row with all of its columns."""
        moment = None if self.t is None else dt.datetime.fromtimestamp(BASE, dt.UTC) + dt.timedelta(seconds=self.t)
        return dict.fromkeys(KEYS) | dict(self.keys) | {"t": self.t, "v": self.v, "moment": moment}


def random_rows(chance: random.Random, columns: Sequence[str], low: int, most: int) -> tuple[Row, ...]:
    """Up to ``most`` rows with values in these columns, and times around ``low``."""
    return tuple(
        Row(
            tuple((name, chance.choice(COLUMNS[name][2])) for name in columns),
            max(0, low + chance.randint(-12, 12)),
            chance.randint(1, 9),
        )
        for _ in range(chance.randint(1, most))
    )


def equal_key(row: Row, columns: Iterable[str], *, by_fields: bool = False) -> tuple[Any, ...]:
    """The row's key, equal for two rows where Spark's GROUP BY calls them equal.

    ``by_fields``: it groups by the fields of a struct, and not by the struct.
    """
    values = row.as_dict()
    if by_fields and values["u"] is None:
        values["u"] = {"id": None, "name": None}
    return tuple(plain(values[name]) for name in columns)


def plain(value: Any) -> Any:
    """A key column's value, equal for two where Spark calls them equal."""
    if isinstance(value, dict):
        return tuple(map(plain, value.values()))
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0  # -0.0 + 0.0 is 0.0
    return value


def write_file(folder: Path, number: int, rows: Sequence[Row]) -> None:
    """A Parquet file of these rows. Spark takes files by their times, which are those of their numbers."""
    hidden = folder / f"_{number}"  # Spark does not see what starts with _
    pq.write_table(pa.Table.from_pylist([row.as_dict() for row in rows], _ARROW), hidden)
    os.utime(hidden, (1_700_000_000 + 10 * number,) * 2)
    hidden.rename(folder / f"{number:03}.parquet")


def shown(rows: Sequence[Row]) -> str:
    """Rows for a script that a human reads."""
    return (
        "no rows"
        if not rows
        else "  ".join(
            "(" + ", ".join([f"{name}={value!r}" for name, value in row.keys] + [f"t={row.t}, v={row.v}"]) + ")"
            for row in rows
        )
    )
