"""The rules for where a start goes on: behind another state's new values, or another query's batches. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mapstate.errors import MissingBatchesError
from mapstate.protocol.joint import batch_of
from mapstate.protocol.ledger_record import BatchPlan, Commit, LedgerRecord, by_partition, digest_of
from mapstate.protocol.refusals import starts_beyond, starts_elsewhere
from mapstate.protocol.ways_back import check_replanned, is_overtaken, is_replanned
from mapstate.schema import OnGap, OnNewOwner


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
    if first is None and batch_id and follower is not None and follower.owner == query:
        return plan and plan._replace(upstream_txid=None)  # its ledger is lost, which its own begin says
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
        if first is not None and first.owner == query and its_due < batch_id <= due:
            raise _is_behind(first, follower, its_due, batch_id)
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


def _is_behind(first: LedgerRecord, follower: LedgerRecord | None, due: int, batch_id: int) -> MissingBatchesError:
    name = "a state" if follower is None else f"state {follower.state!r}"
    last, is_own = first.last_commit, follower is not None and follower.owner == first.owner
    is_next = is_own and last is not None and not last.seeded and last.batch_id == due
    way = "Rewind the checkpoint by it (mapstate rewind). Or restore" if is_next else "Restore"
    return MissingBatchesError(
        f"{name} that follows state {first.state!r} lacks batch {due}, and Spark brings batch {batch_id}: it is new or "
        f"of another query, or was rolled back or restored by itself. Nothing was written. {way} both from one moment; "
        "or begin both anew. on_gap='accept' for it, in one run, goes on without the missing batches.",
        state=first.state if follower is None else follower.state,
        found=batch_id,
        expected=due,
    )


def check_start(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None, on_gap: OnGap) -> None:
    """Refuse a new owner's first batch unless each source starts where the last owner's last batch ended.

    Sources and partitions that the last owner did not have may start anywhere, and with ``on_gap="accept"`` partitions
    may start later. What cannot be compared is refused.
    """
    last = ledger.last_commit
    if last is None or not ledger.is_adopted or batch_id < ledger.owners[ledger.owner]:
        return
    ends = _entries(last.offsets)
    starts = None if plan is None else _entries(plan.start)
    if plan is None or ends is None or starts is None:
        raise starts_elsewhere(ledger, last, batch_id, None if plan is None else plan.start, "cannot be compared")
    if len(starts) < len(ends):
        raise starts_elsewhere(ledger, last, batch_id, plan.start, "has other sources")
    for end, start in zip(ends, starts, strict=False):
        how = _how_it_starts(end, start, plan.filters)
        if how is not None and not (how == _LATER and on_gap == "accept"):
            raise starts_elsewhere(ledger, last, batch_id, plan.start, how)


OF_DELTA = "reservoirVersion"
"""In the text of an offset in a Delta table: the version."""


def check_first(plan: BatchPlan) -> None:
    """Refuse a batch 0 that starts where it ends, or later, in a Delta table: it has lost its rows.

    Delta resolves ``startingVersion="latest"`` in each run anew, and so beyond what an earlier run planned.
    """
    for start, end in zip(_entries(plan.start) or (), _entries(plan.end) or (), strict=False):
        if isinstance(start, dict) and isinstance(end, dict) and OF_DELTA in start.keys() & end.keys():
            version, last = start[OF_DELTA], end[OF_DELTA]
            if version > last or (version == last and end["index"] == -1):
                raise starts_beyond(plan.offsets, version, last)


_LATER = "starts later, so rows would be lost"


def _how_it_starts(end: Any, start: Any, filters: tuple[str, ...]) -> str | None:
    """How a source's start differs from its end in the ledger; None if it is the same place."""
    if isinstance(end, dict) and "newest" in end:
        return (
            None if start is None and digest_of_files(end) in filters else "reads its files without files_not_counted"
        )
    is_of_a_log = isinstance(end, dict) and "logOffset" in end  # in which only its query has numbers
    if is_of_a_log or (end is None) != (start is None):
        return "cannot be compared"
    if end == start:
        return None
    ending, starting = by_partition(end), by_partition(start)
    if ending is None or starting is None or not ending.keys() <= starting.keys():
        return "starts elsewhere"
    if any(starting[partition] < number for partition, number in ending.items()):
        return "starts earlier, so rows would count twice"
    return None if all(starting[partition] == number for partition, number in ending.items()) else _LATER


def digest_of_files(end: Mapping[str, Any]) -> str:
    """Of a file source's end in a ledger: which of its files are counted."""
    return digest_of(json.dumps([end["newest"], sorted(end["paths"])]))


def _entries(offsets: str | None) -> list[Any] | None:
    try:
        entries = None if offsets is None else json.loads(offsets)
    except ValueError:
        return None
    return entries if isinstance(entries, list) else None


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
