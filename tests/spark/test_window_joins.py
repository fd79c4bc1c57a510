"""Joins of two streams within a tumbling window, as docs/guides/joins.md has them.

They are held against nested loops over the raw rows, and against Spark's own join of the same files.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, contents

from mapstate import Collect, Count, Topology, errors, newStream, opaque, open_reader
from mapstate.protocol.ledgers import Ledgers
from mapstate.testing import crash_between

pytestmark = pytest.mark.spark

LENGTH, LAG = 10, 3
HOWS = ("inner", "left")
SIDES = ["views", "clicks"]
DIGITS = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"}


class Row(NamedTuple):
    side: str
    at: int | None
    ad: str | None
    number: int | None


Pair = tuple[int, str | None, int | None, int | None]
"""(window_end, ad, number of the view, number of the click)"""


def sides(rows: DataFrame) -> DataFrame:
    """What the windows keep of each row, as text."""
    return rows.select("at", "ad", "side", F.to_json(F.struct("number", "at"), DIGITS).alias("row"))


def joined(found: DataFrame, how: str, kind: str = "bigint") -> DataFrame:
    """The pairs of fired windows."""
    matches = F.when(F.col("ad").isNotNull(), F.col("clicks"))
    pairs = found.select("window_end", "ad", F.explode("views").alias("view"), matches.alias("clicks"))
    pairs = pairs.select("window_end", "ad", "view", (F.explode if how == "inner" else F.explode_outer)("clicks"))
    columns = {"view": F.from_json("view", f"number bigint, at {kind}", DIGITS)}
    columns["click"] = F.from_json("col", f"number bigint, at {kind}", DIGITS)
    return pairs.withColumns(columns).selectExpr("window_end", "ad", "view.number view", "click.number click")


def kept(most: int = 1000) -> dict[str, Collect]:
    """The aggregates of both sides."""
    return {side: Collect("row", most=most, where=f"side = '{side}'") for side in SIDES}


class Right:
    """What is right, from the rows of the batches that count: nested loops."""

    def __init__(self) -> None:
        self.kept: list[Row] = []
        self.late: list[Row] = []
        self.latest: dict[str, int] = {}
        self.mark: int | None = None

    def add(self, rows: list[Row]) -> dict[str, Counter[Pair]]:
        """The pairs of the windows that the batch fires."""
        before = self._floor()
        late = [row for row in rows if row.at is None or row.at < before]
        self.late += late
        self.kept += [row for row in rows if row not in late]
        for row in rows:
            if row.at is not None:
                self.latest[row.side] = max(row.at, self.latest.get(row.side, row.at))
        if len(self.latest) == len(SIDES):
            mark = min(self.latest.values()) - LAG
            self.mark = mark if self.mark is None else max(mark, self.mark)
        return {how: self._pairs(how, before, self._floor()) for how in HOWS}

    def _floor(self) -> int:
        return 0 if self.mark is None else self.mark - self.mark % LENGTH

    def _pairs(self, how: str, before: int, after: int) -> Counter[Pair]:
        pairs: Counter[Pair] = Counter()
        for view in self.kept:
            if view.side != "views" or not before < end_of(view) <= after:
                continue
            clicks = [
                click.number
                for click in self.kept
                if click.side == "clicks" and click.ad == view.ad is not None and end_of(click) == end_of(view)
            ]
            for click in clicks or ([None] if how == "left" else []):
                pairs[end_of(view), view.ad, view.number, click] += 1
        return pairs


def end_of(row: Row) -> int:
    assert row.at is not None
    return row.at - row.at % LENGTH + LENGTH


class Site:
    """A topology that joins views and clicks: what its functions got, and two states that follow."""

    def __init__(self, spark: SparkSession, url: str, most: int = 1000) -> None:
        self.spark, self.url = spark, url
        self.got: dict[str, list[Counter[Pair]]] = {how: [] for how in HOWS}
        self.topology = Topology("site")
        stream = self.topology.newStream("both", self.frame([]))
        options: Any = {"timestampField": "at", "lag": LAG, "inputs": {"side": SIDES}}
        windows = stream.tumblingWindow(LENGTH, **options).groupBy("ad")
        spec = partial(opaque, url, repeat="allowed")
        both = windows.persistentAggregate(spec("both"), **kept(most))
        both.lateStream().persistentAggregate(spec("late"), rows=Count())
        for how in HOWS:
            pairs = both.firedWindowsStream().transform(partial(joined, how=how))
            pairs.groupBy("window_end", "ad", "view", "click").persistentAggregate(spec(how), rows=Count())
            pairs.foreachBatch(partial(self._take, how))

    def _take(self, how: str, rows: DataFrame, _: int) -> None:
        self.got[how].append(Counter(map(tuple, rows.collect())))

    def frame(self, rows: list[Row]) -> DataFrame:
        return sides(self.spark.createDataFrame(rows, "side string, at bigint, ad string, number bigint"))

    def batch(self, batch_id: int, rows: list[Row]) -> None:
        self.topology(self.frame(rows), batch_id)

    def followed(self, how: str) -> dict[Pair, int]:
        return {key: value["rows"] for key, value in contents(self.url, how).items()}


COMMITS = {"before the commit": 1, "before the inner join's": 2, "before the left join's": 3}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_joined_rows_are_those_of_nested_loops(spark, each_url, monkeypatch, seed):
    """Drivers die at each commit; replays hold other rows, which count only where nothing was committed."""
    draw = random.Random(seed)
    site, right, now = Site(spark, each_url), Right(), 100
    total: dict[str, Counter[Pair]] = {how: Counter() for how in HOWS}
    for batch_id in range(7):
        now += draw.choice([0, 8, 14])
        while True:
            rows, replay = rows_of(draw, now), rows_of(draw, now)
            crash = draw.choice([None, *COMMITS])
            if crash is not None:
                with monkeypatch.context() as patch:
                    patch.setattr(Ledgers, "commit", dies_at(COMMITS[crash]))
                    with pytest.raises(KeyboardInterrupt):
                        site.batch(batch_id, rows)
            if crash != "before the commit":
                break
        fired = right.add(rows)
        site.batch(batch_id, rows if crash is None else replay)
        for how in HOWS:
            total[how] += fired[how]
            assert site.followed(how) == total[how]
            assert not fired[how] or site.got[how][-1] == fired[how]
        with open_reader(each_url, "late") as late:
            assert (late.get(()) or {"rows": 0})["rows"] == len(right.late)
    assert right.late
    assert max(total["inner"].values()) > 1  # equal rows
    alone = [pair for pair in total["left"] if pair not in total["inner"]]
    assert {None} < {ad for _, ad, _, _ in alone}


def rows_of(draw: random.Random, now: int) -> list[Row]:
    return [
        Row(
            draw.choice(SIDES),
            None if draw.random() < 0.05 else now + draw.randint(-18, 8),
            draw.choice(["x", "x", "x", "y", "y", "z", None]),
            draw.choice([1, 2, None]),
        )
        for _ in range(draw.choice([0, 16, 32]))
    ]


def dies_at(number: int) -> Any:
    """A `Ledgers.commit` that dies in its place at a call."""
    commit, calls = Ledgers.commit, iter(range(1, number + 1))

    def dying(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return commit(*arguments, **named)

    return dying


@pytest.mark.full
@pytest.mark.parametrize("store", ["sqlite", pytest.param("redis", marks=[pytest.mark.redis, pytest.mark.full])])
def test_a_join_of_windows_gives_what_sparks_own_join_gives(spark, request, tmp_path, store):
    """Inner and left, on the same files; each query fails twice and dies once between the two commits."""
    url = request.getfixturevalue("redis_url") if store == "redis" else f"sqlite:///{tmp_path}/state.db"
    draw = random.Random(7)
    for side in SIDES:
        put_files(draw, tmp_path / side)
    streams = {
        side: spark.readStream.schema("at timestamp, ad string, number bigint")
        .option("maxFilesPerTrigger", 1)
        .json(str(tmp_path / side))
        for side in SIDES
    }

    both = [sides(rows.withColumn("side", F.lit(side))) for side, rows in streams.items()]
    options: Any = {"timestampField": "at", "lag": "30 minutes", "inputs": {"side": SIDES}}
    windows = newStream("both", both[0].union(both[1])).tumblingWindow("1 hour", **options).groupBy("ad")
    state = windows.persistentAggregate(opaque(url, "both"), **kept())
    fails = Fails(1, 3)
    state.firedWindowsStream().foreachBatch(fails)
    for how in HOWS:
        keep(state.firedWindowsStream().transform(partial(joined, how=how, kind="timestamp")), url, how)
    run(state, tmp_path / "windows", fails)

    hour = F.window("at", "1 hour").alias("hour")
    views, clicks = (streams[side].withWatermark("at", "30 minutes").select("*", hour).drop("at") for side in SIDES)
    right = clicks.select("ad", "hour", F.col("number").alias("click"))
    for how in HOWS:
        rows = views.join(right, ["ad", "hour"], how).selectExpr("hour.end window_end", "ad", "number view", "click")
        state, fails = keep(newStream(how, rows), url, f"spark-{how}"), Fails(1, 3)
        state.newValuesStream().foreachBatch(fails)
        run(state, tmp_path / f"spark-{how}", fails)

    for how in HOWS:
        of_windows, of_spark = contents(url, how), contents(url, f"spark-{how}")
        assert of_windows == {key: rows for key, rows in of_spark.items() if key[1] != "end"}
        assert of_windows
    assert {key[1] for key in contents(url, "left")} == {"x", "y", "zviews", None}


def put_files(draw: random.Random, folder: Path) -> None:
    """Six files of a side with times out of order, within the lag, and a row that ends all windows."""
    folder.mkdir()
    start = dt.datetime(2026, 11, 22, 10, tzinfo=dt.UTC)
    for number in range(7):
        rows = [
            (start + dt.timedelta(minutes=20 * number, microseconds=draw.randrange(29 * 60_000_000)), ad)
            for ad in draw.choices(["x", "y", "z" + folder.name, None], k=8)
        ]
        if number == 6:
            rows = [(start + dt.timedelta(days=1), "end")]
        lines = [{"at": at.isoformat(), "ad": ad, "number": draw.randrange(4)} for at, ad in rows]
        file = folder / f"{number}.json"
        file.write_text("\n".join(map(json.dumps, lines)))
        os.utime(file, (number, number))  # Spark reads the oldest one first


def keep(rows: Any, url: str, name: str) -> Any:
    columns = ("window_end", "ad", "view", "click")
    return rows.groupBy(*columns).persistentAggregate(opaque(url, name), rows=Count())


class Fails:
    """A function that fails at some of its calls, which count from 1."""

    def __init__(self, *calls: int) -> None:
        self._fails = set(calls)
        self._calls = 0

    def __call__(self, _: DataFrame, batch_id: int) -> None:
        self._calls += 1
        if self._calls in self._fails:
            raise RuntimeError("fails here")

    @property
    def left(self) -> int:
        """How often it is still to fail."""
        return sum(call > self._calls for call in self._fails)


def run(state: Any, checkpoint: Path, fails: Fails) -> None:
    while fails.left:
        with pytest.raises(StreamingQueryException, match="fails here"):
            state.start(str(checkpoint), trigger=AVAILABLE).awaitTermination(120)
    state.start(str(checkpoint), trigger=AVAILABLE).awaitTermination(120)
    crash_between(checkpoint)
    state.start(str(checkpoint), trigger=AVAILABLE).awaitTermination(120)


def test_a_silent_side_holds_the_join_back_and_makes_no_row_late(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    site = Site(spark, url)
    for batch_id in range(3):
        site.batch(batch_id, [Row("views", 5 + 100 * batch_id, "x", batch_id)])
    assert site.got == {"inner": [], "left": []}
    site.batch(3, [Row("clicks", 6, "x", 7), Row("clicks", 150, "x", 8)])
    assert site.got == {
        "inner": [Counter([(10, "x", 0, 7)])],
        "left": [Counter([(10, "x", 0, 7), (110, "x", 1, None)])],
    }
    with open_reader(url, "both") as state:
        assert [report.rows_late for report in state.reports()] == [0] * 4


def test_a_click_that_comes_after_its_side_was_idle_is_late(spark, tmp_path, monkeypatch):
    url, clock = f"sqlite:///{tmp_path}/state.db", [1_000_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0] * 1_000_000_000)
    monkeypatch.setattr("mapstate.spark.driver.event_time._ticks", lambda: clock[0] * 1_000_000)
    schema = "side string, at timestamp, ad string, number bigint"
    options: Any = {"timestampField": "at", "inputs": {"side": SIDES}, "idle": "1 second"}
    windows = newStream("both", sides(spark.createDataFrame([], schema))).tumblingWindow("1 minute", **options)
    state = windows.groupBy("ad").persistentAggregate(opaque(url, "both"), **kept())
    got: list[Any] = []
    pairs = state.firedWindowsStream().transform(partial(joined, how="left", kind="timestamp"))
    pairs.foreachBatch(lambda rows, _: got.extend((row.view, row.click) for row in rows.collect()))
    late: list[str] = []
    state.lateStream().foreachBatch(lambda rows, _: late.extend(row.side for row in rows.collect()))
    batches: list[tuple[int, list[tuple[str, int, int]]]] = [
        (0, [("clicks", 0, 1), ("views", 0, 2)]),
        (90, [("views", 30, 3), ("views", 90, 4)]),
        (91, [("clicks", 31, 5)]),
    ]
    for batch_id, (seconds, rows) in enumerate(batches):
        clock[0] = 1_000_000_000 + seconds
        made = [(side, dt.datetime.fromtimestamp(1_000_000_000 + at, dt.UTC), "x", number) for side, at, number in rows]
        state(sides(spark.createDataFrame(made, schema)), batch_id)
    assert got == [(2, 1), (3, None)]
    assert late == ["clicks"]


def test_a_side_above_its_bound_ends_the_batch_until_the_bound_is_raised(spark, each_url):
    rows = [Row("views", 5, "x", 1)] + [Row("clicks", 5, "x", number) for number in range(3)]
    for batch_id in range(2):
        Site(spark, each_url, most=3).batch(batch_id, rows[batch_id * 4 :])
    more = [Row("clicks", 6, "x", 3), Row("clicks", 6, "y", 4)]
    for _ in range(2):
        with pytest.raises(errors.ValueOverflowError, match=r"a key has 4 values, and at most 3 fit \(most=\)"):
            Site(spark, each_url, most=3).batch(2, more)
    with open_reader(each_url, "both") as state:
        assert [len(window.value["clicks"]) for window in state.windows("x")] == [3]
        assert state.windows("y") == []
    site = Site(spark, each_url, most=4)
    site.batch(2, more)
    site.batch(3, [Row(side, 50, "end", 0) for side in SIDES])
    assert site.got["inner"] == [Counter((10, "x", 1, number) for number in range(4))]
