"""Sketches as state, beside Spark's own merge of the same rows."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import pytest
from cases import full
from pyspark.sql import functions as F
from spark_fixtures import contents

from mapstate import (
    ApproxCountDistinct,
    ApproxPercentiles,
    ApproxTopK,
    CombinerAggregator,
    Count,
    SketchBytes,
    ThetaSketch,
    errors,
    newStream,
    opaque,
    open_reader,
)
from mapstate.backends import resolve
from mapstate.protocol.ledgers import Ledgers
from mapstate.sketches import theta_difference, theta_estimate, theta_intersection, theta_union

pytestmark = [pytest.mark.spark, pytest.mark.since("4.1", "three of the four sketches")]

RANKS = [0.0, 0.1, 0.5, 0.9, 0.99, 1.0]


def aggregates(**others):
    return {
        "users": ApproxCountDistinct("user"),
        "names": ApproxCountDistinct("name", log2k=10),
        "theta": ThetaSketch("user"),
        "ms": ApproxPercentiles("ms", RANKS),
        "top": ApproxTopK(3, "word", tracked=100),
        "even": ApproxCountDistinct("user", where="user % 2 = 0"),
    } | others


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/state.db"


def rows(spark, count=60_000):
    """Keys with 3, some thousand and many users, and one of nulls only; two batches that overlap."""
    return spark.range(count).selectExpr(
        "id AS n",
        "CASE WHEN id % 1000 < 3 THEN 'few' WHEN id % 1000 = 3 THEN 'null' WHEN id % 10 = 4 THEN 'some' ELSE 'many' "
        "END AS k",
        "CASE WHEN id % 1000 = 3 THEN NULL WHEN id % 1000 < 3 THEN id % 1000 ELSE id % 45000 END AS user",
        "CASE WHEN id % 1000 <> 3 THEN concat('ü', id % 45000) END AS name",
        "CASE WHEN id % 1000 <> 3 THEN cast(id % 1000 AS decimal(8, 2)) END AS ms",
        "CASE WHEN id % 1000 <> 3 THEN concat('w', cast(log2(1 + id % 500) AS int)) END AS word",
    )


def job(url, frame, *, serializer="json", **others):
    spec = opaque(url, serializer=serializer)
    return newStream("s", frame).groupBy("k").persistentAggregate(spec, **aggregates(**others))


def raw(url):
    names = list(aggregates())
    with open_reader(url, "s", aggregators=dict.fromkeys(names, SketchBytes())) as reader:
        return dict(reader.scan())


@pytest.mark.parametrize("serializer", [full("json"), "msgpack"])
def test_two_batches_come_to_what_spark_merges(serializer, url, spark):
    frame = rows(spark)
    batches = [frame.where("n < 40000"), frame.where("n >= 20000")]
    state = job(url, frame, serializer=serializer)
    for at, batch in enumerate(batches):
        state(batch, at)
    merged = [
        batch.groupBy("k").agg(
            F.hll_sketch_agg("user").alias("users"),
            F.hll_sketch_agg("name", 10).alias("names"),
            F.theta_sketch_agg("user").alias("theta"),
            F.hll_sketch_agg(F.expr("CASE WHEN user % 2 = 0 THEN user END")).alias("even"),
        )
        for batch in batches
    ]
    wanted = (
        merged[0]
        .union(merged[1])
        .groupBy("k")
        .agg(
            *(F.hll_sketch_estimate(F.hll_union_agg(name)).alias(name) for name in ("users", "names", "even")),
            F.theta_sketch_estimate(F.theta_union_agg("theta")).alias("theta"),
        )
    )
    top = frame.where("n < 40000").union(frame.where("n >= 20000")).groupBy("k")
    tops = {row["k"]: row["top"] for row in top.agg(F.expr("approx_top_k(word, 3, 100)").alias("top")).collect()}
    kept = contents(url, "s")
    assert {key for (key,) in kept} == {"few", "null", "some", "many"}
    for row in wanted.collect():
        own = kept[row["k"],]
        for name in ("users", "names", "even", "theta"):
            assert own[name]["estimate"] == row[name], (row["k"], name)
            assert own[name]["lower"] <= row[name] <= own[name]["upper"]
        counts = [item["count"] for item in tops[row["k"]] if item["item"] is not None]
        assert [entry["estimate"] for entry in own["top"]] == counts
    assert kept["few",]["users"] == {"estimate": 3, "lower": 3, "upper": 3}
    assert (kept["null",]["ms"], kept["null",]["top"]) == (None, [])


def test_spark_reads_what_is_stored(url, spark):
    frame = rows(spark)
    state = job(url, frame)
    state(frame.where("n < 40000"), 0)
    state(frame.where("n >= 20000"), 1)
    shown, sketches = contents(url, "s"), raw(url)
    stored = [(k, *(bytes(one[name]) for name in ("users", "theta", "ms"))) for (k,), one in sketches.items()]
    read = spark.createDataFrame(stored, "k string, users binary, theta binary, ms binary").select(
        "k",
        F.hll_sketch_estimate("users").alias("users"),
        F.theta_sketch_estimate("theta").alias("theta"),
        F.kll_sketch_get_n_double("ms").alias("n"),
        F.when(F.col("k") != "null", F.kll_sketch_get_quantile_double("ms", F.lit(0.5))).alias("median"),
    )
    counted = {
        row["k"]: row["n"]
        for row in frame.where("n < 40000")
        .union(frame.where("n >= 20000"))
        .groupBy("k")
        .agg(F.count("ms").alias("n"))
        .collect()
    }
    for row in read.collect():
        own = shown[row["k"],]
        assert (own["users"]["estimate"], own["theta"]["estimate"]) == (row["users"], row["theta"])
        assert row["n"] == counted[row["k"]]
        assert row["median"] == (own["ms"] and own["ms"][2]["estimate"])


def test_a_million_rows_stay_within_the_published_errors(url, spark):
    """The factors above the published errors leave chance no room: KLL sketches draw at random, anew in each run."""
    frame = spark.range(1_000_000).selectExpr(
        "id AS n",
        "hash(id) AS user",
        "double(id) AS ms",
        "CASE WHEN id % 4 = 0 THEN 'a' WHEN id % 10 = 1 THEN 'b' ELSE concat('rare', id) END AS word",
    )
    state = newStream("s", frame).persistentAggregate(
        opaque(url),
        users=ApproxCountDistinct("user"),
        theta=ThetaSketch("user"),
        ms=ApproxPercentiles("ms", RANKS),
        top=ApproxTopK(2, "word", tracked=1000),
    )
    state(frame.where("n % 2 = 0"), 0)
    state(frame.where("n % 2 = 1"), 1)
    ((key, kept),) = contents(url, "s").items()
    exact = frame.select("user").distinct().count()
    assert key == ()
    for name, error in (("users", 1.04 / 64), ("theta", 1 / 64)):
        assert abs(kept[name]["estimate"] - exact) <= 3 * error * exact, name
        assert kept[name]["lower"] < kept[name]["estimate"] < kept[name]["upper"]
    for entry, rank in zip(kept["ms"], RANKS, strict=True):
        assert entry["rank"] == rank
        assert abs(entry["estimate"] / 1_000_000 - rank) <= 2 * 0.0133
        assert entry["lower"] <= entry["estimate"] <= entry["upper"]
        assert entry["upper"] - entry["lower"] <= 4 * 0.0133 * 1_000_000
    assert [entry["item"] for entry in kept["top"]] == ["a", "b"]
    for entry, count in zip(kept["top"], (250_000, 100_000), strict=True):
        assert entry["lower"] <= count <= entry["upper"]
        assert entry["upper"] - entry["lower"] <= 3.5 / 2048 * 1_000_000


def test_the_replay_of_an_opaque_state_counts_its_own_rows_only(url, spark, monkeypatch):
    first = spark.createDataFrame([("a", 1, "x"), ("a", 2, "x")], "k string, user bigint, word string")

    def start():
        return (
            newStream("s", first)
            .groupBy("k")
            .persistentAggregate(
                opaque(url),
                users=ApproxCountDistinct("user"),
                theta=ThetaSketch("user"),
                ms=ApproxPercentiles("user", [1.0]),
                top=ApproxTopK(9, "word"),
            )
        )

    start()(first, 0)

    def dies(*_):
        raise KeyboardInterrupt

    lost = spark.createDataFrame([("a", user, "lost") for user in range(100, 900)], first.schema)
    with monkeypatch.context() as patched:
        patched.setattr(Ledgers, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            start()(lost, 1)
    with open_reader(url, "s", consistency="latest") as latest:
        assert latest.get("a")["users"]["estimate"] > 700  # the attempt did write
    assert contents(url, "s")["a",]["users"]["estimate"] == 2
    start()(spark.createDataFrame([("a", 3, "y")], first.schema), 1)
    distinct = {"estimate": 3, "lower": 3, "upper": 3}
    assert contents(url, "s") == {
        ("a",): {
            "users": distinct,
            "theta": distinct,
            "ms": [{"rank": 1.0, "estimate": 3.0, "lower": 3.0, "upper": 3.0}],
            "top": [
                {"item": "x", "estimate": 2, "lower": 2, "upper": 2},
                {"item": "y", "estimate": 1, "lower": 1, "upper": 1},
            ],
        }
    }


class Longest(CombinerAggregator):
    """A user's own, which sends all fields through Python row by row."""

    def columns(self):
        return ("word",)

    def init(self, row):
        return len(row["word"] or "")

    def combine(self, a, b):
        return max(a, b)


