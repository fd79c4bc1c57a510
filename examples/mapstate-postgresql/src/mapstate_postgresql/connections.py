"""The connections of this process to one PostgreSQL database."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

__all__ = ["Connections"]


@dataclass(frozen=True, repr=False)
class Connections:
    """Idle connections are shared by all stores of this process with equal values. Any thread may call."""

    conninfo: str
    timeout: int

    @property
    def address(self) -> str:
        """``host:port/database``, for messages."""
        parts = conninfo_to_dict(self.conninfo)
        return f"{parts.get('host', 'localhost')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"

    def take(self) -> psycopg.Connection[Any]:
        """A connection that is the caller's until `give_back`. Raises what psycopg raises."""
        for connection in self._taken():
            if not connection.closed:
                return connection
        parameters = conninfo_to_dict(self.conninfo)
        # The URL's own options come after those that they may change, and before those that they may not.
        options = f"-c statement_timeout={self.timeout * 1000} {parameters.get('options', '')} -c synchronous_commit=on"
        given = {"connect_timeout": self.timeout, **parameters, "options": options}
        return psycopg.connect(make_conninfo("", **given), autocommit=True)

    def give_back(self, connection: psycopg.Connection[Any]) -> None:
        """Make a connection idle: any caller may take it."""
        self._idle().append(connection)

    def close_idle(self) -> None:
        """Close the idle connections."""
        for connection in self._taken():
            connection.close()

    def _taken(self) -> Iterator[psycopg.Connection[Any]]:
        """Take the idle connections one by one: each thread gets another one."""
        idle = self._idle()
        with suppress(IndexError):  # no check whether it is empty: another thread may take the last one after the check
            while True:
                yield idle.pop()

    def _idle(self) -> list[psycopg.Connection[Any]]:
        """The idle connections of this process: a fork must neither use nor close those of its parent."""
        return idle_connections.setdefault((os.getpid(), self), [])


idle_connections: dict[tuple[int, Connections], list[psycopg.Connection[Any]]] = {}
