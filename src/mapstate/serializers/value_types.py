"""From type names as Spark writes them, and ``any``, to the types, values and records of a wire format."""

from __future__ import annotations

import datetime as dt
import math
import re
import zlib
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

import msgspec

from mapstate.errors import SerializationError, UnsupportedTypeError, shown
from mapstate.schema import Field, StateType
from mapstate.values import item_type, struct_parts

TXID = Annotated[int, msgspec.Meta(ge=0)]

VALUES_AT: dict[StateType, tuple[int, ...]] = {"non-transactional": (), "transactional": (1,), "opaque": (1, 2)}
"""The places of the values in a record of each state type; a bare value has none."""

_SCALARS: dict[str, Any] = {
    "bigint": int,
    "int": int,
    "smallint": int,
    "tinyint": int,
    "double": float,
    "float": float,
    "string": str,
    "boolean": bool,
    "date": dt.date,
    "timestamp": Annotated[dt.datetime, msgspec.Meta(tz=True)],
    "timestamp_ntz": Annotated[dt.datetime, msgspec.Meta(tz=False)],
    "binary": bytes,
    "any": Any,
}


INTEGERS = [name for name, kind in _SCALARS.items() if kind is int]
"""The types of integers of at most 64 bits."""

CHECKED = ":binary,crc32:bigint>"
"""The end of the type of a binary value that another library reads, and that might crash on damaged bytes."""


class WireForm(NamedTuple):
    """The values that a wire format cannot hold unchanged.

    ``float_words``  the format has no NaN and no infinities: they are words
    ``native``       values of a store with types of its own: arrays are lists. Such a store cuts text at a NUL, so text
                     with a NUL is ``{"utf8": bytes}``
    """

    float_words: bool = False
    native: bool = False


def wire_type(name: str, form: WireForm) -> Any:
    """The type that msgspec decodes for a type name, with null. Raises UnsupportedTypeError.

    An array is a part of a struct, because the bare value of a single field is told from null by being no array.
    """
    if name.startswith("struct<"):
        parts = [
            list[wire_type(item_type(part), form)] | None if part.startswith("array<") else wire_type(part, form)  # type: ignore[misc]
            for part in struct_parts(name)
        ]
        return tuple[tuple(parts)] | None  # type: ignore[misc]
    if re.fullmatch(r"decimal\([0-9]{1,2},[0-9]{1,2}\)", name):
        return Decimal | None
    if name not in _SCALARS:
        raise UnsupportedTypeError(f"a state cannot hold values of the type {name}", type=name)
    if name in ("double", "float") and form.float_words:
        return float | str | None
    if name == "string" and form.native:
        return str | dict[str, bytes] | None
    return _SCALARS[name] if name == "any" else _SCALARS[name] | None


Convert = Callable[[Any], Any]
Array = type[list[Any]] | type[tuple[Any, ...]]


def to_wire(name: str, form: WireForm) -> Convert | None:
    """The conversion of a value before it is encoded; None if it stays unchanged."""
    if name == "any":
        if form.native:
            return any_to_native
        return lambda value: check_plain(value, float_words=form.float_words)
    if name in ("double", "float") and form.float_words:
        return _float_to_word
    if form.native and name == "string":
        return _text_to_native
    if form.native and _SCALARS.get(name) is int:
        return _int_to_native
    if name.startswith("struct<"):
        return each([to_wire(part, form) for part in struct_parts(name)], list if form.native else tuple)
    if name.startswith("array<"):
        return _each_item(to_wire(item_type(name), form))
    return None


def from_wire(name: str, form: WireForm) -> Convert | None:
    """The conversion of a decoded value; None if it stays unchanged."""
    if name in ("double", "float") and form.float_words:
        return _word_to_float
    if form.native and name == "any":
        return native_to_any
    if form.native and name == "string":
        return _native_to_text
    if name.endswith(CHECKED):
        return _verified
    if name.startswith("struct<"):
        return each([from_wire(part, form) for part in struct_parts(name)], tuple)
    if name.startswith("array<"):
        return _each_item(from_wire(item_type(name), form))
    return None


def each(converts: list[Convert | None], into: Array) -> Convert | None:
    """The conversion of a value by the conversions of its parts; None if all parts stay unchanged."""
    if into is tuple and not any(converts):
        return None

    def convert(value: Any) -> Any:
        if value is None:
            return None
        return into([part if to is None else to(part) for to, part in zip(converts, value, strict=True)])

    return convert


def _each_item(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda items: items if items is None else list(map(convert, items))


def _float_to_word(value: Any) -> Any:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _word_to_float(value: Any) -> Any:
    if type(value) is not str:
        return value
    return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}[value]


def _int_to_native(value: Any) -> Any:
    if value is None or -(1 << 63) <= value < 1 << 63:
        return value
    raise SerializationError(f"{shown(value)} has more than 64 bits")


def _text_to_native(value: Any) -> Any:
    if value is None or (value.isascii() and "\0" not in value):
        return value
    data = value.encode()  # raises for text that cannot be UTF-8
    return {"utf8": data} if b"\0" in data else value


