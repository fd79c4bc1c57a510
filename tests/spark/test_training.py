"""Training sets: `pointInTime`, `rollingFeatures` and ``multi_get(keys, at=times)`` against brute force over rows."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
from cases import full
from every_store import AEROSPIKE, FULL, REDIS, url_of
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rolled import floor

from mapstate import (
    LIFETIME,
    ApproxCountDistinct,
    ArgMax,
    ArgMin,
    Avg,
    BoolAnd,
    BoolOr,
    Collect,
    CombinerAggregator,
    Count,
    CountDistinct,
    First,
    Last,
    LastN,
    Max,
    ReducerAggregator,
    RollingWindows,
    StdDev,
    Sum,
    TopN,
    VariancePop,
    errors,
    newStream,
    opaque,
    open_reader,
)
from mapstate.protocol.ledger_record import encode_ledger
from mapstate.reader.committed import CommittedReads
from mapstate.spark import newStaticState, pointInTime, rollingFeatures
from mapstate.spark.executor.error_text import mapstate_error
from mapstate.spark.executor.training_task import PlannedState

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("small_batches")]

SECOND = 1_000_000
WINDOWS: tuple[Any, ...] = ((20, 5), (120, 20), LIFETIME)


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """A key's rows are of several Arrow batches."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "7")
    yield
    spark.conf.set(name, before or "10000")


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
        self.windows = RollingWindows.of(*(one if one == LIFETIME else tuple(map(self.span, one)) for one in WINDOWS))
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
    taken = {row.at for row in site.rows}
    times = [at for at in draw.sample(range(low * site.scale, high * site.scale), count) if at not in taken]
    return [Row(at, draw.choice("xyz"), draw.choice([None, *range(-5, 10)])) for at in times]


CASES: list[Any] = [
    full("bigint", {"startTime": 3, "retention": 500}),
    ("bigint", {"own": {"names": Names()}, "retention": 500, "lag": 30}),
    full("timestamp", {"retention": 400}),
    ("timestamp", {"own": {"names": Names()}, "startTime": 7, "retention": 400}),
]


