"""Aggregates and keys that are expressions: ``Sum(F.col("a") * 2)`` is the Sum of a column that a step adds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator
from mapstate.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Expressions", "analysed", "expressions_of", "is_column"]


@dataclass(frozen=True, eq=False)  # Columns have no truth value, and two of one text may differ
class Expressions:
    """A step that adds a column for each expression, named by its text as Spark prints it: what the ledger holds."""

    columns: Mapping[str, Column]

    def __call__(self, frame: DataFrame, _: int | None) -> DataFrame:
        """See `Step`."""
        return frame.withColumns(dict(self.columns))

    def named(self, aggregates: Mapping[str, Aggregator]) -> dict[str, Aggregator]:
        """The same aggregators over the added columns."""
        return {name: _by_name(aggregator) for name, aggregator in aggregates.items()}


def expressions_of(aggregates: Mapping[str, Aggregator]) -> Expressions:
    """The expressions that aggregators have in place of column names."""
    found = [value for aggregator in aggregates.values() for value in vars(aggregator).values() if is_column(value)]
    return Expressions({_text(column): column for column in found})


def _by_name(aggregator: Aggregator) -> Aggregator:
    named = copy.copy(aggregator)
    for attribute, value in vars(aggregator).items():
        if is_column(value):
            setattr(named, attribute, _text(value))
    return named


@contextmanager
def analysed(expression: str) -> Iterator[None]:
    """Raise what Spark says against an expression as a ConfigurationError."""
    from pyspark.errors import AnalysisException

    try:
        yield
    except AnalysisException as error:
        reason = next(line for line in str(error).splitlines() if line.strip())
        raise ConfigurationError(f"{expression} cannot be computed. Spark says: {reason}") from error


def is_column(value: Any) -> bool:
    """Whether a value is an expression of Spark's."""
    from pyspark.sql import Column

    return isinstance(value, Column)


def _text(column: Column) -> str:
    return str(column).removeprefix("Column<'").removesuffix("'>")
