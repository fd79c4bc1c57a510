"""The fluent side: from a streaming DataFrame to a state, in Trident's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator, NativeCombiner, column_type
from mapstate.errors import (
    ConfigurationError,
    DuplicateNameError,
    MapStateError,
    NotPicklableError,
    UnknownColumnError,
    UsageError,
)
from mapstate.keys import KeyCodec, KeyField
from mapstate.serializers.value_types import WireForm, wire_type
from mapstate.spark.driver import BatchDriver, Downstream, Job, OnBatch
from mapstate.spark.task import REPORT_COLUMN
from mapstate.spec import StateSpec, check_state_name
from mapstate.transitions import Field

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["GroupedStream", "NewValuesStream", "PersistentAggregate", "Stream", "newStream"]


def newStream(name: str, df: DataFrame) -> Stream:
    """A stream of rows to keep aggregates of.

    ``name`` is the default name of its state. ``df`` is a streaming DataFrame, or a batch one where the
    result is only used as a foreachBatch function. Raises ConfigurationError.
    """
    check_state_name(name)
    if not hasattr(df, "_jdf"):
        raise ConfigurationError(
            f"newStream takes a DataFrame of classic PySpark, not a {type(df).__module__}.{type(df).__name__}: under "
            "Spark Connect a foreachBatch function runs apart from its query, and cannot tell which query it serves"
        )
    return Stream(name, df)


@dataclass(frozen=True)
class Stream:
    """Rows. See `newStream`."""

    name: str
    df: DataFrame

    def groupBy(self, *columns: str) -> GroupedStream:
        """One aggregate per combination of values of ``columns``. For one aggregate of all, leave it out.

        Raises ConfigurationError for no columns, UnknownColumnError, UnsupportedTypeError.
        """
        if not columns:
            raise ConfigurationError(
                "groupBy() needs at least one column; for one aggregate of all rows call persistentAggregate on the "
                "stream itself"
            )
        return GroupedStream(self, columns)

    def persistentAggregate(self, state: StateSpec, /, **aggregates: Aggregator) -> PersistentAggregate:
        """Keeps aggregates of all rows, under the key ``()``. See `GroupedStream.persistentAggregate`."""
        return GroupedStream(self, ()).persistentAggregate(state, **aggregates)


class GroupedStream:
    """Rows by key. See `Stream.groupBy`."""

    def __init__(self, stream: Stream, columns: tuple[str, ...]) -> None:
        self._stream = stream
        self._types = {field.name: field.dataType.simpleString() for field in stream.df.schema.fields}
        for column in columns:
            if not isinstance(column, str):
                raise ConfigurationError(
                    f"groupBy takes column names, not {column!r}: give an expression a name with withColumn first"
                )
            if column not in self._types:
                raise UnknownColumnError(
                    f"the stream {stream.name!r} has no column {column!r} to group by; it has {', '.join(self._types)}",
                    column=column,
                )
        _check_unique(columns)
        self._keys = tuple(KeyField(column, self._types[column]) for column in columns)
        KeyCodec(self._keys)

    def persistentAggregate(self, state: StateSpec, /, **aggregates: Aggregator) -> PersistentAggregate:
        """Keeps aggregates per key in the store that ``state`` names: ``visits=Count()``.

        What comes back is started with `PersistentAggregate.start`, or used as a foreachBatch function.
        Nothing is connected yet. Raises ConfigurationError: UnknownColumnError, UnsupportedTypeError,
        DuplicateNameError, NotPicklableError.
        """
        if not isinstance(state, StateSpec):
            raise ConfigurationError(
                f"persistentAggregate needs a recipe such as opaque(url), not a {type(state).__name__}"
            )
        if not aggregates:
            raise ConfigurationError("persistentAggregate needs at least one aggregate, such as visits=Count()")
        for name, one in aggregates.items():
            if not isinstance(one, Aggregator):
                raise ConfigurationError(
                    f"{name} is a {_kind(one)}, not an aggregator: write {name}=Count(), or an instance of a "
                    "CombinerAggregator or ReducerAggregator of your own"
                )
        _check_unique([key.name for key in self._keys] + list(aggregates))
        spec = state.named(self._stream.name)
        fields = tuple(Field(name, one.describe(), one.bind(self._types)) for name, one in aggregates.items())
        for field in fields:
            wire_type(field.type, WireForm())
        _check_travels(f"the recipe of state {spec.state!r}", spec)
        for name, one in aggregates.items():
            _check_travels(f"the aggregator {name}={one}", one)
        read = {key.name: key.type for key in self._keys}
        for one in aggregates.values():
            names = one.columns() or self._all_unless_native(one)
            read |= {name: column_type(self._types, name, one) for name in names}
        for name in read:
            same = [other for other in self._stream.df.columns if other.casefold() == name.casefold()]
            if len(same) > 1:
                raise DuplicateNameError(
                    f"the stream {self._stream.name!r} has columns that Spark cannot tell apart: {', '.join(same)}",
                    name=name,
                )
        job = Job(self._stream.name, spec, self._keys, fields, aggregates, read)
        return PersistentAggregate(self._stream.df, job)

    def _all_unless_native(self, one: Aggregator) -> list[str]:
        """What an aggregator reads that names no columns: nothing if Spark computes it, else all."""
        return [] if isinstance(one, NativeCombiner) else list(self._types)


class PersistentAggregate:
    """A state that follows a stream; also a plain foreachBatch function.

    In a job that exists it is one line::

        df.writeStream.foreachBatch(counts).option("checkpointLocation", path).start()

    One instance serves one query at a time. Called on the driver, once per micro-batch. ``last_error`` is
    the error that stopped the query: Spark's own StreamingQueryException has only its text.
    """

    def __init__(self, df: DataFrame, job: Job) -> None:
        self._df = df
        self._job = job
        self._driver = BatchDriver(job)
        self.last_error: MapStateError | None = None

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Applies one micro-batch, exactly once. What Spark calls.

        Raises LedgerError where the protocol refuses, DataError, StoreError; Spark then stops the query,
        and nothing of the batch counts.
        """
        try:
            self._driver.run(batch_df, batch_id)
        except MapStateError as error:
            self.last_error = error  # Spark passes on the text alone
            raise

    @property
    def job(self) -> Job:
        """What is kept, and where."""
        return self._job

    def newValuesStream(self) -> NewValuesStream:
        """The keys that each batch touched, with their new totals, after the batch is committed."""
        return NewValuesStream(self)

    def start(
        self,
        checkpointLocation: str | None = None,
        *,
        trigger: Mapping[str, Any] | None = None,
        queryName: str | None = None,
        outputMode: str = "append",
        options: Mapping[str, str] | None = None,
    ) -> StreamingQuery:
        """Starts the streaming query.

        ``checkpointLocation`` is where Spark keeps its progress; it belongs to the state like its
        ledger. ``trigger`` as DataStreamWriter.trigger takes it, e.g. {"processingTime": "10 seconds"}.
        Raises UsageError for a DataFrame that is no stream.
        """
        if not self._df.isStreaming:
            raise UsageError("this DataFrame is no stream: read it with spark.readStream")
        writer = self._df.writeStream.foreachBatch(self).outputMode(outputMode)
        if trigger is not None:
            writer = writer.trigger(**trigger)
        if queryName is not None:
            writer = writer.queryName(queryName)
        if checkpointLocation is not None:
            writer = writer.option("checkpointLocation", str(checkpointLocation))
        return writer.options(**(options or {})).start()

    def with_downstream(self, function: Downstream) -> PersistentAggregate:
        """The same state with one more function that gets each batch's new values."""
        return PersistentAggregate(self._df, replace(self._job, downstream=(*self._job.downstream, function)))

    def on_batch(self, function: OnBatch) -> PersistentAggregate:
        """The same state with one more function that gets each batch's `BatchReport`.

        Called on the driver, after the commit and before what lies downstream; not for a batch that Spark
        brings again though it counts already, so at most once per batch. What it raises is logged: the
        batch is committed, and goes on.
        """
        return PersistentAggregate(self._df, replace(self._job, on_batch=(*self._job.on_batch, function)))

    def __repr__(self) -> str:
        job = self._job
        by = ", ".join(key.name for key in job.keys)
        shown = ", ".join(f"{field.name}={field.aggregator}" for field in job.fields)
        return f"<{job.stream} by ({by}): {shown} in {job.spec!r}>"


