"""What mapstate costs beside the wire and beside what people use today. ``make bench``.

Every contestant is a streaming query of its own over the same files: batches of a million rows, keyed by
user. They take turns batch by batch, so that a slow minute of the machine hits all of them; each
ratio is taken within one turn, and the median of the turns is what counts. The first batch warms up and
is not counted. At the end every store's contents are compared with an independent count.

    (a)  the aggregation alone, into Spark's noop sink
    (b)  the floor: (a), then raw MGET and MSET of equal payloads
    (c)  mapstate: opaque, transactional, non-transactional
    (d)  pipelined INCRBY from foreachPartition, written by hand; not exactly once
    (e)  Spark's own stateful aggregation on RocksDB, update mode, and an MSET upsert

Figures are seconds of the batch function; Spark's own bookkeeping around it is the same for all.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from servers import RedisServer

from mapstate import Count, newStream, non_transactional, opaque, open_reader, transactional

CHUNK = 2000
PAYLOAD = b"[280274529,3,2]"  # the length of an opaque record of a count
RESULTS = ROOT / "bench" / "RESULTS.md"

Contestant = Callable[[DataFrame, int], Any]


class Turns:
    """Lets one contestant run at a time, batch by batch, in the order given, and times each turn."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._condition = threading.Condition()
        self._at = 0
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.failed = False

    def take(self, name: str, contestant: Contestant) -> Contestant:
        """``contestant`` as a foreachBatch function that waits for its turn."""

        def timed(batch_df: DataFrame, batch_id: int) -> None:
            with self._condition:
                self._condition.wait_for(lambda: self.failed or self._names[self._at] == name)
            try:
                if self.failed:
                    return
                started = time.perf_counter()
                contestant(batch_df, batch_id)
                self.seconds[name].append(time.perf_counter() - started)
                print(f"  batch {batch_id}  {name:34s} {self.seconds[name][-1]:7.2f} s", flush=True)
            except BaseException:
                self.failed = True
                raise
            finally:
                with self._condition:
                    self._at = (self._at + 1) % len(self._names)
                    self._condition.notify_all()

        return timed


def aggregated(batch_df: DataFrame) -> DataFrame:
    return batch_df.groupBy("user_id").agg(F.count(F.lit(1)).alias("n"))


def noop(batch_df: DataFrame, _batch_id: int) -> None:
    aggregated(batch_df).write.format("noop").mode("overwrite").save()


