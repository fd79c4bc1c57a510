"""A user's own state, updated in bulk by each partition of a batch: Trident's partitionPersist.

No ledger and no records of mapstate's: a state of one's own gets the batch's id before and after its updates, as
Trident's does, and has to see by itself that a batch that comes again counts once. What mapstate adds is the way there:
a fixed number of partitions, empty ones too, and accounts of who has reported.
"""

from __future__ import annotations

import copy
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa

from mapstate.backing_map import let_go
from mapstate.errors import ConfigurationError, IncompleteBatchError, MapStateError, UpdaterError
from mapstate.maps.serialized import CHUNK_BYTES
from mapstate.spark.applied import computed_once
from mapstate.spark.driver import Downstream
from mapstate.spark.new_values import NewValuesStream
from mapstate.spark.plan import column_of
from mapstate.spark.query import configured
from mapstate.spark.rows import column_names, empty_frame, through
from mapstate.spark.startable import Startable
from mapstate.spark.state_query import Collector, StateFactory, StaticState
from mapstate.spark.stream import Stream, check_travels, check_unique
from mapstate.spark.task import (
    REPORT_COLUMN,
    TaskError,
    TaskReport,
    arrow_schema,
    arrow_to_python,
    partition_id,
    report_line,
    slices,
)
from mapstate.values import cut

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["PartitionPersist", "State", "StateUpdater", "partition_persist"]

# Else Spark leaves partitions out that it knows to be empty, or puts several into one.
_EVERY_PARTITION = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation",
}


class State(Protocol):
    """Trident's State: what a `StateFactory` makes. Executor; one object per task. It may have a ``close()``."""

    def begin_commit(self, txid: int) -> None:
        """A batch begins in this partition: ``txid`` is Spark's batch id.

        The same txid comes again after a crash, with the same rows or with others, and may come to two objects at
        once where Spark tries a task twice. A new checkpoint begins at 0 again.
        """
        ...

    def commit(self, txid: int) -> None:
        """All updates of the batch have been given. Other partitions may still be at work, and may fail."""
        ...


class StateUpdater(ABC):
    """Trident's StateUpdater: updates a state with the rows of a partition. Picklable.

    ``output`` are the columns that it emits, as DDL; by default none.
    """

    output: str = ""

    @abstractmethod
    def update_state(self, state: Any, rows: Sequence[Mapping[str, Any]], collector: Collector) -> None:
        """Updates the state, and emits what shall be its new values. Executor.

        Called between `State.begin_commit` and `State.commit`, once for each ``chunk_size`` rows; once with no rows
        where the partition is empty.
        """


class PartitionPersist(Startable):
    """A user's own state that follows a stream. See `Stream.partitionPersist`."""

    def __init__(
        self, stream: Stream, task: _UpdateTask, by: Sequence[str], downstream: tuple[Downstream, ...]
    ) -> None:
        super().__init__(stream.df)
        self._stream = stream
        self._task = task
        self._by = by
        self._downstream = downstream

    def newValuesStream(self) -> NewValuesStream:
        """What the updater emits, of a whole batch, after all its partitions have committed.

        Raises ConfigurationError where it announces no output.
        """
        if not self._task.emitted.fields:
            raise ConfigurationError(
                f"{type(self._task.updater).__name__} emits nothing: say what, as DDL, output = 'user string, n bigint'"
            )
        frame = empty_frame(self._df, self._task.emitted)
        return NewValuesStream(self._stream.name, self._df, frame, self.with_downstream, kind="events")

    def with_downstream(self, function: Downstream) -> PartitionPersist:
        """The same state with one more function that gets what the updater emits."""
        return PartitionPersist(self._stream, self._task, self._by, (*self._downstream, function))

    @property
    def static(self) -> StaticState:
        """The state for a `stateQuery`, which asks for each key in the partition where it was put."""
        return StaticState(self._task.factory, {}, self._task.partitions)

    def _apply(self, batch_df: DataFrame, batch_id: int) -> None:
        """One batch. Raises UpdaterError, IncompleteBatchError."""
        from pyspark.sql import functions as F

        frame = through(self._stream.steps, batch_df, batch_id)
        task = self._task.of_batch(batch_id)
        with configured(batch_df, _EVERY_PARTITION):
            plan = frame.repartition(task.partitions, *map(column_of, self._by)).mapInArrow(task, task.schema)
            out, release = computed_once(plan)
        try:
            report = F.col(REPORT_COLUMN)
            lines = out.where(report.isNotNull()).select(report).collect()
            self._account([msgspec.json.decode(line[0], type=TaskReport) for line in lines], batch_id)
            emitted = out.where(report.isNull()).drop(REPORT_COLUMN)
            for function in self._downstream:
                function(emitted, batch_id)
        finally:
            release()

    def _account(self, reports: list[TaskReport], batch_id: int) -> None:
        for report in reports:
            if report.error is not None:
                raise report.error.rebuild()
        found = {report.partition for report in reports if report.rows_in == report.rows_done}
        if len(reports) != self._task.partitions or len(found) != self._task.partitions:
            raise IncompleteBatchError(
                f"{self._stream.name!r}: of {self._task.partitions} partitions of batch {batch_id} {len(found)} have "
                f"updated their state with all their rows, in {len(reports)} reports. Spark brings the batch again.",
                found=len(found),
                expected=self._task.partitions,
            )


