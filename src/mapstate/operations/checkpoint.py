"""A streaming checkpoint, put back to where the ledger is.

After a store came back from a snapshot, or a batch was rolled back, Spark's checkpoint is ahead of the state.
Spark's own logs say what each batch holds, so the batches that the state lacks can be repeated exactly, as
long as Spark keeps those logs.
"""

from __future__ import annotations

import datetime as dt
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from mapstate.backends import resolve
from mapstate.backing_map import Backend
from mapstate.capabilities import close_if_possible
from mapstate.errors import CheckpointError, MissingBatchesError, StaleBatchError, StateOwnershipError, UsageError
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.spec import check_state_name

__all__ = ["Rewound", "check_first_offsets", "clear_first_offsets", "query_of", "rewind"]


class Rewound(NamedTuple):
    """What was done: ``batch_id`` comes next; the files ``moved`` are below ``to`` now, None if there were none."""

    batch_id: int
    moved: tuple[str, ...]
    to: Path | None


def rewind(backend_or_url: Backend | str, state: str, checkpoint: str | Path, *, dry_run: bool = False) -> Rewound:
    """Puts the checkpoint of a stopped query back, so that its next batch is the one that the state waits for.

    By an operator, with the query stopped. Spark then repeats that batch exactly, and what comes after it
    anew. Nothing is deleted: what goes is moved to ``CHECKPOINT.rewound-<time>``, beside the directory itself
    where ``checkpoint`` is a link, and within it where nothing can be moved out of it, as with a mount point.
    If it is interrupted, run it again. ``dry_run`` only says what would be moved. ``checkpoint`` is a local
    directory. States of Spark's own operators in front of foreachBatch go back only as far as Spark keeps their
    versions.

    Raises, before anything is changed: UsageError for what is no checkpoint; StateOwnershipError where it is not
    the owner's; StaleBatchError where it is behind the ledger; MissingBatchesError where Spark no longer has
    the batch; StateNotFoundError, StoreError. CheckpointError where its files cannot be read or moved.
    """
    store: Any = resolve(backend_or_url).open(check_state_name(state))
    try:
        ledger = read_ledger(store, state)
    finally:
        close_if_possible(store)
    try:
        return _rewound(ledger, _local(checkpoint), dry_run=dry_run)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of state {state!r} cannot be rewound: {error}. What went aside before that stays there. "
            "Mend it, and run it again: it goes on where it ended. Do not start the query before it is done.",
            state=state,
        ) from error


def query_of(checkpoint: str | Path) -> str:
    """The id of the streaming query whose checkpoint this is: a local directory. Raises UsageError."""
    return _query_id(_local(checkpoint))


def check_first_offsets(checkpoint: str) -> None:
    """Before a query is started: a driver that died as it wrote ``offsets/0`` left what Spark refuses to start over.

    Raises CheckpointError with what to delete. Looks at a local directory only, and changes nothing.
    """
    left = _first_offsets(checkpoint)
    if left:
        raise CheckpointError(
            f"a driver died while it wrote the first offsets of the checkpoint {checkpoint!r}, and Spark refuses to "
            "start over what is left (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY). No batch has begun there, and "
            f"nothing was written. Delete {', '.join(map(str, left))} and start again; or call clear_first_offsets of "
            "mapstate.operations.checkpoint. See docs/operating.md#each-refusal-and-what-to-do"
        )


def clear_first_offsets(checkpoint: str | Path) -> list[Path]:
    """Deletes what a driver left in a checkpoint that died as it wrote ``offsets/0``; returns the files.

    For a program that starts a query again by itself. Nothing is deleted where a batch has begun, nor where the
    checkpoint is no local directory. Not while another driver starts the same query. Raises OSError.
    """
    left = _first_offsets(str(checkpoint))
    for path in left:
        path.unlink()
    return left


def _first_offsets(checkpoint: str) -> list[Path]:
    """Files in ``offsets`` where no batch has begun; none where there is no such local directory."""
    folder = Path(unquote(urlsplit(checkpoint).path) if checkpoint.startswith("file:") else checkpoint)
    try:
        left = sorted((folder / "offsets").iterdir())
        batches = [*_numbers(folder / "offsets"), *_numbers(folder / "commits")]
    except (OSError, ValueError):
        return []
    # Spark does not see checksums by themselves.
    return [] if batches or all(path.name.endswith(".crc") for path in left) else left


