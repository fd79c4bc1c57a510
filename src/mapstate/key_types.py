"""The types of key columns other than text, and how their values become the text of a key; texts with an escape."""

from __future__ import annotations

import datetime as dt
import math
import re
import struct
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from typing import Any, NamedTuple

from mapstate.errors import UnsupportedTypeError, shown
from mapstate.schema import KeyField

_DECIMAL = re.compile(r"decimal\(\d{1,2},(\d{1,2})\)")
_UTC = dt.UTC
_EXACT = Context(prec=80)
_FLOAT = struct.Struct("<f")  # which, unlike that of the machine, raises for what would be infinite
_ESCAPES = {"\\": "\\\\", "|": "\\|", "\0": "\\0", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_UNESCAPES = {text[1]: char for char, text in _ESCAPES.items()}
SPECIAL = re.compile(r"[\\|\x00-\x1f\x7f-\x9f]")
_ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|.)", re.DOTALL)


class KeyType(NamedTuple):
    """How a column of values becomes the texts of keys, and a text a value."""

    to_text: Callable[[Sequence[Any]], list[Any]]
    from_text: Callable[[str], Any]


def _integers(column: Sequence[Any]) -> list[str]:
    for value in column:
        if type(value) is not int:
            raise TypeError(f"{shown(value)} is a {type(value).__name__}")
    return [str(value) for value in column]


def _native_integers(column: Sequence[Any]) -> list[int]:
    for value in column:
        if not -(1 << 63) <= exactly(int, value) < 1 << 63:
            raise ValueError(f"{shown(value)} has more than 64 bits")
    return list(column)


def _no_text(text: str) -> Any:
    raise ValueError(f"{shown(text)} is text, and a key of this state is an integer")


def _booleans(column: Sequence[Any]) -> list[str]:
    return [_BOOLEANS[exactly(bool, value)] for value in column]


_BOOLEANS = {True: "true", False: "false"}


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _floats(column: Sequence[Any]) -> list[str]:
    return _doubles([single(float(exactly((float, int), value))) for value in column])


def _doubles(column: Sequence[Any]) -> list[str]:
    out = []
    for value in column:
        number = float(exactly((float, int), value))
        if math.isnan(number):
            out.append("NaN")
        elif math.isinf(number):
            out.append("Infinity" if number > 0 else "-Infinity")
        else:
            out.append(repr(number + 0.0))  # -0.0 + 0.0 is 0.0
    return out


def _decimals(column: Sequence[Any]) -> list[str]:
    out = []
    for value in column:
        if type(value) is int:
            out.append(str(value))
            continue
        if not exactly(Decimal, value).is_finite():
            raise ValueError(f"{shown(value)} is no number")
        text = format(value, "f")
        if "." in text:
            text = text.rstrip("0").rstrip(".")
        out.append("0" if text == "-0" else text)
    return out


def _dates(column: Sequence[Any]) -> list[str]:
    return [exactly(dt.date, value).isoformat() for value in column]


def _timestamps(column: Sequence[Any]) -> list[str]:
    texts: dict[int, str] = {}  # by object: a task has each time of a chunk once
    for value in column:
        if id(value) in texts:
            continue
        texts[id(value)] = instant(value).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    return [texts[id(value)] for value in column]


def _timestamp(text: str) -> dt.datetime:
    if not text.endswith("Z"):
        raise ValueError(text)
    return dt.datetime.fromisoformat(text[:-1]).replace(tzinfo=_UTC)


def _local_timestamps(column: Sequence[Any]) -> list[str]:
    return [local_time(value).isoformat(timespec="microseconds") for value in column]


def _binaries(column: Sequence[Any]) -> list[str]:
    return [bytes(exactly((bytes, bytearray), value)).hex() or "\\E" for value in column]


def _binary(text: str) -> bytes:
    return b"" if text == "\\E" else bytes.fromhex(text)


def exactly(kind: type | tuple[type, ...], value: Any) -> Any:
    """Return ``value`` if it has exactly this type: a bool is no int here, and a datetime no date."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        raise TypeError(f"{shown(value)} is a {type(value).__name__}")
    return value


def single(value: Any) -> float:
    """The float of 32 bits that is nearest. Raises OverflowError if that is infinite."""
    return _FLOAT.unpack(_FLOAT.pack(exactly(float, value)))[0]  # type: ignore[no-any-return]


def instant(value: Any) -> dt.datetime:
    """A time with a zone, in UTC. Raises OverflowError outside of the years 1 to 9999 there."""
    if exactly(dt.datetime, value).utcoffset() is None:
        raise TypeError(f"{shown(value)} has no time zone, and a timestamp is an instant")
    return value.astimezone(_UTC)  # type: ignore[no-any-return]


def local_time(value: Any) -> dt.datetime:
    """A time without a zone."""
    if exactly(dt.datetime, value).tzinfo is not None:
        raise TypeError(f"{shown(value)} has a time zone, and a timestamp_ntz has none")
    return value  # type: ignore[no-any-return]


INTEGER = KeyType(_integers, int)
NATIVE_INTEGER = KeyType(_native_integers, _no_text)
_TYPES: dict[str, KeyType] = {
    "tinyint": INTEGER,
    "smallint": INTEGER,
    "int": INTEGER,
    "bigint": INTEGER,
    "boolean": KeyType(_booleans, _boolean),
    "float": KeyType(_floats, float),
    "double": KeyType(_doubles, float),
    "date": KeyType(_dates, dt.date.fromisoformat),
    "timestamp": KeyType(_timestamps, _timestamp),
    "timestamp_ntz": KeyType(_local_timestamps, dt.datetime.fromisoformat),
    "binary": KeyType(_binaries, _binary),
}


def _decimal(scale: int) -> KeyType:
    """The type of a decimal, which is decoded with its column's scale."""
    unit = Decimal(1).scaleb(-scale)
    return KeyType(_decimals, lambda text: _EXACT.quantize(Decimal(text), unit))


def key_type(field: KeyField) -> KeyType:
    """The type of a key column that is not text. Raises UnsupportedTypeError."""
    decimal = _DECIMAL.fullmatch(field.type)
    if decimal is not None:
        return _decimal(int(decimal[1]))
    kind = _TYPES.get(field.type)
    if kind is None:
        raise UnsupportedTypeError(
            f"the key column {field.name!r} has the type {field.type}, which cannot be a key: take one of "
            f"string, {', '.join(_TYPES)} or decimal. A string with a collation has to be reduced to what makes it "
            "equal first, say with lower().",
            column=field.name,
            type=field.type,
        )
    return kind


def split(text: str) -> list[str]:
    """Split at each ``|`` that is not escaped."""
    if "\\" not in text:
        return text.split("|")
    parts, start, at = [], 0, 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "|":
            parts.append(text[start:at])
            start = at + 1
        at += 1
    parts.append(text[start:])
    return parts


def values_of(kind: KeyType, column: Sequence[str]) -> Sequence[Any]:
    """The values of texts without an escape. All keys of a window have one time, which is made once."""
    if kind.from_text is text_of:
        return column
    values = {text: kind.from_text(text) for text in set(column)}
    return [values[text] for text in column]


def escape(match: re.Match[str]) -> str:
    """What `SPECIAL` finds, as it stands in a key."""
    char = match.group()
    return _ESCAPES.get(char) or f"\\x{ord(char):02x}"


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    return chr(int(code[1:], 16)) if len(code) > 1 else _UNESCAPES[code]


def text_of(text: str) -> str:
    """The value of a text key."""
    if "\\" not in text:
        return text
    return "" if text == "\\E" else _ESCAPED.sub(_unescape, text)
