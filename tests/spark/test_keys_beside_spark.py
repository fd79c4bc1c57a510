"""Keys of all types: two rows have one key exactly where Spark's own groupBy has them in one group."""

from __future__ import annotations

import datetime as dt
import random
import struct
from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from spark_fixtures import contents

from mapstate import Count, ReducerAggregator, TumblingDurationWindow, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.errors import ConfigurationError, DataError, DuplicateNameError, KeyEncodingError
from mapstate.protocol.stored_ledger import LEDGER_KEY
from mapstate.spark import stateQuery
from mapstate.spark.driver import state as driver_state
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.executor.task import arrow_schema, arrow_to_python

pytestmark = pytest.mark.spark


def instant(*parts: int) -> dt.datetime:
    return dt.datetime(*parts, tzinfo=dt.UTC)


FLOATS = [
    0.0,
    -0.0,
    1.0,
    0.5,
    -1.5,
    float("inf"),
    float("-inf"),
    float("nan"),
    struct.unpack("<d", b"\1" * 6 + b"\xf1\xff")[0],
]
TEXTS = [
    "",
    " ",
    "a",
    "A",
    "a ",
    "é",
    "e\u0301",
    "ß",
    "ss",
    "|",
    "a|b",
    "a\\|b",
    "\\",
    "\\\\",
    "\\N",
    "\\E",
    "\\G",
    "\\P|",
]
TEXTS += ["\0", "\n", "\t\r", "\x7f", "\x85", "\u2028", "\ufeff", "\uffff", "\U0010ffff", "NaN", "null", "0", "{a}"]
VALUES: dict[str, list[Any]] = {
    "tinyint": [0, 1, -1, 127, -128],
    "smallint": [0, 1, -1, 32767, -32768],
    "int": [0, 1, -1, 2**31 - 1, -(2**31)],
    "bigint": [0, 1, -1, 2**63 - 1, -(2**63), 2**53, 2**53 + 1],
    "float": [*FLOATS, 3.4028234663852886e38, 1.401298464324817e-45, 0.10000000149011612, 2.0**24],
    "double": [*FLOATS, 1.7976931348623157e308, 5e-324, 0.1, 0.10000000149011612, 2.0**53, 2.0**53 + 2, 1e16, 1e22],
    "decimal(10,2)": [Decimal(text) for text in ("0", "0.01", "-0.01", "1", "1.5", "10", "100", "99999999.99")],
    "decimal(38,10)": [
        Decimal(text) for text in ("0", "1", "1.5", "10", "1E-10", "-9999999999999999999999999999.9999999999")
    ],
    "decimal(4,0)": [Decimal(text) for text in ("0", "1", "10", "100", "1000", "-9999")],
    "string": TEXTS,
    "boolean": [True, False],
    "date": [dt.date.min, dt.date.max, dt.date(1582, 10, 4), dt.date(1582, 10, 15), dt.date(1969, 12, 31)],
    # On a clock in St. John's one of two hours comes twice, or never.
    "timestamp": [
        instant(1, 1, 1),
        instant(9999, 12, 31, 23, 59, 59, 999_999),
        instant(2026, 11, 1, 3, 30),
        instant(2026, 11, 1, 4, 30),
        instant(2026, 11, 1, 4, 30, 0, 1),
        instant(1969, 12, 31, 23, 59, 59, 999_999),
        instant(1582, 10, 10),
    ],
    "timestamp_ntz": [
        dt.datetime.min,
        dt.datetime.max,
        dt.datetime(2026, 3, 8, 2, 30),
        dt.datetime(2026, 3, 8, 3, 30),
        dt.datetime(1969, 12, 31, 23, 59, 59, 999_999),
        dt.datetime(1582, 10, 10),
    ],
    "binary": [b"", b"\0", b"\0\0", b"\xff", b"\xed\xa0\x80", b"a", b"\\E", b"|"],
}
NAMES = [f"k{at}" for at, _ in enumerate(VALUES)]
PARTS = {"id": "int", "name": "string", "at": "timestamp", "size": "double"}
COLUMNS = ", ".join(f"{name} {kind}" for name, kind in zip(NAMES, VALUES, strict=True))
SCHEMA = f"{COLUMNS}, u struct<{','.join(map(':'.join, PARTS.items()))}>, v struct<w:struct<x:float>>"
KEYS = [*NAMES, *(f"u_{name}" for name in PARTS), "w_x"]  # the key columns of a state


