"""The ledger's rules: one pure function per event.

Each takes the ledger as it was read and returns the ledger as it shall be; nothing here does I/O,
asks the clock or keeps anything. `mapstate.ledger` runs them against a store by compare-and-set.

The rules were searched exhaustively. What looks like a simplification of one usually is a
counterexample: docs/protocol.md lists those that are known.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from mapstate.backing_map import FenceToken
from mapstate.errors import (
    FencedError,
    MissingBatchesError,
    ReplannedBatchError,
    RollbackError,
    StaleBatchError,
    StateOwnershipError,
    StateSchemaError,
    UsageError,
)
from mapstate.keys import KeyField
from mapstate.values import Committed, cut

__all__ = [
    "DROPPER",
    "AlreadyCommitted",
    "BatchPlan",
    "Begun",
    "Commit",
    "Field",
    "InFlight",
    "LedgerRecord",
    "OnGap",
    "OnNewOwner",
    "Opening",
    "PlanDigest",
    "StateType",
    "begin",
    "begin_drop",
    "begin_vacuum",
    "check_adopted",
    "check_follower",
    "check_replanned",
    "check_vacuum",
    "commit",
    "commit_vacuum",
    "even_out",
    "forget_dead",
    "give_up",
    "has_last_batch",
    "is_older",
    "is_replanned",
    "missing_batches",
    "open_ledger",
    "recount",
    "rollback",
]

StateType = Literal["non-transactional", "transactional", "opaque"]
OnNewOwner = Literal["refuse", "adopt", "reset"]
OnGap = Literal["refuse", "accept"]

FORMAT = 1
_NEVER = 1 << 63  # above all batch ids

DROPPER = "mapstate drop"
"""The owner in the ledger of a state that is being removed. No query has such an id."""


class Field(NamedTuple):
    """One aggregate of the state: its name, its aggregator's name and the type it accumulates."""

    name: str
    aggregator: str
    type: str