def test_rows_folded_in_python_and_by_spark_hash_alike(tmp_path, spark):
    frame = rows(spark, 4000).where("n % 4 <> 1")
    found = []
    for name, others in (("spark", {}), ("python", {"longest": Longest()})):
        url = f"sqlite:///{tmp_path}/{name}.db"
        state = job(url, frame, **others)
        state(frame.where("n < 2000"), 0)
        state(frame.where("n >= 1500"), 1)
        found.append(contents(url, "s"))
    assert found[0].keys() == found[1].keys()
    for key, own in found[0].items():
        for name in ("theta", "top"):
            assert found[1][key][name] == own[name]
        for name in ("users", "names", "even"):  # the order of arrival shows in a sketch that is nearly empty
            assert found[1][key][name]["estimate"] == pytest.approx(own[name]["estimate"], rel=0.01)


def test_sets_of_several_keys_are_those_of_spark(url, spark):
    frame = rows(spark)
    state = job(url, frame)
    state(frame.where("n < 40000"), 0)
    state(frame.where("n >= 20000"), 1)
    sketches = raw(url)
    some, many = sketches["some",]["theta"], sketches["many",]["theta"]
    of_spark = spark.createDataFrame([(some, many)], "a binary, b binary").select(
        *(
            F.theta_sketch_estimate(function("a", "b"))
            for function in (F.theta_union, F.theta_intersection, F.theta_difference)
        )
    )
    own = theta_union([some, many]), theta_intersection([some, many]), theta_difference(some, many)
    assert [theta_estimate(one)["estimate"] for one in own] == list(of_spark.first())


