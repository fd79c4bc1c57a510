"""PySpark 3.5: what stands for the calls that it lacks, tried on any PySpark, and what is refused there by name."""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import mapstate.spark
from mapstate import (
    ApproxCountDistinct,
    CombinerAggregator,
    Count,
    Max,
    Sum,
    TumblingDurationWindow,
    newStream,
    opaque,
    open_reader,
)
from mapstate.errors import UsageError
from mapstate.spark.driver.access import access_of
from mapstate.spark.driver.spark35 import Calls, calls
from mapstate.spark.executor.task import arrow_schema

pytestmark = pytest.mark.spark

SCHEMA = (
    "a bigint, b decimal(38,18), c timestamp, d timestamp_ntz, e array<timestamp>, f map<string,timestamp>, "
    "g struct<x:timestamp,y:decimal(5,2)>, h date, i binary, j interval day to second, k double, l string, "
    "m boolean, n tinyint, o float, `p q` array<struct<r:int>>"
)
EARLY = dt.datetime(1883, 11, 18, 12, 0, 0, 123456, tzinfo=dt.UTC)  # before zones were whole minutes
LATE = dt.datetime(9999, 12, 31, 23, tzinfo=dt.UTC)
ROW = {
    "a": 2**63 - 1,
    "b": Decimal("12345678901234567890.123456789012345678"),
    "c": EARLY,
    "d": dt.datetime(1, 1, 1, 0, 0, 0, 1),
    "e": [EARLY, None, LATE],
    "f": {"x": EARLY, "y": None},
    "g": {"x": LATE, "y": Decimal("1.50")},
    "h": dt.date(1, 1, 1),
    "i": b"\0\xff",
    "j": dt.timedelta(days=-3, microseconds=7),
    "k": float("nan"),
    "l": "\0\u00e9",
    "m": False,
    "n": -128,
    "o": -0.0,
    "p q": [{"r": 1}, None, {"r": None}],
}


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """The calls that PySpark 3.5 gets."""
    monkeypatch.delattr(DataFrame, "toArrow", raising=False)
    calls.cache_clear()
    yield calls()
    calls.cache_clear()


