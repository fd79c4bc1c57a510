"""The ledger's rules for the batches of one state: one pure function per event.

Each takes the ledger as it was read and returns the ledger to write. Nothing here does I/O, asks the clock or keeps
state. `mapstate.protocol.ledgers` has the compare-and-set that runs the functions against a store; the rules for
opening a state are in `mapstate.protocol.opening`.

The rules were searched exhaustively. What looks like a simplification of one usually is a
counterexample: docs/protocol.md lists those that are known.
"""

from __future__ import annotations

import msgspec

from mapstate.protocol.ledger_record import (
    AlreadyCommitted,
    Attempt,
    BatchPlan,
    Commit,
    InFlight,
    LedgerRecord,
    PlanDigest,
    format_of,
    last_own,
    may_be_equal,
    plan_of,
)
from mapstate.protocol.refusals import (
    batch_elsewhere,
    missing_batches,
    not_in_flight,
    opened_again,
    other_batch,
    part_in_flight,
    part_of_a_batch,
    stale_batch,
)
from mapstate.protocol.seed_refusals import being_seeded
from mapstate.protocol.ways_back import (
    check_planned_before,
    check_repeated,
    check_replanned,
    is_replanned,
    rollback,
)
from mapstate.protocol.windows import PaneChange, WindowCommit
from mapstate.schema import OnGap


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
    """Start an attempt at a batch. An opaque attempt always gets a new txid.

    A committed batch with another plan was planned anew, from a checkpoint that is one batch older than the state. It
    is rolled back and begun, see `check_replanned`.

    Args:
        ledger: The state's ledger, opened by this driver.
        session: The driver's own, see `LedgerRecord`.
        batch_id: Spark's number of the batch.
        on_gap: "accept" goes on above missing batches.
        nonce: The attempt's random name.
        at: The present time, for people.
        plan: Spark's plan; None, for a batch without a checkpoint, skips the checks of plans.

    Raises:
        FencedError: Another driver has opened the state.
        StaleBatchError: The batch is older than the state.
        MissingBatchesError: Batches between the state and this one are missing.
        ReplannedBatchError: The batch came with another plan and cannot be counted anew.
        IncompleteBatchError: Only a part of the last batch counts, or only a part of this one is written.
        SeedingError: The state is being seeded, and this is no part of that.

    """
    check_session(ledger, session)
    digest = None if plan is None else plan.digest()
    if ledger.seed is not None:
        raise missing_batches(ledger, batch_id, 0, accept=False) if batch_id else being_seeded(ledger)
    if batch_id < ledger.owners[ledger.owner] and is_replanned(ledger, batch_id, plan):
        check_replanned(ledger, batch_id, plan)
        ledger = rollback(ledger)
    last = ledger.last_commit
    if last is not None and last.is_part and on_gap != "accept":
        raise part_of_a_batch(ledger, last)
    due = ledger.owners[ledger.owner]
    if batch_id < due:
        check_planned_before(ledger, batch_id, plan)
        return ledger, _already_committed(ledger, batch_id, due)
    repeat = ledger.in_flight if ledger.type == "transactional" else None
    if repeat is not None and repeat.batch_id is not None:
        if repeat.batch_id != batch_id:
            raise missing_batches(ledger, batch_id, repeat.batch_id, accept=False)
        if repeat.is_part and on_gap != "accept":
            raise part_in_flight(ledger, repeat)
        check_repeated(ledger, repeat, plan)
        txid, next_txid = repeat.txid, ledger.next_txid
    else:
        if on_gap != "accept":
            if batch_id > due:
                raise missing_batches(ledger, batch_id, due)
            check_follows(ledger, batch_id, plan, digest)
        txid, next_txid = ledger.next_txid, ledger.next_txid + 1
    view = ledger.view()
    after = msgspec.structs.replace(
        after_failed_attempt(ledger),
        next_txid=next_txid,
        in_flight=InFlight(txid=txid, epoch=ledger.epoch, batch_id=batch_id, nonce=nonce, at=at, plan=digest),
        windows=None if ledger.windows is None else ledger.windows.begun(ledger.last_windows()),
        changes=None if ledger.changes is None else ledger.changes.begun(ledger.last_txid),
        rolling=None if ledger.rolling is None else ledger.rolling.begun(ledger.last_windows()),
    )
    return after, Attempt(batch_id, txid, view, after.fence())


