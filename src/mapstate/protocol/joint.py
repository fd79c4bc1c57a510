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
    """Roll back those ledgers of a topology that are one batch ahead of the others. Call it before `begin`.

    A ledger is ahead if a driver died between its commit and that of another store, or an operator rolled the others
    back. The caller has opened all ledgers, so no other driver commits meanwhile. Larger differences are for `begin`.

    Returns:
        The ledgers in the same order.

    Raises:
        FencedError: Another driver has opened one of them.
        RollbackError: A ledger that is ahead cannot be rolled back.

    """
    for ledger, session in zip(ledgers, sessions, strict=True):
        check_session(ledger, session)
    return [_rolled_back(ledger, ledgers) if _is_ahead(ledger, ledgers, batch_id) else ledger for ledger in ledgers]


def _is_ahead(ledger: LedgerRecord, ledgers: Sequence[LedgerRecord], batch_id: int) -> bool:
    last = ledger.last_commit
    if last is None:
        return False
    if last.owner == ledger.owner:
        due = last.batch_id == batch_id and ledger.owners[last.owner] == batch_id + 1
        return due and any(other.owners[other.owner] <= batch_id for other in ledgers)
    # Another query made the last commit. Ledger A is one batch ahead of B when A's second-to-last batch is B's last.
    # A state that this query never kept, or that was reset after the batch, lacks nothing, though it is empty, too.
    return any(
        _batch_of(other.last_commit) == _batch_of(ledger.previous)
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


def check_adopted(ledgers: Sequence[LedgerRecord], on_gaps: Sequence[OnGap]) -> None:
    """Refuse states of one topology that hold different batches of the query that kept them before.

    Call it after `reconcile` and before `begin`. States of different queries cannot be compared. Raises
    MissingBatchesError, unless ``on_gap`` of the state that lacks batches is "accept".
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
            f"state {behind.state!r} counts batches of query {last.owner} up to batch {last.batch_id}, and state "
            f"{ahead.state!r} of the same topology up to batch {newest.batch_id}: adopted like this they would differ "
            "for ever. Nothing was written. Restore both from one moment, or run that query once more from its "
            f"checkpoint. on_gap='accept' for {behind.state!r}, in one run, goes on without the missing batches.",
            state=behind.state,
            found=newest.batch_id + 1,
            expected=last.batch_id + 1,
        )


def check_follower(
    pair: Sequence[LedgerRecord | None],
    query: str,
    on_new_owners: Sequence[OnNewOwner],
    batch_id: int,
    plan: BatchPlan | None,
) -> BatchPlan | None:
    """Check that a state and the state that follows its new values hold the same batches, before ``query`` begins.

    The first may be one batch ahead: the query brings that batch again, and the follower's own `begin` takes it. A
    batch that Spark planned anew has to be countable anew in both.

    Args:
        pair: The ledgers of the first state and its follower, None where there is none yet.
        query: The id of the query that begins.
        on_new_owners: What each state's spec says of a new owner.
        batch_id: The batch that begins.
        plan: Spark's plan of it.

    Returns:
        The plan with the ``upstream_txid`` for the next follower.

    Raises:
        MissingBatchesError: The two hold different batches.
        ReplannedBatchError: One of them cannot count the batch anew.

    """
    first, follower = pair
    due, its_due = (0 if ledger is None else ledger.owners.get(query, 0) for ledger in pair)
    if first is not None and first.owner == query and is_replanned(first, batch_id, plan):
        check_replanned(first, batch_id, plan)
        due = batch_id
    if follower is not None and its_due > due:
        if first is not None and plan is not None and follower.owner == query:
            anew = plan._replace(upstream_txid=first.next_txid)
            known = None if follower.last_commit is None else follower.last_commit.plan
            # The plan is overtaken if the first was put back and gives out its txids again.
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
    if any(ledger is not None and ledger.owner == query for ledger in pair):
        return plan and plan._replace(upstream_txid=None)
    last, its_last = (
        None if ledger is None or on_new_owner == "reset" else ledger.last_commit
        for ledger, on_new_owner in zip(pair, on_new_owners, strict=True)
    )
    can_tell = last is None or its_last is None or last.owner == its_last.owner
    if can_tell and _batch_of(last) != _batch_of(its_last):
        held, its_held = (
            "nothing" if commit is None else f"batch {commit.batch_id} of {commit.owner}" for commit in (last, its_last)
        )
        raise MissingBatchesError(
            f"a state would be taken over with {held}, and the state that follows its new values with {its_held}: they "
            "would differ for ever. Nothing was written. Restore both from one moment, or run that query once more "
            "from its checkpoint. on_gap='accept' for the follower, in one run, goes on without the missing batches."
        )
    return plan and plan._replace(upstream_txid=None)


def has_last_batch(ledger: LedgerRecord, other: LedgerRecord) -> bool:
    """Whether ``other``, of the same topology, counts the last batch of ``ledger``."""
    last, its_last = ledger.last_commit, other.last_commit
    return _batch_of(last) == _batch_of(its_last)


def _batch_of(commit: Commit | None) -> tuple[str, int] | None:
    return None if commit is None else (commit.owner, commit.batch_id)
