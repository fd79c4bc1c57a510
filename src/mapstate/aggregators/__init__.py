"""Combiners and reducers: the built-in aggregators, and the base classes of your own."""

from mapstate.aggregators.aggregator import (
    Aggregator,
    CombinerAggregator,
    NativeCombiner,
    ReducerAggregator,
    Row,
)
from mapstate.aggregators.extremes import First, Last, Max, Min
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.sums import Avg, Count, Sum

__all__ = [
    "Aggregator",
    "Avg",
    "CombinerAggregator",
    "Count",
    "Fields",
    "First",
    "Last",
    "Max",
    "Min",
    "NativeCombiner",
    "ReducerAggregator",
    "Row",
    "Sum",
]
