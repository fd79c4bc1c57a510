"""apply_on="auto": the driver applies batches that stay small, and never one that is not."""

from __future__ import annotations

import threading
from typing import Any

import fast_start
import pytest
from cases import full
from every_store import AEROSPIKE, REDIS
from py4j.clientserver import ClientServerConnection
from spark_fixtures import AVAILABLE, Visits, finish

from mapstate import Collect, Count, Sum, newStream, opaque, open_reader
from mapstate.spark.driver import on_driver, state
from mapstate.spark.driver.batch import BatchDriver
from mapstate.spark.executor.task import BatchTask

pytestmark = pytest.mark.spark

SOME = 20  # keys that still are a small batch


class Job:
    """A state whose batches have as many keys as they are told, each key twice."""

    def __init__(self, spark: Any, url: str, *, also: Any = None, **options: Any) -> None:
        self._spark = spark
        self.url = url
        rows = newStream("rows", spark.createDataFrame([], "k bigint, n bigint")).groupBy("k")
        fields = {"n": Count(), "total": Sum("n")} | (also or {})
        self._state = rows.persistentAggregate(opaque(url, "s", **options), **fields)
        self.reports: list[Any] = []
        self._state.on_batch(self.reports.append)
        self._sizes: list[int] = []

    def batch(self, keys: int) -> str:
        """Where it was applied: on a driver there is one task."""
        frame = self._spark.range(2 * keys).selectExpr(f"id % {max(keys, 1)} AS k", "id AS n").repartition(3)
        self._state(frame, len(self._sizes))
        self._sizes.append(keys)
        return "driver" if self.reports[-1].partitions == 1 else "executors"

    def check(self) -> None:
        """All that was counted is what the batches had."""
        with open_reader(self.url, "s") as reader:
            found = {key: (fields["n"], fields["total"]) for (key,), fields in reader.scan()}
        expected = {
            key: (
                sum(2 for size in self._sizes if key < size),
                sum(2 * key + size for size in self._sizes if key < size),
            )
            for key in range(max(self._sizes))
        }
        assert found == expected


@pytest.fixture
def small(spark, monkeypatch):
    monkeypatch.setattr(state, "MOST_SMALL", SOME)
    shown = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", "false")  # else small partitions become one, as on a driver
    yield
    spark.conf.set("spark.sql.adaptive.enabled", shown)


@pytest.mark.parametrize("each_url", [full("memory"), REDIS, AEROSPIKE], indirect=True)
def test_the_driver_applies_small_batches_behind_some_of_them(spark, small, each_url):
    job = Job(spark, each_url)
    where = [job.batch(keys) for keys in (3, SOME, 0, 5, SOME, 0, 7)]
    first = "driver" if each_url.startswith("memory") else "executors"
    assert where == [first, first, first, *["driver"] * 4]
    job.check()
    assert [report.rows for report in job.reports] == [6, 2 * SOME, 0, 10, 2 * SOME, 0, 14]


@pytest.mark.parametrize("keys", [SOME + 1, full(3 * SOME), full(100 * SOME)])
def test_a_large_batch_goes_to_the_executors_and_small_ones_have_to_come_again(spark, small, tmp_path, keys):
    job = Job(spark, f"sqlite:///{tmp_path}/state.db")
    where = [job.batch(size) for size in (1, 1, 1, 1, keys, 1, 1, 1, 1)]
    assert where == [*["executors"] * 3, "driver", *["executors"] * 4, "driver"]
    job.check()
    assert [report.attempt for report in job.reports] == [1] * 9


def test_of_a_large_batch_only_so_many_keys_reach_the_driver(spark, small, tmp_path, monkeypatch):
    job = Job(spark, f"sqlite:///{tmp_path}/state.db")
    for _ in range(3):
        job.batch(1)
    came = []
    collected = on_driver.collected

    def counted(rows: Any) -> Any:
        batches = collected(rows)
        came.append(sum(map(len, batches)))
        return batches

    monkeypatch.setattr(on_driver, "collected", counted)
    assert job.batch(1000 * SOME) == "executors"
    partitions = int(spark.conf.get("spark.sql.shuffle.partitions"))
    assert SOME < came[0] <= partitions * (SOME + 1)
    job.check()


@pytest.mark.parametrize(
    "options",
    [{"apply_on": "executors"}, {"also": {"seen": Collect("n", most=100)}}],
    ids=["executors", "collections"],
)
def test_what_stays_on_executors(spark, small, tmp_path, options):
    job = Job(spark, f"sqlite:///{tmp_path}/state.db", **options)
    assert [job.batch(2) for _ in range(6)] == ["executors"] * 6


def test_an_attempt_on_the_driver_that_fails_is_made_again(spark, small, tmp_path, monkeypatch):
    job = Job(spark, f"sqlite:///{tmp_path}/state.db", max_attempts=1)
    for _ in range(3):
        job.batch(4)
    called = BatchTask.__call__
    failing = [OSError("no")]

    def failed(self: Any, batches: Any) -> Any:
        if failing:
            raise failing.pop()
        return called(self, batches)

    monkeypatch.setattr(BatchTask, "__call__", failed)
    with pytest.raises(OSError, match="no"):
        job.batch(4)
    assert job.batch(4) == "driver"
    job.check()


def test_a_small_batch_of_a_file_asks_the_jvm_54_times(spark, visits: Visits, tmp_path, monkeypatch):
    """Each is a message and its answer. A batch of a few rows waits for them as long as for its rows."""
    for kind, ask in fast_start.ASK.items():
        monkeypatch.setattr(kind, "__getattr__", ask)
    asked, asks, runs = list[int](), list[Any](), BatchDriver.run
    send = ClientServerConnection.send_command

    def counted(connection: Any, *command: Any) -> Any:
        asks.append(threading.get_ident())
        return send(connection, *command)

    def run(driver: BatchDriver, *batch: Any) -> None:
        asks.clear()
        runs(driver, *batch)
        asked.append(asks.count(threading.get_ident()))

    monkeypatch.setattr(ClientServerConnection, "send_command", counted)
    monkeypatch.setattr(BatchDriver, "run", run)
    for n in range(6):
        visits.put(str(n), [("u", n)])
    stream = newStream("visits", visits.stream(spark)).groupBy("user_id")
    counts = stream.persistentAggregate(opaque(f"sqlite:///{tmp_path}/s.db"), visits=Count(), bytes=Sum("bytes"))
    finish(counts.start(visits.checkpoint, trigger=AVAILABLE))
    assert len(asked) == 6
    assert asked[-1] <= 54
