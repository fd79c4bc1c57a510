"""A state that a stream keeps, and its new values as rows of their own.

To another state they are updates. The old values, which they replace there, come from the state's own records, also
where Spark brings a committed batch again: so the second state gets the same rows under the same batch id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Never, Self

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.retraction import SIGN, monotone_columns, retractable
from mapstate.errors import INSIDE, ConfigurationError, DuplicateNameError, shown
from mapstate.spark.driver.batch import BatchDriver
from mapstate.spark.driver.changes import LoggedState
from mapstate.spark.driver.frames import through
from mapstate.spark.driver.job import AfterCommit, Branch, Downstream, Follower, Job, OnBatch, Step, StreamPlan
from mapstate.spark.driver.new_values import IS_THERE, OLD_COLUMN, WAS_THERE, new_values_type
from mapstate.spark.driver.repeats import branches_of
from mapstate.spark.driver.uncounted_files import Start, starting_offsets
from mapstate.spark.steps.columns import empty_frame
from mapstate.spark.streams.grouped import GroupedStream
from mapstate.spark.streams.query import OfQuery, Query
from mapstate.spark.streams.rows import Rows
from mapstate.spec import StateSpec
from mapstate.values import html_table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from mapstate.spark.driver.state import StateDriver

Kind = Literal["updates", "answers", "events"]
Feed = Callable[[Downstream | Follower], None]
FeedSigned = Callable[[BatchDriver, Branch, tuple[Step, ...]], None]


class PersistentAggregate(OfQuery):
    """A state that a stream keeps. Also a plain foreachBatch function.

    In a job that exists it is one line::

        df.writeStream.foreachBatch(counts).option("checkpointLocation", path).start()

    Its methods change what is declared: they add to this state, until its query has begun.
    """

    def __init__(
        self, query: Query, branch: Branch, inside: DataFrame, source: PersistentAggregate | None = None
    ) -> None:
        super().__init__(query)
        self.source = source
        self.branch = branch
        self._inside = inside

    @property
    def name(self) -> str:
        """The state's name in its store, and in a `FinishedBatch`."""
        return self.job.spec.state

    @property
    def job(self) -> Job:
        """What is kept, and where."""
        return self.branch.job

    def newValuesStream(self, *, old: bool = False) -> NewValuesStream:
        """The keys that each batch touched, with their new totals, after the batch is committed in all states.

        With ``old``, of an opaque state, also the totals before the batch: ``visits`` and ``old_visits``. A key that
        a batch removes comes with nulls. See `NewValuesStream`. Raises ConfigurationError.
        """
        from pyspark.sql import functions as F

        job = self.job
        if old and job.spec.type != "opaque":
            raise ConfigurationError(f"a {job.spec.type} state keeps no old values: take opaque(...)")
        parts = _NewValueColumns([key.name for key in job.keys], [field.name for field in job.fields])
        if old:
            parts.check_old_names()
        columns = new_values_type(self._inside, job.keys, Fields(job.fields, job.aggregators), old=True)
        shape = parts.with_old if old else parts.new
        query, branch = self.query, self.branch

        def feed(function: Downstream | Follower) -> None:
            def shaped(rows: DataFrame, batch_id: int, _: int | None) -> None:
                function(shape(rows), batch_id)

            query.add_downstream(branch, Follower(shaped, retracts=old))

        def feed_signed(driver: BatchDriver, follower: Branch, steps: tuple[Step, ...]) -> None:
            def signed(rows: DataFrame, batch_id: int, txid: int | None) -> None:
                added = through(steps, parts.new(rows.where(IS_THERE)), batch_id).withColumn(SIGN, F.lit(1))
                gone = through(steps, parts.old(rows.where(WAS_THERE)), batch_id).withColumn(SIGN, F.lit(-1))
                driver.run(added.unionByName(gone), batch_id, txid)

            query.add_downstream(branch, Follower(signed, follower, retracts=True))

        is_exact = not old and job.spec.type == "opaque" and job.spec.ttl is None
        return NewValuesStream(
            job.stream,
            self,
            shape(empty_frame(self._inside, columns)),
            feed,
            updates=feed_signed if is_exact else None,
            state=self,
        )

    def after_commit(self, name: str, inside: DataFrame, steps: tuple[Step, ...]) -> NewValuesStream:
        """The rows of the state's own stream, as they came, after the commit."""
        query, branch = self.query, self.branch

        def feed(function: Downstream | Follower) -> None:
            query.add_after_commit(AfterCommit(function, branch))

        return NewValuesStream(name, self, inside, feed, steps=steps, kind="events", state=self)

    def starting_offsets(self) -> list[Start | None]:
        """Where a new checkpoint has to start in Kafka to go on where the states of this stream end. Driver.

        One entry per source, in the order of the plan; None for a source that is not Kafka. Its ``json`` is what the
        option ``startingOffsets`` takes: in each partition the later of what was counted and what is there, and -2 if
        it is new. ``lost`` is what Kafka removed uncounted, which is logged, too. See docs/kafka.md.

        Raises UsageError where no start is known to be right, and under Spark Connect; Spark's error without a broker.
        """
        return starting_offsets(self.query.df, [branch.job.spec for branch in branches_of(self.query.plan)])

    def _branch(self) -> Branch:
        return self.branch

    def on_batch(self, function: OnBatch) -> Self:
        """Call ``function`` with each batch's `BatchReport`. Returns self.

        It is called on the driver, after the commit and before what lies downstream, at most once per batch: not
        again if Spark brings a batch again that counts already. What it raises is logged. The batch is committed
        all the same, and goes on.
        """
        self.query.reopen()
        self.branch.on_batch.append(function)
        return self

    def __repr__(self) -> str:
        job = self.job
        by = ", ".join(key.name for key in job.keys)
        fields = ", ".join(f"{field.name}={field.aggregator}" for field in job.fields)
        return f"<{job.stream} by ({by}): {fields} in {job.spec!r}>"

    def _repr_html_(self) -> str:
        job = self.job
        rows = [("stream", job.stream), ("type", job.spec.type), ("store", shown(job.spec.backend)), *job.keys]
        return html_table(f"state {job.spec.name}", rows + [(field.name, field.aggregator) for field in job.fields])


