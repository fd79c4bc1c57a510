"""Keys and values of a state as JSON and as text: how they are shown, and how a key is read back."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from operator import attrgetter
from typing import Any

import msgspec

from mapstate.errors import KeyEncodingError, UsageError, cut
from mapstate.keys import Key, KeyCodec
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.schema import KeyField
from mapstate.urls import quoted

_NULL = "\\N"
_DOUBLES = ("double", "float")
_Form = tuple[str, "msgspec.json.Decoder[Any]", Callable[[list[Any]], list[list[Any]]]]
_FINER = re.compile(r"[.,]\d{6}\d*[1-9]")  # than microseconds
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


class JsonKeys:
    """The keys of a request, as JSON: ``{"keys": [{"user_id": "user-42"}]}``, with the values in the forms of `plain`.

    Where there is one key column, ``{"keys": ["user-42"]}`` are keys, too. A number may also be text, as a program
    needs that has doubles only. Made once per schema of keys.
    """

    def __init__(self, fields: Sequence[KeyField]) -> None:
        self._fields = fields
        slots = {f"column_{at}": field.name for at, field in enumerate(fields)}
        columns = [
            (slot, Any if field.type != "string" else str | None) for slot, field in zip(slots, fields, strict=True)
        ]
        key = msgspec.defstruct("Key", columns, rename=slots, forbid_unknown_fields=True, gc=False)
        parts = [attrgetter(slot) for slot in slots]
        self._forms: list[_Form] = [
            ("as objects", _decoder(key), lambda keys: [list(map(part, keys)) for part in parts]),
        ]
        if len(fields) == 1:
            bare = str | None if fields[0].type == "string" else bool | int | float | str | None
            self._forms.insert(0, ("as bare values", _decoder(bare), lambda keys: [keys]))

    def decode(self, body: bytes) -> list[Any]:
        """The keys: bare values where there is one key column. Raises UsageError."""
        problems = []
        for form, decoder, columns_of in self._forms:
            try:
                keys = decoder.decode(body).keys
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                problems.append(f"{form}: {cut(error)}")
                continue
            if not self._fields:
                return [()] * len(keys)
            columns = [self._column(*one) for one in zip(self._fields, columns_of(keys), strict=True)]
            return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        names = ", ".join(f"{field.name} {field.type}" for field in self._fields)
        raise UsageError(
            f"the body is no object with a list of keys ({names}), {'; '.join(problems)}. Nothing was read."
        )

    def _column(self, field: KeyField, values: list[Any]) -> list[Any]:
        return values if field.type == "string" else [_of_json(field, value) for value in values]


def _decoder(key: Any) -> msgspec.json.Decoder[Any]:
    kind: Any = list[key]
    return msgspec.json.Decoder(msgspec.defstruct("Keys", [("keys", kind)], forbid_unknown_fields=True, gc=False))


def _of_json(field: KeyField, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str):
        return _typed(field, value)
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
            return _unrounded(_instant(text), text)
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
    """The value, unless it is a decimal or a time with fewer digits than the text: that is another key."""
    if (isinstance(value, Decimal) and value != Decimal(text)) or (
        isinstance(value, dt.datetime) and _FINER.search(text)
    ):
        raise ValueError(text)
    return value
