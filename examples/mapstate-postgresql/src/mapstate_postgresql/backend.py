"""Where a PostgreSQL database is, and the connections of this process to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from mapstate.errors import ConfigurationError
from mapstate_postgresql.store import PostgresqlStore

__all__ = ["PostgresqlBackend"]


@dataclass(frozen=True, repr=False)
class PostgresqlBackend:
    """A database and how to reach it. Frozen, comparable and picklable; holds no connection.

    ``conninfo``         as libpq has it, password included
    ``timeout``          seconds for a connection, and for a statement
    ``max_value_bytes``  larger records are refused; PostgreSQL's own limit is near 1 GB for a whole put
    """

    conninfo: str
    timeout: int = 30
    max_value_bytes: int = 100_000_000

    shared_between_processes = True

    @classmethod
    def from_url(cls, url: str) -> PostgresqlBackend:
        """The backend that a URL names: libpq's own, with its parameters. Raises ConfigurationError."""
        try:
            parts = conninfo_to_dict(url)
        except psycopg.Error:
            parts = {}
        if not parts.get("host") and not parts.get("dbname"):
            raise ConfigurationError(
                "this is no URL like postgresql://user:password@host:5432/database?parameter=value, with parameters "
                "that libpq knows. It is not shown, because it may hold a password; write special characters in that "
                "percent-encoded"
            )
        return cls(make_conninfo("", **parts))

    def __repr__(self) -> str:
        # libpq itself says which parameters are secrets, such as password and sslpassword, or for experts only.
        secret = {option.keyword.decode() for option in Conninfo.get_defaults() if option.dispchar}
        parts = conninfo_to_dict(self.conninfo)
        shown = {name: "***" if name in secret else value for name, value in parts.items()}
        return f"PostgresqlBackend({make_conninfo('', **shown)!r})"

    @property
    def address(self) -> str:
        """``host:port/database``, for messages."""
        parts = conninfo_to_dict(self.conninfo)
        return f"{parts.get('host', 'localhost')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"

    def open(self, state: str, *, ttl: float | None = None) -> PostgresqlStore:
        """The store of one state. Makes no connection."""
        if ttl is not None:
            raise ConfigurationError("PostgreSQL has no expiry, so postgresql:// has no ttl: leave it out")
        return PostgresqlStore(self, state)

    def take(self) -> psycopg.Connection[Any]:
        """A connection that nobody else uses now. Raises what psycopg raises."""
        for connection in self._taken():
            if not connection.closed:
                return connection
        asked = conninfo_to_dict(self.conninfo)
        # The URL's own come after what they may change, and before what they may not.
        options = f"-c statement_timeout={self.timeout * 1000} {asked.get('options', '')} -c synchronous_commit=on"
        given = {"connect_timeout": self.timeout, **asked, "options": options}
        return psycopg.connect(make_conninfo("", **given), autocommit=True)

    def give_back(self, connection: psycopg.Connection[Any]) -> None:
        """It may be used by others from here on."""
        self._idle().append(connection)

    def close_idle(self) -> None:
        """Closes what nobody uses now."""
        for connection in self._taken():
            connection.close()

    def _taken(self) -> Iterator[psycopg.Connection[Any]]:
        """Idle ones, one after the other: each thread gets another one."""
        idle = self._idle()
        with suppress(IndexError):  # and not where it is empty: another thread may take the last one in between
            while True:
                yield idle.pop()

    def _idle(self) -> list[psycopg.Connection[Any]]:
        """Those of this process: a child must neither use nor close what it has inherited from its parent."""
        return _idle_connections.setdefault((os.getpid(), self), [])


_idle_connections: dict[tuple[int, PostgresqlBackend], list[psycopg.Connection[Any]]] = {}
