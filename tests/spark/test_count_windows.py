"""Windows by number of rows on real Spark, held against brute force over the raw rows."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest
from cases import full
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from mapstate import (
    Avg,
    Collect,
    CombinerAggregator,
    Count,
    ReducerAggregator,
    SlidingCountWindow,
    Sum,
    TumblingCountWindow,
    errors,
    newStream,
    opaque,
    transactional,
)
from mapstate.protocol.ledgers import Ledgers
from mapstate.reader import open_reader
from mapstate.spark import stateQuery
from mapstate.spark.driver.state import StateDriver
from mapstate.windows import CountWindow

pytestmark = pytest.mark.spark

Input = tuple[int, str | None, int | None]
Fired = dict[tuple[str | None, int], tuple[int, int, int | None]]


class Text(ReducerAggregator):
    """The ``at`` of rows in the order in which they came; a value without a Spark type."""

    def init(self) -> Any:
        return []

    def reduce(self, acc: Any, row: Any) -> Any:
        acc.append(row["at"])
        return acc


class Longest(CombinerAggregator):
    def init(self, row: Any) -> Any:
        return {"n": row["n"] or 0}

    def combine(self, a: Any, b: Any) -> Any:
        return max(a, b, key=lambda one: one["n"])


@pytest.fixture
def url(each_url: str) -> str:
    return each_url


def frame(spark: SparkSession, rows: list[Input]) -> DataFrame:
    return spark.createDataFrame(rows, "at bigint, user string, n bigint").repartition(3)


def dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def right(rows: list[Input], length: int, slide: int) -> Fired:
    """Every window that has ended, from all rows that count: (user, end) -> (start, rows, sum)."""
    found: Fired = {}
    for user in {row[1] for row in rows}:
        own = [n for _, key, n in rows if key == user]
        for end in range(slide, len(own) + 1, slide):
            held = own[max(0, end - length) : end]
            known = [n for n in held if n is not None]
            found[user, end] = max(0, end - length), len(held), sum(known) if known else None
    return found


@pytest.mark.parametrize(
    ("length", "slide"),
    [(5, 2), *(full(*of) for of in ((2, 3), (3, 3), (4, 2)))],
)
def test_windows_by_count_are_right_whatever_crashes(spark, url, monkeypatch, length, slide):
    draw = random.Random(length * 10 + slide)
    got: list[Fired] = []

    def take(rows: DataFrame, _: int) -> None:
        assert rows.columns == ["window_start", "window_end", "user", "rows", "total"]
        found = rows.collect()
        got.append({(row.user, row.window_end): (row.window_start, row.rows, row.total) for row in found})
        assert len(got[-1]) == len(found)

    stream = newStream("clicks", frame(spark, [])).window(CountWindow(length, slide), orderBy="at").groupBy("user")
    counts = stream.persistentAggregate(opaque(url, "last", repeat="allowed"), rows=Count(), total=Sum("n"))
    counts.firedWindowsStream().foreachBatch(take)
    counts.firedWindowsStream().persistentAggregate(opaque(url, "fired"), windows=Count(), total=Sum("total"))
    counted: list[Input] = []
    for batch_id in range(5):
        while True:
            rows: list[Input] = [
                (at, draw.choice(["x", "y", None]), draw.choice([None, 1, 5, 7]))
                for at in range(draw.choice([0, 5, 12]))
            ]
            crash = draw.choice(["", "before the commit", "behind it"])
            if crash != "before the commit":
                break
            with monkeypatch.context() as patch:
                patch.setattr(Ledgers, "commit", dies)
                with pytest.raises(KeyboardInterrupt):
                    counts(frame(spark, rows), batch_id)
        before = right(counted, length, slide)
        counted += rows
        new = {key: value for key, value in right(counted, length, slide).items() if key not in before}
        if crash == "behind it":
            with monkeypatch.context() as patch:
                patch.setattr(StateDriver, "emit", dies)
                with pytest.raises(KeyboardInterrupt):
                    counts(frame(spark, rows), batch_id)
        got.clear()
        counts(frame(spark, rows), batch_id)
        counts(frame(spark, rows), batch_id)
        assert got == [new, new]
    every = right(counted, length, slide)
    with open_reader(url, "fired") as reader:
        sums = [total for *_, total in every.values() if total is not None]
        assert every
        assert reader.get(()) == {"windows": len(every), "total": sum(sums)}
    with open_reader(url, "last") as reader:
        for user in ("x", "y", None):
            own = [n for _, key, n in counted if key == user]
            value = reader.get(user)["windows"]
            assert value["rows"] == len(own)
            for window in value["fired"]:
                assert every[user, window["window_end"]] == (window["window_start"], window["rows"], window["total"])
            for window in value["open"]:
                held = own[window["window_start"] :]
                known = [n for n in held if n is not None]
                assert window["window_end"] > len(own)
                assert (window["rows"], window["total"]) == (len(held), sum(known) if known else None)


def test_a_reducer_gets_the_rows_of_a_tumbling_window_in_order(spark, url):
    rows: list[Input] = [(at, "x", at) for at in range(7)]
    stream = newStream("clicks", frame(spark, [])).window(TumblingCountWindow.of(3), orderBy=["at"])
    last = stream.persistentAggregate(opaque(url, "last"), ats=Text())
    fired: list[tuple[Any, ...]] = []
    last.firedWindowsStream().foreachBatch(lambda found, _: fired.extend(map(tuple, found.collect())))
    last(frame(spark, rows[::-1]), 0)
    assert fired == [(0, 3, "[0,1,2]"), (3, 6, "[3,4,5]")]
    last(frame(spark, rows[:2]), 1)
    assert fired[2:] == [(6, 9, "[6,0,1]")]
    with open_reader(url, "last") as reader:
        window = {"window_start": 6, "window_end": 9, "ats": [6, 0, 1]}
        assert reader.get(()) == {"windows": {"rows": 9, "fired": [window], "open": []}}


def test_values_of_every_kind_without_an_order(spark, url):
    rows = frame(spark, [(at, "x", at) for at in range(9)])
    rows = rows.withColumn("price", F.col("n").cast("decimal(10,2)")).withColumn("share", F.lit(float("nan")))
    config = SlidingCountWindow.of(4, 2)
    last = (
        newStream("clicks", rows)
        .window(config)
        .persistentAggregate(
            opaque(url, "last"),
            price=Sum("price"),
            mean=Avg("n"),
            share=Sum("share"),
            ns=Collect("n", most=9),
            top=Longest(),
        )
    )
    fired: list[Any] = []
    last.firedWindowsStream().foreachBatch(lambda found, _: fired.extend(found.collect()))
    last(rows, 0)
    assert [row.window_end for row in fired] == [2, 4, 6, 8]
    for row in fired:
        assert row.price == sum(map(Decimal, row.ns))
        assert row.mean == sum(row.ns) / len(row.ns)
        assert row.share != row.share
        assert row.top == f'{{"n":{max(row.ns)}}}'
    with open_reader(url, "last") as reader:
        assert reader.get(())["windows"]["open"] is None
    with open_reader(url, "last", aggregators={"top": Longest()}) as reader:
        assert [window["window_end"] for window in reader.get(())["windows"]["open"]] == [10, 12]


def test_a_value_without_a_type_is_text_in_a_column_of_every_reader(spark, url):
    rows = frame(spark, [(at, "x", at) for at in range(5)])
    stream = newStream("clicks", rows).window(TumblingCountWindow.of(3), orderBy=["at"]).groupBy("user")
    aggregators = {"ats": Text(), "of `many`: a, b": Longest()}
    last = stream.persistentAggregate(opaque(url, "last"), **aggregators)
    last(rows, 0)
    ended = {"window_start": 0, "window_end": 3, "ats": [0, 1, 2], "of `many`: a, b": {"n": 2}}
    filling = {"window_start": 3, "window_end": 6, "ats": [3, 4], "of `many`: a, b": {"n": 4}}
    windows = {"rows": 5, "fired": [ended], "open": [filling]}
    texts = {
        "rows": 5,
        "fired": [ended | {"ats": "[0,1,2]", "of `many`: a, b": '{"n":2}'}],
        "open": [filling | {"ats": "[3,4]", "of `many`: a, b": '{"n":4}'}],
    }
    for given in ({}, aggregators):
        with open_reader(url, "last", aggregators=given) as reader:
            assert reader.get("x") == {"windows": windows}
            assert reader.to_arrow().to_pylist() == [{"user": "x", "windows": texts}]
    for state in (last, opaque(url, "last")):
        (found,) = stateQuery(rows.limit(1), state, "user").select("windows").collect()
        assert found.windows.asDict(recursive=True) == texts
    if not url.startswith("memory"):
        (found,) = spark.read.format("mapstate").options(url=url, state="last").load().collect()
        assert found.asDict(recursive=True) == {"user": "x", "windows": texts}


def test_what_windows_by_count_refuse(spark, url):
    stream = newStream("clicks", frame(spark, []))
    with pytest.raises(errors.ConfigurationError, match="orderBy"):
        stream.window(TumblingCountWindow.of(3), lag="1 second")  # type: ignore[call-overload]
    with pytest.raises(errors.ConfigurationError, match="orderBy"):
        stream.tumblingWindow(3, timestampField="at", orderBy=["at"])  # type: ignore[call-arg]
    for length, slide in ((0, 1), (1, 0), (1.5, 1), (2000, 1)):
        with pytest.raises(errors.ConfigurationError):
            SlidingCountWindow.of(length, slide)
    sliding = stream.window(SlidingCountWindow.of(3, 1))
    with pytest.raises(errors.ConfigurationError, match="reducer"):
        sliding.persistentAggregate(opaque(url, "last"), ats=Text())
    with pytest.raises(errors.ConfigurationError, match="name of a built-in"):
        sliding.persistentAggregate(opaque(url, "last"), rows=type("Count", (Count,), {"__module__": __name__})())
    with pytest.raises(errors.ConfigurationError, match="opaque"):
        sliding.persistentAggregate(transactional(url, "last"), rows=Count())
    with pytest.raises(errors.UnknownColumnError):
        stream.window(SlidingCountWindow.of(3, 1), orderBy=["no"]).persistentAggregate(opaque(url), rows=Count())
