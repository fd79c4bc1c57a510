"""Rows on their way: what can be done with each micro-batch, in Trident's words.

`Stream` and `NewValuesStream` are rows. Each call gives other rows with one more step; steps run on the driver, inside
the foreachBatch call, and mostly write a plan that the executors then follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from mapstate.errors import DuplicateNameError, UnknownColumnError
from mapstate.reader import Consistency

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from mapstate.aggregators.aggregator import Aggregator
    from mapstate.spark.aggregate import BatchAggregator, ChainedAggregate
    from mapstate.spark.startable import Startable
    from mapstate.spark.state_query import Queried, QueryFunction, When
    from mapstate.spark.stream import GroupedStream

__all__ = ["Rows", "Step", "column_names", "empty_frame", "through"]

Step = Callable[["DataFrame", int | None], "DataFrame"]
"""One micro-batch and its id, which is None outside of a query, to another frame. Driver, once per batch."""


def through(steps: Iterable[Step], frame: DataFrame, batch_id: int | None) -> DataFrame:
    """The frame behind all steps."""
    for step in steps:
        frame = step(frame, batch_id)
    return frame


def empty_frame(like: DataFrame, schema: StructType | None = None) -> DataFrame:
    """No rows, of the schema of ``like`` or of another one; no stream."""
    return like.sparkSession.createDataFrame([], like.schema if schema is None else schema)


def column_names(frame_schema: StructType, columns: Iterable[str], who: str) -> list[str]:
    """The columns, if all are there, and each once. Raises UnknownColumnError, DuplicateNameError."""
    names = list(columns)
    for name in names:
        if name not in frame_schema.names:
            raise UnknownColumnError(
                f"{who} names the column {name!r}, which the rows do not have; they have "
                f"{', '.join(frame_schema.names)}",
                column=name,
            )
        if frame_schema.names.count(name) > 1:
            raise DuplicateNameError(
                f"{who} names the column {name!r}, which the rows have more than once: give each a name of its own",
                name=name,
            )
    return names


class Rows(ABC):
    """Rows of a stream, a batch at a time.

    ``name`` is the stream's, also of new values: it owns what is called by hand. ``schema`` is what the rows look like
    behind all steps: they are planned once over an empty frame, when the next step is asked for.
    """

    name: str

    @property
    @abstractmethod
    def schema(self) -> StructType:
        """The columns of the rows."""

    @abstractmethod
    def _then(self, step: Step, *, by_row: bool) -> Self:
        """The rows behind one more step; ``by_row`` says that each row's results hang on that row alone."""

    @abstractmethod
    def foreachBatch(self, function: Callable[[DataFrame, int], None]) -> Startable:
        """Calls ``function(rows, batch_id)`` for each batch, on the driver; returns what is to be started."""

    def transform(self, function: Callable[[DataFrame], DataFrame]) -> Self:
        """Rows changed by DataFrame calls: where Trident has each, map, flatMap, filter, project.

        ``function`` gets each micro-batch, no stream, and returns a frame of always the same columns. It is also
        called once over an empty frame, to learn them.
        """
        return self._then(lambda frame, _: function(frame), by_row=True)

    def groupBy(self, *columns: str) -> GroupedStream:
        """One aggregate per combination of values of ``columns``. For one aggregate of all, leave it out.

        Raises ConfigurationError for no columns, UnknownColumnError, UnsupportedTypeError.
        """
        from mapstate.spark.stream import grouped

        return grouped(self, columns)

    def stateQuery(
        self,
        state: Queried,
        keys: Sequence[str] | str = (),
        fields: Sequence[str] | Mapping[str, str] | str | None = None,
        *,
        query: QueryFunction | None = None,
        consistency: Consistency = "committed",
        when: When | None = None,
    ) -> Any:
        """Adds to each row what a state holds for it; a key that is absent adds nulls.

        ``state``        what `persistentAggregate` returned, what `newStaticState` returned, or a recipe with a name
        ``keys``         the columns that make up the key, in the order of the state's key columns
        ``fields``       which of the state's fields: names, or ``{field: column}``; all by default. For a query
                         function of your own the columns that it emits, as DDL: "followers bigint"
        ``query``        `MapGet` by default, `SnapshotGet` where there are no keys; `TupleCollectionGet`; or your own
        ``consistency``  "committed": whole batches. "latest": whatever is there
        ``when``         of a state that this stream updates itself: as it was "before" the batch, or "after" it.
                         By default before, and on new values after

        Runs on executors: of each chunk of rows the distinct keys are read, in bulk. Each chunk is as of one batch;
        where another query writes the state meanwhile, two chunks may be of two batches.

        "before" holds also when the batch is brought again after its commit, for an opaque state. "after" takes
        the state's own stream, as it was given to it; what comes back are rows that follow the commit.

        Raises StateNotFoundError where a static state is not there, UnknownColumnError, DuplicateNameError,
        StateSchemaError where columns and key differ in type, ConfigurationError.
        """
        from mapstate.spark.state_query import asked

        return asked(self, state, keys, fields, query=query, consistency=consistency, when=when)

    def aggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> Self:
        """One row per batch: what aggregators come to over its rows, ``aggregate(n=Count())``; nothing is kept.

        Several are given out side by side, as by `chainedAgg`. Of an empty batch too: `Count` is 0, `Sum` is 0, a
        combiner of your own is its ``zero()``, a reducer its ``init()``; an aggregator that has no such value emits
        nothing, and then there is no row. A `BatchAggregator` emits what it likes. Raises ConfigurationError.
        """
        rows: Self = self.chainedAgg().aggregate(*own, **aggregates).chainEnd()
        return rows

    def partitionAggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> Self:
        """`aggregate` of each partition by itself, as Spark has spread the rows. Raises ConfigurationError."""
        rows: Self = self.chainedAgg().partitionAggregate(*own, **aggregates).chainEnd()
        return rows

    def chainedAgg(self) -> ChainedAggregate:
        """Several aggregates over the same rows, until ``chainEnd()``."""
        from mapstate.spark.aggregate import ChainedAggregate

        return ChainedAggregate(self)

    def minBy(self, column: str) -> Self:
        """The row of each batch with the least value of a column; none where all are null, or there are no rows.

        Of several, the one whose other columns come first.
        """
        from mapstate.spark.aggregate import extreme

        rows: Self = extreme(self, column, greatest=False)
        return rows

    def maxBy(self, column: str) -> Self:
        """The row of each batch with the greatest value of a column. See `minBy`."""
        from mapstate.spark.aggregate import extreme

        rows: Self = extreme(self, column, greatest=True)
        return rows

    def applyAssembly(self, assembly: Callable[[Rows], Any]) -> Any:
        """What a function makes of these rows, such as `FirstN`."""
        return assembly(self)

    def shuffle(self, partitions: int | None = None) -> Self:
        """Rows spread evenly; over as many partitions as Spark's shuffles have, by default."""
        from mapstate.spark.aggregate import spread

        rows: Self = spread(self, partitions)
        return rows

    def partitionBy(self, *columns: str, partitions: int | None = None) -> Self:
        """Rows spread by the hash of some columns: those that are equal there meet in one partition."""
        from mapstate.spark.aggregate import spread

        rows: Self = spread(self, partitions, columns)
        return rows

    def global_(self) -> Self:
        """All rows in one partition. ``global`` is a word of Python's own."""
        return self.shuffle(1)

    def batchGlobal(self) -> Self:
        """All rows of a batch in one partition: the same as `global_`, as no partition of Spark's outlives a batch."""
        return self.shuffle(1)

    def broadcast(self, partitions: int | None = None) -> Self:
        """Every row in every partition. The rows of a batch have to fit into memory."""
        from mapstate.spark.aggregate import broadcast

        rows: Self = broadcast(self, partitions)
        return rows
