"""Windows of a stream by time, what is kept of them, and the windows that have fired.

recent = clicks.window(SlidingDurationWindow.of("10 minutes", "1 minute"), timestampField="at", lag="30 seconds")
counts = recent.groupBy("user").persistentAggregate(opaque(url, "recent_clicks"), clicks=Count())
counts.firedWindowsStream().foreachBatch(alert)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.extremes import Max, Min
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.results import check_joined
from mapstate.errors import ConfigurationError, UnknownColumnError, UnsupportedTypeError, UsageError
from mapstate.protocol.sessions import FIRST, LAST
from mapstate.protocol.windows import WindowDefinition
from mapstate.schema import KeyField
from mapstate.spark.driver.job import Downstream, Follower, Job, Windows
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.driver.window_rows import TILE, LateRows
from mapstate.spark.driver.windows import WINDOW_END, WINDOW_START, WindowedState, fired_type
from mapstate.spark.steps.columns import empty_frame
from mapstate.spark.streams.grouped import InWindows, Windowable, check_of_windows
from mapstate.spark.streams.persistent_aggregate import NewValuesStream, PersistentAggregate
from mapstate.spec import StateSpec
from mapstate.windows import Duration, DurationWindow, RollingWindows, SessionWindow, span_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


PANE_START = "pane_start"


class WindowOptions(TypedDict, total=False):
    """The options of windows by time, by keyword.

    A duration is text as Spark writes it, a timedelta, or, for times that are a ``bigint``, a number of their units.
    """

    timestampField: str | None
    """The column with a row's time: a ``timestamp``, or a ``bigint`` in units of its own; None: the driver's clock."""
    lag: Duration
    """How far behind the latest row a row may be; more than Spark's ``delayThreshold`` if a job had one."""
    startTime: Duration
    """Where windows start, counted from 1970 in UTC: ``"15 minutes"`` past each hour."""
    retention: Duration | None
    """How far the watermark passes a window's end before the window is removed; None: its length. Of rolling windows:
    how far before the watermark an end may be that is asked for; None: 0.
    """
    inputs: Mapping[str, Sequence[str]] | None
    """The column that names a row's input, and its values: ``{"source": ["web", "app"]}``; None: one input."""
    idle: Duration | None
    """An input without rows for longer is taken to go on by the clock; None: never."""
    ahead: Duration | None
    """How far beyond the driver's clock, or of a ``bigint`` beyond the row before it, a time may be that moves the
    watermark; None: 1 minute, or of a ``bigint`` as far as it likes.
    """


def windows_of(
    schema: StructType,
    config: DurationWindow | SessionWindow | RollingWindows,
    *,
    timestampField: str | None = None,
    lag: Duration = 0,
    startTime: Duration = 0,
    retention: Duration | None = None,
    idle: Duration | None = None,
    inputs: Mapping[str, Sequence[str]] | None = None,
    ahead: Duration | None = None,
) -> Windows:
    """Check a window and `WindowOptions` against a schema. Raises ConfigurationError."""
    is_session = isinstance(config, SessionWindow)
    if not isinstance(config, DurationWindow | SessionWindow | RollingWindows):
        raise ConfigurationError(f"a window is such as TumblingDurationWindow.of('1 hour'), not {config!r}")
    kind = _time_type(schema, timestampField)
    if isinstance(config, SessionWindow) and (timestampField is None or startTime):
        raise ConfigurationError(
            "sessions go by the times of rows, and begin with a row: name the column that has the times, "
            "timestampField='at', and leave out startTime"
        )
    if timestampField is None and (lag or idle is not None or inputs is not None):
        raise ConfigurationError(
            "lag, idle and inputs are about the times of rows: name the column that has them, timestampField='at'"
        )
    if isinstance(config, RollingWindows) and timestampField is None:
        raise ConfigurationError(
            "rolling windows go by the times of rows, not by the clock: name the column that has them, "
            "timestampField='at'"
        )
    if kind == "bigint" and idle is not None:
        raise ConfigurationError(
            f"idle compares with the clock, and {timestampField!r} is a bigint of its own units: leave it out"
        )
    if kind != "bigint" and ahead is None:
        ahead = "1 minute"
    source, names = _inputs(schema, inputs)
    if isinstance(config, RollingWindows):
        return Windows(
            definition=config.definition(kind, startTime=startTime, lag=lag, retention=retention or 0, idle=idle),
            column=TILE,
            type=kind,
            time=timestampField,
            source=source,
            inputs=names,
            ahead=None if ahead is None else span_of(ahead, kind, "ahead"),
        )
    panes = config.panes(kind, startTime)
    definition = WindowDefinition(
        length=panes.length,
        slide=panes.slide,
        offset=panes.offset,
        by_clock=timestampField is None,
        sessions=is_session,
        lag=span_of(lag, kind, "lag"),
        retention=panes.length if retention is None else span_of(retention, kind, "retention"),
        idle=None if idle is None else span_of(idle, kind, "idle"),
    )
    return Windows(
        definition=definition,
        column=PANE_START if definition.has_parts else WINDOW_START,
        type=kind,
        time=timestampField,
        source=source,
        inputs=names,
        ahead=None if ahead is None else span_of(ahead, kind, "ahead"),
    )


