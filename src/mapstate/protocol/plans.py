"""Spark's plan of a batch, and the rules for a batch that comes with another plan than before."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from typing import Any, NamedTuple

from mapstate.protocol.ledger_record import Commit, InFlight, LedgerRecord, PlanDigest
from mapstate.protocol.refusals import batch_elsewhere, batch_of_before, other_replay


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
        return PlanDigest(
            None if self.planned_at is None else digest_of(f"{self.planned_at} {self.end}"),
            None if self.previous_planned_at is None else digest_of(f"{self.previous_planned_at} {self.start}"),
            digest_of(self.start),
            digest_of(self.end),
            self.upstream_txid,
        )


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


def check_follows(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
    """Refuse a batch that does not start where the state's last batch ended."""
    last = last_own(ledger)
    if plan is None or last is None or last.batch_id != batch_id - 1:
        return
    known, present = plan_of(last, ledger.previous), plan.digest()
    if known is None or (known.end == present.start and may_be_equal(known.fingerprint, present.previous)):
        return
    raise batch_elsewhere(ledger, last, batch_id, plan.offsets)


def by_partition(offset: Any) -> dict[tuple[str, str], int] | None:
    """The numbers of an offset by topic and partition, as Kafka has them; None for an offset of another form."""
    topics = offset.values() if isinstance(offset, dict) else [None]
    if not all(isinstance(ends, dict) and all(type(end) is int for end in ends.values()) for ends in topics):
        return None
    return {(topic, partition): end for topic, ends in offset.items() for partition, end in ends.items()}


def behind_by(ends: str | None, others: str | None) -> list[str] | None:
    """Where the offsets ``others`` of a query are before ``ends``, in words; None where they cannot be compared."""
    try:
        known, found = json.loads(ends or ""), json.loads(others or "")
    except ValueError:
        return None
    if not isinstance(known, list) or not isinstance(found, list) or len(known) != len(found):
        return None
    behind = []
    for end, other in zip(known, found, strict=True):
        numbers, reached = by_partition(end), by_partition(other)
        if not numbers or reached is None:
            return None
        for (topic, partition), number in numbers.items():
            at = reached.get((topic, partition), 0)
            if at < number:
                behind.append(f"partition {partition} of {topic} by {number - at:,}")
    return behind


def _is_same(known: PlanDigest, present: PlanDigest) -> bool:
    if known.upstream_txid is not None and present.upstream_txid not in (known.upstream_txid, None):
        return False
    if known.fingerprint is not None and present.fingerprint is not None:
        return known.fingerprint == present.fingerprint
    return known.end == present.end and known.start in ("", present.start)


def may_be_equal(left: str | None, right: str | None) -> bool:
    """Whether two fingerprints are the same, as far as both are known."""
    return left == right or left is None or right is None


def _is_younger(plan: BatchPlan, commit: Commit) -> bool:
    """Whether a batch was planned after a commit without a fingerprint.

    Offsets alone do not tell: a file source counts them in a log of its own, so two plans may have the same ones.
    """
    if plan.planned_at is None or not commit.at:
        return False
    return plan.planned_at > dt.datetime.fromisoformat(commit.at).timestamp() * 1000


def last_own(ledger: LedgerRecord) -> Commit | None:
    """The last commit, if it is the present owner's. Another query's batch ids and offsets cannot be compared."""
    last = ledger.last_commit
    return None if last is None or last.owner != ledger.owner else last


def plan_of(commit: Commit, previous: Commit | None) -> PlanDigest | None:
    """The plan of a commit; without one, as much of it as the offsets tell. ``start`` is "" if unknown."""
    if commit.plan is not None or commit.offsets is None:
        return commit.plan
    start = ""
    try:
        if previous is not None and (previous.owner, previous.batch_id) == (commit.owner, commit.batch_id - 1):
            start = "" if previous.offsets is None else digest_of(_source_offsets(previous.offsets))
        return PlanDigest(None, None, start, digest_of(_source_offsets(commit.offsets)))
    except (ValueError, TypeError):  # a source may have offsets that are no JSON
        return None


def _source_offsets(offsets: str) -> str:
    """The offsets of a `Commit` in the form of a `BatchPlan`."""
    return json.dumps([_own_offset(entry) for entry in json.loads(offsets)], sort_keys=True, separators=(",", ":"))


def _own_offset(entry: Any) -> Any:
    """The offset alone: a file source's entry also has the source's name and the files read."""
    is_file = isinstance(entry, dict) and isinstance(entry.get("source"), str) and "logOffset" in entry
    return {"logOffset": entry["logOffset"]} if is_file else entry


def digest_of(text: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
