"""Aggregates of rows that replace one another: what a second state keeps of the new values of a first.

Each row comes with a sign, 1 for a key's new values and -1 for the old ones that they replace. Count, Sum and Avg can
take back what they have taken; a minimum cannot, because what it passed over is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator, column_type
from mapstate.aggregators.built_in import Avg, Count, Sum
from mapstate.errors import ConfigurationError, MissingBatchesError, ValueOverflowError

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["SIGN", "NetAvg", "NetCount", "NetRows", "NetSum", "net_of"]

SIGN = "__mapstate_sign"


def net_of(name: str, one: Aggregator, *, grouped: bool) -> Aggregator:
    """The aggregate that can take rows back. Raises ConfigurationError where there is none."""
    if type(one) is Count:
        return NetCount(one.column) if one.column is not None or not grouped else NetRows()
    if type(one) is Sum:
        return NetSum(one.column)
    if type(one) is Avg:
        return NetAvg(one.column)
    raise ConfigurationError(
        f"{name}={one} over the new values of a state: they take the place of older ones, and {type(one).__name__} "
        "cannot take those back. Count, Sum and Avg can. What shall see all values as they come goes into a "
        "foreachBatch function."
    )


class NetCount(Count):
    """Rows that are there now; with a column, those in which it is not null."""

    def columns(self) -> Sequence[str]:
        """See `Aggregator.columns`."""
        return (*super().columns(), SIGN)

    def describe(self) -> str:
        """See `Aggregator.describe`."""
        return "NetCount" if self.column is None else f"NetCount({self.column})"

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  always a bigint
        """See `NativeCombiner.partials`."""
        from pyspark.sql import functions as F

        sign = F.col(SIGN)
        if self.column is None:
            return [F.sum(sign)]
        return [F.sum(F.when(_column(self.column).isNotNull(), sign).otherwise(0))]

    def init(self, row: Mapping[str, Any]) -> int:
        """See `CombinerAggregator.init`."""
        return super().init(row) * int(row[SIGN])

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        """See `NativeCombiner.combine_all`. Raises MissingBatchesError for less than no rows."""
        counts = super().combine_all(stored, partials)
        if counts and min(counts) < 0:
            raise _took_too_much(self)
        return counts


class NetRows(NetCount):
    """Rows of a key that are there now: where it comes to 0, the key is removed."""

    def describe(self) -> str:
        """See `Aggregator.describe`."""
        return "NetRows"


class NetAvg(Avg):
    """The mean of a column over the rows that are there now; stored as sum and count."""

    def columns(self) -> Sequence[str]:
        """See `Aggregator.columns`."""
        return (self.column, SIGN)

    def describe(self) -> str:
        """See `Aggregator.describe`."""
        return f"{type(self).__name__}({self.column})"

    def partials(self, value_type: str) -> list[Column]:
        """See `NativeCombiner.partials`. The sum, how many rows more there are, and how many came."""
        from pyspark.sql import functions as F

        kind = value_type.removeprefix("struct<sum:").removesuffix(",count:bigint>")
        wide = "decimal(38,0)" if kind == "bigint" else kind
        column, plus = _column(self.column), F.col(SIGN) > 0
        amount = column.cast(wide)
        signed = F.when(plus, amount).otherwise(-amount)
        total = F.sum(signed) if kind == "double" else F.try_sum(signed).try_cast(kind)
        return [total, F.sum(F.when(column.isNotNull(), F.col(SIGN)).otherwise(0)), F.count(column)]

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        """See `NativeCombiner.assemble`. Raises ValueOverflowError."""
        out = []
        for total, net, came in zip(*columns, strict=True):
            if came and (total is None or (type(total) is float and not math.isfinite(total))):
                raise self._left_range()
            out.append((total, net))
        return out

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        """See `NativeCombiner.combine_all`. Raises MissingBatchesError for less than no rows, ValueOverflowError."""
        pairs = super().combine_all(stored, partials)
        if any(count < 0 for _, count in pairs):
            raise _took_too_much(self)
        if any(type(total) is float and not math.isfinite(total) for total, _ in pairs):
            raise self._left_range()
        return [pair if pair[1] else (None, 0) for pair in pairs]

    def _left_range(self) -> ValueOverflowError:
        return ValueOverflowError(
            f"{self} left its range, or met NaN or an infinity, which cannot be taken back: nothing of this "
            "batch counts. Leave such rows out with transform.",
            aggregator=self.describe(),
        )


class NetSum(NetAvg):
    """The sum of a column over the rows that are there now; stored as sum and count."""

    def bind(self, columns: Mapping[str, str]) -> str:
        """See `Aggregator.bind`. As wide as a `Sum`."""
        column_type(columns, self.column, self)
        return f"struct<sum:{Sum(self.column).bind(columns)},count:bigint>"

    def result(self, value: Any) -> Any:
        """The sum; null where there was nothing but nulls."""
        return value[0] if value is not None and value[1] else None

    def result_type(self, value_type: str) -> str:
        """See `Aggregator.result_type`."""
        return value_type.removeprefix("struct<sum:").removesuffix(",count:bigint>")


def _took_too_much(who: Aggregator) -> MissingBatchesError:
    return MissingBatchesError(
        f"{who} would come to less than no rows: this state lacks batches of the state that it follows. It was begun "
        "later, reset, rolled back or restored by itself. Nothing of this batch counts. Restore both from one moment, "
        "or begin both anew, with a new checkpoint, under other names.",
        aggregator=who.describe(),
    )


def _column(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.col("`" + name.replace("`", "``") + "`")
