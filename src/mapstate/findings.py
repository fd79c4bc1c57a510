"""What a pass over all records finds: findings of `mapstate doctor`, keys that cannot be read, and their number."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from mapstate.errors import CorruptRecordError, MapStateError, StaleBatchError

T = TypeVar("T")
R = TypeVar("R")

MOST_NAMED = 10
"""The number of keys that a message names; it counts the others."""

_MOST_AT_ONCE = 1 << 20  # hashes in a set, which takes ten times the memory

Severity = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """The result of one check. It holds no secret.

    ``severity``  "error": a guarantee does not hold, or soon will not
    ``subject``   the part that was checked
    ``advice``    the operator's next step, empty if there is none
    """

    severity: Severity
    subject: str
    found: str
    expected: str
    advice: str = ""


def not_listed(state: str, keys: list[str], problem: str) -> CorruptRecordError:
    """The error that ends a listing of a state with ``keys`` that are none of its keys."""
    return CorruptRecordError(f"state {state!r}: {problem}", state=state, keys=keys[:MOST_NAMED], count=len(keys))


class Unreadable:
    """The keys that a pass over all records cannot read, raised at its end: the first ten, and the count of all."""

    def __init__(self, state: str) -> None:
        self._state = state
        self.count = 0
        self.is_all_listed = True
        self.keys: list[str] = []
        self.first = ""

    def note(self, error: MapStateError) -> None:
        """Count the keys that an error names; see `named_in`."""
        keys = named_in(error)
        self.add(keys, error, error.facts.get("count"))

    def add(self, keys: list[str], error: MapStateError, count: int | None = None) -> None:
        """Count the ``keys`` of an error. ``count`` is their number if the error names only some."""
        self.count += len(keys) if count is None else count
        self.first = self.first or error.message
        new = [key for key in keys[:MOST_NAMED] if key not in self.keys]
        self.keys += new[: MOST_NAMED - len(self.keys)]

    def listed(self, pages: Iterable[T]) -> Iterator[T]:
        """The pages of a listing, which may end with an error that names the keys it could not list."""
        try:
            yield from pages
        except CorruptRecordError as error:
            if not named_in(error):
                raise
            self.is_all_listed = False
            self.note(error)

    def read(self, read: Callable[[list[T]], R], keys: list[T]) -> tuple[list[T], R | None]:
        """Read those keys about which ``read`` raises no error. Returns them and the result, None without keys."""
        while keys:
            try:
                return keys, read(keys)
            except (CorruptRecordError, StaleBatchError) as error:
                bad, texts = set(named_in(error)), Counter(map(str, keys))
                left = [
                    key
                    for key in keys
                    if str(key) not in bad or (texts[str(key)] > 1 and _can_be_read(read, key))  # 5 beside "5"
                ]
                if len(left) == len(keys):
                    raise
                self.note(error)
                keys = left
        return [], None

    def names(self) -> str:
        shown = ", ".join(f"{key[:100]!r}" for key in self.keys)
        more = self.count - len(self.keys)
        return f"{shown} and {more} more" if more > 0 else shown

    def error(self) -> CorruptRecordError:
        return CorruptRecordError(
            f"state {self._state!r}: {self.count} keys cannot be read: {self.names()}. All other keys were read. The "
            f"first error: {self.first}",
            state=self._state,
            keys=list(self.keys),
            count=self.count,
        )


def _can_be_read(read: Callable[[list[T]], R], key: T) -> bool:
    try:
        read([key])
    except (CorruptRecordError, StaleBatchError):
        return False
    return True


def named_in(error: MapStateError) -> list[str]:
    """The keys that an error is about, as text; none if it has no keys."""
    facts = error.facts
    keys: list[str] = facts.get("keys") or ([facts["key"]] if facts.get("key") is not None else [])
    return keys


class DistinctKeys:
    """Counts keys, each once by its 64-bit hash: 8 bytes per key, and up to 100 MB to tell. Not thread-safe."""

    def __init__(self) -> None:
        self._hashes = array("q")

    def update(self, keys: Sequence[Any]) -> None:
        try:
            "".join(keys)  # the fastest way to ask whether all are texts
        except TypeError:
            keys = list(map(str, keys))  # of ints the hashes of -1 and -2 are equal
        self._hashes.extend(map(hash, keys))

    def __len__(self) -> int:
        passes = 1 + len(self._hashes) // _MOST_AT_ONCE
        if passes == 1:
            return len(set(self._hashes))
        return sum(len({digest for digest in self._hashes if digest % passes == i}) for i in range(passes))
