"""Batches of a stream with windows, beside the same batches into a plain state, and beside Spark's own windows.

A batch is a minute of rows, some out of order, into windows of ten minutes that are purged ten minutes after they have
fired. Every contestant is a streaming query of its own over the same files:

    windows       tumblingWindow and an opaque state, with the index, the watermark and the purge
    in blocks     the same with `blocks=` a thirty-second of the keys
    by_start      an opaque state by (start of the window, user), which never fires, and keeps everything
    stateful      withWatermark, groupBy(window) in update mode on RocksDB, and an MSET upsert (Redis only)
    noop          the aggregation alone, into Spark's noop sink (Redis only)

A figure is the seconds of ten batches, so it has the first rows of one window, and the purge of one.
"""

from __future__ import annotations

from turns import Contestant, Turns, run_streams, session  # isort: skip

import datetime as dt
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from measuring import Answer, Goal, Row, ratios, spread, table
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from servers import RedisServer

from mapstate import Count, newStream, opaque, open_reader

CHUNK = 2000
MINUTE = 60_000_000  # microseconds
MINUTES = 10  # of a window, and of a figure
WINDOW, LAG = f"{MINUTES} minutes", "1 minute"
SCHEMA = "at timestamp, user_id string"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def make_minute(folder: Path, minute: int, rows: int, keys: int) -> None:
    """Write one batch: every key equally often, up to half a minute late."""
    draw = np.random.default_rng(minute)
    users = draw.permutation(np.arange(rows) % keys)
    times = minute * MINUTE + draw.integers(-MINUTE // 2 if minute else 0, MINUTE, rows)
    columns = {
        "at": pa.array(times, pa.timestamp("us", tz="UTC")),
        "user_id": pa.array([f"user-{user}" for user in users]),
    }
    pq.write_table(pa.table(columns), folder / f"batch-{minute:03d}.parquet", row_group_size=max(rows // 4, 1))


def start() -> Column:
    """The start of a row's window."""
    return F.window("at", WINDOW).start.alias("start")


def counted(rows: DataFrame) -> DataFrame:
    """Aggregate to one row per window and user."""
    return rows.groupBy(start(), "user_id").agg(F.count(F.lit(1)).alias("n"))


def noop(batch_df: DataFrame, _batch_id: int) -> None:
    """Run the aggregation alone."""
    counted(batch_df).write.format("noop").mode("overwrite").save()


def in_spark(rows: DataFrame) -> DataFrame:
    """Aggregate in Spark's own state, one row per window and user."""
    windows = rows.withWatermark("at", LAG).groupBy(F.window("at", WINDOW), "user_id")
    return windows.agg(F.count(F.lit(1)).alias("n"))


def upsert(url: str) -> Contestant:
    """Write the rows of Spark's own state, under the microseconds of the window's start and the user."""

    def raw(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = redis.Redis.from_url(url)
        for batch in batches:
            for at in range(0, batch.num_rows, CHUNK):
                starts, users, counts = (column.to_pylist() for column in batch.slice(at, CHUNK).columns)
                keys = [f"spark:{one}|{user}" for one, user in zip(starts, users, strict=True)]
                client.mset(dict(zip(keys, counts, strict=True)))
        client.close()
        yield pa.RecordBatch.from_arrays([pa.array([0])], ["done"])

    def write(batch_df: DataFrame, _batch_id: int) -> None:
        rows = batch_df.select(F.unix_micros("window.start").alias("start"), "user_id", "n")
        rows.mapInArrow(raw, "done bigint").collect()

    return write


def ours(spark: SparkSession, url: str, keys: int) -> dict[str, Contestant]:
    """The plain state, and the states with windows."""
    rows = newStream("rows", spark.createDataFrame([], SCHEMA))
    windows = rows.tumblingWindow(WINDOW, timestampField="at", lag=LAG).groupBy("user_id")
    return {
        "by_start": rows.groupBy(start(), "user_id").persistentAggregate(opaque(url, "by_start"), n=Count()),
        "windows": windows.persistentAggregate(opaque(url, "windows"), n=Count()),
        "in blocks": windows.persistentAggregate(opaque(url, "in_blocks", blocks=keys // 32), n=Count()),
    }


def expected(folder: Path) -> dict[int, dict[str, int]]:
    """Count the rows of each window and user, by the minute at which the window starts."""
    rows = pq.read_table(folder / "input")
    minutes = rows["at"].cast(pa.int64()).to_numpy() // (MINUTES * MINUTE) * MINUTES
    grouped = (
        pa.table({"start": minutes, "user": rows["user_id"]}).group_by(["start", "user"]).aggregate([([], "count_all")])
    )
    found: dict[int, dict[str, int]] = {}
    for minute, user, number in zip(
        *(grouped[name].to_pylist() for name in ("start", "user", "count_all")), strict=True
    ):
        found.setdefault(minute, {})[user] = number
    return found


def check(url: str, folder: Path, minutes: int) -> None:
    """Compare each window that is still there with the rows, in all states."""
    for name in ("windows", "in_blocks"):
        check_windows(url, folder, minutes, name)


def check_windows(url: str, folder: Path, minutes: int, name: str) -> None:
    """Compare those of one state, and the plain state."""
    with open_reader(url, name) as windows, open_reader(url, "by_start") as plain:
        report = windows.ledger().last_commit
        assert report is not None
        assert report.windows is not None
        assert report.windows.late == 0, "the rows of a batch were late"
        gone = 0
        for minute, users in expected(folder).items():
            begin = time_of(minute)
            keys = [(begin, user) for user in users]
            right = [{"n": number} for number in users.values()]
            assert plain.multi_get(keys) == right, f"plain counted wrong at {minute}"
            if minute + 2 * MINUTES <= minutes - 3:
                gone += 1
                assert windows.multi_get(keys[:100]) == [None] * len(keys[:100]), f"{minute} was not purged"
            else:
                assert windows.multi_get(keys) == right, f"windows counted wrong at {minute}"
        assert gone, "no window was purged"


def time_of(minute: int) -> dt.datetime:
    """A minute as readers take it."""
    return dt.datetime.fromtimestamp(minute * 60, dt.UTC)


def measure(spark: SparkSession, url: str, figures: int, rows: int, keys: int) -> dict[str, list[float]]:
    """The seconds of ten batches, of each contestant; on SQLite without a URL."""
    minutes = (figures + 2) * MINUTES  # the first window is gone after two
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        (folder / "input").mkdir()
        for minute in range(minutes):
            make_minute(folder / "input", minute, rows, keys)
        address = url or f"sqlite:///{folder}/state.db"
        contestants = ours(spark, address, keys)
        if url:
            contestants |= {"stateful": upsert(url), "noop": noop}
        turns = Turns(list(contestants))
        run_streams(spark, folder, contestants, turns, stateful={"stateful": in_spark}, schema=SCHEMA)
        check(address, folder, minutes)
        if url:
            check_upserts(url, folder)
    return {
        name: [sum(own[at : at + MINUTES]) for at in range(2 * MINUTES, minutes, MINUTES)]
        for name, own in turns.seconds.items()
    }


def check_upserts(url: str, folder: Path) -> None:
    """Compare what Spark's own state has written with the rows."""
    with redis.Redis.from_url(url) as client:
        for minute, users in expected(folder).items():
            found = client.mget([f"spark:{minute * MINUTE}|{user}" for user in users])
            assert [int(number or 0) for number in found] == list(users.values()), f"Spark counted wrong at {minute}"


def ask(figures: int = 3, rows: int = 1_000_000, keys: int = 400_000, sqlite_keys: int = 100_000) -> Answer:
    config = {
        "spark__sql__streaming__stateStore__providerClass": ROCKSDB,
        "spark__sql__streaming__noDataMicroBatches__enabled": False,  # all have the same batches
        "spark__sql__session__timeZone": "UTC",
    }
    spark = session(2, **config)
    with RedisServer().start() as server:
        on_redis = measure(spark, server.url, figures, rows, keys)
    on_sqlite = measure(spark, "", figures, 2 * sqlite_keys, sqlite_keys)
    spark.stop()
    plain = "an opaque state by (start of the window, user)"
    return Answer(
        [
            Row(
                "tumbling windows on Redis",
                plain,
                ratios(on_redis["windows"], on_redis["by_start"]),
                Goal("most", 1.15),
            ),
            Row(
                "tumbling windows on SQLite",
                plain,
                ratios(on_sqlite["windows"], on_sqlite["by_start"]),
                Goal("most", 1.15),
            ),
            *(
                Row(
                    f"tumbling windows in blocks on {store}",
                    "a record per key and window",
                    ratios(seconds["in blocks"], seconds["windows"]),
                )
                for store, seconds in (("Redis", on_redis), ("SQLite", on_sqlite))
            ),
            Row(
                "Spark's own windows on RocksDB with MSET upsert",
                "tumbling windows on Redis",
                ratios(on_redis["stateful"], on_redis["windows"]),
                Goal("least", 2),
            ),
            Row(
                "Spark's own windows on RocksDB with MSET upsert",
                "tumbling windows in blocks on Redis",
                ratios(on_redis["stateful"], on_redis["in blocks"]),
                Goal("least", 2.5),
            ),
        ],
        f"{rows:,} rows over {keys:,} keys a batch on Redis, {2 * sqlite_keys:,} over {sqlite_keys:,} on SQLite, "
        f"`local[2]`; {figures} times ten batches after twenty to warm up",
        table(
            "store | contestant | seconds of ten batches",
            [
                (store, name, spread(own))
                for store, found in (("Redis", on_redis), ("SQLite", on_sqlite))
                for name, own in found.items()
            ],
        ),
    )
