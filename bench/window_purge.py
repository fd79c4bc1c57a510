"""What windows cost when they fire, when they go, and when many have gone.

First, of 100,000 keys of one window: a batch that writes them, a batch of one row that fires the window to a function
that reads it, and a batch of one row that purges it. Each figure is a whole batch. By turns the same with 32 keys in a
block.

Then the same batches into two states: one that has purged 10,000 windows and has 1,000 open, and a fresh one.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table, timed  # isort: skip  # finds the servers

import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from servers import RedisServer
from turns import session

from mapstate import Count, newStream, opaque, open_reader
from mapstate.spark.streams.windows import WindowedAggregate

LENGTH = 10
SCHEMA = "at bigint, user_id string"


def windows_of(
    spark: SparkSession, url: str, name: str, *, lag: int = 0, blocks: int | None = None
) -> WindowedAggregate:
    """A state of counts by user in windows of ten, purged one window later."""
    rows = newStream(name, spark.createDataFrame([], SCHEMA))
    windows = rows.tumblingWindow(LENGTH, timestampField="at", lag=lag, retention=LENGTH).groupBy("user_id")
    spec = opaque(url, name, apply_on="executors", blocks=blocks)  # also behind small batches
    return windows.persistentAggregate(spec, n=Count())


def rows_at(spark: SparkSession, at: int, keys: int = 1) -> DataFrame:
    """A row for each key."""
    return spark.range(keys).selectExpr(f"{at}L as at", "concat('user-', id) as user_id")


class OneWindow:
    """Windows of many keys, one after the other."""

    def __init__(self, spark: SparkSession, url: str, keys: int, blocks: int | None = None) -> None:
        self._spark, self._url, self._keys = spark, url, keys
        self._name = "one_window" if blocks is None else "in_blocks"
        self._state = windows_of(spark, url, self._name, blocks=blocks)
        self._state.firedWindowsStream().foreachBatch(self._read)
        self._batches = self._start = 0

    def turn(self) -> tuple[float, float, float]:
        """Write, fire and purge a window; the seconds of each batch."""
        write = self._batch(self._start, self._keys)
        fire = self._batch(self._start + LENGTH)
        assert self._fired.count() == self._keys, "the window has not fired whole"
        gone, self._start = self._start, self._start + 5 * LENGTH
        self._batch(self._start)  # with this watermark the next batch purges the window
        assert self._has_pane(gone)
        purge = self._batch(self._start)
        assert not self._has_pane(gone), "the window was not purged"
        return write, fire, purge

    def _batch(self, at: int, keys: int = 1) -> float:
        frame = rows_at(self._spark, at, keys)
        self._batches += 1
        return timed(lambda: self._state(frame, self._batches - 1))

    def _read(self, fired: DataFrame, _batch_id: int) -> None:
        fired.write.format("noop").mode("overwrite").save()
        self._fired = fired

    def _has_pane(self, start: int) -> bool:
        with open_reader(self._url, self._name) as reader:
            windows = reader.ledger().windows
        assert windows is not None
        return any(first <= start <= last for first, last in windows.panes)


class ManyWindows:
    """The same batches into a state that has purged windows and has others open, and into a fresh one."""

    def __init__(self, spark: SparkSession, url: str, purged: int, opened: int, keys: int) -> None:
        lag, first = opened * LENGTH, 2 * purged * LENGTH
        self._states = {name: windows_of(spark, url, name, lag=lag) for name in ("old", "fresh")}
        self._batches = dict.fromkeys(self._states, 0)
        history = spark.range(purged * LENGTH).selectExpr("id as at", "'user-5' as user_id")
        open_ones = spark.range(opened * LENGTH).selectExpr(f"{first}L + id as at", "'user-5' as user_id")
        newest = first + opened * LENGTH - 1
        self._rows = rows_at(spark, newest, keys)
        for frame in (history, open_ones, self._rows):
            self._apply("old", frame)
        with open_reader(url, "old") as reader:
            windows = reader.ledger().windows
        assert windows is not None
        assert windows.panes == ((first, newest // LENGTH * LENGTH),), "the old windows were not purged"

    def turns(self, turns: int) -> dict[str, list[float]]:
        """The seconds of each state, by turns."""
        return by_turns(
            {name: lambda name=name: self._apply(name, self._rows) for name in self._states}, turns, warm_up=10
        )

    def _apply(self, name: str, frame: DataFrame) -> float:
        number = self._batches[name]
        self._batches[name] += 1
        return timed(lambda: self._states[name](frame, number))


def ask(turns: int = 7, keys: int = 100_000, purged: int = 10_000, opened: int = 1_000) -> Answer:
    spark = session()
    rows, lines = [], []
    with RedisServer().start() as server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for store, url in (("Redis", server.url), ("SQLite", f"sqlite:///{Path(folder)}/state.db")):
            both = OneWindow(spark, url, keys), OneWindow(spark, url, keys, keys // 32)
            plain, dense = zip(*[[window.turn() for window in both] for _ in range(turns + 1)], strict=True)
            write, fire, purge = zip(*plain[1:], strict=True)
            in_blocks = dict(zip(("write", "fire", "purge"), zip(*dense[1:], strict=True), strict=True))
            many = ManyWindows(spark, url, purged, opened, keys // 2).turns(3 * turns)
            written, once = f"writing {keys:,} keys of a window", Goal("most", 1)
            rows += [
                Row(f"firing a window on {store}", written, ratios(fire, write), once),
                Row(f"purging a window on {store}", written, ratios(purge, write), once),
                Row(
                    f"{purged:,} windows purged and {opened:,} open on {store}",
                    "a fresh state",
                    ratios(many["old"], many["fresh"]),
                    Goal("most", 1.1),
                ),
            ]
            named = [("write", write), ("fire", fire), ("purge", purge)]
            rows += [
                Row(f"to {name} a window in blocks on {store}", "a record per key", ratios(in_blocks[name], seconds))
                for name, seconds in named
            ]
            named += [*((f"{name} in blocks", seconds) for name, seconds in in_blocks.items()), *many.items()]
            lines += [(store, name, spread(seconds)) for name, seconds in named]
    spark.stop()
    return Answer(
        rows,
        f"{keys:,} keys in one window, {turns} turns; "
        f"{keys // 2:,} keys a batch into old and fresh states, {3 * turns} turns",
        table("store | batch | seconds", lines),
    )