def _time_type(schema: StructType, column: str | None) -> str:
    if column is None:
        return "timestamp"
    if not isinstance(column, str):
        raise ConfigurationError(f"timestampField is the name of a column, such as 'at', not {column!r}")
    if column not in schema.names:
        raise UnknownColumnError(
            f"the stream has no column {column!r} for the time of its rows; it has {', '.join(schema.names)}",
            column=column,
        )
    kind: str = schema[column].dataType.simpleString()
    if kind not in ("timestamp", "bigint"):
        raise UnsupportedTypeError(
            f"the time of a row is a timestamp or a bigint, and {column!r} is a {kind}: convert it with transform, "
            f"such as rows.withColumn({column!r}, F.to_timestamp({column!r}))",
            column=column,
            type=kind,
        )
    return kind


def _inputs(schema: StructType, inputs: Mapping[str, Sequence[str]] | None) -> tuple[str | None, tuple[str, ...]]:
    if inputs is None:
        return None, ("",)
    given: object = inputs
    if not isinstance(given, Mapping) or len(inputs) != 1:
        raise ConfigurationError("inputs names one column and its values: inputs={'source': ['web', 'app']}")
    ((column, values),) = inputs.items()
    if column not in schema.names or schema[column].dataType.simpleString() != "string":
        raise UnknownColumnError(
            f"inputs names {column!r}, which is no column of text; the stream has {', '.join(schema.names)}",
            column=column,
        )
    names = tuple(values)
    are_texts = all(isinstance(name, str) for name in names) and not isinstance(values, str)
    if not names or len(set(names)) < len(names) or not are_texts:
        raise ConfigurationError(f"the values of inputs are texts, each another one, at least one, not {values!r}")
    return column, names


def with_ticks(df: DataFrame) -> DataFrame:
    """The stream with one more source, which never has a row: Spark then makes a batch at each trigger.

    Raises ConfigurationError for a DataFrame that is no stream.
    """
    from pyspark.sql import functions as F

    if not df.isStreaming:
        raise ConfigurationError("ticks are of a stream: this DataFrame is none")
    none = df.sparkSession.readStream.format("rate").load().where("value < 0")
    return df.union(none.select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in df.schema.fields)))


