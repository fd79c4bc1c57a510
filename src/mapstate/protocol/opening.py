"""The ledger's rules for opening a state: its schema, its owner, and the epoch that fences earlier drivers.

Pure, as `mapstate.protocol.transitions`. A driver opens its states once in each run of a query, with its first batch.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator

import msgspec

from mapstate.errors import StateOwnershipError, StateSchemaError, UsageError
from mapstate.protocol.changes import ChangesRecord, changes_asked_for
from mapstate.protocol.ledger_record import DROPPER, LedgerRecord, OpenRequest, format_of
from mapstate.protocol.refusals import (
    other_windows,
    owned_by_another,
    rolling_windows_asked_for,
    without_ttl,
)
from mapstate.protocol.rolling import RollingRecord
from mapstate.protocol.seed_refusals import seeded_by_another
from mapstate.protocol.transitions import after_failed_attempt
from mapstate.protocol.windows import WindowsRecord
from mapstate.schema import Field, KeyField

_EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC).timestamp()


def open_ledger(ledger: LedgerRecord | None, opening: OpenRequest) -> LedgerRecord:
    """Give the state to a driver, under a new epoch that fences every driver before it.

    ``ledger`` is None for a new state. Raises StateSchemaError, StateOwnershipError, and UsageError for the reset of a
    non-transactional state.
    """
    if ledger is None:
        changes = _changes(None, opening, opening.clock_txid)
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
            has_had_ttl=bool(opening.ttl),
            ttl=opening.ttl or None,
            windows=None if opening.windows is None else WindowsRecord(definition=opening.windows).emptied(),
            changes=changes,
            rolling=None if opening.rolling is None else RollingRecord(definition=opening.rolling),
            format=format_of(opening.windows, changes, opening.rolling),
        )
    if ledger.owner == DROPPER:
        raise StateOwnershipError(
            f"state {ledger.state!r} is being removed, or its removal was interrupted: some of its records are gone. "
            "Nothing was written. Run mapstate drop again until it ends, and then start the job.",
            state=ledger.state,
            owner=ledger.owner,
        )
    windows = ledger.windows
    if opening.windows != (None if windows is None else windows.definition):
        if windows is None or opening.windows is None or not windows.definition.is_same(opening.windows):
            raise other_windows(ledger, opening)
        windows = msgspec.structs.replace(windows, definition=opening.windows)
    rolling = ledger.rolling
    if rolling is not None or opening.rolling is not None:
        rolling = rolling_windows_asked_for(ledger, opening, starts_empty=_starts_empty(ledger, opening))
    changes = _changes(ledger.changes, opening, ledger.next_txid)
    ledger = msgspec.structs.replace(_with_fields(ledger, opening), windows=windows, changes=changes, rolling=rolling)
    if ledger.owner != opening.owner:
        ledger = _with_owner(ledger, opening)
    if ledger.has_had_ttl and opening.ttl is None:
        raise without_ttl(ledger)
    return msgspec.structs.replace(
        ledger,
        epoch=ledger.epoch + 1,
        session=opening.session,
        has_had_ttl=ledger.has_had_ttl or bool(opening.ttl),
        ttl=opening.ttl if ledger.has_had_ttl or opening.ttl else None,
        format=format_of(windows, changes, rolling, ledger.seed, ledger.operations),
    )


def what_remains(before: LedgerRecord | None, after: LedgerRecord) -> Iterator[str]:
    """Say for the log where an option that the job has changed leaves something as it was.

    ``after`` is what `open_ledger` made of ``before``.
    """
    if before is None or before.last_txid is None or before.floor != after.floor:
        return  # nothing counted before
    if after.has_had_ttl and (after.ttl != before.ttl or not after.ttl):
        was = _shown_ttl(before) if before.has_had_ttl else "none"
        yield f"ttl was {was} and is {_shown_ttl(after)}: a record keeps the ttl of its last write until the next one"
        if not after.ttl:
            yield "records still expire, and count from nothing then, until mapstate vacuum writes them (opaque states)"
    if before.windows is not None and after.windows is not None:
        old, new = before.windows.definition, after.windows.definition
        if new.lag > old.lag:
            yield "lag is longer: windows that have fired stay fired, so rows for them are late"
        if new.retention > old.retention:
            yield "retention is longer: windows that were removed stay away"
    if after.rolling is not None and after.rolling.has_longer_retention(before.rolling):
        yield "retention is longer: times that could not be asked for stay so, and it grows with the watermark"
    if before.changes is not None and after.changes is not None and after.changes.kept > before.changes.kept > 0:
        yield f"changes was {before.changes.kept} and is {after.changes.kept}: transactions that are gone stay away"


def _shown_ttl(ledger: LedgerRecord) -> str:
    return "unknown" if ledger.ttl is None else f"{ledger.ttl:g} s" if ledger.ttl else "ended"


def _changes(kept: ChangesRecord | None, opening: OpenRequest, next_txid: int) -> ChangesRecord | None:
    if kept is None and opening.changes is None:
        return None
    return changes_asked_for(opening.state, kept, opening.changes, next_txid)


def _with_fields(ledger: LedgerRecord, opening: OpenRequest) -> LedgerRecord:
    """Check the schema, and append new fields."""
    for part, stored, requested in (
        ("type", ledger.type, opening.type),
        ("serializer", ledger.serializer, opening.serializer),
        ("key schema", _schema(ledger.keys), _schema(opening.keys)),
    ):
        if stored != requested:
            raise _schema_error(ledger.state, part, stored, requested)
    names = {field.name for field in ledger.fields}
    new = {field.name: field for field in opening.fields}
    for field in ledger.fields:
        if new.get(field.name) != field:
            changed = _schema([new[field.name]]) if field.name in new else "none of this name"
            raise _schema_error(ledger.state, "field", _schema([field]), changed)
    added = tuple(field for field in opening.fields if field.name not in names)
    if not added:
        return ledger
    if ledger.type == "non-transactional":
        raise _schema_error(
            ledger.state,
            "fields (a non-transactional record has no txid, which would tell old records from wider ones)",
            _schema(ledger.fields),
            _schema(opening.fields),
        )
    if ledger.type == "transactional" and ledger.in_flight is not None:
        raise StateSchemaError(
            f"state {ledger.state!r}: {_schema(added)} cannot be added while txid {ledger.in_flight.txid} is in "
            "flight, because a transactional attempt has to be repeated as it was. Nothing was written. Run the job "
            "once with the old fields, then add the new ones.",
            state=ledger.state,
        )
    fields = ledger.fields + added
    return msgspec.structs.replace(
        ledger, fields=fields, field_counts=(*ledger.field_counts, (ledger.next_txid, len(fields)))
    )


def _with_owner(ledger: LedgerRecord, opening: OpenRequest) -> LedgerRecord:
    """Hand the state to another streaming query, if its spec says so or the present owner holds nothing in it."""
    owners = {opening.owner: 0} | ledger.owners
    if ledger.last_txid is None:
        owners[opening.owner] = 0  # what it counted is gone
    holds_nothing = _holds_nothing(ledger)
    if ledger.seed is not None and opening.on_new_owner != "reset":
        raise seeded_by_another(ledger, opening.owner)
    if opening.on_new_owner in ("adopt", "adopt_unchecked") and not holds_nothing:
        if ledger.type == "transactional" and ledger.in_flight is not None:
            raise StateOwnershipError(
                f"state {ledger.state!r} cannot be adopted: query {ledger.owner} left txid {ledger.in_flight.txid} "
                f"(batch {ledger.in_flight.batch_id}) in flight, and only that query can finish a transactional "
                "attempt. Nothing was written. Run it once more from its own checkpoint, or start empty with "
                "on_new_owner='reset'.",
                state=ledger.state,
                owner=ledger.owner,
            )
        # The attempt in flight is left behind. It is above last_txid, so it never counts.
        return msgspec.structs.replace(after_failed_attempt(ledger), owner=opening.owner, owners=owners, in_flight=None)
    if opening.on_new_owner == "reset" or holds_nothing:
        if ledger.type == "non-transactional" and not holds_nothing:
            raise UsageError(
                f"state {ledger.state!r} is non-transactional and cannot be reset: its records carry no txid, which "
                "would tell old from new. Nothing was written. Remove it (mapstate drop), or give the state another "
                "name."
            )
        # Nothing is deleted, because a late writer or a reader may still be at work below the floor.
        return msgspec.structs.replace(
            ledger,
            owner=opening.owner,
            owners={opening.owner: 0} | {owner: 0 for owner, due in ledger.owners.items() if not due},
            in_flight=None,
            floor=ledger.next_txid,
            reset_txid=ledger.next_txid,
            last_txid=None,
            last_commit=None,
            previous=None,
            dead=(),
            initial_keys=0,
            has_had_ttl=False,
            ttl=None,
            seed=None,
            windows=None if ledger.windows is None else ledger.windows.emptied(),
            changes=None if ledger.changes is None else ledger.changes.emptied(ledger.next_txid),
            rolling=None if ledger.rolling is None else ledger.rolling.emptied(),
            operations=None,
            correction=None,
        )
    raise owned_by_another(ledger, opening)


def _holds_nothing(ledger: LedgerRecord) -> bool:
    """Whether no batch of any owner counts, and no attempt in flight can still be committed.

    Then the next owner may take the state: the records of failed attempts are below its floor. Records without a txid
    have no floor, so in a non-transactional state nothing may have begun.
    """
    if ledger.last_txid is not None or any(ledger.owners.values()):
        return False
    if ledger.type == "non-transactional":
        return ledger.next_txid == ledger.first_txid
    return ledger.in_flight is None or ledger.in_flight.epoch != ledger.epoch


def _starts_empty(ledger: LedgerRecord, opening: OpenRequest) -> bool:
    """Whether another owner takes the state without anything that was counted."""
    return ledger.owner != opening.owner and (opening.on_new_owner == "reset" or _holds_nothing(ledger))


def _schema(fields: tuple[KeyField, ...] | tuple[Field, ...] | list[Field]) -> str:
    return "(" + ", ".join(" ".join(field) for field in fields) + ")"


def _schema_error(state: str, part: str, stored: str, requested: str) -> StateSchemaError:
    return StateSchemaError(
        f"state {state!r}: its ledger has the {part} {stored}, the job asks for {requested}. Nothing was written. Open "
        "the state as it was made (fields may only be added), or name another state, with a new checkpoint.",
        state=state,
        found=stored,
        expected=requested,
    )


def clock_txid() -> int:
    """The first txid of a new ledger: deciseconds since 2026.

    Batches are slower than ten a second in the long run. So no earlier state of the same name has used this txid.
    """
    return max(0, int((time.time() - _EPOCH) * 10))
