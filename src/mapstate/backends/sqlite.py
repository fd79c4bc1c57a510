"""A store in one SQLite file: durable, shared by the processes of one machine, nothing to install.

URLs as SQLAlchemy writes them: ``sqlite:///relative.db``, ``sqlite:////absolute.db``. One file holds any
number of states. The tables can be read with the ``sqlite3`` shell::

    select key, cast(record as text) from mapstate_records where state = 'visits_by_user';

The file is kept in WAL mode, in which readers and the one writer do not wait for each other. That needs
a local disk: WAL does not work over NFS and its like. And it needs readers that may write to the file and
its directory, except while a writer has the file open.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote
from weakref import WeakSet

from mapstate.backends.sqlite_checkup import judge
from mapstate.backing_map import FenceToken, IBackingMap, Swap, check_lengths
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    CorruptStoreError,
    FencedError,
    KeyEncodingError,
    MapStateError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    TooLargeError,
)
from mapstate.findings import MOST_NAMED, Finding
from mapstate.values import cut, shown

__all__ = ["SqliteBackend", "SqliteStore"]

T = TypeVar("T")

_Version = tuple[bytes, "tuple[int, int] | None"]
"""The ledger, and which file it is in."""

_SYNCHRONOUS = ("full", "normal")
_MAX_TIMEOUT = 86_400.0
_MAX_VALUE_BYTES = 999_000_000  # SQLite's own limit is 10**9, for a row with its key
_MAX_VARIABLES = 30_000  # of one statement; SQLite's own limit is 32,766

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
# Files of before reports do not have it, and are read all the same.
_REPORTS_TABLE = """
CREATE TABLE IF NOT EXISTS mapstate_reports (number INTEGER PRIMARY KEY, state TEXT NOT NULL, report BLOB NOT NULL)
"""
_HAS_REPORTS = "SELECT 1 FROM sqlite_master WHERE name = 'mapstate_reports'"
_DROP_REPORTS = """
DELETE FROM mapstate_reports WHERE state = ? AND number NOT IN
    (SELECT number FROM mapstate_reports WHERE state = ? ORDER BY number DESC LIMIT ?)
