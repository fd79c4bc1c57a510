"""A state whose rows have times, batch by batch: the driver's clock, the latest time of each input, and the watermark.

The rules are those of `mapstate.protocol.windows`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from mapstate.batch_report import BatchReport
from mapstate.errors import ConfigurationError
from mapstate.protocol.ledger_record import AlreadyCommitted, Commit, LedgerRecord
from mapstate.protocol.windows import NEVER, Input, WindowCommit, latest_without_hole, watermark
from mapstate.schema import span_text
from mapstate.spark.driver.apply import AttemptResult, Grouping
from mapstate.spark.driver.job import Branch, Windows
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.driver.window_rows import beside_of
from mapstate.spark.executor.task import TaskReport
from mapstate.spark.executor.window_task import WindowReport

_log = logging.getLogger("mapstate")

_DRIFT = 60_000_000  # microseconds by which a clock may be set right, or that of another driver may differ
_MOST_PAUSE = 7 * 86_400_000_000  # microseconds for which a job may be down before its clock is doubted
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)  # it goes on while the machine sleeps


class TimedGrouping(Grouping):
    """A grouping with columns beside the partials, see `mapstate.spark.driver.window_rows.BESIDE`."""

    def __init__(self, *settings: Any, windows: Windows) -> None:
        from pyspark.sql import functions as F

        super().__init__(*settings)
        beside = beside_of(windows)
        if self.partials is None:
            self.values += [F.col(name) for name in beside]
            return
        # The number of rows stays last.
        self.values[-1:-1] = [(F.sum if is_sum else F.max)(name).alias(name) for name, is_sum in beside.items()]


class TimedState(StateDriver):
    """A state whose rows have times.

    ``near`` is the latest time, by the driver's clock, that moves the watermark; unused where times are a ``bigint``.
    """

    def __init__(self, branch: Branch) -> None:
        super().__init__(branch)
        if branch.job.windows is None:
            raise AssertionError("a TimedState has windows")
        self.windows: Windows = branch.job.windows
        self._hole = self.windows.hole
        self.near = self._now = self._ticks = self._jump = self._pause = 0
        self._opened_at: int | None = None
        self.make_grouping = partial(TimedGrouping, windows=self.windows)

    def open(self) -> Any:
        self._ticks = 0
        return super().open()

    def set_batch(self, record: LedgerRecord, done: AlreadyCommitted | None = None) -> None:
        """See `StateDriver.set_batch`. Raises ConfigurationError for a clock that is wrong."""
        if done is None:
            self._read_clock(record)

    def least(self, record: LedgerRecord) -> int:
        """The watermark of each later batch, at least, by an operator's word."""
        kept = record.windows or record.rolling
        return NEVER if kept is None else kept.least

    def make_report(self, commit: Commit, number: int, result: AttemptResult | None) -> BatchReport:
        report = super().make_report(commit, number, result)
        return report if commit.windows is None else msgspec.structs.replace(report, **commit.windows.reported())

    def window_commit(self, record: LedgerRecord, found: Sequence[WindowReport]) -> WindowCommit:
        """What the commit says of times: the watermark, the inputs, and the rows that count in no window."""
        last, definition = record.last_windows() or WindowCommit(), self.windows.definition
        if definition.by_clock:
            inputs = {name: Input(max(self._now, last.watermark), self._now) for name in self.windows.inputs}
        else:
            inputs = self._inputs(record, found)
        mark = watermark(last.watermark, inputs, definition.behind, self._now, idle=definition.idle)
        return WindowCommit(
            watermark=max(mark, self.least(record)),
            before=last.watermark,
            inputs=inputs,
            late=sum(report.late for report in found),
            between=sum(report.between for report in found),
            clock=self._now,
            jump=self._jump,
        )

    def _inputs(self, record: LedgerRecord, reports: Sequence[WindowReport]) -> dict[str, Input]:
        """What is known of each input after the batch."""
        last, names = record.last_windows() or WindowCommit(), self.windows.inputs
        known = {name: last.inputs.get(name, Input()) for name in names}
        times = [[stretch for report in reports for stretch in report.latest[i]] for i in range(len(names))]
        mark = max(last.watermark, self.least(record))
        marked = mark if mark == NEVER else mark + self.windows.definition.behind
        before = max(marked, *(clock.latest for clock in known.values()))
        limit = latest_without_hole(itertools.chain(*times), before, self._hole)
        beyond = [end for seen in times for _, end, _ in seen if end > limit]
        if beyond:
            _log.warning(
                "state %s: times up to %d move no watermark, because no row is within ahead= of the latest one, %d. If "
                "they are right, say so by mapstate advance --to.",
                *(self.spec.state, max(beyond), limit),
            )
        after = {}
        for i, (name, clock) in enumerate(known.items()):
            latest = max((end for _, end, _ in times[i] if end <= limit), default=None)
            paused = Input(clock.latest, clock.at and clock.at + self._pause)  # in which the clock may have jumped
            after[name] = paused.noted(latest, self._now, has_rows=any(report.has_rows[i] for report in reports))
        return after

    def _read_clock(self, record: LedgerRecord) -> None:
        """Reads the driver's clock. Windows follow no jump of it: docs/windows.md#a-clock-or-a-row-that-is-wrong.

        Within a run time goes on by the ticks of the machine. Before its first commit only a clock is doubted that is
        behind the last batch, or a week beyond it. Raises ConfigurationError then for windows by the clock.
        """
        windows, last = self.windows.definition, record.last_windows() or WindowCommit()
        wall, ticks = time.time_ns() // 1000, _ticks()
        self._opened_at = self._opened_at if self._ticks else record.last_txid
        expected, most = self._now + ticks - self._ticks, _DRIFT
        is_first = record.last_txid == self._opened_at
        if is_first:
            known = last.clock or max((seen.at for seen in last.inputs.values()), default=0)
            known = max(known, self.least(record)) if windows.by_clock else known
            expected = known if known and (windows.by_clock or windows.idle is not None) else wall
            most = _MOST_PAUSE
        jump = 0 if -_DRIFT <= wall - expected <= most else wall - expected
        text = (
            f"state {self.spec.state!r}: the driver's clock is {span_text(jump, 'timestamp')} beyond where it should "
            "be since the last batch. Set it right and start the query again. If it is right, mapstate advance says "
            f"so: --to the present time{', or --back-to' * (record.rolling is None)}."
        )
        if jump and is_first and windows.by_clock:
            raise ConfigurationError(f"{text} Nothing was written.")
        if jump and abs(jump - self._jump) > _DRIFT:
            _log.warning("%s Windows do not follow it.", text)
        self._now, self._ticks, self._jump = expected if jump and not is_first else wall, ticks, jump
        self._pause = jump if is_first else 0
        self.near = self._now if windows.by_clock else max(self._now, wall)


def window_reports(reports: Sequence[TaskReport]) -> list[WindowReport]:
    """What the tasks say of times."""
    return [msgspec.convert(report.windows, WindowReport) for report in reports if report.windows is not None]


def _ticks() -> int:
    return (time.monotonic_ns() if _BOOT is None else time.clock_gettime_ns(_BOOT)) // 1000
