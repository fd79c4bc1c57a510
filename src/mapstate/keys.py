r"""Keys: their types, and the text under which a store keeps them.

A key is a tuple of grouping values, ``("user-42",)``; ``()`` is the only key of an ungrouped aggregate. A store sees
text: the text of each value, joined by ``|``. So an operator can read and type a key in the store's own shell::

    ("user-42",)                          user-42
    ("user-42", date(2026, 11, 21))       user-42|2026-11-21
    (None, "a|b")                         \N|a\|b
    ("",)                                 \E
    ()                                    \G

Two keys have the same text if and only if Spark's ``GROUP BY`` calls them equal: ``-0.0`` is ``0.0``, NaN is NaN,
decimals compare by value, and a timestamp is an instant in any time zone of the session. The text is the same on every
machine, has no control characters, and is never empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any

from mapstate.errors import KeyEncodingError, cut, shown
from mapstate.key_types import INTEGER, NATIVE_INTEGER, SPECIAL, KeyType, escape, key_type, split, text_of, values_of
from mapstate.schema import KeyField

Key = tuple[Any, ...]
StoreKey = str | int
"""A key as a store has it: text, or an int of 64 bits in a store with types of its own."""

GLOBAL_KEY: Key = ()

INDEX = "\\P|"
"""With what the keys of a pane index begin, and no key of a state does. See `mapstate.maps.pane_index`."""


def contains_none(items: Collection[object]) -> bool:
    """Whether None is among them."""
    # `all` first: it compares nothing, and keys and records are truthy.
    return not all(items) and None in items


def is_index_key(key: StoreKey) -> bool:
    """Whether a store's key is one of a pane index, and none of the state's own records."""
    return type(key) is str and key.startswith(INDEX)


class KeyCodec:
    """Encode and decode the keys of one state, by its key schema. Raises UnsupportedTypeError.

    ``native`` is for a store with types of its own: there the key of one integer column is an int, but for null.
    """

    def __init__(self, fields: Sequence[KeyField], *, native: bool = False) -> None:
        self.fields = tuple(KeyField(*field) for field in fields)
        self._types = [TEXT if field.type == "string" else key_type(field) for field in self.fields]
        if native and len(self._types) == 1 and self._types[0] is INTEGER:
            self._types = [NATIVE_INTEGER]

    def encode(self, key: Any) -> StoreKey:
        """The text of one key, which is a tuple or a list, or the bare value of a single key column.

        Raises KeyEncodingError if number or types of the values differ from the schema.
        """
        values = key if isinstance(key, (tuple, list)) else (key,)
        if len(values) != len(self.fields):
            raise KeyEncodingError(
                f"the key {shown(key)} has {len(values)} values; this state is keyed by {self._schema()}", key=repr(key)
            )
        text: StoreKey = self.encode_columns([[value] for value in values], 1)[0]
        return text

    def encode_all(self, keys: Sequence[Any]) -> list[Any]:
        """The text of each key, in the forms of `encode`. Readers call it once per read."""
        width = len(self.fields)
        if width == 1 and not any(issubclass(kind, (tuple, list)) for kind in set(map(type, keys))):
            return self.encode_columns([keys], len(keys))
        rows = [key if isinstance(key, (tuple, list)) else (key,) for key in keys]
        if any(len(row) != width for row in rows):
            return [self.encode(key) for key in keys]  # raises for the first such key
        columns = [list(map(itemgetter(i), rows)) for i in range(width)]
        return self.encode_columns(columns, len(rows))

    def encode_first(self, value: Any) -> str:
        """The text of the first key column's value: how the keys of a pane begin."""
        return str(self._encode_column(0, [value])[0])

    def parts_of(self, text: StoreKey) -> list[str]:
        """The text of each key column, of a text that may be no key of this schema."""
        return split(str(text)) if len(self.fields) != 1 else [str(text)]

    def encode_columns(self, columns: Sequence[Sequence[Any]], rows: int) -> list[Any]:
        """The texts of ``rows`` keys, from their columns. Tasks call it once per chunk."""
        if not columns:
            return ["\\G"] * rows
        encoded = [self._encode_column(i, column) for i, column in enumerate(columns)]
        if len(encoded) == 1:
            return encoded[0]
        return ["|".join(parts) for parts in zip(*encoded, strict=True)]

    def _encode_column(self, at: int, column: Sequence[Any]) -> list[str]:
        to_text = self._types[at].to_text
        try:
            if contains_none(column):
                return ["\\N" if value is None else text for value, text in _around_nulls(column, to_text)]
            return to_text(column)
        except (TypeError, ValueError, ArithmeticError) as error:
            field = self.fields[at]
            raise KeyEncodingError(
                f"a value of key column {field.name!r} is not a {field.type}: {cut(error)}; "
                f"this state is keyed by {self._schema()}",
                column=field.name,
            ) from error

    def decode(self, text: StoreKey) -> Key:
        """The key of a text. Raises KeyEncodingError for a text that is no key of this schema."""
        if not isinstance(text, str):
            if self._types != [NATIVE_INTEGER]:
                raise self._no_key(text)
            return (text,)
        if not self.fields:
            if text == "\\G":
                return GLOBAL_KEY
            raise self._no_key(text)
        parts = split(text) if len(self.fields) > 1 else [text]
        if len(parts) != len(self.fields):
            raise self._no_key(text)
        try:
            return tuple(
                [None if part == "\\N" else kind.from_text(part) for kind, part in zip(self._types, parts, strict=True)]
            )
        except (TypeError, ValueError, ArithmeticError, KeyError) as error:
            raise self._no_key(text) from error

    def decode_all(self, texts: Sequence[Any]) -> list[Key]:
        """The key of each text, as `decode`; column by column, which is faster where no text has an escape."""
        columns = self.columns_of(texts)
        return list(map(self.decode, texts)) if columns is None else list(zip(*columns, strict=True))

    def columns_of(self, texts: Sequence[Any]) -> list[Sequence[Any]] | None:
        """The values of each key column; None where a text has an escape, is an integer or no key."""
        width = len(self.fields)
        try:
            if width and "\\" not in "".join(texts):
                columns = [texts] if width == 1 else zip(*(text.split("|") for text in texts), strict=True)
                return [values_of(kind, column) for kind, column in zip(self._types, columns, strict=True)]
        except (TypeError, ValueError, ArithmeticError, KeyError):
            pass
        return None

    def _no_key(self, text: StoreKey) -> KeyEncodingError:
        return KeyEncodingError(
            f"the store holds the key {shown(text)}, which is no key of a state keyed by {self._schema()}: "
            "something else writes under this state's name",
            key=str(text),
        )

    def _schema(self) -> str:
        return "(" + ", ".join(f"{field.name} {field.type}" for field in self.fields) + ")"


def _around_nulls(column: Sequence[Any], to_text: Callable[[Sequence[Any]], list[Any]]) -> list[tuple[Any, Any]]:
    texts = iter(to_text([value for value in column if value is not None]))
    return [(value, "" if value is None else next(texts)) for value in column]


def _strings(column: Sequence[Any]) -> list[str]:
    try:
        joined = "".join(column)
    except TypeError:
        wrong = next(value for value in column if not isinstance(value, str))
        raise TypeError(f"{shown(wrong)} is a {type(wrong).__name__}") from None
    if not joined.isascii():
        joined.encode()  # raises for text that cannot be UTF-8
    # isprintable is faster than the pattern, and false for all its characters but "|" and the backslash
    plain = joined.isprintable() and "|" not in joined and "\\" not in joined
    if (plain or not SPECIAL.search(joined)) and all(column):
        return column if type(column) is list else list(column)
    return [SPECIAL.sub(escape, value) if value else "\\E" for value in column]


TEXT = KeyType(_strings, text_of)
