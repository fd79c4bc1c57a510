"""The way past the store: psycopg's own statements."""

from __future__ import annotations

from typing import Any

import psycopg


class PostgresqlSideDoor:
    """Reads and writes the table of records, on a connection of its own."""

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        self._db = db

    def read(self, state: str, key: str) -> bytes | None:
        """The record as it is stored."""
        if self._db.execute("SELECT to_regclass('mapstate_records')").fetchone() == (None,):
            return None
        ask = "SELECT record FROM mapstate_records WHERE state = %s AND key = %s"
        row = self._db.execute(ask, (state, key)).fetchone()
        return None if row is None else row[0]

    def write(self, state: str, key: str, record: bytes) -> None:
        """Stores a record, as another program would."""
        self._db.execute("DELETE FROM mapstate_records WHERE state = %s AND key = %s", (state, key))
        self._db.execute("INSERT INTO mapstate_records VALUES (%s, %s, %s)", (state, key, record))
