"""Several aggregates over the same rows of a batch."""

from __future__ import annotations

from typing import Any

from mapstate.aggregators import Aggregator
from mapstate.spark.interfaces import BatchAggregator
from mapstate.spark.steps.batch_aggregate import Links

__all__ = ["ChainedAggregate"]


class ChainedAggregate:
    """Aggregators over the same rows of a batch, one after the other: Trident's ChainedAggregatorDeclarer.

    `chainEnd` gives one row for every combination of what they emit. Is one of them a ``partitionAggregate`` and none
    an ``aggregate``, each partition by itself.
    """

    def __init__(self, rows: Any, keys: tuple[str, ...] = (), links: Links | None = None) -> None:
        self._rows = rows
        self._keys = keys
        self._links = links or Links()

    def aggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> ChainedAggregate:
        """One more over the whole batch, or over each key. Raises ConfigurationError."""
        return self._with(self._links.with_links(own, aggregates, per_partition=False))

    def partitionAggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> ChainedAggregate:
        """One more over each partition. Raises ConfigurationError."""
        return self._with(self._links.with_links(own, aggregates, per_partition=True))

    def _with(self, links: Links) -> ChainedAggregate:
        return ChainedAggregate(self._rows, self._keys, links)

    def chainEnd(self) -> Any:
        """The rows that they emit."""
        return self._rows.with_step(self._links.over(self._rows.schema, self._keys), by_row=False)
