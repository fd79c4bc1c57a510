"""A user's own state, updated in bulk by each partition of a batch: Trident's partitionPersist.

mapstate keeps no ledger and no records of it: it makes a fixed number of partitions, and checks who has reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.columns import column_of
from mapstate.errors import ConfigurationError, IncompleteBatchError, check_range, check_unique
from mapstate.spark.driver.access import configured
from mapstate.spark.driver.frames import computed_once, through
from mapstate.spark.driver.job import AfterCommit, Downstream, Follower, Step
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.executor.task import REPORT_COLUMN, TaskReport, reports_of
from mapstate.spark.executor.update_task import UpdateTask
from mapstate.spark.interfaces import StateFactory, StateUpdater, ensure_picklable
from mapstate.spark.steps.columns import column_names, empty_frame
from mapstate.spark.steps.state_query import StaticState
from mapstate.spark.streams.persistent_aggregate import NewValuesStream
from mapstate.spark.streams.query import OfQuery, Query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

# Else Spark leaves partitions out that it knows to be empty, or puts several into one.
_EVERY_PARTITION = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation",
}


class PartitionPersist(OfQuery):
    """A user's own state that follows a stream. See `Stream.partitionPersist`."""

    def __init__(self, query: Query, steps: tuple[Step, ...], task: UpdateTask) -> None:
        super().__init__(query)
        self._steps = steps
        self._task = task
        self._downstream: list[Downstream | Follower] = []
        query.add_after_commit(AfterCommit(self._apply, set_aside=self._set_aside, downstream=self._downstream))

    def newValuesStream(self) -> NewValuesStream:
        """What the updater emits, of a whole batch, after all its partitions have committed.

        Raises ConfigurationError where it announces no output.
        """
        if not self._task.emitted.fields:
            raise ConfigurationError(
                f"{type(self._task.updater).__name__} emits nothing: say what, as DDL, output = 'user string, n bigint'"
            )
        frame = empty_frame(self.query.df, self._task.emitted)

        def feed(function: Downstream | Follower) -> None:
            self.query.reopen()
            self._downstream.append(function)

        return NewValuesStream(self.query.name, self, frame, feed, kind="events")

    @property
    def static(self) -> StaticState:
        """The state for a `stateQuery`, which asks for each key in the partition where it was put."""
        return StaticState(self._task.factory, {}, self._task.partitions)

    def _apply(self, batch_df: DataFrame, batch_id: int) -> None:
        """One batch. Raises UpdaterError, IncompleteBatchError."""
        from pyspark.sql import functions as F

        frame = through(self._steps, batch_df, batch_id)
        task = self._task.of_batch(batch_id)
        with configured(batch_df, _EVERY_PARTITION):
            plan = frame.repartition(task.partitions, *map(column_of, task.by)).mapInArrow(task, task.schema)
            out, release = computed_once(plan)
        try:
            report = F.col(REPORT_COLUMN)
            lines = out.where(report.isNotNull()).select(report).collect()
            self._account(reports_of(line[0] for line in lines), batch_id)
            emitted = out.where(report.isNull()).drop(REPORT_COLUMN)
            for function in self._downstream:
                function(emitted, batch_id)
        finally:
            release()

    def _set_aside(self, batch_df: DataFrame, batch_id: int) -> None:
        """A batch in quarantine: it updates nothing, and is an empty one for the states that follow."""
        empty = empty_frame(batch_df, self._task.emitted)
        for function in self._downstream:
            if isinstance(function, Follower) and function.branch is not None:
                function(empty, batch_id)

    def _account(self, reports: list[TaskReport], batch_id: int) -> None:
        for report in reports:
            if report.error is not None:
                raise report.error.rebuild()
        reported = {report.partition for report in reports if report.rows_in == report.rows_done}
        if len(reports) != self._task.partitions or len(reported) != self._task.partitions:
            raise IncompleteBatchError(
                f"{self.query.name!r}: of {self._task.partitions} partitions of batch {batch_id} {len(reported)} have "
                f"updated their state with all their rows, in {len(reports)} reports. Spark brings the batch again.",
                found=len(reported),
                expected=self._task.partitions,
            )


def update_task(
    schema: StructType,
    state: StateFactory,
    updater: StateUpdater,
    by: Sequence[str],
    *,
    partitions: int,
    chunk_size: int,
) -> UpdateTask:
    """What updates the partitions of each batch. Raises ConfigurationError."""
    from pyspark.sql.types import StructType

    if isinstance(state, type) or not isinstance(state, StateFactory):
        raise ConfigurationError(
            f"partitionPersist needs an object with make_state(partition, partitions), not {state!r}; a spec such as "
            "opaque(url) is for persistentAggregate"
        )
    if not isinstance(updater, StateUpdater):
        raise ConfigurationError(f"partitionPersist needs an instance of a StateUpdater, not {updater!r}")
    for name, value in (("partitions", partitions), ("chunk_size", chunk_size)):
        check_range(name, value, 1)
    by = column_names(schema, by, "partitionPersist")
    ensure_picklable("the state factory", state)
    ensure_picklable("the state updater", updater)
    emitted: Any = calls().from_ddl(updater.output) if updater.output else StructType([])
    check_unique(emitted.names)
    return UpdateTask(state, updater, by=by, emitted=emitted, partitions=partitions, chunk_size=chunk_size)
