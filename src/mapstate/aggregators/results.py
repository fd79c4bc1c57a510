"""The fields of a reader, which has the ledger but not the job with its aggregators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.extremes import First, Last
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.retraction import BY_STORED_NAME
from mapstate.aggregators.sums import Avg
from mapstate.schema import Field

__all__ = ["results_of"]


class _AsStored(Aggregator):
    """A stand-in for a user's aggregator: shows the stored value."""


_SHOWN_APART: dict[str, type[Aggregator]] = {"Avg": Avg, "First": First, "Last": Last, **BY_STORED_NAME}
"""The aggregators whose result is not the stored value, by their names in ledgers."""


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
        elif kind is not None and field.type.startswith(("struct<sum:", "struct<by:")):
            known[field.name] = kind.__new__(kind)
        else:
            known[field.name] = _AsStored()
    return Fields(fields, known)
