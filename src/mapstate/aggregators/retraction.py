"""Aggregates with retraction: of a second state that follows the new values of a first one, and of corrections.

Each row has a sign: 1 for a key's new values, -1 for the old values that they replace. Count, Sum and Avg can retract
an old value. Max cannot, because it does not keep the smaller values. But Max needs no retraction if each new value is
at least as great as the old value that it replaces.

A correction takes back rows of the state's own stream. Its aggregators combine signed rows with what the plain ones
have stored, so a `Sum` has no number of its values there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

from mapstate.aggregators.aggregator import Aggregator, NativeCombiner, Row, column_type
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.extremes import Max, Min
from mapstate.aggregators.moments import Avg
from mapstate.aggregators.of_column import OfColumn
from mapstate.aggregators.sums import EXACT, Count, Sum, add_all
from mapstate.errors import ConfigurationError, MapStateError, MissingBatchesError, UsageError, ValueOverflowError

if TYPE_CHECKING:
    from pyspark.sql import Column

SIGN = "__mapstate_sign"


def monotone_columns(fields: Mapping[str, Aggregator]) -> dict[str, type[Aggregator]]:
    """The fields whose values only grow (`Max`) or only fall (`Min`) while a key exists."""
    growth: dict[type[Aggregator], type[Aggregator]] = {Count: Max, Max: Max, Min: Min}
    return {name: growth[type(aggregator)] for name, aggregator in fields.items() if type(aggregator) in growth}


def retractable(
    name: str, aggregator: Aggregator, *, grouped: bool, monotone: Mapping[str, type[Aggregator]]
) -> Aggregator:
    """The aggregator that can retract rows. Raises ConfigurationError if there is none.

    ``monotone`` are the columns of `monotone_columns` if no row ever moves to another group, else none.
    """
    kind: Any = type(aggregator)
    column: Any = getattr(aggregator, "column", None)
    if kind is Count and column is None and grouped:
        return RetractableRows()
    if kind in {Count, Sum, Avg} or (kind in {Max, Min} and monotone.get(column) is kind):
        return cast("Aggregator", _RETRACTABLE[kind](column))
    raise ConfigurationError(
        f"{name}={aggregator} over the new values of a state: they take the place of older ones, and "
        f"{type(aggregator).__name__} cannot take those back, because it does not keep what it passed over. Count, Sum "
        "and Avg can; so can Max of a Count or Max and Min of a Min, grouped by key columns of the first state and "
        "nothing else, without a transform. What shall see all values as they come goes into a foreachBatch function."
    )


class _Retractable(NativeCombiner):
    """Reads also the sign of each row. Its name in ledgers begins with Net."""

    column: Any  # its name; None in a Count() of all rows

    @classmethod
    def stored_name(cls) -> str:
        """Its name in ledgers."""
        return cls.__name__.replace("Retractable", "Net")

    def columns(self) -> Sequence[str]:
        return (*super().columns(), SIGN)

    def describe(self) -> str:
        return self.stored_name() if self.column is None else f"{self.stored_name()}({self.column})"

    def took_too_much(self) -> MapStateError:
        """The error of a count that fell below 0."""
        return MissingBatchesError(
            f"{self} would come to less than no rows: this state lacks batches of the state that it follows. It was "
            "begun later, reset, rolled back or restored by itself. This batch is not committed. Restore both from "
            "one moment, or begin both anew, with a new checkpoint, under other names.",
            aggregator=self.describe(),
        )


class RetractableCount(_Retractable, Count):
    """The number of present rows, or of those with a ``column`` that is not null."""

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  always a bigint
        from pyspark.sql import functions as F

        sign = F.col(SIGN)
        if self.column is None:
            return [F.sum(sign)]
        return [F.sum(F.when(column_of(self.column).isNotNull(), sign).otherwise(0))]

    def init(self, row: Row) -> int:
        return super().init(row) * int(row[SIGN])

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        """See `NativeCombiner.combine_all`. Raises MissingBatchesError for a count below 0."""
        counts = super().combine_all(stored, partials)
        if counts and min(counts) < 0:
            raise self.took_too_much()
        return counts


class RetractableRows(RetractableCount):
    """The number of a key's present rows: a key with 0 rows is removed."""


