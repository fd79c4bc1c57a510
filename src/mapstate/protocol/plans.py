"""The plan of a batch, and what the ledger makes of a batch that Spark planned anew."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from typing import Any, NamedTuple

from mapstate.errors import FencedError, ReplannedBatchError, cut
from mapstate.protocol.ledger_record import Commit, InFlight, LedgerRecord, PlanDigest

__all__ = [
    "BatchPlan",
    "check_age",
    "check_follows",
    "check_repeated",
    "check_replanned",
    "is_overtaken",
    "is_replanned",
]


class BatchPlan(NamedTuple):
    """The batch as Spark planned it: its start and end offsets, JSON lists with one entry per source, in their order.

    ``planned_at`` is when, in milliseconds: it stands in the checkpoint before the batch runs, so it is the same at a
    replay, and another one where the batch is planned anew. ``previous_planned_at`` is that of the batch before. Both
    are None if they cannot be read. ``upstream_txid`` is for a state that follows another one: the txid under which
    that one has committed the batch, as the driver knows it that passes it on.
    """

    start: str
    end: str
    planned_at: int | None = None
    previous_planned_at: int | None = None
    upstream_txid: int | None = None

    def digest(self) -> PlanDigest:
        """See `PlanDigest`."""
        return PlanDigest(
            None if self.planned_at is None else _digest(f"{self.planned_at} {self.end}"),
            None if self.previous_planned_at is None else _digest(f"{self.previous_planned_at} {self.start}"),
            _digest(self.start),
            _digest(self.end),
            self.upstream_txid,
        )


def is_replanned(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> bool:
    """Whether the state has committed this batch with another plan than Spark brings it with now.

    Of a state that follows another one: or as of another commit of that one. False for what cannot be told: a batch
    that is given by hand, or that is not the last one of the present owner.
    """
    last = _last_own(ledger)
    if plan is None or last is None or last.batch_id != batch_id or ledger.owners[ledger.owner] != batch_id + 1:
        return False
    known = _plan_of(last, ledger.previous)
    if known is None:
        return _is_younger(plan, last)
    return not _is_same(known, plan.digest()) or (known.fingerprint is None and _is_younger(plan, last))


def check_replanned(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
    """Raises ReplannedBatchError unless the committed batch, planned anew, can be rolled back and counted as it is now.

    That is right where both plans start at the same offsets, so that the new one takes the place of the old one, of an
    opaque state after which nothing has begun: only then the records still hold what was before the batch. A state that
    follows another one counts its later commit: raises FencedError for an earlier one, which a late driver passes on.
    """
    last = _last_own(ledger)
    if plan is None or last is None:
        return
    known = _plan_of(last, ledger.previous)
    if is_overtaken(known, plan.upstream_txid):
        raise FencedError(
            f"state {ledger.state!r} counts batch {batch_id} of the state that it follows as of a later commit than "
            f"txid {plan.upstream_txid}: this driver has been replaced and stops here. Nothing was written.",
            state=ledger.state,
            txid=plan.upstream_txid,
        )
    if ledger.type != "opaque":
        why = f"the state is {ledger.type}, and only opaque records keep the value before"
    elif known is None or not _start_together(known, plan.digest()):
        why = "the two do not start at the same offsets"
    elif ledger.in_flight is not None or ledger.next_txid != last.txid + 1:
        why = "a later attempt has begun, and may have used the values before"
    else:
        return
    raise ReplannedBatchError(
        f"state {ledger.state!r} counts batch {batch_id} {_range(ledger.previous, last)}. Spark planned it anew, from "
        f"{_cut(plan.start)} to {_cut(plan.end)}: the checkpoint is older than the batch. It cannot be counted anew: "
        f"{why}. Nothing was written. Put the newer checkpoint back; or restore the store from before the batch; or "
        "start a new checkpoint where the state ends (on_new_owner='adopt').",
        state=ledger.state,
        batch_id=batch_id,
        found=plan.end,
        expected=last.offsets,
    )


def check_age(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
    """A batch that was committed before another query took the state was not planned after that one's commit."""
    last = ledger.last_commit
    if plan is None or last is None or last.owner == ledger.owner or not _is_younger(plan, last):
        return
    raise ReplannedBatchError(
        f"state {ledger.state!r} has counted batch {batch_id} of this query before query {last.owner} took it. Spark "
        f"planned that batch anew since, from {_cut(plan.start)} to {_cut(plan.end)}: the checkpoint is older than the "
        "batch. Nothing was written. Put the newer checkpoint back; or start a new checkpoint where the state ends "
        "(on_new_owner='adopt').",
        state=ledger.state,
        batch_id=batch_id,
        found=plan.end,
        expected=None,
    )


