"""The removal of a whole state from a SQLite file."""

from __future__ import annotations

from collections.abc import Callable

from mapstate.backends.sqlite.connection import Connection, Database
from mapstate.capabilities import FenceToken
from mapstate.errors import FencedError

HAS_REPORTS = "SELECT 1 FROM sqlite_master WHERE name = 'mapstate_reports'"


def removed(database: Database, state: str, token: FenceToken, is_expected: Callable[[Connection], bool]) -> int:
    """Remove all of a state if its ledger is the expected one, and return the number of records. Raises FencedError."""

    def remove(db: Connection) -> int | None:
        if not is_expected(db):
            return None
        count: int = db.execute("DELETE FROM mapstate_records WHERE state = ?", (state,)).rowcount
        db.execute("DELETE FROM mapstate_claims WHERE state = ?", (state,))
        if db.execute(HAS_REPORTS).fetchone() is not None:
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
