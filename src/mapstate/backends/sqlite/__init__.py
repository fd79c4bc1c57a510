"""SQLite: a durable store in one file, shared by the processes of one machine, with nothing to install.

URLs as SQLAlchemy writes them: ``sqlite:///relative.db``, ``sqlite:////absolute.db``. One file holds any
number of states. The tables can be read with the ``sqlite3`` shell::

    select key, cast(record as text) from mapstate_records where state = 'visits_by_user';

The file is in WAL mode, in which readers and the one writer do not wait for each other. WAL needs a local disk: it does
not work over NFS and its like. Readers must be able to write to the file and its directory, except while a writer has
the file open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

from mapstate.backends.sqlite.connection import Database
from mapstate.backends.sqlite.store import SqliteStore
from mapstate.errors import ConfigurationError, shown
from mapstate.schema import KeyOrder
from mapstate.urls import Parameters, parameters_in

__all__ = ["SqliteBackend", "SqliteStore"]

_SYNCHRONOUS = ("full", "normal")
_MAX_TIMEOUT = 86_400.0
_MAX_VALUE_BYTES = 999_000_000  # SQLite's own limit is 10**9, for a row with its key
_PARAMETERS: Parameters = {"timeout": float, "synchronous": str, "max_value_bytes": int}


@dataclass(frozen=True)
class SqliteBackend:
    """A file, and how to open it.

    ``path``             made absolute at once, because executors have other working directories
    ``timeout``          seconds to wait for another writer before StoreUnavailableError; there is no retry after it
    ``synchronous``      "full": a commit is on the disk before it is reported. "normal": the last ones may be
                         lost with the machine's power, but not with the process
    ``max_value_bytes``  larger records are refused
    """

    path: str
    timeout: float = 30.0
    synchronous: str = "full"
    max_value_bytes: int = _MAX_VALUE_BYTES

    shared_between_processes = True
    key_order: ClassVar[KeyOrder] = "key"

    def __post_init__(self) -> None:
        if self.path in ("", ":memory:"):
            raise ConfigurationError(
                "a SQLite database in memory is private to one connection: name a file (sqlite:///visits.db), or "
                "take memory:// for a state that lives and dies with this process"
            )
        if "\0" in self.path:
            raise ConfigurationError(f"path is that of a file, and none has a NUL in it: {shown(self.path)}")
        if self.synchronous not in _SYNCHRONOUS:
            raise ConfigurationError(f"synchronous is one of {', '.join(_SYNCHRONOUS)}, not {self.synchronous!r}")
        if not 0 <= self.timeout <= _MAX_TIMEOUT:
            raise ConfigurationError(f"timeout is from 0 to {_MAX_TIMEOUT:.0f} seconds, not {self.timeout!r}")
        if not 1 <= self.max_value_bytes <= _MAX_VALUE_BYTES:
            raise ConfigurationError(f"max_value_bytes is from 1 to {_MAX_VALUE_BYTES}, not {self.max_value_bytes!r}")
        object.__setattr__(self, "path", str(Path(self.path).absolute()))

    @classmethod
    def from_url(cls, url: str) -> SqliteBackend:
        """The backend that a URL names. Parameters: ``timeout``, ``synchronous``, ``max_value_bytes``."""
        location, _, query = url.partition(":")[2].partition("?")
        host, slash, path = location.removeprefix("//").partition("/")
        if host or (path and not location.startswith("///")):
            raise ConfigurationError(
                "a sqlite:// URL names a file and no host: sqlite:///relative.db, or sqlite:////absolute.db with four "
                "slashes"
            )
        return cls(unquote(path) if slash else "", **parameters_in("sqlite", query, _PARAMETERS))

    def open(self, state: str, *, ttl: float | None = None) -> SqliteStore:
        """See `Backend.open`. The file is opened with the first call that needs it."""
        if ttl is not None:
            raise ConfigurationError(
                "SQLite has no expiry, so sqlite:// has no ttl: leave it out, or take a store that drops records by "
                "itself"
            )
        database = Database(self.path, state, timeout=self.timeout, synchronous=self.synchronous)
        return SqliteStore(database, state, max_value_bytes=self.max_value_bytes)

    def open_snapshot(self, state: str) -> SqliteStore:
        """See `Snapshots.open_snapshot`: one read transaction. While it is open, the WAL file only grows."""
        from mapstate.backends.sqlite.operations import FrozenDatabase

        database = FrozenDatabase(self.path, state, timeout=self.timeout, synchronous=self.synchronous)
        return SqliteStore(database, state, max_value_bytes=self.max_value_bytes)

    def states(self) -> Iterator[list[tuple[str, bytes]]]:
        """See `ListsStates.states`. One page, in the order of the names."""
        from mapstate.backends.sqlite.operations import states_in

        return states_in(Database(self.path, "*", timeout=self.timeout, synchronous=self.synchronous))
