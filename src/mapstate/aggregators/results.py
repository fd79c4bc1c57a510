"""The fields of a reader, which has the ledger but not the job with its aggregators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.bounded import Collect, CountDistinct, TopN
from mapstate.aggregators.extremes import ArgMax, ArgMin, First, Last
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.moments import MOMENTS, StdDev, StdDevPop, Variance, VariancePop
from mapstate.aggregators.retraction import BY_STORED_NAME
from mapstate.aggregators.sketches import SKETCHES
from mapstate.aggregators.sums import Avg
from mapstate.schema import Field

__all__ = ["results_of"]


class _AsStored(Aggregator):
    """A stand-in for a user's aggregator: shows the stored value."""


_SHOWN_APART: dict[str, type[Aggregator]] = {
    kind.__name__: kind
    for kind in (
        *(Avg, ArgMax, ArgMin, First, Last, Collect, CountDistinct, TopN),
        *(StdDev, StdDevPop, Variance, VariancePop, *SKETCHES),
    )
} | BY_STORED_NAME
"""The aggregators whose result is not the stored value, by their names in ledgers."""
_FORMS = (MOMENTS, "struct<sum:", "struct<by:", "struct<values:", *(f"struct<{kind.form}:" for kind in SKETCHES))
"""What they store: a user's own aggregator may have the name of a built-in one."""


def results_of(fields: Sequence[Field], aggregators: Mapping[str, Aggregator]) -> Fields:
    """The fields of a reader.

    The built-in aggregators whose result is not the stored value are known by name and type. A user's own field shows
    the stored value, unless ``aggregators`` has its aggregator.
    """
    known: dict[str, Aggregator] = {}
    for field in fields:
        name = field.aggregator.partition("(")[0]
        kind: Any = _SHOWN_APART.get(name)
        if field.name in aggregators:
            known[field.name] = aggregators[field.name]
        elif kind is not None and field.type.startswith(_FORMS):
            known[field.name] = kind.of_ledger(field.aggregator)
        else:
            known[field.name] = _AsStored()
    return Fields(fields, known)
