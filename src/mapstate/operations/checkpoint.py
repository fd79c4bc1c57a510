"""Rewind a streaming checkpoint to its state's ledger.

After a restore of the store, or the rollback of a batch, Spark's checkpoint is ahead of the state. Spark's logs say
what each batch holds. So the missing batches can be repeated exactly, as long as Spark keeps those logs.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mapstate.backends import opened
from mapstate.backing_map import Backend
from mapstate.errors import CheckpointError, MissingBatchesError, StaleBatchError, StateOwnershipError, UsageError
from mapstate.operations.folders import Folder, folder_of, has_scheme, local_path
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.urls import quoted


class Rewound(NamedTuple):
    """The result: ``batch_id`` comes next. The files ``moved`` are now below ``to``, which is None without any.

    ``to`` is text, as the checkpoint was named, where that is not on this machine.
    """

    batch_id: int
    moved: tuple[str, ...]
    to: Path | str | None


def rewind(backend_or_url: Backend | str, state: str, checkpoint: str | Path, *, dry_run: bool = False) -> Rewound:
    """Rewind the checkpoint of a stopped query, so that its next batch is the one that the state waits for.

    Spark then repeats that batch exactly, and plans later ones anew. Files are not lost: they move to
    ``CHECKPOINT.rewound-<time>``. That lies beside the directory, or within it if it is a mount point. Run an
    interrupted rewind again: it goes on. An object store has no rename, so there a file is copied, and then deleted;
    one that was interrupted in between is there twice, and its copy again after the next run.

    Args:
        backend_or_url: The store of the state.
        state: The state's name.
        checkpoint: A directory, as Spark is given it: ``s3a://bucket/checkpoint``. What is not of this machine is
            reached by pyarrow or fsspec, see docs/operating.md#a-checkpoint-in-an-object-store.
        dry_run: Only return what would be moved.

    Not guaranteed: states of Spark's own operators in front of foreachBatch go back only as far as Spark keeps their
    versions. One checkpoint of an object store is not rewound by two processes at a time.

    Raises, before anything is changed: UsageError for what is no checkpoint; StateOwnershipError where it is not
    the owner's; StaleBatchError where it is behind the ledger; MissingBatchesError where Spark no longer has
    the batch; StateNotFoundError, StoreError. CheckpointError where its files cannot be read or moved.

    """
    with opened(backend_or_url, state) as store:
        ledger = read_ledger(store, state)
    try:
        return _rewound(ledger, _checkpoint_at(checkpoint), dry_run=dry_run)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of state {state!r} cannot be rewound: {error}. Files that were moved before stay moved. "
            "Repair the cause, and run it again: it goes on from there. Do not start the query before it is done.",
            state=state,
        ) from error


def query_of(checkpoint: str | Path) -> str:
    """The id of the streaming query whose checkpoint this is, see `rewind`. Raises UsageError, CheckpointError."""
    try:
        return _query_id(_checkpoint_at(checkpoint))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}. Nothing was changed.") from error


def check_first_offsets(checkpoint: str) -> None:
    """Refuse, before a query starts, the files of a driver that died while it wrote ``offsets/0``, or is about to.

    Spark refuses to start over such files. Raises CheckpointError with the files to delete if no driver lives. Reads
    local directories only, and changes nothing.
    """
    path, left = local_path(checkpoint), []
    if path is not None:
        with suppress(OSError, ValueError):
            left = _first_offsets(folder_of(path))
    if left:
        raise CheckpointError(
            f"a driver is writing the first offsets of the checkpoint {checkpoint!r}, or died as it wrote them, and "
            "Spark refuses to start over its files (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY). No batch has begun "
            "there, and nothing was written. Nothing tells which of the two: no driver but that of Topology.run beats. "
            "Look for a second copy of the job: if one lives, leave the files, which its query needs. "
            f"If none does: Delete {', '.join(f'{path}/{name}' for name in left)} and start again; or call "
            "clear_first_offsets of mapstate.operations.checkpoint. See docs/operating.md#each-refusal-and-what-to-do"
        )


def clear_first_offsets(checkpoint: str | Path) -> list[Path | str]:
    """Delete the files of a driver that died while it wrote ``offsets/0``; return them.

    For a program that starts a query again by itself. Nothing is deleted if a batch has begun, or where no checkpoint
    is. Never call it while another driver may start the same query, which this ends: a checkpoint does not say whose
    driver is alive. Drivers of `Topology.run` beat, and `mapstate list` says so. ``checkpoint`` is as that of `rewind`,
    also in another file system. Raises OSError, UsageError.
    """
    folder = folder_of(checkpoint)
    return [folder.delete(name) for name in _first_offsets(folder)]


def _first_offsets(folder: Folder) -> list[str]:
    """The files in ``offsets`` if no batch has begun."""
    left = sorted(folder.listed("offsets"))
    # Spark ignores checksums without their file.
    if all(name.endswith(".crc") for name in left) or _numbers(folder, "offsets") or _numbers(folder, "commits"):
        return []
    return [f"offsets/{name}" for name in left]


def _rewound(ledger: LedgerRecord, folder: Folder, *, dry_run: bool) -> Rewound:
    due = _due(ledger, _query_id(folder))
    offsets, commits = _numbers(folder, "offsets"), _numbers(folder, "commits")
    _check(ledger, folder, due, offsets)
    # Commits first, from the last one down. Then Spark can read its logs at every moment, and the state refuses the
    # batch that they make, until all files are moved.
    moving = [("commits", batch) for batch in reversed(commits) if batch >= due]
    moving += [("offsets", batch) for batch in reversed(offsets) if batch > due]
    moved = tuple(f"{log}/{batch}" for log, batch in moving)
    if dry_run or not moving:
        return Rewound(due, moved, None)
    there = {f"{log}/{name}" for log in ("commits", "offsets") for name in folder.listed(log)}
    # A checksum before its file: Spark reads a file without a checksum, but not one with a wrong checksum.
    files = [name for log, batch in moving for name in (f"{log}/.{batch}.crc", f"{log}/{batch}") if name in there]
    return Rewound(due, moved, folder.move_aside(files))


def _checkpoint_at(place: str | Path) -> Folder:
    folder = folder_of(place)
    if folder.listed().get("metadata") is not False:
        shown = repr(str(folder)) if has_scheme(str(place)) else quoted(str(folder))
        raise UsageError(f"{shown} is no checkpoint of a streaming query: it has no file 'metadata'.")
    return folder


def _query_id(folder: Folder) -> str:
    try:
        return str(json.loads(folder.text("metadata"))["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the file 'metadata' in {str(folder)!r} holds no query id.") from error


def _due(ledger: LedgerRecord, query_id: str) -> int:
    """The batch that the query has to bring next."""
    if query_id != ledger.owner:
        which = f"has no part in state {ledger.state!r}; its owner is {ledger.owner}"
        advice = "Look for that query's checkpoint."
        if query_id in ledger.owners:
            which = f"owned state {ledger.state!r} before {ledger.owner} did"
            advice = "Rewind the owner's checkpoint, or start with on_new_owner='adopt'."
        raise StateOwnershipError(
            f"the checkpoint is of query {query_id}, which {which}. Nothing was changed. {advice}",
            state=ledger.state,
            owner=ledger.owner,
        )
    attempt = ledger.in_flight
    if ledger.type == "transactional" and attempt is not None and attempt.batch_id is not None:
        return attempt.batch_id  # it has to be finished first
    return ledger.owners[query_id]


def _check(ledger: LedgerRecord, folder: Folder, due: int, offsets: list[int]) -> None:
    newest = max(offsets, default=-1)
    if newest < due - 1:
        raise StaleBatchError(
            f"state {ledger.state!r} waits for batch {due}, but the checkpoint {str(folder)!r} ends with "
            f"{'nothing' if newest < 0 else f'batch {newest}'}: it is behind the state, and batches {newest + 1} to "
            f"{due - 1} are missing there. Nothing was changed. Put the newer checkpoint back.",
            state=ledger.state,
            found=newest,
            expected=due,
        )
    needed = [batch for batch in (due - 1, due) if 0 <= batch <= newest]  # Spark starts where the batch before ended
    purged = [batch for batch in needed if batch not in offsets]
    if purged:
        raise MissingBatchesError(
            f"state {ledger.state!r} waits for batch {due}, and Spark has purged the offsets of batch {purged[0]}: the "
            f"checkpoint goes back to batch {offsets[0]} (spark.sql.streaming.minBatchesToRetain). Nothing was changed."
            " Restore a newer copy of the store, or reset the state and replay the source.",
            state=ledger.state,
            found=offsets[0],
            expected=due,
        )


def _numbers(folder: Folder, log: str) -> list[int]:
    return sorted(int(name) for name in folder.listed(log) if name.isdecimal())