class PlanDigest(msgspec.Struct, frozen=True):
    """What a ledger keeps of a `BatchPlan`: the same digests, the same plan. Each is 16 hexadecimal digits.

    ``fingerprint`` is that of the plan, ``previous`` that of the batch before it; None if only offsets could be read.
    ``upstream_txid`` is as in `BatchPlan`.
    """

    fingerprint: str | None
    previous: str | None
    start: str
    end: str
    upstream_txid: int | None = None


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


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that counts. ``at`` is ISO 8601 in UTC; ``offsets`` the source's, where known.

    ``run`` names the start of the query that brought it: within one, no batch comes twice. ``plan`` is what Spark had
    planned for it, None where no checkpoint says. ``apart_from`` names the states of the topology whose commit of this
    batch is a write of its own, so that they may lack it.
    ``keys_delta`` is how many keys the attempt added, less those that it removed; None if it cannot tell.
    ``keys_held`` is how many keys the state holds after the batch; None if unknown. `commit` computes it.
    ``last_txid_before`` is the ledger's last txid before the batch: of another commit, a vacuum, or adopted records.
    """

    batch_id: int
    txid: int
    owner: str
    rows: int = 0
    keys: int = 0
    at: str = ""
    offsets: str | None = None
    run: str | None = None
    plan: PlanDigest | None = None
    keys_delta: int | None = None
    keys_held: int | None = None
    apart_from: tuple[str, ...] = ()
    last_txid_before: int | None = None


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that may write, if its epoch is still the ledger's. No batch id: a vacuum.

    ``nonce`` is a random name: a store that was put back gives out the same epoch and txid again. ``at`` is
    when it was begun, ISO 8601 in UTC, for people: nothing is decided by it.
    """

    txid: int
    epoch: int
    batch_id: int | None
    nonce: str = ""
    at: str = ""
    plan: PlanDigest | None = None


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state's own record: who owns it, what is committed, in flight, dead.

    ``owners``     each query id that ever owned the state, and the batch id it must bring next
    ``session``    a random name of the opening that made this epoch
    ``last_txid``  the highest committed txid, of a batch or a vacuum; None if nothing counts
    ``committed``  the last committed batch; ``previous`` the one before it
    ``dead``       txids below ``last_txid`` that do not count, as inclusive ranges
    ``layouts``    pairs (txid, n): from this txid on, records hold n fields
    ``rewrites``   how many vacuums have begun: since then records may have been purged
    ``initial_keys`` how many keys the state held before its first batch, None if unknown
    ``has_had_ttl``   no commit knows how many keys such a state holds
    """

    format: int = FORMAT
    state: str
    type: StateType
    serializer: str
    keys: tuple[KeyField, ...]
    fields: tuple[Field, ...]
    layouts: tuple[tuple[int, int], ...]
    owner: str
    owners: dict[str, int]
    epoch: int
    session: str
    first_txid: int
    next_txid: int
    last_txid: int | None = None
    committed: Commit | None = None
    previous: Commit | None = None
    in_flight: InFlight | None = None
    dead: tuple[tuple[int, int], ...] = ()
    floor: int = 0
    rewrites: int = 0
    initial_keys: int | None = None
    has_had_ttl: bool = False

    def keys_held(self) -> int | None:
        """The number of keys with a committed value. None if unknown; see docs/operating.md#how-many-keys."""
        if self.has_had_ttl:
            return None
        return self.initial_keys if self.committed is None else self.committed.keys_held

    def contents(self) -> tuple[Any, ...]:
        """Equal for two ledgers under which an opaque state has the same committed values, and no vacuum between."""
        return self.first_txid, self.floor, self.last_txid, self.dead, self.rewrites

    def view(self) -> Committed:
        """What counts, as of this ledger."""
        return Committed(self.last_txid, self.dead, self.floor, self.first_txid)

    def fence(self) -> FenceToken:
        """Who may write under this ledger. Open only for an attempt begun in this epoch."""
        at = self.in_flight
        if at is not None and at.epoch == self.epoch:
            return FenceToken(self.epoch, at.txid, nonce=at.nonce)
        below = self.next_txid if at is None else at.txid  # a transactional txid may be begun again
        return FenceToken(self.epoch, below - 1, closed=True)


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver brings to `open_ledger`. ``clock_txid`` is where a new ledger's txids start.

    ``has_ttl``: the driver's records have a ttl.
    """

    state: str
    type: StateType
    serializer: str
    keys: tuple[KeyField, ...]
    fields: tuple[Field, ...]
    owner: str
    session: str = ""
    clock_txid: int
    on_new_owner: OnNewOwner = "refuse"
    has_ttl: bool = False


class Begun(NamedTuple):
    """An attempt: its txid and the view under which it judges what it reads."""

    batch_id: int
    txid: int
    view: Committed
    token: FenceToken


class AlreadyCommitted(NamedTuple):
    """The batch counts already: Spark died before its own commit log said so.

    ``commit`` is None where another owner has committed since, so that the batch's own records can
    no longer be told from later ones.
    """

    batch_id: int
    commit: Commit | None
    view: Committed


def open_ledger(ledger: LedgerRecord | None, opening: Opening) -> LedgerRecord:
    """A driver takes the state: a new epoch, which fences every driver before it.

    Raises StateSchemaError, StateOwnershipError, UsageError (reset of a non-transactional state).
    """
    if ledger is None:
        return LedgerRecord(
            state=opening.state,
            type=opening.type,
            serializer=opening.serializer,
            keys=opening.keys,
            fields=opening.fields,
            layouts=((opening.clock_txid, len(opening.fields)),),
            owner=opening.owner,
            owners={opening.owner: 0},
            epoch=1,
            session=opening.session,
            first_txid=opening.clock_txid,
            next_txid=opening.clock_txid,
            initial_keys=0,
            has_had_ttl=opening.has_ttl,
        )
    if ledger.owner == DROPPER:
        raise StateOwnershipError(
            f"state {ledger.state!r} is being removed, or its removal was interrupted: some of its records are gone. "
            "Nothing was written. Run mapstate drop again until it ends, and then start the job.",
            state=ledger.state,
            owner=ledger.owner,
        )
    ledger = _with_fields(ledger, opening)
    if ledger.owner != opening.owner:
        ledger = _with_owner(ledger, opening)
    return msgspec.structs.replace(
        ledger, epoch=ledger.epoch + 1, session=opening.session, has_had_ttl=ledger.has_had_ttl or opening.has_ttl
    )


def _with_fields(ledger: LedgerRecord, opening: Opening) -> LedgerRecord:
    """Checks the schema; fields that are new are added behind those that are there."""
    for what, found, asked in (
        ("type", ledger.type, opening.type),
        ("serializer", ledger.serializer, opening.serializer),
        ("key schema", _schema(ledger.keys), _schema(opening.keys)),
    ):
        if found != asked:
            raise _schema_error(ledger.state, what, found, asked)
    there = {field.name: field for field in ledger.fields}
    asked_for = {field.name: field for field in opening.fields}
    for name, field in there.items():
        if asked_for.get(name) != field:
            raise _schema_error(
                ledger.state,
                "field",
                _schema([field]),
                _schema([asked_for[name]] if name in asked_for else []),
            )
    added = tuple(field for field in opening.fields if field.name not in there)
    if not added:
        return ledger
    if ledger.type == "non-transactional":
        raise _schema_error(
            ledger.state,
            "fields (a non-transactional record has no txid to tell old records from wider ones)",
            _schema(ledger.fields),
            _schema(opening.fields),
        )
    if ledger.type == "transactional" and ledger.in_flight is not None:
        raise StateSchemaError(
            f"state {ledger.state!r}: {_schema(added)} cannot be added while txid {ledger.in_flight.txid} is "
            "in flight, because a transactional attempt has to be repeated as it was. Run the job once "
            "with the fields as they were, then add them.",
            state=ledger.state,
        )
    fields = ledger.fields + added
    return msgspec.structs.replace(ledger, fields=fields, layouts=(*ledger.layouts, (ledger.next_txid, len(fields))))


def _with_owner(ledger: LedgerRecord, opening: Opening) -> LedgerRecord:
    """Hands the state to another streaming query, as its recipe asks, or where its owner has nothing in it."""
    owners = {opening.owner: 0} | ledger.owners
    gives_way = _gives_way(ledger)
    if opening.on_new_owner == "adopt" and not gives_way:
        if ledger.type == "transactional" and ledger.in_flight is not None:
            raise StateOwnershipError(
                f"state {ledger.state!r} cannot be adopted: query {ledger.owner} left txid "
                f"{ledger.in_flight.txid} (batch {ledger.in_flight.batch_id}) in flight, and a transactional "
                "attempt can only be finished by the query that began it. Run that query once more from its "
                "own checkpoint, or start empty with on_new_owner='reset'.",
                state=ledger.state,
                owner=ledger.owner,
            )
        # What was in flight is left behind: above last_txid, it does not count, and never will.
        return msgspec.structs.replace(
            _after_a_failed_attempt(ledger), owner=opening.owner, owners=owners, in_flight=None
        )
    if opening.on_new_owner == "reset" or gives_way:
        if ledger.type == "non-transactional" and not gives_way:
            raise UsageError(
                f"state {ledger.state!r} is non-transactional and cannot be reset: its records carry no txid "
                "that would tell old from new. Remove it (mapstate drop), or give the state another name."
            )
        # Nothing is deleted: a late writer or a reader may still be at work below the floor.
        return msgspec.structs.replace(
            ledger,
            owner=opening.owner,
            owners=owners,
            in_flight=None,
            floor=ledger.next_txid,
            last_txid=None,
            committed=None,
            previous=None,
            dead=(),
            initial_keys=0,
            has_had_ttl=False,
        )
    last, at = ledger.committed, ledger.in_flight
    if ledger.last_txid is None and not any(ledger.owners.values()):
        began = "its batches were rolled back" if at is None else f"txid {at.txid} is in flight since {at.at or '?'}"
        way_out = "start once with on_new_owner='reset'; nothing counts, so nothing is lost"
        if ledger.type == "non-transactional":
            way_out = "remove the state (mapstate drop --force), because what was written there counts"
        raise StateOwnershipError(
            f"state {ledger.state!r} belongs to streaming query {ledger.owner}, which has not committed a batch "
            f"({began}); this is query {opening.owner}. Nothing was written. Where that query runs, give this job a "
            f"state of its own. Where its driver is gone, {way_out}.",
            state=ledger.state,
            owner=ledger.owner,
            asked_by=opening.owner,
        )
    there = "nothing committed yet" if last is None else f"batch {last.batch_id} committed {last.at}, {last.keys} keys"
    raise StateOwnershipError(
        f"state {ledger.state!r} belongs to streaming query {ledger.owner} ({there}); this is query "
        f"{opening.owner}: its checkpoint is new or another one, or a second job uses the same state. "
        "Restore the old checkpoint, or give this job a state of its own, or say what shall be: "
        "on_new_owner='adopt' counts on above what is there, 'reset' starts empty.",
        state=ledger.state,
        owner=ledger.owner,
        asked_by=opening.owner,
    )


def _gives_way(ledger: LedgerRecord) -> bool:
    """Whether no batch counts, of no owner, and no attempt in flight could still be committed.

    What such an owner has written lies below the floor of the next one. Records without a txid do not, so a
    non-transactional state gives way only where nothing has begun in it.
    """
    if ledger.last_txid is not None or any(ledger.owners.values()):
        return False
    if ledger.type == "non-transactional":
        return ledger.next_txid == ledger.first_txid
    return ledger.in_flight is None or ledger.in_flight.epoch != ledger.epoch


def give_up(ledger: LedgerRecord, session: str) -> LedgerRecord:
    """The driver's batch has failed: its attempt is left behind, as by a restart, and the fence closes.

    A transactional attempt keeps its txid, under which it is begun again. Nothing changes where another driver has
    opened the state, or nothing is in flight.
    """
    at = ledger.in_flight
    if ledger.session != session or at is None or at.epoch != ledger.epoch:
        return ledger
    return msgspec.structs.replace(ledger, epoch=ledger.epoch + 1)


def begin(
    ledger: LedgerRecord,
    session: str,
    batch_id: int,
    on_gap: OnGap = "refuse",
    nonce: str = "",
    *,
    at: str = "",
    plan: BatchPlan | None = None,
) -> tuple[LedgerRecord, Begun | AlreadyCommitted]:
    """Starts an attempt at a batch. An opaque attempt always gets a txid of its own.

    ``plan`` is what Spark planned for the batch; None, of a batch that is given by hand, skips what is said here. A
    committed batch that Spark brings with another plan was planned anew, from a checkpoint that is one batch older than
    the state: it is rolled back and begun, see `check_replanned`.

    Raises FencedError, StaleBatchError, MissingBatchesError, ReplannedBatchError.
    """
    _check_session(ledger, session)
    if is_replanned(ledger, batch_id, plan):
        check_replanned(ledger, batch_id, plan)
        ledger = rollback(ledger)
    due = ledger.owners[ledger.owner]
    if batch_id < due:
        _check_age(ledger, batch_id, plan)
        return ledger, _already_committed(ledger, batch_id, due)
    repeat = ledger.in_flight if ledger.type == "transactional" else None
    if repeat is not None and repeat.batch_id is not None:
        if repeat.batch_id != batch_id:
            raise _missing(ledger, batch_id, repeat.batch_id, accept=False)
        _check_repeated(ledger, repeat, plan)
        txid, next_txid = repeat.txid, ledger.next_txid
    else:
        if on_gap != "accept":
            if batch_id > due:
                raise _missing(ledger, batch_id, due, accept=True)
            _check_follows(ledger, batch_id, plan)
        txid, next_txid = ledger.next_txid, ledger.next_txid + 1
    after = msgspec.structs.replace(
        _after_a_failed_attempt(ledger),
        next_txid=next_txid,
        in_flight=InFlight(
            txid=txid,
            epoch=ledger.epoch,
            batch_id=batch_id,
            nonce=nonce,
            at=at,
            plan=None if plan is None else plan.digest(),
        ),
    )
    return after, Begun(batch_id, txid, ledger.view(), after.fence())


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


def _is_same(known: PlanDigest, found: PlanDigest) -> bool:
    if known.upstream_txid is not None and found.upstream_txid not in (known.upstream_txid, None):
        return False
    if known.fingerprint is not None and found.fingerprint is not None:
        return known.fingerprint == found.fingerprint
    return known.end == found.end and known.start in ("", found.start)


def _is_overtaken(known: PlanDigest | None, upstream_txid: int | None) -> bool:
    counted = None if known is None else known.upstream_txid
    return counted is not None and upstream_txid is not None and upstream_txid <= counted


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
    if _is_overtaken(known, plan.upstream_txid):
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


def _check_age(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
    """A batch that was committed before another query took the state was not planned after that one's commit."""
    last = ledger.committed
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


