"""Avg, Variance and StdDev, of a sample and of a population, merged without the rows.

The formulas are those of Chan, Golub and LeVeque, as in Spark. The last bits depend on the order of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Row
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.of_column import OfColumn, scale_of, sum_type
from mapstate.aggregators.sums import EXACT, add_all, check_sums

if TYPE_CHECKING:
    from pyspark.sql import Column

MOMENTS = "struct<count:bigint,mean:double,squares:double>"
"""What variances store. ``squares`` is the sum of the squared differences from ``mean``."""

_NOTHING = (0, 0.0, 0.0)


class Avg(OfColumn):
    """The mean of a column, stored as sum and count.

    The sum of integers is exact, to 38 digits, and their mean is a double. The mean of decimals has four more decimal
    places than the column.
    """

    def bind(self, columns: Mapping[str, str]) -> str:
        kind = sum_type(self, self.column, columns)
        return f"struct<sum:{'decimal(38,0)' if kind == 'bigint' else kind},count:bigint>"

    def partials(self, value_type: str) -> list[Column]:
        from pyspark.sql import functions as F

        column = column_of(self.column)
        if "double" in value_type:
            return [F.sum(column.cast("double")), F.count(column)]
        if "decimal(38,0)" in value_type:
            return [F.try_sum(column.cast("decimal(38,0)")), F.count(column)]
        return [F.try_sum(column), F.count(column)]

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        check_sums(self, *columns)
        return list(zip(*columns, strict=True))

    def init(self, row: Row) -> Any:
        value = row[self.column]
        if value is None:
            return (None, 0)
        return (Decimal(value) if type(value) is int else value, 1)

    def zero(self) -> Any:
        return (None, 0)

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        sums = add_all(self, *([None if pair is None else pair[0] for pair in side] for side in (stored, partials)))
        counts = add_all(self, *([0 if pair is None else pair[1] for pair in side] for side in (stored, partials)))
        return list(zip(sums, counts, strict=True))

    def result(self, value: Any) -> Any:
        """The sum divided by the count; None if all values were null."""
        if value is None or not value[1]:
            return None
        total, count = value
        if isinstance(total, Decimal):
            scale = -int(total.as_tuple().exponent)
            mean = EXACT.divide(total, count)
            places = Decimal(1).scaleb(-min(scale + 4, 38))
            return float(mean) if scale == 0 else mean.quantize(places, ROUND_HALF_UP, EXACT)  # as Spark rounds
        return total / count

    def result_type(self, value_type: str) -> str:
        inner = value_type.removeprefix("struct<sum:").removesuffix(",count:bigint>")
        scale = 0 if inner == "double" else scale_of(inner)
        return f"decimal(38,{min(scale + 4, 38)})" if scale else "double"


class VariancePop(OfColumn):
    """The variance of a column, as Spark's `var_pop`: a double; of one value 0, of none null."""

    _freedom = 0

    def bind(self, columns: Mapping[str, str]) -> str:
        sum_type(self, self.column, columns)
        return MOMENTS

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  always the same
        from pyspark.sql import functions as F

        value = column_of(self.column).cast("double")
        return [F.count(value), F.avg(value), F.var_pop(value) * F.count(value)]

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        return [part if part[0] else _NOTHING for part in zip(*columns, strict=True)]

    def init(self, row: Row) -> Any:
        value = row[self.column]
        return _NOTHING if value is None else (1, float(value), 0.0 * float(value))  # NaN and infinity: NaN

    def zero(self) -> Any:
        return _NOTHING

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        return [_merged(old or _NOTHING, new or _NOTHING) for old, new in zip(stored, partials, strict=True)]

    def result(self, value: Any) -> Any:
        """The variance; null of too few values."""
        if value is None or value[0] <= self._freedom:
            return None
        return value[2] / (value[0] - self._freedom)

    def result_type(self, value_type: str) -> str:  # noqa: ARG002  always a double
        return "double"


class Variance(VariancePop):
    """The variance of a column whose values are a sample, as Spark's `variance`: a double; of less than two null."""

    _freedom = 1


class StdDevPop(VariancePop):
    """The standard deviation of a column, as Spark's `stddev_pop`: a double; of one value 0, of none null."""

    def result(self, value: Any) -> Any:
        """The root of the variance; null of too few values."""
        variance = super().result(value)
        return None if variance is None else math.sqrt(variance)


class StdDev(StdDevPop):
    """The standard deviation of a sample, as Spark's `stddev`: a double; of less than two values null."""

    _freedom = 1


def _merged(a: Any, b: Any) -> Any:
    if not a[0] or not b[0]:
        return a if a[0] else b
    count = a[0] + b[0]
    apart = b[1] - a[1]
    mean = a[1] + apart * b[0] / count
    return count, mean, a[2] + b[2] + apart * apart * a[0] * b[0] / count
