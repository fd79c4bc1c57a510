"""A state with rolling windows, batch by batch: which rows count, and in which tiles.

The rules are those of `mapstate.protocol.rolling`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from mapstate.aggregators.tiles import TileFields
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, LedgerRecord, OpenRequest
from mapstate.protocol.rolling import RollingRecord
from mapstate.protocol.windows import LATEST, WindowCommit
from mapstate.schema import KeyOrder, time_text
from mapstate.spark.driver.apply import AttemptResult
from mapstate.spark.driver.event_time import TimedGrouping, TimedState, window_reports
from mapstate.spark.driver.frames import SentRows
from mapstate.spark.driver.job import Branch, Windows
from mapstate.spark.driver.window_rows import TILE, with_tiles
from mapstate.spark.executor.rolling_task import RollingTask
from mapstate.spark.executor.window_task import WindowReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("mapstate")


class RollingGrouping(TimedGrouping):
    """A grouping by key and tile, with the rows of a key as neighbours.

    Spark first combines the rows of each tile, and then spreads the tiles by key: a second, small shuffle.
    """

    def __init__(self, *settings: Any, windows: Windows) -> None:
        super().__init__(*settings, windows=windows)
        self.may_skip_partial = False

    def of(self, batch_df: DataFrame) -> DataFrame:
        if self.partials is not None:
            return self.by_key(batch_df.groupBy(*self.keys, TILE).agg(*self.values))
        return self.by_key(batch_df.select(*self.keys, TILE, *self.values))

    def by_key(self, rows: DataFrame) -> DataFrame:
        spread = rows.repartition(*self.places) if self.places else rows.repartition(1)
        return spread.sortWithinPartitions(*self.places, TILE)

    def in_order(self, rows: DataFrame, order: KeyOrder | None) -> DataFrame:
        if order is None or not self.places:
            return rows
        return rows.sortWithinPartitions(*self.order_of(order), *self.places, TILE)


class RollingState(TimedState):
    """A state with rolling windows."""

    def __init__(self, branch: Branch) -> None:
        super().__init__(branch)
        self._record: RollingRecord | None = None
        self.make_grouping = partial(RollingGrouping, windows=self.windows)
        self.make_task = partial(RollingTask, inputs=len(self.windows.inputs), hole=self.windows.hole)
        self.make_seed_task = partial(self.make_task, joins=True)

    def open_request(self, owner: str) -> OpenRequest:
        return msgspec.structs.replace(super().open_request(owner), rolling=self.windows.rolling)

    def set_batch(self, record: LedgerRecord, done: AlreadyCommitted | None = None) -> None:
        """Rows count up to `Windows.ahead` beyond the clock, and back to the oldest window."""
        super().set_batch(record, done)
        if done is not None:
            windows = None if done.commit is None else done.commit.windows
            self.branch.taken = None if windows is None else windows.taken
            return
        kept = self._record = record.rolling
        if kept is None:
            raise AssertionError("a state with rolling windows has a record of them")
        self.make_fields = partial(TileFields, tiling=kept.tiling)
        first, last = kept.first_time(), LATEST
        if self.windows.type == "timestamp" and self.windows.ahead is not None:
            last = self.near + self.windows.ahead
        self.branch.taken = max(first, -LATEST), last

    def keyed(self, frame: DataFrame) -> DataFrame:
        """A batch's rows with their tiles, as its grouping takes them."""
        if self._record is None or self.branch.taken is None:
            raise AssertionError("a batch has begun")
        read = dict.fromkeys([*(key.name for key in self.job.keys), *self.job.columns])
        return with_tiles(frame, self.windows, list(read), self.near, record=self._record, taken=self.branch.taken)

    def attempt(self, sent: SentRows, record: LedgerRecord, attempt: Attempt) -> AttemptResult:
        """See `StateDriver.attempt`; then the new watermark, which an operator's attempt does not move."""
        result = super().attempt(sent, record, attempt)
        if attempt.batch_id >= 0:
            result.window_commit = self.window_commit(record, window_reports(result.reports))
        return result

    def window_commit(self, record: LedgerRecord, found: Sequence[WindowReport]) -> WindowCommit:
        """See `TimedState.window_commit`; then the times of rows that count, and the latest one."""
        newest = [report.newest for report in found if report.newest is not None]
        beyond = [report.beyond for report in found if report.beyond is not None]
        if beyond:
            _log.warning(
                "state %s: rows with times up to %s are set aside: that is more than ahead= beyond the driver's clock, "
                "%s. lateStream() has them. If the clock is slow, set it right: a row that is set aside never counts.",
                *(self.spec.state, *(time_text(time, "timestamp") for time in (max(beyond), self.near))),
            )
        last = (record.last_windows() or WindowCommit()).newest
        return msgspec.structs.replace(
            super().window_commit(record, found),
            taken=self.branch.taken,
            newest=max(newest if last is None else [*newest, last], default=None),
        )