def _check_repeated(ledger: LedgerRecord, repeat: InFlight, plan: BatchPlan | None) -> None:
    """A transactional attempt is begun again under its txid only with the plan that it had."""
    if plan is None or repeat.plan is None or _is_same(repeat.plan, plan.digest()):
        return
    last = ledger.committed
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


def _check_follows(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None) -> None:
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


def _last_own(ledger: LedgerRecord) -> Commit | None:
    """The last commit, if it is the present owner's: batch ids and offsets of another query say nothing here."""
    last = ledger.committed
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


def _already_committed(ledger: LedgerRecord, batch_id: int, due: int) -> AlreadyCommitted:
    last = ledger.committed
    own = last is not None and last.owner == ledger.owner
    if batch_id < due - 1 or (own and last is not None and last.batch_id < batch_id):
        raise StaleBatchError(
            f"state {ledger.state!r}: Spark brings batch {batch_id}, but the state is beyond it and waits for batch "
            f"{due} of this query: the checkpoint is older than the state (restored from a copy?). Nothing was written."
            " Put the newer checkpoint back, or roll the store back with it.",
            state=ledger.state,
            found=batch_id,
            expected=due,
        )
    known = own and last is not None and last.txid >= ledger.floor
    return AlreadyCommitted(batch_id, last if known else None, ledger.view())


