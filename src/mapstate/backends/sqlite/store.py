"""One state in a SQLite file: its records, its ledger and its fence."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Literal

from mapstate.backends.sqlite.connection import Connection, Database
from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.capabilities import FenceToken, Swap
from mapstate.errors import FencedError, TooLargeError, UsageError, shown
from mapstate.findings import Finding, not_listed

_Version = tuple[bytes, "tuple[int, int] | None"]
"""The ledger, and the identity of the file that it was read from."""

_AFTER = "after "
"""What a cursor of a scan begins with, in front of a key."""

_MAX_VARIABLES = 30_000  # of one statement; SQLite's own limit is 32,766

# A file that was made before there were reports lacks this table.
_REPORTS_TABLE = """
CREATE TABLE IF NOT EXISTS mapstate_reports (number INTEGER PRIMARY KEY, state TEXT NOT NULL, report BLOB NOT NULL)
"""
_DROP_REPORTS = """
DELETE FROM mapstate_reports WHERE state = ? AND number NOT IN
    (SELECT number FROM mapstate_reports WHERE state = ? ORDER BY number DESC LIMIT ?)
"""
# REPLACE looks for the row once, an upsert twice. A statement of many rows saves a step for each.
_ROWS_AT_ONCE = 50
_MOST_AT_ONCE = 65_536  # bytes of a record; larger ones go one by one, because a statement keeps its values in memory
_PUT = "REPLACE INTO mapstate_records VALUES (?, ?, ?)"
_PUT_MANY = _PUT + ", (?, ?, ?)" * (_ROWS_AT_ONCE - 1)
_DELETE = "DELETE FROM mapstate_records WHERE state = ? AND key IN (?)"
_DELETE_MANY = _DELETE.replace("(?)", f"(?{', ?' * (_ROWS_AT_ONCE - 1)})")


class SqliteStore:
    """The records, the ledger and the fence of one state in a file. Each call is a transaction. Any thread may call."""

    thread_safe: Literal[True] = True

    def __init__(self, database: Database, state: str, *, max_value_bytes: int) -> None:
        self._database = database
        self._state = state
        self._limit = max_value_bytes

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `IBackingMap.multi_get`. All keys are read from one snapshot."""
        if not keys:
            return []
        records = self._database.transaction("BEGIN", lambda db: self._records(db, keys))
        return records or [None] * len(keys)

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """See `IBackingMap.multi_put`. All of them or none."""
        rows = self._rows(keys, values)
        if rows:
            self._database.transaction("BEGIN IMMEDIATE", lambda db: _put(db, rows), create=True)

    def load(self) -> tuple[bytes, _Version] | None:
        """See `LedgerStore.load`. The version is the record and the file: no two openings write the same record."""
        version = self._database.transaction("BEGIN", self._version)
        return None if version is None else (version[0], version)

    def probe(self) -> None:
        """See `Probes.probe`: takes the lock of a writer. Makes no file."""
        self._database.probe()

    def swap(self, record: bytes, expected: _Version | None, fence: FenceToken) -> _Version | None:
        done = self.swap_all([Swap(self, record, expected, fence)])
        return None if done is None else done[0]

    def commit_domain(self) -> tuple[str, str]:
        """See `JointLedgers.commit_domain`: the file, and when a commit is on its disk."""
        return self._database.path, self._database.synchronous

    def swap_all(self, swaps: Sequence[Swap]) -> list[_Version] | None:
        def compare_and_set(db: Connection) -> list[_Version] | None:
            if any(swap.store._version(db) != swap.expected for swap in swaps):
                return None
            for swap in swaps:
                if len(swaps) > 1 and swap.expected is not None and swap.expected[0] == swap.record:
                    continue
                state = swap.store._state
                db.execute("REPLACE INTO mapstate_ledgers VALUES (?, ?, ?, ?, ?, ?)", (state, swap.record, *swap.fence))
                db.execute("DELETE FROM mapstate_claims WHERE state = ?", (state,))
            return [(swap.record, db.identity) for swap in swaps]

        create = any(swap.expected is None for swap in swaps)
        return self._database.transaction("BEGIN IMMEDIATE", compare_and_set, create=create)

    def multi_get_with_ledger(self, keys: Sequence[str]) -> tuple[bytes | None, list[bytes | None], bytes | None]:
        """See `LedgerReads.multi_get_with_ledger`. One snapshot, so the ledger is the same before and after."""
        answer = self._database.transaction("BEGIN", lambda db: (self._ledger(db), self._records(db, keys)))
        if answer is None:
            return None, [None] * len(keys), None
        ledger, records = answer
        return ledger, records, ledger

    def writer(self, token: FenceToken) -> IBackingMap[str, bytes]:
        return _Writer(self, token)

    def claim(self, txid: int, partition: int, holder: str) -> str:
        place = (self._state, txid, partition)

        def create_if_absent(db: sqlite3.Connection) -> str:
            db.execute("INSERT OR IGNORE INTO mapstate_claims VALUES (?, ?, ?, ?)", (*place, holder))
            ask = "SELECT holder FROM mapstate_claims WHERE state = ? AND txid = ? AND partition = ?"
            return str(db.execute(ask, place).fetchone()[0])

        return self._database.transaction("BEGIN IMMEDIATE", create_if_absent, create=True) or holder

    def scan(self, page_size: int) -> Iterator[list[str]]:
        """See `Scan.scan`. In the order of the keys; no lock is held between two pages."""
        return (page for page, _ in self.scan_from("", page_size))

    def scan_from(self, cursor: str, page_size: int) -> Iterator[tuple[list[str], str]]:
        """See `ScansFrom.scan_from`. A cursor has the last key, and outlives every process."""
        if cursor and not cursor.startswith(_AFTER):
            raise UsageError(f"this is no cursor of a scan of state {self._state!r}. Nothing was read.")
        pages = self._listed(page_size, cursor.removeprefix(_AFTER) if cursor else None)
        return ((page, _AFTER + page[-1]) for page in pages)

    def scan_parts(self, most: int) -> list[str]:
        """See `ScansParts.scan_parts`: ranges of keys. SQLite walks through the rows once to find their ends."""
        from mapstate.backends.sqlite.operations import ends_of_parts

        ends = self._database.transaction("BEGIN", lambda db: ends_of_parts(db, self._state, most)) or []
        return [json.dumps(part) for part in zip([None, *ends], [*ends, None], strict=True)]

    def scan_part(self, part: str, page_size: int) -> Iterator[list[str]]:
        return self._listed(page_size, *json.loads(part))

    def _listed(self, page_size: int, after: Any, until: str | None = None) -> Iterator[list[str]]:
        """Pages of keys in their order. Raises CorruptRecordError at the end for keys that are no text."""
        foreign: list[str] = []
        while page := self._page(after, until, page_size):
            if keys := [key for key in page if isinstance(key, str)]:
                yield keys
            foreign += [repr(key) for key in page if not isinstance(key, str)]
            after = page[-1]
        if foreign:
            problem = f"the row with the key {foreign[0][:100]} is no record, its key is no text: something else writes"
            raise not_listed(self._state, foreign, f"{problem} into this table. It was left as it is. Delete it.")

    def _page(self, after: Any, until: str | None, page_size: int) -> list[Any]:
        from mapstate.backends.sqlite.operations import in_order

        bounds = [(" AND key > ?", after), (" AND key <= ?", until)]
        where = "".join(text for text, bound in bounds if bound is not None)
        values = (self._state, *(bound for _, bound in bounds if bound is not None), page_size)
        ask = f"SELECT key FROM mapstate_records WHERE state = ?{where} ORDER BY key LIMIT ?"  # noqa: S608  fixed text
        return self._database.transaction("BEGIN", lambda db: in_order(after, db, ask, values)) or []

    def keep_report(self, report: bytes, most: int) -> None:
        state = self._state

        def keep(db: sqlite3.Connection) -> None:
            db.execute(_REPORTS_TABLE)
            db.execute("INSERT INTO mapstate_reports (state, report) VALUES (?, ?)", (state, report))
            db.execute(_DROP_REPORTS, (state, state, most))

        self._database.transaction("BEGIN IMMEDIATE", keep)

    def reports(self) -> list[bytes]:
        from mapstate.backends.sqlite.operations import reports_of

        return self._database.transaction("BEGIN", lambda db: reports_of(db, self._state)) or []

    def drop(self, expected: _Version, token: FenceToken) -> Iterator[int]:
        from mapstate.backends.sqlite.operations import removed

        yield removed(self._database, self._state, token, lambda db: self._version(db) == expected)

    def scrub(self) -> list[str]:
        """See `Scrubs.scrub`: VACUUM writes the file anew, and the WAL is emptied."""
        from mapstate.backends.sqlite.operations import scrub

        return scrub(self._database)

    def checkup(self, replay_horizon: float) -> list[Finding]:  # noqa: ARG002
        """See `Checkup.checkup`. Reads the whole file."""
        from mapstate.backends.sqlite.operations import judge, verified

        problems = self._database.transaction("BEGIN", verified)
        return [] if problems is None else list(judge(self._database.path, self._database.synchronous, *problems))

    def _fenced(self, token: FenceToken, write: Callable[[sqlite3.Connection], None]) -> None:
        """Call ``write`` if ``token`` is the fence, in one transaction. Raises FencedError."""

        def check_and_write(db: sqlite3.Connection) -> FenceToken | None:
            ask = "SELECT fence_epoch, fence_txid, fence_closed, fence_nonce FROM mapstate_ledgers WHERE state = ?"
            row = db.execute(ask, (self._state,)).fetchone()
            fence = None if row is None else FenceToken(row[0], row[1], bool(row[2]), row[3])
            if fence == token and not token.closed:
                write(db)
            return fence

        fence = self._database.transaction("BEGIN IMMEDIATE", check_and_write)
        if fence != token or token.closed:
            raise FencedError(
                f"state {self._state!r}: the attempt with txid {token.txid} of epoch {token.epoch} may not write now; "
                f"the fence is at {fence}",
                state=self._state,
                txid=token.txid,
            )

    def close(self) -> None:
        """Close this store's idle connections. Closing twice is no error; a later call opens again."""
        self._database.close()

    def _version(self, db: Connection) -> _Version | None:
        record = self._ledger(db)
        return None if record is None else (record, db.identity)

    def _ledger(self, db: sqlite3.Connection) -> bytes | None:
        row = db.execute("SELECT record FROM mapstate_ledgers WHERE state = ?", (self._state,)).fetchone()
        return None if row is None else row[0]

    def _records(self, db: sqlite3.Connection, keys: Sequence[str]) -> list[bytes | None]:
        records: dict[str, bytes] = {}
        for i in range(0, len(keys), _MAX_VARIABLES):
            some = keys[i : i + _MAX_VARIABLES]
            ask = f"SELECT key, record FROM mapstate_records WHERE state = ? AND key IN ({'?,' * (len(some) - 1)}?)"  # noqa: S608  only question marks
            records.update(db.execute(ask, (self._state, *some)).fetchall())
        return list(map(records.get, keys))

    def _rows(self, keys: Sequence[str], values: Sequence[bytes]) -> list[tuple[str, str, bytes]]:
        """The rows for `_put`, in the order of their keys, which is the order of the file."""
        check_lengths(keys, values, "values")
        limit = self._limit
        if max(map(len, values), default=0) > limit:
            key, size = next((key, len(value)) for key, value in zip(keys, values, strict=True) if len(value) > limit)
            raise TooLargeError(
                f"state {self._state!r}, key {shown(key)}: the record has {size} bytes, and this store takes at most "
                f"{limit}. Nothing of this call was written.",
                state=self._state,
                key=key,
                size=size,
                limit=limit,
            )
        state, last = self._state, dict(zip(keys, values, strict=True))
        return [(state, key, last[key]) for key in sorted(last)]


