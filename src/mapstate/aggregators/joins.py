"""Join values that are stored: those of the panes of a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mapstate.aggregators.aggregator import Aggregator, CombinerAggregator, NativeCombiner
from mapstate.aggregators.fields import NULL, Fields
from mapstate.aggregators.folding import called, check_type


def joined(fields: Fields, values: Sequence[Any]) -> Any:
    """One value out of the values of some panes, at least one. Every field's aggregator has to be a combiner.

    Raises ValueOverflowError, and AggregatorError if a user's aggregator raised.
    """
    if len(values) == 1:
        return values[0]
    columns = zip(*map(fields.split, values), strict=True)
    own = [
        _folded(aggregator, field.type, column)
        for aggregator, field, column in zip(fields.aggregators, fields.fields, columns, strict=True)
    ]
    if len(own) == 1:
        return NULL if own[0] is None else own[0]
    return tuple(own)


def _folded(aggregator: Aggregator, kind: str, parts: Sequence[Any]) -> Any:
    """The parts that are not null, combined; null without one."""
    value: Any = None
    for part in parts:
        if value is None or part is None:
            value = part if value is None else value
        elif isinstance(aggregator, NativeCombiner):
            value = aggregator.combine_all([value], [part])[0]
        elif isinstance(aggregator, CombinerAggregator):
            value = check_type(called(aggregator, aggregator.combine, value, part), kind, aggregator)
        else:
            raise TypeError(f"{aggregator} is no combiner")
    return value
