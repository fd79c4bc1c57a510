"""Keys and values of a state as JSON and as text: how they are shown, and how a key is read back."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.results import results_of
from mapstate.errors import KeyEncodingError, UsageError, cut
from mapstate.keys import Key, KeyCodec
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader.rolling import no_rolling_windows, shown_fields
from mapstate.reader.tables import types_of
from mapstate.reader.times import Time
from mapstate.schema import Field, KeyField
from mapstate.urls import quoted
from mapstate.values import SAME_IN_JSON, html_table, plain, text

_NULL = "\\N"
_DOUBLES = ("double", "float")
_Form = tuple[str, "msgspec.json.Decoder[Any]", Callable[[list[Any]], list[list[Any]]]]
_FINER = re.compile(r"[.,]\d{6}\d*[1-9]")  # than microseconds
_BITS = {"bigint": 64, "int": 32, "smallint": 16, "tinyint": 8}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    **dict.fromkeys(_BITS, (int,)),
    **dict.fromkeys(_DOUBLES, (int, float)),
}
_JSON_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")  # Python's own have underscores, and digits of any script
_NUMBER = re.compile(r"[-+.0-9eE]+|NaN|-?Infinity")
_EXAMPLES = {
    "timestamp": ", such as 2026-11-21T10:00:00Z",
    "timestamp_ntz": ", such as 2026-11-21T10:00:00",
    "date": ", such as 2026-11-21",
    "boolean": ", which is true or false",
    "binary": ", in hexadecimal digits",
}


class JsonRows:
    """Keys and values of one schema as JSON, by the reader's ``aggregators``; ``columns`` names the fields."""

    def __init__(
        self,
        keys: Sequence[KeyField],
        fields: Sequence[Field] | Fields,
        aggregators: Mapping[str, Aggregator] | None = None,
    ) -> None:
        self._keys = tuple(keys)
        self._names = [key.name for key in keys]
        shown = fields if isinstance(fields, Fields) else results_of(fields, aggregators or {})
        self._kinds = types_of((), shown)
        self.columns = list(self._kinds)
        self._are_keys_same = all(key.type in SAME_IN_JSON for key in keys)
        self._are_values_same = not aggregators and SAME_IN_JSON.issuperset(self._kinds.values())

    def key(self, key: Key) -> dict[str, Any]:
        if self._are_keys_same:
            return dict(zip(self._names, key, strict=True))
        return {field.name: plain(part, field.type) for field, part in zip(self._keys, key, strict=True)}

    def values(self, values: Sequence[Mapping[str, Any] | None]) -> Sequence[Mapping[str, Any] | None]:
        if self._are_values_same:
            return values
        kind_of = self._kinds.get
        return [value and {name: plain(part, kind_of(name, "any")) for name, part in value.items()} for value in values]

    def rows(self, rows: Iterable[tuple[Key, Mapping[str, Any] | None]]) -> list[Any]:
        pairs = list(rows)
        values = self.values([value for _, value in pairs])
        return [{"key": self.key(key), "value": value} for (key, _), value in zip(pairs, values, strict=True)]

    def cells(self, key: Key, value: Mapping[str, Any] | None, *, absent: str = "") -> list[str]:
        """A key and its value as text, ``absent`` for each field of an absent key."""
        parts = [text(part, field.type) for field, part in zip(self._keys, key, strict=True)]
        if value is None:
            return parts + [absent] * len(self._kinds)
        return parts + [text(part, self._kinds.get(name, "any")) for name, part in value.items()]


def rows_of(
    ledger: LedgerRecord,
    aggregators: Mapping[str, Aggregator] | None = None,
    columns: Sequence[str] | None = None,
) -> JsonRows:
    """The keys and values of a state, as its readers see them. ``columns`` and errors: see `shown_fields`."""
    return JsonRows(ledger.keys, shown_fields(ledger, aggregators or {}, columns), aggregators)


def time_asked(ledger: LedgerRecord, given: str | int) -> Time | Literal["watermark"]:
    """The time at which rolling windows shall end, of text or of a number in JSON. Raises UsageError."""
    if ledger.rolling is None:
        raise no_rolling_windows(ledger.state)
    kind = ledger.rolling.definition.type
    if given == "watermark":
        return "watermark"
    try:
        if isinstance(given, str):
            time: Time = _parsed(KeyField("at", kind), given)
            return time
        if kind == "bigint":
            return int(_in_range(kind, given))
    except (KeyEncodingError, ValueError):
        pass
    example = "a number" if kind == "bigint" else "an instant, such as 2026-11-27T10:00:00Z"
    raise UsageError(
        f"the times of state {ledger.state!r} are a {kind}: at is {example}, or watermark; this is none: "
        f"{quoted(str(given)[:100])}. Nothing was read."
    )


def json_state(ledger: LedgerRecord) -> dict[str, Any]:
    """The part of a ledger that says as of which batch something was read."""
    last = ledger.last_commit
    batch: dict[str, Any] = {"batch_id": None, "txid": None, "committed_at": None}
    if last is not None:
        batch = {"batch_id": last.batch_id, "txid": last.txid, "committed_at": last.at or None}
    return {**batch, "keys_held": ledger.keys_held()}


def reader_html(state: str, seen: LedgerRecord | None) -> str:
    """A reader in a notebook: the ledger that it read last. Asks no store."""
    rows: list[tuple[str, Any]] = []
    if seen is not None:
        done = seen.last_commit
        rows = [("type", seen.type), ("last batch that was read", done and done.batch_id), ("at", done and done.at)]
        rows += [("keys", seen.keys_held()), *seen.keys, *((field.name, field.aggregator) for field in seen.fields)]
    return html_table(f"reader of state {state}", rows)


