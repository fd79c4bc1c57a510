"""Aggregates of one batch, and how its rows are spread: what Trident has beside the states.

An aggregate of a batch says what it came to and is forgotten. Where Spark can compute all of it, Catalyst does, and
one row per key is finished in Python; else the rows go through Python, sorted by key.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mapstate.aggregators import Aggregator, CombinerAggregator, Count, Fields, NativeCombiner, Sum
from mapstate.aggregators.fields import Folding, shown_as
from mapstate.errors import ConfigurationError, DuplicateNameError, UsageError
from mapstate.spark.plan import column_of
from mapstate.spark.rows import Rows, Step, column_names
from mapstate.spark.state_query import Collector
from mapstate.spark.stream import check_travels
from mapstate.spark.task import arrow_schema, arrow_to_python
from mapstate.transitions import Field

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["BatchAggregator", "ChainedAggregate", "FirstN", "Links", "broadcast", "extreme", "spread"]

_MARK = "__mapstate_mark"
_WAITING = 1000


class BatchAggregator(ABC):
    """Trident's Aggregator: sees the rows of a group of a batch one by one, and emits whenever it likes. Picklable.

    ``output`` are the columns that it emits, as DDL. Runs on executors; a task that Spark tries again begins anew.
    """

    output: str

    @abstractmethod
    def init(self, batch_id: int | None, collector: Collector) -> Any:
        """What to begin with, once per group; where there is one group, also in an empty batch."""

    @abstractmethod
    def aggregate(self, value: Any, row: Mapping[str, Any], collector: Collector) -> Any:
        """The value with one more row; rows come in any order."""

    @abstractmethod
    def complete(self, value: Any, collector: Collector) -> None:
        """There are no more rows. What was emitted for this group is given out now."""


@dataclass(frozen=True)
class Links:
    """Aggregators side by side over the same rows. Each emits; the result is every combination.

    So one that emits nothing gives no rows. Of no rows `Count` is 0, a `Sum` 0, a combiner its ``zero()`` and a reducer
    its ``init()``; where that is None, and for all others, nothing is emitted.
    """

    links: tuple[tuple[str, Aggregator | BatchAggregator], ...] = ()
    per_partition: bool = True

    def with_links(
        self, own: Sequence[BatchAggregator], named: Mapping[str, Aggregator], *, per_partition: bool
    ) -> Links:
        """One or more aggregators more. Raises ConfigurationError."""
        for one in own:
            if not isinstance(one, BatchAggregator):
                raise ConfigurationError(
                    f"{one!r} is no BatchAggregator: give an aggregate a name, aggregate(n=Count()), or write a "
                    "BatchAggregator of your own and give an instance"
                )
        for name, kept in named.items():
            if not isinstance(kept, Aggregator):
                raise ConfigurationError(f"{name}={kept!r} is no aggregator, such as {name}=Count()")
        if not own and not named:
            raise ConfigurationError("aggregate needs at least one aggregator, such as n=Count()")
        links = (*self.links, *(("", one) for one in own), *named.items())
        return Links(links, self.per_partition and per_partition)

    def over(self, schema: StructType, keys: Sequence[str] = ()) -> Step:
        """The step that aggregates each batch. Raises ConfigurationError."""
        from pyspark.sql.types import DataType, StructField, StructType

        types = {field.name: field.dataType.simpleString() for field in schema.fields}
        keys = column_names(schema, keys, "aggregate")
        out = [schema[key] for key in keys]
        fields: list[Field] = []
        widths: list[int] = []
        for name, one in self.links:
            check_travels(f"the aggregator {one!r}", one)
            if isinstance(one, BatchAggregator):
                emitted: Any = StructType.fromDDL(one.output)
                out += emitted.fields
                widths.append(len(emitted.fields))
                continue
            widths.append(1)
            field = Field(name, one.describe(), one.bind(types))
            shown = "string" if field.type == "any" else one.result_type(field.type)
            out.append(StructField(name, DataType.fromDDL(shown)))
            fields.append(field)
        folded = [field.name.casefold() for field in out]
        for name in folded:
            if folded.count(name) > 1:
                raise DuplicateNameError(
                    f"two columns would be called {name!r}: each needs a name of its own", name=name
                )
        native = [one for _, one in self.links if isinstance(one, NativeCombiner)]
        if len(native) == len(self.links) and not self.per_partition:
            return _native_step(keys, native, fields, StructType(out))
        return self._folding_step(keys, fields, widths, StructType(out))

    def _folding_step(self, keys: list[str], fields: list[Field], widths: list[int], out: StructType) -> Step:
        links, per_partition = self.links, self.per_partition

        def step(frame: DataFrame, batch_id: int | None) -> DataFrame:
            from pyspark.sql import functions as F

            task = _Fold(links, fields, widths, keys, out=arrow_schema(out), batch_id=batch_id)
            if keys:
                spread = frame.repartition(*map(column_of, keys))
                return spread.sortWithinPartitions(*map(column_of, keys)).mapInArrow(task, out)
            if per_partition:
                return frame.mapInArrow(task, out)
            # A row that is none, so that a task runs where there are no rows.
            nulls = [F.lit(None).cast(field.dataType).alias(field.name) for field in frame.schema.fields]
            mark = frame.sparkSession.range(1).select(*nulls, F.lit(True).alias(_MARK))
            marked = frame.withColumn(_MARK, F.lit(False)).union(mark)
            return marked.repartition(1).mapInArrow(task, out)

        return step


def _native_step(keys: list[str], native: list[NativeCombiner], fields: list[Field], out: StructType) -> Step:
    def step(frame: DataFrame, batch_id: int | None) -> DataFrame:  # noqa: ARG001
        from pyspark.sql import functions as F

        widths, partials = [], []
        for one, field in zip(native, fields, strict=True):
            columns = one.partials(field.type)
            widths.append(len(columns))
            partials += columns
        named = [column.alias(f"partial{at}") for at, column in enumerate(partials)]
        by = [column_of(key).alias(f"key{at}") for at, key in enumerate(keys)]
        plan = frame.groupBy(*by).agg(*named, F.count(F.lit(1)).alias("rows"))
        return plan.mapInArrow(_Finish(native, fields, len(keys), widths, arrow_schema(out)), out)

    return step


class _Finish:
    """What is shown of the partials of each key. Picklable; run by `mapInArrow`."""

    def __init__(
        self, native: list[NativeCombiner], fields: list[Field], keys: int, widths: list[int], out: pa.Schema
    ) -> None:
        self._fields = Fields(fields, {field.name: one for field, one in zip(fields, native, strict=True)})
        self._keys = keys
        self._widths = widths
        self._out = out

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = [arrow_to_python(column, "a partial aggregate") for column in batch.columns[self._keys :]]
            at, per_field = 0, []
            for width in self._widths:
                per_field.append(columns[at : at + width])
                at += width
            partials = self._fields.from_columns(per_field)
            values = self._fields.combine_all([None] * len(partials), partials)
            shown = [
                self._fields.shown(value) if rows else _of_nothing(self._fields)
                for value, rows in zip(values, columns[-1], strict=True)
            ]
            if None in shown:
                continue  # the one row of an empty batch
            arrays = [column.cast(self._out.field(at).type) for at, column in enumerate(batch.columns[: self._keys])]
            for place, column in enumerate(zip(*shown, strict=True), self._keys):
                arrays.append(pa.array(column, self._out.field(place).type))
            yield pa.RecordBatch.from_arrays(arrays, schema=self._out)


def _of_nothing(fields: Fields) -> list[Any] | None:
    values = [_nothing(one, field.type) for one, field in zip(fields.aggregators, fields.fields, strict=True)]
    return None if None in values else values


def _nothing(one: Aggregator, value_type: str) -> Any:
    """What an aggregator shows of no rows; None where it emits nothing."""
    if isinstance(one, Sum):
        return 0.0 if value_type == "double" else 0 if value_type == "bigint" else Decimal(0)
    if isinstance(one, NativeCombiner) and not isinstance(one, Count):
        return None
    zero: Any = one.zero() if isinstance(one, CombinerAggregator) else getattr(one, "init")()  # noqa: B009
    if zero is None:
        return None
    return shown_as(one.result(zero), is_json=value_type == "any")


class _Fold:
    """Takes rows one by one, and gives out what the aggregators emit. Picklable; run by `mapInArrow`."""

    def __init__(
        self,
        links: tuple[tuple[str, Aggregator | BatchAggregator], ...],
        fields: list[Field],
        widths: list[int],
        keys: list[str],
        *,
        out: pa.Schema,
        batch_id: int | None,
    ) -> None:
        self._links = links
        self._widths = widths
        self._types = {field.name: field.type for field in fields}
        self._keys = keys
        self._out = out
        self._batch_id = batch_id

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        group: _Group | None = None if self._keys else self._group(())
        done: list[tuple[Any, ...]] = []
        for batch in batches:
            names = batch.schema.names
            columns = [arrow_to_python(column, name) for column, name in zip(batch.columns, names, strict=True)]
            places = [names.index(key) for key in self._keys]
            for values in zip(*columns, strict=True):
                key = tuple(values[at] for at in places)
                if group is None or not _same(group.key, key):
                    if group is not None:
                        done += group.emitted()
                    group = self._group(key)
                row = dict(zip(names, values, strict=True))
                if not row.pop(_MARK, False):
                    group.add(row)
            if len(done) >= _WAITING:
                yield self._given(done)
                done = []
        if group is not None:
            done += group.emitted()
        if done:
            yield self._given(done)

    def _group(self, key: tuple[Any, ...]) -> _Group:
        links = zip(self._links, self._widths, strict=True)
        made = [_Link(one, self._types.get(name, ""), width, self._batch_id) for (name, one), width in links]
        return _Group(key, made)

    def _given(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, self._out.field(at).type) for at, column in enumerate(columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._out)


class _Group:
    """The aggregators of one key of one batch."""

    def __init__(self, key: tuple[Any, ...], links: list[_Link]) -> None:
        self.key = key
        self._links = links

    def add(self, row: Mapping[str, Any]) -> None:
        for link in self._links:
            link.add(row)

    def emitted(self) -> Iterator[tuple[Any, ...]]:
        """Every combination of what the aggregators emit, behind the key."""
        for parts in itertools.product(*(link.emitted() for link in self._links)):
            yield (*self.key, *itertools.chain.from_iterable(parts))


class _Link:
    """One aggregator at work on one group."""

    def __init__(self, one: Aggregator | BatchAggregator, value_type: str, width: int, batch_id: int | None) -> None:
        self._one = one
        self._width = width
        self._type = value_type
        self._rows = 0
        self._collector = Collector()
        if isinstance(one, BatchAggregator):
            self._value = one.init(batch_id, self._collector)
        else:
            self._folding = Folding(one)

    def add(self, row: Mapping[str, Any]) -> None:
        self._rows += 1
        if isinstance(self._one, BatchAggregator):
            self._value = self._one.aggregate(self._value, row, self._collector)
            return
        self._folding.add(row)
        if self._folding.rows_waiting >= _WAITING:
            self._folding.settle(None)

    def emitted(self) -> list[tuple[Any, ...]]:
        one = self._one
        if isinstance(one, BatchAggregator):
            one.complete(self._value, self._collector)
            for values in self._collector.emitted:
                if len(values) != self._width:
                    raise UsageError(f"{type(one).__name__} emitted {len(values)} values, its output is {one.output!r}")
            return self._collector.emitted
        if not self._rows:
            nothing = _nothing(one, self._type)
            return [] if nothing is None else [(nothing,)]
        value = self._folding.onto(None)
        shown = None if value is None else one.result(value)
        return [(shown_as(shown, is_json=self._type == "any"),)]


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Equal as Spark groups: NaN is NaN."""
    return a == b or all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))  # noqa: PLR0124