@pytest.fixture
def in_utc(spark: SparkSession) -> Iterator[None]:
    """Tables are taken in UTC, as `arrow_frame` has it."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield
    spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.parametrize("settings", [{}, {"localRelationThreshold": "0", "maxRecordsPerBatch": "2"}])
@pytest.mark.parametrize("rows", [7, 0])
def test_a_table_becomes_rows_and_the_rows_a_table(spark, older, in_utc, settings, rows):
    schema = older.from_ddl(SCHEMA)
    table = pa.Table.from_pylist([ROW, dict.fromkeys(ROW), *[ROW] * 5][:rows], schema=arrow_schema(schema))
    names = {f"spark.sql.execution.arrow.{name}": value for name, value in settings.items()}
    for name, value in names.items():
        spark.conf.set(name, value)
    try:
        frame = older.from_arrow(spark)(table, schema)
        own = spark.createDataFrame(table, schema) if hasattr(frame, "toArrow") else None
    finally:
        for name in names:
            spark.conf.unset(name)
    assert frame.schema == schema
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    found = older.to_arrow(frame)
    assert found.schema == arrow_schema(schema)
    assert repr(found.to_pylist()) == repr(table.to_pylist())  # NaN is not equal to itself, and -0.0 to 0.0
    if rows:
        assert frame.rdd.getNumPartitions() == (4 if settings else 2)
    if own is not None:
        assert own.schema == frame.schema
        assert own.rdd.getNumPartitions() == frame.rdd.getNumPartitions()
        assert repr(own.toArrow().cast(found.schema).to_pylist()) == repr(found.to_pylist())


@pytest.mark.parametrize("rows", [1000, 0])
def test_rows_are_computed_once_at_once_and_stored_twice(spark, older, rows):
    computed = spark.sparkContext.accumulator(0)

    @F.udf("int")
    def counted(number):
        computed.add(1)
        return number

    frame = spark.range(rows).repartition(7).select(counted.asNondeterministic()("id").alias("n"))
    kept = older.stored(frame)
    assert computed.value == rows
    stored: Any = kept._jdf.queryExecution().logical().rdd()
    assert stored.isCheckpointed()
    assert stored.getStorageLevel().toString() == "StorageLevel(disk, memory, 2 replicas)"
    assert kept.agg(F.count("n"), F.sum("n")).first() == (rows, sum(range(rows)) if rows else None)
    assert computed.value == rows
    access_of(kept).release()
    assert stored.getStorageLevel().toString() == "StorageLevel(1 replicas)"


@pytest.mark.parametrize(
    "text", ["decimal(38,3)", "interval year to month", "array<struct<`a b`:int>>", "a int, b date"]
)
def test_types_are_read_as_newer_ones_read_them(spark, older, text):
    found = older.from_ddl(text)
    if "," in text and "(" not in text:
        assert found == spark.createDataFrame([], text).schema
    else:
        assert found == spark.createDataFrame([], f"x {text}").schema["x"].dataType


def test_batches_count_new_values_come_and_windows_fire_with_them(spark, older, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    rows = [
        ("a", "2026-01-01 00:01:00", "1.10"),
        ("a", "2026-01-01 00:02:00", "2.20"),
        ("b", "2026-01-01 00:11:00", "3"),
    ]
    frame = spark.createDataFrame(rows, "k string, at string, x string").selectExpr(
        "k", "cast(at as timestamp) at", "cast(x as decimal(10,2)) x"
    )
    seen, fired = [], []
    stream = newStream("sums", frame)
    counts = stream.groupBy("k").persistentAggregate(opaque(url), n=Count(), x=Sum("x"), last=Max("at"))
    counts.newValuesStream().foreachBatch(lambda values, _: seen.extend(values.drop("last").collect()))
    counts(frame, 0)
    assert sorted(seen) == [("a", 2, Decimal("3.30")), ("b", 1, Decimal("3.00"))]
    windows = newStream("windows", frame).window(
        TumblingDurationWindow.of("10 minutes"), timestampField="at", lag="0 seconds"
    )
    kept = windows.groupBy("k").persistentAggregate(opaque(url), n=Count())
    kept.firedWindowsStream().foreachBatch(lambda values, _: fired.extend(values.select("k", "n").collect()))
    kept(frame, 0)
    assert fired == [("a", 2)]
    with open_reader(url, "sums") as reader:
        last = dt.datetime.fromisoformat("2026-01-01T00:11:00-03:30").astimezone(dt.UTC)  # the session's zone
        assert reader.get("b") == {"n": 1, "x": Decimal("3.00"), "last": last}


class Longest(CombinerAggregator):
    """A row of a key goes through Python where a state has this."""

    value_type = "bigint"

    def columns(self):
        return ("name",)

    def init(self, row):
        return len(row["name"])

    def combine(self, a, b):
        return max(a, b)


def test_distinct_values_are_the_same_for_spark_and_in_python(spark, tmp_path):
    frame = spark.range(4000).selectExpr("id % 1500 AS user", "concat('ü', id % 1500) AS name", "id")
    found = []
    for place, others in (("spark", {}), ("python", {"longest": Longest()})):
        url = f"sqlite:///{tmp_path}/{place}.db"
        users, names = ApproxCountDistinct("user"), ApproxCountDistinct("name")
        state = newStream("s", frame).persistentAggregate(opaque(url), users=users, names=names, **others)
        state(frame.where("id < 2000"), 0)
        state(frame.where("id >= 1000"), 1)
        with open_reader(url, "s", aggregators={"longest": Longest()}) as reader:
            found.append(reader.get(()))
    for name in ("users", "names"):
        assert found[0][name]["estimate"] == pytest.approx(1500, rel=0.05)
        assert found[0][name]["estimate"] == pytest.approx(found[1][name]["estimate"], rel=0.01)


class ConnectFrame:
    """As that of Spark Connect in PySpark 3.5, which is no `pyspark.sql.DataFrame`."""


ConnectFrame.__module__ = "pyspark.sql.connect.dataframe"


def test_spark_connect_is_refused_by_name(spark, older, monkeypatch):
    calls.cache_clear()
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    frame: Any = ConnectFrame()
    with pytest.raises(UsageError, match="needs PySpark 4.0 or newer for Spark Connect, and this is 3.5. Nothing"):
        newStream("s", frame)


def test_no_file_makes_these_calls_itself():
    root = Path(mapstate.spark.__file__).parent
    texts = {path.name: path.read_text() for path in root.rglob("*.py")}
    makers = {name for name, text in texts.items() if re.search(r"\.(toArrow\(|localCheckpoint\(|fromDDL\b)", text)}
    assert makers == {"spark35.py"}


def test_the_format_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "mapstate.spark.source", raising=False)
    monkeypatch.setitem(sys.modules, "pyspark.sql.datasource", None)
    with pytest.raises(UsageError, match="the format mapstate needs PySpark 4.0 or newer, and this is 3.5. Nothing"):
        _ = mapstate.spark.MapStateDataSource