@pytest.fixture(params=[FULL[1], REDIS, FULL[2], AEROSPIKE])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind that the workers reach, empty."""
    return url_of(request, tmp_path)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_training_sets_are_those_of_brute_force(spark, url, kind, options):
    site, draw = Site(spark, url, kind, **options), random.Random(str(options))
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

    state = newStaticState(opaque(site.url, "s", chunk_size=3), aggregators=site.own)
    assert of(pointInTime(queries, site.kept if site.own else state, keys="user", at="labelled_at")) == right
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


@pytest.fixture(scope="module")
def site(spark: SparkSession, tmp_path_factory: Any) -> Site:
    """Of numbers; times from 75 on can be asked for. The last test with it goes on with it."""
    made = Site(spark, f"sqlite:///{tmp_path_factory.mktemp('site')}/s.db", retention=25)
    made.batch(Row(60, "x", 1), Row(64, "y", 2))
    made.batch(Row(100, "x", 3))
    made.batch(Row(104, "x", 4))
    return made


def labels(site: Site, *rows: Any) -> DataFrame:
    return site.timed([*rows], "labelled_at bigint, user string")


def test_columns_are_chosen_and_renamed(site):
    asked = labels(site, (101, "x"), (95, "x"))

    def ask(frame: DataFrame, columns: Any) -> DataFrame:
        return pointInTime(frame, site.kept, keys="user", at="labelled_at", columns=columns)

    some = ask(asked, ["rows_20", "total_lifetime"])
    assert sorted(map(tuple, some.collect())) == [(95, "x", 0, 1), (101, "x", 0, 1)]
    named = ask(asked, {"rows_lifetime": "n"})
    assert named.columns == ["labelled_at", "user", "n"]
    assert sorted(map(tuple, ask(named, {"total_20": "m"}).collect())) == [(95, "x", 1, None), (101, "x", 1, None)]
    assert ask(asked, []).count() == 2


def test_a_task_reads_each_record_once_and_refuses_times_that_are_gone(site, monkeypatch):
    with open_reader(site.url, "s") as reader:
        ledger = encode_ledger(reader.ledger())
    state = PlannedState(opaque(site.url, "s"), ledger=ledger, columns=("rows_lifetime",)).open(None)
    asked: list[Any] = []
    read = CommittedReads.read
    monkeypatch.setattr(CommittedReads, "read", lambda self, texts: (asked.extend(texts), read(self, texts))[1])
    chunks = [
        [("w", 75), ("x", 75), ("x", 80)],
        [("x", 101), ("x", 105), ("y", 75)],
        [("y", 80), ("z", 80), ("z", None)],
    ]
    found = [[one and one["rows_lifetime"] for one in state.as_of(chunk)] for chunk in chunks]
    assert found == [[None, 1, 1], [1, 3, 1], [1, None, None]]
    assert len(asked) == len(set(asked)) == 4
    with pytest.raises(errors.WindowGoneError):
        state.as_of([("x", 80), ("x", 74)])
    state.close()


def test_a_state_without_keys_and_times_of_another_width(spark, tmp_path):
    rows = spark.createDataFrame([(at, at) for at in range(40)], "at bigint, n bigint")
    windows = RollingWindows.of((10, 5))
    kept = (
        newStream("clicks", rows)
        .window(windows, timestampField="at")
        .persistentAggregate(opaque(f"sqlite:///{tmp_path}/s.db", "all"), total=Sum("n"))
    )
    kept(rows, 0)
    asked = spark.createDataFrame([(at,) for at in (0, 7, 39, 45)], "at int").repartition(2)
    right = [(0, None), (7, 10), (39, sum(range(25, 35))), (45, sum(range(35, 40)))]
    assert sorted(map(tuple, pointInTime(asked, kept, keys=[], at="at").collect())) == right
    history = rows.selectExpr("int(at) as at", "n")
    found = rollingFeatures(history, asked, windows, keys=[], timestampField="at", at="at", total=Sum("n"))
    assert sorted(map(tuple, found.collect())) == right


class Latest(CombinerAggregator):
    def init(self, row: Any) -> Any:
        return [row["at"]]

    def combine(self, a: Any, b: Any) -> Any:
        return max(a, b)


@pytest.mark.parametrize("own", [{}, {"latest": Latest()}], ids=["native", "own"])
def test_zero_is_one_key_whatever_its_sign_and_nan_is_one(spark, own):
    nan = float("nan")
    rows = spark.createDataFrame([(at, key) for at, key in enumerate([0.0, -0.0, nan, nan] * 5)], "at bigint, k double")
    asked = spark.createDataFrame([(20, 0.0), (20, -0.0), (20, nan)], "at bigint, k double").repartition(3)
    windows = RollingWindows.of((20, 5))
    found = rollingFeatures(rows, asked, windows, keys="k", timestampField="at", at="at", n=Count(), **own)
    assert [row.n_20 for row in found.collect()] == [10] * 3


def test_history_joins_each_aggregator_as_the_state_does(spark, tmp_path):
    draw = random.Random(7)
    rows = [
        (at, draw.choice("xy"), draw.choice([None, *range(9)]), Decimal(draw.randint(-99, 99)) / 4, draw.random() < 0.5)
        for at in range(60)
    ]
    clicks = spark.createDataFrame(rows, "at bigint, user string, n bigint, price decimal(9,2), paid boolean")
    aggregates = {
        "price": Sum("price"),
        "mean": Avg("price"),
        "first": First("n", by="at"),
        "last": Last("n", by="at"),
        "least": ArgMin("price", by="at"),
        "most": ArgMax("price", by="at"),
        "and_": BoolAnd("paid"),
        "or_": BoolOr("paid"),
        "all": Collect("n", most=100),
        "kinds": CountDistinct("n", most=100),
        "top": TopN(2, "n"),
        "often": TopN(2, "at", by="count", most=100),
        "deviation": StdDev("n"),
        "variance": VariancePop("price"),
        "about": ApproxCountDistinct("n"),
    }
    windows = RollingWindows.of(*WINDOWS)
    rolling = newStream("clicks", clicks).window(windows, timestampField="at").groupBy("user")
    kept = rolling.persistentAggregate(opaque(f"sqlite:///{tmp_path}/s.db", "s"), **aggregates)
    kept(clicks, 0)
    asked = spark.createDataFrame([(at, user) for at in (0, 33, 60, 500) for user in "xyz"], "at bigint, user string")
    right = pointInTime(asked, kept, keys="user", at="at").orderBy("at", "user")
    found = rollingFeatures(clicks, asked, windows, keys="user", timestampField="at", at="at", **aggregates)
    assert found.schema == right.schema
    pairs = list(zip(found.orderBy("at", "user").collect(), right.collect(), strict=True))
    for one, other in pairs:
        for name, value in other.asDict().items():
            assert one[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    assert len({str(row) for _, row in pairs}) > 8


class Total(ReducerAggregator):
    def init(self) -> Any:
        return 0

    def reduce(self, acc: Any, row: Any) -> Any:
        return acc + row["n"]


class Mine:
    def make_state(self, partition: int, partitions: int) -> Any:
        raise AssertionError


def test_what_a_point_in_time_refuses(spark, site, tmp_path):
    def ask(frame: DataFrame, state: Any = site.kept, **options: Any) -> Any:
        return pointInTime(frame, state, **{"keys": "user", "at": "labelled_at"} | options)

    grouped = newStream("plain", site.frame([])).groupBy("user")
    grouped.persistentAggregate(opaque(site.url, "plain"), n=Count())(site.frame([Row(1, "x", 1)]), 0)
    named = Site(spark, f"sqlite:///{tmp_path}/own.db", own={"names": Names()})
    named.batch(Row(1, "x", 1))
    asked = labels(site, (75, "x"), (80, "x"))
    stream = spark.readStream.format("rate").load().selectExpr("value as labelled_at", "string(value) as user")
    refused: Any = (
        (lambda: ask(labels(site, (80, "x"), (74, "x"))), errors.WindowGoneError, "as of 70.*from 75 on"),
        (lambda: ask(asked, opaque(site.url, "plain")), errors.UsageError, "no rolling windows"),
        (lambda: ask(asked, opaque(site.url, "nothing")), errors.StateNotFoundError, "nothing"),
        (lambda: ask(asked, opaque(named.url, "s")), errors.UsageError, "aggregators="),
        (lambda: ask(asked, newStaticState(Mine())), errors.ConfigurationError, "your own"),
        (lambda: ask(asked, Site(spark, "memory://training").kept), errors.ConfigurationError, "in one process"),
        (lambda: ask(asked, columns=["rows_21"]), errors.UnknownColumnError, "no 'rows_21'"),
        (lambda: ask(asked, columns={"rows_20": "User"}), errors.DuplicateNameError, "columns={'User'"),
        (lambda: ask(asked, at="time"), errors.UnknownColumnError, "'time'"),
        (lambda: ask(asked, at="user"), errors.UnsupportedTypeError, "takes times that are a bigint"),
        (lambda: ask(asked, keys="card"), errors.UnknownColumnError, "'card'"),
        (lambda: ask(asked, keys=["labelled_at"]), errors.StateSchemaError, "keyed by"),
        (lambda: ask(stream), errors.ConfigurationError, "is a stream"),
    )
    for call, kind, said in refused:
        with pytest.raises(kind, match=said):
            call()
    assert ask(asked).count() == 2


def test_all_tasks_are_as_of_one_ledger(site):
    """Another batch with a key changes nothing; after two its record has not the values of then any more."""
    asked = labels(site, (105, "x"), (105, "y"), (105, "z"))
    found = pointInTime(asked, opaque(site.url, "s"), keys="user", at="labelled_at", columns=["rows_lifetime"])
    before = [(105, "x", 3), (105, "y", 1), (105, "z", None)]
    assert sorted(map(tuple, found.collect())) == before
    site.batch(Row(90, "x", 1), Row(90, "y", 1), Row(90, "z", 1))
    assert sorted(map(tuple, found.collect())) == before
    site.batch(Row(91, "x", 1))
    with pytest.raises(Exception, match="StaleBatchError") as raised:
        found.collect()
    assert isinstance(mapstate_error(raised.value), errors.StaleBatchError)
    again = pointInTime(asked, opaque(site.url, "s"), keys="user", at="labelled_at", columns=["rows_lifetime"])
    assert sorted(map(tuple, again.collect())) == [(105, "x", 5), (105, "y", 2), (105, "z", 1)]


def test_what_rolling_features_refuse(spark):
    rows = spark.createDataFrame([], "at bigint, user string, n bigint")
    labelled = spark.createDataFrame([], "labelled_at bigint, user string")
    stream = spark.readStream.format("rate").load().selectExpr("value as labelled_at", "string(value) as user")
    windows = RollingWindows.of((20, 5))

    def ask(history: Any = rows, asked: Any = labelled, windows: Any = windows, **options: Any) -> Any:
        given = {"keys": "user", "timestampField": "at", "at": "labelled_at", "n": Count()} | options
        return rollingFeatures(history, asked, windows, **given)

    numbered = labelled.selectExpr("labelled_at", "bigint(1) as user")
    refused: Any = (
        ({"windows": "1 hour"}, errors.ConfigurationError, "takes windows such as"),
        ({"windows": RollingWindows.of(10)}, errors.ConfigurationError, "needs a resolution"),
        ({"timestampField": "time"}, errors.UnknownColumnError, "'time'"),
        ({"timestampField": "user"}, errors.UnsupportedTypeError, "times that are a timestamp or a bigint"),
        ({"at": "user"}, errors.UnsupportedTypeError, "takes times that are a bigint"),
        ({"keys": "card"}, errors.UnknownColumnError, "'card'"),
        ({"asked": numbered}, errors.ConfigurationError, "compares the keys"),
        ({"asked": labelled.withColumn("n_20", F.lit(1))}, errors.DuplicateNameError, "rename it"),
        ({"asked": stream}, errors.ConfigurationError, "is a stream"),
        ({"history": stream.withColumnRenamed("labelled_at", "at")}, errors.ConfigurationError, "is a stream"),
        ({"n": Total()}, errors.ConfigurationError, "is a reducer"),
        ({"n": Sum("m")}, errors.UnknownColumnError, "'m'"),
        ({"n": 3}, errors.ConfigurationError, "is no aggregator"),
    )
    for options, kind, said in refused:
        with pytest.raises(kind, match=said):
            ask(**options)
    with pytest.raises(errors.ConfigurationError, match="at least one aggregator"):
        rollingFeatures(rows, labelled, windows, keys="user", timestampField="at", at="labelled_at")
    assert ask().columns == ["labelled_at", "user", "n_20"]