@dataclass(frozen=True)
class WindowedStream(InWindows["WindowedAggregate"]):
    """The rows of a stream by window. See `Stream.window`."""

    windows: Windows

    def adapted(
        self, state: StateSpec, aggregates: Mapping[str, Aggregator], *, by: Sequence[str]
    ) -> Mapping[str, Aggregator]:
        is_session = self.windows.by_pane.sessions
        taken = {WINDOW_START, WINDOW_END, self.windows.column} | ({FIRST, LAST} if is_session else set())
        check_of_windows(state, taken, [*by, *aggregates, *self.schema.names])
        if state.blocks is not None and is_session:
            raise ConfigurationError("a state with sessions has no blocks: leave blocks out. See docs/blocks.md")
        if state.ttl is not None:
            raise ConfigurationError(
                "windows are kept without a ttl, which is by the wall clock: a job that was down for a while would "
                "find open windows without their keys. retention= says how long a window stays after it has fired"
            )
        if self.windows.by_pane.has_parts:
            check_joined(aggregates, "a session" if is_session else "a sliding window")
        times: dict[str, Aggregator] = {}
        if is_session and self.windows.time is not None:
            times = {FIRST: Min(self.windows.time), LAST: Max(self.windows.time)}
        return dict(aggregates) | times

    def keep(self, job: Job) -> WindowedAggregate:
        from pyspark.sql.types import StructField, StructType

        windows = self.windows
        read = {name: self.schema[name].dataType.simpleString() for name in (windows.time, windows.source) if name}
        keyed = replace(
            job,
            keys=(KeyField(windows.column, windows.type), *job.keys),
            columns=dict(job.columns) | read,
            windows=windows,
        )
        query, branch = self.stream.branch_of(keyed)
        branch.make_driver = WindowedState
        if windows.by_pane.sessions:
            from mapstate.spark.driver.sessions import SessionState

            branch.make_driver = SessionState
        elif job.spec.blocks is not None:
            from mapstate.spark.driver.blocks import PaneBlockState

            branch.make_driver = PaneBlockState
        inside = StructType([*self.schema.fields, StructField(windows.column, calls().from_ddl(windows.type))])
        return WindowedAggregate(query, branch, empty_frame(self.stream.df, inside), stream=self.stream)


class WindowedAggregate(PersistentAggregate):
    """The windows that a stream keeps. See `PersistentAggregate`."""

    def __init__(self, *args: Any, stream: Windowable) -> None:
        super().__init__(*args)
        self._stream = stream

    @property
    def windows(self) -> Windows:
        """What the windows are."""
        if self.job.windows is None:
            raise AssertionError("a WindowedAggregate has windows")
        return self.job.windows

    def firedWindowsStream(self) -> NewValuesStream:
        """The windows that each batch has fired: ``window_start``, ``window_end``, the keys, and the aggregates.

        A fired window never changes again, unless its batch is rolled back. A function gets each at least once: again,
        with the same rows, after a crash before Spark's own commit. It is called for batches that have fired windows;
        of sessions, also for some that have fired none. A state that follows gets each exactly once. The function runs
        on the driver; executors read the windows when it uses the rows.
        """
        query, branch, job = self.query, self.branch, self.job

        def feed(function: Downstream | Follower) -> None:
            query.add_downstream(branch, function, fired=True)

        frame = empty_frame(self._stream.df, fired_type(job, Fields(job.fields, job.aggregators)))
        return NewValuesStream(job.stream, self, frame, feed, kind="events", state=self)

    def lateStream(self) -> Any:
        """The rows that came too late for their windows, or had no time, as they came to the windows.

        In a topology, a state on it counts jointly with the windows: rows in windows, between windows and late are all
        rows. A function on it runs at least once per batch, after the commit.
        """
        if self.windows.time is None:
            raise UsageError("no row is late for windows by the clock")
        return self._stream.late(LateRows(self.windows, self.branch), self.query)

    def newValuesStream(self, *, old: bool = False) -> NewValuesStream:
        """The windows that each batch touched, as they stand. See `PersistentAggregate.newValuesStream`.

        Of tumbling windows only. Raises UsageError for sliding ones and sessions, whose panes are no windows.
        """
        if self.windows.by_pane.has_parts:
            raise UsageError(
                "a batch touches panes, which are parts of sliding windows and of sessions, so it has no new "
                "values of windows: take firedWindowsStream(), or tumbling windows"
            )
        return super().newValuesStream(old=old)
