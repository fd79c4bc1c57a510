"""SQLite: a durable store in one file, shared by the processes of one machine, with nothing to install."""

from mapstate.backends.sqlite.backend import SqliteBackend
from mapstate.backends.sqlite.store import SqliteStore

__all__ = ["SqliteBackend", "SqliteStore"]
