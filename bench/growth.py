"""Batches of 100,000 to 800,000 keys: whether time grows linearly, and Python workers stay small.

One opaque state is on Redis, and batches of the four sizes take turns. The line is fitted through the medians, each
point weighted by its own time. `measured` is the distance of the worst median from it; the spread is that of single
turns. Memory is the peak of all of Spark's Python workers together within a batch (Linux only). It is reset before each
batch.
"""

from __future__ import annotations

from turns import Turns, make_file, run_streams, session  # isort: skip

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Answer, Goal, Row, ratios, spread, table
from servers import RedisServer

from mapstate import Count, newStream, opaque, open_reader

SIZES = (100_000, 200_000, 400_000, 800_000)


def workers() -> Iterator[Path]:
    """List the /proc directories of Spark's Python workers."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"pyspark.daemon" in (process / "cmdline").read_bytes() and _is_ours(process):
                yield process


def _is_ours(process: Path) -> bool:
    while process.name not in ("0", "1"):
        if process.name == str(os.getpid()):
            return True
        process = Path("/proc") / (process / "stat").read_text().rpartition(")")[2].split()[1]
    return False


def peak() -> float:
    """The peak MB of all workers, since `reset`."""
    total = 0
    for worker in workers():
        with suppress(OSError):
            status = (worker / "status").read_text()
            total += int(status.partition("VmHWM:")[2].split()[0])
    return total / 1024


def reset() -> None:
    """Reset the peaks."""
    for worker in workers():
        with suppress(OSError):
            (worker / "clear_refs").write_text("5")


def off_line(points: dict[int, float]) -> float:
    """The distance of the worst point from the best line, relative to the line."""
    sizes, seconds = np.array(list(points)), np.array(list(points.values()))
    line = np.poly1d(np.polyfit(sizes, seconds, 1, w=1 / seconds))
    return float(np.max(np.abs(seconds / line(sizes) - 1)))


def ask(rounds: int = 6) -> Answer:
    batches = [size for _ in range(rounds + 1) for size in SIZES]
    peaks: list[float] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, RedisServer().start() as server:
        folder = Path(place)
        (folder / "input").mkdir()
        for number, size in enumerate(batches):
            make_file(folder / "input", number, size, size)
        spark = session()
        stream = newStream("users", spark.createDataFrame([], "user_id string"))
        aggregate = stream.groupBy("user_id").persistentAggregate(opaque(server.url, "visits"), n=Count())

        def weighed(batch_df: Any, batch_id: int) -> None:
            reset()
            aggregate(batch_df, batch_id)
            peaks.append(peak())

        turns = Turns(["opaque"])
        run_streams(spark, folder, {"opaque": weighed}, turns)
        spark.stop()
        with open_reader(server.url, "visits") as reader:
            for size, count in zip((0, *SIZES), range(len(SIZES), 0, -1), strict=False):
                assert reader.get(f"user-{size}") == {"n": count * (rounds + 1)}
    seconds = {size: turns.seconds["opaque"][at :: len(SIZES)][1:] for at, size in enumerate(SIZES)}
    memory = {size: peaks[at :: len(SIZES)][1:] for at, size in enumerate(SIZES)}
    middle = {size: statistics.median(own) for size, own in seconds.items()}
    each = [off_line({size: own[turn] for size, own in seconds.items()}) for turn in range(rounds)]
    measured = off_line(middle)
    growth = Row("growth: 100k, 200k, 400k, 800k keys a batch", "a line", [measured], Goal("most", 0.10))
    growth.note = f"the worst median is that far off; within single turns {spread(each)}"
    return Answer(
        [
            growth,
            Row(
                "executor Python memory, 800k keys a batch",
                "100k keys a batch",
                ratios(memory[SIZES[-1]], memory[SIZES[0]]),
                Goal("most", 1.15),
            ),
        ],
        f"{rounds} rounds after one to warm up; one row per key; peaks of all workers together",
        table(
            "keys a batch | seconds | MB of Python",
            [(f"{size:,}", spread(seconds[size]), spread(memory[size])) for size in SIZES],
        ),
        {f"growth.{size}": own for size, own in middle.items()},
    )