def is_older(ledger: LedgerRecord, known: LedgerRecord) -> bool:
    """Whether a ledger is of before ``known``, of the same life of the state: nothing but a copy put back makes that.

    Epochs and txids only go up, and who takes a state over raises the epoch.
    """
    if ledger.first_txid != known.first_txid:
        return False
    return ledger.epoch < known.epoch or (ledger.session == known.session and ledger.next_txid < known.next_txid)


def missing_batches(ledger: LedgerRecord, batch_id: int, due: int) -> MissingBatchesError:
    """Spark brings a batch, and the state has still to get the one that is ``due``."""
    return _missing(ledger, batch_id, due, accept=True)


def _missing(ledger: LedgerRecord, batch_id: int, due: int, *, accept: bool) -> MissingBatchesError:
    way_out = " on_gap='accept' goes on without them." if accept else ""
    if ledger.next_txid == ledger.first_txid:
        return MissingBatchesError(
            f"Spark brings batch {batch_id}, not {due}, but there is no state {ledger.state!r} here yet. Nothing was "
            "written. If the store was emptied: restore a copy and run mapstate rewind, or take a new checkpoint. If "
            "this job is new to the state: run it once with on_gap='accept'. See "
            "docs/operating.md#a-store-that-was-emptied",
            state=ledger.state,
            found=batch_id,
            expected=due,
        )
    return MissingBatchesError(
        f"state {ledger.state!r}: Spark brings batch {batch_id}, but the state has still to get batch {due} of "
        "this query: the store lost batches (flushed, restored from a snapshot, failed over), or the state was "
        "left out of the job for a while. Nothing was written. Rewind the checkpoint to the state, or reset "
        f"the state and replay the source.{way_out}",
        state=ledger.state,
        found=batch_id,
        expected=due,
    )


