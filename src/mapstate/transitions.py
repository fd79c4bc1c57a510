"""The ledger's rules: one pure function per event.

Each takes the ledger as it was read and returns the ledger as it shall be; nothing here does I/O,
asks the clock or keeps anything. `mapstate.ledger` runs them against a store by compare-and-set.

The rules were searched exhaustively. What looks like a simplification of one usually is a
counterexample: docs/protocol.md lists those that are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from mapstate.backing_map import FenceToken
from mapstate.errors import (
    FencedError,
    MissingBatchesError,
    RollbackError,
    StaleBatchError,
    StateOwnershipError,
    StateSchemaError,
    UsageError,
)
from mapstate.keys import KeyField
from mapstate.values import Committed

__all__ = [
    "AlreadyCommitted",
    "Begun",
    "Commit",
    "Field",
    "InFlight",
    "LedgerRecord",
    "OnGap",
    "OnNewOwner",
    "Opening",
    "StateType",
    "begin",
    "begin_vacuum",
    "check_adopted",
    "check_follower",
    "commit",
    "commit_vacuum",
    "even_out",
    "open_ledger",
    "rollback",
]

StateType = Literal["non-transactional", "transactional", "opaque"]
OnNewOwner = Literal["refuse", "adopt", "reset"]
OnGap = Literal["refuse", "accept"]

FORMAT = 1
_NEVER = 1 << 63  # above all batch ids


class Field(NamedTuple):
    """One aggregate of the state: its name, its aggregator's name and the type it accumulates."""

    name: str
    aggregator: str
    type: str


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that counts. ``at`` is ISO 8601 in UTC; ``offsets`` the source's, where known.

    ``run`` names the start of the query that brought it: within one, no batch comes twice.
    """

    batch_id: int
    txid: int
    owner: str
    rows: int = 0
    keys: int = 0
    at: str = ""
    offsets: str | None = None
    run: str | None = None


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


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state's own record: who owns it, what is committed, in flight, dead.

    ``owners``     each query id that ever owned the state, and the batch id it must bring next
    ``session``    a random name of the opening that made this epoch
    ``last_txid``  the highest committed txid, of a batch or a vacuum; None if nothing counts
    ``committed``  the last committed batch; ``previous`` the one before it
    ``dead``       txids below ``last_txid`` that do not count, as inclusive ranges
    ``layouts``    pairs (txid, n): from this txid on, records hold n fields
    ``rewrites``   how many vacuums have begun: since then records may have been purged
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
    """What a driver brings to `open_ledger`. ``clock_txid`` is where a new ledger's txids start."""

    state: str
    type: StateType
    serializer: str
    keys: tuple[KeyField, ...]
    fields: tuple[Field, ...]
    owner: str
    session: str = ""
    clock_txid: int
    on_new_owner: OnNewOwner = "refuse"


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
        )
    ledger = _with_fields(ledger, opening)
    if ledger.owner != opening.owner:
        ledger = _with_owner(ledger, opening)
    return msgspec.structs.replace(ledger, epoch=ledger.epoch + 1, session=opening.session)


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
    """Hands the state to another streaming query, as its recipe asks."""
    owners = {opening.owner: 0} | ledger.owners
    if opening.on_new_owner == "adopt":
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
        return msgspec.structs.replace(ledger, owner=opening.owner, owners=owners, in_flight=None)
    if opening.on_new_owner == "reset":
        if ledger.type == "non-transactional":
            raise UsageError(
                f"state {ledger.state!r} is non-transactional and cannot be reset: its records carry no txid "
                "that would tell old from new. Give the state another name."
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
        )
    last = ledger.committed
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


