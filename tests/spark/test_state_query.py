"""stateQuery on real Spark: what rows get from a state, and as of which batch."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_fixtures import Visits

from mapstate import Avg, Count, ReducerAggregator, Sum, errors, newStream, opaque, transactional
from mapstate.backends import resolve
from mapstate.operations.drop import drop
from mapstate.spark import (
    Collector,
    QueryFunction,
    SnapshotGet,
    newStaticState,
    stateQuery,
)
from mapstate.testing import FaultyBackend, crash_between
from mapstate.trident import TupleCollectionGet

pytestmark = pytest.mark.spark

AVAILABLE = {"availableNow": True}


@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.full), pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Any) -> str:
    """A store on the driver, and one that executors reach."""
    return f"memory://{tmp_path.name}" if request.param == "memory" else request.getfixturevalue("redis_url")


class Seen(ReducerAggregator):
    def init(self) -> Any:
        return {"sizes": []}

    def reduce(self, acc: Any, row: Any) -> Any:
        return {"sizes": sorted([*acc["sizes"], row["bytes"]])}


def visits_of(spark: SparkSession, rows: list[tuple[Any, Any]]) -> DataFrame:
    return spark.createDataFrame(rows, "user_id string, bytes bigint")


def kept(spark: SparkSession, spec: Any, rows: list[tuple[Any, Any]]) -> Any:
    frame = visits_of(spark, rows)
    job = (
        newStream("visits", frame)
        .groupBy("user_id")
        .persistentAggregate(spec, visits=Count(), mean=Avg("bytes"), seen=Seen())
    )
    job(frame, 0)
    return job


def test_rows_get_the_fields_of_their_keys_and_nulls_where_there_are_none(url, spark):
    spec = opaque(url, name="visits", chunk_size=2)
    job = kept(spark, spec, [("a", 1), ("a", 2), ("b", None), (None, 5)])
    asking = spark.createDataFrame(
        [(1, "a"), (2, "nobody"), (3, "a"), (4, None), (5, "b")], "n int, user_id string"
    ).coalesce(1)
    expected = {
        (1, "a", 2, 1.5, '{"sizes":[1,2]}'),
        (2, "nobody", None, None, None),
        (3, "a", 2, 1.5, '{"sizes":[1,2]}'),
        (4, None, 1, 5.0, '{"sizes":[5]}'),
        (5, "b", 1, None, '{"sizes":[null]}'),
    }
    for state in (spec, newStaticState(spec), job):
        found = stateQuery(asking, state, "user_id")
        assert found.columns == ["n", "user_id", "visits", "mean", "seen"]
        if state is not job and url.startswith("redis"):
            assert dict(found.dtypes)["mean"] == "double"
        assert {tuple(row) for row in found.collect()} == expected
    renamed = stateQuery(asking, spec, ["user_id"], {"visits": "n_visits"})
    assert {tuple(row) for row in renamed.collect()} == {row[:3] for row in expected}
    assert renamed.columns == ["n", "user_id", "n_visits"]


@pytest.mark.redis
def test_the_keys_of_a_chunk_are_read_once_and_in_bulk(redis_url, spark, tmp_path):
    kept(spark, opaque(redis_url, name="visits"), [("a", 1), ("b", 2)])
    backend = FaultyBackend(resolve(redis_url), str(tmp_path), (), record=True)
    asking = visits_of(spark, [(f"{'ab'[n % 2]}", n) for n in range(50)]).coalesce(1)
    found = stateQuery(asking, opaque(backend, name="visits", chunk_size=20), "user_id", "visits")
    assert Counter(row["visits"] for row in found.collect()) == {1: 50}
    reads = [call for call in backend.calls if call.method.startswith("multi_get")]
    assert [sorted(call.keys) for call in reads] == [["a", "b"]] * 3


def test_a_key_that_is_no_number_is_found(url, spark):
    frame = spark.createDataFrame([(math.nan,), (-0.0,), (math.nan,)], "x double")
    job = newStream("floats", frame).groupBy("x").persistentAggregate(opaque(url), n=Count())
    job(frame, 0)
    found = stateQuery(frame, job, "x").collect()
    assert sorted((repr(row["x"]), row["n"]) for row in found) == [("-0.0", 1), ("nan", 2), ("nan", 2)]


def test_an_ungrouped_state_is_added_to_every_row_and_a_whole_state_multiplies_them(url, spark):
    frame = visits_of(spark, [("a", 1), ("b", 2)])
    total = newStream("total", frame).persistentAggregate(opaque(url), n=Count(), bytes=Sum("bytes"))
    total(frame, 0)
    asking = spark.createDataFrame([("x",), ("y",)], "asks string")
    assert {tuple(row) for row in stateQuery(asking, total).collect()} == {("x", 2, 3), ("y", 2, 3)}
    named = stateQuery(asking, total, fields=["n"], query=SnapshotGet())
    assert {tuple(row) for row in named.collect()} == {("x", 2), ("y", 2)}
    by_user = newStream("by_user", frame).groupBy("user_id").persistentAggregate(opaque(url), n=Count())
    everything = stateQuery(asking, by_user, query=TupleCollectionGet())
    assert everything.collect() == []  # no batch has come
    by_user(frame, 0)
    assert sorted(tuple(row) for row in everything.collect() or ()) == (
        [] if url.startswith("memory") else [("x", "a", 1), ("x", "b", 1), ("y", "a", 1), ("y", "b", 1)]
    )
    again = stateQuery(asking, by_user, query=TupleCollectionGet(), fields={"user_id": "user", "n": "n"})
    assert sorted(tuple(row) for row in again.collect()) == [
        (who, user, 1) for who in ("x", "y") for user in ("a", "b")
    ]


class Friends(QueryFunction):
    """Emits a row per friend: a query function of one's own, over a state of mapstate."""

    def batch_retrieve(self, state: Any, keys: Any) -> Any:
        assert len(set(keys)) == len(keys)
        return [one and one["seen"]["sizes"] for one in state.multi_get(keys)]

    def execute(self, key: Any, result: Any, collector: Collector) -> None:
        for friend in result or ():
            collector.emit(friend, f"{key[0]}-{friend}")


