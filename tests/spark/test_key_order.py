"""The keys of a task come in the order that its store takes best: `Backend.key_order`."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
from cases import full
from pyspark.sql import functions as F

from mapstate import Collect, Count, newStream, opaque
from mapstate.backends.redis import RedisClusterBackend
from mapstate.backends.redis.cluster_writer import by_slot_group
from mapstate.backing_map import Backend
from mapstate.errors import ConfigurationError
from mapstate.keys import KeyCodec
from mapstate.schema import KeyField
from mapstate.spark.driver import state
from mapstate.spark.driver.apply import Grouping, by_part
from mapstate.spark.driver.spark35 import calls

KEYS = [f"{letter}{number}" for letter in "zäaé漢B" for number in range(100)]


class Job:
    """A state that is given some keys, each twice, and tells in which order its tasks took them."""

    def __init__(self, spark: Any, url: str | Backend, apply_on: Any = "executors") -> None:
        self._spark = spark
        rows = newStream("rows", spark.createDataFrame([], "k string")).groupBy("k")
        self._state = rows.persistentAggregate(opaque(url, "s", apply_on=apply_on, chunk_size=50), n=Count())
        self._state.newValuesStream().foreachBatch(self._keep)
        self._batches = 0
        self.taken: list[list[str]] = []

    def _keep(self, frame: Any, _batch_id: int) -> None:
        found = frame.select(F.spark_partition_id(), "k").collect()
        self.taken = [[key for _, key in own] for _, own in groupby(found, itemgetter(0))]

    def batch(self, keys: list[str], seed: int) -> list[list[str]]:
        """The keys of each task, in the order in which it took them."""
        frame = self._spark.createDataFrame([(key,) for key in 2 * keys], "k string").orderBy(F.rand(seed))
        self._state(frame, self._batches)
        self._batches += 1
        assert sorted(key for own in self.taken for key in own) == sorted(keys)
        return self.taken


@pytest.fixture
def as_many_tasks(spark, monkeypatch):
    """As many tasks for every batch, whatever its size, and none is a small one."""
    monkeypatch.setattr(state, "MOST_SMALL", 10)
    before = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", "false")
    yield
    spark.conf.set("spark.sql.adaptive.enabled", before)


@pytest.mark.spark
@pytest.mark.usefixtures("as_many_tasks")
def test_sqlite_gets_the_keys_of_a_task_in_key_order(spark, tmp_path):
    job = Job(spark, f"sqlite:///{tmp_path}/state.db")
    for seed in (1, 2):
        taken = job.batch(KEYS, seed)
        assert len(taken) > 1
        assert taken == [sorted(own, key=str.encode) for own in taken]


@pytest.mark.spark
@pytest.mark.usefixtures("as_many_tasks")
def test_redis_gets_the_keys_of_a_task_in_one_order_in_every_batch(spark, redis_url):
    job = Job(spark, redis_url)
    first = job.batch(KEYS, 1)
    assert job.batch(KEYS, 2) == first
    some = set(KEYS[::3])
    assert job.batch(sorted(some), 3) == [[key for key in own if key in some] for own in first]


@pytest.mark.spark
@pytest.mark.usefixtures("as_many_tasks")
@pytest.mark.parametrize("apply_on", ["auto", full("executors")])
def test_a_large_batch_is_sorted_unless_batches_have_been_small_for_long(spark, tmp_path, monkeypatch, apply_on):
    """One that turns out to be large behind small ones is sorted, too, where that turns out before it is applied."""
    orders = []
    in_order = Grouping.in_order
    monkeypatch.setattr(Grouping, "in_order", lambda *args: orders.append(args[2]) or in_order(*args))
    job = Job(spark, f"sqlite:///{tmp_path}/state.db", apply_on=apply_on)
    for size in (0, 3, 600, 600, 3, 3, 3, 600, 600):
        job.batch(KEYS[:size], 1)
    assert orders == ["key"] * 7 + (["key"] if apply_on == "auto" else [None]) + ["key"]


@pytest.mark.spark
def test_collections_are_not_sorted(spark, tmp_path, monkeypatch):
    frame = spark.createDataFrame([("a", 1), ("b", 2)], "k string, n int")
    state = (
        newStream("rows", frame)
        .groupBy("k")
        .persistentAggregate(
            opaque(f"sqlite:///{tmp_path}/state.db", "s", apply_on="executors"), all=Collect("n", most=10)
        )
    )
    monkeypatch.setattr(type(frame), "sortWithinPartitions", None)
    state(frame, 0)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (["string"], [(key,) for key in KEYS]),
        (["bigint"], [(number,) for number in range(-50, 550)]),
        (["timestamp", "string"], [(dt.datetime.fromtimestamp(at, dt.UTC), key) for at in (0, 1e9) for key in KEYS]),
        (["date", "boolean"], [(dt.date.fromordinal(day), day % 2 == 0) for day in range(735_000, 735_600)]),
    ],
    ids=str,
)
def test_a_cluster_gets_slot_group_after_slot_group(spark, keys, rows):
    names = [f"key{at}" for at in range(len(keys))]
    frame = spark.createDataFrame(rows, ", ".join(map(" ".join, zip(names, keys, strict=True))))
    fields = [KeyField(name, kind) for name, kind in zip(names, keys, strict=True)]
    part = by_part(RedisClusterBackend(buckets=8).key_order, fields, [F.col(name) for name in names])
    one_task = frame.orderBy(F.rand(1)).coalesce(1).sortWithinPartitions(part)
    texts = KeyCodec(fields).encode_columns(
        [list(of) for of in calls().to_arrow(one_task).to_pydict().values()], len(rows)
    )
    groups = {key: part.group for part in by_slot_group(texts, 8) for key in part.keys}
    found = [groups[key] for key in texts]
    assert found == sorted(found)
    assert len(set(found)) == 8


@dataclass(frozen=True)
class Backwards:
    """A backend that takes keys in an order which there is not."""

    key_order: Any
    shared_between_processes = True

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("order", ["backwards", 0, 2**15])
def test_an_order_that_there_is_not_is_refused(order):
    with pytest.raises(ConfigurationError, match="unknown key_order"):
        opaque(Backwards(order), "s")
