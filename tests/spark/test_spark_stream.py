"""persistentAggregate on real Spark, over each store: what a user builds, and what bad input gets."""

from __future__ import annotations

import base64
import datetime as dt
import gc
import logging
import math
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from secrets import token_hex
from typing import Any

import pyarrow as pa
import pytest
from every_store import AEROSPIKE
from py4j.protocol import Py4JError
from pyspark.errors import ArithmeticException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, ONE_STORE_OF_BYTES, Visits, contents, finish

from mapstate import (
    Avg,
    CombinerAggregator,
    Count,
    First,
    Last,
    Max,
    Min,
    ReducerAggregator,
    Sum,
    errors,
    newStream,
    non_transactional,
    opaque,
    open_reader,
    transactional,
)
from mapstate.protocol.ledger import Ledger
from mapstate.spark.driver.access import configured
from mapstate.spark.driver.spark35 import calls
from mapstate.testing import crash_between, wait_for

pytestmark = pytest.mark.spark

COLLECTS = "toArrow" if hasattr(DataFrame, "toArrow") else "_collect_as_arrow"


@pytest.fixture
def url(each_url: str) -> str:
    return each_url


def counts_of(visits: Visits, spark: SparkSession, spec: Any) -> Any:
    return (
        newStream("visits", visits.stream(spark))
        .groupBy("user_id")
        .persistentAggregate(spec, visits=Count(), bytes=Sum("bytes"))
    )


@pytest.mark.parametrize("spec_of", [opaque, transactional, non_transactional])
def test_every_key_is_right_after_several_batches(spec_of, url, spark, visits):
    for batch in range(4):
        visits.put(f"{batch}", [(f"user-{n % (7 + batch)}", n) for n in range(50)])
    finish(counts_of(visits, spark, spec_of(url, chunk_size=3)).start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url, "visits") == visits.truth()
    with open_reader(url, "visits") as reader:
        assert reader.ledger().last_commit.batch_id == 3
        assert reader.ledger().last_commit.rows == 50
        assert reader.get("user-0") == visits.truth()[("user-0",)]
        assert reader.multi_get([("nobody",), ("user-1",)]) == [None, visits.truth()[("user-1",)]]


