"""The fluent side: from a streaming DataFrame to a state, in Trident's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from mapstate.aggregators.aggregator import Aggregator, NativeCombiner, column_type
from mapstate.errors import (
    ConfigurationError,
    DuplicateNameError,
    NotPicklableError,
    UnknownColumnError,
    UsageError,
)
from mapstate.keys import KeyCodec, KeyField
from mapstate.serializers.value_types import WireForm, wire_type
from mapstate.spark.applied import INSIDE, computed_once
from mapstate.spark.driver import BatchDriver, Downstream, Follower, Job, OnBatch
from mapstate.spark.rows import Rows, Step, empty_frame, through
from mapstate.spark.startable import Startable
from mapstate.spec import StateSpec, check_state_name
from mapstate.transitions import Field
from mapstate.values import cut

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from mapstate.spark.aggregate import BatchAggregator, ChainedAggregate
    from mapstate.spark.new_values import NewValuesStream
    from mapstate.spark.partition_persist import PartitionPersist, StateUpdater
    from mapstate.spark.state_query import StateFactory

__all__ = [
    "BatchFunction",
    "GroupedStream",
    "PersistentAggregate",
    "Stream",
    "check_travels",
    "check_unique",
    "grouped",
    "newStream",
]


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
class Stream(Rows):
    """The rows of a DataFrame. See `newStream`."""

    name: str
    df: DataFrame
    steps: tuple[Step, ...] = ()

    @property
    def schema(self) -> StructType:
        """See `Rows.schema`."""
        return through(self.steps, empty_frame(self.df), None).schema if self.steps else self.df.schema

    def _then(self, step: Step, *, by_row: bool) -> Self:  # noqa: ARG002  no row of a stream replaces another
        return replace(self, steps=(*self.steps, step))

    def merge(self, *others: Stream) -> Self:
        """The rows of several streams in one: of other DataFrames, or of this one grouped and changed in other ways.

        Columns meet by name, and have to be the same. Raises ConfigurationError where streams of different DataFrames
        have steps of their own: those work batch by batch, and there a batch is of one DataFrame.
        """
        streams: list[Stream] = [self, *others]
        if all(one.df is self.df for one in others):

            def step(frame: DataFrame, batch_id: int | None) -> DataFrame:
                return _united([through(one.steps, frame, batch_id) for one in streams])

            return replace(self, steps=(step,))
        if any(one.steps for one in streams):
            raise ConfigurationError(
                f"the streams {', '.join(one.name for one in streams)} are of different DataFrames, so they are merged "
                "before anything is done to their batches: merge them first, or change the DataFrames themselves"
            )
        return replace(self, df=_united([one.df for one in streams]))

    def toDF(self) -> DataFrame:
        """The rows of a batch DataFrame behind all steps: a request that is answered at once.

        Raises UsageError for a streaming DataFrame with steps: they take one micro-batch after the other.
        """
        if self.df.isStreaming and self.steps:
            raise UsageError(
                f"the rows of {self.name!r} come batch by batch: take them with foreachBatch or persistentAggregate"
            )
        return through(self.steps, self.df, None)

    def foreachBatch(self, function: Downstream) -> BatchFunction:
        """Calls ``function(rows, batch_id)`` for each batch, at least once; returns what is to be started."""
        return BatchFunction(self, function)

    def persistentAggregate(self, state: StateSpec, /, **aggregates: Aggregator) -> PersistentAggregate:
        """Keeps aggregates of all rows, under the key ``()``. See `GroupedStream.persistentAggregate`."""
        return GroupedStream(self, ()).persistentAggregate(state, **aggregates)

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
        `mapstate.spark.partition_persist.State`. Raises ConfigurationError.
        """
        from mapstate.spark.partition_persist import partition_persist

        return partition_persist(self, state, updater, by, partitions=partitions, chunk_size=chunk_size)

    def _inside(self) -> dict[str, str]:
        return {}

    def _aggregators(
        self,
        state: StateSpec,  # noqa: ARG002
        aggregates: Mapping[str, Aggregator],
        *,
        keyed: bool,  # noqa: ARG002
    ) -> dict[str, Aggregator]:
        return dict(aggregates)

    def _kept(self, job: Job, schema: StructType) -> PersistentAggregate:
        return PersistentAggregate(self.df, job, schema, self.steps)


