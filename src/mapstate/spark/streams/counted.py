"""Windows of a stream by number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator, NativeCombiner
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.counted import CountWindows
from mapstate.aggregators.results import check_joined
from mapstate.errors import UsageError, check_unique
from mapstate.schema import Field
from mapstate.spark.driver.apply import Grouping
from mapstate.spark.driver.job import Branch, Downstream, Follower, Job
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.interfaces import ensure_picklable
from mapstate.spark.steps.columns import column_names, empty_frame
from mapstate.spark.streams.grouped import InWindows, check_of_windows
from mapstate.spark.streams.persistent_aggregate import NewValuesStream, PersistentAggregate
from mapstate.spec import StateSpec
from mapstate.windows import CountWindow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WINDOWS = "windows"
"""The state's only field."""
EDGES = ("window_start", "window_end")


@dataclass(frozen=True)
class CountedStream(InWindows["CountedAggregate"]):
    """The rows of a stream by windows of so many rows. See `Stream.window`."""

    config: CountWindow
    order: tuple[str, ...] = ()

    def adapted(
        self, state: StateSpec, aggregates: Mapping[str, Aggregator], *, by: Sequence[str]
    ) -> Mapping[str, Aggregator]:
        check_of_windows(state, {*EDGES, WINDOWS}, [*by, *aggregates])
        check_unique([*by, *aggregates])
        length, slide = self.config.length, self.config.slide
        types = {field.name: field.dataType.simpleString() for field in self.schema.fields}
        read = dict.fromkeys(column_names(self.schema, self.order, "orderBy"))
        if length > slide:
            check_joined(aggregates, "a sliding window")
        for name, aggregator in aggregates.items():
            ensure_picklable(f"the aggregator {name}={aggregator}", aggregator)
            read |= dict.fromkeys(aggregator.columns() or ([] if isinstance(aggregator, NativeCombiner) else types))
        fields = [Field(name, aggregator.describe(), aggregator.bind(types)) for name, aggregator in aggregates.items()]
        return {WINDOWS: CountWindows(length, slide, fields, aggregates, [*read] or [*by][:1] or [*types][:1])}

    def keep(self, job: Job) -> CountedAggregate:
        query, branch = self.stream.branch_of(replace(job, order=self.order))
        if self.order:
            branch.make_driver = OrderedState
        return CountedAggregate(query, branch, empty_frame(self.stream.df, self.schema))


class CountedAggregate(PersistentAggregate):
    """The windows by count that a stream keeps. See `PersistentAggregate`.

    A reader's ``get(key)`` is ``{"windows": {"rows": ..., "fired": [...], "open": [...]}}``: the number of the key's
    rows, the windows that its last batch has ended, and those that later rows go into.
    """

    def firedWindowsStream(self) -> NewValuesStream:
        """The windows that each batch has ended: ``window_start``, ``window_end``, the keys, and the aggregates.

        ``window_start`` and ``window_end`` number the key's rows from 0: ``[window_start, window_end)``. A window ends
        at each multiple of the slide; the first ones hold fewer rows than the length, and start at 0.

        A function is called at least once per batch, also where no window has ended: again, with the same windows,
        after a crash that came before Spark's own commit. A state that follows gets each window exactly once.
        """
        stream, query, branch = super().newValuesStream(), self.query, self.branch

        def feed(function: Downstream | Follower) -> None:
            # A state that follows has to get all windows or stop, as one that gets old values.
            if isinstance(function, Follower) and function.branch is not None:
                function = replace(function, retracts=True)
            query.add_downstream(branch, function)

        step = _Fired(tuple(key.name for key in self.job.keys))
        return replace(stream, feed=feed, updates=None, kind="events", steps=(step,))

    def newValuesStream(self, *, old: bool = False) -> NewValuesStream:  # noqa: ARG002
        """Raises UsageError: windows by count have no new values, see `firedWindowsStream`."""
        raise UsageError("the rows of windows by count are the windows that have ended: take firedWindowsStream()")


@dataclass(frozen=True)
class _Fired:
    """A step from new values to the windows in them, a row each."""

    keys: tuple[str, ...]

    def __call__(self, frame: DataFrame, _: int | None) -> DataFrame:
        from pyspark.sql import functions as F

        rows = frame.select(*map(column_of, self.keys), F.inline(f"{WINDOWS}.fired"))
        others: list[Any] = [name for name in rows.columns if name not in (*self.keys, *EDGES)]
        return rows.select(*map(column_of, [*EDGES, *self.keys, *others]))


class OrderedGrouping(Grouping):
    """Sorts the raw rows of each key by some of their columns. ``order`` are places of columns."""

    def __init__(self, *settings: Any, order: Sequence[int]) -> None:
        from pyspark.sql import functions as F

        super().__init__(*settings)
        self._order = [F.col(f"value{at}") for at in order]

    def of(self, batch_df: DataFrame) -> DataFrame:
        return super().of(batch_df).sortWithinPartitions(*self.places, *self._order)


class OrderedState(StateDriver):
    """A state whose job has an ``order``."""

    def __init__(self, branch: Branch) -> None:
        super().__init__(branch)
        columns = list(branch.job.columns)
        self.make_grouping = partial(OrderedGrouping, order=[columns.index(name) for name in branch.job.order])
