"""The ledger's rules for what operators do: vacuum, recount, drop. Pure, as `mapstate.protocol.transitions`."""

from __future__ import annotations

import msgspec

from mapstate.errors import FencedError, UsageError
from mapstate.protocol.ledger_record import DROPPER, Attempt, InFlight, LedgerRecord
from mapstate.protocol.transitions import check_in_flight
from mapstate.schema import Field, KeyField

__all__ = [
    "begin_drop",
    "begin_vacuum",
    "check_vacuum",
    "commit_vacuum",
    "forget_dead",
    "recount",
]


def begin_vacuum(
    ledger: LedgerRecord, session: str, *, take_over: bool = False, at: str = "", seen: LedgerRecord | None = None
) -> tuple[LedgerRecord, Attempt]:
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
    if seen is not None and seen.last_commit != ledger.last_commit:
        raise _changed_meanwhile(ledger)
    txid = ledger.next_txid
    after = msgspec.structs.replace(
        ledger,
        next_txid=txid + 1,
        in_flight=InFlight(txid=txid, epoch=ledger.epoch, batch_id=None, nonce=session, at=at),
        rewrites=ledger.rewrites + 1,
    )
    return after, Attempt(-1, txid, ledger.view(), after.fence())


def check_vacuum(ledger: LedgerRecord) -> None:
    """Before a vacuum that would rewrite: whether the last batch may still have to be rolled back.

    A batch that a topology commits in several writes is rolled back where the driver died between them, and a
    vacuum's txid stands in the way of that. Raises UsageError.
    """
    last = ledger.last_commit
    if last is None or not last.apart_from or ledger.next_txid != last.txid + 1:
        return  # what began later began in all of them
    names = ", ".join(map(repr, last.apart_from))
    raise UsageError(
        f"state {ledger.state!r} has records to rewrite, but its batch {last.batch_id} was committed apart from {names}"
        ": where one of them lacks it, the next start rolls it back, and a vacuum would prevent that. Nothing was "
        f"written. Name those states with their stores (beside=..., --beside URL#STATE): the vacuum runs where they "
        f"have batch {last.batch_id} too."
    )


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


def commit_vacuum(ledger: LedgerRecord, txid: int, *, fenced: bool = True, held: int | None = None) -> LedgerRecord:
    """Nothing is dead any more; the last batch stays what it was. Raises FencedError.

    ``held`` is the number of keys that the vacuum found. It becomes the ledger's only if that is unknown: a lower
    number means lost records, which a vacuum must not cover up.

    Where the store is not ``fenced`` a late writer may still come, with a record of an attempt that is
    forgotten here. There the vacuum has rewritten every record, and what is below its txid reads as absent.
    """
    if ledger.last_txid == txid:
        return ledger
    check_in_flight(ledger, txid)
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
    return ledger.with_keys_held(held)


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
            field_counts=((clock_txid, 1),),
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
        last_commit=None,
        previous=None,
        in_flight=InFlight(txid=txid, epoch=epoch, batch_id=None, nonce=session, at=at),
        dead=(),
        floor=txid,
    )


def _changed_meanwhile(ledger: LedgerRecord) -> FencedError:
    return FencedError(
        f"the ledger of state {ledger.state!r} has changed while a vacuum read the records: a batch has begun. Nothing "
        "was written. Run the vacuum again, between two batches.",
        state=ledger.state,
    )


def _with_found_keys(ledger: LedgerRecord, held: int | None) -> LedgerRecord:
    return ledger if ledger.has_had_ttl or ledger.keys_held() is not None else ledger.with_keys_held(held)
