"""Spark columns of some rows only, and of types that an aggregator takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mapstate.aggregators.columns import column_of
from mapstate.errors import ConfigurationError, UnsupportedTypeError

if TYPE_CHECKING:
    from pyspark.sql import Column

    from mapstate.aggregators.aggregator import Aggregator


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