def test_a_job_that_exists_adopts_it_as_its_foreachBatch_function(url, spark, visits):
    visits.put("0", [("a", 1), ("b", 2), ("a", 3)])
    counts = counts_of(visits, spark, opaque(url, name="adopted"))
    query = (
        visits.stream(spark)
        .writeStream.foreachBatch(counts)
        .option("checkpointLocation", str(visits.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    finish(query)
    assert contents(url, "adopted") == visits.truth()


@pytest.mark.parametrize("each_url", ONE_STORE_OF_BYTES, indirect=True)
def test_msgpack_and_json_hold_the_same(url, spark, visits, tmp_path):
    visits.put("0", [("a", 1), ("b", 2), ("a", 3)])
    for name in ("json", "msgpack"):
        job = counts_of(visits, spark, opaque(url, name=name, serializer=name))
        finish(job.start(tmp_path / name, trigger=AVAILABLE))
        assert contents(url, name) == visits.truth()


def test_a_batch_that_is_too_large_for_the_driver_at_once_comes_partition_by_partition(url, spark, monkeypatch):
    frame = spark.range(4000).select(F.sha2(F.col("id").cast("string"), 256).alias("k"))
    job = newStream("keys", frame).groupBy("k").persistentAggregate(opaque(url, apply_on="driver"), n=Count())
    conf = spark.sparkContext._jsc.sc().conf()  # the live one: each set of tasks looks there
    conf.set("spark.driver.maxResultSize", "256k")
    try:
        with pytest.raises(Py4JError, match="maxResultSize"):
            calls().to_arrow(frame.groupBy("k").count())
        run_once(spark, job, frame)
        monkeypatch.setattr(type(frame), COLLECTS, None)  # is not tried again, which would compute each batch twice
        job(frame, 1)
    finally:
        conf.remove("spark.driver.maxResultSize")
    found = contents(url, "keys")
    assert len(found) == 4000
    assert all(value == {"n": 2} for value in found.values())


@pytest.mark.parametrize("adaptive", ["true", "false"])
def test_the_rows_of_a_batch_are_computed_once(url, spark, adaptive):
    computed = spark.sparkContext.accumulator(0)

    @F.udf("string")
    def key(number):
        computed.add(1)
        return f"k{number % 7}"

    frame = spark.range(100).select(key.asNondeterministic()("id").alias("k"))  # else Spark may compute it again itself
    job = newStream("keys", frame).groupBy("k").persistentAggregate(opaque(url), n=Count())
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", adaptive)
    try:
        run_once(spark, job, frame)
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", before)
    assert sum(value["n"] for value in contents(url, "keys").values()) == computed.value == 100


def test_what_goes_wrong_in_front_of_the_driver_is_not_left_to_a_thread_of_sparks(spark, monkeypatch):
    """Python would wait for ever for toArrow's, where a JVM's Error ends it."""
    with configured(spark.range(0), {"spark.sql.ansi.enabled": "true"}):  # it is off before 4.0
        frame = spark.createDataFrame([("a", 0)], "k string, n int").select("k", F.expr("1 / n AS x"))
        job = newStream("keys", frame).groupBy("k").persistentAggregate(opaque("memory://", max_attempts=1), x=Sum("x"))
        monkeypatch.setattr(type(frame), COLLECTS, None)
        with pytest.raises((ArithmeticException, Py4JError), match="DIVIDE_BY_ZERO"):
            job(frame, 0)


KEY_ROWS = [
    (None, None, None, None, None, None, None, None),
    (1, 0.0, Decimal("1.50"), "x", True, dt.date(2026, 1, 2), dt.datetime(2026, 1, 2, 3, 4, 5, 6), b"\0\xff"),
    (1, -0.0, Decimal("1.50"), "x", True, dt.date(2026, 1, 2), dt.datetime(2026, 1, 2, 3, 4, 5, 6), b"\0\xff"),
    (-5, math.nan, Decimal("-0.10"), "a|b\\\n", False, dt.date(1, 1, 1), dt.datetime(1970, 1, 1), b""),
    (-5, math.nan, Decimal("-0.10"), "a|b\\\n", False, dt.date(1, 1, 1), dt.datetime(1970, 1, 1), b""),
    (2**62, math.inf, Decimal("99999999.99"), "", None, None, None, b"|"),
]
KEY_SCHEMA = "i bigint, f double, d decimal(10,2), s string, b boolean, day date, at timestamp, raw binary"


def run_once(spark: SparkSession, job: Any, frame: DataFrame) -> None:
    """One foreachBatch call by hand, outside of any query."""
    job(frame, 0)


def test_keys_of_every_type_are_equal_where_sparks_grouping_says_so(url, spark):
    frame = spark.createDataFrame(KEY_ROWS, KEY_SCHEMA).coalesce(1)
    columns = frame.columns
    job = newStream("keys", frame).groupBy(*columns).persistentAggregate(opaque(url), n=Count())
    run_once(spark, job, frame)
    found = contents(url, "keys")
    expected = {
        repr(tuple(row)[:6]) + repr(bytes(row["raw"]) if row["raw"] is not None else None): row["n"]
        for row in frame.groupBy(*columns).agg(F.count(F.lit(1)).alias("n")).collect()
    }
    assert len(found) == 4
    assert {repr(key[:6]) + repr(key[7]): value["n"] for key, value in found.items()} == expected
    for key, value in found.items():  # what a scan gives is a key again
        with open_reader(url, "keys") as reader:
            assert reader.get(key) == value
    # an instant, though the session's time zone is St. John's; PySpark takes naive times as this machine's
    assert dt.datetime(2026, 1, 2, 3, 4, 5, 6).astimezone() in {key[6] for key in found}


VALUE_SCHEMA = (
    "k string, i int, l bigint, f double, d decimal(12,2), s string, b boolean, day date, at timestamp, raw binary"
)
AGGREGATES = {
    "n": Count(),
    "n_s": Count("s"),
    "sum_i": Sum("i"),
    "sum_f": Sum("f"),
    "sum_d": Sum("d"),
    "avg_i": Avg("i"),
    "avg_f": Avg("f"),
    "avg_d": Avg("d"),
    "min_s": Min("s"),
    "max_f": Max("f"),
    "min_b": Min("b"),
    "max_day": Max("day"),
    "max_at": Max("at"),
    "min_raw": Min("raw"),
    "max_d": Max("d"),
    "first_s": First("s", by="at"),
    "last_s": Last("s", by="at"),
    "last_d": Last("d", by="i"),
}


def value_rows(batch: int) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for n in range(40):
        at = dt.datetime(2026, 1, 1) + dt.timedelta(minutes=(n * 7919 + batch * 13) % 1000)
        row = (
            f"k{n % 5}",
            n * (-1) ** n,
            2**40 + n,
            float(n) / 4,
            Decimal(n) / 4,
            f"s{(n * 31 + batch) % 17}",
            n % 3 == 0,
            dt.date(2026, 1, 1 + n % 28),
            at,
            bytes([n, batch]),
        )
        # one column after the other is null, and everything is for the key k4
        rows.append(tuple(None if at and (at == n % 13 or row[0] == "k4") else value for at, value in enumerate(row)))
    return rows


def spark_says(frame: DataFrame) -> dict[Any, Any]:
    """The same aggregates by Spark itself, over all batches at once."""
    at = F.col("at")
    expected = frame.groupBy("k").agg(
        F.count(F.lit(1)).alias("n"),
        F.count("s").alias("n_s"),
        F.sum("i").alias("sum_i"),
        F.sum("f").alias("sum_f"),
        F.sum("d").alias("sum_d"),
        F.avg("i").alias("avg_i"),
        F.avg("f").alias("avg_f"),
        F.avg("d").alias("avg_d"),
        F.min("s").alias("min_s"),
        F.max("f").alias("max_f"),
        F.min("b").alias("min_b"),
        F.max("day").alias("max_day"),
        F.max("at").alias("max_at"),
        F.min("raw").alias("min_raw"),
        F.max("d").alias("max_d"),
        F.min(F.when(at.isNotNull(), F.struct("at", "s")))["s"].alias("first_s"),
        F.max(F.when(at.isNotNull(), F.struct("at", "s")))["s"].alias("last_s"),
        F.max(F.when(F.col("i").isNotNull(), F.struct("i", "d")))["d"].alias("last_d"),
    )
    out = {}
    for row in expected.collect():
        values = {name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.asDict().items()}
        if values["max_at"] is not None:
            values["max_at"] = values["max_at"].astimezone()
        out[(values.pop("k"),)] = values
    return out


@pytest.mark.parametrize("each_url", ONE_STORE_OF_BYTES, indirect=True)
@pytest.mark.parametrize("serializer", ["json", "msgpack"])
def test_every_built_in_aggregate_of_every_type_says_what_spark_says(serializer, url, spark):
    check_aggregates(opaque(url, serializer=serializer), spark)


@pytest.mark.parametrize("each_url", [AEROSPIKE], indirect=True)
def test_every_built_in_aggregate_says_what_spark_says_in_a_stores_own_types(url, spark):
    check_aggregates(opaque(url), spark)


def check_aggregates(spec: Any, spark: SparkSession) -> None:
    batches = [spark.createDataFrame(value_rows(batch), VALUE_SCHEMA) for batch in range(3)]
    job = newStream("values", batches[0]).groupBy("k").persistentAggregate(spec, **AGGREGATES)
    for batch_id, frame in enumerate(batches):
        job(frame, batch_id)
    found = contents(spec.backend, "values")
    expected = spark_says(batches[0].union(batches[1]).union(batches[2]))
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        for name, value in values.items():
            if isinstance(value, float):
                assert found[key][name] == pytest.approx(value), (key, name)
            else:
                assert found[key][name] == value, (key, name)


def test_a_mean_of_decimals_is_rounded_as_spark_rounds(spark, tmp_path):
    cents = [(sign, Decimal(sign) / 100 if at == 0 else Decimal(0)) for sign in (1, -1) for at in range(32)]
    frame = spark.createDataFrame(cents, "k int, amount decimal(12,2)")
    url = f"memory://{tmp_path.name}"
    newStream("s", frame).groupBy("k").persistentAggregate(opaque(url), mean=Avg("amount"))(frame, 0)
    said = {(row.k,): {"mean": row.mean} for row in frame.groupBy("k").agg(F.avg("amount").alias("mean")).collect()}
    assert contents(url, "s") == said == {(sign,): {"mean": sign * Decimal("0.000313")} for sign in (1, -1)}


class Distinct(CombinerAggregator):
    """The distinct values of a column, sorted."""

    def __init__(self, column: str) -> None:
        self.column = column

    def columns(self) -> list[str]:
        return [self.column]

    def init(self, row: Any) -> Any:
        return [] if row[self.column] is None else [row[self.column]]

    def combine(self, a: Any, b: Any) -> Any:
        return sorted({*a, *b})

    def zero(self) -> Any:
        return []


class Longest(ReducerAggregator):
    """Rows so far, and the longest string among them."""

    def init(self) -> Any:
        return {"rows": 0, "longest": ""}

    def reduce(self, acc: Any, row: Any) -> Any:
        return {"rows": acc["rows"] + 1, "longest": max(acc["longest"], row["s"] or "", key=lambda s: (len(s), s))}


def test_own_combiners_and_reducers_beside_built_in_ones(url, spark):
    rows = [
        [(f"k{n % 3}", f"{'x' * (n % 5)}{n % 4}", n) for n in range(60)],
        [("k0", "longest of all", 5), (None, None, None)],
    ]
    frames = [spark.createDataFrame(one, "k string, s string, i int") for one in rows]
    job = (
        newStream("own", frames[0])
        .groupBy("k")
        .persistentAggregate(
            opaque(url, chunk_size=2), distinct=Distinct("s"), longest=Longest(), total=Sum("i"), n=Count()
        )
    )
    for batch_id, frame in enumerate(frames):
        job(frame, batch_id)
    both = rows[0] + rows[1]
    expected = {}
    for key in ("k0", "k1", "k2", None):
        mine = [row for row in both if row[0] == key]
        strings = [s for _, s, _ in mine if s is not None]
        numbers = [i for _, _, i in mine if i is not None]
        expected[(key,)] = {
            "distinct": sorted(set(strings)),
            "longest": {"rows": len(mine), "longest": max([*strings, ""], key=lambda s: (len(s), s))},
            "total": sum(numbers) if numbers else None,
            "n": len(mine),
        }
    assert contents(url, "own") == expected


def test_a_hot_key_of_a_reducer_does_not_wait_in_memory(spark, tmp_path):
    url = f"memory://{tmp_path.name}"
    frame = spark.range(25_000).select(F.lit("0").alias("k"), F.lit("ab").alias("s"), F.col("id").alias("i"))
    job = (
        newStream("hot", frame)
        .groupBy("k")
        .persistentAggregate(opaque(url), longest=Longest(), n=Count(), total=Sum("i"), distinct=Distinct("s"))
    )
    for batch_id in range(2):
        job(frame, batch_id)
    assert contents(url, "hot") == {
        ("0",): {
            "longest": {"rows": 50_000, "longest": "ab"},
            "n": 50_000,
            "total": 24_999 * 25_000,
            "distinct": ["ab"],
        }
    }


class InPlace(ReducerAggregator):
    """Changes its accumulator, as it may, and removes the key at a negative number."""

    def init(self) -> Any:
        return {"n": 0}

    def reduce(self, acc: Any, row: Any) -> Any:
        if row["i"] < 0:
            return None
        acc["n"] += row["i"]
        return acc


def test_a_reducer_that_works_in_place_does_not_change_the_value_before(url, spark):
    frame = spark.createDataFrame([("a", 5)], "k string, i int")
    job = newStream("s", frame).groupBy("k").persistentAggregate(opaque(url), n=InPlace())
    for batch_id in range(2):
        job(frame, batch_id)
    with open_reader(url, "s") as reader:
        assert reader.get("a") == {"n": {"n": 10}}
    ledger = Ledger(opaque(url, "s").open(), "s")
    ledger.rollback()
    assert contents(url, "s") == {("a",): {"n": {"n": 5}}}


def test_a_key_that_a_reducer_removes_can_come_back_in_the_same_batch(url, spark):
    rows = [("a", 1), ("a", -1), ("a", 2)]
    frame = spark.createDataFrame(rows, "k string, i int").coalesce(1)
    for state, spec in (("one", opaque(url, "one")), ("many", opaque(url, "many"))):
        job = newStream("s", frame).groupBy("k").persistentAggregate(spec, n=InPlace())
        if state == "one":
            job(frame, 0)
        else:
            for batch_id, row in enumerate(rows):
                job(spark.createDataFrame([row], frame.schema), batch_id)
        assert contents(url, state) == {("a",): {"n": {"n": 2}}}


def test_one_batch_given_to_a_state_twice_is_an_error_and_not_half_a_count(url, spark, visits):
    visits.put("0", [("a", 1), ("b", 2)])
    for _ in range(2):  # the next start finds the first half committed
        job = counts_of(visits, spark, opaque(url))

        def halves(frame: DataFrame, batch_id: int, job: Any = job) -> None:
            job(frame.where("user_id = 'a'"), batch_id)
            job(frame.where("user_id <> 'a'"), batch_id)

        query = visits.stream(spark).writeStream.foreachBatch(halves).trigger(availableNow=True)
        with pytest.raises(StreamingQueryException, match="twice in one run"):
            query.option("checkpointLocation", str(visits.checkpoint)).start().awaitTermination(60)
        assert isinstance(job.last_error, errors.UsageError)


def test_a_batch_of_other_types_than_the_stream_had_is_refused(url, spark):
    frame = spark.createDataFrame([("a", 1)], "k string, i bigint")
    job = newStream("s", frame).groupBy("k").persistentAggregate(opaque(url), total=Sum("i"))
    for other in (frame.withColumn("i", F.lit(1.5)), frame.drop("i"), frame.withColumn("k", F.lit(1))):
        with pytest.raises(errors.StateSchemaError, match="the column '[ik]' as"):
            job(other, 0)


def test_a_checkpoint_that_is_not_new_is_told_how_to_begin_a_state(url, spark):
    frame = spark.createDataFrame([("a", 1)], "k string, i bigint")
    by_k = newStream("s", frame).groupBy("k")
    with pytest.raises(errors.MissingBatchesError, match="no state 's' here yet.*with_empty_batches.*on_gap='accept'"):
        by_k.persistentAggregate(opaque(url), n=Count())(frame, 501)
    with pytest.raises(errors.StateNotFoundError):
        open_reader(url, "s")
    by_k.persistentAggregate(opaque(url, on_gap="accept"), n=Count())(frame, 501)
    by_k.persistentAggregate(opaque(url), n=Count())(frame, 502)
    assert contents(url, "s") == {("a",): {"n": 2}}


def test_column_names_that_are_also_used_inside_stay_apart(url, spark):
    frame = spark.createDataFrame([("x", 1, 2, 3)], "`a.b` string, key0 int, value0 int, `rows` int")
    stream = newStream("s", frame)
    stream.groupBy("a.b", "rows").persistentAggregate(opaque(url, "native"), key1=Sum("key0"), partial0_0=Max("rows"))(
        frame, 0
    )
    stream.groupBy("a.b", "key0").persistentAggregate(opaque(url, "folded"), rows=Rows())(frame, 0)
    assert contents(url, "native") == {("x", 3): {"key1": 1, "partial0_0": 3}}
    assert contents(url, "folded") == {("x", 1): {"rows": [{"a.b": "x", "key0": 1, "value0": 2, "rows": 3}]}}


class Rows(ReducerAggregator):
    def init(self) -> Any:
        return []

    def reduce(self, acc: Any, row: Any) -> Any:
        return [*acc, dict(row)]


def test_an_ungrouped_aggregate_has_the_empty_key(url, spark, visits):
    visits.put("0", [("a", 1), ("b", 2)])
    job = newStream("total", visits.stream(spark)).persistentAggregate(opaque(url), n=Count(), bytes=Sum("bytes"))
    finish(job.start(visits.checkpoint, trigger=AVAILABLE))
    visits.put("1", [("c", 5)])
    finish(job.start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url, "total") == {(): {"n": 3, "bytes": 8}}


def test_an_empty_batch_is_committed_and_changes_nothing(url, spark):
    frame = spark.createDataFrame([("a", 1)], "k string, i int")
    grouped = newStream("grouped", frame).groupBy("k").persistentAggregate(opaque(url), n=Count())
    total = newStream("total", frame).persistentAggregate(opaque(url), n=Count())
    own = newStream("own", frame).groupBy("k").persistentAggregate(opaque(url), d=Distinct("i"))
    for job, state in ((grouped, "grouped"), (total, "total"), (own, "own")):
        job(frame, 0)
        before = contents(url, state)
        job(frame.where("i > 5"), 1)
        assert contents(url, state) == before
        with open_reader(url, state) as reader:
            assert (reader.ledger().last_commit.batch_id, reader.ledger().last_commit.rows) == (1, 0)


def test_new_values_come_after_the_commit_and_using_them_twice_writes_once(url, spark, visits):
    got: list[tuple[int, dict[str, Any]]] = []

    def downstream(new_values: DataFrame, batch_id: int) -> None:
        with open_reader(url, "visits") as reader:
            assert reader.ledger().last_commit.batch_id == batch_id
        assert new_values.columns == ["user_id", "visits", "bytes"]
        assert new_values.count() == new_values.count()
        got.append((batch_id, {row["user_id"]: (row["visits"], row["bytes"]) for row in new_values.collect()}))

    job = counts_of(visits, spark, opaque(url)).newValuesStream().foreachBatch(downstream)
    visits.put("0", [("a", 1), ("b", 2), ("a", 3)])
    visits.put("1", [("c", 1), ("a", 1)])
    finish(job.start(visits.checkpoint, trigger=AVAILABLE))
    assert got == [(0, {"a": (2, 4), "b": (1, 2)}), (1, {"c": (1, 1), "a": (3, 5)})]
    assert contents(url, "visits") == visits.truth()


@pytest.mark.parametrize("spec_of", [opaque, transactional])
def test_a_batch_that_is_committed_already_is_not_redone_but_its_new_values_come_again(spec_of, url, spark, visits):
    got: list[dict[str, int]] = []
    job = (
        counts_of(visits, spark, spec_of(url))
        .newValuesStream()
        .foreachBatch(lambda frame, _: got.append({row["user_id"]: row["visits"] for row in frame.collect()}))
    )
    visits.put("0", [("a", 1), ("b", 2)])
    visits.put("1", [("a", 1), ("c", 2)])
    finish(job.start(visits.checkpoint, trigger=AVAILABLE))
    assert crash_between(visits.checkpoint) == 1
    finish(job.start(visits.checkpoint, trigger=AVAILABLE))
    assert got == [{"a": 1, "b": 1}, {"a": 2, "c": 1}, {"a": 2, "c": 1}]
    assert contents(url, "visits") == visits.truth()


def test_a_field_can_be_added_to_a_state_that_is_there(url, spark, tmp_path):
    frame = spark.createDataFrame([("a", 5), ("b", None)], "k string, i int")
    grouped = newStream("grows", frame).groupBy("k")
    grouped.persistentAggregate(opaque(url), n=Count())(frame, 0)
    wider = grouped.persistentAggregate(opaque(url), total=Sum("i"), n=Count())
    wider(frame.where("k = 'a'"), 1)
    assert contents(url, "grows") == {("a",): {"n": 2, "total": 5}, ("b",): {"n": 1, "total": None}}
    with pytest.raises(errors.StateSchemaError, match="total Sum"):
        grouped.persistentAggregate(opaque(url), n=Count())(frame, 2)
    with pytest.raises(errors.StateSchemaError, match=r"Sum\(i\)"):
        grouped.persistentAggregate(opaque(url), n=Count(), total=Max("i"))(frame, 2)
    with pytest.raises(errors.StateSchemaError, match="transactional"):
        grouped.persistentAggregate(transactional(url), total=Sum("i"), n=Count())(frame, 2)


def test_a_sum_beyond_64_bits_is_an_error_and_nothing_counts(url, spark):
    frame = spark.createDataFrame([("a", 2**62), ("b", 1)], "k string, i bigint")
    job = newStream("sums", frame).groupBy("k").persistentAggregate(opaque(url), total=Sum("i"))
    job(frame, 0)
    with pytest.raises(errors.ValueOverflowError, match="64 bits"):
        job(frame.union(frame), 1)  # in the batch itself
    with pytest.raises(errors.ValueOverflowError, match="64 bits"):
        job(frame, 1)  # together with what is stored
    assert contents(url, "sums") == {("a",): {"total": 2**62}, ("b",): {"total": 1}}


class Breaks(CombinerAggregator):
    def init(self, row: Any) -> Any:
        raise RuntimeError("no luck")

    def combine(self, a: Any, b: Any) -> Any:
        return a


class MakesObjects(CombinerAggregator):
    def init(self, row: Any) -> Any:
        return {1, 2}

    def combine(self, a: Any, b: Any) -> Any:
        return a


def test_what_a_task_raises_arrives_as_itself(url, spark):
    frame = spark.createDataFrame([("a", 1)], "k string, i int")
    by_k = newStream("s", frame).groupBy("k")
    with pytest.raises(errors.AggregatorError, match=r"Breaks\.init raised RuntimeError: no luck") as caught:
        by_k.persistentAggregate(opaque(url, "breaks"), n=Breaks())(frame, 0)
    assert caught.value.aggregator == "Breaks"
    with pytest.raises(errors.SerializationError, match=r"\{1, 2\} \(set\)"):
        by_k.persistentAggregate(opaque(url, "objects"), n=MakesObjects())(frame, 0)


def test_a_streaming_query_that_fails_says_why_and_the_job_keeps_the_error(url, spark, visits):
    visits.put("0", [("a", 1)])
    finish(counts_of(visits, spark, opaque(url)).start(visits.checkpoint, trigger=AVAILABLE))
    job = counts_of(visits, spark, opaque(url))
    query = job.start(visits.checkpoint.with_name("another"), trigger=AVAILABLE)
    with pytest.raises(StreamingQueryException, match="StateOwnershipError: state 'visits' belongs to"):
        query.awaitTermination(60)
    assert isinstance(job.last_error, errors.StateOwnershipError)


def test_stopping_a_query_in_mid_batch_starts_nothing_anew(spark, visits, tmp_path, caplog):
    """A job that was cancelled is not a job that failed."""
    visits.put("0", [(f"u{n}", n) for n in range(100)])
    started = tmp_path / "started"

    over = tmp_path / "over"

    def slow(user):
        started.touch()
        wait_for(over.exists, "the test to be over")
        return user

    stream = visits.stream(spark).withColumn("user_id", F.udf(slow, "string")("user_id"))
    job = (
        newStream("slow", stream)
        .groupBy("user_id")
        .persistentAggregate(opaque(f"sqlite:///{tmp_path}/s.db"), n=Count())
    )
    query = job.start(visits.checkpoint)
    wait_for(started.exists, "the batch to be under way")
    with caplog.at_level(logging.WARNING, "mapstate"):
        query.stop()
    assert not query.isActive
    over.touch()  # the worker outlives its task, and would keep one of the two slots
    assert "anew" not in caplog.text


def test_text_that_is_not_utf8_is_an_error_that_names_the_column(url, spark):
    """Spark's strings are bytes, and a log may hold any."""
    frame = spark.createDataFrame([(b"ok",), (b"\xff\xfe",)], "raw binary").select(
        F.col("raw").cast("string").alias("k")
    )
    by_k = newStream("utf8", frame).groupBy("k")
    for state, aggregate in (("native", Count()), ("folded", Distinct("k"))):
        with pytest.raises(errors.SerializationError, match="'k'.*make_valid_utf8"):
            by_k.persistentAggregate(opaque(url, state), n=aggregate)(frame, 0)


def kept(stream: Any, **aggregates: Any) -> Any:
    return stream.groupBy("k").persistentAggregate(opaque("memory://"), **aggregates)


BAD = [
    (lambda s: s.groupBy(), errors.ConfigurationError, "at least one column"),
    (lambda s: s.groupBy("nix"), errors.UnknownColumnError, "'nix'.*k, i, s, at, m"),
    (lambda s: s.groupBy("k", "k"), errors.DuplicateNameError, "'k'"),
    (lambda s: s.groupBy("m"), errors.UnsupportedTypeError, "map<string,string>"),
    (lambda s: kept(s, k=Count()), errors.DuplicateNameError, "'k'"),
    (lambda s: kept(s, __Mapstate_n=Count()), errors.DuplicateNameError, "begin with __mapstate_ are"),
    (
        kept,
        errors.ConfigurationError,
        "at least one aggregate",
    ),
    (
        lambda s: kept(s, n=Count),
        errors.ConfigurationError,
        "class Count",
    ),
    (
        lambda s: kept(s, n=Sum("nix")),
        errors.UnknownColumnError,
        "'nix'",
    ),
    (
        lambda s: kept(s, n=Sum("s")),
        errors.UnsupportedTypeError,
        "a number",
    ),
    (
        lambda s: kept(s, n=Min("m")),
        errors.UnsupportedTypeError,
        "order",
    ),
    (lambda s: s.groupBy("k").persistentAggregate("memory://", n=Count()), errors.ConfigurationError, "opaque"),
    (lambda s: s.groupBy("k").persistentAggregate(opaque("memory://"), K=Count()), errors.DuplicateNameError, "'k'"),
    (lambda s: opaque("redis://:s3[cret@host:port/0"), errors.ConfigurationError, "no URL like"),
    (lambda s: opaque("memory://", ttl="5"), errors.ConfigurationError, "ttl"),
    (lambda s: opaque("memory://", name=5), errors.ConfigurationError, "5 cannot name"),
    (lambda s: opaque("nix://there"), errors.UnknownSchemeError, "nix://.*memory://"),
    (lambda s: opaque("there"), errors.UnknownSchemeError, "without a scheme"),
    (lambda s: opaque("memory://", name="a:b"), errors.ConfigurationError, "'a:b'"),
    (lambda s: opaque("memory://", chunk_size=0), errors.ConfigurationError, "chunk_size"),
    (lambda s: opaque("memory://", colour="red"), errors.ConfigurationError, "colour"),  # type: ignore[call-arg]
    (lambda s: opaque("memory://", serializer="pickle"), errors.ConfigurationError, "'pickle'"),
    (lambda s: opaque("memory://", apply_on="executors"), errors.ConfigurationError, "one process"),
    (lambda s: newStream("a b", s.df), errors.ConfigurationError, "'a b'"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_input_is_refused_by_name_before_anything_runs(case, spark):
    frame = spark.createDataFrame([], "k string, i int, s string, at timestamp, m map<string,string>")
    ask, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        ask(newStream("bad", frame))


class HoldsALock(CombinerAggregator):
    def __init__(self) -> None:
        self.guard = threading.Lock()

    init = combine = None


def test_an_aggregator_that_cannot_be_pickled_is_named_with_the_attribute(spark):
    frame = spark.createDataFrame([], "k string")
    with pytest.raises(errors.NotPicklableError, match="HoldsALock.*'guard', a lock"):
        newStream("s", frame).groupBy("k").persistentAggregate(opaque("memory://"), n=HoldsALock())


@pytest.mark.since("4.0", "collations")
def test_a_collated_key_is_refused(spark):
    frame = spark.createDataFrame([("a",)], "k string").select(F.collate("k", "UTF8_LCASE").alias("k"))
    with pytest.raises(errors.UnsupportedTypeError, match="collat"):
        newStream("s", frame).groupBy("k")


class _EverythingSaid(logging.Handler):
    """What py4j logs, with what it codes in base64 decoded."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[bytes] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.said.append(text.encode())
        for coded in re.findall(r"j([A-Za-z0-9+/]{64,}={0,2})", text):
            self.said.append(base64.b64decode(coded[: len(coded) // 4 * 4]))

    def holds(self, text: str) -> bool:
        return any(text.encode() in one for one in self.said)


@pytest.fixture
def py4j_log() -> Iterator[_EverythingSaid]:
    """py4j at DEBUG, which logs each command that it sends to the JVM."""
    log, handler = logging.getLogger("py4j"), _EverythingSaid()
    before = log.level, log.propagate
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
    log.setLevel(before[0])
    log.propagate = before[1]


@pytest.mark.redis
def test_a_password_out_of_the_environment_is_not_in_what_py4j_logs(
    spark, visits, start_redis, monkeypatch, py4j_log, tmp_path
):
    """In the session of these tests the JVM was started before the variable was set, so its workers lack it."""
    password = token_hex(16)
    server = start_redis(requirepass=password)
    visits.put("0", [("a", 1), ("b", 2)])
    url = f"redis://default@127.0.0.1:{server.port}/0?password_env=MAPSTATE_TEST_PASSWORD"

    def run(spec: Any, checkpoint: str) -> Any:
        counts = counts_of(visits, spark, spec)
        with suppress(StreamingQueryException):
            finish(counts.start(str(tmp_path / checkpoint), trigger=AVAILABLE))
        return counts

    missing = f"MAPSTATE_TEST_PASSWORD, which is not set on {socket.gethostname()}"
    with pytest.raises(errors.ConfigurationError, match=missing):  # of start itself
        run(opaque(url, name="nothing"), "0")
    monkeypatch.setenv("MAPSTATE_TEST_PASSWORD", password)
    with pytest.raises(errors.StateNotFoundError):  # nothing was written, not even a ledger
        contents(url, "nothing")

    counts = run(opaque(url, name="executors"), "1")
    assert isinstance(counts.last_error, errors.ConfigurationError)
    assert missing in str(counts.last_error)
    assert contents(url, "executors") == {}
    assert py4j_log.holds("MAPSTATE_TEST_PASSWORD")  # the task was logged, and is read here
    assert run(opaque(url, name="driver", apply_on="driver"), "2").last_error is None
    assert contents(url, "driver") == visits.truth()
    assert not py4j_log.holds(password)

    monkeypatch.setitem(spark.sparkContext.environment, "MAPSTATE_TEST_PASSWORD", password)
    assert run(opaque(url, name="executors"), "1").last_error is None
    assert contents(url, "executors") == visits.truth()
    assert py4j_log.holds(password)  # which is why docs/operating.md warns of spark.executorEnv


def test_a_worker_does_not_search_what_it_has_imported_for_garbage_after_each_task(spark, tmp_path):
    frame = spark.range(10).selectExpr("cast(id as string) AS k")
    rows = newStream("rows", frame).groupBy("k")
    counts = rows.persistentAggregate(opaque(f"sqlite:///{tmp_path}/s.db", apply_on="executors"), n=Count())
    before = gc.get_freeze_count()  # of what the tests have collected
    counts(frame, 0)

    def kept_out(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # in here it is pickled by value
        for _ in batches:
            yield pa.RecordBatch.from_arrays([pa.array([gc.get_freeze_count()])], ["objects"])

    asked = spark.range(2).mapInArrow(kept_out, "objects bigint")
    wait_for(lambda: any(row.objects > 10_000 for row in asked.collect()), "the worker that had the batch")
    assert gc.get_freeze_count() <= before, "this process is its user's"


def test_a_state_is_not_started_without_a_checkpoint_unless_somebody_says_so(spark, visits, tmp_path):
    """Its second start would be another query's, and refused."""
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", [("a", 1)])
    stream = newStream("visits", visits.stream(spark)).groupBy("user_id")
    counts = stream.persistentAggregate(opaque(url), visits=Count())
    with pytest.raises(errors.UsageError, match=r"needs a checkpointLocation: .* Nothing was started"):
        counts.start(trigger=AVAILABLE)
    assert not (tmp_path / "state.db").exists()
    finish(counts.start(options={"checkpointLocation": str(visits.checkpoint)}, trigger=AVAILABLE))
    assert contents(url, "visits") == {("a",): {"visits": 1}}
    other = stream.persistentAggregate(opaque(url, "once"), visits=Count())
    finish(other.start(checkpointLocation=None, trigger=AVAILABLE))
    assert contents(url, "once") == {("a",): {"visits": 1}}
