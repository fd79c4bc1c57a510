"""What a new query has still to read, where a state ends: for a job that lost its checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from mapstate.errors import UsageError, cut
from mapstate.protocol.following import digest_of_files
from mapstate.protocol.ledger_record import by_partition
from mapstate.reader import open_reader
from mapstate.spark.driver.access import is_connect, java_class
from mapstate.spark.driver.offsets import NO_HOST
from mapstate.spark.driver.query_run import FILTER_NAME
from mapstate.spec import StateSpec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Partitions = dict[tuple[str, str], int]  # the offset of each topic and partition
_log = logging.getLogger("mapstate")


class Start(NamedTuple):
    """Where a new query starts in a Kafka source, as its option ``startingOffsets`` takes it, and what is ``lost``.

    That is: topic, partition, the first offset that Kafka has removed before it was counted, and the next one.
    """

    json: str
    lost: tuple[tuple[str, int, int, int], ...]


def starting_offsets(df: DataFrame, specs: Sequence[StateSpec]) -> list[Start | None]:
    """See `PersistentAggregate.starting_offsets`, of a stream and its states."""
    bounds, ends = _kafka_bounds(df), [_ends(spec) for spec in specs]
    fits = len(ends[0]) == len(bounds) and all(
        end is not None or not bound for end, bound in zip(ends[0], bounds, strict=False)
    )
    if not any(bounds) or not fits or any(each != ends[0] for each in ends):
        raise UsageError(
            f"no start is right for {', '.join(spec.state for spec in specs)}: they end at {cut(ends)}, and this "
            f"stream reads {len(bounds)} sources, {len([*filter(None, bounds)])} of Kafka. Put the old checkpoint "
            "back; for files take files_not_counted. See docs/operating.md#a-new-checkpoint-where-the-state-ends"
        )
    starts = list[Start | None]()
    for end, bound in zip(ends[0], bounds, strict=True):
        first, next_ = (by_partition(json.loads(text)) or {} for text in bound or ("{}", "{}"))
        starts.append(_start(end or {}, first, next_) if bound else None)
    return starts


def _ends(spec: StateSpec) -> list[Partitions | None]:
    """Where the last batch of a state ends in each source; None in those that have no numbers by partition."""
    with open_reader(spec.backend, spec.state, follow=None) as reader:
        last = reader.ledger().last_commit
    return [by_partition({} if entry is None else entry) for entry in json.loads((last and last.offsets) or "[]")]


def _start(counted: Partitions, first: Partitions, next_: Partitions) -> Start:
    """In each partition the later of what is there and what was counted; -2, all that is there, in a new one."""
    starts: dict[str, dict[str, int]] = {topic: {} for topic, _ in first}
    lost = []
    for topic, at in sorted(first.keys() | counted.keys()):
        end, there = counted.get((topic, at)), first.get((topic, at), 0)
        if end is not None and end > next_.get((topic, at), -1):
            raise UsageError(
                f"partition {at} of topic {topic!r} was counted up to offset {end}, and does not reach it: it was made "
                "anew, or is another broker's. Start empty, on_new_owner='reset', or at offsets that you know to be "
                "right, 'adopt_unchecked'."
            )
        starts[topic][at] = -2 if end is None else max(there, end)
        if there > (end or 0) and topic in {topic for topic, _ in counted}:  # a partition that was added began at 0
            lost.append((topic, int(at), end or 0, there))
            _log.warning("topic %s, partition %d: offsets %d to below %d are removed, and were not counted", *lost[-1])
    return Start(json.dumps(starts), tuple(lost))


def files_not_counted(offsets: str | None, source: int = 0) -> Column:
    """A condition on a file source's rows: those of files that are behind where ``offsets`` ends.

    ``offsets`` is that of a `Commit`; ``source`` the place of the file source in it. For a query with a new
    checkpoint that goes on where the state ends (``on_new_owner="adopt"``). Files that come later with
    an older modification time are left out. Raises UsageError where ``offsets`` does not tell.
    """
    from pyspark.sql import functions as F

    entries = json.loads(offsets) if offsets is not None else []
    entry = entries[source] if source < len(entries) else None
    if not isinstance(entry, dict) or "newest" not in entry:
        raise UsageError(
            f"the offsets {offsets} do not tell which files of source {source} were read last. Put the old checkpoint "
            "back, or start empty with on_new_owner='reset'."
        )
    time = F.unix_millis("_metadata.file_modification_time")
    path = F.regexp_replace("_metadata.file_path", NO_HOST.pattern, "$1/")
    fresh = ~path.isin(entry["paths"])
    name = F.lit(FILTER_NAME + digest_of_files(entry))  # by which a query that adopts the state is known to have it
    condition: Column = name.isNotNull() & ((time > entry["newest"]) | ((time == entry["newest"]) & fresh))
    return condition


def _kafka_bounds(frame: DataFrame) -> list[tuple[str, str] | None]:
    """First and next offset of each partition, as JSON, for each source of a stream; None for one that is not Kafka.

    In the order of the offsets. Raises UsageError under Spark Connect.
    """
    if is_connect(frame):
        raise UsageError(
            "under Spark Connect there is no JVM here that could ask Kafka for its offsets. Nothing was started. Call "
            "starting_offsets from classic PySpark. See docs/kafka.md#where-a-new-checkpoint-starts"
        )
    session, leaves = frame.sparkSession._jsparkSession, frame._jdf.queryExecution().analyzed().collectLeaves()
    jvm = frame.sparkSession._jvm
    java_class(jvm, "org.apache.spark.sql.SparkSession").setActiveSession(session)  # of this thread

    def offsets(relation: Any, start: str) -> str:
        given = {name: value for name, value in relation.extraOptions().items() if not name.startswith("starting")}
        given |= {"startingoffsets": start, "kafka.isolation.level": "read_uncommitted"}  # as may have been counted
        options = java_class(jvm, "org.apache.spark.sql.util.CaseInsensitiveStringMap")(given)
        with TemporaryDirectory(prefix="mapstate-") as folder:  # in place of a checkpoint
            stream = relation.table().newScanBuilder(options).build().toMicroBatchStream(Path(folder).as_uri())
            try:
                return str(stream.initialOffset().json())
            finally:
                stream.stop()

    streams = [leaf for leaf in map(leaves.apply, range(leaves.size())) if leaf.isStreaming()]
    return [
        (offsets(stream, "earliest"), offsets(stream, "latest")) if _is_of_kafka(stream) else None for stream in streams
    ]


def _is_of_kafka(relation: Any) -> bool:
    return relation.getClass().getSimpleName() == "StreamingRelationV2" and str(relation.table().name()) == "KafkaTable"
