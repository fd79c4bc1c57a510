"""What only operators, scans and readers of one moment ask of a SQLite file: listings, removal, checkup, snapshot."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mapstate.backends.sqlite.connection import Connection, Database, fork_gate, identity_of
from mapstate.backends.sqlite.problems import DRIVER_ERRORS
from mapstate.capabilities import FenceToken
from mapstate.errors import FencedError, UsageError
from mapstate.findings import Finding

T = TypeVar("T")

_HAS_REPORTS = "SELECT 1 FROM sqlite_master WHERE name = 'mapstate_reports'"  # which older files lack
_MOUNTS = Path("/proc/mounts")
_REMOTE = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "gluster", "lustre", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse")


def states_in(database: Database) -> Iterator[list[tuple[str, bytes]]]:
    """See `ListsStates.states`. Closes the file."""
    ask = "SELECT state, record FROM mapstate_ledgers ORDER BY state"
    try:
        yield database.transaction("BEGIN", lambda db: db.execute(ask).fetchall()) or []
    finally:
        database.close()


def in_order(after: Any, db: Connection, ask: str, values: Sequence[Any]) -> list[Any]:
    """The page of keys behind ``after``. Raises DatabaseError for a damaged file, whose scan would never end."""
    keys = [key for (key,) in db.execute(ask, values)]
    is_in_order = "SELECT ? IS NULL OR ? > ?"
    if keys and (keys[-1] is None or not db.execute(is_in_order, (after, keys[-1], after)).fetchone()[0]):
        problem = sqlite3.DatabaseError("its keys are out of order")
        problem.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise problem
    return keys


def ends_of_parts(db: Connection, state: str, most: int) -> list[str]:
    """The last key of each part but the last one: at most ``most`` parts of about as many keys."""
    count = db.execute("SELECT count(*) FROM mapstate_records WHERE state = ?", (state,)).fetchone()[0]
    size, after = -(-count // most), ""
    ends: list[str] = []
    ask = "SELECT key FROM mapstate_records WHERE state = ? AND key > ? ORDER BY key LIMIT 1 OFFSET ?"
    while size and len(ends) < most - 1:
        row = db.execute(ask, (state, after, size - 1)).fetchone()
        if row is None or not isinstance(row[0], str):  # a row of something else: the last part reports it
            break
        after = row[0]
        ends.append(after)
    return ends


def reports_of(db: Connection, state: str) -> list[bytes]:
    """The batch reports, newest first."""
    if db.execute(_HAS_REPORTS).fetchone() is None:
        return []
    ask = "SELECT report FROM mapstate_reports WHERE state = ? ORDER BY number DESC"
    return [report for (report,) in db.execute(ask, (state,))]


def removed(database: Database, state: str, token: FenceToken, is_expected: Callable[[Connection], bool]) -> int:
    """Remove all of a state if its ledger is the expected one, and return the number of records. Raises FencedError."""

    def remove(db: Connection) -> int | None:
        if not is_expected(db):
            return None
        count: int = db.execute("DELETE FROM mapstate_records WHERE state = ?", (state,)).rowcount
        db.execute("DELETE FROM mapstate_claims WHERE state = ?", (state,))
        if db.execute(_HAS_REPORTS).fetchone() is not None:
            db.execute("DELETE FROM mapstate_reports WHERE state = ?", (state,))
        db.execute("DELETE FROM mapstate_ledgers WHERE state = ?", (state,))
        return count

    count = database.transaction("BEGIN IMMEDIATE", remove)
    if count is None:
        raise FencedError(
            f"the ledger of state {state!r} has changed: the removal with txid {token.txid} ends here",
            state=state,
            txid=token.txid,
        )
    return count


def scrub(database: Database) -> list[str]:
    """Write the whole file anew without what was removed, and empty the WAL. Returns what could not be emptied."""
    with fork_gate:
        try:
            db = database.connect("rw")
            try:
                db.set_up(database.synchronous, database.timeout, create=False)
                db.execute("VACUUM")
                is_busy = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            finally:
                db.close()
        except DRIVER_ERRORS as error:
            raise database.problem(error) from error
    return ["the WAL of the SQLite file, which another connection is reading: run it again"] if is_busy else []


class FrozenDatabase(Database):
    """A `Database` of one transaction, which begins with the first call and ends with a fork. One thread at a time."""

    _frozen: Connection | None = None
    _has_begun = False

    def transaction(self, begin: str, work: Callable[[Connection], T], *, create: bool = False) -> T | None:
        """See `Database.transaction`. Raises UsageError for one that writes, and after the end."""
        state = self.state
        if begin != "BEGIN" or create:
            raise UsageError(f"state {state!r} was opened as of one moment, to be read only. Nothing was written.")
        with fork_gate:
            try:
                if not self._has_begun:
                    self._has_begun = True
                    self._begin()
                if self._frozen is None:
                    raise UsageError(f"state {state!r} as of one moment is closed, or the process has forked since")
                return work(self._frozen) if self._frozen.has_tables else None
            except DRIVER_ERRORS as error:
                raise self.problem(error) from error

    def close(self) -> None:
        """End the transaction. Closing twice is no error."""
        self._has_begun = True
        if self._frozen is not None:
            self._frozen.abandon()
            self._frozen = None

    def _begin(self) -> None:
        self._frozen = self.connect("rw" if identity_of(self.path) else "memory")
        self._frozen.identity = identity_of(self.path)
        self._frozen.set_up(self.synchronous, self.timeout, create=False)
        self._frozen.execute("BEGIN")
        self._frozen.find_tables(create=False)


def verified(db: sqlite3.Connection) -> tuple[str, list[str]]:
    """What SQLite says of a file: its journal mode, and the result of an integrity check."""
    journal = str(db.execute("PRAGMA journal_mode").fetchone()[0])
    return journal, [str(line) for (line,) in db.execute("PRAGMA integrity_check(5)")]


def judge(path: str, synchronous: str, journal: str, integrity: list[str]) -> Iterator[Finding]:
    """The findings. ``integrity`` is the result of PRAGMA integrity_check, ``journal`` that of PRAGMA journal_mode."""
    bad = integrity != ["ok"]
    advice = "Stop the job, and restore the file from a copy." if bad else ""
    yield Finding("error" if bad else "ok", "integrity_check", "; ".join(integrity)[:500], "ok", advice)
    bad = journal != "wal"
    advice = "Somebody changed it: PRAGMA journal_mode = WAL. Until then readers and the writer wait for each other."
    yield Finding("warning" if bad else "ok", "journal mode", journal, "wal", advice if bad else "")
    bad = synchronous != "full"
    advice = "Take synchronous=normal out of the URL, unless a rewind after a power failure is acceptable."
    setting = f"{synchronous}, as this URL asks for"
    yield Finding("warning" if bad else "ok", "synchronous", setting, "full", advice if bad else "")
    yield _disk(path)
    yield _file_system(path)


def _disk(path: str) -> Finding:
    free, size = shutil.disk_usage(Path(path).parent).free, Path(path).stat().st_size
    setting = f"{free // 2**20} MiB free, the file has {size // 2**20} MiB"
    expected = "room for as much again, and for 64 MiB of WAL"
    if free >= max(size, 2**26):
        return Finding("ok", "disk", setting, expected)
    advice = "Make room: where there is none, batches fail until there is."
    return Finding("error" if free < 2**26 else "warning", "disk", setting, expected, advice)


def _file_system(path: str) -> Finding:
    expected = "a local disk: WAL does not work over a network"
    try:
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return Finding("ok", "file system", "cannot be told on this system", expected)
    folders = {str(folder) for folder in Path(path).resolve().parents}
    kinds = {place.replace("\\040", " "): kind for place, kind in mounts}
    kind = kinds[max((place for place in kinds if place in folders), key=len, default="/")] if kinds else "unknown"
    remote = kind.startswith(_REMOTE)
    advice = "Move the file to a local disk, or take redis://." if remote else ""
    return Finding("error" if remote else "ok", "file system", kind, expected, advice)
