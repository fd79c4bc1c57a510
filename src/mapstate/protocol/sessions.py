"""Sessions: rows of a key of which none is further than a gap from the next one.

A session is kept in the panes of tumbling windows as long as the gap. The rows of a key in one pane are nearer than
that to each other, so a record is a *piece* of one session, and has its first and its last time. Rows of panes with
another one between them are further apart than the gap. Pieces of neighbouring panes are one session unless they are
further apart. A session ends a gap after its last row, and is final when the watermark is there: a row that is not late
is behind the watermark, and so behind the gap.

A session may be longer than any retention. Before its first panes are purged, an attempt joins what lies before one
pane into the pieces of that pane. The commit of the attempt names this pane as ``settled``, and is rolled back together
with the records. Readers and firing then start at that pane. Attempts after the commit may purge those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mapstate.protocol.windows import NEVER, Named, WindowCommit, WindowsRecord
from mapstate.schema import Field, number_of

FIRST = "session_first"
LAST = "session_last"
"""The fields of a piece with its first and its last time."""


class Piece(NamedTuple):
    """One record: some neighbouring rows of a session, with their aggregates as ``value``."""

    first: int
    last: int
    value: Any


def piece_of(fields: Sequence[Field]) -> Callable[[Any], Piece]:
    """A function that makes a piece of the value of a record with these fields."""
    names = [field.name for field in fields]
    first, last = names.index(FIRST), names.index(LAST)
    return lambda value: Piece(number_of(value[first]), number_of(value[last]), value)


def sessions_of(pieces: Iterable[Piece], record: WindowsRecord) -> list[list[Piece]]:
    """The pieces of one key, which are in order, session by session."""
    sessions: list[list[Piece]] = []
    for piece in pieces:
        if sessions and record.are_one(sessions[-1][-1].last, piece.first):
            sessions[-1].append(piece)
        else:
            sessions.append([piece])
    return sessions


def last_panes(record: WindowsRecord, done: WindowCommit, named: Named | None = None) -> list[int]:
    """The panes that may have the last rows of sessions that a batch has fired and that are not gone."""
    gap = record.definition.length
    low, high = max(done.before, record.purged), done.watermark
    if low >= high:
        return []
    return list((named or record.named)(low - 2 * gap + 1, high - gap + 1))


def pane_to_settle(record: WindowsRecord, committed: WindowCommit | None) -> int | None:
    """The pane into which an attempt joins what is before it; None if there is nothing to join.

    No row goes into it any more, and every session that is not gone has rows from there on.
    """
    if committed is None or record.purged == NEVER:
        return None
    pane = record.purged - record.definition.length
    return pane if pane > committed.settled else None