def commit(ledger: LedgerRecord, session: str, done: Commit) -> LedgerRecord:
    """The attempt ``done.txid`` counts from here on, with everything it wrote.

    Saying it twice is no error: a lost reply is asked again. Raises FencedError.
    """
    _check_session(ledger, session)
    if ledger.committed is not None and ledger.committed.txid == done.txid:
        return ledger
    at = _check_in_flight(ledger, done.txid)
    if at.batch_id != done.batch_id:
        raise UsageError(f"txid {done.txid} was begun for batch {at.batch_id}, not for batch {done.batch_id}")
    held = ledger.keys_held()
    held = None if held is None or done.keys_delta is None else held + done.keys_delta
    return msgspec.structs.replace(
        ledger,
        committed=msgspec.structs.replace(done, plan=at.plan, keys_held=held, last_txid_before=ledger.last_txid),
        previous=ledger.committed,
        in_flight=None,
        owners=ledger.owners | {ledger.owner: done.batch_id + 1},
        last_txid=done.txid,
        dead=_dead_up_to(ledger, done.txid),
    )


def _dead_up_to(ledger: LedgerRecord, txid: int) -> tuple[tuple[int, int], ...]:
    """``dead`` after a commit: whatever lies between two commits was begun and did not count."""
    low = max(ledger.first_txid, ledger.floor) if ledger.last_txid is None else ledger.last_txid + 1
    return (*ledger.dead, (low, txid - 1)) if low < txid else ledger.dead


def rollback(ledger: LedgerRecord, txid: int | None = None) -> LedgerRecord:
    """Takes the last batch back: every reader sees the state as before it, at once.

    Opaque only, one step, and only while no later attempt has begun. The streaming checkpoint has to
    be rewound with it. ``txid`` is that of the batch that is meant; None: whichever is the last. Raises
    RollbackError, also where another batch is the last one.
    """
    last = ledger.committed
    if ledger.type != "opaque":
        raise RollbackError(f"state {ledger.state!r} is {ledger.type}: only opaque records keep the value before")
    if last is None or ledger.in_flight is not None or ledger.next_txid != last.txid + 1:
        raise RollbackError(
            f"state {ledger.state!r} can only be rolled back by one batch, while it is committed and nothing has "
            f"begun after it: committed is {None if last is None else f'txid {last.txid}'}, the next txid is "
            f"{ledger.next_txid}. Records keep one value before the current one, and a later attempt may have "
            "used it.",
            state=ledger.state,
        )
    if txid is not None and last.txid != txid:
        raise RollbackError(
            f"state {ledger.state!r}: the last batch is {last.batch_id} (txid {last.txid}), not txid {txid}: a batch "
            "has been committed or taken back meanwhile. Nothing was changed: stop the query, and look again.",
            state=ledger.state,
            found=last.txid,
            expected=txid,
        )
    previous = ledger.previous
    low = last.last_txid_before
    if low is None and previous is not None:
        low = previous.txid  # a commit of an older mapstate
    return msgspec.structs.replace(
        ledger,
        committed=previous,
        previous=None,
        last_txid=low,
        dead=tuple(span for span in ledger.dead if low is not None and span[1] < low),
        owners=ledger.owners | {last.owner: last.batch_id},
    )


