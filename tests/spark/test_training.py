"""Training sets: `pointInTime`, `rollingFeatures` and ``multi_get(keys, at=times)`` against brute force over rows."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rolled import floor

from mapstate import (
    LIFETIME,
    Avg,
    CombinerAggregator,
    Count,
    LastN,
    Max,
    RollingWindows,
    Sum,
    newStream,
    opaque,
    open_reader,
)
from mapstate.spark import newStaticState, pointInTime, rollingFeatures

pytestmark = pytest.mark.spark

SECOND = 1_000_000
WINDOWS: tuple[Any, ...] = ((20, 5), (120, 20), LIFETIME)


class Row(NamedTuple):
    """``at`` is a number, also where times are timestamps."""

    at: int | None
    user: str | None
    n: int | None


class Names(CombinerAggregator):
    """A user's own: all values of the rows, which go through Python. Its result is another than what is stored."""

    def init(self, row: Any) -> Any:
        return [row["n"] or 0]

    def combine(self, a: Any, b: Any) -> Any:
        return sorted(a + b)

    def zero(self) -> Any:
        return []

    def result(self, value: Any) -> Any:
        return ",".join(map(str, sorted(value)))

    def result_type(self, value_type: str) -> str:
        return "string"


class Site:
    """A state with rolling windows, and the rows that it has got."""

    def __init__(self, spark: SparkSession, url: str, kind: str = "bigint", **options: Any) -> None:
        self.spark, self.url, self.kind = spark, url, kind
        self.scale = 1 if kind == "bigint" else SECOND
        self.own: dict[str, Any] = options.pop("own", {})
        self.offset = options.get("startTime", 0) * self.scale
        self.aggregates = {
            "rows": Count(),
            "total": Sum("n"),
            "most": Max("n", where="n < 7"),
            "mean": Avg(F.col("n") * 2),
            "newest": LastN("n", 2, by="at"),
            **self.own,
        }
        self.windows = RollingWindows.of(
            *(
                one if one == LIFETIME or kind == "bigint" else tuple(f"{span} seconds" for span in one)
                for one in WINDOWS
            )
        )
        spans = {name: self.span(options[name]) for name in ("startTime", "lag", "retention") if name in options}
        rolling = newStream("clicks", self.frame([])).window(self.windows, timestampField="at", **spans)
        self.kept = rolling.groupBy("user").persistentAggregate(opaque(url, "s"), **self.aggregates)
        self.startTime = spans.get("startTime", 0)
        self.rows: list[Row] = []
        self.batch_id = 0

    def span(self, number: int) -> Any:
        return number if self.kind == "bigint" else f"{number} seconds"

    def timed(self, rows: list[Any], schema: str) -> DataFrame:
        """Rows whose time, the first column, is a number."""
        given = self.spark.createDataFrame(rows, schema)
        time = F.col(given.columns[0])
        return given if self.kind == "bigint" else given.withColumn(given.columns[0], F.timestamp_micros(time))

    def frame(self, rows: list[Row]) -> DataFrame:
        return self.timed(rows, "at bigint, user string, n bigint")

    def batch(self, *rows: Row) -> None:
        self.kept(self.frame(list(rows)), self.batch_id)
        self.rows += rows
        self.batch_id += 1

    def right(self, user: str | None, at: int | None) -> dict[str, Any] | None:
        """Each row is looked at. None where there is no time, or no row of the key."""
        own = [row for row in self.rows if row.user == user and row.at is not None]
        if at is None or not own:
            return None
        end = floor(at, 5 * self.scale, self.offset)
        found: dict[str, Any] = {}
        for window in WINDOWS:
            name, rows = window, [row for row in own if row.at is not None and row.at < end]
            assert all(row.at is not None and row.at < at for row in rows)  # none of the label's own future
            if window != LIFETIME:
                length, resolution = (span * self.scale for span in window)
                name = str(window[0]) if self.kind == "bigint" else f"{window[0]}_seconds"
                low = floor(end - length, resolution, self.offset)
                rows = [row for row in rows if row.at is not None and row.at >= low]
            numbers = [row.n for row in rows if row.n is not None]
            found[f"rows_{name}"] = len(rows)
            found[f"total_{name}"] = sum(numbers) if numbers else None
            found[f"most_{name}"] = max((n for n in numbers if n < 7), default=None)
            found[f"mean_{name}"] = 2 * sum(numbers) / len(numbers) if numbers else None
            found[f"newest_{name}"] = [row.n for row in sorted(rows, key=lambda row: -(row.at or 0))[:2]]
            if self.own:
                found[f"names_{name}"] = ",".join(map(str, sorted(row.n or 0 for row in rows)))
        return found

    def columns(self) -> list[str]:
        return list(self.right(*next((row.user, row.at) for row in self.rows if row.at is not None)) or {})


