"""The ledger's rules for one state: one pure function per event.

Each takes the ledger as it was read and returns the ledger as it shall be; nothing here does I/O,
asks the clock or keeps anything. `mapstate.protocol.ledger` runs them against a store by compare-and-set.

The rules were searched exhaustively. What looks like a simplification of one usually is a
counterexample: docs/protocol.md lists those that are known.
"""

from __future__ import annotations

import msgspec

from mapstate.errors import (
    FencedError,
    MissingBatchesError,
    RollbackError,
    StaleBatchError,
    StateOwnershipError,
    StateSchemaError,
    UsageError,
)
from mapstate.protocol.ledger_record import (
    DROPPER,
    AlreadyCommitted,
    Attempt,
    Commit,
    InFlight,
    LedgerRecord,
    OpenRequest,
)
from mapstate.protocol.plans import BatchPlan, check_age, check_follows, check_repeated, check_replanned, is_replanned
from mapstate.schema import Field, KeyField, OnGap

__all__ = [
    "after_failed_attempt",
    "begin",
    "check_in_flight",
    "check_session",
    "commit",
    "give_up",
    "is_older",
    "missing_batches",
    "open_ledger",
    "rollback",
]


def open_ledger(ledger: LedgerRecord | None, opening: OpenRequest) -> LedgerRecord:
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
            field_counts=((opening.clock_txid, len(opening.fields)),),
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


def _with_fields(ledger: LedgerRecord, opening: OpenRequest) -> LedgerRecord:
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
    return msgspec.structs.replace(
        ledger, fields=fields, field_counts=(*ledger.field_counts, (ledger.next_txid, len(fields)))
    )


def _with_owner(ledger: LedgerRecord, opening: OpenRequest) -> LedgerRecord:
    """Hands the state to another streaming query, as its spec asks, or where its owner has nothing in it."""
    owners = {opening.owner: 0} | ledger.owners
    holds_nothing = _holds_nothing(ledger)
    if opening.on_new_owner == "adopt" and not holds_nothing:
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
        return msgspec.structs.replace(after_failed_attempt(ledger), owner=opening.owner, owners=owners, in_flight=None)
    if opening.on_new_owner == "reset" or holds_nothing:
        if ledger.type == "non-transactional" and not holds_nothing:
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
            last_commit=None,
            previous=None,
            dead=(),
            initial_keys=0,
            has_had_ttl=False,
        )
    last, at = ledger.last_commit, ledger.in_flight
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


def _holds_nothing(ledger: LedgerRecord) -> bool:
    """Whether no batch counts, of no owner, and no attempt in flight could still be committed.

    What such an owner has written lies below the floor of the next one. Records without a txid do not, so a
    non-transactional state gives way only where nothing has begun in it.
    """
    if ledger.last_txid is not None or any(ledger.owners.values()):
        return False
    if ledger.type == "non-transactional":
        return ledger.next_txid == ledger.first_txid
    return ledger.in_flight is None or ledger.in_flight.epoch != ledger.epoch


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


