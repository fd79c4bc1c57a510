"""Keys as a person types them: one argument per key column, read by the column's type in the ledger."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from mapstate.cli.arguments import quoted
from mapstate.errors import KeyEncodingError, UsageError
from mapstate.keys import Key, KeyCodec
from mapstate.schema import KeyField

__all__ = ["typed_keys"]

_NULL = "\\N"
_EXAMPLES = {
    "timestamp": ", such as 2026-11-21T10:00:00Z",
    "timestamp_ntz": ", such as 2026-11-21T10:00:00",
    "date": ", such as 2026-11-21",
    "boolean": ", which is true or false",
    "binary": ", in hexadecimal digits",
}


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