class _Monotone(_Retractable, OfColumn):
    """No retracted value is beyond its replacement, so the new values alone count."""

    _greatest: bool

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  the column's own type
        from pyspark.sql import functions as F

        return [(F.max if self._greatest else F.min)(F.when(F.col(SIGN) > 0, column_of(self.column)))]

    def init(self, row: Row) -> Any:
        return super().init(row) if row[SIGN] > 0 else None


class RetractableMax(_Monotone, Max):
    """The greatest of values that only grow."""


class RetractableMin(_Monotone, Min):
    """The least of values that only fall."""


class RetractableAvg(_Retractable, Avg):
    """The mean of a column over the present rows, stored as sum and count."""

    def partials(self, value_type: str) -> list[Column]:
        """See `NativeCombiner.partials`. The sum, the change in the number of rows, and the rows that came.

        Of decimals there are two sums, which `assemble` subtracts: Spark negates at most 34 digits exactly.
        """
        from pyspark.sql import functions as F

        kind = value_type.removeprefix("struct<sum:").removesuffix(",count:bigint>")
        wide = "decimal(38,0)" if kind == "bigint" else kind
        column, plus = column_of(self.column), F.col(SIGN) > 0
        amount = column.cast(wide)
        if kind.startswith("decimal("):
            zero = F.lit(0).cast(wide)
            sums = [
                F.try_sum(F.when(plus, amount).otherwise(zero)),
                F.try_sum(F.when(plus, zero).otherwise(amount)),
            ]
        else:
            signed = F.when(plus, amount).otherwise(-amount)
            sums = [F.sum(signed) if kind == "double" else F.try_sum(signed)]
        return [*sums, F.sum(F.when(column.isNotNull(), F.col(SIGN)).otherwise(0)), F.count(column)]

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        """See `NativeCombiner.assemble`. Raises ValueOverflowError.

        A single sum of decimals is one of integers. It may have more than 64 bits where the new total has not.
        """
        out = []
        *sums, nets, rows = columns
        totals = sums[0] if len(sums) == 1 else map(_difference, *sums)
        for total, net, came in zip(totals, nets, rows, strict=True):
            if came and (total is None or (type(total) is float and not math.isfinite(total))):
                raise self._left_range()
            is_of_integers = len(sums) == 1 and isinstance(total, Decimal)
            out.append((int(total) if is_of_integers else total, net))
        return out

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        """See `NativeCombiner.combine_all`. Raises MissingBatchesError for a count below 0, ValueOverflowError."""
        pairs = super().combine_all(stored, partials)
        if any(count < 0 for _, count in pairs):
            raise self.took_too_much()
        if any(type(total) is float and not math.isfinite(total) for total, _ in pairs):
            raise self._left_range()
        return [pair if pair[1] else (None, 0) for pair in pairs]

    def _left_range(self) -> ValueOverflowError:
        return ValueOverflowError(
            f"{self} left its range, or met NaN or an infinity, which cannot be taken back: nothing of this "
            "batch counts. Leave such rows out with transform.",
            aggregator=self.describe(),
        )


class RetractableSum(RetractableAvg):
    """The sum of a column over the present rows, stored as sum and count."""

    def bind(self, columns: Mapping[str, str]) -> str:
        """See `Aggregator.bind`. As wide as a `Sum`."""
        column_type(columns, self.column, self)
        return f"struct<sum:{Sum(self.column).bind(columns)},count:bigint>"

    def result(self, value: Any) -> Any:
        """The sum; None if all values were null."""
        return value[0] if value is not None and value[1] else None

    def result_type(self, value_type: str) -> str:
        return value_type.removeprefix("struct<sum:").removesuffix(",count:bigint>")


