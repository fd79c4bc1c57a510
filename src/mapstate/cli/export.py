"""The commands that read a whole state: export, compare; and the formats of their files: CSV, JSON lines, Parquet."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mapstate.cli.arguments import Exact, State, Url, by_name, store_url
from mapstate.cli.show import Output, keys_held, progress, say
from mapstate.errors import StoreError, UnsupportedTypeError, UsageError, missing_driver, shown
from mapstate.operations.compare import Compared, Difference
from mapstate.operations.compare import compare as compare_states
from mapstate.operations.export import Column, Exported, Write
from mapstate.operations.export import export as export_state
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader.aliased import version_of
from mapstate.reader.tables import array_of, arrow_type
from mapstate.urls import LIKE_A_URL, quoted
from mapstate.values import json_text, plain, text

Pages = Iterator[list[tuple[Any, ...]]]

_SPECIAL = re.compile(r'[",\r\n]|^$')
_ROW_GROUP = 100_000  # rows


def export(
    out: Output,
    *,
    url: Url = None,
    state: State,
    to: Annotated[str, typer.Option(metavar="FILE", help="the file; one that is there is replaced at the end")],
    format: Annotated[  # noqa: A002  the option's name
        str | None, typer.Option(help="csv, jsonl or parquet; by default, by the end of FILE", show_default=False)
    ] = None,
    exact: Exact = False,
) -> None:
    """Writes all keys and values to a file; exit code 1 if keys are missing or cannot be read.

    Run it again after an interruption: it goes on from FILE.part.
    """
    if LIKE_A_URL.search(to):
        raise UsageError("FILE is a local file; what was given looks like a URL, and is not shown")
    place, form, began = store_url(url), _format_of(to, format), time.monotonic()
    state = state if exact else version_of(place, state)
    try:
        with progress("reading keys", keys_held(place, state)) as update:
            done = export_state(
                *(place, state, to, FORMATS[form]), on_page=lambda keys: update(keys, f"{keys} keys read")
            )
    except (KeyboardInterrupt, StoreError):
        if Path(f"{to}.part").exists():
            say(f"mapstate: what was read is in {to}.part. Export again to go on, or delete it.", err=True)
        raise
    took = time.monotonic() - began
    rate = f"{took:.1f} s, {(done.rows - done.resumed) / max(took, 0.001):.0f} keys/s"
    before = f", {done.resumed} of them from {to}.part" if done.resumed else ""
    said = f"{done.rows} keys exported to {to}{before}, in {rate}. {_as_of(done)}"
    out.answer(_json_exported(done, to, form, took), said)
    if done.missing:
        out.fail(f"{done.missing} keys are missing: the ledger counts {done.rows + done.missing}. See mapstate doctor.")
    if done.unreadable:
        named = ", ".join(map(shown, done.unreadable_keys))
        out.fail(f"{done.unreadable} keys cannot be read, and were left out: {named}")


def compare(
    out: Output,
    *,
    url: Url = None,
    first: Annotated[str, typer.Argument(metavar="STATE", help="a state, by its own name", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="STATE", help="the other one", show_default=False)],
    fields: Annotated[
        str | None, typer.Option(help="those to compare, with commas; else all that both have", show_default=False)
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="of the keys that differ: .csv, .jsonl or .parquet", show_default=False),
    ] = None,
    passes: Annotated[int, typer.Option(min=1, help="how often a key is read that batches write meanwhile")] = 3,
    tolerance: Annotated[
        list[str], typer.Option(metavar="FIELD=NUMBER", help="numbers as near as this are equal; once for each")
    ] = [],  # noqa: B006
    sample: Annotated[str, typer.Option(metavar="PERCENT", help="of the keys, by a hash of the key: 1%")] = "100%",
    wait: Annotated[float, typer.Option(min=0, help="seconds until both have passed the further one's offsets")] = 600,
) -> None:
    """Compares two versions of a state while their jobs run; exit code 1 if any key differs, or none was compared."""
    if to is not None and LIKE_A_URL.search(to):
        raise UsageError("FILE is a local file; what was given looks like a URL, and is not shown")
    place, write = store_url(url), None if to is None else FORMATS[_format_of(to, None)]
    with progress("reading keys", keys_held(place, first)) as update:
        done = compare_states(
            *(place, first, second),
            fields=None if fields is None else fields.split(","),
            tolerances=by_name("--tolerance", [*map(_tolerance, tolerance)]),
            sample=_part(sample),
            passes=passes,
            wait=wait,
            to=to,
            write=write,
            on_page=lambda keys: update(keys, f"{keys} keys read"),
        )
    shown_passes = "1 pass" if done.passes == 1 else f"{done.passes} passes"
    said = (
        f"equal {done.equal:,}   different {done.different:,}   only in {first} {done.only_in_first:,}   "
        f"only in {second} {done.only_in_second:,}   in motion {done.in_motion:,} ({shown_passes})"
    )
    out.answer({**done._asdict(), "largest": [_json_difference(difference) for difference in done.largest]}, said)
    if not out.as_json:
        for line in _how(done):
            say(line)
        for difference in done.largest:
            first_row, second_row = (json_text(row) for row in (difference.first, difference.second))
            say(f"{json_text(difference.key)}   {first_row}   {second_row}")
    out.has_failed = not done.is_equal
    if not any(done[:4]):
        why = "no key was there, of the sample or in a window that is final in both"
        if done.in_motion:
            why = "all keys were in motion. Give --passes a higher number, or stop both jobs"
        out.fail(f"nothing was compared: {why}.")


def _how(done: Compared) -> list[str]:
    if done.how == "offsets":
        return [f"Exact as of {position}" for position in done.positions]
    if done.how == "final windows":
        return ["Exact for windows that are final in both."]
    return ["As they are: the offsets cannot be compared, and no batch was committed meanwhile."]


def _json_difference(difference: Difference) -> dict[str, Any]:
    rows = ({name: plain(value) for name, value in row.items()} for row in (difference.first, difference.second))
    return dict(zip(("key", "first", "second"), ([plain(part) for part in difference.key], *rows), strict=True))


def _tolerance(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        return name, float(number)
    except ValueError:
        raise UsageError(f"a tolerance is FIELD=NUMBER, such as bytes=0.01, not {quoted(text)}") from None


def _part(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / 100
    except ValueError:
        raise UsageError(f"a sample is a percentage, such as 1%, not {quoted(text)}") from None


def _as_of(done: Exported) -> str:
    if done.is_one_batch:
        ends = "" if done.end is None else f" Its windows end at {plain(done.end)}."
        return f"It is as of {_batch(done.last)}.{ends}"
    span = f"from {_batch(done.first)} to {_batch(done.last)}"
    return f"It is not as of one batch: batches were at work, {span}. Each key is as of one of them."


def _batch(ledger: LedgerRecord) -> str:
    last = ledger.last_commit
    return "no batch" if last is None else f"batch {last.batch_id} (txid {last.txid})"


def _json_exported(done: Exported, to: str, form: str, took: float) -> dict[str, Any]:
    first, last = (
        None
        if ledger.last_commit is None
        else {"batch_id": ledger.last_commit.batch_id, "txid": ledger.last_commit.txid}
        for ledger in (done.first, done.last)
    )
    return {
        "file": to,
        "format": form,
        "seconds": round(took, 3),
        "rows": done.rows,
        "resumed": done.resumed,
        "missing": done.missing,
        "unreadable": done.unreadable,
        "unreadable_keys": done.unreadable_keys,
        "is_one_batch": done.is_one_batch,
        "first": first,
        "last": last,
        **({} if done.end is None else {"end": plain(done.end)}),
    }


def _format_of(path: str, named: str | None) -> str:
    """The format by its name, or by the end of the file's name. Raises UsageError."""
    format_name = named or _ENDS.get(Path(path).suffix.lower())
    if format_name not in FORMATS:
        raise UsageError(
            f"the format is one of {', '.join(FORMATS)}. The file's name ends in .csv, .jsonl, .ndjson or .parquet, or "
            "--format names it."
        )
    return format_name


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
    try:
        return arrow_type(pa, name)
    except UnsupportedTypeError:
        return None


FORMATS: dict[str, Write] = {"csv": _write_csv, "jsonl": _write_json_lines, "parquet": _write_parquet}
_ENDS: dict[str, str] = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
