"""Where a history from another place meets a stream, by topic and partition: no row twice, none lost. Pure.

The start that Spark has written down for batch 0 is the truth, and a history has to reach it in each partition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from mapstate.errors import UsageError
from mapstate.protocol.ledger_record import BatchPlan, LedgerRecord, by_partition

Partition = tuple[str, str]
Holes = Literal["refused", "before", "allowed"]

_SEE = "Nothing was written. See docs/life.md#history-from-another-place"
_MOVE = "start the stream where the history ends, with a new checkpoint, because this one keeps its start"


class Held(NamedTuple):
    """What a history has of one partition below the stream's start.

    ``rows``     how many, and ``offsets`` how many different ones
    ``first``, ``last``  the lowest and the highest of these offsets
    ``reach``    the highest offset of all, also at or above the start
    ``mix``      of these offsets, to tell another reading from this one
    """

    rows: int = 0
    offsets: int = 0
    first: int | None = None
    last: int | None = None
    reach: int | None = None
    mix: int | None = None

    def is_same(self, other: Held) -> bool:
        """Whether another reading has found the same below the start."""
        return self._replace(reach=None) == other._replace(reach=None)


def starts_of(plan: BatchPlan, *, tables: bool = False) -> dict[Partition, int]:
    """Where batch 0 starts in each partition of all sources, as Spark has resolved it. Raises UsageError.

    A partition that is new since then is not in it: a stream reads that from its first record. With ``tables`` the
    first version of a Delta table and the first snapshot of an Iceberg table are numbers, too.
    """
    entries, starts = json.loads(plan.start), dict[Partition, int]()
    if not isinstance(entries, list) or not entries:
        raise _unknown("of its sources")
    for i, entry in enumerate(entries):
        partitions = (_start_of_table(entry) if tables else None) or by_partition(entry)
        if partitions is None:
            raise _unknown(f"of source {i}, which is {json.dumps(entry)[:100]}")
        if twice := starts.keys() & partitions.keys():
            raise _unknown(f"of partition {_name(min(twice))}, which two sources read")
        starts.update(partitions)
    return starts


def _start_of_table(entry: Any) -> dict[Partition, int] | None:
    """The version or snapshot of which a source reads all, and nothing before it; None for another start."""
    match entry:
        case {"reservoirVersion": int(version), "index": -1, "isStartingVersion": False}:
            return {("delta", "version"): version}
        case {"snapshot_id": int(snapshot), "position": 0, "scan_all_files": False}:
            return {("iceberg", "snapshot"): snapshot}
    return None


def check_meets(
    starts: Mapping[Partition, int],
    held: Mapping[Partition, Held],
    holes: Holes,
    first_hole: Callable[[Partition, int], int],
) -> None:
    """Check that each offset below the start of its partition is once in the history. Raises UsageError.

    ``holes`` says which may lack: none, those before the first one of their partition, or any. Whatever it says, the
    history has to reach the start. ``first_hole`` gives a partition's first offset from some offset on that lacks.
    """
    for partition, start in sorted(starts.items()):
        there, name = held.get(partition, Held()), _name(partition)
        if there.first is not None and there.first < 0:
            raise UsageError(f"the history has the offset {there.first} in partition {name}. {_SEE}")
        if there.rows > there.offsets:
            raise UsageError(
                f"the history has {there.rows - there.offsets} rows of partition {name} whose offset is there before. "
                "Leave them out, rows.dropDuplicates by the coordinates; or if a record has several rows, make these "
                f"in a transform of the stream, which the history passes, too. {_SEE}"
            )
        is_passed = holes == "allowed" and there.reach is not None and there.reach >= start
        end = 0 if there.last is None else there.last + 1
        if end < start and not is_passed:
            where = f"the history of partition {name} ends at offset {there.last}" if end else f"it has none of {name}"
            raise UsageError(
                f"offsets {end} to {start - 1} of partition {name} are in neither: {where}, and the stream starts at "
                f"{start}. Add the rows that lack; or {_MOVE}. {_SEE}"
            )
        begins = 0 if holes == "refused" or there.first is None else there.first
        if holes != "allowed" and there.offsets < start - begins:
            raise UsageError(
                f"{start - begins - there.offsets} offsets of partition {name} below the stream's start, {start}, are "
                f"not in the history, the first one is {first_hole(partition, begins)}. Add their rows. Or say "
                "Coordinates(..., holes='before') if the history begins later, holes='allowed' if the topic is "
                f"compacted or has transactions, or if rows were filtered. {_SEE}"
            )


def check_starts(starts: Mapping[Partition, int], named: Mapping[Partition, int]) -> None:
    """Check that the stream starts at the offsets that somebody named. Raises UsageError."""
    for partition in sorted(starts.keys() | named.keys()):
        start, end = starts.get(partition), named.get(partition)
        if start != end:
            says = "it names no such partition" if end is None else f"the history ends at {end}"
            is_read = "does not read it" if start is None else f"starts at {start}"
            raise UsageError(
                f"partition {_name(partition)}: {says} by StartsAt, and the stream {is_read}; {_MOVE}. {_SEE}"
            )


def check_reading(before: Mapping[Partition, Held], after: Mapping[Partition, Held]) -> None:
    """Check that a history was the same before and after it was staged. Raises UsageError."""
    for partition in sorted(before.keys() | after.keys()):
        first, then = before.get(partition, Held()), after.get(partition, Held())
        if not first.is_same(then):
            raise UsageError(
                f"the history has changed while it was read: partition {_name(partition)} had {first.rows} rows below "
                f"the stream's start, and has {then.rows}. Nothing of it counts. Call seed again, over rows that stay."
            )


def unread(partition: tuple[str | None, str | None], rows: int) -> UsageError:
    """The error of rows whose partition has no start in the stream."""
    return UsageError(
        f"the history has {rows} rows of partitions that the stream did not read at its start, such as "
        f"{partition[0]} {partition[1]}: nothing tells where they and the stream meet. Leave them out of the history; "
        f"or start the stream with these partitions, with a new checkpoint. {_SEE}"
    )


def without_place(rows: int) -> UsageError:
    """The error of rows of which nothing tells where they are."""
    return UsageError(f"{rows} rows of the history have no topic, partition or offset. Leave them out. {_SEE}")


def lacks_history(ledger: LedgerRecord | None, owner: str, *, resets: bool) -> bool:
    """Whether a query's first batch would count on a state that holds nothing: then its history has to come first."""
    if ledger is None or (resets and ledger.owner != owner):
        return True
    return ledger.seed is None and ledger.last_txid is None


def _unknown(source: str) -> UsageError:
    return UsageError(
        f"initialRows have to meet the stream, and Spark tells no start by partition {source}. Give the source all of "
        f"the history. {_SEE}"
    )


def _name(partition: Partition) -> str:
    return f"{partition[0]} {partition[1]}"
