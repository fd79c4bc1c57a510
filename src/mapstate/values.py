"""Values as JSON, as text and in columns: the one form that a value has wherever it leaves the library as either.

Types are named as Spark writes them.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from html import escape
from numbers import Real
from typing import Any

import msgspec

from mapstate.errors import UnsupportedTypeError, cut

SAME_IN_JSON = frozenset({"bigint", "int", "smallint", "tinyint", "string", "boolean"})
"""Types whose values `plain` returns as they are."""

_encoder = msgspec.json.Encoder()
_QUOTED = re.compile("(?<=[<,])`(?:[^`]|``)*`", re.DOTALL)
_FIELD = re.compile("(?:`((?:[^`]|``)*)`|([^:]*)):?(.*)", re.DOTALL)


def plain(value: Any, kind: str = "any") -> Any:
    """A value of a Spark type as JSON has it. A value of no type, or of another one, goes by its type in Python.

    A decimal is text with all digits of its type, bytes are hexadecimal, a time is ISO 8601 with microseconds, and an
    instant is in UTC. NaN and the infinities are the words that Spark writes. A struct is an object, also where it is a
    tuple in Python. Raises UnsupportedTypeError for a variant.
    """
    if value is None or isinstance(value, bool | int | str):
        return f"{'-' * (value < 0)}P{abs(value)}M" if isinstance(value, int) and kind[:9] == "interval " else value
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, Decimal):
        scale = kind[kind.index(",") + 1 : -1] if kind.startswith("decimal(") else "0"
        return max(format(value, "f"), format(value, f".{scale}f"), key=len)  # never fewer digits than it has
    if isinstance(value, dt.datetime):
        is_instant = kind == "timestamp" or (kind != "timestamp_ntz" and value.tzinfo is not None)
        in_utc = value if value.tzinfo is None else value.astimezone(dt.UTC).replace(tzinfo=None)
        return in_utc.isoformat(timespec="microseconds") + "Z" * is_instant
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, dt.timedelta):
        return msgspec.to_builtins(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if kind == "variant":  # which Arrow has as bytes
        raise UnsupportedTypeError("a variant has no form in JSON here: take to_json of it", type=kind)
    if isinstance(value, Mapping):
        kinds = dict(struct_fields(kind)) if kind.startswith("struct<") else {}
        return {text(name): plain(part, kinds.get(name, "any")) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = struct_fields(kind) if kind.startswith("struct<") else []
        if len(parts) == len(value) and parts:
            return {name: plain(part, part_name) for (name, part_name), part in zip(parts, value, strict=True)}
        if kind.startswith("map<"):  # pairs, as Arrow has them
            of_name, of_part = inner_types(kind)
            return {text(name, of_name): plain(part, of_part) for name, part in value}
        item = item_type(kind) if kind.startswith("array<") else "any"
        return [plain(part, item) for part in value]
    return str(value)


def text(value: Any, kind: str = "any") -> str:
    """A value as text: text as it is, everything else as JSON."""
    form = plain(value, kind)
    return form if isinstance(form, str) else _encoder.encode(form).decode()


def json_text(value: Any, kind: str = "any") -> str | None:
    """A value as the text of its JSON, None for null."""
    return None if value is None else _encoder.encode(plain(value, kind)).decode()


def are_numbers(*values: Any) -> bool:
    """Whether all values are numbers, or booleans."""
    return all(isinstance(value, Real | Decimal) for value in values)


def difference(one: Any, other: Any) -> float:
    """How far two values are apart: 0 where they are equal, infinity where they differ and are no finite numbers."""
    if type(one) is type(other) and one == other:
        return 0.0
    if are_numbers(one, other) and not isinstance(one, bool) and not isinstance(other, bool):
        if one == other or (one != one and other != other):  # noqa: PLR0124  NaN
            return 0.0
        try:
            if math.isfinite(one) and math.isfinite(other):
                return float(abs(Fraction(one) - Fraction(other))) or 5e-324
        except OverflowError:
            return sys.float_info.max
        return math.inf
    kinds = [(isinstance(value, str), isinstance(value, bool)) for value in (one, other)]
    return 0.0 if kinds[0] == kinds[1] and plain(one) == plain(other) else math.inf


def html_table(title: str, rows: Iterable[Iterable[Any]]) -> str:
    """Rows of text and numbers as a table for a notebook, each cell cut and escaped. It never fails."""
    cells = ["".join(f"<td>{escape(cut('' if part is None else part))}</td>" for part in row) for row in rows]
    return f"<table><caption>{escape(title)}</caption>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def in_column(value: Any, kind: str) -> Any:
    """A value as a column holds it: the text of its JSON where its type, or that of a part, is no Spark type."""
    if kind == "any":
        return json_text(value)
    if value is None or column_type(kind) == kind:
        return value
    if kind.startswith("array<"):
        item = item_type(kind)
        return [in_column(part, item) for part in value]
    parts = value if isinstance(value, Mapping) else dict(zip(dict(struct_fields(kind)), value, strict=True))
    return {name: in_column(parts.get(name), of) for name, of in struct_fields(kind)}


@lru_cache(maxsize=256)
def column_type(kind: str) -> str:
    """The Spark type of a column with what `in_column` returns."""
    if kind.startswith("array<"):
        return f"array<{column_type(item_type(kind))}>"
    if kind.startswith("struct<") and any(column_type(of) != of for of in struct_parts(kind)):
        return struct_type((name, column_type(of)) for name, of in struct_fields(kind))
    return "string" if kind == "any" else kind


def struct_parts(name: str) -> list[str]:
    """The types in ``struct<a:t,b:u>``."""
    return [kind for _, kind in struct_fields(name)]


@lru_cache(maxsize=256)
def struct_fields(name: str) -> Sequence[tuple[str, str]]:
    """The names and types in ``struct<a:t,`b`:u>``."""
    parts = [_FIELD.fullmatch(part).groups("") for part in inner_types(name)]  # type: ignore[union-attr]  # all match
    return tuple((unquoted or quoted.replace("``", "`"), kind) for quoted, unquoted, kind in parts)


def struct_type(fields: Iterable[tuple[str, str]]) -> str:
    """The type that has these names and types: the inverse of `struct_fields`."""
    parts = [f"`{field.replace('`', '``')}`:{kind}" for field, kind in fields]
    return f"struct<{','.join(parts)}>"


def bare(name: str) -> str:
    """A type as ``simpleString`` of Spark writes it: names without backticks."""
    return _QUOTED.sub(lambda quoted: quoted[0][1:-1].replace("``", "`"), name)


def inner_types(name: str) -> list[str]:
    """What stands between commas in ``map<t,u>``. A type may have commas in parentheses, and a name in backticks."""
    parts, depth, start = [], 0, name.index("<") + 1
    for i, char in enumerate(_QUOTED.sub(lambda quoted: "`" * len(quoted[0]), name)):
        depth += (char in "(<") - (char in ")>")
        if (char == "," and depth == 1) or i == len(name) - 1:
            parts.append(name[start:i])
            start = i + 1
    return parts


def item_type(name: str) -> str:
    """The type inside ``array<t>``."""
    return name.removeprefix("array<").removesuffix(">")
