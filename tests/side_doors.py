"""The ways past the stores of this project, for their contract: the drivers' own calls."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any
from zlib import crc32

import aerospike
import redis
from aerospike.exception import RecordNotFound

from mapstate.backends import memory
from mapstate.backends.redis import RedisClusterBackend

__all__ = [
    "AerospikeSideDoor",
    "MemorySideDoor",
    "RedisClusterSideDoor",
    "RedisHashSideDoor",
    "RedisSideDoor",
    "SqliteSideDoor",
]


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
    """With redis-py's GET and SET."""

    def __init__(self, client: redis.Redis, prefix: str = "") -> None:
        self._client = client
        self._prefix = prefix

    def read(self, state: str, key: str) -> bytes | None:
        return self._client.get(f"{self._prefix}{state}:{key}")

    def write(self, state: str, key: str, record: bytes) -> None:
        self._client.set(f"{self._prefix}{state}:{key}", record)


class RedisClusterSideDoor:
    """With GET and SET of redis-py's cluster client. A key's bucket is its CRC-32, as docs/redis.md has it."""

    def __init__(self, client: redis.RedisCluster, backend: RedisClusterBackend) -> None:
        self._client: Any = client
        self._prefix = backend.prefix
        self._buckets = backend.buckets

    def read(self, state: str, key: str) -> bytes | None:
        return self._client.get(self._name(state, key))

    def write(self, state: str, key: str, record: bytes) -> None:
        self._client.set(self._name(state, key), record)

    def _name(self, state: str, key: str) -> str:
        return f"{self._prefix}{state}:{{{crc32(key.encode()) % self._buckets}}}:{key}"


class RedisHashSideDoor:
    """With redis-py's HGET and HSET: the state's name is that of the hash."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._client: Any = client
        self._prefix = prefix

    def read(self, state: str, key: str) -> bytes | None:
        return self._client.hget(self._prefix + state, key)

    def write(self, state: str, key: str, record: bytes) -> None:
        self._client.hset(self._prefix + state, key, record)


class RedisPackedSideDoor:
    """With redis-py's HGET and HSET: the key's CRC-32 says in which of the hashes it is."""

    def __init__(self, client: redis.Redis, prefix: str, buckets: int) -> None:
        self._client: Any = client
        self._prefix = prefix
        self._buckets = buckets

    def read(self, state: str, key: str) -> bytes | None:
        return self._client.hget(self._name(state, key), key)

    def write(self, state: str, key: str, record: bytes) -> None:
        self._client.hset(self._name(state, key), key, record)

    def _name(self, state: str, key: str) -> str:
        digits = len(str(self._buckets - 1))
        return f"{self._prefix}{state}:{crc32(key.encode()) % self._buckets:0{digits}}"


class AerospikeSideDoor:
    """With the client's own get and put. ``sets`` stands before each state's name in that of its set."""

    def __init__(self, client: Any, namespace: str, sets: str = "") -> None:
        self._client = client
        self._namespace = namespace
        self._sets = sets

    def read(self, state: str, key: str) -> Any:
        with contextlib.suppress(RecordNotFound):
            return self._client.get(self._place(state, key))[2]["record"]

    def write(self, state: str, key: str, record: Any) -> None:
        self._client.put(self._place(state, key), {"record": record}, {}, {"key": aerospike.POLICY_KEY_SEND})

    def _place(self, state: str, key: str) -> tuple[str, str, str]:
        return self._namespace, self._sets + state, key
