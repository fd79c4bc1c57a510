"""Join values that are stored: those of the panes of a sliding window, and of tiles."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mapstate.aggregators.aggregator import Aggregator, CombinerAggregator, NativeCombiner
from mapstate.aggregators.fields import NULL, Fields
from mapstate.aggregators.folding import called, check_type
from mapstate.aggregators.sums import MAX_LONG, MIN_LONG, Count, Sum, overflow


def joined(fields: Fields, values: Sequence[Any]) -> Any:
    """One value out of the values of some panes, at least one. Every field's aggregator has to be a combiner.

    Raises ValueOverflowError, and AggregatorError if a user's aggregator raised.
    """
    if len(values) == 1:
        return values[0]
    columns = zip(*map(fields.split, values), strict=True)
    own = [
        folded(aggregator, field.type, column)
        for aggregator, field, column in zip(fields.aggregators, fields.fields, columns, strict=True)
    ]
    if len(own) == 1:
        return NULL if own[0] is None else own[0]
    return tuple(own)


def folded(aggregator: Aggregator, kind: str, parts: Sequence[Any]) -> Any:
    """The parts of one field that are not null, combined; null without one. Errors as of `joined`."""
    there = [part for part in parts if part is not None] if None in parts else parts
    if len(there) < 2:
        return there[0] if there else None
    if adds_up(aggregator, kind):
        return checked_sum(aggregator, sum(there))
    if isinstance(aggregator, NativeCombiner):
        return aggregator.fold(there)
    if not isinstance(aggregator, CombinerAggregator):
        raise TypeError(f"{aggregator} is no combiner")
    value = there[0]
    for part in there[1:]:
        # Copies, because the parts stay in the record, and an aggregator may change them in place.
        both = copy.deepcopy((value, part))
        value = check_type(called(aggregator, aggregator.combine, *both), kind, aggregator)
    return value


def adds_up(aggregator: Aggregator, kind: str) -> bool:
    """Whether its values are integers, and are joined by their sum."""
    return kind == "bigint" and type(aggregator) in (Count, Sum)


def checked_sum(aggregator: Any, total: int) -> int:
    """The sum. Raises ValueOverflowError if it has more than 64 bits."""
    if not MIN_LONG <= total <= MAX_LONG:
        raise overflow(aggregator)
    return total