def test_a_query_function_of_ones_own_emits_any_number_of_rows(url, spark):
    job = kept(spark, opaque(url, name="visits"), [("a", 1), ("a", 2), ("b", 7)])
    asking = spark.createDataFrame([("a",), ("b",), ("c",), ("a",)], "user_id string")
    found = stateQuery(asking, job, "user_id", "friend bigint, pair string", query=Friends())
    assert sorted(tuple(row) for row in found.collect()) == [
        ("a", 1, "a-1"),
        ("a", 1, "a-1"),
        ("a", 2, "a-2"),
        ("a", 2, "a-2"),
        ("b", 7, "b-7"),
    ]


def asked_while_kept(spark: SparkSession, visits: Visits, url: str, when: str | None, seen: list[Any]) -> Any:
    """A stream that asks the state that it updates, and keeps what it was told."""
    stream = newStream("visits", visits.stream(spark))
    counts = stream.groupBy("user_id").persistentAggregate(opaque(url), visits=Count())
    asking = stream.stateQuery(counts, "user_id", when=when)

    def keep(rows: DataFrame, batch_id: int) -> None:
        seen.append((batch_id, sorted(tuple(row) for row in rows.select("user_id", "visits").collect())))

    if when == "after":
        return asking.foreachBatch(keep)
    asking = asking.transform(lambda rows: rows.withColumnRenamed("visits", "already"))
    return asking.groupBy("user_id").persistentAggregate(
        opaque(url, name="visits"), visits=Count(), already=Sum("already")
    )


