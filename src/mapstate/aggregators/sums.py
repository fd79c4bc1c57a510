"""Count and Sum: the built-in aggregators that add up.

Each built-in aggregator, also those of `mapstate.aggregators.extremes`, has two parts. A native Spark expression
computes the partial, so that Catalyst does the map-side work. Python combines it with the stored value. Nulls follow
Spark SQL: `Count()` counts them, `First` and `Last` return them, and all others skip them. An aggregate of only nulls
is null.

A column is a name, or an expression such as ``F.col("a") * 2``, whose text the ledger then holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from operator import add
from typing import TYPE_CHECKING, Any, cast

from mapstate.aggregators.aggregator import NativeCombiner, Row
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.of_column import OfColumn, only_where, sum_type
from mapstate.errors import ValueOverflowError

if TYPE_CHECKING:
    from pyspark.sql import Column

MAX_LONG = (1 << 63) - 1
MIN_LONG = -(1 << 63)
EXACT = Context(prec=80)
_DECIMAL_LIMIT = Decimal(10) ** 38


class Count(NativeCombiner):
    """The number of a key's rows, or of its rows with a ``column`` that is not null. A bigint, never null."""

    def __init__(self, column: str | Column | None = None, *, where: str | Column | None = None) -> None:
        self.column = cast("str | None", only_where(column, where))

    def columns(self) -> Sequence[str]:
        return () if self.column is None else (self.column,)

    def bind(self, columns: Mapping[str, str]) -> str:
        super().bind(columns)
        return "bigint"

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  always a bigint
        from pyspark.sql import functions as F

        return [F.count(F.lit(1) if self.column is None else column_of(self.column))]

    def init(self, row: Row) -> int:
        return 1 if self.column is None else int(row[self.column] is not None)

    def zero(self) -> int:
        return 0

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        return add_all(self, stored, partials)


class Sum(OfColumn):
    """The sum of a column. Integers add up to a bigint, float and double to a double, decimals to 38 digits.

    A sum out of range is a ValueOverflowError before the write, with ANSI mode on or off. The last bits of a double's
    sum depend on the order of the additions.
    """

    def bind(self, columns: Mapping[str, str]) -> str:
        return sum_type(self, self.column, columns)

    def partials(self, value_type: str) -> list[Column]:
        from pyspark.sql import functions as F

        column = column_of(self.column)
        if value_type == "double":
            return [F.sum(column.cast("double"))]
        # try_sum gives null at an overflow; the count tells that from a sum of nulls
        return [F.try_sum(column), F.count(column)]

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        check_sums(self, *columns)
        return columns[0]

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        return add_all(self, stored, partials)


def check_sums(who: NativeCombiner, sums: list[Any], counts: Sequence[int] = ()) -> None:
    """Raise ValueOverflowError for a sum that is null, though its ``counts`` of summands is not 0."""
    if counts and None in sums and any(count for total, count in zip(sums, counts, strict=True) if total is None):
        raise overflow(who)


def add_all(who: NativeCombiner, stored: list[Any], partials: list[Any]) -> list[Any]:
    """Add two lists, without nulls. Raises ValueOverflowError."""
    kind = next((type(value) for value in partials if value is not None), None)
    plus = EXACT.add if kind is Decimal else add
    try:
        totals = sums = [plus(old, new) for old, new in zip(stored, partials, strict=True)]
    except TypeError:  # a value is null
        sums = [_plus(plus, old, new) for old, new in zip(stored, partials, strict=True)]
        totals = [total for total in sums if total is not None]
    if kind is int and (max(totals) > MAX_LONG or min(totals) < MIN_LONG):
        raise overflow(who)
    if kind is Decimal and any(_unscaled(total) >= _DECIMAL_LIMIT for total in totals):
        raise overflow(who)
    return sums


def _plus(plus: Any, old: Any, new: Any) -> Any:
    if old is None or new is None:
        return new if old is None else old
    return plus(old, new)


def _unscaled(total: Decimal) -> Decimal:
    return total.scaleb(-int(total.as_tuple().exponent), EXACT).copy_abs()


def overflow(who: NativeCombiner) -> ValueOverflowError:
    """The error for a sum that has left its range."""
    return ValueOverflowError(
        f"{who} left its range (64 bits for integers, 38 digits for decimals): this batch is not committed. "
        "Cast the column to double or to a decimal with room, and give the state another name.",
        aggregator=who.describe(),
    )
