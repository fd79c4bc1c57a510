"""The ledger's rules for the states of one topology.

Pure, as `mapstate.protocol.transitions`. `mapstate.protocol.ledgers` runs them against the stores.
"""

from __future__ import annotations

from collections.abc import Sequence

from mapstate.errors import RollbackError
from mapstate.protocol.ledger_record import Commit, LedgerRecord
from mapstate.protocol.seed_refusals import of_another_reading
from mapstate.protocol.ways_back import rollback

_NEVER = 1 << 63  # above all batch ids


def reconcile(ledgers: Sequence[LedgerRecord], batch_id: int) -> list[LedgerRecord]:
    """Roll back those ledgers of a topology that are one batch ahead of the others. Call it before `begin`.

    States of two readings of the history differ for ever, whatever batches follow. One that began later has none.

    A ledger is ahead if a driver died between its commit and that of another store, or an operator rolled the others
    back. The caller has opened all ledgers, so no other driver commits meanwhile. Larger differences are for `begin`.

    Returns:
        The ledgers in the same order.

    Raises:
        RollbackError: A ledger that is ahead cannot be rolled back.
        UsageError: Two ledgers count batch 0 of a query by two readings of its rows.

    """
    check_readings(ledgers)
    return [_rolled_back(ledger, ledgers) if _is_ahead(ledger, ledgers, batch_id) else ledger for ledger in ledgers]


def check_readings(ledgers: Sequence[LedgerRecord]) -> None:
    """Raise UsageError where two of the ledgers count batch 0 of a query by two readings of its rows."""
    readings: dict[str, tuple[str, str | None]] = {}
    for ledger in ledgers:
        last = ledger.last_commit
        if last is not None and (last.reading is not None or last.batch_id == 0):
            first, reading = readings.setdefault(last.owner, (ledger.state, last.reading))
            if reading != last.reading:
                raise of_another_reading(first, ledger.state)


def _is_ahead(ledger: LedgerRecord, ledgers: Sequence[LedgerRecord], batch_id: int) -> bool:
    last = ledger.last_commit
    if last is None:
        return False
    if last.owner == ledger.owner:
        due = last.batch_id == batch_id and ledger.owners[last.owner] == batch_id + 1
        behind = (other for other in ledgers if other.seed is None)  # else the begin says that its seed has to end
        return due and any(other.owners[other.owner] <= batch_id for other in behind)
    # Another query made the last commit. Ledger A is one batch ahead of B when A's second-to-last batch is B's last.
    # An empty state is not behind if this query never kept it, or if it was reset after the batch.
    return any(
        batch_of(other.last_commit) == batch_of(ledger.previous)
        and other.owners.get(last.owner, _NEVER) <= last.batch_id
        for other in ledgers
        if other is not ledger
    )


def _rolled_back(ledger: LedgerRecord, ledgers: Sequence[LedgerRecord]) -> LedgerRecord:
    try:
        return rollback(ledger)
    except RollbackError as error:
        names = ", ".join(repr(other.state) for other in ledgers if other is not ledger)
        last = ledger.last_commit
        raise RollbackError(
            f"state {ledger.state!r} is ahead of the other states of its topology ({names}): it counts batch "
            f"{None if last is None else last.batch_id}, and not all of them do. It cannot be rolled back: "
            f"{error.message} Restore all of them from one moment and rewind the checkpoint, or reset them all with a "
            "new checkpoint. See docs/operating.md#each-refusal-and-what-to-do",
            state=ledger.state,
        ) from error


def has_last_batch(ledger: LedgerRecord, other: LedgerRecord) -> bool:
    """Whether ``other``, of the same topology, counts the last batch of ``ledger``."""
    last, its_last = ledger.last_commit, other.last_commit
    return batch_of(last) == batch_of(its_last)


def batch_of(commit: Commit | None) -> tuple[str, int] | None:
    """The batch of a commit, with the query that brought it."""
    return None if commit is None else (commit.owner, commit.batch_id)
