"""Aggregators of one column: of which rows, and of which types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from mapstate.aggregators.aggregator import NativeCombiner, Row, column_type
from mapstate.aggregators.columns import column_of
from mapstate.errors import ConfigurationError, UnsupportedTypeError

if TYPE_CHECKING:
    from pyspark.sql import Column

    from mapstate.aggregators.aggregator import Aggregator

INTEGERS = ("tinyint", "smallint", "int", "bigint")
FLOATS = ("float", "double")
_ORDERED = (*INTEGERS, *FLOATS, "string", "boolean", "date", "timestamp", "timestamp_ntz", "binary")


class OfColumn(NativeCombiner):
    """A native combiner of one column, in the rows where ``where`` is true."""

    def __init__(self, column: str | Column, *, where: str | Column | None = None) -> None:
        self.column = cast("str", only_where(column, where))

    def columns(self) -> Sequence[str]:
        return (self.column,)

    def init(self, row: Row) -> Any:
        return row[self.column]


def only_where(column: str | Column | None, condition: str | Column | None) -> str | Column | None:
    """The column in the rows where ``condition`` is true, null in all others; 1 for no column. Driver.

    A condition that is text is SQL, as `DataFrame.filter` takes it. Without one, the column as it is.
    Raises ConfigurationError.
    """
    if isinstance(column, str) and column == "*":
        raise ConfigurationError("'*' is no column. Rows are counted by Count(), which counts rows of nulls, too")
    if condition is None:
        return column
    from pyspark.sql import Column
    from pyspark.sql import functions as F

    if isinstance(condition, str):
        condition = F.expr(condition)
    if not isinstance(condition, Column):
        raise ConfigurationError(f"where is a condition, a Column or text of Spark SQL, not {condition!r}")
    if column is None:
        return F.when(condition, F.lit(1))
    return F.when(condition, column_of(column) if isinstance(column, str) else column)


def unsupported(who: Aggregator, column: str, kind: str, wanted: str) -> UnsupportedTypeError:
    """The error for a column of a type that an aggregator does not take."""
    hint = f": take a field of it, F.col({column + '.name'!r}), or its text, F.to_json({column!r})"
    return UnsupportedTypeError(
        f"{who} needs {wanted}, but the column {column!r} is a {kind}{hint * kind.startswith('struct<')}",
        column=column,
        type=kind,
    )


def sum_type(who: Aggregator, column: str, columns: Mapping[str, str]) -> str:
    """The type of a sum of a column. Raises UnsupportedTypeError and UnknownColumnError."""
    kind = column_type(columns, column, who)
    if kind in INTEGERS:
        return "bigint"
    if kind in FLOATS:
        return "double"
    if kind.startswith("decimal("):
        return f"decimal(38,{scale_of(kind)})"
    raise unsupported(who, column, kind, "a number")


def scale_of(decimal_type: str) -> int:
    """The decimal places of a Spark decimal."""
    return int(decimal_type.removesuffix(")").partition(",")[2])


def check_ordered(who: Aggregator, column: str, columns: Mapping[str, str]) -> str:
    """The type of a column whose values have an order. Raises UnsupportedTypeError and UnknownColumnError."""
    kind = column_type(columns, column, who)
    if is_ordered(kind):
        return kind
    raise unsupported(who, column, kind, "a value with an order")


def is_ordered(kind: str) -> bool:
    """Whether values of a type have an order, and are no arrays."""
    return kind in _ORDERED or kind.startswith("decimal(")
