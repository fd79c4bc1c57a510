"""The ledger's rules for several states: of one topology, and of a state and one that follows it.

Pure, as `mapstate.protocol.transitions`. `mapstate.protocol.ledgers` runs them against the stores.
"""

from __future__ import annotations

from collections.abc import Sequence

from mapstate.errors import MissingBatchesError, RollbackError
from mapstate.protocol.ledger_record import Commit, LedgerRecord
from mapstate.protocol.plans import BatchPlan, check_replanned, is_overtaken, is_replanned
from mapstate.protocol.transitions import check_session, rollback
from mapstate.schema import OnGap, OnNewOwner

__all__ = [
    "check_adopted",
    "check_follower",
    "has_last_batch",
    "reconcile",
]


_NEVER = 1 << 63  # above all batch ids


def reconcile(ledgers: Sequence[LedgerRecord], sessions: Sequence[str], batch_id: int) -> list[LedgerRecord]:
    """The ledgers of one topology, and those that are a batch ahead of the others rolled back. Before `begin`.

    One is ahead where a driver died, or failed, between its commit and that of another store; or where an operator
    has rolled the others back. Whoever calls has opened all of them, so that nobody else commits meanwhile. What
    differs by more is left to `begin`. Raises FencedError, and RollbackError where one cannot be rolled back.
    """
    for ledger, session in zip(ledgers, sessions, strict=True):
        check_session(ledger, session)
    return [_rolled_back(one, ledgers) if _is_ahead(one, ledgers, batch_id) else one for one in ledgers]


def _is_ahead(ledger: LedgerRecord, ledgers: Sequence[LedgerRecord], batch_id: int) -> bool:
    last = ledger.last_commit
    if last is None:
        return False
    if last.owner == ledger.owner:
        due = last.batch_id == batch_id and ledger.owners[last.owner] == batch_id + 1
        return due and any(other.owners[other.owner] <= batch_id for other in ledgers)
    # What another query left behind: its batch ids say nothing of this one's. A state that this query never kept, or
    # that had its batch and was reset since, lacks nothing, though it is empty as the other was before its first batch.
    return any(
        _place(other.last_commit) == _place(ledger.previous) and other.owners.get(last.owner, _NEVER) <= last.batch_id
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
            f"{None if last is None else last.batch_id}, and not all of them do. To be even it would have to be rolled "
            f"back, but {error.message} Nothing was written. Restore all of them from one moment and rewind the "
            "checkpoint, or reset them all (on_new_owner='reset', with a new checkpoint) and replay the source.",
            state=ledger.state,
        ) from error


def check_adopted(ledgers: Sequence[LedgerRecord], on_gaps: Sequence[OnGap]) -> None:
    """Of the states of one topology, those that another query has kept last have to hold the same batches of it.

    Behind `reconcile`, before `begin`. Of states that came from different queries nobody can tell. Raises
    MissingBatchesError; not for a state whose ``on_gap`` is "accept".
    """
    for behind, on_gap in zip(ledgers, on_gaps, strict=True):
        last = behind.last_commit
        if last is None or last.owner == behind.owner or on_gap == "accept":
            continue
        for ahead in ledgers:
            if ahead.last_commit is not None and ahead.last_commit.owner == last.owner:
                _check_no_further(ahead, ahead.last_commit, behind, last)


def _check_no_further(ahead: LedgerRecord, newest: Commit, behind: LedgerRecord, last: Commit) -> None:
    if newest.batch_id > last.batch_id:
        raise MissingBatchesError(
            f"state {behind.state!r} counts what query {last.owner} brought up to batch {last.batch_id}, and state "
            f"{ahead.state!r} of the same topology up to batch {newest.batch_id}: adopted like this they would differ "
            "for ever. Nothing was written. Restore both from one moment, or run that query once more from its own "
            f"checkpoint; on_gap='accept' for {behind.state!r}, in one run, goes on without what it lacks.",
            state=behind.state,
            found=newest.batch_id + 1,
            expected=last.batch_id + 1,
        )


def check_follower(
    found: Sequence[LedgerRecord | None],
    query: str,
    on_new_owners: Sequence[OnNewOwner],
    batch_id: int,
    plan: BatchPlan | None,
) -> BatchPlan | None:
    """A state and one that follows its new values, as ``query`` finds them: both have to hold the same batches.

    But for one that a driver has committed in the first alone, which the query brings again: the follower's own `begin`
    sees to that. A batch that Spark planned anew, and that the first is to count anew, so is the follower: it has to be
    possible. Returns the plan as it is for what follows the follower. Raises MissingBatchesError, ReplannedBatchError.
    """
    first, follower = found
    due, its_due = (0 if one is None else one.owners.get(query, 0) for one in found)
    if first is not None and first.owner == query and is_replanned(first, batch_id, plan):
        check_replanned(first, batch_id, plan)
        due = batch_id
    if follower is not None and its_due > due:
        if first is not None and plan is not None and follower.owner == query:
            anew = plan._replace(upstream_txid=first.next_txid)
            known = None if follower.last_commit is None else follower.last_commit.plan
            # Overtaken, if the first was put back and gives out its txids again.
            if is_replanned(follower, batch_id, anew) and not is_overtaken(known, anew.upstream_txid):
                check_replanned(follower, batch_id, anew)
                return anew
        raise MissingBatchesError(
            f"state {follower.state!r} counts the new values of batch {its_due - 1}, and the state that it follows has "
            f"still to get batch {due}: it was rolled back or restored by itself. Nothing was written. Roll both back, "
            "or restore both from one moment, and rewind the checkpoint.",
            state=follower.state,
            found=its_due,
            expected=due,
        )
    if any(one is not None and one.owner == query for one in found):
        return plan and plan._replace(upstream_txid=None)
    last, its_last = (
        None if one is None or how == "reset" else one.last_commit
        for one, how in zip(found, on_new_owners, strict=True)
    )
    can_tell = last is None or its_last is None or last.owner == its_last.owner
    if can_tell and _place(last) != _place(its_last):
        one, other = ("nothing" if at is None else f"batch {at.batch_id} of {at.owner}" for at in (last, its_last))
        raise MissingBatchesError(
            f"a state would be taken over with {one}, and the state that follows its new values with {other}: they "
            "would differ for ever. Nothing was written. Restore both from one moment, or run that query once more "
            "from its own checkpoint, or begin both anew; on_gap='accept' for the one that follows, in one run, goes "
            "on without what it lacks."
        )
    return plan and plan._replace(upstream_txid=None)


def has_last_batch(ledger: LedgerRecord, other: LedgerRecord) -> bool:
    """Whether ``other``, of the same topology, counts the last batch of ``ledger``."""
    last, its_last = ledger.last_commit, other.last_commit
    return _place(last) == _place(its_last)


def _place(commit: Commit | None) -> tuple[str, int] | None:
    return None if commit is None else (commit.owner, commit.batch_id)