class KeysAsked(NamedTuple):
    """The keys of a request; ``at`` and ``columns`` are those of `StateReader.multi_get`, times as they were given."""

    keys: list[Any]
    at: str | int | list[str | int] | None
    columns: list[str] | None


class JsonKeys:
    """The keys of a request, as JSON: ``{"keys": [{"user_id": "user-42"}]}``, with the values in the forms of `plain`.

    Where there is one key column, ``{"keys": ["user-42"]}`` are keys, too. A number may also be text, as a program
    needs that has doubles only. Made once per schema of keys.
    """

    def __init__(self, fields: Sequence[KeyField]) -> None:
        self._fields = fields
        slots = {f"column_{i}": field.name for i, field in enumerate(fields)}
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
        return self.asked(body).keys

    def asked(self, body: bytes) -> KeysAsked:
        """The keys, and what a body asks beside them. Raises UsageError."""
        problems = []
        for form, decoder, columns_of in self._forms:
            try:
                request = decoder.decode(body)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                problems.append(f"{form}: {cut(error)}")
                continue
            beside = request.at, request.columns
            if not self._fields:
                return KeysAsked([()] * len(request.keys), *beside)
            columns = [
                values if field.type == "string" else [_of_json(field, value) for value in values]
                for field, values in zip(self._fields, columns_of(request.keys), strict=True)
            ]
            return KeysAsked(columns[0] if len(columns) == 1 else list(zip(*columns, strict=True)), *beside)
        names = ", ".join(f"{field.name} {field.type}" for field in self._fields)
        raise UsageError(
            f"the body is no object with a list of keys ({names}), {'; '.join(problems)}. Nothing was read."
        )


def _decoder(key: Any) -> msgspec.json.Decoder[Any]:
    kind: Any = list[key]
    beside: list[Any] = [("at", str | int | list[str | int] | None, None), ("columns", list[str] | None, None)]
    keys = msgspec.defstruct("Keys", [("keys", kind), *beside], forbid_unknown_fields=True, gc=False)
    return msgspec.json.Decoder(keys)


def _of_json(field: KeyField, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str):
        return _typed(field, value)
    if type(value) in _JSON_TYPES.get(field.type, ()):
        if field.type in _DOUBLES:
            with suppress(OverflowError):
                return float(value)
        else:
            with suppress(ValueError):
                return _in_range(field.type, value)
    raise UsageError(f"key column {field.name!r} is a {field.type}{_EXAMPLES.get(field.type, '')}. Nothing was read.")


def typed_keys(texts: Sequence[str], fields: Sequence[KeyField]) -> list[Key]:
    r"""The keys of some arguments, as many for each as there are key columns; ``\N`` is null. Raises UsageError."""
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
        tuple(_typed(field, text) for field, text in zip(fields, texts[i : i + width], strict=True))
        for i in range(0, len(texts), width)
    ]


def time_given(text: str, kind: str) -> Any:
    """A time of a state with windows, of text. Raises UsageError, also for a null: that would be no bound."""
    if text == _NULL:
        raise UsageError("a time cannot be null. Nothing was read.")
    return _typed(KeyField("time", kind), text)


def _typed(field: KeyField, text: str) -> Any:
    if text == _NULL:
        return None
    if field.type == "string":
        return text
    try:
        return _parsed(field, text)
    except (KeyEncodingError, ValueError):
        example = _EXAMPLES.get(field.type, "")
    raise UsageError(f"key column {field.name!r} is a {field.type}{example}; this is none: {quoted(text[:100])}")


def _parsed(field: KeyField, text: str) -> Any:
    if field.type == "timestamp":
        return _unrounded(_instant(text), text)
    if field.type == "binary" and not text:
        return b""
    return _in_range(field.type, _unrounded(KeyCodec([field]).decode(_checked(field.type, text))[0], text))


def _instant(text: str) -> dt.datetime:
    instant = dt.datetime.fromisoformat(text)
    if instant.tzinfo is None:
        raise ValueError(text)
    return instant


def _checked(kind: str, text: str) -> str:
    """The text. Raises ValueError for a number that only Python would read."""
    form = _JSON_INTEGER if kind in _BITS else _NUMBER if kind.startswith((*_DOUBLES, "decimal")) else None
    if form is not None and not form.fullmatch(text):
        raise ValueError(text)
    return text


def _unrounded(value: Any, text: str) -> Any:
    """The value, unless it is a number or a time that is not the text's: that is another key."""
    is_other = isinstance(value, float) and math.isinf(value) and not text.endswith("Infinity")
    if is_other or (isinstance(value, Decimal) and value != Decimal(text)):
        raise ValueError(text)
    if isinstance(value, dt.datetime) and _FINER.search(text):
        raise ValueError(text)
    return value


def _in_range(kind: str, value: Any) -> Any:
    """The value. Raises ValueError for an integer or a decimal that no column of the type can hold."""
    end = 1 << _BITS.get(kind, 64) - 1
    if isinstance(value, Decimal):
        digits, most = len(value.as_tuple().digits), int(kind[len("decimal(") : kind.index(",")])
        fits = digits <= most
    else:
        fits = kind not in _BITS or -end <= value < end
    if not fits:
        raise ValueError(kind)
    return value
