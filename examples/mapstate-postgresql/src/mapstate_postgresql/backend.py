"""Where a PostgreSQL database is, and how to reach it."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from mapstate.errors import ConfigurationError
from mapstate_postgresql.connections import Connections
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
    key_order = "key"  # the primary key is a B-tree

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
        # libpq marks the parameters that are secrets, such as password and sslpassword, or for experts only.
        secret = {option.keyword.decode() for option in Conninfo.get_defaults() if option.dispchar}
        parts = conninfo_to_dict(self.conninfo)
        shown = {name: "***" if name in secret else value for name, value in parts.items()}
        return f"PostgresqlBackend({make_conninfo('', **shown)!r})"

    @property
    def address(self) -> str:
        """``host:port/database``, for messages."""
        return self.connections().address

    def open(self, state: str, *, ttl: float | None = None) -> PostgresqlStore:
        """The store of one state. Makes no connection."""
        if ttl is not None:
            raise ConfigurationError("PostgreSQL has no expiry, so postgresql:// has no ttl: leave it out")
        return PostgresqlStore(self.connections(), state, max_value_bytes=self.max_value_bytes)

    def connections(self) -> Connections:
        """The connections of this process to the database."""
        return Connections(self.conninfo, self.timeout)
