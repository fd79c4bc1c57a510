"""Aggregators in plain Python: what a row becomes, how values join, what readers see."""

from __future__ import annotations

import datetime as dt
import math
import pickle
import re
from decimal import Decimal
from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mapstate import aggregators
from mapstate.aggregators import (
    ArgMax,
    ArgMin,
    Avg,
    BoolAnd,
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
    NativeCombiner,
    ReducerAggregator,
    StdDev,
    StdDevPop,
    Sum,
    TopN,
    Variance,
    VariancePop,
)
from mapstate.aggregators.fields import NULL
from mapstate.aggregators.results import results_of
from mapstate.aggregators.retraction import correctable
from mapstate.aggregators.sketches import SKETCHES
from mapstate.errors import (
    AggregatorError,
    ConfigurationError,
    DataError,
    UnknownColumnError,
    UnsupportedTypeError,
    UsageError,
    ValueOverflowError,
)
from mapstate.schema import Field

NAN = math.nan
COLUMNS = {
    "t": "tinyint",
    "i": "int",
    "l": "bigint",
    "f": "float",
    "d": "double",
    "m": "decimal(10,2)",
    "s": "string",
    "b": "boolean",
    "day": "date",
    "at": "timestamp",
    "raw": "binary",
    "list": "array<int>",
    "lists": "array<array<int>>",
    "part": "struct<a:int>",
    "low": "string collate UTF8_LCASE",
}
MAX_LONG, MIN_LONG = (1 << 63) - 1, -(1 << 63)
MOST = Decimal(10**38 - 1)


def of_rows(one, rows):
    """The value of some rows, by init and combine alone."""
    return reduce(one.combine, [one.init(row) for row in rows], one.zero())


def shown(one, values, column="x"):
    return one.result(of_rows(one, [{column: value} for value in values]))


def same(one, other):
    """Equal, NaN being NaN."""
    return one == other or (
        isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    )


# What Spark SQL says


@pytest.mark.parametrize(
    ("one", "values", "wanted"),
    [
        (Count(), [1, None, 3], 3),
        (Count(), [], 0),
        (Count("x"), [1, None, 3], 2),
        (Count("x"), [None, None], 0),
        (Sum("x"), [1, None, 3], 4),
        (Sum("x"), [None, None], None),
        (Sum("x"), [], None),
        (Sum("x"), [0, 0], 0),
        (Sum("x"), [0.5, NAN], NAN),
        (Sum("x"), [math.inf, 1.0], math.inf),
        (Sum("x"), [math.inf, -math.inf], NAN),
        (Avg("x"), [1, 2, None], 1.5),
        (Avg("x"), [0, 0], 0.0),
        (Avg("x"), [None], None),
        (Avg("x"), [], None),
        (Avg("x"), [0.5, None, 1.5], 1.0),
        (Avg("x"), [Decimal("1.00"), Decimal("2.01")], Decimal("1.505000")),
        (Avg("x"), [Decimal("0.01"), Decimal("0.01"), Decimal("0.00")], Decimal("0.006667")),
        (Min("x"), [3, None, 0], 0),
        (Max("x"), [-3, None, 0], 0),
        (Min("x"), [None], None),
        (Max("x"), [], None),
        (Min("x"), [NAN, 1.0], 1.0),
        (Max("x"), [math.inf, NAN, 1.0], NAN),
        (Min("x"), [NAN, NAN], NAN),
        (Max("x"), [False, True], True),
        (Min("x"), [b"\xff", b"\x00\x01"], b"\x00\x01"),
        (Max("x"), ["a", "Z", ""], "a"),
        (Max("x"), [dt.date(2026, 1, 1), dt.date(2025, 12, 31)], dt.date(2026, 1, 1)),
        (BoolAnd("x"), [True, None, False], False),
        (BoolOr("x"), [None, None], None),
        (VariancePop("x"), [1, 2, None, 3], 2 / 3),
        (Variance("x"), [1, 2, 3], 1.0),
        (Variance("x"), [1], None),
        (StdDevPop("x"), [4], 0.0),
        (StdDev("x"), [Decimal(1), Decimal(3)], math.sqrt(2)),
        (StdDev("x"), [], None),
        (Collect("x", most=4), [3, None, 1, 3], [1, 3, 3]),
        (Collect("x", most=1), [], []),
        (CountDistinct("x", most=3), ["b", None, "a", "b"], 2),
        (CountDistinct("x", most=3), [0.0, -0.0, NAN, NAN, 1.0], 3),
        (TopN(2, "x"), [1, 5, None, 3], [5, 3]),
        (
            TopN(2, "x", by="count", most=3),
            ["b", "c", "a", "b", "a", None],
            [{"value": "a", "count": 2}, {"value": "b", "count": 2}],
        ),
    ],
    ids=str,
)
def test_values_and_nulls_are_as_in_spark_sql(one, values, wanted):
    assert same(shown(one, values), wanted)
    assert same(shown(one, values[::-1]), wanted)
    assert type(shown(one, values)) is type(wanted)


