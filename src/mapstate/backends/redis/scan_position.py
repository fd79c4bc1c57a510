"""Where a listing of a state on one Redis server stands, as the cursor of `ScansFrom`."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import NamedTuple

from mapstate.errors import UsageError

__all__ = ["START", "ScanPosition", "name_of", "position_of"]

_CURSOR = re.compile(r"(end|\d{1,20})-([0-9a-f]*)", re.ASCII)


class ScanPosition(NamedTuple):
    """Redis' own cursor, None at the end, and the server that gave it; None at the start, empty if unknown."""

    at: bytes | None
    server: str | None

    def __str__(self) -> str:
        return f"{'end' if self.at is None else self.at.decode()}-{self.server}"


START = ScanPosition(b"0", None)


def position_of(cursor: str, state: str) -> ScanPosition:
    """The position of a cursor. Raises UsageError."""
    if not cursor:
        return START
    found = _CURSOR.fullmatch(cursor)
    if found is None or (found[1] != "end" and int(found[1]) >= 1 << 64):
        raise UsageError(f"this is no cursor of a scan of state {state!r}. Nothing was read.")
    return ScanPosition(None if found[1] == "end" else found[1].encode(), found[2])


def name_of(incarnation: bytes | None) -> str:
    """A short name for an incarnation of the server, empty if that is unknown."""
    return "" if incarnation is None else blake2b(incarnation, digest_size=8).hexdigest()
