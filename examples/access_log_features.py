r"""Requests and bytes per address and per URL over the last 5 minutes, hour, 6 hours, day, and of all time.

    scripts/run python examples/access_log_features.py --logs tests/data/access_log --store sqlite:///features.db \
        --checkpoint features.checkpoint

One declaration keeps all of these windows, and each address and URL is one record. The run reads every file there
once, and ends; the next run goes on with the files that have come since. A line may be late by any time: it counts in
the windows that have its time. Any service reads the features, also during the run, without Spark:

    with open_reader("sqlite:///features.db", "features_by_address") as features:
        features.get("192.0.2.1")                      # {"requests_5_minutes": 3, ..., "bytes_lifetime": 91210}
        features.get("192.0.2.1", at="watermark")      # as of the latest lines, not of now

examples/score_request.py is such a service. docs/features.md says what a window holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from access_log import parse, read_logs, show
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from mapstate import LIFETIME, Count, RollingWindows, Sum, Topology, opaque, open_reader

WINDOWS = RollingWindows.of(("5 minutes", "1 minute"), "1 hour", "6 hours", "1 day", LIFETIME)
STATES = {"features_by_address": "client", "features_by_url": "url"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _options(arguments)
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.appName("access_log_features").config(map=quiet).getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", 4)
    lines = read_logs(spark, options.logs, options.max_files_per_trigger)
    start(lines, options.store, checkpoint=options.checkpoint, lag=options.lag).awaitTermination()
    for state in STATES:
        report(options.store, state)


def start(lines: DataFrame, store: str, *, checkpoint: str, lag: str) -> StreamingQuery:
    """Start one query that keeps both states, in one topology: together or not at all."""
    topology = Topology("features")
    requests = topology.newStream("requests", parse(lines).where("reason IS NULL"))
    rolling = requests.window(WINDOWS, timestampField="at", lag=lag)
    for state, column in STATES.items():
        spec = opaque(store, state, serializer="msgpack")
        rolling.groupBy(column).persistentAggregate(spec, requests=Count(), bytes=Sum("bytes"))
    return topology.start(checkpoint, trigger={"availableNow": True})


def report(store: str, state: str, most: int = 10) -> None:
    """Print the keys with most requests in the last hour of the log, as a service would read them."""
    columns = ["requests_1_hour", "requests_1_day", "requests_lifetime"]
    with open_reader(store, state) as reader:
        rows = [
            (key, *(value[column] for column in columns))
            for (key,), value in reader.scan(columns=columns, at="watermark")
        ]
    rows.sort(key=lambda row: row[1:], reverse=True)
    show(f"{state}: {len(rows):,} keys", (STATES[state], "last hour", "last day", "ever"), rows[:most])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Requests and bytes per address and URL, over several windows.")
    parser.add_argument("--logs", required=True, help="directory of log files, or a pattern: 'logs/access.*.gz'")
    parser.add_argument("--store", required=True, help="sqlite:///features.db, redis://localhost:6379/0, ...")
    parser.add_argument("--checkpoint", required=True, help="directory for Spark's progress; belongs to the store")
    parser.add_argument("--lag", default="1 minute", help="how far behind the newest line the watermark is")
    parser.add_argument("--max-files-per-trigger", type=int, default=100, metavar="N", help="files per micro-batch")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
