"""SQLite: one file, for one machine."""

from mapstate.backends.sqlite.backend import SqliteBackend, SqliteStore

__all__ = ["SqliteBackend", "SqliteStore"]