def begin(
    ledger: LedgerRecord, session: str, batch_id: int, on_gap: OnGap = "refuse", nonce: str = "", *, at: str = ""
) -> tuple[LedgerRecord, Begun | AlreadyCommitted]:
    """Starts an attempt at a batch. An opaque attempt always gets a txid of its own.

    Raises FencedError, StaleBatchError, MissingBatchesError.
    """
    _check_session(ledger, session)
    due = ledger.owners[ledger.owner]
    if batch_id < due:
        return ledger, _already_committed(ledger, batch_id, due)
    repeat = ledger.in_flight if ledger.type == "transactional" else None
    if repeat is not None and repeat.batch_id is not None:
        if repeat.batch_id != batch_id:
            raise _missing(ledger, batch_id, repeat.batch_id, accept=False)
        txid, next_txid = repeat.txid, ledger.next_txid
    else:
        if batch_id > due and on_gap != "accept":
            raise _missing(ledger, batch_id, due, accept=True)
        txid, next_txid = ledger.next_txid, ledger.next_txid + 1
    after = msgspec.structs.replace(
        ledger,
        next_txid=next_txid,
        in_flight=InFlight(txid=txid, epoch=ledger.epoch, batch_id=batch_id, nonce=nonce, at=at),
    )
    return after, Begun(batch_id, txid, ledger.view(), after.fence())


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


def _missing(ledger: LedgerRecord, batch_id: int, due: int, *, accept: bool) -> MissingBatchesError:
    way_out = " on_gap='accept' goes on without them." if accept else ""
    if ledger.next_txid == ledger.first_txid:
        return MissingBatchesError(
            f"there is no state {ledger.state!r} here yet, but Spark brings batch {batch_id} and not batch {due}: "
            "either the store was lost, then restore it; or a job with a checkpoint of its own begins to keep this "
            "state now, then run it once with on_gap='accept', and take that out again. Nothing was written.",
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
    return msgspec.structs.replace(
        ledger,
        committed=done,
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
    before = ledger.previous
    low = None if before is None else before.txid
    return msgspec.structs.replace(
        ledger,
        committed=before,
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


def check_follower(found: Sequence[LedgerRecord | None], query: str, on_new_owners: Sequence[OnNewOwner]) -> None:
    """A state and one that follows its new values, as ``query`` finds them: both have to hold the same batches.

    But for one that a driver has committed in the first alone, which the query brings again: the follower's own `begin`
    sees to that. Raises MissingBatchesError.
    """
    _, follower = found
    due, its_due = (0 if one is None else one.owners.get(query, 0) for one in found)
    if follower is not None and its_due > due:
        raise MissingBatchesError(
            f"state {follower.state!r} counts the new values of batch {its_due - 1}, and the state that it follows has "
            f"still to get batch {due}: it was rolled back or restored by itself. Nothing was written. Roll both back, "
            "or restore both from one moment, and rewind the checkpoint.",
            state=follower.state,
            found=its_due,
            expected=due,
        )
    if any(one is not None and one.owner == query for one in found):
        return
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
    ledger: LedgerRecord, session: str, *, take_over: bool = False, at: str = ""
) -> tuple[LedgerRecord, Begun]:
    """Starts an attempt that rewrites what does not count, with a txid of its own and through the fence.

    Only while nothing is in flight. A batch that begins meanwhile fences it, harmlessly. ``take_over``
    leaves an attempt in flight behind, as a restart of its driver would: the state is opened anew
    under ``session``, so a driver that lives is fenced. ``rewrites`` counts from here on and not from the
    end, because a reader must not take what is purged in between for absent. Raises UsageError.
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
    txid = ledger.next_txid
    after = msgspec.structs.replace(
        ledger,
        next_txid=txid + 1,
        in_flight=InFlight(txid=txid, epoch=ledger.epoch, batch_id=None, nonce=session, at=at),
        rewrites=ledger.rewrites + 1,
    )
    return after, Begun(-1, txid, ledger.view(), after.fence())


def commit_vacuum(ledger: LedgerRecord, txid: int, *, fenced: bool = True) -> LedgerRecord:
    """Nothing is dead any more; the last batch stays what it was. Raises FencedError.

    Where the store is not ``fenced`` a late writer may still come, with a record of an attempt that is
    forgotten here. There the vacuum has rewritten every record, and what is below its txid reads as absent.
    """
    if ledger.last_txid == txid:
        return ledger
    _check_in_flight(ledger, txid)
    return msgspec.structs.replace(
        ledger,
        in_flight=None,
        last_txid=txid,
        dead=(),
        floor=ledger.floor if fenced else txid,
    )


def _check_session(ledger: LedgerRecord, session: str) -> None:
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