def check_repeated(ledger: LedgerRecord, repeat: InFlight, plan: BatchPlan | None) -> None:
    """A transactional attempt is begun again under its txid only with the plan that it had."""
    if plan is None or repeat.plan is None or _is_same(repeat.plan, plan.digest()):
        return
    last = ledger.last_commit
    raise ReplannedBatchError(
        f"state {ledger.state!r} is transactional and has batch {repeat.batch_id} in flight, which begins at "
        f"{'the start' if last is None else _cut(last.offsets)}. Spark planned it anew, from {_cut(plan.start)} to "
        f"{_cut(plan.end)}: a replay has to be identical, because it skips the keys that are in. Nothing was written. "
        "Put the checkpoint back that holds the first plan; or start empty, with a new checkpoint and "
        "on_new_owner='reset'.",
        state=ledger.state,
        batch_id=repeat.batch_id,
        found=plan.end,
        expected=None,
    )


def check_follows(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
    """A batch starts where the one before it, which the state counts, has ended."""
    last = _last_own(ledger)
    if plan is None or last is None or last.batch_id != batch_id - 1:
        return
    known, found = _plan_of(last, ledger.previous), plan.digest()
    if known is None or (known.end == found.start and _may_be_equal(known.fingerprint, found.previous)):
        return
    raise ReplannedBatchError(
        f"state {ledger.state!r} counts batch {last.batch_id} {_range(ledger.previous, last)}. Spark's batch "
        f"{batch_id} goes from {_cut(plan.start)} to {_cut(plan.end)}, so rows would count twice or "
        "not at all: two copies of one checkpoint were in use, or it was edited. Nothing was written. Put the "
        "checkpoint back that last wrote this state; or go on with what Spark brings, by on_gap='accept' in one run.",
        state=ledger.state,
        batch_id=batch_id,
        found=plan.start,
        expected=last.offsets,
    )


def is_overtaken(known: PlanDigest | None, upstream_txid: int | None) -> bool:
    """Whether a plan counts a later commit of the state that it follows than ``upstream_txid``."""
    counted = None if known is None else known.upstream_txid
    return counted is not None and upstream_txid is not None and upstream_txid <= counted


def _is_same(known: PlanDigest, found: PlanDigest) -> bool:
    if known.upstream_txid is not None and found.upstream_txid not in (known.upstream_txid, None):
        return False
    if known.fingerprint is not None and found.fingerprint is not None:
        return known.fingerprint == found.fingerprint
    return known.end == found.end and known.start in ("", found.start)


def _start_together(one: PlanDigest, other: PlanDigest) -> bool:
    return one.start == other.start and _may_be_equal(one.previous, other.previous)


def _may_be_equal(one: str | None, other: str | None) -> bool:
    return one == other or one is None or other is None


def _is_younger(plan: BatchPlan, commit: Commit) -> bool:
    """Whether a batch was planned after a commit, of which there is no fingerprint.

    Two plans of a file source may have the same offsets, which are places in a log of its own.
    """
    if plan.planned_at is None or not commit.at:
        return False
    return plan.planned_at > dt.datetime.fromisoformat(commit.at).timestamp() * 1000


def _last_own(ledger: LedgerRecord) -> Commit | None:
    """The last commit, if it is the present owner's: batch ids and offsets of another query say nothing here."""
    last = ledger.last_commit
    return last if last is not None and last.owner == ledger.owner else None


def _plan_of(commit: Commit, previous: Commit | None) -> PlanDigest | None:
    """The plan of a commit. Where an older mapstate kept none, what its offsets tell; ``start`` is "" if unknown."""
    if commit.plan is not None or commit.offsets is None:
        return commit.plan
    start = ""
    try:
        if previous is not None and (previous.owner, previous.batch_id) == (commit.owner, commit.batch_id - 1):
            start = "" if previous.offsets is None else _digest(_source_offsets(previous.offsets))
        return PlanDigest(None, None, start, _digest(_source_offsets(commit.offsets)))
    except (ValueError, TypeError):  # offsets decide nothing where something else wrote them
        return None


def _source_offsets(offsets: str) -> str:
    """The sources' own offsets out of those of a `Commit`, as a `BatchPlan` has them."""
    return json.dumps([_own_offset(one) for one in json.loads(offsets)], sort_keys=True, separators=(",", ":"))


def _own_offset(entry: Any) -> Any:
    """A file source's entry has the source's name, and what was read, beside its offset."""
    is_file = isinstance(entry, dict) and isinstance(entry.get("source"), str) and "logOffset" in entry
    return {"logOffset": entry["logOffset"]} if is_file else entry


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _range(previous: Commit | None, last: Commit) -> str:
    """The offsets of the last batch, for a message."""
    known = previous is not None and (previous.owner, previous.batch_id) == (last.owner, last.batch_id - 1)
    start = previous.offsets if known and previous is not None else None
    return f"up to {_cut(last.offsets)}" if start is None else f"from {_cut(start)} to {_cut(last.offsets)}"


def _cut(offsets: str | None) -> str:
    return "offsets that are not known" if offsets is None else cut(offsets)
