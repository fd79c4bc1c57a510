"""The formats of an export: CSV, JSON lines, Parquet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mapstate.errors import UnsupportedTypeError, UsageError, missing_driver
from mapstate.operations.export import Column, Write
from mapstate.reader.tables import array_of, arrow_type
from mapstate.values import json_text, plain, text

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
    kinds = [column.type for column in columns]
    with to.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join(_csv_cell(column.name, "string") for column in columns) + "\n")
        for page in pages:
            file.write("".join(",".join(map(_csv_cell, row, kinds)) + "\n" for row in page))


def _csv_cell(value: Any, kind: str) -> str:
    if value is None:
        return ""
    cell = text(value, kind)
    return '"' + cell.replace('"', '""') + '"' if _SPECIAL.search(cell) else cell


def _write_json_lines(columns: Sequence[Column], pages: Pages, to: Path) -> None:
    """One object per line, in UTF-8, with keys and values by the names of their columns."""
    names, kinds = [column.name for column in columns], [column.type for column in columns]
    encode = msgspec.json.Encoder().encode
    with to.open("wb") as file:
        for page in pages:
            file.write(b"".join(encode(dict(zip(names, map(plain, row, kinds), strict=True))) + b"\n" for row in page))


def _write_parquet(columns: Sequence[Column], pages: Pages, to: Path) -> None:
    """Columns of the Arrow types that Spark reads as the types in the ledger; other values as JSON text."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise missing_driver("Parquet", error, extra="tables") from error
    kinds = [_arrow_type(pa, column.type) for column in columns]
    schema = pa.schema([(column.name, kind or pa.string()) for column, kind in zip(columns, kinds, strict=True)])

    def batch(rows: list[tuple[Any, ...]]) -> Any:
        arrays = [
            array_of(pa, field, values if kind is not None else [json_text(value, column.type) for value in values])
            for values, kind, field, column in zip(zip(*rows, strict=True), kinds, schema, columns, strict=True)
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


def _arrow_type(pa: Any, name: str) -> Any:
    """The Arrow type of a Spark type, None for one whose values are written as JSON."""
    try:
        return arrow_type(pa, name)
    except UnsupportedTypeError:
        return None


FORMATS: dict[str, Write] = {"csv": _write_csv, "jsonl": _write_json_lines, "parquet": _write_parquet}
_ENDS: dict[str, str] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