def _native_to_text(value: Any) -> Any:
    return value["utf8"].decode() if type(value) is dict else value


def any_to_native(value: Any) -> Any:
    """The value, or its MessagePack if it has bytes or a NUL. So stored bytes are always MessagePack."""
    check_plain(value, float_words=False)
    return msgspec.msgpack.encode(value) if _has_bytes_or_nul(value) else value


def _has_bytes_or_nul(value: Any) -> bool:
    kind = type(value)
    if kind is str:
        return b"\0" in value.encode()  # raises for text that cannot be UTF-8
    if kind is list:
        return any(map(_has_bytes_or_nul, value))
    if kind is dict:
        return any(map(_has_bytes_or_nul, value)) or any(map(_has_bytes_or_nul, value.values()))
    return kind is bytes


def native_to_any(value: Any) -> Any:
    """The value that `any_to_native` has stored."""
    return msgspec.msgpack.decode(value) if isinstance(value, bytes | bytearray) else value


def check_plain(value: Any, *, float_words: bool) -> Any:
    """Return the value if a serializer reads it back unchanged. Raises SerializationError if not."""
    kind = type(value)
    if kind in (type(None), bool, str):
        return value
    if kind is int and -(1 << 63) <= value < 1 << 63:
        return value
    if kind is float and (math.isfinite(value) or not float_words):
        return value
    if kind is bytes and not float_words:
        return value
    if kind is list:
        for item in value:
            check_plain(item, float_words=float_words)
        return value
    if kind is dict and all(type(key) is str for key in value):
        for item in value.values():
            check_plain(item, float_words=float_words)
        return value
    raise SerializationError(
        f"{shown(value)} ({kind.__name__}) cannot be stored and come back the same: an own aggregator may "
        "accumulate None, bool, str, int of 64 bits, finite float, list, and dict with str keys"
        f"{'' if float_words else ', and bytes'}",
    )


class RecordLayout:
    """The form of records with the first fields only: those of a time before fields were added."""

    def __init__(self, decoder: Any, form: WireForm, state_type: StateType, fields: Sequence[Field]) -> None:
        array: Array = list if form.native else tuple
        self.count = len(fields)
        if self.count == 1:
            kind = wire_type(fields[0].type, form)
            value: Any = kind if kind is Any or fields[0].type.startswith("struct<") else kind | tuple[None]
            out_of = _unless_null(to_wire(fields[0].type, form), array)
            into = _unless_null(from_wire(fields[0].type, form), tuple)
        else:
            value = tuple[tuple(wire_type(field.type, form) for field in fields)] | None  # type: ignore[misc]
            out_of = each([to_wire(field.type, form) for field in fields], array)
            into = each([from_wire(field.type, form) for field in fields], tuple)
        places = VALUES_AT[state_type]
        self.out_of: Convert | None
        self.into: Convert | None
        if form.native:
            record = tuple[(*(value for _ in places), TXID)] if places else tuple[value]  # type: ignore[misc]
            self.out_of, self.into = _txid_last(out_of, places), _txid_first(into, places)
        else:
            record = tuple[(TXID, *(value for _ in places))] if places else value  # type: ignore[misc]
            self.out_of, self.into = _at_places(out_of, places), _at_places(into, places)
        self.decode = decoder(record).decode


def _unless_null(convert: Convert | None, array: Array) -> Convert | None:
    if convert is None and array is tuple:
        return None
    inner, null = convert or _as_it_is, array((None,))
    return lambda value: value if value is None else null if value == (None,) else inner(value)


def _at_places(convert: Convert | None, places: tuple[int, ...]) -> Convert | None:
    if convert is None or not places:
        return convert
    if len(places) == 1:
        return lambda record: (record[0], convert(record[1]))
    return lambda record: (record[0], convert(record[1]), convert(record[2]))


def _txid_last(convert: Convert | None, places: tuple[int, ...]) -> Convert:
    inner = convert or _as_it_is
    if not places:
        return lambda value: [inner(value)]
    if len(places) == 1:
        return lambda record: [inner(record[1]), record[0]]
    return lambda record: [inner(record[1]), inner(record[2]), record[0]]


def _txid_first(convert: Convert | None, places: tuple[int, ...]) -> Convert:
    inner = convert or _as_it_is
    if not places:
        return lambda native: inner(native[0])
    if len(places) == 1:
        return lambda native: (native[1], inner(native[0]))
    return lambda native: (native[2], inner(native[0]), inner(native[1]))


def _as_it_is(value: Any) -> Any:
    return value


def with_checksum(data: bytes) -> tuple[bytes, int]:
    """The value of some bytes."""
    return data, zlib.crc32(data)


def _verified(value: Sequence[Any] | None) -> tuple[bytes, int] | None:
    """The decoded value. Raises ValueError, from which the codec makes a CorruptRecordError."""
    if value is None:
        return None
    data, checksum = value
    if data is None or zlib.crc32(data) != checksum:
        raise ValueError("the bytes of a sketch differ from their crc32")
    return bytes(data), checksum
