r"""Requests and bytes per URL in each hour, every ten minutes, by the times that web server logs have.

    scripts/run python examples/access_log_windows.py --logs tests/data/access_log --store sqlite:///hours.db \
        --checkpoint hours.checkpoint

A server writes a line when its response ends, so the lines of a log are out of order, and those of several logs even
more so. A window is final when the newest line is --lag behind its end. Each line is in all of its six windows, or it
is late: then it is in none of them and is counted as late, and nothing is lost without a number.

The run reads every file there once, and ends; the next run goes on with the files that have come since. Lines that
are no requests are left out here: examples/access_log.py counts and keeps them. Any service reads the windows, also
during the run, without Spark:

    with open_reader("sqlite:///hours.db", "hours_by_url") as hours:
        hours.windows("/index.html")                   # [Window(start=..., end=..., value={...}, final=True), ...]
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Sequence

from access_log import parse, read_logs, show
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from mapstate import Count, SlidingDurationWindow, Sum, Topology, opaque, open_reader

STEP = dt.timedelta(minutes=10)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
FOR_GOOD = "3650 days"  # a window is removed once the watermark is that far past its end


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _options(arguments)
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.appName("access_log_windows").config(map=quiet).getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", 4)
    start(
        read_logs(spark, options.logs, options.max_files_per_trigger),
        options.store,
        checkpoint=options.checkpoint,
        lag=options.lag,
    ).awaitTermination()
    report(options.store)


def start(lines: DataFrame, store: str, *, checkpoint: str, lag: str) -> StreamingQuery:
    """Start one query that counts the windows and the late lines, in one topology: together or not at all."""
    topology = Topology("hours")
    hours = (
        topology.newStream("requests", parse(lines).where("reason IS NULL"))
        .window(SlidingDurationWindow.of("1 hour", STEP), timestampField="at", lag=lag, retention=FOR_GOOD)
        .groupBy("url")
        .persistentAggregate(opaque(store, "hours_by_url"), requests=Count(), bytes=Sum("bytes"))
    )
    hours.lateStream().persistentAggregate(opaque(store, "late_lines"), lines=Count())
    return topology.start(checkpoint, trigger={"availableNow": True})


def report(store: str, most: int = 6) -> None:
    """Print the last final hours, each with its requests and its busiest URL, as a service would read them."""
    rows = []
    with open_reader(store, "hours_by_url") as hours:
        mark = hours.watermark().time
        if not isinstance(mark, dt.datetime):
            print("no line has come yet")
            return
        last = mark - (mark - EPOCH) % STEP  # a window ends at each step
        for end in (last - at * STEP for at in range(most)):
            found = {url: value for (url,), value in hours.window(end)}
            busiest = max(found, key=lambda url: found[url]["requests"], default="-")
            requests = sum(value["requests"] for value in found.values())
            rows.append((f"{end:%Y-%m-%d %H:%M}  {busiest}", requests, len(found)))
    with open_reader(store, "late_lines") as late:
        lines = (late.get(()) or {"lines": 0})["lines"]
    show(
        f"hours_by_url: the last {most} hours that are final, {lines:,} late lines",
        ("hour up to", "requests", "URLs"),
        rows,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Requests and bytes per URL in each hour, every ten minutes.")
    parser.add_argument("--logs", required=True, help="directory of log files, or a pattern: 'logs/access.*.gz'")
    parser.add_argument("--store", required=True, help="sqlite:///hours.db, redis://localhost:6379/0, ...")
    parser.add_argument("--checkpoint", required=True, help="directory for Spark's progress; belongs to the store")
    parser.add_argument("--lag", default="1 minute", help="how far behind the newest line a line may be")
    parser.add_argument("--max-files-per-trigger", type=int, default=100, metavar="N", help="files per micro-batch")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