def _united(frames: list[DataFrame]) -> DataFrame:
    first = frames[0]
    for other in frames[1:]:
        first = first.unionByName(other)
    return first


class BatchFunction(Startable):
    """A function of the rows of a stream. See `Stream.foreachBatch`."""

    def __init__(self, stream: Stream, function: Downstream) -> None:
        super().__init__(stream.df)
        self._stream = stream
        self._function = function

    def _apply(self, batch_df: DataFrame, batch_id: int) -> None:
        self._function(through(self._stream.steps, batch_df, batch_id), batch_id)


def grouped(rows: Any, columns: tuple[str, ...]) -> GroupedStream:
    """See `Rows.groupBy`."""
    if not columns:
        raise ConfigurationError(
            "groupBy() needs at least one column; for one aggregate of all rows call persistentAggregate on the "
            "stream itself"
        )
    return GroupedStream(rows, columns)


class GroupedStream:
    """Rows by key. See `Rows.groupBy`."""

    def __init__(self, stream: Any, columns: tuple[str, ...]) -> None:
        self._stream = stream
        self._schema = stream.schema
        self._names = self._schema.names
        self._types = {field.name: field.dataType.simpleString() for field in self._schema.fields}
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
        check_unique(columns)
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
        check_unique([key.name for key in self._keys] + list(aggregates))
        aggregates = self._stream._aggregators(state, aggregates, keyed=bool(self._keys))
        types = self._types | self._stream._inside()
        spec = state.named(self._stream.name)
        fields = tuple(Field(name, one.describe(), one.bind(types)) for name, one in aggregates.items())
        for field in fields:
            wire_type(field.type, WireForm())
        check_travels(f"the recipe of state {spec.state!r}", spec)
        for name, one in aggregates.items():
            check_travels(f"the aggregator {name}={one}", one)
        read = {key.name: key.type for key in self._keys}
        for one in aggregates.values():
            names = one.columns() or self._all_unless_native(one)
            read |= {name: column_type(types, name, one) for name in names}
        for name in read:
            same = [other for other in self._names if other.casefold() == name.casefold()]
            if len(same) > 1:
                raise DuplicateNameError(
                    f"the stream {self._stream.name!r} has columns that Spark cannot tell apart: {', '.join(same)}",
                    name=name,
                )
        job = Job(self._stream.name, spec, self._keys, fields, aggregates, read)
        kept: PersistentAggregate = self._stream._kept(job, self._schema)
        return kept

    def aggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> Any:
        """One row per key of each batch: the key columns, and what aggregators come to; nothing is kept.

        See `Rows.aggregate`. Raises ConfigurationError.
        """
        return self.chainedAgg().aggregate(*own, **aggregates).chainEnd()

    def chainedAgg(self) -> ChainedAggregate:
        """Several aggregates over the rows of each key of a batch, until ``chainEnd()``."""
        from mapstate.spark.aggregate import ChainedAggregate

        return ChainedAggregate(self._stream, tuple(key.name for key in self._keys))

    def _all_unless_native(self, one: Aggregator) -> list[str]:
        """What an aggregator reads that names no columns: nothing if Spark computes it, else all."""
        return [] if isinstance(one, NativeCombiner) else list(self._types)