def _already_committed(ledger: LedgerRecord, batch_id: int, due: int) -> AlreadyCommitted:
    last = last_own(ledger)
    if batch_id < due - 1 or (last is not None and last.batch_id < batch_id):
        raise stale_batch(ledger, batch_id, due)
    known = last is not None and last.txid >= ledger.floor
    return AlreadyCommitted(batch_id, last if known else None, ledger.view())


def is_older(ledger: LedgerRecord, known: LedgerRecord) -> bool:
    """Whether a ledger is older than ``known``, of the same incarnation of the state. Only a restored copy is.

    Epochs and txids only rise, and a new owner raises the epoch.
    """
    if ledger.first_txid != known.first_txid:
        return False
    return ledger.epoch < known.epoch or (ledger.session == known.session and ledger.next_txid < known.next_txid)


def commit(ledger: LedgerRecord, session: str, done: Commit, panes: PaneChange | None = None) -> LedgerRecord:
    """Make the attempt ``done.txid`` count, with everything it wrote.

    ``panes`` are those of windows, or of a change log, that it wrote and purged. A second call, after a lost reply,
    changes nothing. Raises FencedError, and UsageError for another batch than the attempt's.
    """
    check_session(ledger, session)
    last = ledger.last_commit
    if last is not None and last.txid == done.txid:
        return ledger
    attempt = check_in_flight(ledger, done.txid)
    if attempt.batch_id != done.batch_id:
        raise other_batch(attempt, done)
    held = ledger.keys_held()
    reading = last.reading if last is not None and last.owner == ledger.owner else None
    held = None if held is None or done.keys_delta is None else held + done.keys_delta
    windows = ledger.windows
    if done.windows is None and (windows is not None or ledger.rolling is not None):  # it counts as an empty batch
        done = msgspec.structs.replace(done, windows=(ledger.last_windows() or WindowCommit()).without_rows())
    if windows is not None:
        windows = windows.committed(panes or PaneChange())
    return msgspec.structs.replace(
        ledger,
        last_commit=msgspec.structs.replace(
            done, plan=attempt.plan, keys_held=held, last_txid_before=ledger.last_txid, reading=reading
        ),
        previous=ledger.last_commit,
        in_flight=None,
        owners=ledger.owners | {ledger.owner: done.batch_id + 1},
        last_txid=done.txid,
        dead=dead_up_to(ledger, done.txid),
        windows=windows,
        changes=None if ledger.changes is None else ledger.changes.committed(panes or PaneChange()),
        correction=None,
        format=format_of(windows, ledger.changes, ledger.rolling, operations=ledger.operations),
    )


def dead_up_to(ledger: LedgerRecord, txid: int) -> tuple[tuple[int, int], ...]:
    """``dead`` after a commit: every txid between two commits was begun and does not count."""
    low = max(ledger.first_txid, ledger.floor) if ledger.last_txid is None else ledger.last_txid + 1
    return (*ledger.dead, (low, txid - 1)) if low < txid else ledger.dead


def after_failed_attempt(ledger: LedgerRecord) -> LedgerRecord:
    """The ledger without a number of keys, if a failed non-transactional attempt may have added some."""
    if ledger.type != "non-transactional" or ledger.in_flight is None:
        return ledger
    return ledger.with_keys_held(None)


def check_session(ledger: LedgerRecord, session: str) -> None:
    """Raise FencedError unless this driver made the ledger's epoch."""
    if ledger.session != session:
        raise opened_again(ledger)


def check_in_flight(ledger: LedgerRecord, txid: int) -> InFlight:
    """Return the attempt in flight. Raises FencedError unless it has this txid and the ledger's epoch."""
    attempt = ledger.in_flight
    if attempt is None or attempt.txid != txid or attempt.epoch != ledger.epoch:
        raise not_in_flight(ledger, txid)
    return attempt


def check_follows(ledger: LedgerRecord, batch_id: int, plan: BatchPlan | None, digest: PlanDigest | None) -> None:
    """Refuse a batch that does not start where the state's last batch ended."""
    last = last_own(ledger)
    if plan is None or digest is None or last is None or last.batch_id != batch_id - 1:
        return
    known = plan_of(last, ledger.previous)
    if known is None or (known.end == digest.start and may_be_equal(known.fingerprint, digest.previous)):
        return
    raise batch_elsewhere(ledger, last, batch_id, plan.offsets)