BATCHES = [[("a", 1), ("b", 2), ("a", 3)], [("a", 4), ("c", 1)]]


def test_a_stream_asks_the_state_that_it_updates_after_each_batch(url, spark, visits):
    seen: list[Any] = []
    job = asked_while_kept(spark, visits, url, "after", seen)
    for at, rows in enumerate(BATCHES):
        visits.put(f"{at}", rows)
    job.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    expected = [(0, [("a", 2), ("a", 2), ("b", 1)]), (1, [("a", 3), ("c", 1)])]
    assert seen == expected
    crash_between(visits.checkpoint)
    job.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    assert seen == [*expected, expected[1]]


def test_a_stream_asks_the_state_that_it_updates_before_each_batch_also_on_a_replay(url, spark, visits):
    """Each row adds what the state said before the batch, and says so again when the batch comes again."""
    stream = newStream("visits", visits.stream(spark))
    counts = stream.groupBy("user_id").persistentAggregate(opaque(url), visits=Count())
    told: list[Any] = []
    asks = stream.stateQuery(counts, "user_id")

    def keep(batch_df: DataFrame, batch_id: int) -> None:
        rows = batch_df
        for step in asks.steps:
            rows = step(rows, batch_id)
        before = sorted(tuple(row)[::2] for row in rows.collect())
        counts(batch_df, batch_id)
        # repeated, after the commit, the same frame says the same
        assert url.startswith("memory") or sorted(tuple(row)[::2] for row in rows.collect()) == before
        told.append((batch_id, before))

    def run() -> None:
        query = visits.stream(spark).writeStream.foreachBatch(keep).trigger(**AVAILABLE)
        query.option("checkpointLocation", str(visits.checkpoint)).start().awaitTermination()

    for at, rows in enumerate(BATCHES):
        visits.put(f"{at}", rows)
    run()
    expected = [(0, [("a", None), ("a", None), ("b", None)]), (1, [("a", 2), ("c", None)])]
    assert told == expected
    crash_between(visits.checkpoint)
    run()
    assert told == [*expected, expected[1]]
    visits.put("2", [("a", 1), ("b", 1)])
    run()
    assert told[-1] == (2, [("a", 3), ("b", 1)])


def test_a_state_that_aggregates_what_it_said_before_is_exact(url, spark, visits):
    for at, rows in enumerate([*BATCHES, [("a", 1), ("a", 1)]]):
        visits.put(f"{at}", rows)
    job = asked_while_kept_in_one(spark, visits, url)
    job.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    crash_between(visits.checkpoint)
    job.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    asking = spark.createDataFrame([("a",), ("b",), ("c",)], "user_id string")
    found = {row["user_id"]: (row["visits"], row["said"]) for row in stateQuery(asking, job, "user_id").collect()}
    assert found == {"a": (5, 2 + 3 + 3), "b": (1, None), "c": (1, None)}


def asked_while_kept_in_one(spark: SparkSession, visits: Visits, url: str) -> Any:
    stream = newStream("visits", visits.stream(spark))
    spec = opaque(url, name="visits")
    plain = stream.groupBy("user_id").persistentAggregate(spec, visits=Count())
    asks = stream.stateQuery(plain, "user_id", {"visits": "before"})
    return asks.groupBy("user_id").persistentAggregate(spec, visits=Count(), said=Sum("before"))


def test_new_values_ask_another_state(url, spark, visits):
    names = visits_of(spark, [("a", 40), ("b", 2)])
    limits = newStream("limits", names).groupBy("user_id").persistentAggregate(opaque(url), limit=Sum("bytes"))
    limits(names, 0)
    got: list[Any] = []
    stream = newStream("visits", visits.stream(spark))
    counts = stream.groupBy("user_id").persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))
    alerts = (
        counts.newValuesStream()
        .stateQuery(limits, "user_id")
        .transform(lambda rows: rows.where("bytes > limit"))
        .foreachBatch(lambda rows, batch_id: got.append((batch_id, [tuple(row) for row in rows.collect()])))
    )
    for at, rows in enumerate([[("a", 39), ("b", 2)], [("a", 2), ("c", 100)]]):
        visits.put(f"{at}", rows)
    alerts.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    assert got == [(0, []), (1, [("a", 2, 41, 40)])]


