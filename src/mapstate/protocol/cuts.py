"""Where a history from another place meets a stream, by topic and partition: no row twice, none lost. Pure.

Of a seed the start that Spark has written down for batch 0 is the truth, of a recount the end of the last batch. A
history has to reach it in each partition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from mapstate.errors import UsageError
from mapstate.protocol.ledger_record import LedgerRecord, by_partition

Partition = tuple[str, str]
Holes = Literal["refused", "before", "allowed"]


class Meeting(NamedTuple):
    """What messages say of the offsets that a history has to reach.

    ``place`` is their name, ``at`` what stands before one of them, ``read`` of partitions without one. ``move`` is what
    else may be done, ``again`` the call, ``unknown`` who needs offsets and gets none, ``instead`` what to do then.
    """

    place: str
    at: str
    read: str
    move: str
    again: str
    unknown: str
    instead: str
    see: str


SEED = Meeting(
    place="the stream's start",
    at="the stream starts at",
    read="the stream did not read at its start",
    move="; or start the stream where the history ends, with a new checkpoint, because this one keeps its start",
    again="seed",
    unknown="initialRows have to meet the stream, and Spark tells no start",
    instead="Give the source all of the history",
    see="Nothing was written. See docs/life.md#history-from-another-place",
)
RECOUNT = Meeting(
    place="the end of the last batch",
    at="the last batch ended at",
    read="the last batch names no end of",
    move="",
    again="correct",
    unknown="the history of a recount has to end where the last batch did, and Spark told no end",
    instead="Build the state anew beside this one, and swap",
    see="Nothing was written. See docs/life.md#compute-keys-anew",
)


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


def starts_of(offsets: str | None, *, tables: bool = False, meeting: Meeting = SEED) -> dict[Partition, int]:
    """The offset of each partition of all sources, as Spark has written them down. Raises UsageError.

    A partition that is new since then is not in it: a stream reads that from its first record. With ``tables`` the
    first version of a Delta table and the first snapshot of an Iceberg table are numbers, too.
    """
    starts = dict[Partition, int]()
    try:
        entries = json.loads(offsets or "[]")
    except ValueError:  # a source may have offsets that are no JSON
        entries = None
    if not isinstance(entries, list) or not entries:
        raise _unknown("of its sources", meeting)
    for i, entry in enumerate(entries):
        partitions = (_start_of_table(entry) if tables else None) or by_partition(entry)
        if partitions is None:
            raise _unknown(f"of source {i}, which is {json.dumps(entry)[:100]}", meeting)
        if twice := starts.keys() & partitions.keys():
            raise _unknown(f"of partition {_name(min(twice))}, which two sources read", meeting)
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
    meeting: Meeting = SEED,
) -> None:
    """Check that each offset below the start of its partition is once in the history. Raises UsageError.

    ``holes`` says which may lack: none, those before the first one of their partition, or any. Whatever it says, the
    history has to reach the start. ``first_hole`` gives a partition's first offset from some offset on that lacks.
    """
    for partition, start in sorted(starts.items()):
        there, name = held.get(partition, Held()), _name(partition)
        if there.first is not None and there.first < 0:
            raise UsageError(f"the history has the offset {there.first} in partition {name}. {meeting.see}")
        if there.rows > there.offsets:
            raise UsageError(
                f"the history has {there.rows - there.offsets} rows of partition {name} whose offset is there before. "
                "Leave them out, rows.dropDuplicates by the coordinates; or if a record has several rows, make these "
                f"in a transform of the stream, which the history passes, too. {meeting.see}"
            )
        is_passed = holes == "allowed" and there.reach is not None and there.reach >= start
        end = 0 if there.last is None else there.last + 1
        if end < start and not is_passed:
            where = f"the history of partition {name} ends at offset {there.last}" if end else f"it has none of {name}"
            raise UsageError(
                f"offsets {end} to {start - 1} of partition {name} are in neither: {where}, and {meeting.at} "
                f"{start}. Add the rows that lack{meeting.move}. {meeting.see}"
            )
        begins = 0 if holes == "refused" or there.first is None else there.first
        if holes != "allowed" and there.offsets < start - begins:
            raise UsageError(
                f"{start - begins - there.offsets} offsets of partition {name} below {meeting.place}, {start}, "
                f"are not in the history, the first one is {first_hole(partition, begins)}. Add their rows. Or say "
                "Coordinates(..., holes='before') if the history begins later, holes='allowed' if the topic is "
                f"compacted or has transactions, or if rows were filtered. {meeting.see}"
            )


def check_starts(starts: Mapping[Partition, int], named: Mapping[Partition, int], meeting: Meeting = SEED) -> None:
    """Check that the stream starts at the offsets that somebody named. Raises UsageError."""
    for partition in sorted(starts.keys() | named.keys()):
        start, end = starts.get(partition), named.get(partition)
        if start != end:
            says = "it names no such partition" if end is None else f"the history ends at {end}"
            is_read = "the stream does not read it" if start is None else f"{meeting.at} {start}"
            raise UsageError(
                f"partition {_name(partition)}: {says} by StartsAt, and {is_read}{meeting.move}. {meeting.see}"
            )


def check_reading(before: Mapping[Partition, Held], after: Mapping[Partition, Held], meeting: Meeting = SEED) -> None:
    """Check that a history was the same before and after it was staged. Raises UsageError."""
    for partition in sorted(before.keys() | after.keys()):
        first, then = before.get(partition, Held()), after.get(partition, Held())
        if not first.is_same(then):
            raise UsageError(
                f"the history has changed while it was read: partition {_name(partition)} had {first.rows} rows below "
                f"{meeting.place}, and has {then.rows}. Nothing of it counts. Call {meeting.again} again, over rows "
                "that stay."
            )


def unread(partition: tuple[str | None, str | None], rows: int, meeting: Meeting = SEED) -> UsageError:
    """The error of rows whose partition has no start in the stream."""
    move = "; or start the stream with these partitions, with a new checkpoint" if meeting.move else ""
    return UsageError(
        f"the history has {rows} rows of partitions that {meeting.read}, such as {partition[0]} {partition[1]}: "
        f"nothing tells where they and the stream meet. Leave them out of the history{move}. {meeting.see}"
    )


def without_place(rows: int, meeting: Meeting = SEED) -> UsageError:
    """The error of rows of which nothing tells where they are."""
    return UsageError(f"{rows} rows of the history have no topic, partition or offset. Leave them out. {meeting.see}")


def lacks_history(ledger: LedgerRecord | None, owner: str, *, resets: bool) -> bool:
    """Whether a query's first batch would count on a state that holds nothing: then its history has to come first."""
    if ledger is None or (resets and ledger.owner != owner):
        return True
    return ledger.seed is None and ledger.last_txid is None


def _unknown(source: str, meeting: Meeting) -> UsageError:
    return UsageError(f"{meeting.unknown} by partition {source}. {meeting.instead}. {meeting.see}")


def _name(partition: Partition) -> str:
    return f"{partition[0]} {partition[1]}"
