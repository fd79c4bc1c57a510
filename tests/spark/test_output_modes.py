"""Output modes on real Spark: rows that are totals are refused before anything is written, all others are added up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import full
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, Visits, contents, finish
from test_partition_persist import Files

from mapstate import Count, Sum, Topology, errors, newStream, opaque, open_reader
from mapstate.spark import Collector, StateUpdater
from mapstate.spark.driver import access

pytestmark = pytest.mark.spark

Plan = Callable[[DataFrame], DataFrame]


def counted(rows: DataFrame) -> DataFrame:
    return rows.groupBy("user_id").count()


def by_sql(statement: str) -> Plan:
    def plan(rows: DataFrame) -> DataFrame:
        rows.createOrReplaceTempView("visits_of_modes")
        return rows.sparkSession.sql(statement)

    return plan


TOTALS: dict[str, Plan] = {
    "groupBy": counted,
    "below other steps": lambda rows: counted(rows).where("count > 0").withColumn("twice", F.col("count") * 2),
    "with": by_sql(
        "WITH c AS (SELECT user_id, count(*) AS count FROM visits_of_modes GROUP BY user_id) SELECT * FROM c"
    ),
    "distinct": by_sql("SELECT DISTINCT user_id, bytes AS count FROM visits_of_modes"),
}


def by_user(frame: DataFrame, url: str) -> Any:
    return newStream("by_user", frame).groupBy("user_id").persistentAggregate(opaque(url), n=Sum("count"))


def of_topology(frame: DataFrame, url: str) -> Any:
    topology = Topology("site")
    stream = topology.newStream("visits", frame)
    stream.groupBy("user_id").persistentAggregate(opaque(url, "by_user"), n=Sum("count"))
    stream.persistentAggregate(opaque(url, "all"), n=Sum("count"))
    return topology


def by_hand(job: Any, frame: DataFrame, checkpoint: Path, mode: str) -> Any:
    query = frame.writeStream.foreachBatch(job).outputMode(mode).trigger(**AVAILABLE)
    return query.option("checkpointLocation", str(checkpoint)).start()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/modes.db"


@pytest.fixture
def three(visits: Visits) -> Visits:
    visits.put("0", [("a", 1), ("b", 2), ("a", 1)])
    visits.put("1", [("a", 1), ("c", 2), ("c", 2)])
    return visits


def nothing_is_written(url: str, *states: str) -> None:
    for state in states:
        with pytest.raises(errors.StateNotFoundError):
            open_reader(url, state)


@pytest.mark.parametrize("make", [by_user, of_topology])
@pytest.mark.parametrize("mode", ["complete", "Update"])
@pytest.mark.parametrize("plan", TOTALS)
def test_totals_are_refused_at_start(plan, mode, make, spark, three, url):
    job = make(TOTALS[plan](three.stream(spark)), url)
    with pytest.raises(errors.UsageError, match=r"sends totals, not increments.*Nothing was written.*Aggregate here"):
        job.start(three.checkpoint, trigger=AVAILABLE, outputMode=mode)
    assert not three.checkpoint.exists()
    nothing_is_written(url, "by_user", "all")


@pytest.mark.parametrize("make", [by_user, of_topology])
@pytest.mark.parametrize("mode", ["complete", "update"])
def test_totals_of_a_query_that_runs_are_refused_at_its_first_batch(mode, make, spark, three, url):
    frame = counted(three.stream(spark))
    job = make(frame, url)
    for _ in range(2):  # a start that failed leaves nothing behind that lets the next one through
        with pytest.raises(StreamingQueryException, match="sends totals, not increments"):
            by_hand(job, frame, three.checkpoint, mode).awaitTermination(60)
        assert isinstance(job.last_error, errors.UsageError)
        nothing_is_written(url, "by_user", "all")


def test_a_query_that_runs_is_asked_for_its_mode_once(spark, three, url, monkeypatch):
    asked = []
    monkeypatch.setattr(access.ClassicAccess, "check_running_increments", lambda own: asked.append(own))  # noqa: PLW0108  bound
    frame = three.stream(spark)
    job = newStream("by_user", frame).groupBy("user_id").persistentAggregate(opaque(url), visits=Count())
    finish(job.start(three.checkpoint, trigger=AVAILABLE))
    with open_reader(url, "by_user") as reader:
        assert reader.ledger().last_commit.batch_id == 1
    assert len(asked) == 1


INCREMENTS: dict[str, tuple[Plan, dict[Any, int]]] = {
    "no operator": (lambda rows: rows, {"a": 3, "b": 1, "c": 2}),
    "deduplication": (lambda rows: rows.dropDuplicates(["user_id", "bytes"]), {"a": 1, "b": 1, "c": 1}),
    "aggregate of what is no stream": (
        lambda rows: rows.join(
            rows.sparkSession.createDataFrame([("a",), ("a",), ("b",)], "user_id string").groupBy("user_id").count(),
            "user_id",
        ),
        {"a": 3, "b": 1},
    ),
}


@pytest.mark.parametrize(
    "plan", [full(plan) if plan == "aggregate of what is no stream" else plan for plan in INCREMENTS]
)
def test_in_update_mode_rows_that_come_once_are_added_up_as_in_append(plan, spark, three, url, tmp_path):
    make, truth = INCREMENTS[plan]
    frame = make(three.stream(spark))
    expected = {(user,): {"visits": visits} for user, visits in truth.items()}
    for mode in ("append", "update"):
        job = newStream("s", frame).groupBy("user_id").persistentAggregate(opaque(url, mode), visits=Count())
        finish(job.start(tmp_path / mode, trigger=AVAILABLE, outputMode=mode))
        assert contents(url, mode) == expected
    job = newStream("s", frame).groupBy("user_id").persistentAggregate(opaque(url, "by_hand"), visits=Count())
    finish(by_hand(job, frame, tmp_path / "by_hand", "update"))
    assert contents(url, "by_hand") == expected


def test_an_aggregation_with_a_watermark_is_added_up_in_append_mode(spark, three, url):
    rows = three.stream(spark).withColumn("at", F.to_timestamp(F.lit("2026-01-01 00:00:00")))
    late = rows.where("bytes > 1").withColumn("at", F.to_timestamp(F.lit("2026-01-02 00:00:00")))
    frame = rows.unionByName(late).withWatermark("at", "1 minute").groupBy(F.window("at", "1 hour"), "user_id").count()
    job = by_user(frame.select("user_id", "count"), url)
    finish(job.start(three.checkpoint, trigger=AVAILABLE))
    # the first hour of each, once, as it is closed
    assert contents(url, "by_user") == {(user,): {"n": n} for user, n in {"a": 3, "b": 1, "c": 2}.items()}


class Newest(StateUpdater):
    """Keeps totals as they are, and emits by how much they grew."""

    output = "user_id string, grown bigint"

    def update_state(self, state: Any, rows: Any, collector: Collector) -> None:
        for row in rows:
            collector.emit(row["user_id"], row["count"] - state.now.get(row["user_id"], 0))
            state.now[row["user_id"]] = row["count"]


@pytest.mark.parametrize("mode", ["complete", "update"])
def test_a_state_of_ones_own_takes_totals_and_what_it_emits_is_added_up(mode, spark, three, url, tmp_path):
    files = Files(tmp_path)
    frame = counted(three.stream(spark))
    totals = newStream("s", frame).partitionPersist(files, Newest(), ["user_id"], partitions=2)
    grown = totals.newValuesStream().groupBy("user_id").persistentAggregate(opaque(url, "grown"), n=Sum("grown"))
    finish(grown.start(three.checkpoint, trigger=AVAILABLE, outputMode=mode))
    truth = {"a": 3, "b": 1, "c": 2}
    assert files.contents() == truth
    assert contents(url, "grown") == {(user,): {"n": n} for user, n in truth.items()}


def test_a_function_of_ones_own_takes_totals(spark: SparkSession, three: Visits) -> None:
    got: list[Any] = []
    job = newStream("s", counted(three.stream(spark))).foreachBatch(lambda rows, _: got.append(rows.count()))
    finish(job.start(three.checkpoint, trigger=AVAILABLE, outputMode="complete"))
    assert got == [2, 3]
