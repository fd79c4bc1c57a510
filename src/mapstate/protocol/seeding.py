"""The ledger's rules for a seed: batch 0, loaded in buckets. Pure, as `mapstate.protocol.transitions`.

    open      only a state that holds nothing; from here on nobody can read it
    staged    the history is whole under a name: whatever was loaded before is hidden below a new floor. Its times are
              known, so windows are as the begin of batch 1 would leave them
    begin, commit    an attempt for each bucket
    end       batch 0 counts, with the sums of all buckets, and readers see it at once

No key is in two buckets, so what a bucket writes has no value before it. A stage that is made anew, or another plan,
begins the seed anew: buckets of two stages may share a key.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mapstate.errors import IncompleteBatchError, UsageError
from mapstate.protocol.joint import check_readings
from mapstate.protocol.ledger_record import (
    FORMAT_WITH_SEED,
    Attempt,
    BatchPlan,
    Commit,
    InFlight,
    LedgerRecord,
    format_of,
)
from mapstate.protocol.seed_refusals import of_another_reading, without_history, without_list
from mapstate.protocol.seeds import SeedRecord
from mapstate.protocol.transitions import check_in_flight, check_session, dead_up_to
from mapstate.protocol.ways_back import counts
from mapstate.protocol.windows import NEVER, PaneChange, WindowCommit, WindowsRecord


def is_complete(ledger: LedgerRecord | None, owner: str) -> bool:
    """Whether the state counts a batch of this query already: then there is nothing to seed."""
    return ledger is not None and ledger.seed is None and ledger.owner == owner and ledger.owners[owner] > 0


def open_seed(ledger: LedgerRecord, plan: str, *, listed: int = 0, initial: bool = False) -> LedgerRecord:
    """Begin a seed, or go on with the one of the same plan. Call it after `open_ledger`, in the same write.

    A state of the same topology whose seed has ended stays as it is. Raises UsageError for a state that holds anything
    else, and SeedingError for a call without the list, or the initial rows, of the seed that it finds. ``listed`` is
    how many entries the list has, ``initial`` whether there are such rows.
    """
    seed = ledger.seed
    if seed is None:
        if ledger.last_commit is not None and ledger.last_commit.seeded and counts(ledger, 0):
            return ledger
        if ledger.last_txid is not None or ledger.owners[ledger.owner]:
            raise UsageError(
                f"state {ledger.state!r} holds batches already, and a seed fills a state that holds nothing. Nothing "
                "was written. Start the query without seed; or seed a state of another name, with a "
                "new checkpoint."
            )
    elif seed.plan == plan:
        return ledger
    elif seed.listed and not listed:
        raise without_list(ledger)
    elif seed.initial and not initial:
        raise without_history(ledger)
    return _anew(ledger, SeedRecord(plan=plan, listed=listed, initial=initial))


def check_together(ledgers: Sequence[LedgerRecord]) -> None:
    """Check the states of a topology: those whose seeds have been opened, or that count. Raises UsageError.

    A seed that has ended is never rolled back. So where one has, the others have all of the same rows, and only lack
    their end: a driver died between the ends of two commit domains. Two readings need not give the same rows, and a job
    that had only one of the states may have made another one.
    """
    first = next((ledger for ledger in ledgers if ledger.last_commit is not None and ledger.last_commit.seeded), None)
    if first is None:
        check_readings(ledgers)
        return
    for ledger in ledgers:
        seed, reading = ledger.seed, _reading(ledger)
        if ledger is first or (reading is not None and reading == _reading(first)):
            continue
        if seed is None or seed.is_loaded:
            raise of_another_reading(first.state, ledger.state)
        why = "has another one to begin: is it new, is the job or its list changed, or was batch 0 planned anew?"
        raise of_another_reading(first.state, ledger.state, why)


def _reading(ledger: LedgerRecord) -> str | None:
    """Which reading of the history the state has all rows of; None if it has not, or if that is unknown."""
    if ledger.seed is not None:
        return ledger.seed.reading if ledger.seed.is_loaded else None
    return None if ledger.last_commit is None else ledger.last_commit.reading


def staged(
    ledger: LedgerRecord,
    session: str,
    stage: str,
    *,
    files: int,
    rows: int,
    buckets: int,
    forgotten: int = 0,
    windows: WindowCommit | None = None,
) -> LedgerRecord:
    """The history is whole under the name ``stage``. Raises FencedError."""
    seed = _seed_of(ledger, session)
    fresh = SeedRecord(
        plan=seed.plan,
        listed=seed.listed,
        initial=seed.initial,
        stage=stage,
        files=files,
        staged=rows,
        forgotten=forgotten,
        buckets=buckets,
        windows=windows,
    )
    return ledger if seed == fresh else _anew(ledger, fresh)


def _anew(ledger: LedgerRecord, seed: SeedRecord) -> LedgerRecord:
    """Nothing counts, and what is there is below the floor: also what a late writer may still put."""
    return msgspec.structs.replace(
        with_windows(ledger, seed.windows),
        seed=seed,
        format=FORMAT_WITH_SEED,
        floor=ledger.next_txid,
        reset_txid=ledger.next_txid,
        last_txid=None,
        in_flight=None,
        dead=(),
        initial_keys=0,
        operations=None,
    )


def with_windows(ledger: LedgerRecord, staged: WindowCommit | None) -> LedgerRecord:
    """The ledger by which a seed is loaded whose stage says this of times; None: by which it is staged.

    Rows are staged as if no time had passed, because the watermark is known only then: none is late or too old, and no
    tiles are joined. What is loaded has no tiles and panes that the begin after batch 0 would take away.
    """
    windows, rolling = ledger.windows, ledger.rolling
    if windows is not None:
        windows = msgspec.structs.replace(windows.emptied(), least=windows.least)
        if staged is not None:
            windows = windows.begun(staged)
            windows = msgspec.structs.replace(windows, removed=windows.purged)  # nothing is behind that
    return msgspec.structs.replace(ledger, windows=windows, rolling=rolling and rolling.seeded(staged))


def first_pane(windows: WindowsRecord) -> int | None:
    """Before which panes are over, in whatever order rows come; None where none is. Not of sessions."""
    panes = windows.definition.panes
    return None if windows.purged == NEVER else windows.purged - panes.length + panes.slide


def begin_bucket(ledger: LedgerRecord, session: str, nonce: str, *, at: str = "") -> tuple[LedgerRecord, Attempt]:
    """Start an attempt at the next bucket, with a new txid; a transactional state goes on with the one in flight.

    Raises FencedError.
    """
    _seed_of(ledger, session)
    repeat = ledger.in_flight if ledger.type == "transactional" else None
    txid = ledger.next_txid if repeat is None else repeat.txid
    after = msgspec.structs.replace(
        ledger,
        next_txid=max(ledger.next_txid, txid + 1),
        in_flight=InFlight(txid=txid, epoch=ledger.epoch, batch_id=0, nonce=nonce, at=at),
    )
    return after, Attempt(0, txid, ledger.view(), after.fence())


def commit_bucket(
    ledger: LedgerRecord,
    session: str,
    txid: int,
    *,
    rows: int,
    keys: int,
    keys_delta: int | None,
    panes: PaneChange | None = None,
) -> LedgerRecord:
    """The bucket of this attempt counts, and with the first one the list of forgotten keys, which it has written.

    A second call changes nothing. Raises FencedError.
    """
    seed = _seed_of(ledger, session)
    if ledger.last_txid == txid:
        return ledger
    check_in_flight(ledger, txid)
    return msgspec.structs.replace(
        ledger,
        seed=seed.loaded(rows, keys, keys_delta),
        in_flight=None,
        last_txid=txid,
        dead=dead_up_to(ledger, txid),
        operations=seed.listed or None,
        windows=ledger.windows and ledger.windows.committed(panes or PaneChange()),
    )


def end_seed(ledger: LedgerRecord, session: str, plan: BatchPlan, done: Commit) -> LedgerRecord:
    """Batch 0 counts, with the sums of all buckets. A second call changes nothing.

    It takes one more txid, which nobody uses: so no version of mapstate rolls the last bucket back for the batch.
    Raises FencedError, and IncompleteBatchError where other rows were loaded than staged.
    """
    check_session(ledger, session)
    if ledger.seed is None and counts(ledger, 0):
        return ledger
    seed = _seed_of(ledger, session)
    if seed.done < seed.buckets or seed.rows != seed.staged or ledger.last_txid is None:
        raise IncompleteBatchError(
            f"state {ledger.state!r}: {seed.staged} rows of the history were staged, and {seed.rows} are loaded, by "
            f"{seed.done} of {seed.buckets} buckets. Nothing of the seed counts. Were files of the stage deleted? "
            "Delete the rest of it, the directory 'mapstate' of the checkpoint, and seed again.",
            state=ledger.state,
            found=seed.rows,
            expected=seed.staged,
        )
    commit = msgspec.structs.replace(
        done,
        txid=ledger.last_txid,
        owner=ledger.owner,
        rows=seed.rows,
        keys=seed.keys,
        keys_delta=seed.keys_delta,
        keys_held=None if ledger.windows is not None else seed.keys_delta,
        plan=plan.digest(),
        windows=seed.windows,
        seeded=True,
        reading=seed.reading,
        forgotten=seed.forgotten,
    )
    return msgspec.structs.replace(
        ledger,
        seed=None,
        format=format_of(ledger.windows, ledger.changes, ledger.rolling, operations=ledger.operations),
        next_txid=ledger.next_txid + 1,
        changes=None if ledger.changes is None else ledger.changes.emptied(ledger.last_txid + 1),
        last_commit=commit,
        previous=None,
        owners=ledger.owners | {ledger.owner: 1},
    )


def _seed_of(ledger: LedgerRecord, session: str) -> SeedRecord:
    check_session(ledger, session)
    if ledger.seed is None:
        raise UsageError(f"state {ledger.state!r} is not being seeded. Nothing was written.")
    return ledger.seed
