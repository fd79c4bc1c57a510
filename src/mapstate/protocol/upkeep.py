"""The ledger's rules for what operators do: vacuum, recount, drop. Pure, as `mapstate.protocol.transitions`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mapstate.errors import FencedError, UsageError
from mapstate.protocol.ledger_record import (
    DROPPER,
    Attempt,
    Commit,
    Correction,
    InFlight,
    LedgerRecord,
    OperatorKind,
    format_of,
)
from mapstate.protocol.rolling import RollingRecord
from mapstate.protocol.transitions import check_in_flight, dead_up_to
from mapstate.protocol.windows import LATEST, NEVER, PaneChange, WindowCommit, WindowsRecord
from mapstate.schema import Field, KeyField, time_text


def begin_operator(
    ledger: LedgerRecord,
    session: str,
    kind: OperatorKind,
    *,
    take_over: bool = False,
    at: str = "",
    seen: LedgerRecord | None = None,
    log_from: int = 0,
) -> tuple[LedgerRecord, Attempt]:
    """Start an operator's attempt between two batches, with a txid of its own and through the fence.

    A batch that begins meanwhile fences it, without harm.

    Args:
        ledger: The state's ledger.
        session: A new random name.
        kind: What it does.
        take_over: Leave an attempt in flight behind and fence its driver, as a restart would.
        at: The present time, for people.
        seen: The ledger under which the caller read the records.
        log_from: The attempt may remove a change log below this txid.

    Raises:
        UsageError: The state's type cannot have such an attempt, or an attempt is in flight.
        FencedError: A batch has begun since ``seen``.

    """
    ledger = _between_batches(check_operator(ledger, kind), session, kind, take_over=take_over)
    if seen is not None and (seen.contents(), seen.next_txid) != (ledger.contents(), ledger.next_txid):
        raise _changed_meanwhile(ledger, kind)
    txid = ledger.next_txid
    after = msgspec.structs.replace(
        ledger,
        next_txid=txid + 1,
        in_flight=InFlight(txid=txid, epoch=ledger.epoch, batch_id=None, kind=kind, nonce=session, at=at),
        rewrites=ledger.rewrites + 1,  # already at the begin: a reader must not take purged records for absent keys
        changes=None if ledger.changes is None else ledger.changes.kept_from(log_from),
    )
    return after, Attempt(-1, txid, ledger.view(), after.fence())


def check_operator(ledger: LedgerRecord, kind: OperatorKind) -> LedgerRecord:
    """The ledger for the begin of an operator's attempt of this kind. Raises UsageError if its type cannot have one."""
    if ledger.type == "opaque":
        return ledger
    if kind == "forget":
        attempt = ledger.in_flight
        if ledger.type == "transactional" and attempt is not None and attempt.batch_id is not None:
            raise UsageError(
                f"state {ledger.state!r} is transactional and has {attempt.name} in flight, which has to be repeated "
                "as it was. Nothing was written. Let the query end that batch, and stop it then."
            )
        return ledger.with_keys_held(None)  # there is no value before: what it removes is gone at once
    raise UsageError(
        f"state {ledger.state!r} is {ledger.type}: only opaque states have a {kind}, because only their records keep "
        "the value before. Nothing was written."
    )


def check_still_at(ledger: LedgerRecord, position: LedgerRecord) -> None:
    """Check that nothing has been committed, or taken back, since a history was cut at the ledger ``position``.

    A recount puts what the history comes to in the place of what is there, so a batch or a correction in between would
    be lost. Raises FencedError.
    """
    if (ledger.last_txid, ledger.last_commit) != (position.last_txid, position.last_commit):
        raise FencedError(
            f"state {ledger.state!r} has changed since the history was read up to its last batch: a batch was "
            "committed, or the last one was taken back. Nothing was written. Recount again, between two batches.",
            state=ledger.state,
        )


def commit_operator(ledger: LedgerRecord, txid: int, done: Callable[[LedgerRecord], LedgerRecord]) -> LedgerRecord:
    """Commit an operator's attempt, and keep the last batch. A second call changes nothing. Raises FencedError.

    ``done`` gives the ledger what this kind of attempt does to it.
    """
    if ledger.last_txid == txid:
        return ledger
    check_in_flight(ledger, txid)
    dead = dead_up_to(ledger, txid)
    return done(msgspec.structs.replace(ledger, in_flight=None, last_txid=txid, dead=dead, correction=None))