class NewValuesStream:
    """New values of a state: key columns and one column per aggregate. See `newValuesStream`."""

    def __init__(self, aggregate: PersistentAggregate) -> None:
        self._aggregate = aggregate

    def foreachBatch(self, function: Downstream) -> PersistentAggregate:
        """Calls ``function(new_values, batch_id)`` after each commit; returns what is to be started.

        Called at least once per batch: again, with the same rows, after a crash that came before Spark's
        own commit. Using the DataFrame twice does not write twice.
        """
        return self._aggregate.with_downstream(function)


def _check_unique(names: list[str] | tuple[str, ...]) -> None:
    folded = [name.casefold() for name in names]  # as Spark compares them
    for name in names:
        if folded.count(name.casefold()) > 1 or name == REPORT_COLUMN:
            raise DuplicateNameError(
                f"the name {name!r} is taken: key columns and aggregates each need a name of their own",
                name=name,
            )


def _check_travels(what: str, thing: Any) -> None:
    """NotPicklableError, naming the attribute, unless ``thing`` can be sent to executors."""
    from pyspark.cloudpickle import dumps, loads

    try:
        loads(dumps(thing))  # type: ignore[no-untyped-call]
    except Exception as error:
        culprit = ""
        for name, value in getattr(thing, "__dict__", {}).items():
            try:
                dumps(value)  # type: ignore[no-untyped-call]
            except Exception:  # noqa: BLE001  pickling runs anybody's code
                culprit = f": its attribute {name!r}, a {_kind(value)}, cannot be pickled"
                break
        raise NotPicklableError(
            f"{what} cannot be sent to executors{culprit} ({type(error).__name__}: {error}). Keep settings in it, and "
            "make connections and locks where they are used."
        ) from error


def _kind(thing: Any) -> str:
    return f"class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
