"""What a reader shows of a state: it has the ledger, but not the job with its aggregators."""

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
    """Stands for a user's aggregator where only the ledger is at hand: shows what is stored."""


_SHOWN_APART: dict[str, type[Aggregator]] = {"Avg": Avg, "First": First, "Last": Last, **BY_STORED_NAME}
"""The aggregators that show something else than they store, by the names that ledgers hold."""


def results_of(fields: Sequence[Field], aggregators: Mapping[str, Aggregator]) -> Fields:
    """Fields for a reader, who has the ledger but not the job.

    Those built-in aggregators that show something else than they store are known by name and type; a
    user's own show what they accumulated, unless ``aggregators`` brings them.
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
