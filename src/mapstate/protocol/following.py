"""The ledger's rules for a state and one that follows its new values. Pure, as `mapstate.protocol.transitions`."""

from __future__ import annotations

from collections.abc import Sequence

from mapstate.errors import MissingBatchesError
from mapstate.protocol.joint import batch_of
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.plans import BatchPlan, check_replanned, is_overtaken, is_replanned
from mapstate.schema import OnNewOwner


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
    if can_tell and batch_of(last) != batch_of(its_last):
        held, its_held = (
            "nothing" if commit is None else f"batch {commit.batch_id} of {commit.owner}" for commit in (last, its_last)
        )
        raise MissingBatchesError(
            f"a state would be taken over with {held}, and the state that follows its new values with {its_held}: they "
            "would differ for ever. Nothing was written. Restore both from one moment, or run that query once more "
            "from its checkpoint. on_gap='accept' for the follower, in one run, goes on without the missing batches."
        )
    return plan and plan._replace(upstream_txid=None)