@pytest.mark.parametrize(
    ("rows", "first", "last"),
    [
        ([("a", 2), ("b", 1), ("c", 3)], "b", "c"),
        ([("a", 1), ("b", 1)], "a", "b"),  # of one instant: the least, the greatest
        ([(None, 1), ("b", 1)], None, "b"),  # null is below all values, as in Spark's structs
        ([("a", None), ("b", 1), ("c", None)], "b", "b"),  # rows without an order do not take part
        ([("a", None)], None, None),
        ([], None, None),
        ([(None, 1), ("b", 2), (None, 3)], None, None),
        ([("a", 1.0), ("b", NAN), ("c", math.inf)], "a", "b"),
        ([("", 0), ("x", 1)], "", "x"),
    ],
    ids=repr,
)
def test_first_and_last_follow_the_order_column_in_any_order_of_rows(rows, first, last):
    for one, wanted in ((First("x", "at"), first), (Last("x", "at"), last)):
        for order in (rows, rows[::-1]):
            value = of_rows(one, [{"x": x, "at": at} for x, at in order])
            assert one.result(value) == wanted


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([("a", 2), ("b", 1), ("c", 3)], ["c", "a"]),
        ([("a", 1), ("b", 1), ("c", 1)], ["c", "b"]),  # of one instant: the greatest first
        ([(None, 1), ("b", 1)], ["b", None]),
        ([(None, 2), ("b", 1), (None, 2)], [None, None]),
        ([("a", None), ("b", 1)], ["b"]),  # rows without an order do not take part
        ([("a", None)], []),
        ([], []),
        ([("a", 1.0), ("b", NAN), ("c", math.inf)], ["b", "c"]),
        ([("a", "x"), ("b", "")], ["a", "b"]),
    ],
    ids=repr,
)
def test_the_last_values_follow_the_order_column_in_any_order_of_rows(rows, wanted):
    one = LastN("x", 2, by="at")
    for order in (rows, rows[::-1]):
        assert one.result(of_rows(one, [{"x": x, "at": at} for x, at in order])) == wanted


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 5)), max_size=12), st.integers(1, 4))
def test_the_last_values_are_those_of_pythons_sort(pairs, n):
    one = LastN("x", n, by="at")
    last = sorted(((at, x) for x, at in pairs if at is not None), reverse=True)[:n]
    assert one.result(of_rows(one, [{"x": x, "at": at} for x, at in pairs])) == [x for _, x in last]