def test_a_state_that_starts_empty_is_asked_empty(url, spark):
    spec = opaque(url, name="visits", on_new_owner="reset")
    frame = visits_of(spark, [("a", 1)])
    for name in ("old", "new"):
        stream = newStream(name, frame)
        plain = stream.groupBy("user_id").persistentAggregate(spec, visits=Count(), said=Sum("bytes"))
        asks = stream.stateQuery(plain, "user_id", {"visits": "before"}).transform(
            lambda rows: rows.withColumn("bytes", F.col("before"))
        )
        job = asks.groupBy("user_id").persistentAggregate(spec, visits=Count(), said=Sum("bytes"))
        for batch_id in range(2):
            job(frame, batch_id)
        found = stateQuery(frame, job, "user_id").collect()[0]
        assert (found["visits"], found["said"]) == (2, 1)


def test_called_by_hand_new_values_ask_as_it_was_before_too(url, spark):
    got: list[Any] = []
    frame = visits_of(spark, [("a", 1)])
    stream = newStream("visits", frame).groupBy("user_id")
    counts = stream.persistentAggregate(opaque(url, name="counts", repeat="allowed"), n=Count())
    totals = counts.newValuesStream().persistentAggregate(opaque(url, name="totals"), n=Sum("n"))
    job = (
        totals.newValuesStream()
        .stateQuery(totals, (), {"n": "was"}, when="before")
        .foreachBatch(lambda rows, _: got.extend(tuple(row) for row in rows.collect()))
    )
    for batch_id in (0, 1, 1):
        job(frame, batch_id)
    assert got == [(1, None), (2, 1), (2, 1)]


def counted(spark: SparkSession, url: str, *keys: str, **aggregates: Any) -> None:
    """The state ``v`` of two users, made anew."""
    with suppress(errors.StateNotFoundError):
        drop(url, "v", force=True)
    frame = spark.createDataFrame([("fr", "ann", 1), ("de", "bob", 2)], "country string, user string, bytes bigint")
    job = newStream("v", frame).groupBy(*keys).persistentAggregate(opaque(url, name="v"), **aggregates)
    job(frame, 0)


MADE_ANEW = [
    (("user", "country"), {"n": Count()}, r"not keyed by \(country string, user string\)"),
    (("country", "user"), {"m": Count()}, "has no n bigint"),
    (("country", "user"), {"n": Avg("bytes")}, "has no n bigint"),
]


@pytest.mark.parametrize("case", range(len(MADE_ANEW)))
def test_a_state_that_was_made_anew_with_other_columns_is_no_state_without_the_keys(case, url, spark):
    """A stream asks for months as it was planned: nulls would say that nobody is there."""
    keys, aggregates, message = MADE_ANEW[case]
    counted(spark, url, "country", "user", n=Count())
    asked = spark.createDataFrame([("fr", "ann")], "country string, user string")
    asking = newStream("asking", asked).stateQuery(opaque(url, name="v"), ["country", "user"])
    got: list[Any] = []
    asking.foreachBatch(lambda rows, _: got.extend(row.n for row in rows.collect()))(asked, 0)
    counted(spark, url, *keys, **aggregates)
    with pytest.raises(Exception, match=f"StateSchemaError.*{message}|{message}"):
        asking.foreachBatch(lambda rows, _: got.extend(row.n for row in rows.collect()))(asked, 1)
    counted(spark, url, "country", "user", more=Sum("bytes"), n=Count())
    asking.foreachBatch(lambda rows, _: got.extend(row.n for row in rows.collect()))(asked, 2)
    assert got == [1, 1]


