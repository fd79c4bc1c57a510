"""New values as a stream of their own: what follows a state, batch by batch, after its commits.

To another state they are updates: a key's new values replace its old ones there. The old ones come from the state's
own records, also where Spark brings a batch again that is committed already, so that whatever crashed in between, the
second state gets the same rows under the same batch id; its own ledger sees to the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.net import SIGN, net_of
from mapstate.errors import ConfigurationError, DuplicateNameError
from mapstate.spark.applied import INSIDE, IS_THERE, OLD_COLUMN, WAS_THERE, new_values_type
from mapstate.spark.driver import Downstream, Follower, Job, Replacing
from mapstate.spark.plan import column_of
from mapstate.spark.rows import Rows, Step, empty_frame, through
from mapstate.spark.startable import Startable
from mapstate.spark.stream import GroupedStream, PersistentAggregate, Stream
from mapstate.spec import StateSpec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

__all__ = ["NewValuesStream"]

Kind = Literal["updates", "answers", "events"]


class NewValuesStream(Rows):
    """Rows that follow the commit of a batch: key columns and one column per aggregate. See `newValuesStream`.

    At least once per batch: again, with the same rows, after a crash that came before Spark's own commit. A
    state that follows is exact all the same.

    ``transform`` in front of a second state has to give the same for the same row, whenever it is called and whatever
    rows are beside it: the old values go through it as well, to be taken back.
    """

    def __init__(
        self,
        name: str,
        df: DataFrame,
        frame: DataFrame,
        feed: Callable[[Downstream | Follower], Startable],
        *,
        updates: _Updates | None = None,
        steps: tuple[Step, ...] = (),
        kind: Kind = "updates",
        states: tuple[Any, ...] = (),
    ) -> None:
        self.name = name
        self._df = df  # what is started in the end
        self._frame = frame  # empty, with the columns in front of the steps
        self._feed = feed
        self._updates = updates
        self._steps = steps
        self._kind = kind
        self._states = states

    @classmethod
    def of(cls, aggregate: PersistentAggregate, *, old: bool) -> NewValuesStream:
        """See `PersistentAggregate.newValuesStream`. Raises ConfigurationError."""
        job = aggregate._job
        if old and job.spec.type != "opaque":
            raise ConfigurationError(f"a {job.spec.type} state keeps no old values: take opaque(...)")
        parts = _Parts([key.name for key in job.keys], [field.name for field in job.fields])
        if old:
            parts.check_old_names()
        inside = empty_frame(aggregate._df, aggregate.schema)
        columns = new_values_type(inside, job.keys, Fields(job.fields, job.aggregators), old=True)
        shape = parts.with_old if old else parts.new

        def feed(function: Downstream | Follower) -> Startable:
            def shaped(found: DataFrame, batch_id: int, _: int | None = None) -> None:
                function(shape(found), batch_id)

            return aggregate.with_downstream(Replacing(shaped) if old else shaped)

        exact = not old and job.spec.type == "opaque" and job.spec.ttl is None
        return cls(
            job.stream,
            aggregate._df,
            shape(empty_frame(inside, columns)),
            feed,
            updates=_Updates(aggregate, parts) if exact else None,
            states=aggregate.states,
        )

    @classmethod
    def behind(cls, aggregate: PersistentAggregate, rows: Stream) -> NewValuesStream:
        """The rows of a stream, as they came, behind the commit of a state that follows the same stream."""
        frame = empty_frame(rows.df)
        return cls(
            *(rows.name, rows.df, frame, aggregate.with_after),
            steps=rows.steps,
            kind="events",
            states=aggregate.states,
        )

    @property
    def _followed(self) -> str:
        """The state whose new values these are."""
        return str(self._states[-1][1])

    @property
    def schema(self) -> StructType:
        """See `Rows.schema`."""
        return through(self._steps, self._frame, None).schema

    def _then(self, step: Step, *, by_row: bool) -> Self:
        kind = self._kind if by_row or self._kind == "events" else "answers"
        return type(self)(
            *(self.name, self._df, self._frame, self._feed),
            updates=self._updates,
            steps=(*self._steps, step),
            kind=kind,
            states=self._states,
        )

    def foreachBatch(self, function: Downstream) -> Any:
        """Calls ``function(rows, batch_id)`` after each commit; returns what is to be started.

        Called at least once per batch: again, with the same rows, after a crash that came before Spark's
        own commit. Using the DataFrame twice does not write twice.
        """
        steps = self._steps
        return self._feed(lambda frame, batch_id: function(through(steps, frame, batch_id), batch_id))

    def write(self, format: str, *, mode: str = "append", **options: Any) -> Any:  # noqa: A002  as Spark calls it
        """Writes each batch to a sink of Spark's, with a column ``batch_id`` by which repeated rows can be told.

        ``format``, ``mode`` and ``options`` as DataFrameWriter has them. Returns what is to be started. Raises
        DuplicateNameError where the rows have such a column.
        """
        from pyspark.sql import functions as F

        if "batch_id" in map(str.casefold, self.schema.names):
            raise DuplicateNameError(
                "the rows have a column 'batch_id', which write adds to tell batches apart: rename it with transform, "
                "or write them in a foreachBatch function",
                name="batch_id",
            )

        def save(rows: DataFrame, batch_id: int) -> None:
            rows.withColumn("batch_id", F.lit(batch_id)).write.format(format).mode(mode).options(**options).save()

        return self.foreachBatch(save)

    def persistentAggregate(self, state: StateSpec, /, **aggregates: Aggregator) -> PersistentAggregate:
        """Keeps aggregates of all rows that are there now, under the key ``()``.

        Of an opaque state without a ttl: a key's new values replace its old ones, so after each batch the second state
        holds what the aggregates come to over the whole first state. For `Count`, `Sum` and `Avg`. What is grouped by
        has no entry where no rows are left, if there is a ``Count()``; without one its sums become null. The
        second state has a ledger of its own, and the batch ids of the first.

        Raises ConfigurationError: also where rows come from a query or an aggregate of the batch, whose answers
        cannot be taken back.
        """
        return GroupedStream(self, ()).persistentAggregate(state, **aggregates)

    def _inside(self) -> dict[str, str]:
        """Columns that a second state gets beside those of the rows, with their types."""
        return {SIGN: "int"} if self._kind == "updates" else {}

    def _aggregators(
        self, state: StateSpec, aggregates: Mapping[str, Aggregator], *, keyed: bool
    ) -> dict[str, Aggregator]:
        """Those that can take rows back, where rows replace one another. Raises ConfigurationError."""
        if state.name is None:
            raise ConfigurationError(f"a state that follows {self.name!r} needs a name: opaque(url, name='...')")
        if (state.backend, state.name) in self._states:
            raise DuplicateNameError(
                f"the state {state.name!r} would follow itself: give it another name", name=state.name
            )
        if self._kind == "events":
            return dict(aggregates)
        if self._kind == "answers":
            raise ConfigurationError(
                f"what a query or an aggregate says of the new values of {self._followed!r} may be something else "
                "when they are replaced, so a second state could not take it back. Ask where the second state is read, "
                "or in a foreachBatch function."
            )
        if self._updates is None:
            raise ConfigurationError(
                f"the state {self._followed!r} cannot say which old values its new ones replace: it has to be opaque, "
                "without a ttl, and newValuesStream() without old"
            )
        return {name: net_of(name, one, grouped=keyed) for name, one in aggregates.items()}

    def _kept(self, job: Job, schema: StructType) -> PersistentAggregate:
        feed: Callable[[Follower], Startable] = self._feed
        steps = self._steps
        if self._updates is not None and self._kind == "updates":
            feed, steps = self._updates.through(steps), ()
        return PersistentAggregate(self._df, job, schema, steps, source=feed, followed=self._states)


class _Parts:
    """The columns of new values, and what is made of them."""

    def __init__(self, keys: list[str], fields: list[str]) -> None:
        self._keys = keys
        self._fields = fields

    def check_old_names(self) -> None:
        """Raises DuplicateNameError where an old value's column would meet another."""
        taken = {name.casefold() for name in self._keys + self._fields}
        for name in self._fields:
            if f"old_{name}".casefold() in taken:
                raise DuplicateNameError(
                    f"'old_{name}' is what the old value of {name!r} is called", name=f"old_{name}"
                )

    def new(self, found: DataFrame) -> DataFrame:
        """Keys, and the values after the batch."""
        return found.select(*map(column_of, self._keys + self._fields))

    def old(self, found: DataFrame) -> DataFrame:
        """Keys, and the values before the batch, under the same names."""
        return found.select(*map(column_of, self._keys), *self._old_columns(found, ""))

    def with_old(self, found: DataFrame) -> DataFrame:
        """Keys, the values after the batch, and those before."""
        return found.select(*map(column_of, self._keys + self._fields), *self._old_columns(found, "old_"))

    def _old_columns(self, found: DataFrame, prefix: str) -> list[Column]:
        names = [name for name in found.columns if not name.startswith(INSIDE)][len(self._keys) :]
        return [column_of(f"{OLD_COLUMN}{names.index(name)}").alias(prefix + name) for name in self._fields]


class _Updates:
    """The new values of a state with a sign: what is there now, and what is there no more."""

    def __init__(self, aggregate: PersistentAggregate, parts: _Parts) -> None:
        self._aggregate = aggregate
        self._parts = parts

    def through(self, steps: tuple[Step, ...]) -> Callable[[Follower], Startable]:
        """What feeds a second state: both sides go through the steps."""
        from pyspark.sql import functions as F

        def feed(take: Follower) -> Startable:
            def signed(found: DataFrame, batch_id: int, txid: int | None) -> None:
                new = through(steps, self._parts.new(found.where(IS_THERE)), batch_id)
                old = through(steps, self._parts.old(found.where(WAS_THERE)), batch_id)
                take(new.withColumn(SIGN, F.lit(1)).unionByName(old.withColumn(SIGN, F.lit(-1))), batch_id, txid)

            return self._aggregate.with_downstream(Replacing(signed, take.job))

        return feed