def begin(
    ledger: LedgerRecord,
    session: str,
    batch_id: int,
    on_gap: OnGap = "refuse",
    nonce: str = "",
    *,
    at: str = "",
    plan: BatchPlan | None = None,
) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
    """Starts an attempt at a batch. An opaque attempt always gets a txid of its own.

    ``plan`` is what Spark planned for the batch; None, of a batch that is given by hand, skips what is said here. A
    committed batch that Spark brings with another plan was planned anew, from a checkpoint that is one batch older than
    the state: it is rolled back and begun, see `check_replanned`.

    Raises FencedError, StaleBatchError, MissingBatchesError, ReplannedBatchError.
    """
    check_session(ledger, session)
    if is_replanned(ledger, batch_id, plan):
        check_replanned(ledger, batch_id, plan)
        ledger = rollback(ledger)
    due = ledger.owners[ledger.owner]
    if batch_id < due:
        check_age(ledger, batch_id, plan)
        return ledger, _already_committed(ledger, batch_id, due)
    repeat = ledger.in_flight if ledger.type == "transactional" else None
    if repeat is not None and repeat.batch_id is not None:
        if repeat.batch_id != batch_id:
            raise missing_batches(ledger, batch_id, repeat.batch_id, accept=False)
        check_repeated(ledger, repeat, plan)
        txid, next_txid = repeat.txid, ledger.next_txid
    else:
        if on_gap != "accept":
            if batch_id > due:
                raise missing_batches(ledger, batch_id, due)
            check_follows(ledger, batch_id, plan)
        txid, next_txid = ledger.next_txid, ledger.next_txid + 1
    after = msgspec.structs.replace(
        after_failed_attempt(ledger),
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
    return after, Attempt(batch_id, txid, ledger.view(), after.fence())


def _already_committed(ledger: LedgerRecord, batch_id: int, due: int) -> AlreadyCommitted:
    last = ledger.last_commit
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
    """Whether a ledger is older than ``known``, of the same incarnation of the state. Only a restored copy is.

    Epochs and txids only go up, and who takes a state over raises the epoch.
    """
    if ledger.first_txid != known.first_txid:
        return False
    return ledger.epoch < known.epoch or (ledger.session == known.session and ledger.next_txid < known.next_txid)


def missing_batches(ledger: LedgerRecord, batch_id: int, due: int, *, accept: bool = True) -> MissingBatchesError:
    """Spark brings a batch, and the state has still to get the one that is ``due``."""
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
    check_session(ledger, session)
    if ledger.last_commit is not None and ledger.last_commit.txid == done.txid:
        return ledger
    at = check_in_flight(ledger, done.txid)
    if at.batch_id != done.batch_id:
        raise UsageError(f"txid {done.txid} was begun for batch {at.batch_id}, not for batch {done.batch_id}")
    held = ledger.keys_held()
    held = None if held is None or done.keys_delta is None else held + done.keys_delta
    return msgspec.structs.replace(
        ledger,
        last_commit=msgspec.structs.replace(done, plan=at.plan, keys_held=held, last_txid_before=ledger.last_txid),
        previous=ledger.last_commit,
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
    last = ledger.last_commit
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
        last_commit=previous,
        previous=None,
        last_txid=low,
        dead=tuple(span for span in ledger.dead if low is not None and span[1] < low),
        owners=ledger.owners | {last.owner: last.batch_id},
    )


def give_up(ledger: LedgerRecord, session: str) -> LedgerRecord:
    """The driver's batch has failed: its attempt is left behind, as by a restart, and the fence closes.

    A transactional attempt keeps its txid, under which it is begun again. Nothing changes where another driver has
    opened the state, or nothing is in flight.
    """
    at = ledger.in_flight
    if ledger.session != session or at is None or at.epoch != ledger.epoch:
        return ledger
    return msgspec.structs.replace(ledger, epoch=ledger.epoch + 1)


def after_failed_attempt(ledger: LedgerRecord) -> LedgerRecord:
    """A failed attempt at a non-transactional state may have added keys, and nobody knows how many."""
    if ledger.type != "non-transactional" or ledger.in_flight is None:
        return ledger
    return ledger.with_keys_held(None)


def check_session(ledger: LedgerRecord, session: str) -> None:
    """Raises FencedError unless the ledger is of this driver's own opening."""
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


def check_in_flight(ledger: LedgerRecord, txid: int) -> InFlight:
    """The attempt in flight. Raises FencedError unless it has this txid and is of the ledger's epoch."""
    at = ledger.in_flight
    if at is None or at.txid != txid or at.epoch != ledger.epoch:
        raise FencedError(
            f"state {ledger.state!r}: txid {txid} is no longer in flight "
            f"({'nothing is' if at is None else f'txid {at.txid} is'}), so it can never count",
            state=ledger.state,
            txid=txid,
        )
    return at
