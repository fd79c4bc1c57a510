"""Steps that choose or spread the rows of each batch: the first ones, an extreme one, a shuffle, a broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.columns import column_of
from mapstate.errors import check_range
from mapstate.spark.driver.job import Step
from mapstate.spark.steps.columns import column_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

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
