"""A state with a change log, batch by batch: its tasks write the log, and the driver removes what is not kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from mapstate.capabilities import FencedWrites
from mapstate.errors import ConfigurationError
from mapstate.maps.change_log import remove_logs
from mapstate.protocol.ledger_record import Attempt, LedgerRecord, OpenRequest
from mapstate.protocol.windows import PaneChange
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.executor.logged_task import LoggedTask

if TYPE_CHECKING:
    from mapstate.spark.driver.apply import AttemptResult
    from mapstate.spark.driver.frames import SentRows
    from mapstate.spark.driver.job import Branch

_MOST_REMOVED = 1000  # transactions; each batch removes one, and some more after attempts that failed


class LoggedState(StateDriver):
    """A state whose spec says ``changes``."""

    logged_task: type[LoggedTask] = LoggedTask

    def __init__(self, branch: Branch) -> None:
        super().__init__(branch)
        self._opened: Any = None
        if self.spec.changes:
            self.make_task = self.logged_task

    def open(self) -> Any:
        """See `StateDriver.open`. Raises ConfigurationError for a store in which a log would grow without end."""
        store = self._opened = super().open()
        if not isinstance(store, FencedWrites):
            raise ConfigurationError(
                f"state {self.spec.state!r}: its store cannot remove what a late writer may write again, so a change "
                "log would grow without end. Nothing was written. Leave changes out; readers scan."
            )
        return store

    def open_request(self, owner: str) -> OpenRequest:
        return msgspec.structs.replace(super().open_request(owner), changes=self.spec.changes)

    def attempt(self, sent: SentRows, record: LedgerRecord, attempt: Attempt) -> AttemptResult:
        """See `StateDriver.attempt`; then removes what is not kept any more. Raises FencedError, too."""
        result = super().attempt(sent, record, attempt)
        try:
            removed = () if record.changes is None else remove_logs(self._opened, record, attempt, _MOST_REMOVED)
        except BaseException:
            result.release()
            raise
        width = max((report.partition + 1 for report in result.reports if report.keys), default=0)
        result.panes = PaneChange(purged=removed, width=width)
        return result