def some_rows(number: int) -> list[dict[str, Any]]:
    """Each has values of one type or two, and nulls of all others, so that many rows meet in one group."""
    choose = random.Random(7)
    rows = []
    for _ in range(number):
        row: dict[str, Any] = dict.fromkeys(NAMES)
        fields: dict[str, Any] = dict.fromkeys(PARTS)
        deep = None
        for kind in choose.sample([*VALUES, "struct"], choose.choice([1, 1, 2])):
            if kind == "struct":
                fields = {name: choose.choice([None, *VALUES[kind][:2]]) for name, kind in PARTS.items()}
                deep = choose.choice([None, 0.0, -0.0])
            else:
                row[NAMES[list(VALUES).index(kind)]] = choose.choice([None, *VALUES[kind]])
        rows.append(row | {"u": fields, "v": {"w": {"x": deep}}})
    return rows


class CountInPython(ReducerAggregator):
    """Its tasks get the rows of a key, not Spark's partial aggregates."""

    value_type = "bigint"

    def columns(self) -> list[str]:
        return ["t"]

    def init(self) -> int:
        return 0

    def reduce(self, value: int, row: Any) -> int:
        return value + 1


class Beside:
    """Rows of all types, and what Spark's groupBy makes of them."""

    def __init__(self, spark: Any, rows: list[dict[str, Any]]) -> None:
        self.spark = spark
        schema: Any = calls().from_ddl(SCHEMA)
        frame = calls().from_arrow(spark)(pa.Table.from_pylist(rows, schema=arrow_schema(schema)), schema)
        self.rows = frame.withColumn("t", F.timestamp_seconds(F.lit(0))).repartition(3).cache()
        self.keys: list[Any] = [*NAMES, "u", F.col("v.w").alias("w")]
        groups = self.rows.groupBy(*self.keys).agg(F.count("*").alias("n"))
        self.groups = groups.select(*NAMES, "u.*", "w.x", "n").toDF(*KEYS, "n")

    def differences(self, found: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
        """The groups that are no key, several keys, or a part of one: Spark says which keys are equal. One job."""
        schema: StructType = self.groups.schema
        named = [dict(zip(KEYS, key, strict=True)) | value for key, value in found]
        arrow = pa.Table.from_pylist(named, schema=arrow_schema(schema))
        both = self.groups.union(calls().from_arrow(self.spark)(arrow, schema))
        counts = F.count("*").alias("of"), F.min("n").alias("least"), F.max("n").alias("most")
        wrong = both.groupBy(*KEYS).agg(*counts).where("of <> 2 OR least <> most")
        return list(calls().to_arrow(wrong).to_pylist())


def as_scanned(rows: pa.Table) -> list[tuple[Any, Any]]:
    """The columns of keys and their counts as a scan gives them."""
    columns = [arrow_to_python(rows.column(name).combine_chunks(), name) for name in (*KEYS, "n")]
    return [(key, {"n": count}) for *values, count in zip(*columns, strict=True) for key in [tuple(values)]]


def texts(found: list[tuple[Any, Any]]) -> list[str]:
    """Keys with their counts, by the last bit: 0.0 is not -0.0 here, and NaN is NaN."""
    return sorted(repr(one).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc") for one in found)


def test_two_rows_have_one_key_exactly_where_spark_has_them_in_one_group(spark, tmp_path, monkeypatch):
    given = some_rows(2000)
    beside = Beside(spark, given)
    asked = [(*(row[name] for name in NAMES), *row["u"].values(), row["v"]["w"]["x"]) for row in given]
    url = f"sqlite:///{tmp_path}/state.db"
    stream = newStream("rows", beside.rows)
    judged: list[str] = []
    for way, store, options, count in (
        ("executors", url, {"apply_on": "executors"}, Count()),
        ("driver", url, {"apply_on": "driver"}, Count()),
        ("memory", f"memory://{tmp_path.name}", {}, Count()),
        ("rows", url, {"apply_on": "executors"}, CountInPython()),
        ("small", url, {}, Count()),
    ):
        if way == "small":
            monkeypatch.setattr(driver_state, "SMALL_IN_A_ROW", 0)
        job = stream.groupBy(*beside.keys).persistentAggregate(opaque(store, way, repeat="allowed", **options), n=count)
        emitted: list[Any] = []
        job.newValuesStream().foreachBatch(lambda values, _, emitted=emitted: emitted.append(calls().to_arrow(values)))
        job(beside.rows, 0)
        with open_reader(store, way) as reader:
            found = list(reader.scan())
            assert reader.multi_get([key for key, _ in found]) == [value for _, value in found]
            # As many rows find a count as it counts, by keys as they were in front of Spark: -0.0, NaN of other bits.
            of_rows = Counter(value["n"] for value in reader.multi_get(asked) if value is not None)
            assert of_rows == Counter(value["n"] for _, value in found for _ in range(value["n"]))
            if not judged:
                assert beside.differences(found) == []
                judged = texts(found)
                assert texts(as_scanned(reader.to_arrow())) == judged
                job(beside.rows, 0)  # which counts already: its new values are read back
        assert texts(found) == judged, way
        for values in emitted:
            assert texts(as_scanned(values)) == judged, f"new values: {way}"

    flat = beside.rows.select(*NAMES, "u.*", "v.w.x", "t").toDF(*KEYS, "t")
    answered = calls().to_arrow(stateQuery(flat, opaque(url, "executors"), KEYS).distinct())
    assert texts(as_scanned(answered)) == judged, "stateQuery"

    of_batch: list[Any] = []
    by_batch = newStream("flat", flat).groupBy(KEYS).aggregate(n=CountInPython())
    by_batch.foreachBatch(lambda values, _: of_batch.append(calls().to_arrow(values)))(flat, 0)
    assert texts(as_scanned(of_batch[0])) == judged, "aggregates of a batch"

    windows = stream.window(TumblingDurationWindow.of("1 hour"), timestampField="t").groupBy(*beside.keys)
    counts = windows.persistentAggregate(opaque(url, "windows"), n=Count())
    fired: list[Any] = []
    counts.firedWindowsStream().foreachBatch(lambda values, _: fired.append(calls().to_arrow(values)))
    counts(beside.rows, 0)
    counts(beside.rows.limit(1).withColumn("t", F.timestamp_seconds(F.lit(36_000))), 1)
    assert texts(as_scanned(fired[-1])) == judged, "fired windows"


def stored_texts(url: str, state: str) -> set[Any]:
    store: Any = resolve(url).open(state)
    return {key for page in store.scan(100) for key in page} - {LEDGER_KEY}


def test_a_null_struct_is_refused_and_by_its_fields_it_is_one_key_with_a_struct_of_nulls(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    nulls = [((None, None),)] * 2
    rows = spark.createDataFrame([((1, "a"),), ((1, None),), *nulls], "u struct<id:int,name:string>")
    more = spark.createDataFrame([(None,)] * 3 + nulls, rows.schema)
    assert more.groupBy("u").count().count() == 2
    for way in ("executors", "driver"):
        job = newStream("rows", rows).groupBy("u").persistentAggregate(opaque(url, way, apply_on=way), n=Count())
        job(rows, 0)
        counted = {(1, "a"): {"n": 1}, (1, None): {"n": 1}, (None, None): {"n": 2}}
        assert contents(url, way) == counted
        assert stored_texts(url, way) == {"1|a", "1|\\N", "\\N|\\N"}
        with pytest.raises(
            KeyEncodingError, match=r"^the struct 'u' is null in a row.* group by its fields, u\.id"
        ) as one:
            job(more, 1)
        assert one.value.column == "u"
        assert contents(url, way) == counted
        by_fields = newStream("rows", rows).groupBy("u.id", "u.name")
        by_fields.persistentAggregate(opaque(url, way, apply_on=way), n=Count())(more, 1)  # goes on with the same state
        assert contents(url, way) == counted | {(None, None): {"n": 7}}


@pytest.mark.parametrize(
    "value",
    [
        "CAST(X'EDA080' AS STRING)",  # half a surrogate pair
        "TIMESTAMP'+10000-01-02 00:00:00'",
        "TIMESTAMP'-0001-01-01 00:00:00'",
        "TIMESTAMP_NTZ'+10000-01-02 00:00:00'",
        "DATE'+10000-01-02'",
        "DATE'-0001-01-01'",
    ],
)
def test_a_key_that_python_cannot_hold_fails_its_batch_and_nothing_of_it_counts(spark, tmp_path, value):
    rows = spark.range(3).selectExpr(f"CASE WHEN id > 0 THEN {value} END AS k")
    assert rows.groupBy("k").count().count() == 2
    for way in ("executors", "driver"):
        url = f"sqlite:///{tmp_path}/{way}.db"
        job = newStream("rows", rows).groupBy("k").persistentAggregate(opaque(url, "s", apply_on=way), n=Count())
        with pytest.raises(DataError, match="column 'k' holds a value that Python cannot"):
            job(rows, 0)
        with open_reader(url, "s") as reader:
            assert reader.ledger().last_commit is None
            assert dict(reader.scan()) == {}


NEWER = ["variant", *(f"string collate {of}" for of in ("UTF8_LCASE", "UNICODE", "UNICODE_CI", "UTF8_BINARY_RTRIM"))]


@pytest.mark.parametrize(
    "of_no_struct",
    [
        ["array<int>", "map<string,int>", "void", "interval day to second", "interval year to month"],
        pytest.param(NEWER, marks=pytest.mark.since("4.0", "these types")),
    ],
    ids=["older", "newer"],
)
def test_what_cannot_be_kept_apart_is_refused_when_it_is_declared(spark, of_no_struct):
    kinds = [*of_no_struct, *(f"struct<a:{kind}>" for kind in [*of_no_struct, "struct<b:int>"])]
    kinds += ["struct<>", "struct<a:int,a:int>", "struct<a:int,A:int>"]
    for kind in kinds:
        with pytest.raises(ConfigurationError):
            newStream("rows", spark.createDataFrame([], f"u {kind}")).groupBy("u")
    rows = newStream("rows", spark.createDataFrame([], "at timestamp, k string"))
    for key in (F.session_window("at", "1 minute"), F.count("k"), F.array("k")):
        with pytest.raises(ConfigurationError):
            rows.groupBy(key)


@pytest.mark.since("4.0", "collations")
def test_a_key_of_another_collation_is_refused_when_it_is_declared(spark):
    rows = newStream("rows", spark.createDataFrame([], "k string"))
    with pytest.raises(ConfigurationError):
        rows.groupBy(F.collate("k", "UTF8_LCASE").alias("c"))
    binary = spark.createDataFrame([], "k string").select(F.collate("k", "UTF8_BINARY").alias("k"))
    assert newStream("rows", binary).groupBy("k")._keys[0].type == "string"  # which is what a string is anyway


def test_sessions_of_spark_are_refused_also_as_a_column(spark):
    """Its own groupBy joins them, by a mark on the column; here each row would have a key of its own."""
    rows = newStream("rows", spark.createDataFrame([], "at timestamp"))
    added = rows.transform(lambda df: df.withColumn("w", F.session_window("at", "1 minute")))
    with pytest.raises(ConfigurationError, match=r"sessions of Spark's.*window\(SessionWindow"):
        added.groupBy("w")


def test_an_expression_is_no_column_that_happens_to_have_its_name(spark):
    frame = spark.createDataFrame([("a", "b", 2)], ["k", "upper(k)", "1"])
    stream = newStream("rows", frame)
    for key in (F.lit(1), F.upper("k")):
        with pytest.raises(DuplicateNameError, match="has the name of a column"):
            stream.groupBy(key)
    for same in (F.col("1"), F.col("`1`")):
        assert stream.groupBy(same)._keys == stream.groupBy("1")._keys


def test_columns_of_char_and_varchar_are_the_strings_that_spark_groups_by(spark, tmp_path):
    spark.sql(f"CREATE TABLE short_texts (c CHAR(3), v VARCHAR(3)) USING parquet LOCATION '{tmp_path}'")
    try:
        spark.sql("INSERT INTO short_texts SELECT s, s FROM VALUES ('a'), ('a '), (''), ('b  '), (NULL) AS t(s)")
        rows = spark.table("short_texts")
        for key in ("c", "v"):
            job = newStream("rows", rows).groupBy(key).persistentAggregate(opaque("memory://short", key), n=Count())
            job(rows, 0)
            groups = {(row[0],): {"n": row[1]} for row in rows.groupBy(key).count().collect()}
            assert contents("memory://short", key) == groups
    finally:
        spark.sql("DROP TABLE short_texts")
