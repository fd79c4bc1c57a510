"""The ledger's rules for a batch that is taken back or has another plan. Pure, as `mapstate.protocol.transitions`."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence

import msgspec

from mapstate.errors import RollbackError
from mapstate.protocol.ledger_record import (
    BatchPlan,
    Commit,
    Correction,
    InFlight,
    LedgerRecord,
    PlanDigest,
    by_partition,
    format_of,
    last_own,
    may_be_equal,
    plan_of,
)
from mapstate.protocol.refusals import batch_of_before, other_replay, overtaken, replanned_batch


def rollback(ledger: LedgerRecord, txid: int | None = None) -> LedgerRecord:
    """Take the last batch back: every reader sees the state as before it, at once.

    For opaque states only, one batch, and only while no later attempt has begun. The streaming checkpoint has to be
    rewound with it. ``txid`` is the expected txid of the last batch; None skips the check. Raises RollbackError.
    """
    last = ledger.last_commit
    if last is not None and last.seeded:
        raise RollbackError(
            f"state {ledger.state!r} counts its seed and no batch after it, and a seed is not rolled back. Nothing was "
            "changed. To seed it again: a new checkpoint, and on_new_owner='reset'."
        )
    if ledger.type != "opaque":
        raise RollbackError(
            f"state {ledger.state!r} is {ledger.type}: only opaque records keep the value before. Nothing was changed."
        )
    if last is None or not can_roll_back(ledger):
        raise RollbackError(
            f"state {ledger.state!r} can only be rolled back by one batch, before a later attempt begins: committed is "
            f"{'nothing' if last is None else f'txid {last.txid}'}, the next txid is {ledger.next_txid}. Records keep "
            "one value before the current one, and a later attempt may have replaced it. Nothing was changed.",
            state=ledger.state,
        )
    if txid is not None and last.txid != txid:
        raise RollbackError(
            f"state {ledger.state!r}: the last batch is {last.batch_id} (txid {last.txid}), not txid {txid}: a batch "
            "was committed or rolled back meanwhile. Nothing was changed. Stop the query, and look again.",
            state=ledger.state,
            found=last.txid,
            expected=txid,
        )
    previous = ledger.previous
    low = last.last_txid_before
    if low is None and previous is not None:
        low = previous.txid  # a ledger may have been written without last_txid_before
    return msgspec.structs.replace(
        ledger,
        last_commit=previous,
        previous=None,
        last_txid=low,
        dead=tuple(span for span in ledger.dead if low is not None and span[1] < low),
        owners=ledger.owners | {last.owner: last.batch_id},
        changes=None if ledger.changes is None else ledger.changes.rolled_back(last.txid),
        undone=ledger.undone + 1,
    )


def rollback_last(ledger: LedgerRecord, txid: int | None = None) -> LedgerRecord:
    """Take back what an operator sees as the last thing done: a correction, or else the last batch, see `rollback`.

    A correction goes with its entry of the list, so that its id is free again. The checkpoint stays as it is.
    """
    done = last_correction(ledger)
    if done is None:
        return rollback(ledger, txid)
    if txid is not None and done.txid != txid:
        raise RollbackError(
            f"state {ledger.state!r}: the last thing done is a correction (txid {done.txid}), not txid {txid}. Nothing "
            "was changed. Look again.",
            state=ledger.state,
            found=done.txid,
            expected=txid,
        )
    held, low = ledger.keys_held(), done.last_txid_before
    operations = (ledger.operations or 1) - 1 or None
    changes = None if ledger.changes is None else ledger.changes.rolled_back(done.txid)
    return msgspec.structs.replace(
        ledger.with_keys_held(None if held is None or done.keys_delta is None else held - done.keys_delta),
        last_txid=low,
        dead=tuple(span for span in ledger.dead if low is not None and span[1] < low),
        changes=changes,
        operations=operations,
        correction=None,
        undone=ledger.undone + 1,
        format=format_of(ledger.windows, changes, ledger.rolling, ledger.seed, operations),
    )


def last_correction(ledger: LedgerRecord) -> Correction | None:
    """The correction that `rollback_last` would take back; None if a later attempt has begun, or without one."""
    done = ledger.correction
    is_last = done is not None and done.txid == ledger.last_txid and ledger.next_txid == done.txid + 1
    return done if is_last and ledger.in_flight is None else None


def can_roll_back(ledger: LedgerRecord) -> bool:
    """Whether `rollback` would take the last batch back."""
    last = ledger.last_commit
    is_last = last is not None and ledger.in_flight is None and ledger.next_txid == last.txid + 1  # no seed is
    return ledger.type == "opaque" and is_last


def can_all_roll_back(ledgers: Sequence[LedgerRecord], batch_id: int) -> bool:
    """Whether those of some states that count the present owner's batch of this number can be rolled back.

    Not where it has fired windows: what was final stays so.
    """
    return all(can_roll_back(ledger) and not _has_fired(ledger) for ledger in ledgers if counts(ledger, batch_id))


def _has_fired(ledger: LedgerRecord) -> bool:
    windows, done = ledger.windows, ledger.last_windows()
    if windows is None or done is None:
        return windows is not None  # unknown: as if it had
    return windows.definition.fired_before(done.before) < windows.definition.fired_before(done.watermark)


def counts(ledger: LedgerRecord, batch_id: int) -> bool:
    """Whether the last commit is the present owner's batch of this number."""
    last = ledger.last_commit
    return last is not None and (last.owner, last.batch_id) == (ledger.owner, batch_id)


