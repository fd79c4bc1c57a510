"""States with rolling windows as DataFrames, and what rows get from them."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from every_store import AEROSPIKE, FULL, REDIS, url_of
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from rolled import HOURS, MINUTE, T0, TENS, Rolled, Row, keyed
from service import client_of
from spark_fixtures import DATA_SOURCE
from states import Job

from mapstate import (
    CombinerAggregator,
    Count,
    Max,
    RollingWindows,
    Sum,
    Topology,
    newStream,
    opaque,
    open_async_reader,
    open_reader,
)
from mapstate.drpc import DRPCClient
from mapstate.errors import StaleBatchError, UnknownColumnError, UsageError
from mapstate.spark import DRPCServer, newStaticState, pointInTime, stateQuery
from mapstate.trident import TupleCollectionGet

pytestmark = [pytest.mark.spark]

ROWS = [Row(at, f"k{at % 7}", at) for at in range(60)]
KEYS = [f"k{at}" for at in range(7)]


@pytest.fixture(params=[*FULL[1:], REDIS, AEROSPIKE])
def url(request: Any, tmp_path: Any) -> str:
    return url_of(request, tmp_path)


@pytest.fixture
def tens(url: str) -> Rolled:
    state = keyed(url, retention=50)
    state.batch(*ROWS[:30])
    state.batch(*ROWS[30:])
    return state


def frame(spark: Any, url: str, schema: Any = None, **options: Any) -> Any:
    reader = spark.read.format("mapstate").options(url=url, state="s", **options)
    return (reader if schema is None else reader.schema(schema)).load()


def values(found: Any) -> dict[str, Any]:
    rows = [row.asDict() for row in found.collect()]
    return {row.pop("k"): row for row in rows}


@DATA_SOURCE
def test_a_frame_has_the_columns_of_all_windows(spark, url, tens):
    found = frame(spark, url, numPartitions=3)
    names = ["k", *(tens.right("k1", 0) or {})]
    assert [(one.name, one.dataType.simpleString()) for one in found.schema] == [
        (name, "string" if name == "k" else "bigint") for name in names
    ]
    assert values(found) == {key: tens.right(key) for key in KEYS}
    assert found.where("rows_10 > 0").count() == sum((tens.right(key) or {})["rows_10"] > 0 for key in KEYS)


@DATA_SOURCE
@pytest.mark.parametrize(("at", "end"), [("30", 30), ("33", 30), ("watermark", 59), ("500", 500)])
@pytest.mark.parametrize("as_of", ["batch", "scan"])
def test_all_tasks_end_at_one_time(spark, url, tens, at, end, as_of):
    options = {} if as_of == "scan" else {"numPartitions": 3}
    assert values(frame(spark, url, at=at, asOf=as_of, **options)) == {key: tens.right(key, end) for key in KEYS}


@DATA_SOURCE
def test_columns_and_keys_are_chosen(spark, url, tens):
    some = frame(spark, url, "total_10 bigint, k string", at="30")
    assert values(some) == {key: {"total_10": (tens.right(key, 30) or {})["total_10"]} for key in KEYS}
    assert sorted(row.k for row in frame(spark, url, "k string").collect()) == KEYS
    asked = frame(spark, url, keys='["k1", "nobody", "k2"]', at="30")
    assert values(asked) == {key: tens.right(key, 30) for key in ("k1", "k2")}
    assert values(asked.where("k = 'k2'")) == {"k2": tens.right("k2", 30)}
    with pytest.raises((AnalysisException, PySparkException, Py4JJavaError), match="no column 'total'"):
        frame(spark, url, "total bigint").collect()


@DATA_SOURCE
def test_a_page_needs_a_time(spark, url, tens):
    assert values(frame(spark, url, asOf="page", at="30")) == {key: tens.right(key, 30) for key in KEYS}
    for options in ({}, {"at": "watermark"}):
        with pytest.raises((AnalysisException, PySparkException), match="option at, as a time"):
            frame(spark, url, asOf="page", **options).collect()


@DATA_SOURCE
@pytest.mark.parametrize(("at", "says"), [("-500", "kept whole from"), ("x", "this is none"), ("1.5", "this is none")])
def test_a_time_that_cannot_be_is_refused_when_the_read_is_planned(spark, url, tens, at, says):
    with pytest.raises((AnalysisException, PySparkException), match=says):
        frame(spark, url, at=at).collect()


@DATA_SOURCE
def test_other_reads_have_no_time(spark, url, tens):
    Job(url, state="plain").batch(a=1)
    with pytest.raises((AnalysisException, PySparkException), match="no rolling windows"):
        spark.read.format("mapstate").options(url=url, state="plain", at="5").load().collect()
    assert tens.record.rolling is not None


@DATA_SOURCE
def test_the_windows_of_a_frame_end_now(spark, url):
    now = time.time_ns() // 1000
    state = keyed(url, (("10 minutes", "1 second"), ("1 hour", "1 minute")))
    state.batch(Row(now - 30 * 1_000_000, "a", 3), Row(now - 40 * MINUTE, "a", 4))
    found = frame(spark, url)
    assert values(found)["a"]["total_10_minutes"] == 3
    assert values(found.select("k", "rows_1_hour")) == {"a": {"rows_1_hour": 2}}  # of the same plan


@DATA_SOURCE
def test_an_old_plan_of_now_is_refused(url, monkeypatch):
    from mapstate.spark.source import MapStateDataSource

    state = keyed(url, HOURS)
    state.batch(Row(T0, "a", 3))
    clock = "mapstate.reader.rolling.time.time_ns"
    monkeypatch.setattr(clock, lambda: (T0 + 4 * MINUTE) * 1000)
    source = MapStateDataSource({"url": url, "state": "s"})
    schema = StructType.fromDDL(source.schema())

    def read(plan: Any, minutes: int) -> list[Any]:
        monkeypatch.setattr(clock, lambda: (T0 + minutes * MINUTE) * 1000)
        return [row for task in plan.partitions() for batch in plan.read(task) for row in batch.to_pylist()]

    plan = source.reader(schema)
    for minutes in (4, 9):  # a task of the next tile may be one of the same query
        assert read(plan, minutes)[0]["rows_1_hour"] == 1
    with pytest.raises(StaleBatchError, match="Load it anew"):
        read(plan, 11)
    monkeypatch.setattr(clock, lambda: (T0 + 4 * MINUTE) * 1000)
    for options in ({"at": "2026-11-27T10:00:00Z"}, {"at": "watermark"}, {"asOf": "scan"}):
        plan = MapStateDataSource({"url": url, "state": "s", **options}).reader(schema)
        assert read(plan, 30)[0]["rows_lifetime"] == (1 if "asOf" in options else 0)


@DATA_SOURCE
@pytest.mark.parametrize("url", [FULL[1], REDIS], indirect=True)
def test_every_way_of_reading_gives_whole_batches_while_they_run(spark, url):
    """Threads of one reader, an event loop, HTTP and a DataFrame, each beside the driver, which also loses attempts."""
    state, draw = keyed(url, retention=1000), random.Random(49)

    def more(at: int) -> list[Row]:
        late = [Row(at - draw.randint(0, 300), draw.choice(KEYS), draw.randint(-9, 9)) for _ in range(5)]
        return [Row(at, key, draw.randint(-9, 9)) for key in KEYS] + late

    state.batch(*more(1000))
    right = [[state.right(key, 1005) for key in KEYS]]
    gone, tried, seen = threading.Event(), threading.Semaphore(0), Counter[str]()

    def check(way: str, values: list[Any]) -> None:
        assert values in right, way
        seen[way] += 1

    def blocking(reader: Any, way: str) -> None:
        while not gone.is_set():
            check(way, reader.multi_get(KEYS, at=1005))

    def on_a_loop() -> None:
        async def read() -> None:
            async with open_async_reader(url, "s") as reader:
                while not gone.is_set():
                    check("event loop", await reader.multi_get(KEYS, at=1005))

        asyncio.run(read())

    def over_http() -> None:
        with client_of(url) as client:
            while not gone.is_set():
                asked = client.post("/states/s/values", json={"keys": KEYS, "at": 1005})
                check("HTTP", asked.json()["values"])

    def as_a_frame() -> None:
        while not gone.is_set():
            try:
                found = values(frame(spark, url, keys=json.dumps(KEYS), at="1005"))
                check("DataFrame", [found[key] for key in KEYS])
            except PySparkException as error:
                assert "Load it anew" in str(error)  # noqa: PT017  a batch came between plan and read
            finally:
                tried.release()

    with open_reader(url, "s") as reader, ThreadPoolExecutor(5) as pool:
        ways: list[Any] = [(blocking, reader, "thread 1"), (blocking, reader, "thread 2")]
        ways += [(on_a_loop,), (over_http,), (as_a_frame,)]
        done = [pool.submit(*way) for way in ways]
        end = time.monotonic() + 120
        while (len(seen) < len(ways) or len(right) < 6) and time.monotonic() < end and not any(map(Future.done, done)):
            rows = more(1000 + draw.randint(0, 4))
            state.attempt(*more(1000), only=KEYS[:3])  # it dies
            attempted = state.attempt(*rows)
            after = [*state.rows, *rows]
            right.append([state.right(key, 1005, rows=after) for key in KEYS])
            state.commit(attempted)
            tried.acquire(timeout=60)  # batches are as far apart as reads of a DataFrame
        gone.set()
        for one in done:
            one.result()
        assert reader.multi_get(KEYS, at=1005) == right[-1]
    assert len(seen) == len(ways), seen


class Names(CombinerAggregator):
    """A user's own, which neither the ledger nor a reader knows."""

    def init(self, row: Any) -> Any:
        return [row["n"]]

    def combine(self, one: Any, other: Any) -> Any:
        return one + other