def commit_forget(
    ledger: LedgerRecord, txid: int, *, operations: int, held: int | None = None, log: PaneChange | None = None
) -> LedgerRecord:
    """Commit an attempt that removes keys. Raises FencedError.

    Args:
        ledger: The state's ledger.
        txid: The attempt's own.
        operations: How many entries the list of what operators did has then.
        held: The number of keys then, None if unknown.
        log: What it wrote into the change log, or removed from it.

    """

    def done(after: LedgerRecord) -> LedgerRecord:
        changes = None if after.changes is None else after.changes.committed(log or PaneChange())
        form = format_of(after.windows, changes, after.rolling, operations=operations)
        return msgspec.structs.replace(after.with_keys_held(held), changes=changes, operations=operations, format=form)

    return commit_operator(ledger, txid, done)


def commit_correction(
    ledger: LedgerRecord, txid: int, *, keys_delta: int | None = None, panes: PaneChange | None = None
) -> LedgerRecord:
    """Commit a correction, with the entry that it has added to the list. Raises FencedError.

    It moves no watermark: what the last batch did to windows stays.

    Args:
        ledger: The state's ledger.
        txid: The attempt's own.
        keys_delta: The number of keys added less those removed; None if unknown.
        panes: Those of windows, or of a change log, that it wrote, and of a change log those that it removed.

    """

    def done(after: LedgerRecord) -> LedgerRecord:
        held, operations = after.keys_held(), (after.operations or 0) + 1
        windows = None if after.windows is None else after.windows.committed(panes or PaneChange())
        changes = None if after.changes is None else after.changes.committed(panes or PaneChange())
        return msgspec.structs.replace(
            after.with_keys_held(None if held is None or keys_delta is None else held + keys_delta),
            windows=windows,
            changes=changes,
            operations=operations,
            correction=Correction(txid=txid, last_txid_before=ledger.last_txid, keys_delta=keys_delta),
            format=format_of(after.windows, changes, after.rolling, operations=operations),
        )

    return commit_operator(ledger, txid, done)


def _between_batches(ledger: LedgerRecord, session: str, kind: str, *, take_over: bool) -> LedgerRecord:
    """The ledger without an attempt of the present driver, which ``take_over`` fences. Raises UsageError.

    What is repeated by its id leaves an attempt of its own kind behind: the new txid fences who is still at work.
    """
    attempt = ledger.in_flight
    if attempt is None or attempt.epoch != ledger.epoch:
        return ledger
    if attempt.batch_id is None and attempt.kind == kind and kind != "vacuum":
        return ledger
    if not take_over:
        way = "take the state over (take_over=True, --take-over), which fences the driver"
        if kind == "forget":
            way = "start the job once more, or run mapstate vacuum --take-over of an opaque state, before"
        raise UsageError(
            f"state {ledger.state!r} has txid {attempt.txid} in flight ({attempt.name}). Nothing was written. Run the "
            f"{kind} between two batches; or, if the driver of that attempt is gone, {way}."
        )
    return taken(ledger, session)


def check_may_begin(ledger: LedgerRecord, kind: OperatorKind) -> None:
    """Refuse an operator's attempt while the last batch may have to be rolled back. Raises UsageError.

    A topology that commits a batch in several writes rolls it back after a crash between them. The txid of a later
    attempt would prevent that.
    """
    last = ledger.last_commit
    if last is None or not ledger.may_lose_last_batch():
        return
    names = ", ".join(map(repr, last.apart_from))
    raise UsageError(
        f"state {ledger.state!r} has records to rewrite, but its batch {last.batch_id} was committed apart from "
        f"{names}. If one of them lacks the batch, the next start rolls it back, which a {kind} would prevent. Nothing "
        f"was written. Name those states with their stores (beside=..., --beside URL#STATE): the {kind} runs if they "
        "have the batch, too."
    )


def forget_dead(ledger: LedgerRecord, seen: LedgerRecord, held: int | None = None) -> LedgerRecord:
    """Forget the dead txids, for a vacuum that found no orphaned record under the ledger ``seen``.

    It uses no txid, so the last batch can still be rolled back. ``held`` is the number of keys found, see
    `commit_vacuum`. Raises FencedError if the ledger has changed since: a later commit may have left orphans.
    """
    if ledger != seen:
        raise _changed_meanwhile(ledger, "vacuum")
    counted = _with_found_keys(ledger, held)
    return msgspec.structs.replace(counted, dead=()) if counted.dead else counted