def even_out(ledgers: Sequence[LedgerRecord], sessions: Sequence[str], batch_id: int) -> list[LedgerRecord]:
    """The ledgers of one topology, and those that are a batch ahead of the others rolled back. Before `begin`.

    One is ahead where a driver died, or failed, between its commit and that of another store; or where an operator
    has rolled the others back. Whoever calls has opened all of them, so that nobody else commits meanwhile. What
    differs by more is left to `begin`. Raises FencedError, and RollbackError where one cannot be rolled back.
    """
    for ledger, session in zip(ledgers, sessions, strict=True):
        _check_session(ledger, session)
    return [_rolled_back(one, ledgers) if _is_ahead(one, ledgers, batch_id) else one for one in ledgers]


def check_adopted(ledgers: Sequence[LedgerRecord], on_gaps: Sequence[OnGap]) -> None:
    """Of the states of one topology, those that another query has kept last have to hold the same batches of it.

    Behind `even_out`, before `begin`. Of states that came from different queries nobody can tell. Raises
    MissingBatchesError; not for a state whose ``on_gap`` is "accept".
    """
    for behind, on_gap in zip(ledgers, on_gaps, strict=True):
        last = behind.committed
        if last is None or last.owner == behind.owner or on_gap == "accept":
            continue
        for ahead in ledgers:
            if ahead.committed is not None and ahead.committed.owner == last.owner:
                _check_no_further(ahead, ahead.committed, behind, last)


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
            known = None if follower.committed is None else follower.committed.plan
            # Overtaken, if the first was put back and gives out its txids again.
            if is_replanned(follower, batch_id, anew) and not _is_overtaken(known, anew.upstream_txid):
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
        None if one is None or how == "reset" else one.committed for one, how in zip(found, on_new_owners, strict=True)
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


def _is_ahead(ledger: LedgerRecord, ledgers: Sequence[LedgerRecord], batch_id: int) -> bool:
    last = ledger.committed
    if last is None:
        return False
    if last.owner == ledger.owner:
        due = last.batch_id == batch_id and ledger.owners[last.owner] == batch_id + 1
        return due and any(other.owners[other.owner] <= batch_id for other in ledgers)
    # What another query left behind: its batch ids say nothing of this one's. A state that this query never kept, or
    # that had its batch and was reset since, lacks nothing, though it is empty as the other was before its first batch.
    return any(
        _place(other.committed) == _place(ledger.previous) and other.owners.get(last.owner, _NEVER) <= last.batch_id
        for other in ledgers
        if other is not ledger
    )


def _place(commit: Commit | None) -> tuple[str, int] | None:
    return None if commit is None else (commit.owner, commit.batch_id)


def _rolled_back(ledger: LedgerRecord, ledgers: Sequence[LedgerRecord]) -> LedgerRecord:
    try:
        return rollback(ledger)
    except RollbackError as error:
        names = ", ".join(repr(other.state) for other in ledgers if other is not ledger)
        last = ledger.committed
        raise RollbackError(
            f"state {ledger.state!r} is ahead of the other states of its topology ({names}): it counts batch "
            f"{None if last is None else last.batch_id}, and not all of them do. To be even it would have to be rolled "
            f"back, but {error.message} Nothing was written. Restore all of them from one moment and rewind the "
            "checkpoint, or reset them all (on_new_owner='reset', with a new checkpoint) and replay the source.",
            state=ledger.state,
        ) from error


def begin_vacuum(
    ledger: LedgerRecord, session: str, *, take_over: bool = False, at: str = "", seen: LedgerRecord | None = None
) -> tuple[LedgerRecord, Begun]:
    """Starts an attempt that rewrites what does not count, with a txid of its own and through the fence.

    Only while nothing is in flight. A batch that begins meanwhile fences it, harmlessly. ``take_over``
    leaves an attempt in flight behind, as a restart of its driver would: the state is opened anew
    under ``session``, so a driver that lives is fenced. ``rewrites`` counts from here on and not from the
    end, because a reader must not take what is purged in between for absent. ``seen`` is the ledger whose last batch
    the caller has looked at. Raises UsageError, and FencedError where another batch has been committed since.
    """
    if ledger.type != "opaque":
        raise UsageError(f"state {ledger.state!r} is {ledger.type}: only opaque states leave dead records behind")
    found = ledger.in_flight
    if found is not None and found.epoch == ledger.epoch:
        if not take_over:
            raise UsageError(
                f"state {ledger.state!r} has txid {found.txid} in flight: vacuum it between two batches; or, where the "
                "driver that began it is gone, take the state over (that fences it)"
            )
        ledger = msgspec.structs.replace(ledger, epoch=ledger.epoch + 1, session=session)
    if seen is not None and seen.committed != ledger.committed:
        raise _changed_meanwhile(ledger)
    txid = ledger.next_txid
    after = msgspec.structs.replace(
        ledger,
        next_txid=txid + 1,
        in_flight=InFlight(txid=txid, epoch=ledger.epoch, batch_id=None, nonce=session, at=at),
        rewrites=ledger.rewrites + 1,
    )
    return after, Begun(-1, txid, ledger.view(), after.fence())