class ChainedAggregate:
    """Aggregators over the same rows of a batch, one after the other: Trident's ChainedAggregatorDeclarer.

    `chainEnd` gives one row for every combination of what they emit. Is one of them a ``partitionAggregate`` and none
    an ``aggregate``, each partition by itself.
    """

    def __init__(self, rows: Any, keys: tuple[str, ...] = (), links: Links | None = None) -> None:
        self._rows = rows
        self._keys = keys
        self._links = links or Links()

    def aggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> ChainedAggregate:
        """One more over the whole batch, or over each key. Raises ConfigurationError."""
        return self._with(self._links.with_links(own, aggregates, per_partition=False))

    def partitionAggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> ChainedAggregate:
        """One more over each partition. Raises ConfigurationError."""
        return self._with(self._links.with_links(own, aggregates, per_partition=True))

    def _with(self, links: Links) -> ChainedAggregate:
        return ChainedAggregate(self._rows, self._keys, links)

    def chainEnd(self) -> Any:
        """The rows that they emit."""
        return self._rows._then(self._links.over(self._rows.schema, self._keys), by_row=False)


class FirstN:
    """Trident's FirstN: the first ``n`` rows of each batch, ordered by a column; without one any ``n``.

    Of rows that are equal there the order of the other columns decides, as far as they have one. Given to
    `Rows.applyAssembly`.
    """

    def __init__(self, n: int, sortField: str | None = None, *, reverse: bool = False) -> None:
        if type(n) is not int or n < 1:
            raise ConfigurationError(f"FirstN takes a number of rows from 1 up, not {n!r}")
        self._n = n
        self._column = sortField
        self._reverse = reverse

    def __call__(self, rows: Rows) -> Rows:
        """The rows that are left."""
        n, column, reverse = self._n, self._column, self._reverse
        if column is not None:
            column_names(rows.schema, [column], "FirstN")

        def step(frame: DataFrame, _: int | None) -> DataFrame:
            if column is None:
                return frame.limit(n)
            return frame.orderBy(*_order(frame, column, reverse=reverse)).limit(n)

        return rows._then(step, by_row=False)