def commit_vacuum(
    ledger: LedgerRecord, txid: int, *, fenced: bool = True, held: int | None = None, removed: int = 0
) -> LedgerRecord:
    """Commit a vacuum: forget the dead txids and a ttl that was ended, and keep the last batch. Raises FencedError.

    Args:
        ledger: The state's ledger.
        txid: The vacuum's own.
        fenced: The store refuses late writers. Without a fence the vacuum has rewritten every record, and ``floor``
            hides what a late writer of a forgotten attempt may still put.
        held: The number of keys found. It becomes the ledger's only if that is unknown: a lower number means lost
            records, which a vacuum must not cover up.
        removed: How many keys it has given no value, because their rolling windows are empty.

    """

    def done(after: LedgerRecord) -> LedgerRecord:
        before = after.keys_held()
        after = after.with_keys_held(None if before is None else before - removed) if removed else after
        if after.ttl == 0 and held is not None:  # the vacuum has written all records, and none expires any more
            after = msgspec.structs.replace(after.with_keys_held(None), has_had_ttl=False, ttl=None)
        return msgspec.structs.replace(_with_found_keys(after, held), dead=(), floor=ledger.floor if fenced else txid)

    return commit_operator(ledger, txid, done)


def recount(ledger: LedgerRecord, counted: LedgerRecord, held: int) -> LedgerRecord:
    """Set the number of keys to ``held``, which an operator has counted under the ledger ``counted``.

    Raises UsageError for a state with a ttl or windows, if a batch was committed or a vacuum began since, and if a
    vacuum is in flight, or an attempt in a state that is not opaque.
    """
    check_recount(ledger)
    if ledger.in_flight is not None and ledger.in_flight.batch_id is None:
        raise UsageError(
            f"state {ledger.state!r} has {ledger.in_flight.name} in flight (txid {ledger.in_flight.txid}). Nothing was "
            "written. Let it end, or run mapstate vacuum --take-over if its process is gone, and count again.",
            state=ledger.state,
        )
    if ledger.in_flight is not None and ledger.type != "opaque":
        raise UsageError(
            f"state {ledger.state!r} is {ledger.type} and has txid {ledger.in_flight.txid} in flight, whose keys are "
            "stored and do not count yet. Nothing was written. Let the query end that batch, and count again.",
            state=ledger.state,
        )
    if ledger.contents() != counted.contents():
        raise UsageError(
            f"state {ledger.state!r}: a batch was committed or a vacuum began during the count. Nothing was written. "
            "Count again between two batches, or stop the query first.",
            state=ledger.state,
        )
    if held != ledger.keys_held():  # the lost keys may or may not be older than what was done last
        previous = ledger.previous and msgspec.structs.replace(ledger.previous, keys_held=None)
        initial_keys = 0 if ledger.initial_keys == 0 else None  # an empty state cannot have lost any
        correction = ledger.correction and msgspec.structs.replace(ledger.correction, keys_delta=None)
        ledger = msgspec.structs.replace(ledger, previous=previous, initial_keys=initial_keys, correction=correction)
    return ledger.with_keys_held(held)


def check_recount(ledger: LedgerRecord) -> None:
    """Raise UsageError for a state whose ledger never knows the number of its keys."""
    if ledger.has_had_ttl:
        raise UsageError(
            f"state {ledger.state!r} has or had a ttl: its records expire unseen, so a number would soon be wrong. "
            "Nothing was written.",
            state=ledger.state,
        )
    if ledger.windows is not None:
        raise UsageError(
            f"state {ledger.state!r} has windows, whose keys a purge removes uncounted: its ledger holds no number of "
            "keys. Nothing was written. To count the keys that are there now: StateReader.count_keys().",
            state=ledger.state,
        )


