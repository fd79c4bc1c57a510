"""Keys and values of a state as JSON and as text: how they are shown, and how a key is read back."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

from mapstate.errors import KeyEncodingError, UsageError
from mapstate.keys import Key, KeyCodec
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.schema import KeyField
from mapstate.urls import quoted

__all__ = ["json_key", "json_row", "json_state", "plain", "typed_keys"]

_NULL = "\\N"
_DOUBLES = ("double", "float")
_END = 1 << 63  # of what an integer column may hold
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    **dict.fromkeys(("bigint", "int", "smallint", "tinyint"), (int,)),
    **dict.fromkeys(_DOUBLES, (int, float)),
}
_EXAMPLES = {
    "timestamp": ", such as 2026-11-21T10:00:00Z",
    "timestamp_ntz": ", such as 2026-11-21T10:00:00",
    "date": ", such as 2026-11-21",
    "boolean": ", which is true or false",
    "binary": ", in hexadecimal digits",
}


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


def json_key(fields: Sequence[KeyField], document: Any) -> Key:
    """The key of a JSON object with the value of each key column, in the forms of `plain`. Raises UsageError.

    A number may also be text, as a program needs that has doubles only.
    """
    names = [field.name for field in fields]
    if not isinstance(document, dict) or document.keys() != set(names):
        raise UsageError(f"a key is an object with {', '.join(names) or 'nothing in it'}. Nothing was read.")
    return tuple(_of_json(field, document[field.name]) for field in fields)


def _of_json(field: KeyField, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str):
        return value if field.type == "string" else _typed(field, value)
    if type(value) in _JSON_TYPES.get(field.type, ()):
        if field.type in _DOUBLES:
            with suppress(OverflowError):
                return float(value)
        elif -_END <= value < _END:
            return value
    raise UsageError(f"key column {field.name!r} is a {field.type}{_EXAMPLES.get(field.type, '')}. Nothing was read.")


def typed_keys(texts: Sequence[str], fields: Sequence[KeyField]) -> list[Key]:
    r"""The keys of some arguments: as many for each as there are key columns. ``\N`` is null.

    Without key columns there is one key, and it needs no argument. Raises UsageError.
    """
    width = len(fields)
    if width == 0 and not texts:
        return [()]
    if width == 0 or not texts or len(texts) % width:
        schema = ", ".join(f"{field.name} {field.type}" for field in fields)
        raise UsageError(
            f"this state is keyed by ({schema}), so a key is {width} arguments, and there are {len(texts)}. More keys "
            "follow in the same way."
        )
    return [
        tuple(_typed(field, text) for field, text in zip(fields, texts[at : at + width], strict=True))
        for at in range(0, len(texts), width)
    ]


def _typed(field: KeyField, text: str) -> Any:
    if text == _NULL:
        return None
    if field.type == "string":
        return text
    try:
        if field.type == "timestamp":
            return _instant(text)
        if field.type == "binary" and not text:
            return b""
        return _unrounded(KeyCodec([field]).decode(text)[0], text)
    except (KeyEncodingError, ValueError):
        example = _EXAMPLES.get(field.type, "")
    raise UsageError(f"key column {field.name!r} is a {field.type}{example}; this is none: {quoted(text[:100])}")


def _instant(text: str) -> dt.datetime:
    instant = dt.datetime.fromisoformat(text)
    if instant.tzinfo is None:
        raise ValueError(text)
    return instant


def _unrounded(value: Any, text: str) -> Any:
    """The value, unless it is a decimal with fewer digits than the text: that is another key."""
    if isinstance(value, Decimal) and value != Decimal(text):
        raise ValueError(text)
    return value
