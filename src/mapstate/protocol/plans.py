"""Spark's plan of a batch, and the rules for a batch that comes with another plan than before."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from mapstate.protocol.ledger_record import Commit, InFlight, LedgerRecord, PlanDigest
from mapstate.protocol.refusals import (
    batch_elsewhere,
    batch_of_before,
    other_replay,
    overtaken,
    replanned_batch,
    starts_elsewhere,
)
from mapstate.schema import OnGap


class BatchPlan(NamedTuple):
    """A batch as Spark planned it.

    ``start``, ``end``       offsets: JSON lists with one entry per source, in the order of the sources
    ``planned_at``           the time of planning in milliseconds. The checkpoint has it before the batch runs, so a
                             replay has the same time and a new plan another one. None if it cannot be read
    ``previous_planned_at``  that of the batch before, None likewise
    ``upstream_txid``        for a state that follows another one: the txid of that state's commit of the batch
    ``filters``              the `digest_of_files` of each end behind which the query itself leaves files out
    """

    start: str
    end: str
    planned_at: int | None = None
    previous_planned_at: int | None = None
    upstream_txid: int | None = None
    filters: tuple[str, ...] = ()

    @property
    def offsets(self) -> tuple[str, str]:
        """Where the batch starts, and where it ends."""
        return self.start, self.end

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
    """Whether the state has committed this batch with another plan than the present one.

    A state that follows another one may also have counted another commit of that state. False if nobody can tell: the
    batch has no plan, or is not the present owner's last one.
    """
    last = _last_own(ledger)
    if plan is None or last is None or last.batch_id != batch_id or ledger.owners[ledger.owner] != batch_id + 1:
        return False
    known = _plan_of(last, ledger.previous)
    if known is None:
        return _is_younger(plan, last)
    return not _is_same(known, plan.digest()) or (known.fingerprint is None and _is_younger(plan, last))


def check_replanned(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
    """Check that the committed batch can be rolled back and counted anew under the present plan.

    Both plans have to start at the same offsets, so that one replaces the other. The state has to be opaque, and no
    later attempt may have begun: only then do the records still hold the values before the batch.

    Raises:
        ReplannedBatchError: The batch cannot be counted anew.
        FencedError: The state has counted a later upstream commit. A late driver brings the earlier one.

    """
    last = _last_own(ledger)
    if plan is None or last is None:
        return
    known = _plan_of(last, ledger.previous)
    if is_overtaken(known, plan.upstream_txid):
        raise overtaken(ledger, batch_id, plan.upstream_txid)
    if ledger.type != "opaque":
        why = f"the state is {ledger.type}, and only opaque records keep the value before"
    elif known is None or not _start_together(known, plan.digest()):
        why = "the plans do not start at the same offsets"
    elif ledger.in_flight is not None or ledger.next_txid != last.txid + 1:
        why = "a later attempt has begun and may have replaced the values before it"
    else:
        return
    raise replanned_batch(ledger, last, batch_id, plan.offsets, why)


def check_age(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
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


def check_follows(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
    """Refuse a batch that does not start where the state's last batch ended."""
    last = _last_own(ledger)
    if plan is None or last is None or last.batch_id != batch_id - 1:
        return
    known, present = _plan_of(last, ledger.previous), plan.digest()
    if known is None or (known.end == present.start and _may_be_equal(known.fingerprint, present.previous)):
        return
    raise batch_elsewhere(ledger, last, batch_id, plan.offsets)


def check_start(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None, on_gap: OnGap) -> None:
    """Refuse a new owner's first batch unless each source starts where the last owner's last batch ended.

    Sources and partitions that the last owner did not have may start anywhere, and with ``on_gap="accept"`` partitions
    may start later. What cannot be compared is refused.
    """
    last = ledger.last_commit
    if last is None or last.owner == ledger.owner or batch_id < ledger.owners[ledger.owner]:
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


def by_partition(offset: Any) -> dict[tuple[str, str], int] | None:
    """The numbers of an offset by topic and partition, as Kafka has them; None for an offset of another form."""
    topics = offset.values() if isinstance(offset, dict) else [None]
    if not all(isinstance(ends, dict) and all(type(end) is int for end in ends.values()) for ends in topics):
        return None
    return {(topic, partition): end for topic, ends in offset.items() for partition, end in ends.items()}


def digest_of_files(end: Mapping[str, Any]) -> str:
    """Of a file source's end in a ledger: which of its files are counted."""
    return _digest(json.dumps([end["newest"], sorted(end["paths"])]))


def _entries(offsets: str | None) -> list[Any] | None:
    try:
        entries = None if offsets is None else json.loads(offsets)
    except ValueError:
        return None
    return entries if isinstance(entries, list) else None


def is_overtaken(known: PlanDigest | None, upstream_txid: int | None) -> bool:
    """Whether a plan counts the upstream commit ``upstream_txid`` or a later one."""
    counted = None if known is None else known.upstream_txid
    return counted is not None and upstream_txid is not None and upstream_txid <= counted


def _is_same(known: PlanDigest, present: PlanDigest) -> bool:
    if known.upstream_txid is not None and present.upstream_txid not in (known.upstream_txid, None):
        return False
    if known.fingerprint is not None and present.fingerprint is not None:
        return known.fingerprint == present.fingerprint
    return known.end == present.end and known.start in ("", present.start)


def _start_together(known: PlanDigest, present: PlanDigest) -> bool:
    return known.start == present.start and _may_be_equal(known.previous, present.previous)


def _may_be_equal(left: str | None, right: str | None) -> bool:
    return left == right or left is None or right is None


def _is_younger(plan: BatchPlan, commit: Commit) -> bool:
    """Whether a batch was planned after a commit without a fingerprint.

    Offsets alone do not tell: a file source counts them in a log of its own, so two plans may have the same ones.
    """
    if plan.planned_at is None or not commit.at:
        return False
    return plan.planned_at > dt.datetime.fromisoformat(commit.at).timestamp() * 1000


def _last_own(ledger: LedgerRecord) -> Commit | None:
    """The last commit, if it is the present owner's. Another query's batch ids and offsets cannot be compared."""
    last = ledger.last_commit
    return last if last is not None and last.owner == ledger.owner else None


def _plan_of(commit: Commit, previous: Commit | None) -> PlanDigest | None:
    """The plan of a commit; without one, as much of it as the offsets tell. ``start`` is "" if unknown."""
    if commit.plan is not None or commit.offsets is None:
        return commit.plan
    start = ""
    try:
        if previous is not None and (previous.owner, previous.batch_id) == (commit.owner, commit.batch_id - 1):
            start = "" if previous.offsets is None else _digest(_source_offsets(previous.offsets))
        return PlanDigest(None, None, start, _digest(_source_offsets(commit.offsets)))
    except (ValueError, TypeError):  # a source may have offsets that are no JSON
        return None


def _source_offsets(offsets: str) -> str:
    """The offsets of a `Commit` in the form of a `BatchPlan`."""
    return json.dumps([_own_offset(entry) for entry in json.loads(offsets)], sort_keys=True, separators=(",", ":"))


def _own_offset(entry: Any) -> Any:
    """The offset alone: a file source's entry also has the source's name and the files read."""
    is_file = isinstance(entry, dict) and isinstance(entry.get("source"), str) and "logOffset" in entry
    return {"logOffset": entry["logOffset"]} if is_file else entry


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