@pytest.fixture
def own(url: str) -> Rolled:
    """A state with a field that only its job can join."""
    state = keyed(url, aggregates={"names": Names(), "rows": Count()}, retention=50)
    state.batch(*ROWS[:30])
    state.batch(*ROWS[30:])
    return state


@DATA_SOURCE
def test_a_frame_asks_for_no_combiner_that_its_columns_do_not_need(spark, url, own):
    right = {key: {"rows_10": (own.right(key, 30) or {})["rows_10"]} for key in KEYS}
    for options in ({"numPartitions": 3}, {"asOf": "scan"}, {"keys": json.dumps(KEYS)}):
        assert values(frame(spark, url, "rows_10 bigint, k string", at="30", **options)) == right
    needs = "the field 'names' is a Names"
    with pytest.raises((AnalysisException, PySparkException, Py4JJavaError), match=needs):
        frame(spark, url)
    with pytest.raises((AnalysisException, PySparkException, Py4JJavaError), match=needs):
        frame(spark, url, "names_10 string").collect()
    with pytest.raises((AnalysisException, PySparkException, Py4JJavaError), match="it has k, rows_10, "):
        frame(spark, url, "rows_11 bigint").collect()


def test_a_query_asks_for_no_combiner_that_its_columns_do_not_need(spark, url, own):
    state, asking = newStaticState(opaque(url, name="s")), spark.createDataFrame([(key,) for key in KEYS], "k string")
    right = {key: (own.right(key) or {})["rows_lifetime"] for key in KEYS}
    for fields in ("rows_lifetime", ["rows_lifetime"], {"rows_lifetime": "n"}):
        assert {row[0]: row[1] for row in stateQuery(asking, state, "k", fields).collect()} == right
    everything = stateQuery(asking.limit(1).drop("k"), state, fields=["k", "rows_lifetime"], query=TupleCollectionGet())
    assert {row.k: row.rows_lifetime for row in everything.collect()} == right
    for fields in (None, ["names_10"]):
        with pytest.raises(UsageError, match="the field 'names' is a Names"):
            stateQuery(asking, state, "k", fields)
    with pytest.raises(UnknownColumnError, match="it has rows_10, "):
        stateQuery(asking, state, "k", ["rows_11"])


