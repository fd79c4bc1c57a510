"""The fluent side: from a streaming DataFrame to a state, in Trident's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Never, Self, Unpack, overload

from mapstate.aggregators.aggregator import Aggregator
from mapstate.backends import check_state_name
from mapstate.errors import ConfigurationError, UsageError, check_names
from mapstate.spark.driver.executors import start_workers_as_here
from mapstate.spark.driver.frames import through
from mapstate.spark.driver.job import AfterCommit, Branch, Downstream, Job, Step
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.interfaces import StateFactory, StateUpdater
from mapstate.spark.steps.columns import empty_frame
from mapstate.spark.steps.state_query import Queried
from mapstate.spark.streams.counted import CountedStream
from mapstate.spark.streams.grouped import GroupedStream
from mapstate.spark.streams.partition_persist import PartitionPersist, update_task
from mapstate.spark.streams.persistent_aggregate import NewValuesStream, PersistentAggregate, driver_of
from mapstate.spark.streams.query import OfQuery, Query, Startable
from mapstate.spark.streams.rolling import RollingStream
from mapstate.spark.streams.rows import Rows
from mapstate.spark.streams.windows import WindowedStream, WindowOptions, windows_of, with_ticks
from mapstate.spec import StateSpec
from mapstate.windows import (
    CountWindow,
    Duration,
    DurationWindow,
    RollingWindows,
    SessionWindow,
    SlidingDurationWindow,
    TumblingDurationWindow,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from mapstate.spark.driver.initial_rows import InitialRows
    from mapstate.spark.driver.window_rows import LateRows


def newStream(name: str, df: DataFrame, *, ticks: bool = False, initialRows: InitialRows | None = None) -> Stream:
    """A stream of rows to keep aggregates of.

    ``name`` is the default name of its state. ``df`` is a streaming DataFrame, or a batch one where the
    result is only used as a foreachBatch function. With ``ticks`` each trigger brings a batch, also one without rows,
    so that windows fire while the source pauses; give a trigger with an interval. ``initialRows`` are a history of
    another place, which `seed` counts in front of the stream's own rows. Raises ConfigurationError.
    """
    from pyspark.sql import DataFrame

    given: Any = name
    if isinstance(given, DataFrame):
        raise ConfigurationError("newStream takes a name first, and then the DataFrame: newStream('visits', df)")
    check_state_name(name)
    calls()  # before the next line, which Spark Connect's own DataFrame of PySpark 3.5 is no match for
    if not isinstance(df, DataFrame):
        raise ConfigurationError(f"newStream takes a DataFrame, not a {type(df).__module__}.{type(df).__name__}")
    start_workers_as_here(df)
    if initialRows is not None:
        initialRows.check(name, df)
    return Stream(name, with_ticks(df) if ticks else df, initial=initialRows)


@dataclass(frozen=True)
class Stream(Rows[PersistentAggregate], Startable):
    """The rows of a DataFrame. See `newStream`.

    ``query`` is that of a topology's stream, which all states share, and which is started here. Without one each state
    has a query of its own, to be started by itself: then `start` raises UsageError.
    ``is_late`` says that they are the late rows of windows, ``initial`` are the rows that a seed counts before them.
    """

    name: str
    df: DataFrame
    steps: tuple[Step, ...] = ()
    query: Query | None = None
    is_late: bool = False
    initial: InitialRows | None = None

    @property
    def schema(self) -> StructType:
        return through(self.steps, empty_frame(self.df), None).schema if self.steps else self.df.schema

    def with_step(self, step: Step, *, by_row: bool) -> Self:  # noqa: ARG002  no row of a stream replaces another
        """See `Rows.with_step`."""
        return replace(self, steps=(*self.steps, step))

    def merge(self, *others: Stream) -> Self:
        """The rows of several streams in one: of other DataFrames, or of this one grouped and changed in other ways.

        Columns meet by name, and have to be the same. Raises ConfigurationError where streams of different DataFrames
        have steps of their own: those work batch by batch, and there a batch is of one DataFrame.
        """
        streams: list[Stream] = [self, *others]
        if all(other.df is self.df for other in others):
            return replace(self, steps=(_Merged([stream.steps for stream in streams]),))
        if any(stream.steps for stream in streams):
            raise ConfigurationError(
                f"the streams {', '.join(stream.name for stream in streams)} are of different DataFrames, so they are "
                "merged before anything is done to their batches: merge them first, or change the DataFrames themselves"
            )
        if any(stream.initial for stream in streams):
            raise ConfigurationError(
                "streams of different DataFrames that are merged have no initialRows: unite the DataFrames, and give "
                "newStream the history of all of them"
            )
        df = _united([stream.df for stream in streams])
        if self.query is None:
            return replace(self, df=df)
        return replace(self, df=df, query=self.query.merged([stream.query for stream in others if stream.query], df))

    def toDF(self) -> DataFrame:
        """The rows of a batch DataFrame after all steps: a request that is answered at once.

        Raises UsageError for a streaming DataFrame with steps: they take one micro-batch after the other.
        """
        if self.df.isStreaming and self.steps:
            raise UsageError(
                f"the rows of {self.name!r} come batch by batch: take them with foreachBatch or persistentAggregate"
            )
        return through(self.steps, self.df, None)

    def foreachBatch(self, function: Downstream) -> Startable:
        """Call ``function(rows, batch_id)`` at least once for each batch. Returns the query to be started.

        In a topology it is called after the commit of all states, and not for a batch in quarantine.
        """
        query, steps = self._own_query(), self.steps
        query.add_after_commit(AfterCommit(lambda frame, batch_id: function(through(steps, frame, batch_id), batch_id)))
        return OfQuery(query)

    def persistentAggregate(self, state: StateSpec, /, *extra: Never, **aggregates: Aggregator) -> PersistentAggregate:
        """Keeps aggregates of all rows, under the key ``()``. See `GroupedStream.persistentAggregate`."""
        return GroupedStream(self, ()).persistentAggregate(state, *extra, **aggregates)

    def partitionPersist(
        self,
        state: StateFactory,
        updater: StateUpdater,
        by: Sequence[str] = (),
        *,
        partitions: int,
        chunk_size: int = 10_000,
    ) -> PartitionPersist:
        """Keeps rows in a state of one's own, with an updater of one's own; what it emits are the new values.

        ``by``          columns whose hash says which partition a row goes to; without any, Spark spreads rows evenly
        ``partitions``  how many there are, in each batch, also where some are empty; not to be changed while the state
                        lives, where a partition keeps what is its own
        ``chunk_size``  rows per call of the updater; fewer where they come to more than 8 MiB

        mapstate keeps no ledger here: what a batch that comes again does, the state has to decide by its txid. See
        `mapstate.spark.interfaces.State`. Raises ConfigurationError.
        """
        task = update_task(self.schema, state, updater, by, partitions=partitions, chunk_size=chunk_size)
        return PartitionPersist(self._own_query(), self.steps, task)

    def _to_start(self) -> Query:
        if self.query is None:
            raise UsageError(f"the stream {self.name!r} is of no topology: start what persistentAggregate returned")
        return self.query

    def _own_query(self) -> Query:
        if self.query is not None:
            return self.query
        query = Query(self.name, self.df)
        query.plan.initial = self.initial
        return query

    @property
    def _is_before_commit(self) -> bool:
        return True

    def _after_commit(self, state: Queried) -> NewValuesStream:
        is_own = isinstance(state, PersistentAggregate) and state.source is None and state.query.df is self.df
        if not isinstance(state, PersistentAggregate) or not is_own or self.query not in (None, state.query):
            raise ConfigurationError(
                "'after' is after the commit of a state that follows this stream: give what persistentAggregate "
                "returned on this very stream"
            )
        return state.after_commit(self.name, empty_frame(self.df), self.steps)

    def keep(self, job: Job) -> PersistentAggregate:
        query, branch = self.branch_of(job)
        return PersistentAggregate(query, branch, empty_frame(self.df, self.schema))

    def branch_of(self, job: Job) -> tuple[Query, Branch]:
        """A new state after the steps, and its query. Raises ConfigurationError."""
        if self.is_late and self.query is not None and not self.query.is_of_topology:
            raise ConfigurationError(
                "a state of late rows counts jointly with the windows, so it needs a topology: "
                "Topology('...').newStream(...), and windows and late rows of that stream"
            )
        query, branch = self._own_query(), Branch(job, self.steps, make_driver=driver_of(job.spec))
        query.add(branch)
        return query, branch

    @overload
    def window(self, config: DurationWindow | SessionWindow, **options: Unpack[WindowOptions]) -> WindowedStream: ...

    @overload
    def window(self, config: RollingWindows, **options: Unpack[WindowOptions]) -> RollingStream: ...

    @overload
    def window(self, config: CountWindow, *, orderBy: str | Sequence[str] = ()) -> CountedStream: ...

    def window(self, config: DurationWindow | SessionWindow | RollingWindows | CountWindow, **options: Any) -> Any:
        """The rows by windows of time, or of so many rows. See docs/windows.md.

        By time, ``config`` is ``TumblingDurationWindow.of("1 hour")``, ``SlidingDurationWindow.of(length, slide)`` or
        ``SessionWindow.of(gap)``, with the options of docs/windows.md. A row whose first window has fired is
        late, see `WindowedAggregate.lateStream`. Raises ConfigurationError.

        ``RollingWindows.of("1 hour", "7 days", LIFETIME)`` takes the same options. Its windows never fire: each ends
        when a reader asks. See docs/features.md.

        ``TumblingCountWindow.of(length)`` and ``SlidingCountWindow.of(length, slide)`` count a key's rows instead, and
        have one option, ``orderBy``: the columns that order the rows of one batch. Where they order them completely, a
        batch that comes again with the same rows ends the same windows. Without it the order inside a batch is any.
        Rows of an earlier batch come first.
        """
        if isinstance(config, CountWindow):
            check_names("a window by count has no option", options, ["orderBy"])
            order = options.get("orderBy", ())
            return CountedStream(self, config, (order,) if isinstance(order, str) else tuple(order))
        if isinstance(config, DurationWindow | SessionWindow | RollingWindows):
            check_names("a window by time has no option", options, WindowOptions.__annotations__)
        windows = windows_of(self.schema, config, **options)
        return RollingStream(self, windows) if isinstance(config, RollingWindows) else WindowedStream(self, windows)

    def tumblingWindow(self, length: Duration, **options: Unpack[WindowOptions]) -> WindowedStream:
        """`window` of ``TumblingDurationWindow.of(length)``, as Trident names it."""
        return self.window(TumblingDurationWindow.of(length), **options)

    def slidingWindow(self, length: Duration, slide: Duration, **options: Unpack[WindowOptions]) -> WindowedStream:
        """`window` of ``SlidingDurationWindow.of(length, slide)``, as Trident names it."""
        return self.window(SlidingDurationWindow.of(length, slide), **options)

    def rollingWindows(
        self, *windows: Duration | tuple[Duration, Duration], **options: Unpack[WindowOptions]
    ) -> RollingStream:
        """`window` of ``RollingWindows.of(*windows)``."""
        return self.window(RollingWindows.of(*windows), **options)

    def late(self, step: LateRows, query: Query) -> Self:
        """The late rows of windows of this stream. See `WindowedAggregate.lateStream`."""
        return replace(self, steps=(*self.steps, step), query=query, is_late=True)

    def __repr__(self) -> str:
        return f"<stream {self.name}>" if self.query is None else repr(self.query)


@dataclass(frozen=True, eq=False)
class _Merged:
    """The step that makes one stream of several. ``parts`` are their steps."""

    parts: Sequence[tuple[Step, ...]]

    @property
    def __name__(self) -> str:  # as an error of one of them names it
        return "merge"

    def __call__(self, frame: DataFrame, batch_id: int | None) -> DataFrame:
        return _united([through(steps, frame, batch_id) for steps in self.parts])


def _united(frames: list[DataFrame]) -> DataFrame:
    first = frames[0]
    for other in frames[1:]:
        first = first.unionByName(other)
    return first