def partition_persist(
    stream: Stream,
    state: StateFactory,
    updater: StateUpdater,
    by: Sequence[str],
    *,
    partitions: int,
    chunk_size: int,
) -> PartitionPersist:
    """See `Stream.partitionPersist`."""
    from pyspark.sql.types import StructType

    if isinstance(state, type) or not isinstance(state, StateFactory):
        raise ConfigurationError(
            f"partitionPersist needs an object with make_state(partition, partitions), not {state!r}; a recipe such as "
            "opaque(url) is for persistentAggregate"
        )
    if not isinstance(updater, StateUpdater):
        raise ConfigurationError(f"partitionPersist needs an instance of a StateUpdater, not {updater!r}")
    for name, value in (("partitions", partitions), ("chunk_size", chunk_size)):
        if type(value) is not int or value < 1:
            raise ConfigurationError(f"{name} is an int from 1 up, not {value!r}")
    by = column_names(stream.schema, by, "partitionPersist")
    check_travels("the state factory", state)
    check_travels("the state updater", updater)
    emitted: Any = StructType.fromDDL(updater.output) if updater.output else StructType([])
    check_unique(emitted.names)
    return PartitionPersist(stream, _UpdateTask(state, updater, emitted, partitions, chunk_size), by, ())


class _UpdateTask:
    """The function that `mapInArrow` runs, once per partition and try. Picklable."""

    def __init__(
        self, factory: StateFactory, updater: StateUpdater, emitted: StructType, partitions: int, chunk_size: int
    ) -> None:
        from pyspark.sql.types import StringType, StructField, StructType

        self.factory = factory
        self.updater = updater
        self.emitted = emitted
        self.partitions = partitions
        self._chunk_size = chunk_size
        self.schema = StructType([*emitted.fields, StructField(REPORT_COLUMN, StringType())])
        self._txid = -1

    def of_batch(self, batch_id: int) -> _UpdateTask:
        task = copy.copy(self)
        task._txid = batch_id
        return task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Updates the partition's state; yields what is emitted, and at the end the report."""
        report = TaskReport(partition=partition_id(), holder=uuid.uuid4().hex)
        try:
            yield from self._update(batches, report)
        except MapStateError as error:
            report.error = TaskError.of(error)
        except Exception as error:  # noqa: BLE001  anybody's code
            names = f"{type(self.updater).__name__} or its state"
            report.error = TaskError.of(
                UpdaterError(
                    f"{names} raised {type(error).__name__} in partition {report.partition} of batch {self._txid}: "
                    f"{cut(error)}",
                    updater=type(self.updater).__name__,
                )
            )
        for _ in batches:
            pass  # what is left unread would block the sender
        yield report_line(report, self.schema)

    def _update(self, batches: Iterator[pa.RecordBatch], report: TaskReport) -> Iterator[pa.RecordBatch]:
        state = self.factory.make_state(report.partition, self.partitions)
        try:
            state.begin_commit(self._txid)
            for rows in self._chunks(batches):
                collector = Collector()
                report.rows_in += len(rows)
                self.updater.update_state(state, rows, collector)
                report.rows_done += len(rows)
                if collector.emitted:
                    yield self._emitted(collector.emitted)
            state.commit(self._txid)
        finally:
            let_go(state)

    def _chunks(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[dict[str, Any]]]:
        empty = True
        for batch in batches:
            for part in slices(batch, lambda: self._chunk_size, CHUNK_BYTES):
                names = part.schema.names
                columns = [arrow_to_python(column, name) for column, name in zip(part.columns, names, strict=True)]
                empty = False
                yield [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        if empty:
            yield []

    def _emitted(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        arrow = arrow_schema(self.schema)
        width = len(self.emitted.fields)
        for values in rows:
            if len(values) != width:
                raise UpdaterError(
                    f"{type(self.updater).__name__} emitted {len(values)} values, its output is "
                    f"{self.updater.output!r}",
                    updater=type(self.updater).__name__,
                )
        arrays = [pa.array(column, arrow.field(at).type) for at, column in enumerate(zip(*rows, strict=True))]
        return pa.RecordBatch.from_arrays([*arrays, pa.nulls(len(rows), pa.string())], schema=arrow)