def test_another_number_of_last_values_is_another_field():
    one = LastN("x", 3, by="at")
    assert one.describe() == "LastN(3, x by at)"
    field = Field("f", one.describe(), one.bind({"x": "string", "at": "timestamp"}))
    assert field.type == "struct<by:array<timestamp>,value:array<string>>"
    assert one.result_type(field.type) == "array<string>"
    assert LastN("x", 2, by="at").describe() != one.describe()
    reader = results_of([field], {})
    assert reader.result(([3, 1], ["c", "a"])) == [["c", "a"]]
    assert reader.aggregators[0].result_type(field.type) == "array<string>"
    for made in (lambda: LastN("x", 3), lambda: LastN(3, "x", by="at"), lambda: LastN("x", 0, by="at")):
        with pytest.raises(
            ConfigurationError, match="LastN needs how many values it keeps, and the column that orders"
        ):
            made()


# A chunk at a time

reals = st.floats(allow_nan=True, allow_infinity=True)
maybe_int = st.none() | st.integers(-1000, 1000)
maybe_decimal = st.none() | st.decimals(-1000, 1000, places=2)
maybe_real = st.none() | reals
MOMENTS = (Variance, VariancePop, StdDev, StdDevPop)
moments = st.tuples(st.integers(0, 9), reals, reals)
NATIVE: dict[str, Any] = {
    "Count": (Count(), st.integers(0, 9), st.none() | st.integers(0, 9)),
    "Sum of ints": (Sum("x"), maybe_int, maybe_int),
    "Sum of doubles": (Sum("x"), maybe_real, maybe_real),
    "Sum of decimals": (Sum("x"), maybe_decimal, maybe_decimal),
    "Min": (Min("x"), maybe_real, maybe_real),
    "Max": (Max("x"), maybe_real, maybe_real),
    "Min of texts": (Min("x"), st.none() | st.text(max_size=2), st.none() | st.text(max_size=2)),
    "Avg": (
        Avg("x"),
        maybe_decimal.map(lambda value: (value, int(value is not None))),
        st.none() | maybe_decimal.map(lambda value: (value, 3 * (value is not None))),
    ),
    "First": (First("x", "at"), *[st.tuples(st.none() | st.integers(0, 2), maybe_real)] * 2),
    "Last": (Last("x", "at"), *[st.tuples(st.none() | st.integers(0, 2), maybe_real)] * 2),
    "ArgMin": (ArgMin("x", "at"), *[st.tuples(st.none() | st.integers(0, 2), st.lists(maybe_real, max_size=2))] * 2),
    "ArgMax": (ArgMax("x", "at"), *[st.tuples(st.none() | st.integers(0, 2), st.lists(maybe_real, max_size=2))] * 2),
    "LastN": (
        LastN("x", 2, by="at"),
        *[
            st.none()
            | st.lists(st.tuples(st.integers(0, 2), maybe_real), max_size=3).map(
                lambda pairs: tuple(map(list, zip(*pairs, strict=True))) or ([], [])
            )
        ]
        * 2,
    ),
    "BoolAnd": (BoolAnd("x"), *[st.none() | st.booleans()] * 2),
    "BoolOr": (BoolOr("x"), *[st.none() | st.booleans()] * 2),
    **{kind.__name__: (kind("x"), moments, st.none() | moments) for kind in MOMENTS},
    "Collect": (Collect("x", most=9), *[st.none() | st.tuples(st.lists(reals, max_size=4))] * 2),
    "CountDistinct": (CountDistinct("x", most=9), *[st.none() | st.tuples(st.lists(reals, max_size=4))] * 2),
    "TopN": (TopN(2, "x"), *[st.none() | st.tuples(st.lists(reals, max_size=2))] * 2),
    "TopN by count": (
        TopN(2, "x", by="count", most=9),
        *[
            st.none()
            | st.lists(st.tuples(reals, st.integers(1, 9)), max_size=4).map(
                lambda pairs: tuple(map(list, zip(*pairs, strict=True))) or ([], [])
            )
        ]
        * 2,
    ),
}


