"""Connections to one SQLite file: transactions on idle ones, and a gate that keeps them out of forks."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote
from weakref import WeakSet

from mapstate.backends.sqlite.problems import DRIVER_ERRORS, problem_of
from mapstate.errors import MapStateError
from mapstate.retry import Pauses

T = TypeVar("T")

_TABLES = """
CREATE TABLE IF NOT EXISTS mapstate_records (
    state TEXT, key TEXT, record BLOB NOT NULL, PRIMARY KEY (state, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS mapstate_ledgers (
    state TEXT PRIMARY KEY, record BLOB NOT NULL,
    fence_epoch INTEGER NOT NULL, fence_txid INTEGER NOT NULL, fence_closed INTEGER NOT NULL, fence_nonce TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS mapstate_claims (
    state TEXT, txid INTEGER, partition INTEGER, holder TEXT NOT NULL, PRIMARY KEY (state, txid, partition)
) WITHOUT ROWID
"""
_COUNT_TABLES = """
SELECT count(*) = 3 FROM sqlite_master WHERE name IN ('mapstate_records', 'mapstate_ledgers', 'mapstate_claims')
"""


class Connection(sqlite3.Connection):
    """A connection that knows which file it opened, and whether our tables are in it."""

    identity: tuple[int, int] | None = None
    has_tables = False

    def set_up(self, synchronous: str, timeout: float, *, create: bool) -> None:
        """Called before the first transaction."""
        self.execute(f"PRAGMA synchronous = {synchronous}")
        self.execute("PRAGMA cache_size = -16000")  # 16 MB here and 32 MB of WAL:
        self.execute("PRAGMA wal_autocheckpoint = 8000")  # chunks rewrite the same pages again and again
        if create:
            self._into_wal(timeout)

    def _into_wal(self, timeout: float) -> None:
        """Retries, which SQLite's own timeout does not: of several that set a new file to WAL, all but one fail."""
        deadline = time.monotonic() + timeout
        pauses = Pauses(0.01, 0.01)
        while True:
            try:
                self.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                pauses.sleep()
            else:
                return

    def find_tables(self, *, create: bool) -> None:
        """Called inside the first transaction."""
        for table in _TABLES.split(";") if create else ():
            self.execute(table)
        self.has_tables = bool(self.execute(_COUNT_TABLES).fetchone()[0])

    def abandon(self) -> None:
        """Roll back and close. Closing alone would wait for a cursor that some traceback still holds."""
        with suppress(sqlite3.Error):
            if self.in_transaction:
                self.execute("ROLLBACK")
        self.close()

    def __del__(self) -> None:
        with suppress(sqlite3.Error):  # Python 3.13 warns of a connection that is dropped open
            self.close()


class Database:
    """One file, as the store of one state uses it, with the options of `SqliteBackend`. Any thread may call."""

    def __init__(self, path: str, state: str, *, timeout: float, synchronous: str) -> None:
        self.path = path
        self.synchronous = synchronous
        self.state = state
        self.timeout = timeout
        self._idle: list[Connection] = []
        fork_gate.add(self)

    def transaction(self, begin: str, work: Callable[[Connection], T], *, create: bool = False) -> T | None:
        """What ``work`` returns, done in one transaction; None where there is no file or table, but for ``create``."""
        with fork_gate:
            db: Connection | None = None
            try:
                db = self._connection(create=create)
                if db is None:
                    return None
                if not db.has_tables:
                    db.set_up(self.synchronous, self.timeout, create=create)
                db.execute(begin)
                if not db.has_tables:
                    db.find_tables(create=create)
                result = work(db) if db.has_tables else None
                db.execute("COMMIT")
                self._idle.append(db)
                db = None
            except DRIVER_ERRORS as error:
                raise self.problem(error) from error
            finally:
                if db is not None:
                    db.abandon()
            return result

    def probe(self) -> None:
        """Raise what a write would, without one: of a file that is not there its directory is asked."""
        if identity_of(self.path) is None and not os.access(Path(self.path).parent, os.W_OK):
            raise self.problem(PermissionError("its directory cannot be written"))
        self.transaction("BEGIN IMMEDIATE", lambda _: None)

    def problem(self, error: Exception) -> MapStateError:
        return problem_of(error, path=self.path, state=self.state, timeout=self.timeout)

    def close(self) -> None:
        """Close the idle connections. Closing twice is no error; a later call opens again."""
        while (db := self._pop()) is not None:
            db.close()

    def _connection(self, *, create: bool) -> Connection | None:
        """An idle connection, or a new one; None where there is no file and ``create`` is off.

        A connection is used only while its file is the one under the path: a file that was deleted or replaced stays
        open, and takes writes that nobody else ever reads.
        """
        now = identity_of(self.path)
        if now is None and not create:
            return None
        while (idle := self._pop()) is not None:
            if idle.identity == now:
                return idle
            idle.close()
        db = self.connect("rwc" if create else "rw")
        db.identity = now or identity_of(self.path)
        return db

    def connect(self, mode: str) -> Connection:
        return sqlite3.connect(
            f"file:{quote(os.fsencode(self.path))}?mode={mode}",
            uri=True,
            timeout=self.timeout,
            isolation_level=None,  # `transaction` begins them
            check_same_thread=False,  # one thread at a time uses it, but not always the same
            factory=Connection,
        )

    def _pop(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None


class _ForkGate:
    """Keeps every connection closed while this process forks.

    SQLite keeps its file locks in the process's memory. A forked child inherits the memory of an open file, but not
    its locks: it writes without them, and its commits can be lost when the parent closes last and deletes the WAL. So
    a fork waits for running transactions, and closes idle connections first. Both processes then open new ones.
    """

    def __init__(self) -> None:
        self.databases: WeakSet[Database] = WeakSet()
        self._changed = threading.Condition()
        self._running = 0
        self._forking = False

    def add(self, database: Database) -> None:
        with self._changed:
            self.databases.add(database)

    def __enter__(self) -> None:
        with self._changed:
            while self._forking:
                self._changed.wait()
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def before_fork(self) -> None:
        self._changed.acquire()
        self._forking = True
        while self._running:
            self._changed.wait()
        for database in self.databases:
            database.close()

    def after_fork(self) -> None:
        self._forking = False
        self._changed.notify_all()
        self._changed.release()


fork_gate = _ForkGate()
"""The gate of this process."""

os.register_at_fork(
    before=fork_gate.before_fork, after_in_parent=fork_gate.after_fork, after_in_child=fork_gate.after_fork
)


def identity_of(path: str) -> tuple[int, int] | None:
    """Device and inode of the file that is under a path now; None where there is none."""
    try:
        stat = os.stat(path)  # noqa: PTH116  once per call, and Path costs more than the call
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_dev, stat.st_ino
