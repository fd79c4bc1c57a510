"""A state with sessions, batch by batch. See `mapstate.protocol.sessions`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from mapstate.aggregators.fields import Fields
from mapstate.maps.pane_index import slices, windows_of_ledger
from mapstate.protocol.ledger_record import Attempt, LedgerRecord
from mapstate.protocol.sessions import last_panes, pane_to_settle
from mapstate.protocol.windows import Named, PaneChange, WindowCommit
from mapstate.spark.driver.windows import WindowedState
from mapstate.spark.executor.session_task import FiredSessionTask, SessionRows, SettleTask
from mapstate.spark.executor.task import TaskReport
from mapstate.spark.executor.window_task import FiredTask, JoinTask, Reads

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


class SessionState(WindowedState):
    """A state with sessions."""

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
