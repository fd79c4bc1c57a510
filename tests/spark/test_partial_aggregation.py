"""Rows that are aggregated behind the shuffle alone: where that is chosen, and that it counts the same."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from itertools import product
from typing import Any

import pyspark
import pytest
from spark_fixtures import contents

from mapstate import Count, Max, ReducerAggregator, Sum, TumblingDurationWindow, newStream, opaque
from mapstate.spark.driver import state
from mapstate.spark.driver.apply import Grouping

pytestmark = pytest.mark.spark

TWICE, ONCE = True, False


class SumInPython(ReducerAggregator):
    """Its tasks get the rows of a key, whatever Spark could aggregate."""

    value_type = "bigint"

    def columns(self) -> list[str]:
        return ["n"]

    def init(self) -> int:
        return 0

    def reduce(self, value: int, row: Any) -> int:
        return value + row["n"]


@pytest.fixture
def plans(monkeypatch):
    """The plan of each batch, as Spark has made it."""
    kept: list[str] = []
    grouped = Grouping.of

    def keep(self: Grouping, batch_df: Any) -> Any:
        rows = grouped(self, batch_df)
        kept.append(rows._jdf.queryExecution().executedPlan().toString())
        return rows

    monkeypatch.setattr(Grouping, "of", keep)
    return kept


KEYS: dict[str, list[Any]] = {
    "string": [None, "", "a", "b|c", "é"],
    "bigint": [None, 0, -1, 2**53 + 1],
    "date": [None, dt.date(1970, 1, 1), dt.date(2026, 11, 29)],
    "double": [None, 0.0, -0.0, float("nan"), 1.5],
}


@pytest.mark.parametrize("small_in_a_row", [state.SMALL_IN_A_ROW, 0], ids=["executors", "driver"])
@pytest.mark.parametrize(
    "types", [("string",), ("string", "bigint"), ("date", "string"), ("double", "string")], ids=str
)
def test_each_key_is_in_one_task_and_counts_what_its_rows_are(
    spark, tmp_path, monkeypatch, plans, types, small_in_a_row
):
    monkeypatch.setattr(state, "SMALL_IN_A_ROW", small_in_a_row)
    keys = [*product(*(KEYS[kind] for kind in types))]
    rows = [(*keys[i * i % len(keys)], i) for i in range(400)]
    names = [f"k{i}" for i in range(len(types))]
    schema = ", ".join([*(f"{name} {kind}" for name, kind in zip(names, types, strict=True)), "n bigint"])
    frame = spark.createDataFrame(rows, schema).repartition(5)
    url = f"sqlite:///{tmp_path}/state.db"
    reports: list[Any] = []
    found = {}
    for how in ("always", "never"):
        spec = opaque(url, how, partial_aggregation=how)
        job = (
            newStream("rows", frame).groupBy(*names).persistentAggregate(spec, n=Count(), total=Sum("n"), most=Max("n"))
        )
        job.on_batch(reports.append)
        for batch_id in range(2):
            job(frame, batch_id)
        found[how] = {repr(key): value for key, value in contents(url, how).items()}
    assert found["never"] == found["always"]
    groups = Counter(repr(tuple(0.0 if value == 0 else value for value in row[:-1])) for row in rows)
    assert sorted(value["n"] for value in found["never"].values()) == sorted(2 * count for count in groups.values())
    assert {report.keys_written for report in reports} == {len(groups)}
    # Spark would shuffle rows with keys of floating point twice.
    skips = "double" not in types
    assert [report.partial_aggregation for report in reports] == [TWICE, TWICE, not skips, not skips]
    for plan, partials in ((plans[0], 1), (plans[-1], 0 if skips else 1)):
        behind, *before = plan.split("Exchange hashpartitioning")
        assert [text.count("[partial_") for text in before] == [partials]
        # Two steps with no shuffle between them are one since Spark 4.3.
        assert behind.count("[partial_") == (not partials and pyspark.__version__ < "4.3")


def test_windows_and_aggregators_in_python_count_the_same(spark, tmp_path):
    hour = dt.datetime(2026, 11, 29, 10, tzinfo=dt.UTC)
    rows = [(f"k{i % 7}", i, None if i % 11 == 0 else hour + dt.timedelta(minutes=i % 150)) for i in range(300)]
    frame = spark.createDataFrame(rows, "k string, n bigint, at timestamp").repartition(4)
    url = f"sqlite:///{tmp_path}/state.db"
    reports: list[Any] = []

    def counted(name: str, how: Any) -> Any:
        job: Any
        stream = newStream("rows", frame)
        if name == "windows":
            windows = stream.window(TumblingDurationWindow.of("1 hour"), timestampField="at").groupBy("k")
            job = windows.persistentAggregate(opaque(url, f"{name}-{how}", partial_aggregation=how), n=Count())
        else:
            spec = opaque(url, f"{name}-{how}", partial_aggregation=how)
            job = stream.groupBy("k").persistentAggregate(spec, n=Count(), total=SumInPython())
        job.on_batch(reports.append)
        job(frame, 0)
        return contents(url, f"{name}-{how}")

    for name, skips in (("windows", True), ("python", False)):
        assert counted(name, "never") == counted(name, "always") != {}
        assert [report.partial_aggregation for report in reports[-2:]] == [not skips, TWICE]
        assert reports[-1].rows == reports[-2].rows
        assert reports[-1].keys_written == reports[-2].keys_written


class Job:
    """A state whose batches have so many rows, of so many keys, and one key with more rows."""

    def __init__(self, spark: Any, url: str) -> None:
        self._spark = spark
        self._url = url
        rows = newStream("rows", spark.createDataFrame([], "k bigint")).groupBy("k")
        self._state = rows.persistentAggregate(opaque(url, "s", apply_on="executors"), n=Count())
        self._state.on_batch(lambda report: self.plans.append(report.partial_aggregation))
        self._counts: Counter[int] = Counter()
        self._batches = 0
        self.plans: list[bool] = []

    def batch(self, rows: int, keys: int, hot: int = 0) -> None:
        frame = self._spark.range(rows + hot).selectExpr(f"CASE WHEN id < {rows} THEN id % {keys} ELSE 0 END AS k")
        self._state(frame.repartition(3), self._batches)
        self._batches += 1
        self._counts.update(i % keys for i in range(rows))
        self._counts[0] += hot

    def check(self) -> None:
        assert {key: value["n"] for (key,), value in contents(self._url, "s").items()} == self._counts


@pytest.fixture
def four_tasks(spark, monkeypatch):
    monkeypatch.setattr(state, "MANY_ROWS", 50)
    settings = {"spark.sql.adaptive.enabled": "false", "spark.sql.shuffle.partitions": "4"}
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


LARGE = (300, 100)


@pytest.mark.parametrize(
    ("other", "stays"),
    [
        pytest.param((180, 60), True, id="somewhat fewer rows"),
        pytest.param((500, 100), True, id="somewhat more rows of a key"),
        pytest.param((100, 50), False, id="few rows"),
        pytest.param((1000, 100), False, id="many rows of a key"),
        pytest.param((400, 400, 1900), False, id="a key with most of the rows"),
    ],
)
def test_the_driver_changes_over_behind_three_batches_and_back_behind_another_one(
    spark, four_tasks, tmp_path, other, stays
):
    job = Job(spark, f"sqlite:///{tmp_path}/state.db")
    for sizes in (LARGE, LARGE, (100, 50), LARGE, LARGE, LARGE, other, LARGE, LARGE, LARGE, LARGE):
        job.batch(*sizes)
    behind = [ONCE] * 4 if stays else [TWICE, TWICE, TWICE, ONCE]
    assert job.plans == [*[TWICE] * 6, ONCE, *behind]
    job.check()


def test_batches_at_a_bound_do_not_change_the_plan_each_time(spark, four_tasks, tmp_path):
    job = Job(spark, f"sqlite:///{tmp_path}/state.db")
    for i in range(9):
        job.batch(210 - 20 * (i % 2) if i > 2 else 210, 70)
    assert job.plans == [*[TWICE] * 3, *[ONCE] * 6]
    job.check()
