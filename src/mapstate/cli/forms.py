"""Values, keys and results as JSON, and as the cells of a table."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import typer

from mapstate.keys import Key
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.schema import KeyField

__all__ = ["cell", "emit", "json_row", "json_state", "plain"]


def emit(document: Any) -> None:
    """Print one JSON document on one line, in ASCII: no character of it controls a terminal."""
    typer.echo(json.dumps(msgspec.to_builtins(document)))


def json_row(fields: Sequence[KeyField], key: Key, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A key and its value, null for an absent key, by the names of their columns."""
    return {
        "key": {field.name: plain(part) for field, part in zip(fields, key, strict=True)},
        "value": None if value is None else {name: plain(part) for name, part in value.items()},
    }


def json_state(ledger: LedgerRecord) -> dict[str, Any]:
    """The part of a ledger that says as of which batch something was read."""
    last = ledger.last_commit
    batch: dict[str, Any] = {"batch_id": None, "txid": None, "committed_at": None}
    if last is not None:
        batch = {"batch_id": last.batch_id, "txid": last.txid, "committed_at": last.at or None}
    return {**batch, "keys_held": ledger.keys_held()}


def plain(value: Any) -> Any:
    """A value as JSON has it.

    A decimal is text with all its digits, bytes are hexadecimal, a time is ISO 8601, and an instant is in UTC. NaN and
    the infinities are the words that Spark writes.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, dt.datetime):
        if value.tzinfo is None:
            return value.isoformat(timespec="microseconds")
        return value.astimezone(dt.UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    return str(value)


def cell(value: Any) -> str:
    """A value as a cell of a table: text as it is, everything else as JSON."""
    form = plain(value)
    return form if isinstance(form, str) else json.dumps(form, ensure_ascii=False)