def floor(url: str) -> Contestant:
    def raw(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = redis.Redis.from_url(url)
        done = 0
        for batch in batches:
            for start in range(0, batch.num_rows, CHUNK):
                keys = ["floor:" + user for user in batch.column(0).slice(start, CHUNK).to_pylist()]
                client.mget(keys)
                client.mset(dict.fromkeys(keys, PAYLOAD))
                done += len(keys)
        client.close()
        yield pa.RecordBatch.from_arrays([pa.array([done])], ["done"])

    return lambda batch_df, _: aggregated(batch_df).mapInArrow(raw, "done bigint").collect()


def by_hand(url: str) -> Contestant:
    def incr(rows: Iterator[Any]) -> None:
        client = redis.Redis.from_url(url)
        pipe = client.pipeline(transaction=False)
        for at, row in enumerate(rows, 1):
            pipe.incrby("hand:" + row["user_id"], row["n"])
            if at % CHUNK == 0:
                pipe.execute()
        pipe.execute()
        client.close()

    return lambda batch_df, _: aggregated(batch_df).foreachPartition(incr)


def upsert(url: str) -> Contestant:
    def raw(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = redis.Redis.from_url(url)
        for batch in batches:
            for start in range(0, batch.num_rows, CHUNK):
                part = batch.slice(start, CHUNK)
                keys = ["spark:" + user for user in part.column(0).to_pylist()]
                client.mset(dict(zip(keys, part.column(1).to_pylist(), strict=True)))
        client.close()
        yield pa.RecordBatch.from_arrays([pa.array([0])], ["done"])

    return lambda batch_df, _: batch_df.mapInArrow(raw, "done bigint").collect()


def make_input(folder: Path, batches: int, rows: int, keys: int) -> None:
    """One file per batch; every key comes equally often, in another order each time."""
    rng = np.random.default_rng(7)
    for batch in range(batches):
        users = rng.permutation(np.arange(rows) % keys)
        table = pa.table({"user_id": pa.array([f"user-{user}" for user in users])})
        pq.write_table(table, folder / f"batch-{batch:03d}.parquet", row_group_size=rows // 4)


def check(url: str, options: argparse.Namespace) -> None:
    """Every contestant's store holds the count of every key."""
    each, more = divmod(options.rows, options.keys)
    expected = {f"user-{key}": (options.batches + 1) * (each + (key < more)) for key in range(options.keys)}
    users = list(expected)
    client = redis.Redis.from_url(url)
    for prefix in ("hand:", "spark:"):
        for start in range(0, len(users), 50_000):
            some = users[start : start + 50_000]
            values = [int(value or 0) for value in client.mget([prefix + user for user in some])]
            assert values == [expected[user] for user in some], f"{prefix} counted wrong"
    client.close()
    for state in ("opaque", "transactional", "non-transactional"):
        with open_reader(url, state) as reader:
            for start in range(0, len(users), 50_000):
                some = users[start : start + 50_000]
                found = reader.multi_get([(user,) for user in some])
                assert found == [{"n": expected[user]} for user in some], f"{state} counted wrong"


def run(options: argparse.Namespace, url: str, folder: Path) -> dict[str, list[float]]:
    source = folder / "input"
    source.mkdir()
    make_input(source, options.batches + 1, options.rows, options.keys)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.memory", "4g")
        .config("spark.sql.shuffle.partitions", options.partitions)
        .config("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        .getOrCreate()
    )
    users = spark.readStream.schema("user_id string").option("maxFilesPerTrigger", 1).parquet(str(source))
    by_user = newStream("users", users).groupBy("user_id")
    recipes = {"opaque": opaque, "transactional": transactional, "non-transactional": non_transactional}
    contestants: dict[str, Contestant] = {
        "(a) noop": noop,
        "(b) floor: MGET + MSET": floor(url),
        **{
            f"(c) mapstate {name}": by_user.persistentAggregate(recipe(url, name), n=Count())
            for name, recipe in recipes.items()
        },
        "(d) INCRBY by hand": by_hand(url),
        "(e) Spark stateful + MSET": upsert(url),
    }
    turns = Turns(list(contestants))
    queries = []
    for at, (name, contestant) in enumerate(contestants.items()):
        stateful = name.startswith("(e)")
        frame = aggregated(users) if stateful else users
        queries.append(
            frame.writeStream.foreachBatch(turns.take(name, contestant))
            .outputMode("update" if stateful else "append")
            .option("checkpointLocation", str(folder / f"checkpoint-{at}"))
            .trigger(availableNow=True)
            .start()
        )
    for query in queries:
        query.awaitTermination()
    spark.stop()
    check(url, options)
    return {name: seconds[1:] for name, seconds in turns.seconds.items()}


ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ratios(seconds: dict[str, list[float]], over: str, under: str) -> list[float]:
    return [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]


def report(options: argparse.Namespace, seconds: dict[str, list[float]], server: str) -> str:
    """The tables, as Markdown."""
    a, b, c_opaque, c_trans, c_non, d, e = seconds
    goals = [
        ("opaque / floor (b)", ratios(seconds, c_opaque, b), "at most 1.3"),
        ("INCRBY by hand (d) / opaque", ratios(seconds, d, c_opaque), "at least 1.5"),
        ("Spark stateful (e) / opaque", ratios(seconds, e, c_opaque), "at least 2.0"),
        ("transactional / floor (b)", ratios(seconds, c_trans, b), ""),
        ("non-transactional / floor (b)", ratios(seconds, c_non, b), ""),
        ("floor (b) / noop (a)", ratios(seconds, b, a), ""),
    ]
    lines = [
        "# Results",
        "",
        "Made by `make bench`; see the head of `bench/run.py` for what is measured and how. Only the ratios travel",
        "to other machines. Medians, with the least and the greatest of all counted batches.",
        "",
        f"{options.batches} batches of {options.rows:,} rows over {options.keys:,} keys, after one to warm up;",
        f"`local[2]`, {options.partitions} shuffle partitions, chunks of {CHUNK:,} keys.",
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()},",
        f"PySpark {version('pyspark')}, redis-py {version('redis')}, {server}.",
        "Every store's contents were compared with an independent count after the run.",
        "",
        "| ratio | median (least to greatest) | goal |",
        "|---|---|---|",
        *(f"| {name} | {spread(values)} | {goal} |" for name, values, goal in goals),
        "",
        "| contestant | seconds a batch |",
        "|---|---|",
        *(f"| {name} | {spread(values)} |" for name, values in seconds.items()),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=400_000)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--no-write", action="store_true", help="leave bench/RESULTS.md as it is")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mapstate-bench-"))
    server = RedisServer()
    server.start()
    try:
        client = redis.Redis.from_url(server.url)
        name = f"Redis {client.info('server')['redis_version']}"
        client.close()
        text = report(options, run(options, server.url, folder), name)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(text)
    if not options.no_write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
