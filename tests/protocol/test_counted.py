"""Windows by count of each built-in aggregator, stored and read back in every serializer, against their rows."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from functools import reduce
from typing import Any

import pytest

from mapstate.aggregators import (
    ApproxCountDistinct,
    ApproxPercentiles,
    ApproxTopK,
    ArgMax,
    Avg,
    BoolOr,
    Collect,
    CombinerAggregator,
    Count,
    CountDistinct,
    Fields,
    First,
    Last,
    LastN,
    Max,
    Min,
    StdDev,
    Sum,
    ThetaSketch,
    TopN,
)
from mapstate.aggregators.counted import CountWindows
from mapstate.aggregators.results import results_of
from mapstate.reader.tables import Columns
from mapstate.schema import Field
from mapstate.serializers import RecordCodec, serializer
from mapstate.values import column_type, in_column

COLUMNS = {
    "n": "bigint",
    "price": "decimal(10,2)",
    "share": "double",
    "name": "string",
    "is_new": "boolean",
    "day": "date",
    "at": "timestamp",
    "local": "timestamp_ntz",
    "raw": "binary",
}
ROWS: list[dict[str, Any]] = [
    {
        "n": at,
        "price": Decimal("1.25") + at,
        "share": at * 1.5,
        "name": f"a{at},<>:`",
        "is_new": at % 2 == 0,
        "day": dt.date(2026, 1, 1 + at),
        "at": dt.datetime(2026, 1, 1, at, tzinfo=dt.UTC),
        "local": dt.datetime(2026, 1, 1, at),
        "raw": b"\0\xff",
    }
    for at in range(7)
]
ROWS[3] = dict.fromkeys(COLUMNS)
AGGREGATORS: list[Any] = [
    Count(),
    Sum("price"),
    Sum("share"),
    Avg("price"),
    Max("at"),
    Min("day"),
    BoolOr("is_new"),
    ArgMax("name", "n"),
    First("raw", "n"),
    Last("local", "n"),
    Collect("name", most=50),
    Collect("price", most=50),
    CountDistinct("n", most=9),
    TopN(3, "n"),
    LastN("name", 2, by="n"),
    TopN(2, "name", by="count", most=99),
    StdDev("share"),
    ApproxCountDistinct("n"),
    ThetaSketch("n"),
    ApproxPercentiles("share", [0.5]),
    ApproxTopK(2, "name"),
]


@pytest.mark.parametrize("form", ["json", "msgpack", "native"])
@pytest.mark.parametrize(("length", "slide"), [(3, 3), (5, 2)])
@pytest.mark.parametrize("one", AGGREGATORS, ids=str)
def test_windows_hold_what_their_rows_come_to(one: Any, length: int, slide: int, form: str):
    own = Field("own", one.describe(), one.bind(COLUMNS))
    windows = CountWindows(length, slide, [own], {"own": one}, ["n"])
    field = Field("windows", windows.describe(), windows.bind(COLUMNS))
    fields = Fields([field], {"windows": windows})
    codec = RecordCodec(serializer(form), "s", "opaque", [field], ((0, 1),))
    stored, seen = None, {}
    for part in (ROWS[:4], ROWS[4:]):
        folding = fields.start()
        for row in part:
            folding[0].add(row)
        (value,) = fields.combine_all([stored], [fields.finish(folding)])
        (record,) = codec.loads(["k"], codec.dumps([(1, value, stored)]))
        stored = record[1]
        for shown in (fields.named([stored]), results_of([field], {}).named([stored])):  # a job's and a reader's
            seen |= {window["window_end"]: window["own"] for window in shown[0]["windows"]["fired"]}
            assert shown[0]["windows"]["open"] is not None
        of_ledger = results_of([field], {})
        table = Columns((), of_ledger).batch([()], of_ledger, [stored])
        assert table.to_pylist() == of_ledger.named([stored])
    ends = range(slide, len(ROWS) + 1, slide)
    assert seen == {end: right(one, ROWS[max(0, end - length) : end]) for end in ends}


def right(one: Any, rows: list[dict[str, Any]]) -> Any:
    return one.result(reduce(one.combine, [one.init(row) for row in rows]))


def test_parts_of_a_column_go_by_their_names():
    """ "company" has "any" in it."""
    assert in_column({"n": 1, "company": "x"}, "struct<company:string,n:bigint>") == {"n": 1, "company": "x"}
    assert column_type("struct<company:string,n:bigint>") == "struct<company:string,n:bigint>"
    assert in_column({"n": [1], "größe": "x"}, "struct<`größe`:string,n:any>") == {"größe": "x", "n": "[1]"}
    assert column_type("struct<`größe`:string,n:any>") == "struct<`größe`:string,`n`:string>"
    assert in_column([("x", [1])], "array<struct<company:string,n:any>>") == [{"company": "x", "n": "[1]"}]


class InPlace(CombinerAggregator):
    """Changes its argument, which it must not; other states copy what they hold first, too."""

    def init(self, row):
        return {"sum": row["n"] or 0}

    def combine(self, a, b):
        a["sum"] += b["sum"]
        return a


def test_a_combiner_that_changes_its_argument_changes_no_window():
    own = Field("own", InPlace().describe(), InPlace().bind(COLUMNS))
    windows = CountWindows(4, 1, [own], {"own": InPlace()}, ["n"])
    fields = Fields([Field("windows", windows.describe(), windows.bind(COLUMNS))], {"windows": windows})
    folding = fields.start()
    for row in ROWS:
        folding[0].add(row)
    (value,) = fields.combine_all([None], [fields.finish(folding)])
    numbers = [row["n"] or 0 for row in ROWS]
    sums = [{"sum": sum(numbers[max(0, end - 4) : end])} for end in range(1, len(ROWS) + 1)]
    assert [held for _, held in value[2]] == sums
