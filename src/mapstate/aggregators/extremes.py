"""Min, Max, BoolAnd, BoolOr, First and Last: the aggregators that keep one value, chosen by Spark's order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from mapstate.aggregators.aggregator import NativeCombiner, Row, column_type
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.of_column import OfColumn, check_ordered, is_ordered, only_where, unsupported
from mapstate.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import Column


class _Extreme(OfColumn):
    """The least or the greatest value of a column, in Spark's order: NaN above all numbers."""

    _greatest: bool

    def bind(self, columns: Mapping[str, str]) -> str:
        return check_ordered(self, self.column, columns)

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  the column's own type
        from pyspark.sql import functions as F

        return [(F.max if self._greatest else F.min)(column_of(self.column))]

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        out = []
        for old, new in zip(stored, partials, strict=True):
            if old is None or new is None:
                out.append(new if old is None else old)
            else:
                out.append(new if (order_of(new) > order_of(old)) is self._greatest else old)
        return out

    def fold(self, values: Sequence[Any]) -> Any:
        if type(values[0]) is float:
            return super().fold(values)
        return max(values) if self._greatest else min(values)


class Min(_Extreme):
    """The least value of a column."""

    _greatest = False


class Max(_Extreme):
    """The greatest value of a column."""

    _greatest = True


class BoolAnd(Min):
    """Whether a boolean column is true in every row in which it is not null, as Spark's `bool_and`."""

    def bind(self, columns: Mapping[str, str]) -> str:
        return _check_boolean(self, self.column, columns)


class BoolOr(Max):
    """Whether a boolean column is true in any row, as Spark's `bool_or`."""

    def bind(self, columns: Mapping[str, str]) -> str:
        return _check_boolean(self, self.column, columns)


class _AtEnd(NativeCombiner):
    """The value of a column in the row where another column is least or greatest."""

    _greatest: bool

    def __init__(
        self, column: str | Column, by: str | Column | None = None, *, where: str | Column | None = None
    ) -> None:
        if by is None:
            who = type(self).__name__
            raise ConfigurationError(
                f"{who} needs the column that orders the rows, because rows of a batch come in any order: "
                f"{who}({column!r}, by='time')"
            )
        self.column = cast("str", column)
        self.by = cast("str", only_where(by, where))

    def columns(self) -> Sequence[str]:
        return (self.column, self.by)

    def bind(self, columns: Mapping[str, str]) -> str:
        by = check_ordered(self, self.by, columns)
        value = column_type(columns, self.column, self)
        if value.startswith("array<") and is_ordered(value.removeprefix("array<").removesuffix(">")):
            return f"struct<by:{by},value:{value}>"
        return f"struct<by:{by},value:{check_ordered(self, self.column, columns)}>"

    def describe(self) -> str:
        return f"{type(self).__name__}({self.column} by {self.by})"

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  the columns' own types
        from pyspark.sql import functions as F

        by = column_of(self.by)
        # A struct instead of min_by: rows with the same `by` must give one answer in any order.
        pair = F.when(by.isNotNull(), F.struct(by.alias("by"), column_of(self.column).alias("value")))
        end = (F.max if self._greatest else F.min)(pair)
        return [end["by"], end["value"]]

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        return list(zip(*columns, strict=True))

    def init(self, row: Row) -> Any:
        by = row[self.by]
        return (None, None) if by is None else (by, row[self.column])

    def zero(self) -> Any:
        return (None, None)

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        out = []
        for old, new in zip(stored, partials, strict=True):
            if new is None or new[0] is None:
                out.append(old or new)
            elif old is None or old[0] is None:
                out.append(new)
            else:
                ahead = (order_of(new[0]), order_of(new[1])) > (order_of(old[0]), order_of(old[1]))
                out.append(new if ahead is self._greatest else old)
        return out

    def result(self, value: Any) -> Any:
        return None if value is None else value[1]

    def result_type(self, value_type: str) -> str:
        return value_type[value_type.index(",value:") + len(",value:") : -1]


class First(_AtEnd):
    """The value of ``column`` in the row with the least ``by``.

    Rows without a ``by`` do not count. Of several rows with the same ``by``, the least value counts.
    """

    _greatest = False


class Last(_AtEnd):
    """The value of ``column`` in the row with the greatest ``by``.

    Rows without a ``by`` do not count. Of several rows with the same ``by``, the greatest value counts.
    """

    _greatest = True


class ArgMin(First):
    """The value of ``column`` in the row with the least ``by``, as `First`, where ``by`` is no time."""


class ArgMax(Last):
    """The value of ``column`` in the row with the greatest ``by``, as `Last`, where ``by`` is no time."""


def _check_boolean(who: NativeCombiner, column: str, columns: Mapping[str, str]) -> str:
    kind = column_type(columns, column, who)
    if kind != "boolean":
        raise unsupported(who, column, kind, "a boolean")
    return kind


def order_of(value: Any) -> tuple[Any, ...]:
    """A sort key in Spark's order: null below everything, NaN above every number."""
    if value is None:
        return (0,)
    if isinstance(value, float) and math.isnan(value):
        return (2,)
    if isinstance(value, list):
        return (1, *map(order_of, value))
    return (1, value)