def extreme(rows: Any, column: str, *, greatest: bool) -> Any:
    """See `Rows.minBy`."""
    column_names(rows.schema, [column], "maxBy" if greatest else "minBy")

    def step(frame: DataFrame, _: int | None) -> DataFrame:
        there = frame.where(column_of(column).isNotNull())
        return there.orderBy(*_order(frame, column, reverse=greatest)).limit(1)

    return rows._then(step, by_row=False)


def _order(frame: DataFrame, column: str, *, reverse: bool) -> list[Any]:
    from pyspark.sql.types import AtomicType

    first = column_of(column)
    others = [
        column_of(field.name)
        for field in frame.schema.fields
        if isinstance(field.dataType, AtomicType) and field.name != column and field.dataType.typeName() != "variant"
    ]
    return [first.desc_nulls_last() if reverse else first.asc_nulls_last(), *others]


def spread(rows: Any, partitions: int | None, columns: Sequence[str] = ()) -> Any:
    """See `Rows.shuffle` and `Rows.partitionBy`."""
    names = column_names(rows.schema, columns, "partitionBy")
    _check_partitions(partitions)

    def step(frame: DataFrame, _: int | None) -> DataFrame:
        by = [column_of(name) for name in names]
        number = partitions or int(frame.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
        return frame.repartition(number, *by)

    return rows._then(step, by_row=True)


def broadcast(rows: Any, partitions: int | None) -> Any:
    """See `Rows.broadcast`."""
    _check_partitions(partitions)

    def step(frame: DataFrame, _: int | None) -> DataFrame:
        from pyspark.sql import functions as F

        spark = frame.sparkSession
        number = partitions or int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
        places = spark.range(0, number, 1, number).withColumnRenamed("id", _MARK)
        return places.crossJoin(F.broadcast(frame)).drop(_MARK)

    return rows._then(step, by_row=False)


def _check_partitions(partitions: int | None) -> None:
    if partitions is not None and (type(partitions) is not int or partitions < 1):
        raise ConfigurationError(f"partitions is a number from 1 up, not {partitions!r}")
