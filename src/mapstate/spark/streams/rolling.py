"""Rolling windows of a stream: per key, the aggregates of the last hour, day, week, and of all time.

features = payments.window(RollingWindows.of("1 hour", "7 days", LIFETIME), timestampField="at", lag="10 minutes")
cards = features.groupBy("card").persistentAggregate(opaque(url, "cards"), payments=Count(), spend=Sum("amount"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.results import check_joined
from mapstate.errors import ConfigurationError, UsageError, check_unique
from mapstate.protocol.rolling import columns_of
from mapstate.spark.driver.job import Job, Windows
from mapstate.spark.driver.rolling import RollingState
from mapstate.spark.driver.window_rows import LateRows
from mapstate.spark.steps.columns import empty_frame
from mapstate.spark.streams.grouped import InWindows
from mapstate.spark.streams.persistent_aggregate import PersistentAggregate
from mapstate.spec import StateSpec


@dataclass(frozen=True)
class RollingStream(InWindows["RollingAggregate"]):
    """The rows of a stream by rolling windows. See `Stream.window`."""

    windows: Windows

    def adapted(
        self, state: StateSpec, aggregates: Mapping[str, Aggregator], *, by: Sequence[str]
    ) -> Mapping[str, Aggregator]:
        if state.blocks is not None:
            raise ConfigurationError("a state with rolling windows has no blocks: leave blocks out")
        if state.changes is not None:
            raise ConfigurationError(
                "rolling windows keep no change log, because what a window holds changes without a batch, as time goes "
                "on: leave out changes, and scan"
            )
        if state.type != "opaque":
            raise ConfigurationError(
                f"rolling windows are kept by opaque states only, and this one is {state.type}: a record keeps what "
                "undoes its batch. Take opaque(...)"
            )
        if state.ttl is not None:
            raise ConfigurationError(
                "rolling windows are kept without a ttl, which is by the wall clock: a job that was down for a while "
                "would find keys without their last days"
            )
        check_joined(aggregates, "a rolling window")
        check_unique([*by, *(name for name, _, _ in columns_of(list(aggregates), self.windows.rolling.windows))])
        return dict(aggregates)

    def keep(self, job: Job) -> RollingAggregate:
        windows = self.windows
        read = {name: self.schema[name].dataType.simpleString() for name in (windows.time, windows.source) if name}
        query, branch = self.stream.branch_of(replace(job, columns=dict(job.columns) | read, windows=windows))
        branch.make_driver = RollingState
        late = self.stream.late(LateRows(windows, branch), query)
        return RollingAggregate(query, branch, empty_frame(self.stream.df, self.schema), late=late)


class RollingAggregate(PersistentAggregate):
    """The rolling windows that a stream keeps. See `PersistentAggregate`, and docs/features.md for what readers get."""

    def __init__(self, *args: Any, late: Any) -> None:
        super().__init__(*args)
        self._late = late

    def lateStream(self) -> Any:
        """The rows that count in no window: without a time, more than ``ahead`` beyond the driver's clock, or too old.

        Without a lifetime a row is too old that is before all windows. In a topology, a state on it counts jointly with
        the windows. A function on it runs at least once per batch, after the commit.
        """
        return self._late

    def newValuesStream(self, *, old: bool = False) -> Never:  # noqa: ARG002
        """Not of rolling windows, whose values change as time goes on. Raises UsageError."""
        raise UsageError(
            "rolling windows have no new values: what a window holds changes without a batch, as time goes on. Read "
            "them, or keep the same rows in a state without windows beside it and follow that"
        )

    def firedWindowsStream(self) -> Never:
        """Not of rolling windows, which never end. Raises UsageError."""
        raise UsageError(
            "rolling windows do not fire: they end whenever a reader asks. Take slidingWindow(...) for windows that do"
        )