def advance(
    ledger: LedgerRecord, to: int, session: str, *, take_over: bool = False, back_at: int | None = None
) -> LedgerRecord:
    """Give the watermark a least value, which the next batch takes; or put it back, see `WindowsRecord`.

    ``session`` is a new random name, ``take_over``: see `begin_operator`. ``back_at`` is the operator's clock, to put
    the watermark back. Raises UsageError for a state without windows by time, for a time that no row may have, if the
    watermark is there already, if windows that end later are gone, and if an attempt is in flight.
    """
    kept = check_advance(ledger, back=back_at is not None)
    if to > LATEST:
        raise UsageError(f"state {ledger.state!r}: rows have times up to {LATEST}, not {to}. Nothing was written.")
    kind = ledger.time_type or "timestamp"
    now = max(kept.least, (ledger.last_windows() or WindowCommit()).watermark)
    after = kept.put_back(to) if back_at is not None and isinstance(kept, WindowsRecord) else kept.advanced(to)
    if (to <= now) if back_at is None else (to > now):
        raise UsageError(
            f"state {ledger.state!r}: the watermark is at {time_text(now, kind)} already, so it cannot be moved to "
            f"{time_text(to, kind)}. Nothing was written. --to moves it forward only, --back-to back only."
        )
    if isinstance(after, RollingRecord) and kind == "bigint" and to > _latest_row(ledger):
        raise UsageError(
            f"state {ledger.state!r} has no row of {time_text(to, kind)} or later, and numbers have no clock: "
            "rows until then would be too old where there is no lifetime, for good. Nothing was written. Advance it up "
            f"to the latest row{'' if _latest_row(ledger) == NEVER else f', {_latest_row(ledger)}'}.",
            state=ledger.state,
        )
    if back_at is not None and isinstance(after, WindowsRecord) and to < after.purged:
        raise UsageError(
            f"state {ledger.state!r}: the watermark cannot be put back to {time_text(to, kind)}. Windows that end at "
            f"{time_text(after.purged, kind)} or before are gone. Nothing was written. That time is the earliest."
        )
    ledger = _between_batches(ledger, session, "advance", take_over=take_over)
    if isinstance(after, RollingRecord):
        return msgspec.structs.replace(ledger, rolling=after)
    if back_at is not None:
        ledger = msgspec.structs.replace(
            ledger,
            last_commit=_put_back(ledger.last_commit, after, to, back_at),
            previous=_put_back(ledger.previous, after, to, back_at),  # which a rollback brings back
            undone=ledger.undone + 1,
        )
    return msgspec.structs.replace(ledger, windows=after)


def _latest_row(ledger: LedgerRecord) -> int:
    newest = (ledger.last_windows() or WindowCommit()).newest
    return NEVER if newest is None else newest


def _put_back(commit: Commit | None, windows: WindowsRecord, to: int, now: int) -> Commit | None:
    if commit is None or commit.windows is None:
        return commit
    return msgspec.structs.replace(commit, windows=windows.commit_put_back(commit.windows, to, now))


def check_advance(ledger: LedgerRecord, *, back: bool = False) -> WindowsRecord | RollingRecord:
    """The windows of a state whose watermark an operator can advance, or put ``back``. Raises UsageError."""
    if ledger.rolling is not None and back:
        raise UsageError(
            f"state {ledger.state!r} has rolling windows, whose tiles before the watermark are joined: it cannot be "
            "put back. Nothing was written. Late rows count in each window that can still be asked for.",
            state=ledger.state,
        )
    kept = ledger.windows or ledger.rolling
    if kept is None:
        raise UsageError(
            f"state {ledger.state!r} has no windows by time: there is no watermark to move. Nothing was written.",
            state=ledger.state,
        )
    return kept


def taken(ledger: LedgerRecord, session: str) -> LedgerRecord:
    """The ledger of a state whose driver is fenced. All that counts goes on counting, and a driver may open it."""
    return msgspec.structs.replace(ledger, epoch=ledger.epoch + 1, session=session)


def begin_drop(
    ledger: LedgerRecord | None, state: str, session: str, clock_txid: int, *, force: bool = False, at: str = ""
) -> LedgerRecord:
    """Give the state to the removal: nothing counts, no query can open it, and the fence is open for the removal only.

    ``ledger`` is None if it was lost. Raises UsageError for an attempt in flight, whose driver may be alive, unless
    ``force`` is set.
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
    attempt = ledger.in_flight
    if attempt is not None and attempt.epoch == ledger.epoch and ledger.owner != DROPPER and not force:
        raise UsageError(
            f"state {state!r} has txid {attempt.txid} in flight, begun {attempt.at or 'at an unknown time'}: a driver "
            "or a vacuum is at work. Nothing was removed. Stop it first; if its process is gone, use force=True "
            "(--force)."
        )
    txid, epoch = max(ledger.next_txid, clock_txid), ledger.epoch + 1  # above all fences, also after a restore
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
        seed=None,
        format=format_of(ledger.windows, ledger.changes, ledger.rolling, operations=ledger.operations),
        in_flight=InFlight(txid=txid, epoch=epoch, batch_id=None, nonce=session, at=at),
        dead=(),
        floor=txid,
    )


def _changed_meanwhile(ledger: LedgerRecord, kind: str) -> FencedError:
    return FencedError(
        f"the ledger of state {ledger.state!r} has changed while a {kind} read the records: a batch, or another "
        f"operator's attempt, has begun. Nothing was written. Run the {kind} again between two batches.",
        state=ledger.state,
    )


def _with_found_keys(ledger: LedgerRecord, held: int | None) -> LedgerRecord:
    is_never_known = ledger.has_had_ttl or ledger.windows is not None
    return ledger if is_never_known or ledger.keys_held() is not None else ledger.with_keys_held(held)
