"""The fields of a reader, which has the ledger but not the job with its aggregators; and how values are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mapstate.aggregators.aggregator import Aggregator, CombinerAggregator
from mapstate.aggregators.bounded import Collect, CountDistinct, LastN, TopN
from mapstate.aggregators.counted import CountWindows
from mapstate.aggregators.extremes import ArgMax, ArgMin, BoolAnd, BoolOr, First, Last, Max, Min
from mapstate.aggregators.fields import NULL, Fields
from mapstate.aggregators.folding import folded
from mapstate.aggregators.moments import MOMENTS, Avg, StdDev, StdDevPop, Variance, VariancePop
from mapstate.aggregators.retraction import BY_STORED_NAME
from mapstate.aggregators.sketches import SKETCHES
from mapstate.aggregators.sums import Count, Sum
from mapstate.errors import ConfigurationError, UsageError
from mapstate.schema import Field


class _AsStored(Aggregator):
    """A stand-in for a user's aggregator: shows the stored value."""


_JOINED: dict[str, type[Aggregator]] = {
    kind.__name__: kind
    for kind in (
        *(Count, Sum, Avg, Min, Max, BoolAnd, BoolOr, ArgMax, ArgMin, First, Last),
        *(Collect, CountDistinct, TopN, LastN, StdDev, StdDevPop, Variance, VariancePop, *SKETCHES),
    )
}
"""The aggregators that a reader can join values with, by their names in ledgers."""
_SHOWN_APART = {name: kind for name, kind in _JOINED.items() if kind.result is not Aggregator.result} | BY_STORED_NAME
"""The aggregators whose result is not the stored value, by their names in ledgers."""
_FORMS = (MOMENTS, "struct<sum:", "struct<by:", "struct<values:", *(f"struct<{kind.form}:" for kind in SKETCHES))
"""What they store: a user's own aggregator may have the name of a built-in one."""


def results_of(fields: Sequence[Field], aggregators: Mapping[str, Aggregator]) -> Fields:
    """The fields of a reader. A user's own field shows the stored value, unless ``aggregators`` has its aggregator."""
    known: dict[str, Aggregator] = {}
    for field in fields:
        name = field.aggregator.partition("(")[0]
        kind: Any = _SHOWN_APART.get(name)
        windows = CountWindows.fields_of(field) if name == CountWindows.__name__ else None
        if windows is not None:
            known[field.name] = CountWindows.stored(field, _shown_windows(windows, aggregators), windows)
        elif field.name in aggregators:
            known[field.name] = aggregators[field.name]
        elif kind is not None and field.type.startswith(_FORMS):
            known[field.name] = kind.of_ledger(field.aggregator)
        else:
            known[field.name] = _AsStored()
    return Fields(fields, known)


def _shown_windows(fields: Sequence[Field], aggregators: Mapping[str, Aggregator]) -> dict[str, Aggregator]:
    known: dict[str, Aggregator] = {}
    for field in fields:
        try:
            shown = joins_of([field], aggregators)
        except UsageError:
            shown = results_of([field], aggregators)
        known[field.name] = shown.aggregators[0]
    return known


def check_joined(aggregates: Mapping[str, Aggregator], windows: str) -> None:
    """Raise ConfigurationError for an aggregator whose values cannot be joined. ``windows`` is for the message."""
    for name, aggregator in aggregates.items():
        if not isinstance(aggregator, CombinerAggregator):
            raise ConfigurationError(
                f"{name}={aggregator} is a reducer, and {windows} joins values that were reduced apart: take a "
                "CombinerAggregator, or tumbling windows"
            )
        kind = aggregator.describe().partition("(")[0]
        if kind in _JOINED and not type(aggregator).__module__.startswith("mapstate."):
            raise ConfigurationError(
                f"{name}={aggregator} has the name of a built-in aggregator, and is another. A reader knows an "
                f"aggregator by its name in the ledger, and would join the values of {windows} by the built-in one: "
                "rename the class"
            )


def joins_of(
    fields: Sequence[Field],
    aggregators: Mapping[str, Aggregator],
    why: str = "a sliding window joins the values of its panes",
) -> Fields:
    """The fields of a reader that joins values. Raises UsageError for a user's aggregator that is not known."""
    known: dict[str, Aggregator] = {}
    for field in fields:
        name = field.aggregator.partition("(")[0]
        kind = None if name in _SHOWN_APART and not field.type.startswith(_FORMS) else _JOINED.get(name)
        given = aggregators.get(field.name)
        if isinstance(given, CombinerAggregator):
            known[field.name] = given
        elif kind is not None:
            combiner = known[field.name] = kind.of_ledger(field.aggregator)
            if isinstance(combiner, Collect):
                combiner.set_stored(field.type)
        else:
            raise UsageError(
                f"the field {field.name!r} is a {field.aggregator}, and {why} by that combiner. Nothing was read. Give "
                f"it: open_reader(..., aggregators={{{field.name!r}: ...}})."
            )
    return Fields(fields, known)


def joined(fields: Fields, values: Sequence[Any]) -> Any:
    """Join the values of at least one pane, by combiners. Raises ValueOverflowError and AggregatorError."""
    if len(values) == 1:
        return values[0]
    columns = zip(*map(fields.split, values), strict=True)
    parts = [
        folded(aggregator, field.type, column)
        for aggregator, field, column in zip(fields.aggregators, fields.fields, columns, strict=True)
    ]
    if len(parts) == 1:
        return NULL if parts[0] is None else parts[0]
    return tuple(parts)
