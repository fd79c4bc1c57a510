"""The states of a SQLite file: the rows of the table of ledgers."""

from __future__ import annotations

from collections.abc import Iterator

from mapstate.backends.sqlite.connection import Database

__all__ = ["states_in"]


def states_in(database: Database) -> Iterator[list[tuple[str, bytes]]]:
    """See `ListsStates.states`. Closes the file."""
    ask = "SELECT state, record FROM mapstate_ledgers ORDER BY state"
    try:
        yield database.transaction("BEGIN", lambda db: db.execute(ask).fetchall()) or []
    finally:
        database.close()
