"""A SQLite file as of one moment: one read transaction, which lasts until it is closed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mapstate.backends.sqlite.connection import Connection, Database, fork_gate, identity_of
from mapstate.backends.sqlite.problems import DRIVER_ERRORS, problem_of
from mapstate.errors import UsageError

T = TypeVar("T")


class FrozenDatabase(Database):
    """A `Database` whose every transaction is the same one, which begins with the first call. One thread at a time.

    A fork ends it, see `fork_gate`: then every later call raises UsageError, as after `close`.
    """

    def __init__(self, path: str, state: str, *, timeout: float, synchronous: str) -> None:
        super().__init__(path, state, timeout=timeout, synchronous=synchronous)
        self._about = (state, timeout)
        self._frozen: Connection | None = None
        self._has_begun = False

    def transaction(self, begin: str, work: Callable[[Connection], T], *, create: bool = False) -> T | None:
        """See `Database.transaction`. Raises UsageError for one that writes, and after the end."""
        state, timeout = self._about
        if begin != "BEGIN" or create:
            raise UsageError(f"state {state!r} was opened as of one moment, to be read only. Nothing was written.")
        with fork_gate:
            try:
                if not self._has_begun:
                    self._has_begun = True
                    self._begin(timeout)
                if self._frozen is None:
                    raise UsageError(f"state {state!r} as of one moment is closed, or the process has forked since")
                return work(self._frozen) if self._frozen.has_tables else None
            except DRIVER_ERRORS as error:
                raise problem_of(error, path=self.path, state=state, timeout=timeout) from error

    def close(self) -> None:
        """End the transaction. Closing twice is no error."""
        self._has_begun = True
        if self._frozen is not None:
            self._frozen.abandon()
            self._frozen = None

    def _begin(self, timeout: float) -> None:
        uri = f"{Path(self.path).as_uri()}?mode={'rw' if identity_of(self.path) else 'memory'}"
        self._frozen = sqlite3.connect(
            uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False, factory=Connection
        )
        self._frozen.identity = identity_of(self.path)
        self._frozen.set_up(self.synchronous, timeout, create=False)
        self._frozen.execute("BEGIN")
        self._frozen.find_tables(create=False)
