"""Aggregates of expressions: ``Sum(F.col("a") * 2)`` is the Sum of a column that a step adds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Expressions", "expressions_of"]


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
    found = [value for aggregator in aggregates.values() for value in vars(aggregator).values() if _is_column(value)]
    return Expressions({_text(column): column for column in found})


def _by_name(aggregator: Aggregator) -> Aggregator:
    named = copy.copy(aggregator)
    for attribute, value in vars(aggregator).items():
        if _is_column(value):
            setattr(named, attribute, _text(value))
    return named


def _is_column(value: Any) -> bool:
    from pyspark.sql import Column

    return isinstance(value, Column)


def _text(column: Column) -> str:
    return str(column).removeprefix("Column<'").removesuffix("'>")
