"""What can be done with the rows of each micro-batch, in Trident's words: each call gives rows with one more step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from mapstate.errors import ConfigurationError
from mapstate.reader import Consistency
from mapstate.spark.interfaces import BatchAggregator, QueryFunction
from mapstate.spark.steps.batch_aggregate import broadcast, extreme, spread
from mapstate.spark.steps.state_query import Queried, QueryPlan, When
from mapstate.spark.streams.grouped import ChainedAggregate, GroupedStream, Keepable, Kept, grouped
from mapstate.spark.streams.query import Startable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from mapstate.aggregators.aggregator import Aggregator


@dataclass(frozen=True)
class Transform:
    """A user's own function of a batch as a step. Two of equal functions are equal, and are computed once."""

    function: Callable[[DataFrame], DataFrame]

    def __call__(self, frame: DataFrame, _: int | None) -> DataFrame:
        return self.function(frame)


class Rows(Keepable[Kept]):
    """Rows of a stream, a batch at a time.

    ``name`` is the stream's, also of new values: it owns what is called by hand. ``schema`` is what the rows look like
    after all steps: they are planned once over an empty frame, when the next step is asked for.
    """

    name: str

    @abstractmethod
    def foreachBatch(self, function: Callable[[DataFrame, int], None]) -> Startable:
        """Calls ``function(rows, batch_id)`` for each batch, on the driver; returns what is to be started."""

    def transform(self, function: Callable[[DataFrame], DataFrame]) -> Self:
        """Rows changed by DataFrame calls: where Trident has each, map, flatMap, filter, project.

        ``function`` gets each micro-batch, no stream, and returns a frame of always the same columns. It is also
        called once over an empty frame, to learn them.
        """
        return self.with_step(Transform(function), by_row=True)

    def groupBy(self, *columns: str | Column | list[str | Column]) -> GroupedStream[Kept, Self]:
        """One aggregate per combination of values of ``columns``. For one aggregate of all, leave it out.

        An expression becomes a key column with its alias, or with Spark's name for it. A struct becomes a key column
        per field: ``F.window("at", "1 hour")`` becomes ``window_start`` and ``window_end``. A batch with a row whose
        struct is null fails with a KeyEncodingError.

        Raises ConfigurationError for no columns, UnknownColumnError, UnsupportedTypeError, DuplicateNameError.
        """
        return grouped(self, columns, "for one aggregate of all rows call persistentAggregate on the stream itself")

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

        ``state``        what `persistentAggregate` returned, what `newStaticState` returned, or a spec with a name
        ``keys``         the columns that make up the key, in the order of the state's key columns
        ``fields``       which of the state's fields: names, or ``{field: column}``; all by default. For a query
                         function of your own the columns that it emits, as DDL: "followers bigint"
        ``query``        `MapGet` by default, `SnapshotGet` where there are no keys; or your own
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
        if when not in (None, "before", "after"):
            raise ConfigurationError(f"when is 'before' or 'after', not {when!r}")
        if when is not None and consistency == "latest":
            raise ConfigurationError("a query for the latest is of no batch: leave out consistency='latest', or when")
        plan = QueryPlan.of(self.schema, state, keys, fields=fields, query=query, consistency=consistency)
        if when == "before" and plan.type not in (None, "opaque"):
            raise ConfigurationError(
                f"a {plan.type} state keeps no value before the current one, so it cannot be read as it was before a "
                "batch"
            )
        rows = self._after_commit(state) if when == "after" else self
        before = when == "before" or (when is None and consistency == "committed" and self._is_before_commit)
        return rows.with_step(plan.step(self.name, before=before), by_row=False)

    @property
    def _is_before_commit(self) -> bool:
        """Whether these rows come in front of the commit of their batch."""
        return False

    def _after_commit(self, state: Queried) -> Rows[Kept]:  # noqa: ARG002
        """The rows after the commit of a state that follows the same stream; new values are after it already."""
        return self

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

    def chainedAgg(self) -> ChainedAggregate[Self]:
        """Several aggregates over the same rows, until ``chainEnd()``."""
        return ChainedAggregate(self)

    def minBy(self, column: str) -> Self:
        """The row of each batch with the least value of a column; none where all are null, or there are no rows.

        Of several, the one whose other columns come first.
        """
        return self.with_step(extreme(self.schema, column, greatest=False), by_row=False)

    def maxBy(self, column: str) -> Self:
        """The row of each batch with the greatest value of a column. See `minBy`."""
        return self.with_step(extreme(self.schema, column, greatest=True), by_row=False)

    def applyAssembly(self, assembly: Callable[[Rows[Kept]], Any]) -> Any:
        """What a function makes of these rows, such as `mapstate.trident.FirstN`."""
        return assembly(self)

    def shuffle(self, partitions: int | None = None) -> Self:
        """Rows spread evenly; over as many partitions as Spark's shuffles have, by default."""
        return self.with_step(spread(self.schema, partitions), by_row=True)

    def partitionBy(self, *columns: str, partitions: int | None = None) -> Self:
        """Rows spread by the hash of some columns: those that are equal there meet in one partition."""
        return self.with_step(spread(self.schema, partitions, columns), by_row=True)

    def broadcast(self, partitions: int | None = None) -> Self:
        """Every row in every partition. The rows of a batch have to fit into memory."""
        return self.with_step(broadcast(partitions), by_row=False)
