"""Combiners and reducers: the built-in aggregators, and the base classes of your own."""

from mapstate.aggregators.aggregator import Aggregator, CombinerAggregator, NativeCombiner, ReducerAggregator, Row
from mapstate.aggregators.bounded import Collect, CountDistinct, LastN, TopN
from mapstate.aggregators.extremes import ArgMax, ArgMin, BoolAnd, BoolOr, First, Last, Max, Min
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.moments import Avg, StdDev, StdDevPop, Variance, VariancePop
from mapstate.aggregators.sketches import ApproxCountDistinct, ApproxPercentiles, ApproxTopK, SketchBytes, ThetaSketch
from mapstate.aggregators.sums import Count, Sum

__all__ = [
    "Aggregator",
    "ApproxCountDistinct",
    "ApproxPercentiles",
    "ApproxTopK",
    "ArgMax",
    "ArgMin",
    "Avg",
    "BoolAnd",
    "BoolOr",
    "Collect",
    "CombinerAggregator",
    "Count",
    "CountDistinct",
    "Fields",
    "First",
    "Last",
    "LastN",
    "Max",
    "Min",
    "NativeCombiner",
    "ReducerAggregator",
    "Row",
    "SketchBytes",
    "StdDev",
    "StdDevPop",
    "Sum",
    "ThetaSketch",
    "TopN",
    "Variance",
    "VariancePop",
]
