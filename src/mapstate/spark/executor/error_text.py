"""Errors of mapstate that reach the driver as text: a last note has their class and their facts as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec

from mapstate import errors
from mapstate.errors import MapStateError

T = TypeVar("T")

_NOTE = "In JSON: "
_NOTES = re.compile(f"^{_NOTE}(.*)$", re.MULTILINE)


class SentError(msgspec.Struct, frozen=True):
    """An error of the tree on its way to another process."""

    kind: str
    message: str
    facts: dict[str, Any]

    @classmethod
    def of(cls, error: MapStateError) -> SentError:
        """What is left of an error in a text. One of a user's own class is sent as the nearest one of the tree."""
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)
        # what is no text, such as half a surrogate pair out of a user's own message, has no JSON
        message = error.message.encode("utf-8", "backslashreplace").decode()
        return cls(kind, message, error.facts)

    def rebuild(self) -> MapStateError:
        """The error again, of its own class."""
        kind = getattr(errors, self.kind) if self.kind in errors.__all__ else MapStateError
        rebuilt: MapStateError = kind(self.message, **self.facts)
        return rebuilt


@contextmanager
def errors_as_text() -> Iterator[None]:
    """Around what runs in another process than the one that asks."""
    try:
        yield
    except MapStateError as error:
        error.add_note(as_note(error))
        raise


def each_with_errors_as_text(items: Iterator[T]) -> Iterator[T]:
    """What a task gives out, one after the other, each made within `errors_as_text`."""
    while True:
        with errors_as_text():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def mapstate_error(error: Exception) -> Exception:
    """The error of mapstate that an error of Spark's tells of, which is then its cause; else the error itself."""
    sent = None if isinstance(error, MapStateError) else error_from_text(str(error))
    if sent is None:
        return error
    sent.__cause__ = error
    return sent


def error_from_text(text: str) -> MapStateError | None:
    """The last error of mapstate in a text of Spark's, None if there is none."""
    for note in reversed(_NOTES.findall(text)):
        with suppress(msgspec.DecodeError):  # somebody's own text
            sent, notes = msgspec.json.decode(note, type=tuple[SentError, list[str]])
            error = sent.rebuild()
            for one in notes:
                error.add_note(one)
            return error
    return None


def as_note(error: MapStateError) -> str:
    """An error and its notes as one line, by which `error_from_text` finds it; without facts that have no JSON."""
    sent = SentError.of(error)
    notes = [note.encode("utf-8", "backslashreplace").decode() for note in getattr(error, "__notes__", [])]
    try:
        return _NOTE + msgspec.json.encode((sent, notes)).decode()
    except (TypeError, ValueError):
        return _NOTE + msgspec.json.encode((msgspec.structs.replace(sent, facts={}), notes)).decode()
