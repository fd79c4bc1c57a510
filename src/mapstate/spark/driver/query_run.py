"""A query and its start, by which batches are told apart; and the refusals of frames and plans that fit none."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, NamedTuple

from mapstate.errors import UsageError, cut

FUNCTION_PAGE = "See docs/guides/foreach-batch.md"

OF_ICEBERG = '"snapshot_id"'
"""In the offsets of a table of Iceberg."""

FILTER_NAME = "files_not_counted "
"""Before the digest in the text of a plan that leaves files out, see `files_not_counted`."""


def has_ended() -> UsageError:
    """The error of a DataFrame whose query has ended."""
    return UsageError(
        "this DataFrame is of a streaming query that has ended. Nothing was written. Let no thread outlive the "
        f"function that Spark calls. {FUNCTION_PAGE}"
    )


SET_BY_STREAMS = "spark.sql.requireAllClusterKeysForDistribution"
"""A setting internal to Spark, which a query sets in its own copy of the session and nobody else does."""


def check_by_hand(query_id: str | None, conf: Any, *, runs: bool) -> None:
    """Raises UsageError unless no batch of any query can have brought a frame that no query is known to have.

    ``query_id``  what its thread says; ``conf``  of its session; ``runs``  some query runs
    """
    if query_id is not None or conf.get(SET_BY_STREAMS, None) is not None:
        raise has_ended()
    if runs:
        raise UsageError(
            "a streaming query runs, and nothing tells whether this DataFrame is of one of its batches. Nothing "
            "was written. Make it with the rows.sparkSession of the batch, or call by hand while no query runs. "
            f"{FUNCTION_PAGE}"
        )


_SENDS_TOTALS = ("Aggregate", "Distinct")


def check_plan(plan: Any, output_mode: str) -> None:
    """Before rows of a query are added to a state, in a mode that is not append. Driver.

    ``plan`` is the JVM's. Raises UsageError if a streaming aggregation would send each key's total again and again.
    Other stateful operators send a row once also in update mode, and what a user's own sends is the user's.
    """
    if plan.getClass().getSimpleName() in _SENDS_TOTALS and plan.isStreaming():
        raise UsageError(
            f"the stream is aggregated before it comes here, and outputMode={output_mode.lower()!r} sends totals, not "
            "increments: a state would add totals up. Nothing was written. Aggregate here instead, by "
            "newStream(...).groupBy(...).persistentAggregate(...); or use a watermark and outputMode='append'. See "
            "docs/guarantees.md#rows-are-increments"
        )
    children = plan.children()
    for i in range(children.size()):
        check_plan(children.apply(i), output_mode)


def first_version(source: Any) -> str | None:
    """Where a Delta table's ``startingVersion`` is, in Delta's form; None without one. ``source`` is the JVM's."""
    with suppress(Exception):  # whatever another Delta has, or a version that is not there
        first = {"index": -1, "isStartingVersion": False, "sourceVersion": 1, "reservoirId": str(source.tableId())}
        return json.dumps(first | {"reservoirVersion": int(source.getStartingVersion().get())})
    return None


def check_whole(execution: Any) -> None:
    """Refuse a source that begins with a snapshot behind others that have expired. ``execution`` is the JVM's.

    An Iceberg table is streamed from the oldest snapshot that is there, also where it shall begin with one that is
    gone. Raises UsageError.
    """
    sources = execution.sources()
    for source in map(sources.apply, range(sources.size())):
        first = _first_snapshot(source)
        if first is not None:
            raise UsageError(
                f"the stream of an Iceberg table begins with snapshot {first}, and those before it have expired: their "
                "rows are in no stream, and would lack. Nothing was written. Give them as initialRows, the table with "
                "versionAsOf this snapshot, in front of the stream from the next one on. If they shall not count, give "
                "this snapshot's committed_at in milliseconds as stream-from-timestamp. Either way take a new "
                "checkpoint. See docs/life.md#delta-and-iceberg"
            )


def _private(source: Any, name: str) -> Any:
    field = source.getClass().getDeclaredField(name)
    field.setAccessible(True)
    return field.get(source)


def _first_snapshot(source: Any) -> int | None:
    """The snapshot with which an Iceberg table begins, if the one before it has expired.

    None for another source, and where ``stream-from-timestamp`` is the time of just this snapshot.

    Raises UsageError where nothing tells it.
    """
    if not str(source.getClass().getName()).startswith("org.apache.iceberg."):
        return None
    try:
        table, start = (_private(source, name) for name in ("table", "fromTimestamp"))
        first = json.loads(source.initialOffset().json())["snapshot_id"]
        snapshot = table.snapshot(first)
        if snapshot is not None and snapshot.timestampMillis() == start:  # else Iceberg falls back to the oldest one
            return None
        parent = None if snapshot is None else snapshot.parentId()  # an empty table has none
        return int(first) if parent is not None and table.snapshot(parent) is None else None
    except Exception as error:
        raise UsageError(
            f"nothing tells whether snapshots of the Iceberg table have expired, whose rows would lack ({cut(error)}). "
            "Nothing was written. Give the table as initialRows, in front of the stream from its next snapshot on. See "
            "docs/life.md#delta-and-iceberg"
        ) from error


FILTER = re.compile(f"{FILTER_NAME}([0-9a-f]{{16}})")


class QueryRun(NamedTuple):
    """The query of a checkpoint, and one start of it; None where the function is called by hand."""

    query_id: str
    run_id: str | None


class SourceLog(NamedTuple):
    """What a file source calls itself, and where it keeps the log of its files."""

    name: str
    place: str
