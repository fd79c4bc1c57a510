"""The test kit: contracts of a store, failing stores, servers in Docker. See docs/testing-with-faults.md."""

from __future__ import annotations

from pathlib import Path

from mapstate.errors import UsageError
from mapstate.operations.folders import local_path
from mapstate.testing.faults import (
    Begins,
    Call,
    Commits,
    Fail,
    Fault,
    FaultyBackend,
    FaultyStore,
    ForgetfulBackend,
    ForgetfulStore,
    HasKey,
    Kill,
    Mark,
    RecordedCall,
    Wait,
    calling_executor,
    wait_for,
)

__all__ = [
    "Begins",
    "Call",
    "Commits",
    "Fail",
    "Fault",
    "FaultyBackend",
    "FaultyStore",
    "ForgetfulBackend",
    "ForgetfulStore",
    "HasKey",
    "Kill",
    "Mark",
    "RecordedCall",
    "Wait",
    "calling_executor",
    "crash_between",
    "wait_for",
]


def crash_between(checkpoint: str | Path) -> int:
    """Remove Spark's own commit of the last batch, and return the id of that batch.

    The checkpoint is then what a driver leaves that died after the ledger's commit and before Spark's: the query,
    started again, brings the batch again. For a checkpoint in a local directory, of a query that has stopped.

    Of a batch, Spark writes ``sources/`` and ``offsets/N`` before the foreachBatch function is called, and
    afterwards ``commits/N`` alone. So that is what goes, with its checksum. Where the next batch is planned
    already (``offsets/N+1``: the query died or failed in it) nothing is taken back, because Spark would go on
    with that one and never bring the last one again. Raises UsageError.
    """
    place = local_path(checkpoint)
    if place is None:
        raise UsageError(f"{checkpoint!r} is not on this machine's disk, and only there a crash can be made")
    committed, planned = _batches(place / "commits"), _batches(place / "offsets")
    if not committed:
        raise UsageError(f"no batch has ended in the checkpoint {str(place)!r}: is it the right directory?")
    last = committed[-1]
    if last not in planned or planned[-1] > last:
        raise UsageError(
            f"in the checkpoint {str(place)!r} batch {last} has ended and batch {max(planned, default='none')} is the "
            f"last one planned: a driver that died before Spark's commit of {last} had planned nothing after it. Let "
            "the query finish what it has attempt, or leave it: it did crash, in another place."
        )
    (place / "commits" / str(last)).unlink()
    (place / "commits" / f".{last}.crc").unlink(missing_ok=True)
    return last


def _batches(log: Path) -> list[int]:
    return sorted(int(path.name) for path in log.iterdir() if path.name.isdigit()) if log.is_dir() else []