"""
# REPLACE looks for the row once, an upsert twice; a statement of many rows spares a step for each (35 % together).
_ROWS_AT_ONCE = 50
_MOST_AT_ONCE = 65_536  # bytes of a record, beyond which it goes alone: what a statement was given stays in memory
_PUT = "REPLACE INTO mapstate_records VALUES (?, ?, ?)"
_PUT_MANY = _PUT + ", (?, ?, ?)" * (_ROWS_AT_ONCE - 1)


@dataclass(frozen=True)
class SqliteBackend:
    """A file, and how to open it.

    ``path``             made absolute at once, because executors have other working directories
    ``timeout``          seconds to wait for another writer before StoreUnavailableError; nothing asks again after it
    ``synchronous``      "full": a commit is on the disk before it is reported. "normal": the last ones may be
                         lost with the machine's power, but not with the process
    ``max_value_bytes``  larger records are refused
    """

    path: str
    timeout: float = 30.0
    synchronous: str = "full"
    max_value_bytes: int = _MAX_VALUE_BYTES

    shared_between_processes = True

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
        options = dict(parse_qsl(query, keep_blank_values=True))
        unknown = options.keys() - {"timeout", "synchronous", "max_value_bytes"}
        if unknown:
            raise ConfigurationError(
                f"sqlite:// has no parameter {', '.join(sorted(unknown))}; it has timeout, synchronous, max_value_bytes"
            )
        given: dict[str, Any] = dict(options)
        for name, number in (("timeout", float), ("max_value_bytes", int)):
            if name in options:
                try:
                    given[name] = number(options[name])
                except ValueError as error:
                    raise ConfigurationError(f"{name} in a sqlite:// URL is a number, not {options[name]!r}") from error
        return cls(path if slash else "", **given)

    def open(self, state: str, *, ttl: float | None = None) -> SqliteStore:
        """See `Backend.open`. The file is opened with the first call that needs it."""
        if ttl is not None:
            raise ConfigurationError(
                "SQLite has no expiry, so sqlite:// has no ttl: leave it out, or take a store that drops records by "
                "itself"
            )
        return SqliteStore(self, state)


class SqliteStore:
    """The records, the ledger and the fence of one state in a file. May be used from several threads.

    Every call is one transaction of its own. Connections are kept between calls, as many as there were
    calls at one time; `close` lets them go.
    """

    def __init__(self, backend: SqliteBackend, state: str) -> None:
        self._backend = backend
        self._path = backend.path
        self._state = state
        self._idle: list[_Connection] = []
        _gate.add(self)

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `IBackingMap.multi_get`. All keys are read from one snapshot."""
        if not keys:
            return []
        found = self._transaction("BEGIN", lambda db: self._records(db, keys))
        return found or [None] * len(keys)

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """See `IBackingMap.multi_put`. All of them or none."""
        rows = self._rows(keys, values)
        if rows:
            self._transaction("BEGIN IMMEDIATE", lambda db: _put(db, rows), create=True)

    def load(self) -> tuple[bytes, _Version] | None:
        """See `LedgerStore.load`. The version is the record, no two openings write the same, and the file it is in."""
        version = self._transaction("BEGIN", self._version)
        return None if version is None else (version[0], version)

    def swap(self, record: bytes, expected: _Version | None, fence: FenceToken) -> _Version | None:
        """See `LedgerStore.swap`."""
        done = self.swap_all([Swap(self, record, expected, fence)])
        return None if done is None else done[0]

    def ledger_place(self) -> tuple[str, str]:
        """See `JointLedgers.ledger_place`: the file, and when what was written to it is on the disk."""
        return self._path, self._backend.synchronous

    def swap_all(self, swaps: Sequence[Swap]) -> list[_Version] | None:
        """See `JointLedgers.swap_all`: one transaction."""

        def compare_and_set(db: _Connection) -> list[_Version] | None:
            if any(one.store._version(db) != one.expected for one in swaps):
                return None
            for one in swaps:
                state = one.store._state
                db.execute("REPLACE INTO mapstate_ledgers VALUES (?, ?, ?, ?, ?, ?)", (state, one.record, *one.fence))
                db.execute("DELETE FROM mapstate_claims WHERE state = ?", (state,))
            return [(one.record, db.identity) for one in swaps]

        create = any(one.expected is None for one in swaps)
        return self._transaction("BEGIN IMMEDIATE", compare_and_set, create=create)

    def multi_get_with_ledger(self, keys: Sequence[str]) -> tuple[bytes | None, list[bytes | None], bytes | None]:
        """See `LedgerReads.multi_get_with_ledger`. One snapshot, so the ledger is the same before and after."""
        found = self._transaction("BEGIN", lambda db: (self._ledger(db), self._records(db, keys)))
        if found is None:
            return None, [None] * len(keys), None
        ledger, records = found
        return ledger, records, ledger

    def writer(self, token: FenceToken) -> IBackingMap[str, bytes]:
        """See `FencedWrites.writer`."""
        return _Writer(self, token)

    def claim(self, txid: int, partition: int, holder: str) -> str:
        """See `Claims.claim`."""
        place = (self._state, txid, partition)

        def create_if_absent(db: sqlite3.Connection) -> str:
            db.execute("INSERT OR IGNORE INTO mapstate_claims VALUES (?, ?, ?, ?)", (*place, holder))
            ask = "SELECT holder FROM mapstate_claims WHERE state = ? AND txid = ? AND partition = ?"
            return str(db.execute(ask, place).fetchone()[0])

        return self._transaction("BEGIN IMMEDIATE", create_if_absent, create=True) or holder

    def scan(self, page_size: int) -> Iterator[list[str]]:
        """See `Scan.scan`. In the order of the keys; nothing is locked between two pages."""
        page: list[Any] = self._page(None, page_size)
        other: list[str] = []
        while page:
            keys = [key for key in page if isinstance(key, str)]
            if keys:
                yield keys
            other += [repr(key) for key in page if not isinstance(key, str)]
            page = self._page(page[-1], page_size)
        if other:
            raise CorruptRecordError(
                f"state {self._state!r}: the row with the key {other[0][:100]} is no record, its key is no text: "
                "something else writes into this table. It was left as it is. Delete it.",
                state=self._state,
                keys=other[:MOST_NAMED],
                count=len(other),
            )

    def keep_report(self, report: bytes, most: int) -> None:
        """See `Reports.keep_report`."""
        state = self._state

        def keep(db: sqlite3.Connection) -> None:
            db.execute(_REPORTS_TABLE)
            db.execute("INSERT INTO mapstate_reports (state, report) VALUES (?, ?)", (state, report))
            db.execute(_DROP_REPORTS, (state, state, most))

        self._transaction("BEGIN IMMEDIATE", keep)

    def reports(self) -> list[bytes]:
        """See `Reports.reports`."""

        def newest_first(db: sqlite3.Connection) -> list[bytes]:
            if db.execute(_HAS_REPORTS).fetchone() is None:
                return []
            ask = "SELECT report FROM mapstate_reports WHERE state = ? ORDER BY number DESC"
            return [report for (report,) in db.execute(ask, (self._state,))]

        return self._transaction("BEGIN", newest_first) or []

    def drop(self, expected: _Version, token: FenceToken) -> Iterator[int]:
        """See `Drops.drop`: one transaction."""
        state = (self._state,)

        def remove(db: _Connection) -> int | None:
            if self._version(db) != expected:
                return None
            count: int = db.execute("DELETE FROM mapstate_records WHERE state = ?", state).rowcount
            db.execute("DELETE FROM mapstate_claims WHERE state = ?", state)
            if db.execute(_HAS_REPORTS).fetchone() is not None:
                db.execute("DELETE FROM mapstate_reports WHERE state = ?", state)
            db.execute("DELETE FROM mapstate_ledgers WHERE state = ?", state)
            return count

        count = self._transaction("BEGIN IMMEDIATE", remove)
        if count is None:
            raise FencedError(
                f"the ledger of state {self._state!r} has changed: the removal with txid {token.txid} ends here",
                state=self._state,
                txid=token.txid,
            )
        yield count

    def checkup(self, replay_horizon: float) -> list[Finding]:  # noqa: ARG002
        """See `Checkup.checkup`. Reads the whole file."""

        def look(db: sqlite3.Connection) -> tuple[str, list[str]]:
            journal = str(db.execute("PRAGMA journal_mode").fetchone()[0])
            return journal, [str(line) for (line,) in db.execute("PRAGMA integrity_check(5)")]

        found = self._transaction("BEGIN", look)
        return [] if found is None else list(judge(self._path, self._backend.synchronous, *found))

    def put_fenced(self, token: FenceToken, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """`multi_put`, if ``token`` is the fence."""
        rows = self._rows(keys, values)
        self._fenced(token, lambda db: _put(db, rows))

    def rewrite_fenced(self, token: FenceToken, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """See `Rewrites.multi_rewrite`, if ``token`` is the fence."""
        check_lengths(keys, values, "values")
        kept = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        rows = self._rows(list(kept), list(kept.values()))
        gone = [(self._state, key) for key in sorted(set(keys) - kept.keys())]

        def rewrite(db: sqlite3.Connection) -> None:
            changed = [(record, state, key) for state, key, record in rows]
            db.executemany("UPDATE mapstate_records SET record = ? WHERE state = ? AND key = ?", changed)
            db.executemany("DELETE FROM mapstate_records WHERE state = ? AND key = ?", gone)

        self._fenced(token, rewrite)

    def _fenced(self, token: FenceToken, write: Callable[[sqlite3.Connection], None]) -> None:
        """Does ``write`` if ``token`` is the fence, in one transaction. Raises FencedError."""

        def check_and_write(db: sqlite3.Connection) -> FenceToken | None:
            ask = "SELECT fence_epoch, fence_txid, fence_closed, fence_nonce FROM mapstate_ledgers WHERE state = ?"
            row = db.execute(ask, (self._state,)).fetchone()
            fence = None if row is None else FenceToken(row[0], row[1], bool(row[2]), row[3])
            if fence == token and not token.closed:
                write(db)
            return fence

        fence = self._transaction("BEGIN IMMEDIATE", check_and_write)
        if fence != token or token.closed:
            raise FencedError(
                f"state {self._state!r}: the attempt with txid {token.txid} of epoch {token.epoch} may not write now; "
                f"the fence is at {fence}",
                state=self._state,
                txid=token.txid,
            )

    def close(self) -> None:
        """Closes this store's idle connections. Closing twice is no error; a later call opens again."""
        while (db := self._pop()) is not None:
            db.close()

    def _version(self, db: _Connection) -> _Version | None:
        record = self._ledger(db)
        return None if record is None else (record, db.identity)

    def _ledger(self, db: sqlite3.Connection) -> bytes | None:
        row = db.execute("SELECT record FROM mapstate_ledgers WHERE state = ?", (self._state,)).fetchone()
        return None if row is None else row[0]

    def _records(self, db: sqlite3.Connection, keys: Sequence[str]) -> list[bytes | None]:
        found: dict[str, bytes] = {}
        for at in range(0, len(keys), _MAX_VARIABLES):
            some = keys[at : at + _MAX_VARIABLES]
            ask = f"SELECT key, record FROM mapstate_records WHERE state = ? AND key IN ({'?,' * (len(some) - 1)}?)"  # noqa: S608  only question marks
            found.update(db.execute(ask, (self._state, *some)).fetchall())
        return list(map(found.get, keys))

    def _rows(self, keys: Sequence[str], values: Sequence[bytes]) -> list[tuple[str, str, bytes]]:
        """What `_put` takes, in the order of the keys, which is the order of the file."""
        check_lengths(keys, values, "values")
        limit = self._backend.max_value_bytes
        if max(map(len, values), default=0) > limit:
            key, size = next((key, len(value)) for key, value in zip(keys, values, strict=True) if len(value) > limit)
            raise TooLargeError(
                f"state {self._state!r}, key {shown(key)}: the record has {size} bytes, and this store takes at most "
                f"{limit}. Nothing was written.",
                state=self._state,
                key=key,
                size=size,
                limit=limit,
            )
        state, last = self._state, dict(zip(keys, values, strict=True))
        return [(state, key, last[key]) for key in sorted(last)]

    def _page(self, after: str | None, page_size: int) -> list[str]:
        where, known = ("", (self._state,)) if after is None else (" AND key > ?", (self._state, after))
        ask = f"SELECT key FROM mapstate_records WHERE state = ?{where} ORDER BY key LIMIT ?"  # noqa: S608  fixed text
        return self._transaction("BEGIN", lambda db: [key for (key,) in db.execute(ask, (*known, page_size))]) or []

    def _transaction(self, begin: str, work: Callable[[_Connection], T], *, create: bool = False) -> T | None:
        """What ``work`` returns, done in one transaction; None where there is no file or no table.

        With ``create`` these are made. After any error all is rolled back and the connection closed.
        """
        with _gate:
            db: _Connection | None = None
            try:
                db = self._connection(create=create)
                if db is None:
                    return None
                if not db.has_tables:
                    db.set_up(self._backend, create=create)
                db.execute(begin)
                if not db.has_tables:
                    db.find_tables(create=create)
                result = work(db) if db.has_tables else None
                db.execute("COMMIT")
                self._idle.append(db)
                db = None
            except (sqlite3.Error, OSError, UnicodeError) as error:
                raise self._translated(error) from error
            finally:
                if db is not None:
                    db.abandon()
            return result

    def _connection(self, *, create: bool) -> _Connection | None:
        """An idle connection, or a new one; None where there is no file and none shall be made.

        A file that was deleted or replaced would stay open and take writes that nobody else ever sees. So
        a connection is used only while its file is the one under the path.
        """
        now = _identity(self._path)
        if now is None and not create:
            return None
        while (idle := self._pop()) is not None:
            if idle.identity == now:
                return idle
            idle.close()
        db = sqlite3.connect(
            f"file:{quote(os.fsencode(self._path))}?mode={'rwc' if create else 'rw'}",
            uri=True,
            timeout=self._backend.timeout,
            isolation_level=None,  # transactions begin where we say
            check_same_thread=False,  # one thread at a time uses it, not always the same
            factory=_Connection,
        )
        db.identity = now or _identity(self._path)
        return db

    def _pop(self) -> _Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _translated(self, error: sqlite3.Error | OSError | UnicodeError) -> MapStateError:
        """Ours for SQLite's: the one place."""
        if isinstance(error, UnicodeEncodeError):
            return KeyEncodingError(f"a key of state {self._state!r} is no valid text: {cut(error)}", state=self._state)
        code = getattr(error, "sqlite_errorcode", 0) if isinstance(error, sqlite3.Error) else sqlite3.SQLITE_CANTOPEN
        if isinstance(error, UnicodeError) or str(error).startswith(_NO_TEXT):
            code = sqlite3.SQLITE_CORRUPT  # bytes of the file, in SQLite's own message or where a text should be
        kind, what = _TRANSLATIONS.get(code & 0xFF, (StoreError, "could not be read or written"))
        folder = Path(self._path).parent
        if kind is StoreUnavailableError and not folder.is_dir():
            what = f"cannot be opened, because there is no directory {str(folder)!r}: make it first"
        what = what.replace("TIMEOUT", f"{self._backend.timeout:g} s")
        return kind(
            f"the SQLite file {self._path!r} {what} ({cut(error)})",
            path=self._path,
            state=self._state,
            waited=code & 0xFF in _WAITED,
        )


class _Connection(sqlite3.Connection):
    """A connection that knows which file it opened, and whether our tables are in it."""

    identity: tuple[int, int] | None = None
    has_tables = False

    def set_up(self, backend: SqliteBackend, *, create: bool) -> None:
        """Before the first transaction."""
        self.execute(f"PRAGMA synchronous = {backend.synchronous}")
        self.execute("PRAGMA cache_size = -16000")  # 16 MB here and 32 MB of WAL:
        self.execute("PRAGMA wal_autocheckpoint = 8000")  # chunks rewrite the same pages again and again
        if create:
            self._into_wal(backend.timeout)

    def _into_wal(self, timeout: float) -> None:
        """Waits as SQLite's own timeout does not: where several change a new file to WAL, all but one fail at once."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def find_tables(self, *, create: bool) -> None:
        """Inside the first transaction."""
        for table in _TABLES.split(";") if create else ():
            self.execute(table)
        self.has_tables = bool(self.execute(_COUNT_TABLES).fetchone()[0])

    def abandon(self) -> None:
        """Rolls back and closes. Closing alone would wait for a cursor that some traceback still holds."""
        with suppress(sqlite3.Error):
            if self.in_transaction:
                self.execute("ROLLBACK")
        self.close()

    def __del__(self) -> None:
        with suppress(sqlite3.Error):  # Python 3.13 warns of one that is dropped open, as those of a dropped store are
            self.close()


class _Writer:
    def __init__(self, store: SqliteStore, token: FenceToken) -> None:
        self._store = store
        self._token = token
        self.multi_get = store.multi_get

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._store.put_fenced(self._token, keys, values)

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """See `Rewrites.multi_rewrite`."""
        self._store.rewrite_fenced(self._token, keys, values)


class _ForkGate:
    """Sees to it that no connection is open while this process forks.

    SQLite keeps its file locks in the process's memory. A child of a process that has a file open inherits
    the memory but not the locks: it writes to the file without them, and what it commits can be lost
    (seen: the parent closes last, as it thinks, and deletes the WAL). So a fork waits for the calls that
    are running, and idle connections are closed before it. Both sides open anew what they need.
    """

    def __init__(self) -> None:
        self._stores: WeakSet[SqliteStore] = WeakSet()
        self._changed = threading.Condition()
        self._running = 0
        self._forking = False

    def add(self, store: SqliteStore) -> None:
        with self._changed:
            self._stores.add(store)

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
        for store in self._stores:
            store.close()

    def after_fork(self) -> None:
        self._forking = False
        self._changed.notify_all()
        self._changed.release()


_gate = _ForkGate()
os.register_at_fork(before=_gate.before_fork, after_in_parent=_gate.after_fork, after_in_child=_gate.after_fork)

_LOCKED = (
    StoreUnavailableError,
    "was locked for more than TIMEOUT by another writer, of any state in it, by a backup or a sqlite3 shell: see fuser",
)
_WAITED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_NO_TEXT = "Could not decode to UTF-8"
_DAMAGED = (
    CorruptStoreError,
    "is damaged, or no SQLite database. Nothing was written. Look at the path, or restore the file from a copy",
)
_CANNOT_OPEN = (
    StoreUnavailableError,
    "cannot be opened: look whether it is a file, and whether this user may write to it and its directory",
)
_TRANSLATIONS: dict[int, tuple[type[MapStateError], str]] = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_PROTOCOL: _LOCKED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_CANTOPEN: _CANNOT_OPEN,
    sqlite3.SQLITE_PERM: _CANNOT_OPEN,
    sqlite3.SQLITE_IOERR: (StoreUnavailableError, "could not be read or written by the operating system"),
    sqlite3.SQLITE_FULL: (StoreFullError, "cannot grow: the disk or a quota is full. Nothing was written"),
    sqlite3.SQLITE_READONLY: (StoreError, "may only be read by this user, or its directory or its disk may"),
    sqlite3.SQLITE_TOOBIG: (TooLargeError, "takes no row of more than 10**9 bytes, key and record together"),
}


def _identity(path: str) -> tuple[int, int] | None:
    """Which file is under a path now; None where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116  once per call, and Path costs more than the call
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _put(db: sqlite3.Connection, rows: list[tuple[str, str, bytes]]) -> None:
    are_small = max(map(len, map(itemgetter(2), rows)), default=0) <= _MOST_AT_ONCE
    whole = len(rows) - len(rows) % _ROWS_AT_ONCE if are_small else 0
    for at in range(0, whole, _ROWS_AT_ONCE):
        db.execute(_PUT_MANY, tuple(chain.from_iterable(rows[at : at + _ROWS_AT_ONCE])))
    db.executemany(_PUT, rows[whole:])
