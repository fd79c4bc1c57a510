"""The ways past the stores of this project, for their contract: the drivers' own calls."""

from __future__ import annotations

import contextlib
import sqlite3

import redis

from mapstate.backends import memory

__all__ = ["MemorySideDoor", "RedisSideDoor", "SqliteSideDoor"]


class MemorySideDoor:
    """Into the dictionary itself."""

    def __init__(self, backend: memory.MemoryBackend) -> None:
        self._backend = backend

    def read(self, state: str, key: str) -> bytes | None:
        return self._records(state).get(key)

    def write(self, state: str, key: str, record: bytes) -> None:
        self._records(state)[key] = record

    def _records(self, state: str) -> dict[str, bytes]:
        return memory._stores.setdefault((self._backend.name, state), memory.MemoryStore())._records


class SqliteSideDoor:
    """With SQLite's own statements, on a connection of its own."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, state: str, key: str) -> bytes | None:
        with contextlib.closing(sqlite3.connect(self._path)) as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'mapstate_records'").fetchone():
                return None
            ask = "SELECT record FROM mapstate_records WHERE state = ? AND key = ?"
            return (db.execute(ask, (state, key)).fetchone() or [None])[0]

    def write(self, state: str, key: str, record: bytes) -> None:
        with contextlib.closing(sqlite3.connect(self._path)) as db, db:
            db.execute(
                "CREATE TABLE IF NOT EXISTS mapstate_records "
                "(state TEXT, key TEXT, record BLOB NOT NULL, PRIMARY KEY (state, key)) WITHOUT ROWID"
            )
            db.execute("REPLACE INTO mapstate_records VALUES (?, ?, ?)", (state, key, record))


class RedisSideDoor:
    """With redis-py's GET and SET; a cluster's client has them too."""

    def __init__(self, client: redis.Redis, prefix: str = "") -> None:
        self._client = client
        self._prefix = prefix

    def read(self, state: str, key: str) -> bytes | None:
        return self._client.get(f"{self._prefix}{state}:{key}")

    def write(self, state: str, key: str, record: bytes) -> None:
        self._client.set(f"{self._prefix}{state}:{key}", record)
