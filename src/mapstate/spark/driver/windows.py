"""A state with windows, batch by batch: which rows are late, the watermark, the purge, and the windows that have fired.

The rules are those of `mapstate.protocol.windows`; the work is done by the tasks of
`mapstate.spark.executor.window_task`, on the driver where that applies the state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa

from mapstate.aggregators.fields import Fields
from mapstate.maps.pane_index import PanePages, Slice, slices, windows_of_ledger
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, Commit, LedgerRecord, OpenRequest
from mapstate.protocol.sessions import FIRST, LAST
from mapstate.protocol.windows import (
    Named,
    PaneChange,
    Panes,
    WindowCommit,
    fired_panes,
)
from mapstate.spark.driver.access import access_of, configured
from mapstate.spark.driver.apply import AttemptResult
from mapstate.spark.driver.event_time import TimedState, window_reports
from mapstate.spark.driver.frames import ONE_DRAW, SentRows
from mapstate.spark.driver.job import Branch, Follower, Job
from mapstate.spark.driver.new_values import arrow_frame, shown_types
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.driver.window_rows import ANY_TIME, with_panes
from mapstate.spark.executor.task import TaskReport, arrow_schema
from mapstate.spark.executor.window_task import (
    PACKED,
    PACKED_ORDER,
    FiredTask,
    JoinTask,
    PurgeTask,
    ReadAndJoin,
    Reads,
    WindowReport,
    WindowTask,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

WINDOW_START = "window_start"
WINDOW_END = "window_end"

_log = logging.getLogger("mapstate")

_DRIFT = 60_000_000  # microseconds by which a clock may be set right, or that of another driver may differ
_MOST_PAUSE = 7 * 86_400_000_000  # microseconds for which a job may be down before its clock is doubted
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)  # it goes on while the machine sleeps
_MOST_PURGED = 100_000  # keys, beside as many as the batch wrote
_ON_DRIVER = 10_000  # keys: fewer are not worth a job


class WindowedState(TimedState):
    """A state with windows by time."""

    window_task: Callable[..., WindowTask] = WindowTask

    def __init__(self, branch: Branch) -> None:
        super().__init__(branch)
        self._definition = self.windows.by_pane
        self._panes: Panes = self._definition.panes
        self.make_task = self.make_seed_task = partial(
            self.window_task, inputs=len(self.windows.inputs), has_gaps=self._panes.has_gaps, hole=self.windows.hole
        )

    def open_request(self, owner: str) -> OpenRequest:
        return msgspec.structs.replace(super().open_request(owner), windows=self._definition)

    def set_batch(self, record: LedgerRecord, done: AlreadyCommitted | None = None) -> None:
        """Rows are late by what was committed before the batch; unknown if another owner has committed since."""
        super().set_batch(record, done)
        last: int | None = (record.last_windows() or WindowCommit()).watermark
        if done is not None:
            last = None if done.commit is None or done.commit.windows is None else done.commit.windows.before
        self.branch.taken = None if last is None else (self._definition.fired_before(last), ANY_TIME)

    def keyed(self, frame: DataFrame) -> DataFrame:
        """A batch's rows with their panes, as its grouping takes them."""
        read = dict.fromkeys([*(key.name for key in self.job.keys[1:]), *self.job.columns])
        before = 0 if self.branch.taken is None else self.branch.taken[0]
        return with_panes(frame, self.windows, list(read), before, self.near)

    def attempt(self, sent: SentRows, record: LedgerRecord, attempt: Attempt) -> AttemptResult:
        """See `StateDriver.attempt`; then the new watermark, and the purge. Raises FencedError, too.

        An operator's attempt moves no watermark, and purges nothing.
        """
        result = super().attempt(sent, record, attempt)
        try:
            if attempt.batch_id < 0:
                result.panes = self._changed(result.reports, window_reports(result.reports), record, attempt)
            else:
                result.window_commit, result.panes = self._done(result.reports, record, attempt, sent[0])
        except BaseException:
            result.release()
            raise
        return result

    def attempt_staged(
        self, frame: DataFrame, staged: DataFrame, record: LedgerRecord, attempt: Attempt
    ) -> AttemptResult:
        """See `StateDriver.attempt_staged`. Nothing is due: what is over is not loaded."""
        result = super().attempt_staged(frame, staged, record, attempt)
        result.panes = self._changed(result.reports, window_reports(result.reports), record, attempt)
        return result

    def emit_fired(self, frame: DataFrame, record: LedgerRecord, done: Commit | None, batch_id: int) -> None:
        """Calls what gets fired windows: a state that follows for every batch, a function where a window has fired.

        ``record`` is the ledger with the commit, ``frame`` any rows of the batch; without ``done`` none has fired.
        """
        if not self.branch.fired:
            return
        fired = self.fired(frame, record, None if done is None else done.windows)
        for function in self.branch.fired:
            is_state = isinstance(function, Follower) and function.branch is not None
            if is_state or fired.has_windows:
                self.pass_on(function, fired.rows, batch_id)

    def _done(
        self, reports: Sequence[TaskReport], record: LedgerRecord, attempt: Attempt, frame: DataFrame
    ) -> tuple[WindowCommit, PaneChange]:
        """What the commit says of windows, and what the attempt did to panes. Purges what is due."""
        of_windows = window_reports(reports)
        commit = self.window_commit(record, of_windows)
        return commit, self._changed(reports, of_windows, record, attempt, frame)

    def _changed(
        self,
        reports: Sequence[TaskReport],
        of_windows: Sequence[WindowReport],
        record: LedgerRecord,
        attempt: Attempt,
        frame: DataFrame | None = None,
    ) -> PaneChange:
        """What the attempt did to panes. With a ``frame``, whose session runs jobs, it purges what is due."""
        task = PurgeTask(self.job.spec, record, attempt.token, attempt.view, attempt.txid)
        with closing(task.reads()) as reads:
            panes = PanePages(record.state, windows_of_ledger(record), reads.index)
            most = _MOST_PURGED + sum(report.keys for report in reports)
            purged = [] if frame is None else self._purge(task, panes, reads, frame, most)
            written = {pane for report in of_windows for pane in report.panes}
            width = max((report.partition + 1 for report in reports if report.keys), default=0)
            change, pages = panes.changed(PaneChange(written, purged, width))
        if pages:
            task.write(pages)
        return change

    def _purge(self, task: PurgeTask, panes: PanePages, reads: Reads, frame: DataFrame, most_keys: int) -> list[int]:
        """Removes what is due, up to some keys; the rest is for the next batch. Returns the panes that are done."""
        windows = windows_of_ledger(task.record)
        due = {reads.keys.text(pane): pane for pane in windows.due(task.record.last_windows(), panes.named)}
        chosen: list[Slice] = []
        keys = 0
        for part in slices(reads.index, due, windows.width):
            if keys >= most_keys:
                order = list(due)
                due = {pane: due[pane] for pane in order[: order.index(part.pane)]}
                break
            chosen.append(part)
            keys += part.most_keys
        if chosen:
            self.run_on(task, chosen, frame)
        return list(due.values())

    def run_on(self, task: PurgeTask, parts: Sequence[Slice], frame: DataFrame) -> None:
        """Runs a task on some slices: on the driver where they are few."""
        if self.job.spec.is_applied_on_driver or sum(part.most_keys for part in parts) <= _ON_DRIVER:
            task.work(parts)
            return
        rows = _spread(frame, parts, "pane string, partition int, full int, rests array<string>")
        rows.mapInArrow(task, "keys bigint").collect()

    def fired(self, frame: DataFrame, record: LedgerRecord, done: WindowCommit | None) -> Fired:
        """The windows that a committed batch has fired and that are not gone.

        Executors read them when somebody asks for the rows.
        """
        fields = Fields(record.fields, self.job.aggregators)
        out = fired_type(self.job, fields)
        windows = windows_of_ledger(record)
        panes: list[int] = []
        ends = range(0)
        if done is not None:
            with closing(Reads(self.job.spec, record, record.view(), record.next_txid - 1)) as reads:
                panes, ends = self._due(record, done, PanePages(record.state, windows, reads.index).named)
        if not panes:
            return Fired(frame.sparkSession.createDataFrame([], out), has_windows=False)
        read, join = self._tasks(record, ends, fields, out)
        places = [(pane, partition) for pane in panes for partition in range(windows.width)]
        is_whole = not self._definition.has_parts
        if self.job.spec.is_applied_on_driver:
            columns = [pa.array(column) for column in zip(*places, strict=True)]
            batch = pa.RecordBatch.from_arrays(columns, ["pane", "partition"])
            shown = (
                ReadAndJoin(read, join)(iter([batch])) if is_whole else _sorted_and_joined(read(iter([batch])), join)
            )
            return Fired(arrow_frame(frame, out, list(shown)), has_windows=True)
        spread = _spread(frame, places, "pane bigint, partition int")
        if is_whole:
            return Fired(spread.mapInArrow(ReadAndJoin(read, join), out), has_windows=True)
        with configured(frame, ONE_DRAW):
            packed = spread.mapInArrow(read, PACKED).repartition("window_end", "rest")
            joins = packed.sortWithinPartitions(*PACKED_ORDER).mapInArrow(join, out)
            return Fired(joins, has_windows=True)

    def _due(self, record: LedgerRecord, done: WindowCommit, named: Named) -> tuple[list[int], range]:
        """The panes of the windows that a batch has fired, and where these windows end."""
        windows = windows_of_ledger(record)
        ends = range(max(self._panes.floor(done.before), windows.purged) + 1, self._panes.floor(done.watermark) + 1)
        return [pane for pane, _ in fired_panes(windows, done, named)], ends

    def _tasks(self, record: LedgerRecord, ends: range, fields: Fields, out: StructType) -> tuple[FiredTask, JoinTask]:
        """What reads windows, and what makes rows of them."""
        return FiredTask(self.job.spec, record, ends), JoinTask(record, fields, out)