def is_part(ledger: LedgerRecord) -> bool:
    """Whether the last commit, or what is in flight, is marked as a part of its batch."""
    return any(commit is not None and commit.is_part for commit in (ledger.last_commit, ledger.in_flight))


def take_back(ledger: LedgerRecord, batch_id: int, *, can_roll_back: bool) -> LedgerRecord:
    """Undo a batch of which a part was committed; if it cannot be rolled back, mark it for the next `begin`.

    A transactional attempt is marked, too: the batch would begin again under its txid, and skip the keys that the part
    has written.
    """
    last, attempt = ledger.last_commit, ledger.in_flight
    if last is not None and counts(ledger, batch_id):
        if can_roll_back:
            return rollback(ledger, last.txid)
        return msgspec.structs.replace(ledger, last_commit=msgspec.structs.replace(last, is_part=True))
    if ledger.type == "transactional" and attempt is not None and attempt.batch_id == batch_id:
        return msgspec.structs.replace(ledger, in_flight=msgspec.structs.replace(attempt, is_part=True))
    return ledger


def is_replanned(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> bool:
    """Whether the state has committed this batch with another plan than the present one.

    A state that follows another one may also have counted another commit of that state. False if nobody can tell: the
    batch has no plan, or is not the present owner's last one.
    """
    last = last_own(ledger)
    if plan is None or last is None or last.batch_id != batch_id or ledger.owners[ledger.owner] != batch_id + 1:
        return False
    known = plan_of(last, ledger.previous)
    if known is None:
        return _is_younger(plan, last)
    return not _is_same(known, plan.digest()) or (known.fingerprint is None and _is_younger(plan, last))


def check_planned_before(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
    """Refuse a batch that was committed before another query took the state, if it was planned after that."""
    last = ledger.last_commit
    if plan is None or last is None or last.owner == ledger.owner or not _is_younger(plan, last):
        return
    raise batch_of_before(ledger, last, batch_id, plan.offsets)


def check_repeated(ledger: LedgerRecord, repeat: InFlight, plan: BatchPlan | None) -> None:
    """Refuse to repeat a transactional attempt, which keeps its txid, with another plan."""
    if plan is None or repeat.plan is None or _is_same(repeat.plan, plan.digest()):
        return
    raise other_replay(ledger, repeat, plan.offsets)


def check_replanned(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
    """Check that the committed batch can be rolled back and counted anew under the present plan.

    Both plans have to start at the same offsets, so that one replaces the other. The state has to be opaque, and no
    later attempt may have begun: only then do the records still hold the values before the batch.

    Raises:
        ReplannedBatchError: The batch cannot be counted anew.
        FencedError: The state has counted a later upstream commit. A late driver brings the earlier one.

    """
    last = last_own(ledger)
    if plan is None or last is None:
        return
    known = plan_of(last, ledger.previous)
    if is_overtaken(known, plan.upstream_txid):
        raise overtaken(ledger, batch_id, plan.upstream_txid)
    if last.seeded:
        why = "it is a seed, which is not rolled back"
    elif ledger.type != "opaque":
        why = f"the state is {ledger.type}, and only opaque records keep the value before"
    elif known is None or not _start_together(known, plan.digest()):
        why = "the plans do not start at the same offsets"
    elif ledger.in_flight is not None or ledger.next_txid != last.txid + 1:
        why = "a later attempt has begun and may have replaced the values before it"
    else:
        return
    raise replanned_batch(ledger, last, batch_id, plan.offsets, why)


def _start_together(known: PlanDigest, present: PlanDigest) -> bool:
    return known.start == present.start and may_be_equal(known.previous, present.previous)


def give_up(ledger: LedgerRecord, session: str) -> LedgerRecord:
    """Leave a failed attempt behind, as a restart would, and close the fence.

    A transactional attempt keeps its txid for the replay. Nothing changes if another driver has opened the state, or
    nothing is in flight.
    """
    attempt = ledger.in_flight
    if ledger.session != session or attempt is None or attempt.epoch != ledger.epoch:
        return ledger
    return msgspec.structs.replace(ledger, epoch=ledger.epoch + 1)


def is_overtaken(known: PlanDigest | None, upstream_txid: int | None) -> bool:
    """Whether a plan counts the upstream commit ``upstream_txid`` or a later one."""
    counted = None if known is None else known.upstream_txid
    return counted is not None and upstream_txid is not None and upstream_txid <= counted


def behind_by(ends: str | None, others: str | None) -> list[str] | None:
    """Where the offsets ``others`` of a query are before ``ends``, in words; None where they cannot be compared."""
    try:
        known, other_ends = json.loads(ends or ""), json.loads(others or "")
    except ValueError:
        return None
    if not isinstance(known, list) or not isinstance(other_ends, list) or len(known) != len(other_ends):
        return None
    behind = []
    for end, other in zip(known, other_ends, strict=True):
        numbers, reached = by_partition(end), by_partition(other)
        if not numbers or reached is None:
            return None
        for (topic, partition), number in numbers.items():
            at = reached.get((topic, partition), 0)
            if at < number:
                behind.append(f"partition {partition} of {topic} by {number - at:,}")
    return behind


def further(ends: str | None, others: str | None) -> str | None:
    """The further offsets of two queries, in each partition; None where they cannot be compared."""
    if behind_by(ends, others) is None or behind_by(others, ends) is None:
        return None
    pairs = list(zip(json.loads(ends or ""), json.loads(others or ""), strict=True))
    if any(end.keys() != other.keys() for end, other in pairs):
        return None
    join = [
        {
            topic: {part: max(end[topic].get(part, 0), other[topic].get(part, 0)) for part in end[topic] | other[topic]}
            for topic in end
        }
        for end, other in pairs
    ]
    return json.dumps(join, sort_keys=True, separators=(",", ":"))


def stood_still(txid: int, first: LedgerRecord) -> bool:
    """Whether a record has the value that it had under an earlier ledger, and at each moment since."""
    return first.last_txid is not None and txid <= first.last_txid


def goes_on(first: LedgerRecord, now: LedgerRecord) -> bool:
    """Whether all that counted under the earlier ledger has counted since, and is final where it was.

    A store that was put back is noticed as far as its ledger tells.
    """
    marks = [(of.first_txid, of.reset_txid, of.undone) for of in (first, now)]
    return (
        marks[0] == marks[1]
        and first.next_txid <= now.next_txid
        and (first.last_txid is None or first.last_txid in now.view())
    )


def keeps_absent(first: LedgerRecord, now: LedgerRecord) -> bool:
    """Whether a key without a record had none at any moment since the earlier ledger, or none with a value.

    Only a vacuum removes a record, after a batch has taken its value; and a forget, which may have begun before.
    """
    attempt = first.in_flight
    removes = attempt is not None and attempt.batch_id is None and attempt.kind != "vacuum"
    return first.rewrites == now.rewrites and not removes


def offsets_of(ledger: LedgerRecord) -> str | None:
    """Where the last batch of a version ended."""
    return None if ledger.last_commit is None else ledger.last_commit.offsets


def is_behind(ledger: LedgerRecord, position: str) -> bool:
    """Whether a version is before a position, in any partition."""
    return behind_by(position, offsets_of(ledger)) != []


def _is_same(known: PlanDigest, present: PlanDigest) -> bool:
    if known.upstream_txid is not None and present.upstream_txid not in (known.upstream_txid, None):
        return False
    if known.fingerprint is not None and present.fingerprint is not None:
        return known.fingerprint == present.fingerprint
    return known.end == present.end and known.start in ("", present.start)


def _is_younger(plan: BatchPlan, commit: Commit) -> bool:
    """Whether a batch was planned after a commit without a fingerprint.

    Offsets alone do not tell: a file source counts them in a log of its own, so two plans may have the same ones.
    """
    if plan.planned_at is None or not commit.at:
        return False
    return plan.planned_at > dt.datetime.fromisoformat(commit.at).timestamp() * 1000
