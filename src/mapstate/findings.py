"""What a look at a state or its store finds: one small record each, for `mapstate doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeVar

from mapstate.errors import CorruptRecordError, MapStateError, StaleBatchError

__all__ = ["MOST_NAMED", "Finding", "Severity", "Unreadable", "named_in"]

T = TypeVar("T")
R = TypeVar("R")

MOST_NAMED = 10
"""Keys that are named in a message; the others are counted."""

Severity = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """One thing that was looked at. ``error``: what is promised does not hold, or soon will not.

    ``advice`` says what an operator can do; empty where all is well. Nothing in it is a secret.
    """

    severity: Severity
    subject: str
    found: str
    expected: str
    advice: str = ""


class Unreadable:
    """What a pass over all records meets that is none, or cannot be read: the first by name, and how many.

    The pass goes on, and reports it in the end. A key that a listing gives twice counts twice.
    """

    def __init__(self, state: str) -> None:
        self._state = state
        self.count = 0
        self.keys: list[str] = []
        self.first = ""

    def note(self, error: MapStateError) -> None:
        """Counts the keys that an error names; see `named_in`."""
        keys = named_in(error)
        self.add(keys, error, error.facts.get("count"))

    def add(self, keys: list[str], error: MapStateError, count: int | None = None) -> None:
        """Counts ``keys`` as what ``error`` is about; ``count`` where there are more of them."""
        self.count += len(keys) if count is None else count
        self.first = self.first or error.message
        new = [key for key in keys[:MOST_NAMED] if key not in self.keys]
        self.keys += new[: MOST_NAMED - len(self.keys)]

    def listed(self, pages: Iterable[list[T]]) -> Iterator[list[T]]:
        """The pages of a listing, which may end with an error that names what it could not list."""
        try:
            yield from pages
        except CorruptRecordError as error:
            if not named_in(error):
                raise
            self.note(error)

    def read(self, read: Callable[[list[T]], R], keys: list[T]) -> tuple[list[T], R | None]:
        """``read`` of the keys that it raises no error about, and those keys; None where there are none."""
        while keys:
            try:
                return keys, read(keys)
            except (CorruptRecordError, StaleBatchError) as error:
                bad = set(named_in(error))
                left = [key for key in keys if str(key) not in bad]
                if len(left) == len(keys):
                    raise
                self.note(error)
                keys = left
        return [], None

    def names(self) -> str:
        """The first of them, and how many more there are."""
        shown = ", ".join(f"{key[:100]!r}" for key in self.keys)
        more = self.count - len(self.keys)
        return f"{shown} and {more} more" if more > 0 else shown

    def error(self) -> CorruptRecordError:
        """For a pass that ends with an error: what it met, and what the first of it is."""
        return CorruptRecordError(
            f"state {self._state!r}: {self.count} keys cannot be read: {self.names()}. All other keys were read. The "
            f"first error: {self.first}",
            state=self._state,
            keys=list(self.keys),
            count=self.count,
        )


def named_in(error: MapStateError) -> list[str]:
    """The keys of a chunk that an error is about, as text; none where it is about something else."""
    facts = error.facts
    keys: list[str] = facts.get("keys") or ([facts["key"]] if facts.get("key") is not None else [])
    return keys