class Fired(NamedTuple):
    """The windows that a batch has fired, as rows."""

    rows: DataFrame
    has_windows: bool


def fired_type(job: Job, fields: Fields) -> StructType:
    """The columns of fired windows: start and end, the grouping columns, and one per aggregate."""
    from pyspark.sql.types import StructField, StructType

    from_ddl = calls().from_ddl
    time_type = from_ddl(job.keys[0].type)
    is_session = job.windows is not None and job.windows.by_pane.sessions
    columns = [StructField(WINDOW_START, time_type), StructField(WINDOW_END, time_type)]
    columns += [StructField(key.name, from_ddl(key.type)) for key in job.keys[1:]]
    columns += [
        StructField(name, kind)
        for name, kind in shown_types(fields).items()
        if not is_session or name not in (FIRST, LAST)
    ]
    return StructType(columns)


def _spread(frame: DataFrame, rows: Sequence[Sequence[Any]], schema: str) -> DataFrame:
    """Rows that the driver holds, over the executors. As rows of Python they would go through a task of their own."""
    of_spark: StructType = calls().from_ddl(schema)
    form = arrow_schema(of_spark)
    columns = [pa.array([row[i] for row in rows], kind) for i, kind in enumerate(form.types)]
    # Spark would take what tasks make of the rows to be as small as these, and broadcast it in a join.
    share = -(-len(rows) // access_of(frame).parallelism()) or 1
    return arrow_frame(frame, of_spark, [pa.RecordBatch.from_arrays(columns, schema=form)], rows_of_task=share)


def _sorted_and_joined(packed: Iterator[pa.RecordBatch], join: JoinTask) -> Iterator[pa.RecordBatch]:
    batches = list(packed)
    if batches:
        table = pa.Table.from_batches(batches).sort_by([(column, "ascending") for column in PACKED_ORDER])
        yield from join(iter(table.combine_chunks().to_batches()))
