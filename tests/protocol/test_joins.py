"""A reader joins the panes of a sliding window: for every built-in aggregator as the job itself combines."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from mapstate import aggregators
from mapstate.aggregators import (
    ApproxCountDistinct,
    ApproxPercentiles,
    ApproxTopK,
    ArgMax,
    ArgMin,
    Avg,
    BoolAnd,
    BoolOr,
    Collect,
    Count,
    CountDistinct,
    First,
    Last,
    LastN,
    Max,
    Min,
    StdDev,
    StdDevPop,
    Sum,
    ThetaSketch,
    TopN,
    Variance,
    VariancePop,
)
from mapstate.aggregators.aggregator import NativeCombiner
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.results import joined, joins_of
from mapstate.schema import Field

COLUMNS = {"n": "bigint", "d": "double", "b": "boolean", "t": "bigint", "s": "string", "dec": "decimal(10,2)"}
ROWS = [
    {
        "n": at % 4 if at % 3 else None,
        "d": at / 3,
        "b": bool(at % 2),
        "t": at,
        "s": f"x{at % 5}",
        "dec": Decimal(at) / 4,
    }
    for at in range(20)
]
ALL: list[NativeCombiner] = [
    *(Count(), Count("n"), Sum("n"), Sum("d"), Sum("dec"), Avg("n"), Avg("d"), Avg("dec"), Min("s"), Max("d")),
    *(BoolAnd("b"), BoolOr("b"), First("s", by="t"), Last("n", by="t"), ArgMin("n", "d"), ArgMax("n", "d")),
    *(Collect("s", most=100), CountDistinct("s", most=100), TopN(3, "n"), TopN(2, "s", by="count", most=50)),
    *(LastN("n", 3, by="t"), LastN("s", 2, by="n")),
    *(Variance("d"), VariancePop("d"), StdDev("d"), StdDevPop("d"), ApproxCountDistinct("s", log2k=9)),
    *(ApproxPercentiles("d", [0.5, 0.9], k=100), ApproxTopK(2, "s", tracked=8), ThetaSketch("s", log2k=8)),
]


def folded(aggregator: NativeCombiner, rows: list[Any]) -> Any:
    value = aggregator.init(rows[0])
    for row in rows[1:]:
        value = aggregator.combine(value, aggregator.init(row))
    return value


def test_no_built_in_aggregator_is_left_out():
    offered = {getattr(aggregators, name) for name in aggregators.__all__}
    combiners = {one for one in offered if isinstance(one, type) and issubclass(one, NativeCombiner)}
    assert {kind for kind in combiners if kind is not NativeCombiner} == set(map(type, ALL))


@pytest.mark.parametrize("aggregator", ALL, ids=repr)
def test_the_reader_joins_as_the_job_combines(aggregator):
    field = Field("f", aggregator.describe(), aggregator.bind(COLUMNS))
    own, ours = Fields([field], {"f": aggregator}), joins_of([field], {})
    panes = [folded(aggregator, ROWS[:7]), folded(aggregator, ROWS[7:9]), folded(aggregator, ROWS[9:])]
    right = own.shown(folded_all(aggregator, panes))
    assert own.shown(joined(ours, panes)) == ours.shown(joined(ours, panes)) == right
    wide = [Field("rows", "Count", "bigint"), field]  # the field is newer than the first or the last pane
    for missing in ([(1, None), (2, panes[0])], [(2, panes[0]), (1, None)]):
        assert joined(joins_of(wide, {}), missing) == (3, panes[0])


def folded_all(aggregator: NativeCombiner, panes: list[Any]) -> Any:
    value = panes[0]
    for pane in panes[1:]:
        value = aggregator.combine(value, pane)
    return value