_RETRACTABLE: dict[type[Aggregator], Any] = {
    Avg: RetractableAvg,
    Count: RetractableCount,
    Max: RetractableMax,
    Min: RetractableMin,
    Sum: RetractableSum,
}
BY_STORED_NAME: dict[str, type[Aggregator]] = {
    kind.stored_name(): kind for kind in (*_RETRACTABLE.values(), RetractableRows)
}
"""The aggregators by their names in ledgers, for readers without the job."""


def _difference(plus: Decimal | None, minus: Decimal | None) -> Decimal | None:
    """None if one of the sums left its range."""
    return None if plus is None or minus is None else EXACT.subtract(plus, minus)


def correctable(aggregators: Mapping[str, Aggregator], first: Collection[str]) -> dict[str, Aggregator]:
    """The aggregators of a state that combine signed rows with what it holds. Raises ConfigurationError.

    ``first`` are the fields that it had when it began to count: a `Count()` that was added later lacks rows, so its 0
    does not say that a key has none.
    """
    corrections: dict[str, Aggregator] = {}
    for name, aggregator in aggregators.items():
        kind: Any = type(aggregator)
        column: Any = getattr(aggregator, "column", None)
        if kind not in _CORRECTING:
            raise ConfigurationError(
                f"{name}={aggregator} cannot take rows back, because it does not keep what it passed over: Count, Sum "
                "and Avg can. Nothing was written. Rows that never came can be added; for others build the state anew. "
                "See docs/life.md#correct"
            )
        is_of_rows = kind is Count and column is None and name in first
        corrections[name] = cast("Aggregator", CorrectedRows() if is_of_rows else _CORRECTING[kind](column))
    return corrections


class _Corrected(_Retractable):
    def describe(self) -> str:
        name = self.stored_name().removeprefix("Corrected").replace("Rows", "Count")
        return name if self.column is None else f"{name}({self.column})"

    def check_stored(self, stored: Sequence[Any], partials: Sequence[tuple[Any, int, bool]]) -> None:
        """Raises UsageError for a value that is taken back where nothing is stored, also if another one comes."""
        if any(old is None and takes for old, (_, _, takes) in zip(stored, partials, strict=True)):
            raise self.took_too_much()

    def took_too_much(self) -> MapStateError:
        """See `_Retractable.took_too_much`."""
        return UsageError(
            f"{self.describe()} of a key would come to less than nothing: retract has rows that were never counted. "
            "Nothing of this correction counts. Give the rows as they were counted.",
        )


class CorrectedCount(_Corrected, RetractableCount):
    """The number of all rows, or of those with a ``column`` that is not null."""


class CorrectedRows(_Corrected, RetractableRows):
    """The number of a key's rows: a key with 0 rows is removed."""


class CorrectedAvg(_Corrected, RetractableAvg):
    """The mean, stored as sum and count. A partial says also whether a value is taken back."""

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        """See `RetractableAvg.assemble`."""
        pairs = zip(super().assemble(columns), columns[-1], strict=True)
        return [(total, net, came > net) for (total, net), came in pairs]

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        """See `RetractableAvg.combine_all`. Raises UsageError where nothing is there to take back."""
        self.check_stored([old if old and old[1] else None for old in stored], partials)
        return super().combine_all(stored, [(total, net) for total, net, _ in partials])


class CorrectedSum(CorrectedAvg, RetractableSum):
    """The sum, stored without the number of values: from which all is taken back it is 0, and not null."""

    def partials(self, value_type: str) -> list[Column]:
        return super().partials(f"struct<sum:{value_type},count:bigint>")

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        """See `NativeCombiner.combine_all`. Raises UsageError where nothing is there to take back."""
        self.check_stored(stored, partials)
        came = [total if net or total else None for total, net, _ in partials]  # of none, decimals are 0
        sums = add_all(self, stored, came)
        if any(type(total) is float and not math.isfinite(total) for total in sums):
            raise self._left_range()
        return sums


_CORRECTING: dict[type[Aggregator], Any] = {Avg: CorrectedAvg, Count: CorrectedCount, Sum: CorrectedSum}