def _rewound(ledger: LedgerRecord, folder: Path, *, dry_run: bool) -> Rewound:
    due = _due(ledger, _query_id(folder))
    offsets, commits = _numbers(folder / "offsets"), _numbers(folder / "commits")
    _check(ledger, folder, due, offsets)
    # Commits first, from the last one down: at every moment Spark finds logs that it can read, and the state
    # refuses whatever batch that makes, until all is done.
    moving = [folder / "commits" / str(one) for one in reversed(commits) if one >= due]
    moving += [folder / "offsets" / str(one) for one in reversed(offsets) if one > due]
    moved = tuple(str(path.relative_to(folder)) for path in moving)
    if dry_run or not moving:
        return Rewound(due, moved, None)
    aside = _aside(folder)
    places = [aside / name for name in ("commits", "offsets")]
    try:
        for place in places:
            place.mkdir()
        for path in moving:
            _move(path, aside / path.parent.name)
    finally:
        for empty in (*places, aside):
            with suppress(OSError):  # it is not empty
                empty.rmdir()
    return Rewound(due, moved, aside)


def _move(path: Path, place: Path) -> None:
    checksum = path.with_name(f".{path.name}.crc")
    if checksum.exists():  # before its file: one without a checksum is read, one with a wrong one is not
        checksum.rename(place / checksum.name)
    path.rename(place / path.name)


def _local(checkpoint: str | Path) -> Path:
    text = str(checkpoint)
    if text.startswith("file:"):
        text = unquote(urlsplit(text).path)
    elif "://" in text:
        raise UsageError(
            f"a checkpoint can be rewound in a local directory, not in a {text.partition('://')[0]}:// store: copy it "
            "here, rewind it, and copy it back"
        )
    folder = Path(text).resolve()
    if not (folder / "metadata").is_file():
        raise UsageError(f"{str(folder)!r} is no checkpoint of a streaming query: it has no file 'metadata'")
    return folder


def _query_id(folder: Path) -> str:
    try:
        return str(json.loads((folder / "metadata").read_text())["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the file 'metadata' in {str(folder)!r} holds no query id") from error


def _due(ledger: LedgerRecord, query_id: str) -> int:
    """The batch that this query has to bring next."""
    if query_id not in ledger.owners:
        raise StateOwnershipError(
            f"the checkpoint is of query {query_id}, which never owned state {ledger.state!r}; its owner is "
            f"{ledger.owner}. Nothing was changed: look for that query's checkpoint.",
            state=ledger.state,
            owner=ledger.owner,
        )
    if query_id != ledger.owner:
        raise StateOwnershipError(
            f"the checkpoint is of query {query_id}, which owned state {ledger.state!r} before {ledger.owner} did. "
            "Nothing was changed: rewind the owner's checkpoint, or start with on_new_owner='adopt'.",
            state=ledger.state,
            owner=ledger.owner,
        )
    at = ledger.in_flight
    if ledger.type == "transactional" and at is not None and at.batch_id is not None:
        return at.batch_id  # it has to be finished first
    return ledger.owners[query_id]


def _check(ledger: LedgerRecord, folder: Path, due: int, offsets: list[int]) -> None:
    newest = max(offsets, default=-1)
    if newest < due - 1:
        raise StaleBatchError(
            f"state {ledger.state!r} waits for batch {due}, but the checkpoint {str(folder)!r} ends with "
            f"{'nothing' if newest < 0 else f'batch {newest}'}: it is behind the state, and batches {newest + 1} to "
            f"{due - 1} are missing there. Nothing was changed: put the newer checkpoint back.",
            state=ledger.state,
            found=newest,
            expected=due,
        )
    needed = [one for one in (due - 1, due) if 0 <= one <= newest]  # Spark starts from the end of the one before
    purged = [one for one in needed if one not in offsets]
    if purged:
        raise MissingBatchesError(
            f"state {ledger.state!r} waits for batch {due}, and Spark has purged what batch {purged[0]} held: the "
            f"checkpoint goes back to batch {offsets[0]} (spark.sql.streaming.minBatchesToRetain). Nothing was "
            "changed: restore a newer copy of the store, or reset the state and replay.",
            state=ledger.state,
            found=offsets[0],
            expected=due,
        )


def _numbers(folder: Path) -> list[int]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def _aside(folder: Path) -> Path:
    """A new directory to which the checkpoint's files can be renamed: beside it, or within it where they cannot."""
    time = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    within = folder / f"{folder.name}.rewound-{time}"
    within.mkdir()
    try:
        return within.rename(folder.with_name(within.name))
    except OSError:  # a mount point, or a parent that this user may not write to
        return within
