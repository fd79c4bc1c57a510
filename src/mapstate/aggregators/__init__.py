"""Combiners and reducers, the built-in ones, and what it takes to write your own."""

from mapstate.aggregators.aggregator import (
    Aggregator,
    CombinerAggregator,
    NativeCombiner,
    ReducerAggregator,
    Row,
)
from mapstate.aggregators.built_in import Avg, Count, First, Last, Max, Min, Sum
from mapstate.aggregators.fields import Fields

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