@settings(max_examples=200)
@given(st.sampled_from(list(NATIVE)), st.data())
def test_combining_a_chunk_is_combining_each(name, data):
    one, partial, stored = NATIVE[name]
    rows = data.draw(st.lists(st.tuples(stored, partial), max_size=8))
    olds, news = [old for old, _ in rows], [new for _, new in rows]
    together = one.combine_all(list(olds), list(news))
    assert repr(together) == repr([one.combine_all([old], [new])[0] for old, new in rows])
    assert repr(together) == repr([one.combine(old, new) for old, new in rows])


@settings(max_examples=200)
@given(
    st.sampled_from(
        [
            *(
                Count(),
                Count("x"),
                Sum("x"),
                Avg("x"),
                Min("x"),
                Max("x"),
                First("x", "at"),
                Last("x", "at"),
                LastN("x", 3, "at"),
            ),
            *(Collect("x", most=8), CountDistinct("x", most=8), TopN(3, "x"), TopN(3, "x", by="count", most=8)),
        ]
    ),
    st.lists(st.tuples(st.none() | st.integers(-5, 5), st.none() | st.integers(0, 3)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_rows_may_come_in_any_order_and_in_any_groups(one, pairs, chance):
    rows = [{"x": x, "at": at} for x, at in pairs]
    wanted = one.result(of_rows(one, rows))
    chance.shuffle(rows)
    cut = chance.randint(0, len(rows))
    joined = one.combine(of_rows(one, rows[:cut]), of_rows(one, rows[cut:]))
    assert one.result(joined) == wanted


@given(st.lists(st.none() | st.integers(-(10**6), 10**6), max_size=20))
def test_built_in_aggregators_agree_with_python(values):
    there = [value for value in values if value is not None]
    assert shown(Count(), values) == len(values)
    assert shown(Count("x"), values) == len(there)
    assert shown(Sum("x"), values) == (sum(there) if there else None)
    assert shown(Avg("x"), values) == (sum(there) / len(there) if there else None)
    assert shown(Min("x"), values) == min(there, default=None)
    assert shown(Max("x"), values) == max(there, default=None)


def test_no_rows_leave_no_keys_to_combine():
    for one, *_ in NATIVE.values():
        assert one.combine_all([], []) == []


def test_empty_partials_do_not_undo_what_is_stored():
    assert Sum("x").combine_all([5, 0], [None, None]) == [5, 0]
    assert Count().combine_all([None, 7], [0, 0]) == [0, 7]
    assert Avg("x").combine((Decimal(4), 2), (None, 0)) == (Decimal(4), 2)
    assert Last("x", "at").combine((1, "a"), (None, None)) == (1, "a")


# Ranges


@pytest.mark.parametrize(
    ("one", "stored", "partial"),
    [
        (Count(), MAX_LONG, 1),
        (Sum("x"), MAX_LONG, 1),
        (Sum("x"), MIN_LONG, -1),
        (Sum("x"), MOST, Decimal(1)),
        (Sum("x"), -MOST, Decimal(-1)),
        (Sum("x"), Decimal("9" * 36 + ".99"), Decimal("0.01")),
        (Avg("x"), (MOST, 1), (Decimal(1), 1)),
        (Avg("x"), (1.0, MAX_LONG), (1.0, 1)),
    ],
    ids=repr,
)
def test_a_sum_that_leaves_its_range_is_an_error(one, stored, partial):
    with pytest.raises(ValueOverflowError) as caught:
        one.combine_all([None, stored, None], [partial, partial, partial])
    assert caught.value.aggregator == one.describe()
    with pytest.raises(ValueOverflowError):
        one.combine_all([stored, stored], [partial, one.zero()])


def test_the_last_value_inside_the_range_is_none():
    assert Sum("x").combine(MAX_LONG - 1, 1) == MAX_LONG
    assert Sum("x").combine(MIN_LONG + 1, -1) == MIN_LONG
    assert Sum("x").combine(Decimal(10**38 - 2), Decimal(1)) == MOST
    assert Sum("x").combine_all([MAX_LONG, None], [None, 1]) == [MAX_LONG, 1]


def test_what_spark_could_not_sum_is_an_error_and_not_a_null():
    for one in (Sum("x"), Avg("x")):
        with pytest.raises(ValueOverflowError):
            one.assemble([[1, None], [1, 2]])
    assert Sum("x").assemble([[1, None], [1, 0]]) == [1, None]
    assert Avg("x").assemble([[1, None], [1, 0]]) == [(1, 1), (None, 0)]
    assert Avg("x").assemble([[1, 2], [1, 2]]) == [(1, 1), (2, 2)]


def test_decimals_are_exact_beyond_pythons_28_digits():
    big, cent = Decimal("9" * 35 + ".99"), Decimal("0.01")
    total = Sum("x").combine(Sum("x").combine(big, -cent), cent)
    assert str(total) == "9" * 35 + ".99"
    thirds = Avg("x").combine_all([(Decimal("1" + "0" * 30 + ".00"), 1)], [(Decimal("0.01"), 2)])
    assert thirds == [(Decimal("1" + "0" * 30 + ".01"), 3)]
    assert str(Avg("x").result(thirds[0])) == "3" * 30 + ".336667"


@given(st.lists(st.decimals(-(10**30), 10**30, places=4), min_size=1, max_size=10))
def test_decimal_sums_are_those_of_whole_numbers(values):
    def in_units(value):
        return int(str(value).replace(".", ""))

    assert in_units(shown(Sum("x"), values)) == sum(map(in_units, values))


# Binding


@pytest.mark.parametrize(
    ("one", "value_type", "result_type"),
    [
        (Count(), "bigint", "bigint"),
        (Count("s"), "bigint", "bigint"),
        (Count("list"), "bigint", "bigint"),
        (Sum("t"), "bigint", "bigint"),
        (Sum("l"), "bigint", "bigint"),
        (Sum("f"), "double", "double"),
        (Sum("m"), "decimal(38,2)", "decimal(38,2)"),
        (Avg("i"), "struct<sum:decimal(38,0),count:bigint>", "double"),
        (Avg("d"), "struct<sum:double,count:bigint>", "double"),
        (Avg("m"), "struct<sum:decimal(38,2),count:bigint>", "decimal(38,6)"),
        (Min("s"), "string", "string"),
        (Max("at"), "timestamp", "timestamp"),
        (Max("m"), "decimal(10,2)", "decimal(10,2)"),
        (First("s", "at"), "struct<by:timestamp,value:string>", "string"),
        (Last("m", "m"), "struct<by:decimal(10,2),value:decimal(10,2)>", "decimal(10,2)"),
    ],
    ids=str,
)
def test_an_aggregator_says_what_it_stores_and_what_it_shows(one, value_type, result_type):
    assert one.bind(COLUMNS) == value_type
    assert one.result_type(value_type) == result_type


def test_a_result_type_is_one_that_spark_has():
    """38 digits are all there are, so a mean cannot have four more places than a scale of 36."""
    for scale in range(39):
        one = Avg("x")
        shown_as = one.result_type(one.bind({"x": f"decimal(38,{scale})"}))
        if shown_as != "double":
            assert int(shown_as.partition(",")[2].rstrip(")")) <= 38


@pytest.mark.parametrize(
    "one", [Count("no"), Sum("no"), Avg("no"), Min("no"), Max("no"), First("s", "no"), Last("no", "at")], ids=str
)
def test_a_column_that_is_not_there_is_named(one):
    with pytest.raises(UnknownColumnError) as caught:
        one.bind(COLUMNS)
    assert caught.value.column == "no"
    assert "raw" in str(caught.value)


@pytest.mark.parametrize(
    ("one", "column"),
    [
        (Sum("s"), "s"),
        (Sum("b"), "b"),
        (Avg("day"), "day"),
        (Min("list"), "list"),
        (Max("low"), "low"),
        (First("s", "list"), "list"),
        (Last("lists", "at"), "lists"),
        (Last("part", "at"), "part"),
        (ArgMax("part", "at"), "part"),
        (BoolAnd("i"), "i"),
        (BoolOr("s"), "s"),
        (Variance("s"), "s"),
        (StdDevPop("b"), "b"),
        (Collect("list", most=3), "list"),
        (CountDistinct("part", most=3), "part"),
        (TopN(3, "list"), "list"),
        (LastN("list", 3, by="at"), "list"),
        (LastN("s", 3, by="part"), "part"),
    ],
    ids=str,
)
def test_a_column_of_the_wrong_type_is_named_with_its_type(one, column):
    with pytest.raises(UnsupportedTypeError) as caught:
        one.bind(COLUMNS)
    assert (caught.value.column, caught.value.type) == (column, COLUMNS[column])


def test_aggregators_compare_by_what_they_do_and_are_pickled():
    assert Sum("x") == Sum("x")
    assert Sum("x") != Sum("y")
    assert Sum("x") != Max("x")
    assert First("x", "a") != First("x", "b")
    assert len({Count(), Count(), Count("x")}) == 2
    for one in (Count(), Count("x"), Sum("x"), Avg("x"), Min("x"), Max("x"), First("x", "at"), Last("x", "at")):
        again = pickle.loads(pickle.dumps(one))
        assert again == one
        assert again.describe() == one.describe()


# A user's own


class Longest(CombinerAggregator):
    value_type = "string"

    def __init__(self, column):
        self.column = column

    def columns(self):
        return (self.column,)

    def init(self, row):
        return row[self.column]

    def combine(self, a, b):
        return max(a, b, key=len)


class Products(ReducerAggregator):
    def __init__(self, limit=10):
        self.limit = limit

    def init(self):
        return []

    def reduce(self, acc, row):
        return [*acc, row["x"]][-self.limit :]


class Failing(CombinerAggregator):
    def init(self, row):
        return 10 // row["x"]

    def combine(self, a, b):
        raise RuntimeError("no")


class FailingReducer(ReducerAggregator):
    def init(self):
        return 0

    def reduce(self, acc, row):
        return acc + row["x"]


def fields_of(**aggregators):
    return Fields([Field(name, one.describe(), "any") for name, one in aggregators.items()], aggregators)


def new_values(fields, base, rows):
    """The new value of one key, by the way of a task."""
    foldings = fields.start()
    for row in rows:
        for folding in foldings:
            folding.add(row)
    return fields.combine_all([base], [fields.finish(foldings)])[0]


def test_a_users_combiner_folds_rows_and_joins_what_is_stored():
    one = fields_of(longest=Longest("x"))
    assert Longest("x").bind({"x": "string"}) == "string"
    value = new_values(one, None, [{"x": "a"}, {"x": "abc"}, {"x": "ab"}])
    assert value == "abc"
    assert new_values(one, value, [{"x": "abcd"}]) == "abcd"
    assert one.result("abcd") == ["abcd"]
    assert one.result(None) is None


def test_a_users_reducer_goes_on_from_what_is_stored():
    one = fields_of(products=Products(3))
    value = new_values(one, None, [{"x": 1}, {"x": 2}])
    assert value == [1, 2]
    assert new_values(one, value, [{"x": 3}, {"x": 4}]) == [2, 3, 4]


def test_a_reducers_rows_may_be_settled_before_the_last_one():
    one = fields_of(products=Products())
    [folding] = foldings = one.start()
    folding.add({"x": 1})
    assert folding.rows_waiting == 1
    folding.settle([0])
    assert folding.rows_waiting == 0
    folding.add({"x": 2})
    assert one.combine_all([[0]], [one.finish(foldings)]) == [[0, 1, 2]]


def test_own_and_built_in_aggregators_stand_in_one_state():
    one = fields_of(n=Count(), longest=Longest("x"), products=Products())
    value = new_values(one, None, [{"x": "a"}, {"x": "bc"}])
    assert value == (2, "bc", ["a", "bc"])
    value = new_values(one, value, [{"x": "d"}])
    assert value == (3, "bc", ["a", "bc", "d"])
    assert one.result(value) == [3, "bc", ["a", "bc", "d"]]


class OfItsColumn(Longest):
    """Accumulates whatever type its column has: what `bind` says goes before the class's value_type."""

    def bind(self, columns):
        return columns[self.column]

    def combine(self, a, b):
        return max(a, b)


def test_an_own_aggregator_may_take_its_type_from_its_column():
    own = OfItsColumn("x")
    assert own.value_type == "string"
    one = Fields([Field("own", own.describe(), own.bind({"x": "bigint"}))], {"own": own})
    assert new_values(one, 3, [{"x": 7}, {"x": 5}]) == 7
    with pytest.raises(DataError):
        new_values(one, None, [{"x": "text"}])


class Sized(Products):
    """Shows a number, of what has no Spark type."""

    def result(self, value):
        return len(value)

    def result_type(self, value_type):
        return "bigint"


def test_new_values_have_the_type_of_the_result_whatever_is_stored():
    one = fields_of(size=Sized(), values=Products())
    value = new_values(one, None, [{"x": "a"}, {"x": math.nan}])
    assert one.types == ["bigint", "any"]
    assert one.shown(value) == [2, '["a","NaN"]']


def test_what_a_users_aggregator_raises_is_named_and_chained():
    for one, base, rows, words in (
        (Failing(), None, [{"x": 0}], "Failing.init raised ZeroDivisionError"),
        (Failing(), None, [{"x": 1}, {"x": 2}], "Failing.combine raised RuntimeError: no"),
        (Failing(), 5, [{"x": 1}], "Failing.combine raised RuntimeError: no"),
        (FailingReducer(), None, [{"x": "text"}], "FailingReducer.reduce raised TypeError"),
        (FailingReducer(), 1, [{"y": 1}], "FailingReducer.reduce raised KeyError"),
    ):
        with pytest.raises(AggregatorError) as caught:
            new_values(fields_of(one=one), base, rows)
        assert words in str(caught.value)
        assert caught.value.__cause__ is not None
        assert caught.value.aggregator == one.describe()


# Several fields as one value


def test_a_single_value_that_is_null_is_there_all_the_same():
    one = fields_of(total=Sum("x"))
    assert one.combine_all([None, 1, NULL], [None, None, 2]) == [NULL, 1, 2]
    assert one.result(NULL) == [None]
    assert one.result(0) == [0]
    assert one.result(None) is None


def test_several_fields_are_one_tuple():
    one = fields_of(n=Count(), total=Sum("x"), low=Min("x"))
    partials = one.from_columns([[[1, 2]], [[5, None], [1, 0]], [[5, None]]])
    assert partials == [(1, 5, 5), (2, None, None)]
    assert one.combine_all([(1, 1, 1), None], partials) == [(2, 6, 1), (2, None, None)]
    assert one.result((2, 6, 1)) == [2, 6, 1]
    assert one.result(None) is None


def test_a_stored_value_that_lacks_a_field_takes_it_up():
    one = fields_of(n=Count(), total=Sum("x"), mean=Avg("x"), last=Last("x", "at"))
    value = (5, None, None, None)  # widened by the serializer
    assert one.combine_all([value], [(1, 2, (Decimal(4), 2), (1, "a"))]) == [(6, 2, (Decimal(4), 2), (1, "a"))]
    assert one.result(value) == [5, None, None, None]


def test_a_reader_knows_built_in_aggregators_by_name_and_a_users_own_if_it_is_given():
    class Size(Longest):
        def result(self, value):
            return len(value)

    fields = [
        Field("mean", "Avg(x)", "struct<sum:decimal(38,0),count:bigint>"),
        Field("last", "Last(x by at)", "struct<by:bigint,value:string>"),
        Field("own", "Size(x)", "string"),
    ]
    value = ((Decimal(3), 2), (1, "a"), "abc")
    assert results_of(fields, {}).result(value) == [1.5, "a", "abc"]
    assert results_of(fields, {"own": Size("x")}).result(value) == [1.5, "a", 3]


def test_an_own_aggregator_with_a_built_in_name_is_shown_as_it_is_stored():
    """A user's Avg that stores a plain double is not ours."""
    assert results_of([Field("mean", "Avg(x)", "double")], {}).result(1.5) == [1.5]


def test_every_native_combiner_is_covered_here():
    offered = [getattr(aggregators, name) for name in aggregators.__all__]
    kinds = {kind for kind in offered if isinstance(kind, type) and issubclass(kind, NativeCombiner)}
    elsewhere = {NativeCombiner, *SKETCHES}  # the interface, and what test_sketches.py covers
    assert {type(one) for one, *_ in NATIVE.values()} == kinds - elsewhere


@pytest.mark.parametrize("column", ["x", "x by count", "2, x by count"])
@pytest.mark.parametrize("by", ["value", "count"])
def test_a_reader_tells_top_values_from_counts_whatever_the_column_is_called(column, by):
    one = TopN(2, column, by=by, most=None if by == "value" else 5)
    field = Field("top", one.describe(), one.bind({column: "decimal(5,2)"}))
    value = reduce(one.combine, [one.init({column: Decimal(at)}) for at in (1, 3, 3)])
    reader = results_of([field], {})
    assert reader.result(value) == [one.result(value)]
    assert reader.aggregators[0].result_type(field.type) == one.result_type(field.type)


@pytest.mark.parametrize(
    ("one", "value"), [(StdDev("x"), (None, 0.0, 0.0)), (TopN(2, "x", by="count", most=5), ([1.0], [1, 2]))], ids=str
)
def test_a_value_that_a_reader_cannot_show_is_named_with_its_aggregator(one, value):
    field = Field("f", one.describe(), one.bind({"x": "double"}))
    with pytest.raises(AggregatorError, match=re.escape(f"{one}.result raised")) as caught:
        results_of([field], {}).result(value)
    assert pickle.loads(pickle.dumps(caught.value)).aggregator == str(one)


def test_a_count_of_a_star_says_how_rows_are_counted():
    with pytest.raises(ConfigurationError, match=r"counted by Count\(\), which counts rows"):
        Count("*")


def test_a_value_that_was_never_counted_is_not_taken_back_beside_one_that_comes():
    """Of a key that has nothing: 7 comes and 5 goes, which is 2 from no rows."""
    signed: Any = correctable({"s": Sum("x"), "a": Avg("x")}, ["s", "a"])
    total, mean = signed["s"], signed["a"]
    for one, nothing, held in ((total, None, 5), (mean, (None, 0), (5, 1))):
        (swapped,) = one.assemble([[2], [0], [2]])
        (came,) = one.assemble([[7], [1], [1]])
        (none,) = one.assemble([[None], [0], [0]])
        assert one.combine_all([held, None, None], [swapped, came, none])[0] in (7, (7, 1))
        for stored in (None, nothing):
            with pytest.raises(UsageError, match="would come to less than nothing"):
                one.combine_all([held, stored], [came, swapped])


def test_only_a_count_of_all_rows_since_the_begin_says_that_a_key_has_none():
    kept = {"s": Sum("x"), "n": Count()}
    fields = (Field("s", "Sum(x)", "bigint"), Field("n", "Count", "bigint"))
    for first, wanted in ((["s", "n"], None), (["s"], (30, 0))):
        signed = correctable(kept, first)
        assert signed["n"].describe() == "Count"
        assert Fields(fields, signed).combine_all([(35, 1)], [((-5, -1, True), -1)]) == [wanted]
