"""Streaming queries that take turns, batch by batch, over the same files."""

from __future__ import annotations

from measuring import ROOT  # isort: skip  # finds the servers

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

__all__ = [
    "ROOT",
    "Contestant",
    "Processor",
    "Turns",
    "aggregated",
    "make_file",
    "no_store",
    "noop",
    "run_streams",
    "session",
]

Contestant = Callable[[DataFrame, int], Any]


class Turns:
    """Let one contestant run at a time, batch by batch, in the given order, and time each turn.

    A turn is the batch function. With ``whole`` it is the time from a batch's start to the start of the next, which
    includes Spark's own bookkeeping. Then the last batch has no turn of its own.
    """

    def __init__(self, names: list[str], *, whole: bool = False) -> None:
        self._names = names
        self._whole = whole
        self._condition = threading.Condition()
        self._at = 0
        self._started: dict[str, float] = {}
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.failed = False

    def take(self, name: str, contestant: Contestant) -> Contestant:
        """Wrap ``contestant`` as a foreachBatch function that waits for its turn."""

        def timed(batch_df: DataFrame, batch_id: int) -> None:
            if self._whole and name in self._started:
                self._ended(name)
            with self._condition:
                self._condition.wait_for(lambda: self.failed or self._names[self._at] == name)
            if self.failed:
                return
            self._started[name] = time.perf_counter()
            try:
                contestant(batch_df, batch_id)
            except BaseException:
                self.failed = True
                raise
            finally:
                if not self._whole or self.failed:
                    self._ended(name)

        return timed

    def end(self, name: str) -> None:
        """Note that the query of ``name`` has had its last batch."""
        with self._condition:
            if self._whole and self._names[self._at] == name:
                self._next()

    def _ended(self, name: str) -> None:
        with self._condition:
            self.seconds[name].append(time.perf_counter() - self._started[name])
            self._next()

    def _next(self) -> None:
        self._at = (self._at + 1) % len(self._names)
        self._condition.notify_all()


_KINDS = {"java": "Spark's JVM", "redis-server": "Redis"}
_OTHERS = "Python"


class Processor:
    """Processor seconds of a turn, by kind of process under this one, and of idle cores."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[dict[str, float]]] = {}

    def counted(self, name: str, contestant: Contestant) -> Contestant:
        """Wrap ``contestant``, and add what it spends to ``seconds[name]``."""
        turns = self.seconds.setdefault(name, [])

        def function(batch_df: DataFrame, batch_id: int) -> None:
            before = self._spent()
            contestant(batch_df, batch_id)
            turns.append({kind: spent - before[kind] for kind, spent in self._spent().items()})

        return function

    def _spent(self) -> dict[str, float]:
        me = psutil.Process()
        spent = dict.fromkeys((*_KINDS.values(), _OTHERS), 0.0)
        for process in (me, *me.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                spent[_KINDS.get(process.name(), _OTHERS)] += times.user + times.system
        return spent | {"idle": psutil.cpu_times().idle}


def session(partitions: int = 2, **config: Any) -> SparkSession:
    """Start Spark with the settings of all of these questions."""
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.memory", "4g")
        .config("spark.sql.shuffle.partitions", partitions)
        .config("spark.sql.files.openCostInBytes", 0)  # else one task reads three quarters of a batch's file, or all
    )
    for name, value in config.items():
        builder = builder.config(name.replace("__", "."), value)
    return builder.getOrCreate()


def aggregated(batch_df: DataFrame) -> DataFrame:
    """Aggregate to one row per user."""
    return batch_df.groupBy("user_id").agg(F.count(F.lit(1)).alias("n"))


def noop(batch_df: DataFrame, _batch_id: int) -> None:
    """Run the aggregation alone."""
    aggregated(batch_df).write.format("noop").mode("overwrite").save()


def no_store(batch_df: DataFrame, _batch_id: int = 0) -> None:
    """Run the aggregation, and Python tasks that only read it: the time of a store that takes no time."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # in here it is pickled by value
        yield pa.RecordBatch.from_arrays([pa.array([sum(batch.num_rows for batch in batches)])], ["done"])

    aggregated(batch_df).mapInArrow(read, "done bigint").collect()


def make_file(folder: Path, number: int, rows: int, keys: int, seed: int = 7) -> None:
    """Write one batch: every key equally often, in an order of its own."""
    users = np.random.default_rng(seed + number).permutation(np.arange(rows) % keys)
    table = pa.table({"user_id": pa.array([f"user-{user}" for user in users])})
    pq.write_table(table, folder / f"batch-{number:03d}.parquet", row_group_size=max(rows // 4, 1))


def run_streams(
    spark: SparkSession,
    folder: Path,
    contestants: dict[str, Contestant],
    turns: Turns,
    *,
    stateful: dict[str, Callable[[DataFrame], DataFrame]] | None = None,
    schema: str = "user_id string",
) -> None:
    """Run a query for each, over ``folder``/input, until all files are done. ``stateful`` ones aggregate in Spark."""
    rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder / "input"))
    in_spark = stateful or {}
    queries = {}
    for name, contestant in contestants.items():
        frame = in_spark[name](rows) if name in in_spark else rows
        queries[name] = (
            frame.writeStream.foreachBatch(turns.take(name, contestant))
            .outputMode("update" if name in in_spark else "append")
            .option("checkpointLocation", str(folder / "checkpoints" / name))
            .trigger(availableNow=True)
            .start()
        )
    for name, query in queries.items():
        query.awaitTermination()
        turns.end(name)