def test_a_training_set_asks_for_no_combiner_that_its_columns_do_not_need(spark, url, own):
    labels = spark.createDataFrame([(key, 30) for key in KEYS], "k string, at bigint")
    state = opaque(url, name="s")
    found = pointInTime(labels, state, keys="k", at="at", columns={"rows_10": "n"})
    assert {row.k: row.n for row in found.collect()} == {key: (own.right(key, 30) or {})["rows_10"] for key in KEYS}
    for columns in (None, "names_10"):
        with pytest.raises(UsageError, match="the field 'names' is a Names"):
            pointInTime(labels, state, keys="k", at="at", columns=columns)


# stateQuery


def clicks(spark: Any, tmp_path: Any, url: str, make: Any = newStream) -> tuple[Any, Any]:
    spark.createDataFrame([*ROWS, Row(61, "k1", 100)], "at bigint, k string, n bigint").write.parquet(f"{tmp_path}/in")
    source = spark.readStream.schema("at bigint, k string, n bigint").parquet(f"{tmp_path}/in")
    stream = make("clicks", source)
    kept = (
        stream.window(RollingWindows.of(*TENS), timestampField="at", lag=0)
        .groupBy("k")
        .persistentAggregate(opaque(url, name="s"), rows=Count(), total=Sum("n"), largest=Max("n"))
    )
    return stream, kept


