"""A seed beside the same rows in ordinary batches, and beside the same aggregation that is written to Parquet.

All have the same files, and their turns begin with a store and a checkpoint that are empty:

    batches     the files one by one, a batch of a query each: how the history would be counted without a seed
    seed        `seed`, with a record per key
    blocks      `seed`, with 32 keys a block
    parquet     `groupBy().agg().write.parquet` of all files, in Spark alone

Figures are seconds of the whole, with what Spark does around a batch. Processor seconds are those of Spark, Python and
Redis together. After each turn the state has to have each key, with its count and its sum.

A hundred million rows over ten million keys, once, without the batches:

    make bench ARGS="--only seeding --no-write --sizes rows=100000000 keys=10000000 batches=0 turns=1 warm_up=0"
"""

from __future__ import annotations

from turns import Processor, session  # isort: skip  # finds the servers

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from measuring import Answer, Goal, Row, by_turns, ratios, spread, table
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from servers import RedisServer

from mapstate import Count, Sum, newStream, opaque, open_reader

BATCHES, SEED, BLOCKS, PARQUET = "batches", "seed", "seed, blocks", "parquet"
SCHEMA = "user_id string, bytes bigint"
KEYS_OF_BLOCK = 32
STRIDE = 48_271  # a prime, so that the users of a file are spread over all


class History:
    """Files of ``rows`` rows over ``keys`` users, each equally often, and what each user has to have in the end."""

    def __init__(self, folder: Path, rows: int, keys: int, files: int) -> None:
        self.folder = folder
        self.keys = keys
        self.visits = np.zeros(keys, dtype=np.int64)
        self.bytes = np.zeros(keys, dtype=np.int64)
        folder.mkdir()
        for number in range(files):
            ids = np.arange(number * rows // files, (number + 1) * rows // files)
            users, sizes = ids * STRIDE % keys, ids % 997
            self.visits += np.bincount(users, minlength=keys)
            self.bytes += np.bincount(users, weights=sizes, minlength=keys).astype(np.int64)
            columns = {"user_id": pa.array([f"user-{user}" for user in users]), "bytes": pa.array(sizes)}
            pq.write_table(pa.table(columns), folder / f"{number:05d}.parquet")

    def check(self, url: str, name: str) -> None:
        """Check that a state has each user, with its count and sum, and no other."""
        with open_reader(url, name) as reader:
            found = 0
            for page in reader.pages(50_000):
                found += len(page)
                for (user,), value in page:
                    at = int(user.removeprefix("user-"))
                    assert value == {"visits": self.visits[at], "bytes": self.bytes[at]}, f"{name}: {user} is {value}"
            assert found == self.keys, f"{name} has {found} keys"


class Ways:
    """The contestants, each of which returns when all rows are counted."""

    def __init__(self, spark: SparkSession, server: RedisServer, history: History, scratch: Path) -> None:
        self.spark, self.server, self.history, self.scratch = spark, server, history, scratch
        self.bytes_of_key: dict[str, float] = {}

    def batches(self) -> None:
        """Count the files in a batch each."""
        counts = self._state(BATCHES, maxFilesPerTrigger=1)
        counts.start(str(self.scratch / "checkpoint"), trigger={"availableNow": True}).awaitTermination()

    def seed(self, name: str, **options: Any) -> None:
        """Seed a state with all of them."""
        self._state(name, **options).seed(str(self.scratch / "checkpoint"))

    def parquet(self) -> None:
        """Aggregate all of them, and write that to files."""
        rows = self.spark.read.schema(SCHEMA).parquet(str(self.history.folder)).groupBy("user_id")
        rows.agg(F.count(F.lit(1)), F.sum("bytes")).write.parquet(str(self.scratch / "parquet"))

    def _state(self, name: str, maxFilesPerTrigger: int | None = None, **options: Any) -> Any:
        reading = self.spark.readStream.schema(SCHEMA)
        if maxFilesPerTrigger:
            reading = reading.option("maxFilesPerTrigger", maxFilesPerTrigger)
        users = newStream("rows", reading.parquet(str(self.history.folder))).groupBy("user_id")
        spec = opaque(self.server.url, name.replace(", ", "-"), **options)
        return users.persistentAggregate(spec, visits=Count(), bytes=Sum("bytes"))

    def clean(self, name: str) -> None:
        """Check what a way has left, and remove it."""
        with redis.Redis(port=self.server.port) as client:
            if name != PARQUET:
                self.bytes_of_key[name] = client.info("memory")["used_memory"] / self.history.keys
                self.history.check(self.server.url, name.replace(", ", "-"))
            client.flushall()
        shutil.rmtree(self.scratch)
        self.scratch.mkdir()


def ask(rows: int = 5_000_000, keys: int = 500_000, batches: int = 100, turns: int = 3, warm_up: int = 1) -> Answer:
    spark = session()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, RedisServer().start() as server:
        history = History(Path(place) / "input", rows, keys, batches or 100)
        (Path(place) / "scratch").mkdir()
        ways = Ways(spark, server, history, Path(place) / "scratch")
        blocks = max(keys // KEYS_OF_BLOCK, 1)
        contestants: dict[str, Callable[[], None]] = {
            SEED: lambda: ways.seed(SEED),
            BLOCKS: lambda: ways.seed(BLOCKS, blocks=blocks),
            PARQUET: ways.parquet,
        }
        if batches:
            contestants[BATCHES] = ways.batches
        processor = Processor()
        timed = {name: turn(ways, processor, name, work) for name, work in contestants.items()}
        seconds = by_turns(timed, turns, warm_up)
    spark.stop()
    spent = {
        name: [sum(turn.values()) - turn["idle"] for turn in own[warm_up:]] for name, own in processor.seconds.items()
    }
    against_batches = [
        Row(f"the same rows in {batches} batches", name, ratios(seconds[BATCHES], seconds[name]), Goal("least", 5))
        for name in (SEED, BLOCKS)
        if batches
    ]
    against_parquet = [
        Row(f"{name} of {rows:,} rows over {keys:,} keys", "Spark writes the same to Parquet", own, Goal("most", 2.5))
        for name in (SEED, BLOCKS)
        for own in [ratios(seconds[name], seconds[PARQUET])]
    ]
    lines = [
        (
            name,
            spread(own),
            f"{rows / statistics.median(own):,.0f}",
            spread(spent[name]),
            f"{ways.bytes_of_key[name]:.1f}" if name in ways.bytes_of_key else "",
        )
        for name, own in seconds.items()
    ]
    return Answer(
        against_batches + against_parquet,
        f"{rows:,} rows over {keys:,} keys in {batches or 100} files; a count and a sum; {turns} turns after "
        f"{warm_up} to warm up; opaque on Redis, `local[2]`",
        table("way | seconds | rows a second | processor seconds | bytes a key in Redis", lines),
        {f"seeding.{name}.seconds": statistics.median(own) for name, own in seconds.items()},
    )


def turn(ways: Ways, processor: Processor, name: str, work: Callable[[], None]) -> Callable[[], float]:
    """Time a way without the check behind it, and print what it took."""
    counted = processor.counted(name, lambda _frame, _batch: work())

    def timed() -> float:
        started = time.perf_counter()
        counted(None, 0)
        taken = time.perf_counter() - started
        ways.clean(name)
        print(f"{name}: {taken:.1f} s, {ways.bytes_of_key.get(name, 0):.1f} bytes a key in Redis", flush=True)
        return taken

    return timed
