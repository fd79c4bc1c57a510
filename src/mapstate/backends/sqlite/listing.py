"""What is in a SQLite file: its states, and where the keys of one can be divided."""

from __future__ import annotations

from collections.abc import Iterator

from mapstate.backends.sqlite.connection import Connection, Database
from mapstate.errors import CorruptRecordError
from mapstate.findings import MOST_NAMED


def states_in(database: Database) -> Iterator[list[tuple[str, bytes]]]:
    """See `ListsStates.states`. Closes the file."""
    ask = "SELECT state, record FROM mapstate_ledgers ORDER BY state"
    try:
        yield database.transaction("BEGIN", lambda db: db.execute(ask).fetchall()) or []
    finally:
        database.close()


def ends_of_parts(db: Connection, state: str, most: int) -> list[str]:
    """The last key of each part but the last one: at most ``most`` parts of about as many keys."""
    count = db.execute("SELECT count(*) FROM mapstate_records WHERE state = ?", (state,)).fetchone()[0]
    size, after = -(-count // most), ""
    ends: list[str] = []
    ask = "SELECT key FROM mapstate_records WHERE state = ? AND key > ? ORDER BY key LIMIT 1 OFFSET ?"
    while size and len(ends) < most - 1:
        found = db.execute(ask, (state, after, size - 1)).fetchone()
        if found is None or not isinstance(found[0], str):  # a row of something else: the last part reports it
            break
        after = found[0]
        ends.append(after)
    return ends


def not_listed(state: str, foreign: list[str]) -> CorruptRecordError:
    """The error that ends a listing with ``foreign`` keys, which are no text."""
    return CorruptRecordError(
        f"state {state!r}: the row with the key {foreign[0][:100]} is no record, its key is no text: something else "
        "writes into this table. It was left as it is. Delete it.",
        state=state,
        keys=foreign[:MOST_NAMED],
        count=len(foreign),
    )
