"""The formats of an export: CSV, JSON lines, Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mapstate.errors import UsageError, missing_driver
from mapstate.operations.export import Column, Write, item_type, struct_fields
from mapstate.reader.forms import plain
from mapstate.reader.tables import array_of

Pages = Iterator[list[tuple[Any, ...]]]

_SPECIAL = re.compile(r'[",\r\n]|^$')
_ROW_GROUP = 100_000  # rows


def format_of(path: str, named: str | None) -> str:
    """The format by its name, or by the end of the file's name. Raises UsageError."""
    found = named or _ENDS.get(Path(path).suffix.lower())
    if found not in FORMATS:
        raise UsageError(
            f"the format is one of {', '.join(FORMATS)}. The file's name ends in .csv, .jsonl, .ndjson or .parquet, or "
            "--format names it."
        )
    return found


def _write_csv(columns: Sequence[Column], pages: Pages, to: Path) -> None:
    """RFC 4180, in UTF-8, with a header and LF. A null is an empty cell, and empty text is ``""``."""
    with to.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join(_csv_cell(column.name) for column in columns) + "\n")
        for page in pages:
            file.write("".join(",".join(map(_csv_cell, row)) + "\n" for row in page))


def _csv_cell(value: Any) -> str:
    kind = type(value)
    if kind is int:
        return str(value)
    if value is None:
        return ""
    form = value if kind is str else plain(value)
    text = form if isinstance(form, str) else json.dumps(form, ensure_ascii=False)
    return '"' + text.replace('"', '""') + '"' if _SPECIAL.search(text) else text


def _write_json_lines(columns: Sequence[Column], pages: Pages, to: Path) -> None:
    """One object per line, in UTF-8, with keys and values by the names of their columns."""
    names = [column.name for column in columns]
    encode = msgspec.json.Encoder().encode
    with to.open("wb") as file:
        for page in pages:
            file.write(b"".join(encode(dict(zip(names, map(plain, row), strict=True))) + b"\n" for row in page))


def _write_parquet(columns: Sequence[Column], pages: Pages, to: Path) -> None:
    """Columns of the Arrow types that Spark reads as the types in the ledger; other values as JSON text."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise missing_driver("Parquet", error, extra="tables") from error
    kinds = [_arrow_type(pa, column.type) for column in columns]
    schema = pa.schema([(column.name, kind or pa.string()) for column, kind in zip(columns, kinds, strict=True)])
    converts = [_json if kind is None else _by_name(column.type) for column, kind in zip(columns, kinds, strict=True)]

    def batch(rows: list[tuple[Any, ...]]) -> Any:
        arrays = [
            array_of(pa, field, values if convert is None else map(convert, values))
            for values, convert, field in zip(zip(*rows, strict=True), converts, schema, strict=True)
        ]
        return pa.table(arrays, schema=schema)

    with parquet.ParquetWriter(to, schema) as writer:
        rows: list[tuple[Any, ...]] = []
        for page in pages:
            rows += page
            if len(rows) >= _ROW_GROUP:
                writer.write_table(batch(rows))
                rows = []
        if rows:
            writer.write_table(batch(rows))


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(plain(value), ensure_ascii=False)


def _by_name(name: str) -> Callable[[Any], Any] | None:
    """The conversion of a value for Arrow, which takes a struct by the names of its parts; None if it stays."""
    if name.startswith("array<"):
        item = _by_name(item_type(name))
        return None if item is None else lambda value: None if value is None else list(map(item, value))
    if not name.startswith("struct<"):
        return None
    parts = [(part, _by_name(kind) or (lambda value: value)) for part, kind in struct_fields(name)]

    def named(value: Any) -> Any:
        values = value.values() if isinstance(value, dict) else value
        return value and {part: convert(own) for (part, convert), own in zip(parts, values, strict=True)}

    return named


def _arrow_type(pa: Any, name: str) -> Any:
    """The Arrow type of a Spark type, None for one whose values are written as JSON."""
    decimal = re.fullmatch(r"decimal\((\d+),(\d+)\)", name)
    if decimal is not None:
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    if name.startswith("array<"):
        item = _arrow_type(pa, item_type(name))
        return None if item is None else pa.list_(item)
    if name.startswith("struct<"):
        parts = [(part, _arrow_type(pa, kind)) for part, kind in struct_fields(name)]
        return None if any(kind is None for _, kind in parts) else pa.struct(parts)
    scalars = {
        "string": pa.string(),
        "tinyint": pa.int8(),
        "smallint": pa.int16(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
        "binary": pa.binary(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "timestamp_ntz": pa.timestamp("us"),
    }
    return scalars.get(name)


FORMATS: dict[str, Write] = {"csv": _write_csv, "jsonl": _write_json_lines, "parquet": _write_parquet}
_ENDS: dict[str, str] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
