"""The errors of batches that come out of order. See `mapstate.protocol.transitions.begin`."""

from __future__ import annotations

from mapstate.errors import MissingBatchesError, StaleBatchError
from mapstate.protocol.ledger_record import LedgerRecord

__all__ = ["missing_batches", "stale_batch"]


def stale_batch(ledger: LedgerRecord, batch_id: int, due: int) -> StaleBatchError:
    """The error of a batch that is older than the committed one."""
    return StaleBatchError(
        f"Spark brings batch {batch_id} to state {ledger.state!r}, which waits for batch {due} of this query: the "
        "checkpoint is older than the state. Nothing was written. Put the newer checkpoint back, or restore the "
        "store to the checkpoint's moment. See docs/operating.md#after-a-restored-checkpoint",
        state=ledger.state,
        found=batch_id,
        expected=due,
    )


def missing_batches(ledger: LedgerRecord, batch_id: int, due: int, *, accept: bool = True) -> MissingBatchesError:
    """The error of a batch that comes before the one that is ``due``."""
    way_out = " on_gap='accept' goes on without them." if accept else ""
    if ledger.next_txid == ledger.first_txid:
        return MissingBatchesError(
            f"Spark brings batch {batch_id}, not {due}, but there is no state {ledger.state!r} here yet. Nothing was "
            "written. If the store was emptied: restore a copy and run mapstate rewind, or take a new checkpoint. If "
            "the job is new to the state: run it once with on_gap='accept'. See "
            "docs/operating.md#a-store-that-was-emptied",
            state=ledger.state,
            found=batch_id,
            expected=due,
        )
    return MissingBatchesError(
        f"state {ledger.state!r}: Spark brings batch {batch_id}, but the state has still to get batch {due} of this "
        "query. The store lost batches, or the job ran without the state for a while. Nothing was written. Rewind the "
        f"checkpoint (mapstate rewind), or reset the state and replay the source.{way_out} See "
        "docs/operating.md#after-a-restored-store-mapstate-rewind",
        state=ledger.state,
        found=batch_id,
        expected=due,
    )