def test_new_values_and_aggregates_of_a_batch_have_types(url, spark):
    frame = rows(spark, 2000)
    state, seen = job(url, frame), []
    values = state.newValuesStream()
    assert values.schema["users"].dataType.simpleString() == "struct<estimate:bigint,lower:bigint,upper:bigint>"
    assert values.schema["ms"].dataType.elementType.names == ["rank", "estimate", "lower", "upper"]
    values.foreachBatch(lambda found, _: seen.extend(found.collect()))
    state(frame, 0)
    kept = contents(url, "s")
    assert {row["k"]: row.asDict(recursive=True) for row in seen} == {k: {"k": k, **own} for (k,), own in kept.items()}
    of_batch = []
    whole = newStream("t", frame).groupBy("k").aggregate(**aggregates())
    whole.foreachBatch(lambda found, _: of_batch.extend(found.collect()))(frame, 0)
    assert {row["k"]: row["theta"].asDict() for row in of_batch} == {k: own["theta"] for (k,), own in kept.items()}


def test_a_reader_may_ask_for_other_ranks_and_another_k(url, spark):
    frame = rows(spark, 2000)
    job(url, frame)(frame, 0)
    others = {"ms": ApproxPercentiles("ms", [0.25]), "top": ApproxTopK(1, "word")}
    with open_reader(url, "s", aggregators=others) as reader:
        found = reader.get("many")
    assert ([entry["rank"] for entry in found["ms"]], len(found["top"])) == ([0.25], 1)


def test_a_state_of_another_size_is_another_field(url, spark):
    frame = rows(spark, 2000)
    job(url, frame)(frame, 0)
    state = job(url, frame, users=ApproxCountDistinct("user", log2k=14))
    with pytest.raises(errors.StateSchemaError, match="log2k=12"):
        state(frame, 1)


class WithoutPackage(ApproxCountDistinct):
    """On an executor that lacks the package; the driver has it."""

    def assemble(self, columns):
        with patch.dict(sys.modules, {"datasketches": None}):
            return super().assemble(columns)


def test_an_executor_without_the_package_writes_nothing(url, spark):
    frame = rows(spark, 2000)
    state = newStream("s", frame).groupBy("k").persistentAggregate(opaque(url), n=Count(), users=WithoutPackage("user"))
    with pytest.raises(errors.MissingDriverError, match=r"pip install 'mapstate\[sketches\]'"):
        state(frame, 0)
    with open_reader(url, "s", consistency="latest") as reader:
        assert list(reader.scan()) == []


def test_a_driver_without_the_package_makes_no_state(url, spark):
    frame = rows(spark, 10)
    with (
        patch.dict(sys.modules, {"datasketches": None}),
        pytest.raises(errors.MissingDriverError, match="ApproxCountDistinct needs the package 'datasketches'"),
    ):
        job(url, frame)
    with pytest.raises(errors.StateNotFoundError):
        open_reader(url, "s")


def test_a_damaged_sketch_is_named_with_its_key_and_a_scan_goes_on(url, spark):
    frame = rows(spark, 2000)
    state = job(url, frame, serializer="msgpack")
    state(frame, 0)
    store: Any = resolve(url).open("s")
    (record,) = store.multi_get(["many"])
    place = len(record) // 2
    store.multi_put(["many"], [record[:place] + bytes([record[place] ^ 64]) + record[place + 1 :]])
    store.close()
    seen = {}
    with open_reader(url, "s") as reader:
        with pytest.raises(errors.CorruptRecordError, match="state 's', key 'many'"):
            reader.get("many")
        with pytest.raises(errors.CorruptRecordError, match="'many'"):
            seen.update(reader.scan())
    assert {key for (key,) in seen} == {"few", "null", "some"}
    with pytest.raises(errors.CorruptRecordError, match="'many'"):
        state(frame, 1)