def check_vacuum(ledger: LedgerRecord) -> None:
    """Before a vacuum that would rewrite: whether the last batch may still have to be rolled back.

    A batch that a topology commits in several writes is rolled back where the driver died between them, and a
    vacuum's txid stands in the way of that. Raises UsageError.
    """
    last = ledger.committed
    if last is None or not last.apart_from or ledger.next_txid != last.txid + 1:
        return  # what began later began in all of them
    names = ", ".join(map(repr, last.apart_from))
    raise UsageError(
        f"state {ledger.state!r} has records to rewrite, but its batch {last.batch_id} was committed apart from {names}"
        ": where one of them lacks it, the next start rolls it back, and a vacuum would prevent that. Nothing was "
        f"written. Name those states with their stores (beside=..., --beside URL#STATE): the vacuum runs where they "
        f"have batch {last.batch_id} too."
    )


def has_last_batch(ledger: LedgerRecord, other: LedgerRecord) -> bool:
    """Whether ``other``, of the same topology, counts the last batch of ``ledger``."""
    last, its_last = ledger.committed, other.committed
    return _place(last) == _place(its_last)


def forget_dead(ledger: LedgerRecord, seen: LedgerRecord, held: int | None = None) -> LedgerRecord:
    """Nothing is dead any more, where no record of ``seen`` was: a vacuum that has nothing to rewrite.

    ``held`` is the number of keys that it found, see `commit_vacuum`.
    It uses no txid, so the last batch can be rolled back as before. Raises FencedError where the ledger has changed
    since the records were read, because a later commit may have left dead ones behind.
    """
    if ledger != seen:
        raise _changed_meanwhile(ledger)
    counted = _with_found_keys(ledger, held)
    return msgspec.structs.replace(counted, dead=()) if counted.dead else counted


def _changed_meanwhile(ledger: LedgerRecord) -> FencedError:
    return FencedError(
        f"the ledger of state {ledger.state!r} has changed while a vacuum read the records: a batch has begun. Nothing "
        "was written. Run the vacuum again, between two batches.",
        state=ledger.state,
    )


def commit_vacuum(ledger: LedgerRecord, txid: int, *, fenced: bool = True, held: int | None = None) -> LedgerRecord:
    """Nothing is dead any more; the last batch stays what it was. Raises FencedError.

    ``held`` is the number of keys that the vacuum found. It becomes the ledger's only if that is unknown: a lower
    number means lost records, which a vacuum must not cover up.

    Where the store is not ``fenced`` a late writer may still come, with a record of an attempt that is
    forgotten here. There the vacuum has rewritten every record, and what is below its txid reads as absent.
    """
    if ledger.last_txid == txid:
        return ledger
    _check_in_flight(ledger, txid)
    return msgspec.structs.replace(
        _with_found_keys(ledger, held),
        in_flight=None,
        last_txid=txid,
        dead=(),
        floor=ledger.floor if fenced else txid,
    )


def recount(ledger: LedgerRecord, counted: LedgerRecord, held: int) -> LedgerRecord:
    """Takes ``held`` for the number of keys, as found under the ledger ``counted``. An operator's word.

    Raises UsageError if a batch was committed or a vacuum began since, for a state with a ttl, and with an attempt in
    flight for one that is not opaque.
    """
    if ledger.has_had_ttl:
        raise UsageError(
            f"state {ledger.state!r} has or had a ttl: its records expire without a word, so a number would soon be "
            "wrong. Nothing was written.",
            state=ledger.state,
        )
    if ledger.in_flight is not None and ledger.type != "opaque":
        raise UsageError(
            f"state {ledger.state!r} is {ledger.type} and has txid {ledger.in_flight.txid} in flight, whose keys are "
            "there and do not count yet. Nothing was written. Let the query end that batch, and count again.",
            state=ledger.state,
        )
    if ledger.contents() != counted.contents():
        raise UsageError(
            f"state {ledger.state!r}: a batch was committed or a vacuum began during the count. Nothing was written. "
            "Count again between two batches, or stop the query first.",
            state=ledger.state,
        )
    if held != ledger.keys_held():  # nobody knows whether the lost keys were there before the last batch
        previous = ledger.previous and msgspec.structs.replace(ledger.previous, keys_held=None)
        initial_keys = 0 if ledger.initial_keys == 0 else None  # an empty state cannot have lost any
        ledger = msgspec.structs.replace(ledger, previous=previous, initial_keys=initial_keys)
    return _with_keys_held(ledger, held)


