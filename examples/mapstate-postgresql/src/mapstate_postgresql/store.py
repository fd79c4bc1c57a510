"""The records, the ledger and the fence of one state, in three tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import psycopg

from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.capabilities import FenceToken
from mapstate.errors import FencedError, TooLargeError
from mapstate_postgresql.connections import Connections
from mapstate_postgresql.problems import problem_of

__all__ = ["PostgresqlStore", "Version"]

T = TypeVar("T")

_TABLES = """
SELECT pg_advisory_xact_lock(7382912);  -- without it, one of two that make them at once fails
CREATE TABLE IF NOT EXISTS mapstate_records (
    state text COLLATE "C", key text COLLATE "C", record bytea NOT NULL, PRIMARY KEY (state, key)
);
CREATE TABLE IF NOT EXISTS mapstate_ledgers (
    state text COLLATE "C" PRIMARY KEY, record bytea NOT NULL, version uuid NOT NULL,
    epoch bigint NOT NULL, txid bigint NOT NULL, closed boolean NOT NULL, nonce text NOT NULL
);
CREATE TABLE IF NOT EXISTS mapstate_claims (
    state text COLLATE "C", txid bigint, partition bigint, holder text NOT NULL,
    PRIMARY KEY (state, txid, partition)
);
"""
_GET = "SELECT key, record FROM mapstate_records WHERE state = %s AND key = ANY(%s)"
_PUT = """
INSERT INTO mapstate_records
SELECT %(state)s, key, record FROM unnest(%(keys)s::text[], %(records)s::bytea[]) AS put(key, record)
ON CONFLICT (state, key) DO UPDATE SET record = excluded.record
"""
# The fence is the ledger's row. Nobody can move it while this statement holds its lock, and where it has moved
# there is no row to join with: check and write are one.
_FENCED_PUT = """
INSERT INTO mapstate_records
SELECT fence.state, key, record
FROM (SELECT state FROM mapstate_ledgers
      WHERE state = %(state)s AND epoch = %(epoch)s AND txid = %(txid)s AND nonce = %(nonce)s AND NOT closed
      FOR SHARE) AS fence,
     unnest(%(keys)s::text[], %(records)s::bytea[]) AS put(key, record)
ON CONFLICT (state, key) DO UPDATE SET record = excluded.record
"""
_INCARNATION = "substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"  # the timeline: another one after a failover
_LOAD = f"SELECT record, version, {_INCARNATION} FROM mapstate_ledgers WHERE state = %s"
_CREATE = f"""
INSERT INTO mapstate_ledgers VALUES (%s, %s, gen_random_uuid(), %s, %s, %s, %s)
ON CONFLICT DO NOTHING RETURNING version, {_INCARNATION}
"""
_CHANGE = f"""
UPDATE mapstate_ledgers
SET record = %s, version = gen_random_uuid(), epoch = %s, txid = %s, closed = %s, nonce = %s
WHERE state = %s AND version = %s AND {_INCARNATION} = %s RETURNING version, {_INCARNATION}
"""
_DROP_CLAIMS = "DELETE FROM mapstate_claims WHERE state = %s"
_DROP_LEDGER = "DELETE FROM mapstate_ledgers WHERE state = %s AND version = %s"
_DROP_RECORDS = "DELETE FROM mapstate_records WHERE state = %s"
_CLAIM = """
INSERT INTO mapstate_claims VALUES (%s, %s, %s, %s)
ON CONFLICT (state, txid, partition) DO UPDATE SET holder = mapstate_claims.holder RETURNING holder
"""
_READ = """
SELECT NULL, record FROM mapstate_ledgers WHERE state = %s
UNION ALL SELECT key, record FROM mapstate_records WHERE state = %s AND key = ANY(%s)
"""
_PAGE = "SELECT key FROM mapstate_records WHERE state = %s AND key > %s ORDER BY key LIMIT %s"


class Version(NamedTuple):
    """A ledger's version: its write, and the incarnation of the server."""

    write: Any
    timeline: str


