"""Several aggregates over the same rows of a batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from mapstate.aggregators import Aggregator
from mapstate.spark.driver.job import Step
from mapstate.spark.interfaces import BatchAggregator
from mapstate.spark.steps.batch_aggregate import Links
from mapstate.spark.steps.columns import Expressions, Select, analysed, expressions_of, has_expressions, nested_in

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType


class SteppedRows(Protocol):
    """Rows to which a step can be added."""

    @property
    @abstractmethod
    def schema(self) -> StructType:
        """The columns of the rows."""

    @abstractmethod
    def with_step(self, step: Step, *, by_row: bool) -> Self:
        """The rows after one more step; ``by_row`` says that each row's results depend on that row alone."""


R = TypeVar("R", bound=SteppedRows)


class ChainedAggregate(Generic[R]):
    """Aggregators over the same rows of a batch, one after the other: Trident's ChainedAggregatorDeclarer.

    `chainEnd` gives one row for every combination of what they emit. Is one of them a ``partitionAggregate`` and none
    an ``aggregate``, each partition by itself.
    """

    def __init__(self, rows: R, keys: tuple[str, ...] = (), links: Links | None = None) -> None:
        self._rows = rows
        self._keys = keys
        self._links = links or Links()

    def aggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> ChainedAggregate[R]:
        """One more over the whole batch, or over each key. Raises ConfigurationError."""
        return self._with(self._links.with_links(own, aggregates, per_partition=False))

    def partitionAggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> ChainedAggregate[R]:
        """One more over each partition. Raises ConfigurationError."""
        return self._with(self._links.with_links(own, aggregates, per_partition=True))

    def _with(self, links: Links) -> ChainedAggregate[R]:
        return ChainedAggregate(self._rows, self._keys, links)

    def chainEnd(self) -> R:
        """The rows that they emit."""
        rows, links = self._rows, self._links
        if has_expressions(links.aggregators, rows.schema):
            rows, named = with_expressions(rows, links.aggregators)
            links = links.over_columns(named)
        return rows.with_step(links.over(rows.schema, self._keys), by_row=False)


def with_expressions(rows: R, aggregates: Mapping[str, Aggregator]) -> tuple[R, dict[str, Aggregator]]:
    """The rows with a column for each expression of an aggregator, and the aggregators over these columns.

    Raises ConfigurationError, and DuplicateNameError where two names would be one.
    """

    def spark_name(column: Column) -> str:
        with analysed(str(column)):
            name: str = rows.with_step(Select(column), by_row=True).schema.names[0]
            return name

    expressions, named = expressions_of(aggregates, rows.schema.names, spark_name)
    columns = nested_in(aggregates, rows.schema) | {**expressions.columns}
    return (with_columns(rows, f"one of {', '.join(columns)}", columns) if columns else rows), named


def with_columns(rows: R, called: str, columns: Mapping[str, Column]) -> R:
    """The rows with more columns. Raises ConfigurationError, which says how they are ``called``."""
    more = rows.with_step(Expressions(columns), by_row=True)
    with analysed(called):
        _ = more.schema
    return more