@dataclass(frozen=True, eq=False)
class NewValuesStream(Rows[PersistentAggregate]):
    """Rows that follow the commit of a batch: key columns and one column per aggregate. See `newValuesStream`.

    At least once per batch: again, with the same rows, after a crash that came before Spark's own commit. A
    state that follows is exact all the same.

    ``transform`` in front of a second state has to give the same for the same row, whenever it is called and whatever
    rows are beside it: the old values go through it as well, to be taken back.
    """

    name: str
    fed_by: OfQuery  # what is started in the end
    frame: DataFrame  # empty, with the columns in front of the steps
    feed: Feed
    updates: FeedSigned | None = None  # new and old values with their signs; None where nothing tells the old ones
    steps: tuple[Step, ...] = ()
    kind: Kind = "updates"
    state: PersistentAggregate | None = None  # in front of these rows; None behind a user's own state

    @property
    def schema(self) -> StructType:
        return through(self.steps, self.frame, None).schema

    def with_step(self, step: Step, *, by_row: bool) -> Self:
        kind = self.kind if by_row or self.kind == "events" else "answers"
        return replace(self, steps=(*self.steps, step), kind=kind)

    def foreachBatch(self, function: Downstream) -> Any:
        """Call ``function(rows, batch_id)`` after each commit. Returns the state, to be started.

        It is called at least once per batch: again, with the same rows, after a crash before Spark's own commit.
        It is not called for a batch in quarantine. Using the DataFrame twice does not write twice.
        """
        steps = self.steps
        self.feed(lambda frame, batch_id: function(through(steps, frame, batch_id), batch_id))
        return self.fed_by

    def write(self, format: str, *, mode: str = "append", **options: Any) -> Any:  # noqa: A002  as Spark calls it
        """Writes each batch to a sink of Spark's, with a column ``batch_id`` by which repeated rows can be told.

        ``format``, ``mode`` and ``options`` as DataFrameWriter has them. Returns the state, to be started. Raises
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

    def persistentAggregate(self, state: StateSpec, /, *extra: Never, **aggregates: Aggregator) -> PersistentAggregate:
        """Keeps aggregates of all rows that are there now, under the key ``()``.

        Of an opaque state without a ttl: a key's new values replace its old ones, so after each batch the second state
        holds what the aggregates come to over the whole first state. For `Count`, `Sum` and `Avg`; for `Max` of a
        field that only grows (a `Count` or `Max`) and `Min` of a `Min`, if grouped by key columns of the first state
        alone, without a transform. What is grouped by has no entry where no rows are left, if there is a ``Count()``;
        without one its sums become null. The second state has a ledger of its own, and the batch ids of the first.

        Raises ConfigurationError: also where rows come from a query or an aggregate of the batch, whose answers
        cannot be taken back.
        """
        return GroupedStream(self, ()).persistentAggregate(state, *extra, **aggregates)

    def hidden_columns(self) -> dict[str, str]:
        return {SIGN: "int"} if self.kind == "updates" else {}

    def adapted(
        self, state: StateSpec, aggregates: Mapping[str, Aggregator], *, by: Sequence[str]
    ) -> Mapping[str, Aggregator]:
        """Those that can take rows back, where rows replace one another. Raises ConfigurationError."""
        if state.name is None:
            raise ConfigurationError(f"a state that follows {self.name!r} needs a name: opaque(url, name='...')")
        upstream = self.state
        while upstream is not None:
            if (upstream.job.spec.backend, upstream.name) == (state.backend, state.name):
                raise DuplicateNameError(
                    f"the state {state.name!r} would follow itself: give it another name", name=state.name
                )
            upstream = upstream.source
        source = self.fed_by.query
        specs = (known.job.spec for query in (source, *source.siblings.values()) for known in branches_of(query.plan))
        if any(spec.state == state.name and (source.is_of_topology or spec.backend == state.backend) for spec in specs):
            raise DuplicateNameError(
                f"there is a state {state.name!r} already: give the one that follows {self.name!r} another name",
                name=state.name,
            )
        if self.kind == "events":
            return dict(aggregates)
        followed = None if self.state is None else self.state.name
        if self.kind == "answers":
            raise ConfigurationError(
                f"what a query or an aggregate says of the new values of {followed!r} may be something else "
                "when they are replaced, so a second state could not take it back. Ask where the second state is read, "
                "or in a foreachBatch function."
            )
        if self.updates is None:
            raise ConfigurationError(
                f"the state {followed!r} cannot say which old values its new ones replace: it has to be opaque, "
                "without a ttl, and newValuesStream() without old"
            )
        job = None if self.state is None else self.state.job
        stays_in_group = job is not None and not self.steps and set(by) <= {key.name for key in job.keys}
        monotone = monotone_columns(job.aggregators) if job is not None and stays_in_group else {}
        return {
            name: retractable(name, aggregator, grouped=bool(by), monotone=monotone)
            for name, aggregator in aggregates.items()
        }

    def keep(self, job: Job) -> PersistentAggregate:
        """The second state has a driver of its own, which the first one's commit calls."""
        signed = self.updates if self.kind == "updates" else None
        branch = Branch(job, steps=self.steps if signed is None else (), make_driver=driver_of(job.spec))
        query = self.fed_by.query
        driver = BatchDriver(StreamPlan(job.stream, [branch], root=query.plan), feeds_from_source=False)
        if signed is None:
            self.feed(Follower(driver.run, branch))
        else:
            signed(driver, branch, self.steps)
        return PersistentAggregate(query, branch, empty_frame(self.frame, self.schema), source=self.state)


def driver_of(spec: StateSpec) -> type[StateDriver] | None:
    """The driver of a state with this spec, if it is no plain `StateDriver`."""
    if spec.blocks is not None:
        from mapstate.spark.driver.blocks import BlockState, LoggedBlockState

        return BlockState if spec.changes is None else LoggedBlockState
    return None if spec.changes is None else LoggedState


class _NewValueColumns:
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
        return found.select(*map(column_of, self._keys + self._fields))

    def old(self, found: DataFrame) -> DataFrame:
        """Keys, and the values before the batch, under the same names."""
        return found.select(*map(column_of, self._keys), *self._old_columns(found, ""))

    def with_old(self, found: DataFrame) -> DataFrame:
        return found.select(*map(column_of, self._keys + self._fields), *self._old_columns(found, "old_"))

    def _old_columns(self, rows: DataFrame, prefix: str) -> list[Column]:
        names = [name for name in rows.columns if not name.startswith(INSIDE)][len(self._keys) :]
        return [column_of(f"{OLD_COLUMN}{names.index(name)}").alias(prefix + name) for name in self._fields]
