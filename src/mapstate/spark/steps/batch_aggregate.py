"""Aggregates of one batch, computed by Catalyst where it can, and how the rows of a batch are spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mapstate.aggregators import Aggregator, NativeCombiner
from mapstate.aggregators.columns import column_of
from mapstate.errors import ConfigurationError, DuplicateNameError, check_range
from mapstate.schema import Field
from mapstate.spark.driver.job import Step
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.executor.batch_fold import MARK, FinishTask, FoldTask
from mapstate.spark.executor.task import arrow_schema
from mapstate.spark.interfaces import BatchAggregator, ensure_picklable
from mapstate.spark.steps.columns import column_names
from mapstate.values import column_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


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
        for field in own:
            if not isinstance(field, BatchAggregator):
                raise ConfigurationError(
                    f"{field!r} is no BatchAggregator: give an aggregate a name, aggregate(n=Count()), or write a "
                    "BatchAggregator of your own and give an instance"
                )
        for name, kept in named.items():
            if not isinstance(kept, Aggregator):
                raise ConfigurationError(f"{name}={kept!r} is no aggregator, such as {name}=Count()")
        if not own and not named:
            raise ConfigurationError("aggregate needs at least one aggregator, such as n=Count()")
        links = (*self.links, *(("", name) for name in own), *named.items())
        return Links(links, self.per_partition and per_partition)

    @property
    def aggregators(self) -> dict[str, Aggregator]:
        return {name: link for name, link in self.links if isinstance(link, Aggregator)}

    def over_columns(self, named: Mapping[str, Aggregator]) -> Links:
        return Links(tuple((name, named.get(name, link)) for name, link in self.links), self.per_partition)

    def over(self, schema: StructType, keys: Sequence[str] = ()) -> Step:
        """The step that aggregates each batch. Raises ConfigurationError."""
        from pyspark.sql.types import StructField, StructType

        types = {field.name: field.dataType.simpleString() for field in schema.fields}
        keys = column_names(schema, keys, "aggregate")
        out = [schema[key] for key in keys]
        fields: list[Field] = []
        widths: list[int] = []
        for name, link in self.links:
            ensure_picklable(f"the aggregator {link!r}", link)
            if isinstance(link, BatchAggregator):
                emitted: Any = calls().from_ddl(link.output)
                out += emitted.fields
                widths.append(len(emitted.fields))
                continue
            widths.append(1)
            field = Field(name, link.describe(), link.bind(types))
            out.append(StructField(name, calls().from_ddl(column_type(link.result_type(field.type)))))
            fields.append(field)
        folded = [field.name.casefold() for field in out]
        for name in folded:
            if folded.count(name) > 1:
                raise DuplicateNameError(
                    f"two columns would be called {name!r}: each needs a name of its own", name=name
                )
        native = [link for _, link in self.links if isinstance(link, NativeCombiner)]
        if len(native) == len(self.links) and not self.per_partition:
            return _native_step(keys, native, fields, StructType(out))
        return self._folding_step(keys, fields, widths, StructType(out))

    def _folding_step(self, keys: list[str], fields: list[Field], widths: list[int], out: StructType) -> Step:
        links, per_partition = self.links, self.per_partition

        def step(frame: DataFrame, batch_id: int | None) -> DataFrame:
            from pyspark.sql import functions as F

            task = FoldTask(links, fields, widths, keys, out=arrow_schema(out), batch_id=batch_id)
            if keys:
                spread = frame.repartition(*map(column_of, keys))
                return spread.sortWithinPartitions(*map(column_of, keys)).mapInArrow(task, out)
            if per_partition:
                return frame.mapInArrow(task, out)
            # A row that is none, so that a task runs where there are no rows.
            nulls = [F.lit(None).cast(field.dataType).alias(field.name) for field in frame.schema.fields]
            mark = frame.sparkSession.range(1).select(*nulls, F.lit(True).alias(MARK))
            marked = frame.withColumn(MARK, F.lit(False)).union(mark)
            return marked.repartition(1).mapInArrow(task, out)

        return step


def _native_step(keys: list[str], native: list[NativeCombiner], fields: list[Field], out: StructType) -> Step:
    def step(frame: DataFrame, batch_id: int | None) -> DataFrame:  # noqa: ARG001
        from pyspark.sql import functions as F

        widths, partials = [], []
        for aggregator, field in zip(native, fields, strict=True):
            columns = aggregator.partials(field.type)
            widths.append(len(columns))
            partials += columns
        named = [column.alias(f"partial{i}") for i, column in enumerate(partials)]
        by = [column_of(key).alias(f"key{i}") for i, key in enumerate(keys)]
        plan = frame.groupBy(*by).agg(*named, F.count(F.lit(1)).alias("rows"))
        return plan.mapInArrow(FinishTask(native, fields, len(keys), widths, arrow_schema(out)), out)

    return step


_PLACE = "__mapstate_place"


def first_rows(n: int, column: str | None, *, reverse: bool) -> Step:
    """The first ``n`` rows by a column; any ``n`` without one."""

    def step(frame: DataFrame, _: int | None) -> DataFrame:
        if column is None:
            return frame.limit(n)
        return frame.orderBy(*_order(frame, column, reverse=reverse)).limit(n)

    return step


def extreme(schema: StructType, column: str, *, greatest: bool) -> Step:
    """The row with the least or the greatest value of a column. Raises UnknownColumnError."""
    column_names(schema, [column], "maxBy" if greatest else "minBy")

    def step(frame: DataFrame, _: int | None) -> DataFrame:
        present = frame.where(column_of(column).isNotNull())
        return present.orderBy(*_order(frame, column, reverse=greatest)).limit(1)

    return step


def _order(frame: DataFrame, column: str, *, reverse: bool) -> list[Any]:
    from pyspark.sql.types import AtomicType

    first = column_of(column)
    others = [
        column_of(field.name)
        for field in frame.schema.fields
        if isinstance(field.dataType, AtomicType) and field.name != column and field.dataType.typeName() != "variant"
    ]
    return [first.desc_nulls_last() if reverse else first.asc_nulls_last(), *others]


def spread(schema: StructType, partitions: int | None, columns: Sequence[str] = ()) -> Step:
    """Rows spread evenly, or by the hash of some columns. Raises ConfigurationError."""
    names = column_names(schema, columns, "partitionBy")
    _check_partitions(partitions)

    def step(frame: DataFrame, _: int | None) -> DataFrame:
        by = [column_of(name) for name in names]
        number = partitions or int(frame.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
        return frame.repartition(number, *by)

    return step


def broadcast(partitions: int | None) -> Step:
    """Every row in every partition. Raises ConfigurationError."""
    _check_partitions(partitions)

    def step(frame: DataFrame, _: int | None) -> DataFrame:
        from pyspark.sql import functions as F

        spark = frame.sparkSession
        number = partitions or int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
        places = spark.range(0, number, 1, number).withColumnRenamed("id", _PLACE)
        return places.crossJoin(F.broadcast(frame)).drop(_PLACE)

    return step


def _check_partitions(partitions: int | None) -> None:
    if partitions is not None:
        check_range("partitions", partitions, 1)
