"""Spark's readers of a name whose alias leads to another version."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession

from mapstate import Count, newStream, opaque
from mapstate.operations.swap import swap
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


@pytest.mark.redis
def test_a_stream_of_changes_ends_with_a_swap(spark, url, tmp_path):
    def follow(checkpoint: str) -> list[dict[str, Any]]:
        changes = spark.readStream.format("mapstate").options(url=url, state="v").load()
        query = (
            changes.writeStream.format("json")
            .option("checkpointLocation", f"{tmp_path}/{checkpoint}")
            .trigger(availableNow=True)
            .start(f"{tmp_path}/{checkpoint}.out")
        )
        query.awaitTermination()
        files = (tmp_path / f"{checkpoint}.out").glob("*.json")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    assert follow("one") == [{"user": "ann", "visits": 1}]
    swap(url, {"v": "v.2"}, force=True)
    with pytest.raises(StreamingQueryException, match="ChangesGoneError"):
        follow("one")
    assert sorted(row["user"] for row in follow("two")) == ["ann", "bob"]