def _with_found_keys(ledger: LedgerRecord, held: int | None) -> LedgerRecord:
    return ledger if ledger.has_had_ttl or ledger.keys_held() is not None else _with_keys_held(ledger, held)


def _with_keys_held(ledger: LedgerRecord, held: int | None) -> LedgerRecord:
    if ledger.committed is None:
        return msgspec.structs.replace(ledger, initial_keys=held)
    return msgspec.structs.replace(ledger, committed=msgspec.structs.replace(ledger.committed, keys_held=held))


def _after_a_failed_attempt(ledger: LedgerRecord) -> LedgerRecord:
    """A failed attempt at a non-transactional state may have added keys, and nobody knows how many."""
    if ledger.type != "non-transactional" or ledger.in_flight is None:
        return ledger
    return _with_keys_held(ledger, None)


def begin_drop(
    ledger: LedgerRecord | None, state: str, session: str, clock_txid: int, *, force: bool = False, at: str = ""
) -> LedgerRecord:
    """An operator takes the state to remove it: nothing counts any more, and no query can open it.

    With the fence open for the removal alone, every driver is fenced. ``ledger`` is None where it was lost. Raises
    UsageError with an attempt in flight, unless ``force``: its driver may be alive.
    """
    if ledger is None:
        ledger = LedgerRecord(
            state=state,
            type="opaque",
            serializer="json",
            keys=(KeyField("unknown", "string"),),
            fields=(Field("unknown", "Count", "bigint"),),
            layouts=((clock_txid, 1),),
            owner=DROPPER,
            owners={DROPPER: 0},
            epoch=0,
            session=session,
            first_txid=clock_txid,
            next_txid=clock_txid,
        )
    found = ledger.in_flight
    if found is not None and found.epoch == ledger.epoch and ledger.owner != DROPPER and not force:
        raise UsageError(
            f"state {state!r} has txid {found.txid} in flight, begun {found.at or 'at an unknown time'}: a driver or a "
            "vacuum is at work. Nothing was removed. Stop it first; where its process is gone, use force=True (--force)"
        )
    txid, epoch = max(ledger.next_txid, clock_txid), ledger.epoch + 1  # above all fences, also of a store put back
    return msgspec.structs.replace(
        ledger,
        owner=DROPPER,
        owners=ledger.owners | {DROPPER: 0},
        epoch=epoch,
        session=session,
        next_txid=txid + 1,
        last_txid=None,
        committed=None,
        previous=None,
        in_flight=InFlight(txid=txid, epoch=epoch, batch_id=None, nonce=session, at=at),
        dead=(),
        floor=txid,
    )


def _check_session(ledger: LedgerRecord, session: str) -> None:
    if ledger.owner == DROPPER and ledger.session != session:
        raise FencedError(
            f"state {ledger.state!r} is being removed by mapstate drop: this driver stops here. What it was writing "
            "does not count.",
            state=ledger.state,
            epoch=ledger.epoch,
        )
    if ledger.session != session:
        raise FencedError(
            f"state {ledger.state!r} was opened again, as epoch {ledger.epoch} by query {ledger.owner}: this driver "
            "has been replaced and stops here. Two running copies of one job are the usual cause.",
            state=ledger.state,
            epoch=ledger.epoch,
        )


def _check_in_flight(ledger: LedgerRecord, txid: int) -> InFlight:
    at = ledger.in_flight
    if at is None or at.txid != txid or at.epoch != ledger.epoch:
        raise FencedError(
            f"state {ledger.state!r}: txid {txid} is no longer in flight "
            f"({'nothing is' if at is None else f'txid {at.txid} is'}), so it can never count",
            state=ledger.state,
            txid=txid,
        )
    return at


def _schema(fields: tuple[KeyField, ...] | tuple[Field, ...] | list[Field]) -> str:
    return "(" + ", ".join(" ".join(field) for field in fields) + ")"


def _schema_error(state: str, what: str, found: str, asked: str) -> StateSchemaError:
    return StateSchemaError(
        f"state {state!r}: its ledger has the {what} {found}, the job asks for {asked}. Open it as it was "
        "made (fields may only be added), or give the new one another name.",
        state=state,
        found=found,
        expected=asked,
    )