class _Writer:
    def __init__(self, store: SqliteStore, token: FenceToken) -> None:
        self._store = store
        self._token = token
        self.multi_get = store.multi_get

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        rows = self._store._rows(keys, values)
        self._store._fenced(self._token, lambda db: _put(db, rows))

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        check_lengths(keys, values, "values")
        store, state = self._store, self._store._state
        kept = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        rows = store._rows(list(kept), list(kept.values()))
        gone = sorted(set(keys) - kept.keys())

        def rewrite(db: sqlite3.Connection) -> None:
            changed = [(record, state, key) for state, key, record in rows]
            db.executemany("UPDATE mapstate_records SET record = ? WHERE state = ? AND key = ?", changed)
            whole = len(gone) - len(gone) % _ROWS_AT_ONCE
            for i in range(0, whole, _ROWS_AT_ONCE):
                db.execute(_DELETE_MANY, (state, *gone[i : i + _ROWS_AT_ONCE]))
            db.executemany(_DELETE, [(state, key) for key in gone[whole:]])

        store._fenced(self._token, rewrite)


def _put(db: sqlite3.Connection, rows: list[tuple[str, str, bytes]]) -> None:
    are_small = max(map(len, map(itemgetter(2), rows)), default=0) <= _MOST_AT_ONCE
    whole = len(rows) - len(rows) % _ROWS_AT_ONCE if are_small else 0
    for i in range(0, whole, _ROWS_AT_ONCE):
        db.execute(_PUT_MANY, tuple(chain.from_iterable(rows[i : i + _ROWS_AT_ONCE])))
    db.executemany(_PUT, rows[whole:])