def drawn(site: Site, draw: random.Random, low: int, high: int, count: int = 40) -> list[Row]:
    """Rows at any microsecond; each time is of one row, so that the newest ones are known."""
    times = draw.sample(range(low * site.scale, high * site.scale), count)
    return [Row(at, draw.choice("xyz"), draw.choice([None, *range(-5, 10)])) for at in times]


CASES: list[Any] = [
    ("bigint", {"startTime": 3, "retention": 500}),
    ("bigint", {"own": {"names": Names()}, "retention": 500, "lag": 30}),
    ("timestamp", {"retention": 400}),
    pytest.param("timestamp", {"own": {"names": Names()}, "startTime": 7, "retention": 400}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_training_sets_are_those_of_brute_force(spark, tmp_path, kind, options):
    site, draw = Site(spark, f"sqlite:///{tmp_path}/s.db", kind, **options), random.Random(str(options))
    site.batch(*drawn(site, draw, -300, -100), Row(None, "x", 3), Row(-200 * site.scale, None, 4))
    site.batch(*drawn(site, draw, -100, 60))
    site.batch(*drawn(site, draw, -320, 60), Row(60 * site.scale, "x", 2))  # most of them late
    unit = 5 * site.scale
    edges = [floor(row.at, unit, site.offset) for row in draw.sample(site.rows, 12) if row.at is not None]
    edges += [row.at for row in draw.sample(site.rows, 12) if row.at is not None]
    times = [edge + by for edge in edges for by in (-1, 0, 1)] + [0, -1, 1, 70 * site.scale, 10**9 * site.scale]
    asked: list[Any] = [(at, draw.choice(["x", "y", "z", "nobody", None]), place) for place, at in enumerate(times)]
    asked += [asked[0], asked[0], (None, "x", 1000), (None, "nobody", 1001)]
    queries = site.timed(asked, "labelled_at bigint, user string, label int").repartition(3)

    names = site.columns()
    expected = [(label, site.right(user, at)) for at, user, label in asked]
    right = sorted((label, str([row and row[name] for name in names])) for label, row in expected)
    assert len({row for _, row in right}) > 20

    def of(found: DataFrame) -> list[Any]:
        assert found.columns[:3] == queries.columns
        assert sorted(found.columns[3:]) == sorted(names)
        rows = found.select("label", *names).collect()
        return sorted((row.label, str([row[name] for name in names])) for row in rows)

    state = newStaticState(opaque(site.url, "s"), aggregators=site.own)
    assert of(pointInTime(queries, state, keys="user", at="labelled_at")) == right
    assert of(pointInTime(queries, site.kept, keys=["user"], at="labelled_at")) == right
    features = rollingFeatures(
        site.frame(site.rows),
        queries,
        site.windows,
        keys=["user"],
        timestampField="at",
        at="labelled_at",
        startTime=site.startTime,
        **site.aggregates,
    )
    assert of(features) == right
    with open_reader(site.url, "s", aggregators=site.own) as reader:
        timed = [(at, user, label) for at, user, label in asked if at is not None]
        micros = dt.timedelta(microseconds=1)
        epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
        at: list[Any] = [one if kind == "bigint" else epoch + one * micros for one, _, _ in timed]
        served = reader.multi_get([(user,) for _, user, _ in timed], at=at)
        assert served == [site.right(user, at) for at, user, _ in timed]
