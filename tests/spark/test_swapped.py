"""Spark's readers of a name whose alias leads to another version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from spark_fixtures import DATA_SOURCE
from states import LoggedJob

from mapstate import Count, newStream, opaque
from mapstate.operations.drop import drop
from mapstate.operations.swap import keep_only, swap
from mapstate.spark import newStaticState, stateQuery

pytestmark = pytest.mark.spark


def count(spark: SparkSession, url: str, state: str, *users: str) -> None:
    """A version of one batch, with a change log."""
    frame = spark.createDataFrame([(user,) for user in users], "user string")
    spec = opaque(url, name=state, changes=100)
    newStream(state, frame).groupBy("user").persistentAggregate(spec, visits=Count())(frame, 0)


def read(spark: SparkSession, url: str) -> Any:
    return spark.read.format("mapstate").options(url=url, state="v").load()


def found(frame: Any) -> dict[str, int]:
    return {row["user"]: row["visits"] for row in frame.collect()}


@pytest.fixture
def url(spark: SparkSession, redis_url: str) -> str:
    """A store with two versions of ``v``."""
    count(spark, redis_url, "v", "ann")
    count(spark, redis_url, "v.2", "ann", "ann", "bob")
    return redis_url


@DATA_SOURCE
@pytest.mark.redis
def test_a_frame_reads_the_version_of_the_alias_and_one_planned_before_a_swap_is_refused(spark, url):
    before = read(spark, url)
    assert found(before) == {"ann": 1}
    swap(url, {"v": "v.2"}, force=True)
    assert found(read(spark, url)) == {"ann": 2, "bob": 1}
    with pytest.raises(PySparkException, match=r"StaleBatchError.*was swapped to 'v\.2'"):
        before.collect()


@pytest.mark.redis
def test_a_query_asks_the_version_of_the_alias(spark, url):
    asked = spark.createDataFrame([("ann",), ("bob",)], "user string")

    def answers() -> dict[str, Any]:
        found = stateQuery(asked, newStaticState(opaque(url, name="v")), ["user"], ["visits"])
        return {row["user"]: row["visits"] for row in found.collect()}

    assert answers() == {"ann": 1, "bob": None}
    swap(url, {"v": "v.2"}, force=True)
    assert answers() == {"ann": 2, "bob": 1}


def follow(spark: SparkSession, url: str, place: Path, **options: str) -> dict[str, int | None]:
    """What a sink has that keeps the last row of each key, behind a run of the query."""
    table: dict[str, int | None] = {}
    changes = spark.readStream.format("mapstate").options(**{"url": url, "state": "v"} | options).load()

    def keep(frame: Any, _: int) -> None:
        table.update({row[0]: row[1] for row in frame.collect()})

    query = changes.writeStream.foreachBatch(keep).option("checkpointLocation", str(place))
    query.trigger(availableNow=True).start().awaitTermination()
    return table


@DATA_SOURCE
@pytest.mark.redis
def test_a_stream_of_changes_ends_with_a_swap(spark, url, tmp_path):
    assert follow(spark, url, tmp_path / "one") == {"ann": 1}
    swap(url, {"v": "v.2"}, force=True)
    with pytest.raises(StreamingQueryException, match="ChangesGoneError"):
        follow(spark, url, tmp_path / "one")
    assert follow(spark, url, tmp_path / "two") == {"ann": 2, "bob": 1}


@DATA_SOURCE
@pytest.mark.redis
def test_a_stream_that_restarts_gets_the_whole_new_version_and_the_keys_that_it_lacks(spark, url, tmp_path):
    job = LoggedJob(url, state="w", owner="w")
    job.batch(ann=1, old=2, gone=3)
    other = LoggedJob(url, state="w.2", owner="w.2")
    other.batch(ann=5, new=6)

    def followed() -> dict[str, int | None]:
        return follow(spark, url, tmp_path / "one", onSwap="restart", state="w")

    assert followed() == {"ann": 1, "old": 2, "gone": 3}
    job.batch(gone=None)  # which the follower has not heard yet
    swap(url, {"w": "w.2"}, force=True)
    assert followed() == {"ann": 5, "new": 6, "old": None, "gone": None}
    other.batch(new=7)
    assert followed() == {"new": 7}
    with pytest.raises(PySparkException, match="onSwap is 'refuse' or 'restart'"):
        follow(spark, url, tmp_path / "two", onSwap="other")


@DATA_SOURCE
@pytest.mark.full
@pytest.mark.redis
def test_a_stream_cannot_restart_where_the_version_before_is_gone(spark, url, tmp_path):
    assert follow(spark, url, tmp_path / "one", onSwap="restart") == {"ann": 1}
    swap(url, {"v": "v.2"}, force=True)
    keep_only(url, "v")
    drop(url, "v")
    with pytest.raises(StreamingQueryException, match="StateNotFoundError"):
        follow(spark, url, tmp_path / "one", onSwap="restart")