@pytest.mark.redis
def test_a_plain_streaming_frame_asks_while_it_runs(redis_url, spark, visits, tmp_path):
    spec = opaque(redis_url, name="visits")
    kept(spark, spec, [("a", 1), ("a", 2)])
    visits.put("0", [("a", 1), ("z", 1)])
    out = str(tmp_path / "out")
    asking = stateQuery(visits.stream(spark), spec, "user_id", ["visits"])
    writer = asking.writeStream.format("json").option("path", out).option("checkpointLocation", f"{tmp_path}/c")
    writer.trigger(**AVAILABLE).start().awaitTermination()
    rows = {json.dumps(row.asDict(), sort_keys=True) for row in spark.read.json(out).collect()}
    assert rows == {
        '{"bytes": 1, "user_id": "a", "visits": 2}',
        '{"bytes": 1, "user_id": "z", "visits": null}',
    }


class NoQuery(QueryFunction):
    batch_retrieve = execute = None


BAD = [
    (lambda s, c: s.stateQuery(c, "nix"), errors.UnknownColumnError, "'nix'.*user_id, bytes"),
    (lambda s, c: s.transform(lambda rows: rows.select("*", "user_id")).stateQuery(c, "user_id"),
     errors.DuplicateNameError, "'user_id', which the rows have more than once"),
    (lambda s, c: s.stateQuery(c, "user_id", ["nix"]), errors.UnknownColumnError, "'nix' to show; it has visits"),
    (lambda s, c: s.stateQuery(c, "bytes"), errors.StateSchemaError, r"\(bytes bigint\).*\(user_id string\)"),
    (lambda s, c: s.stateQuery(c), errors.StateSchemaError, r"by \(\)"),
    (lambda s, c: s.stateQuery(c, "user_id", {"visits": "Bytes"}), errors.DuplicateNameError, "'Bytes'"),
    (lambda s, c: s.stateQuery(c, "user_id", query=Friends()), errors.ConfigurationError, "DDL"),
    (lambda s, c: s.stateQuery(c, "user_id", query=Friends), errors.ConfigurationError, "QueryFunction"),
    (lambda s, c: s.stateQuery(c, "user_id", consistency="late"), errors.ConfigurationError, "'late'"),
    (lambda s, c: s.stateQuery(c, "user_id", when="soon"), errors.ConfigurationError, "'soon'"),
    (
        lambda s, c: s.stateQuery(c, "user_id", when="before", consistency="latest"),
        errors.ConfigurationError,
        "latest",
    ),
    (lambda s, c: s.stateQuery("memory://", "user_id"), errors.ConfigurationError, "not a str"),
    (lambda s, c: s.stateQuery(opaque("memory://"), "user_id"), errors.ConfigurationError, "names no state"),
    (lambda s, c: s.stateQuery(opaque("memory://", "nix"), "user_id"), errors.StateNotFoundError, "'nix'"),
    (lambda s, c: newStream("o", s.df.select("*")).stateQuery(c, "user_id", when="after"), errors.ConfigurationError,
     "this very stream"),
    (lambda s, c: newStaticState("memory://"), errors.ConfigurationError, "make_state"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_query_that_cannot_be_is_refused_before_anything_runs(case, spark):
    stream = newStream("bad", visits_of(spark, []))
    counts = stream.groupBy("user_id").persistentAggregate(opaque("memory://bad"), visits=Count())
    ask, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        ask(stream, counts)


def test_a_state_that_keeps_nothing_older_cannot_be_asked_as_it_was(spark):
    stream = newStream("bad", visits_of(spark, []))
    counts = stream.groupBy("user_id").persistentAggregate(transactional("memory://"), visits=Count())
    with pytest.raises(errors.ConfigurationError, match="transactional state keeps no value before"):
        stream.stateQuery(counts, "user_id", when="before")