def test_rows_get_the_windows_of_a_state(spark, url, tens):
    asking = spark.createDataFrame([(key,) for key in [*KEYS, "nobody"]], "k string").repartition(3)
    found = stateQuery(asking, newStaticState(opaque(url, name="s")), "k", ["rows_10", "total_lifetime"])
    for row in found.collect():
        right = tens.right(row.k)
        assert (row.rows_10, row.total_lifetime) == (
            (None, None) if right is None else (right["rows_10"], right["total_lifetime"])
        )
    everything = stateQuery(asking.limit(1).drop("k"), opaque(url, name="s"), query=TupleCollectionGet())
    assert everything.count() == len(KEYS)
    assert everything.columns == ["k", *(tens.right("k1", 0) or {})]


def test_all_rows_of_a_query_have_one_now(spark, url):
    now = time.time_ns() // 1000
    state = keyed(url, (("1 minute", "1 second"), ("1 hour", "1 minute")))
    state.batch(*(Row(now - at * 1_000_000, f"k{at}", 1) for at in range(50)))
    asking = spark.range(50).select(F.concat(F.lit("k"), "id").alias("k")).repartition(5)
    found = {
        row.k: row.rows_1_minute for row in stateQuery(asking, opaque(url, name="s"), "k", ["rows_1_minute"]).collect()
    }
    assert len(found) == 50
    assert [found[f"k{at}"] for at in range(20)] == [1] * 20  # the others may leave the minute while this runs
    assert sorted(found.values(), reverse=True) == [found[f"k{at}"] for at in range(50)]


def test_a_stream_asks_its_own_windows_after_each_batch(spark, url, tmp_path):
    stream, kept = clicks(spark, tmp_path, url)
    found: dict[str, Any] = {}

    def keep(rows: Any, batch_id: int) -> None:
        found.update({row.k: (row.rows_lifetime, row.rows_10) for row in rows.collect()})

    job = stream.stateQuery(kept, "k", ["rows_lifetime", "rows_10"], when="after").foreachBatch(keep)
    job.start(tmp_path / "checkpoint", trigger={"availableNow": True}).awaitTermination()
    with open_reader(url, "s") as reader:
        own = {key: reader.get(key) or {} for key in KEYS}
    assert found == {key: (one["rows_lifetime"], one["rows_10"]) for key, one in own.items()}
    assert found["k1"] == (10, 3)


def test_a_stream_asks_its_own_windows_before_each_batch(spark, url, tmp_path):
    topology = Topology("clicks")
    stream, kept = clicks(spark, tmp_path, url, topology.newStream)
    asking = stream.stateQuery(kept, "k", ["rows_lifetime"], when="before")
    asking.groupBy("k").persistentAggregate(opaque(url, name="seen"), before=Max("rows_lifetime"), rows=Count())
    for _ in range(2):
        topology.start(tmp_path / "checkpoint", trigger={"availableNow": True}).awaitTermination()
        spark.createDataFrame([Row(62, "k1", 1)], "at bigint, k string, n bigint").write.mode("append").parquet(
            f"{tmp_path}/in"
        )
        with open_reader(url, "seen") as reader:
            last = reader.get("k1")
    assert last == {"before": 10, "rows": 11}


def test_a_drpc_function_reads_windows(spark, url, tens):
    server = DRPCServer(spark, port=0)
    server.function(
        "rows",
        lambda requests: requests.stateQuery(newStaticState(opaque(url, name="s")), "args", ["rows_lifetime"]),
    )
    with server, DRPCClient("127.0.0.1", server.port) as client:
        assert client.execute("rows", "k1") == [{"args": "k1", "rows_lifetime": 9}]


@DATA_SOURCE
def test_a_frame_cannot_follow_rolling_windows(spark, url, tens):
    for options, says in (({}, "keeps no changes|no change"), ({"at": "30"}, "not of readStream")):
        changes = spark.readStream.format("mapstate").options(url=url, state="s", **options).load()
        with pytest.raises(PySparkException, match=says):
            changes.writeStream.format("noop").trigger(availableNow=True).start().awaitTermination()