class PersistentAggregate(Startable):
    """A state that follows a stream; also a plain foreachBatch function.

    In a job that exists it is one line::

        df.writeStream.foreachBatch(counts).option("checkpointLocation", path).start()

    One instance serves one query at a time. Called on the driver, once per micro-batch. ``schema`` is that of the rows
    that it aggregates.
    """

    def __init__(
        self,
        df: DataFrame,
        job: Job,
        schema: StructType,
        steps: tuple[Step, ...] = (),
        *,
        source: Callable[[Follower], Startable] | None = None,
        followed: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(df)
        self.schema = schema
        self._followed = followed
        self._job = job
        self._driver = BatchDriver(job, of_stream=source is None)
        self._steps = steps
        self._fed_by = source
        self._source = None if source is None else source(Follower(self._take, job))

    @property
    def states(self) -> tuple[Any, ...]:
        """The state and those that it follows, as (backend, name)."""
        return (*self._followed, (self._job.spec.backend, self._job.spec.state))

    @property
    def source(self) -> Startable | None:
        """The state that this one follows, with all that it feeds so far; None where it follows a stream.

        From here goes another branch: ``second.source.newValuesStream()...``
        """
        return self._source

    @property
    def _adds_rows(self) -> bool:
        """Of what a user's updater emits, the user knows what it is."""
        return self._source is None or self._source._adds_rows

    def _apply(self, batch_df: DataFrame, batch_id: int) -> None:
        """Applies one micro-batch, exactly once."""
        (self._take if self._source is None else self._source)(batch_df, batch_id)

    def _take(self, frame: DataFrame, batch_id: int, upstream_txid: int | None = None) -> None:
        """Rows of a batch, of the stream or of what this state follows."""
        if self._steps and not self._job.spec.backend.shared_between_processes:
            self._driver.open_for(frame, batch_id)
        frame, release = computed_once(frame) if self._job.after else (frame, None)
        try:
            self._driver.run(through(self._steps, frame, batch_id), batch_id, upstream_txid)
            for function in self._job.after:
                self._driver.pass_on(function, frame, batch_id)
        finally:
            if release is not None:
                release()

    @property
    def job(self) -> Job:
        """What is kept, and where."""
        return self._job

    def newValuesStream(self, *, old: bool = False) -> NewValuesStream:
        """The keys that each batch touched, with their new totals, after the batch is committed.

        With ``old``, of an opaque state, also the totals before the batch: ``visits`` and ``old_visits``. A key that
        a batch removes comes with nulls. See `NewValuesStream`.
        """
        from mapstate.spark.new_values import NewValuesStream

        return NewValuesStream.of(self, old=old)

    def with_downstream(self, function: Downstream | Follower) -> PersistentAggregate:
        """The same state with one more function that gets each batch's new values."""
        return self._with(replace(self._job, downstream=(*self._job.downstream, function)))

    def with_after(self, function: Downstream | Follower) -> PersistentAggregate:
        """The same state with one more function that gets each batch, as it came, after its commit."""
        return self._with(replace(self._job, after=(*self._job.after, function)))

    def on_batch(self, function: OnBatch) -> PersistentAggregate:
        """The same state with one more function that gets each batch's `BatchReport`.

        Called on the driver, after the commit and before what lies downstream; not for a batch that Spark
        brings again though it counts already, so at most once per batch. What it raises is logged: the
        batch is committed, and goes on.
        """
        return self._with(replace(self._job, on_batch=(*self._job.on_batch, function)))

    def _with(self, job: Job) -> PersistentAggregate:
        return PersistentAggregate(
            *(self._df, job, self.schema, self._steps), source=self._fed_by, followed=self._followed
        )

    def __repr__(self) -> str:
        job = self._job
        by = ", ".join(key.name for key in job.keys)
        shown = ", ".join(f"{field.name}={field.aggregator}" for field in job.fields)
        return f"<{job.stream} by ({by}): {shown} in {job.spec!r}>"


def check_unique(names: Sequence[str]) -> None:
    """DuplicateNameError for a name that comes twice, or that is one of mapstate's own."""
    folded = [name.casefold() for name in names]  # as Spark compares them
    for name in names:
        if folded.count(name.casefold()) > 1 or name.casefold().startswith(INSIDE):
            raise DuplicateNameError(
                f"the name {name!r} is taken: key columns, aggregates and what an updater emits each need a name of "
                f"their own, and those that begin with {INSIDE} are mapstate's",
                name=name,
            )


def check_travels(what: str, thing: Any) -> None:
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
            f"{what} cannot be sent to executors{culprit} ({type(error).__name__}: {cut(error)}). Keep settings in it, "
            "and make connections and locks where they are used."
        ) from error


def _kind(thing: Any) -> str:
    return f"class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
