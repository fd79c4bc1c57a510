"""A state with sessions, batch by batch. See `mapstate.protocol.sessions`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from mapstate.aggregators.fields import Fields
from mapstate.errors import INSIDE
from mapstate.maps.pane_index import slices, windows_of_ledger
from mapstate.protocol.ledger_record import Attempt, LedgerRecord
from mapstate.protocol.sessions import FIRST, LAST, last_panes, pane_to_settle
from mapstate.protocol.windows import NEVER, Named, PaneChange, WindowCommit
from mapstate.spark.driver.apply import Grouping
from mapstate.spark.driver.windows import WindowedState
from mapstate.spark.executor.session_task import FiredSessionTask, SessionRows, SettleTask
from mapstate.spark.executor.task import TaskReport
from mapstate.spark.executor.window_task import FiredTask, JoinTask, Reads

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType


class SessionState(WindowedState):
    """A state with sessions."""

    def as_staged(self, grouped: DataFrame, grouping: Grouping) -> DataFrame:
        """Sessions are longer than panes, and only all pieces of a key say which of them are over."""
        keys = grouping.places[1:]
        return grouped.repartition(*keys) if keys else grouped.repartition(1)

    def live(self, staged: DataFrame, grouping: Grouping, record: LedgerRecord) -> DataFrame:
        """What a seed loads: no sessions that are over."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        windows, keys = windows_of_ledger(record), grouping.places[1:]
        if windows.purged == NEVER:
            return staged
        first, last = self._first_and_last(grouping, record)
        begins, session, end = (f"{INSIDE}{name}" for name in ("begins", "session", "end"))
        in_order = Window.partitionBy(*keys).orderBy(first, last)
        before = F.max(last).over(in_order.rowsBetween(Window.unboundedPreceding, -1))
        gap = windows.definition.length  # no ledger of a seed has sessions that are `apart`
        rows = staged.withColumn(begins, F.when(first - before > gap, 1).otherwise(0))
        rows = rows.withColumn(session, F.sum(begins).over(in_order))
        rows = rows.withColumn(end, F.max(last).over(Window.partitionBy(*keys, session)) + gap)
        over = f"key0 is not null and {end} <= {windows.purged}L"  # a key that is null is among rows of no session
        return rows.where(f"not ({over})").drop(begins, session, end)

    def _first_and_last(self, grouping: Grouping, record: LedgerRecord) -> tuple[Column, Column]:
        """The times of staged rows, in units."""
        from pyspark.sql import functions as F

        if grouping.partials is None:
            time = F.expr(self._number(f"value{[*self.job.columns].index(str(self.windows.time))}"))
            return time, time
        names = [field.name for field in record.fields]
        first, last = (F.expr(self._number(f"partial{names.index(name)}_0")) for name in (FIRST, LAST))
        return first, last

    def _number(self, column: str) -> str:
        return column if self.windows.type == "bigint" else f"unix_micros({column})"

    def _done(
        self, reports: Sequence[TaskReport], record: LedgerRecord, attempt: Attempt, frame: DataFrame
    ) -> tuple[WindowCommit, PaneChange]:
        commit, panes = super()._done(reports, record, attempt, frame)
        windows, last = windows_of_ledger(record), record.last_windows() or WindowCommit()
        pane = pane_to_settle(windows, last)
        if pane is None:
            return msgspec.structs.replace(commit, settled=last.settled), panes
        if windows.may_have(pane):
            self._settle(pane, record, attempt, frame)
        return msgspec.structs.replace(commit, settled=pane), panes

    def _settle(self, pane: int, record: LedgerRecord, attempt: Attempt, frame: DataFrame) -> None:
        with closing(Reads(self.job.spec, record, attempt.view, attempt.txid)) as reads:
            parts = list(slices(reads.index, [reads.keys.text(pane)], windows_of_ledger(record).width))
        fields = Fields(record.fields, self.job.aggregators)
        settings = self.job.spec, record, attempt.token, attempt.view, attempt.txid
        self.run_on(SettleTask(*settings, pane=pane, fields=fields), parts, frame)

    def _due(self, record: LedgerRecord, done: WindowCommit, named: Named) -> tuple[list[int], range]:
        windows = windows_of_ledger(record)
        return last_panes(windows, done, named), range(max(done.before, windows.purged) + 1, done.watermark + 1)

    def _tasks(self, record: LedgerRecord, ends: range, fields: Fields, out: StructType) -> tuple[FiredTask, JoinTask]:
        return FiredSessionTask(self.job.spec, record, ends, fields), SessionRows(record, fields, out)