class PostgresqlStore:
    """One state. Cheap to make; takes a connection for each call, and any thread may call."""

    def __init__(self, connections: Connections, state: str, *, max_value_bytes: int) -> None:
        self._connections = connections
        self._state = state
        self._limit = max_value_bytes

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `IBackingMap.multi_get`: one statement."""
        if not keys:
            return []
        found = dict(self._run(lambda db: db.execute(_GET, (self._state, list(keys))).fetchall()) or ())
        return [found.get(key) for key in keys]

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """See `IBackingMap.multi_put`: one statement, all or nothing."""
        put = self._put(keys, values)
        if keys:
            self._run(lambda db: db.execute(_PUT, put), create=True)

    def put_fenced(self, token: FenceToken, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """`multi_put`, if ``token`` is the fence: one statement too. Raises FencedError."""
        put = self._put(keys, values) | {"epoch": token.epoch, "txid": token.txid, "nonce": token.nonce}
        if not keys:
            return
        if token.closed or not self._run(lambda db: db.execute(_FENCED_PUT, put).rowcount):
            raise FencedError(
                f"state {self._state!r}: the attempt with txid {token.txid} of epoch {token.epoch} may not write now: "
                "it has ended, or a newer attempt or driver has taken over",
                state=self._state,
                txid=token.txid,
            )

    def writer(self, token: FenceToken) -> IBackingMap[str, bytes]:
        """See `FencedWrites.writer`."""
        return _Writer(self, token)

    def load(self) -> tuple[bytes, Version] | None:
        """See `LedgerStore.load`."""
        row = self._run(lambda db: db.execute(_LOAD, (self._state,)).fetchone())
        return None if row is None else (row[0], Version(*row[1:]))

    def swap(self, record: bytes, expected: Version | None, fence: FenceToken) -> Version | None:
        """See `LedgerStore.swap`: compare, set, move the fence and drop the claims in one transaction."""

        def compare_and_set(db: psycopg.Connection[Any]) -> Any:
            with db.transaction():
                if expected is None:
                    row = db.execute(_CREATE, (self._state, record, *fence)).fetchone()
                else:
                    row = db.execute(_CHANGE, (record, *fence, self._state, *expected)).fetchone()
                if row is not None:
                    db.execute(_DROP_CLAIMS, (self._state,))
            return row

        row = self._run(compare_and_set, create=True)
        return None if row is None else Version(*row)

    def multi_get_with_ledger(self, keys: Sequence[str]) -> tuple[bytes | None, list[bytes | None], bytes | None]:
        """See `LedgerReads.multi_get_with_ledger`: one statement is one snapshot."""
        found = dict(self._run(lambda db: db.execute(_READ, (self._state, self._state, list(keys))).fetchall()) or ())
        ledger = found.get(None)
        return ledger, [found.get(key) for key in keys], ledger

    def claim(self, txid: int, partition: int, holder: str) -> str:
        """See `Claims.claim`."""
        row = self._run(lambda db: db.execute(_CLAIM, (self._state, txid, partition, holder)).fetchone(), create=True)
        return str(row[0])

    def scan(self, page_size: int) -> Iterator[list[str]]:
        """See `Scan.scan`. In the order of the keys; no lock is held between two pages."""
        last = ""
        while page := self._page(last, page_size):
            yield page
            last = page[-1]

    def drop(self, expected: Version, token: FenceToken) -> Iterator[int]:
        """See `Drops.drop`: one transaction."""

        def remove(db: psycopg.Connection[Any]) -> int | None:
            with db.transaction():
                if not db.execute(_DROP_LEDGER, (self._state, expected.write)).rowcount:
                    return None
                db.execute(_DROP_CLAIMS, (self._state,))
                return db.execute(_DROP_RECORDS, (self._state,)).rowcount

        count = self._run(remove)
        if count is None:
            raise FencedError(
                f"the ledger of state {self._state!r} has changed: the removal with txid {token.txid} ends here",
                state=self._state,
                txid=token.txid,
            )
        yield count

    def close(self) -> None:
        """Close this process's idle connections to the database. The store stays usable."""
        self._connections.close_idle()

    def _page(self, after: str, page_size: int) -> list[str]:
        rows = self._run(lambda db: db.execute(_PAGE, (self._state, after, page_size)).fetchall())
        return [key for (key,) in rows or ()]

    def _put(self, keys: Sequence[str], values: Sequence[bytes]) -> dict[str, Any]:
        """The parameters of a put: each key once, sorted, so that two puts cannot deadlock."""
        check_lengths(keys, values, "values")
        limit = self._limit
        for key, value in zip(keys, values, strict=True):
            if len(value) > limit:
                raise TooLargeError(
                    f"state {self._state!r}, key {key!r}: the record has {len(value)} bytes, and this store takes at "
                    f"most {limit}. Nothing of this call was written.",
                    state=self._state,
                    key=key,
                    size=len(value),
                )
        last = dict(zip(keys, values, strict=True))
        ordered = sorted(last)
        return {"state": self._state, "keys": ordered, "records": [last[key] for key in ordered]}

    def _run(self, work: Callable[[psycopg.Connection[Any]], T], *, create: bool = False) -> T | Any:
        """Return what ``work`` returns; None where there are no tables yet. With ``create`` they are made.

        After an error the connection is closed. The error is one of mapstate's.
        """
        connection = None
        try:
            connection = self._connections.take()
            try:
                result = work(connection)
            except psycopg.errors.UndefinedTable:
                result = None
                if create:
                    with connection.transaction():
                        connection.execute(_TABLES)
                    result = work(connection)
            self._connections.give_back(connection)
            connection = None
        except (psycopg.Error, UnicodeError) as error:
            problem = problem_of(error, self._state, self._connections.address)
        else:
            return result
        finally:
            if connection is not None:
                connection.close()
        raise problem  # outside the except clause: psycopg's frames hold the password


class _Writer:
    def __init__(self, store: PostgresqlStore, token: FenceToken) -> None:
        self._store = store
        self._token = token
        self.multi_get = store.multi_get

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._store.put_fenced(self._token, keys, values)
