"""What a driver, its JVM, its Python workers and its store hold over many small batches, and what a batch takes.

The state is on Redis, with windows of a minute that fire and are purged. A batch is a second of event time: a row of
each of 500 users. One batch in fifty has 6,000 users. It goes to the executors, and so do the next three.

Memory is resident, but for the JVM's heap, which is what a garbage collection leaves. Of the workers it is that of the
largest. Redis is asked by `used_memory`, by `DBSIZE`, and for its clients. Windows open and end within 60 batches, so
each sample is taken at a multiple of 300.
"""

from __future__ import annotations

from turns import session  # isort: skip

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import redis
from growth import workers
from measuring import Answer, Goal, Row, table
from pyspark.sql import DataFrame, SparkSession
from servers import RedisServer

from mapstate import Count, newStream, opaque, open_reader

USERS, MOST_USERS, EVERY = 500, 6_000, 50
PHASE = 300
FLAT = (
    "driver MB",
    "JVM MB",
    "JVM heap MB",
    "worker MB",
    "connections",
    "keys",
    "Redis MB",
    "ledger bytes",
    "ms a batch",
)


def rows_of(spark: SparkSession) -> DataFrame:
    """The rows of all batches."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", MOST_USERS)
    values = source.option("advanceMillisPerBatch", 1_000).option("numPartitions", 2).load()
    kept = f"value % {MOST_USERS} < {USERS} OR value DIV {MOST_USERS} % {EVERY} = {EVERY - 1}"
    return values.where(kept).selectExpr(f"concat('user-', value % {MOST_USERS}) AS user_id", "timestamp AS at")


def state_of(rows: DataFrame, url: str) -> Callable[[DataFrame, int], None]:
    """The state, as a foreachBatch function."""
    stream = newStream("rows", rows)
    windows = stream.tumblingWindow("1 minute", timestampField="at", lag="10 seconds", retention="5 minutes")
    return windows.groupBy("user_id").persistentAggregate(opaque(url, "visits"), n=Count())


class Samples:
    """What is held after a batch, by the number of batches so far."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        self._jvm: Any = spark._jvm
        self._client = redis.Redis.from_url(url)
        self._since, self._batches = time.perf_counter(), 0
        self.held: dict[int, dict[str, float]] = {}

    def take(self, batches: int) -> None:
        """Look at everything."""
        seconds = (time.perf_counter() - self._since) / (batches - self._batches)
        me = psutil.Process()
        (java,) = (one for one in me.children() if one.name() == "java")
        resident = [psutil.Process(int(one.name)).memory_info().rss for one in workers()]
        self._jvm.System.gc()
        beans = self._jvm.java.lang.management.ManagementFactory
        self.held[batches] = {
            "driver MB": me.memory_info().rss / 2**20,
            "JVM MB": java.memory_info().rss / 2**20,
            "JVM heap MB": beans.getMemoryMXBean().getHeapMemoryUsage().getUsed() / 2**20,
            "worker MB": max(resident, default=0) / 2**20,
            "connections": self._client.info("clients")["connected_clients"],
            "keys": self._client.dbsize(),
            "Redis MB": self._client.info("memory")["used_memory"] / 2**20,
            "ledger bytes": sum(map(self._client.strlen, self._client.scan_iter("*!ledger", count=10_000))),
            "ms a batch": seconds * 1_000,
        }
        print(batches, {name: round(held, 1) for name, held in self.held[batches].items()}, flush=True)
        self._since, self._batches = time.perf_counter(), batches


def check(url: str) -> None:
    """Every row of each window that is there and over counts once."""
    with open_reader(url, "visits") as reader:
        report = reader.ledger().last_commit
        found = {(int(start.timestamp()), user): value["n"] for (start, user), value in reader.scan()}
    starts = {start for start, _ in found if start + 60 <= report.batch_id}
    assert starts, "no window is over"
    for start in starts:
        large = sum(batch % EVERY == EVERY - 1 for batch in range(start, start + 60))
        for user in range(MOST_USERS):
            assert found.get((start, f"user-{user}"), 0) == (60 if user < USERS else large), f"wrong at {start}"


def ask(batches: int = 20_000, samples: int = 20) -> Answer:
    step = max(batches // samples // PHASE, 1) * PHASE
    assert batches >= 5 * step, "too few batches to compare their first fifth with the last"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, RedisServer().start() as server:
        spark = session(spark__driver__memory="1g")
        rows = rows_of(spark)
        state, seen, done = state_of(rows, server.url), Samples(spark, server.url), threading.Event()

        def watched(batch_df: DataFrame, batch_id: int) -> None:
            state(batch_df, batch_id)
            if not done.is_set() and (batch_id + 1) % step == 0:
                seen.take(batch_id + 1)
            if batch_id + 1 >= batches:
                done.set()

        query = rows.writeStream.foreachBatch(watched).option("checkpointLocation", f"{folder}/checkpoint").start()
        while not done.wait(1):
            assert query.isActive, query.exception()
        query.stop()
        check(server.url)
    numbers = list(seen.held)
    early = [number for number in numbers if number <= batches // 5]
    late = [number for number in numbers if number > batches * 4 // 5]

    def row(name: str) -> Row:
        before = statistics.median(seen.held[number][name] for number in early)
        ratios = [seen.held[number][name] / before for number in late]
        return Row(f"{name}, the last fifth of {batches:,} small batches", "the first", ratios, Goal("most", 1.1))

    return Answer(
        [row(name) for name in FLAT],
        f"{batches:,} batches, a sample every {step:,}; of the first fifth the median",
        table(
            " | ".join(("batches", *FLAT)),
            [[f"{number:,}", *(f"{held[name]:,.0f}" for name in FLAT)] for number, held in seen.held.items()],
        ),
        {},
    )
