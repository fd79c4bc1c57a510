r"""Hits and bytes per client and per URL, counted exactly once from a directory of web server logs.

    scripts/run python examples/access_log.py --logs tests/data/access_log --store sqlite:///hits.db \
        --checkpoint hits.checkpoint --rejects hits.rejects

This run reads every file there once, in the common or the combined format, plain or .gz. It prints the busiest
clients and URLs, and ends. The next run counts the files that have come since. With --follow it goes on until
Ctrl-C. If it is killed at any moment, start it again with the same command: nothing is lost or counted twice.

Any service reads the counts during the run, without Spark:

    with open_reader("sqlite:///hits.db", "hits_by_url") as hits:
        hits.get("/index.html")                        # {"hits": 45, "bytes": 1777971}

Every line is either counted or rejected. A rejected line stops nothing: `rejects_by_reason` counts it, and
--rejects has it, byte for byte as it came, by reason (`spark.read.text` reads each line there once):

    empty          nothing but white space
    too-long       more than 64 KiB, which no server lets a client send
    no-log-line    not in one of the two formats, or two lines run into one
    no-request     a log line, but the client sent no HTTP request: "-", TLS sent to port 80

A line that is cut off somewhere behind its bytes has all that is counted here, so it is counted. "-" for
bytes is a hit without bytes. Bytes that are not UTF-8 become U+FFFD in a client's or URL's name.

Put finished files into --logs, under names that stay. Spark reads a file once, so it misses lines that are added
later. It counts a file again that a rotation renames (access.log.1, access.log.2).
"""

from __future__ import annotations

import argparse
import heapq
import re
import signal
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from mapstate import Count, Sum, newStream, opaque, open_reader
from mapstate.errors import StateNotFoundError
from mapstate.operations.checkpoint import clear_first_offsets

MAX_LINE = 64 * 1024

# Servers write a quote inside quotes as \". Java's possessive *+ and ++ never go back, so a line of
# nothing but backslashes costs no more than any other.
QUOTED = r'[^"\\]*+(?:\\.[^"\\]*+)*+'
STAMP = r"\d\d/[A-Za-z]{3}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}"
TIME = rf"\[{STAMP}\]"
USER = rf'(?:""|(?:(?! {TIME})(?:[^"\\]|\\.))++)'  # may hold spaces
LINE = (
    rf"(?s)\A(\S+) \S+ {USER} \[({STAMP})\] "  # client, its identity, its user's name, the time
    rf'"({QUOTED})" (\d{{3}}) (\d{{1,15}}|-)'  # request, status, bytes
    rf'(?: "{QUOTED}(?:" "{QUOTED})?"?)?\r?\z'  # the combined format: referrer, user agent
)
REQUEST = r"(?s)\A[A-Za-z][A-Za-z_-]* (\S.*) HTTP/\d(?:\.\d)?\z"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _options(arguments)
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.appName("access_log").config(map=quiet).getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", options.partitions)
    queries = start(
        read_logs(spark, options.logs, options.max_files_per_trigger),
        options.store,
        checkpoint=options.checkpoint,
        rejects=options.rejects,
        trigger={"processingTime": "5 seconds"} if options.follow else {"availableNow": True},
    )
    try:
        if options.follow:
            wait_for_signal(queries)
        else:
            for query in queries:
                query.awaitTermination()
    finally:
        for query in queries:
            query.stop()
    report(options.store, options.top)


def read_logs(spark: SparkSession, logs: str, max_files_per_trigger: int = 100) -> DataFrame:
    """Stream the lines of all files: one column, `value`, the bytes as they are."""
    reader = spark.readStream.option("maxFilesPerTrigger", max_files_per_trigger)
    reader = reader.option("lineSep", "\n")  # by default Spark also ends a line at a lone \r
    reader = reader.option("maxFileAge", "36500d")  # by default Spark skips a file a week older than the newest
    return reader.text(logs)


def parse(lines: DataFrame) -> DataFrame:
    """Give each line client, url (path with query, as logged), status, bytes, time; or the `reason` of its rejection.

    `value`, the line itself, stays as a column. `at` is null for a time that no calendar has.
    """
    text = F.when(F.octet_length("value") <= MAX_LINE, F.make_valid_utf8("value"))
    client, at, request, status, size = (F.regexp_extract(text, LINE, group) for group in (1, 2, 3, 4, 5))
    url = F.regexp_extract(request, REQUEST, 1)
    reason = (
        F.when(text.isNull(), "too-long")
        .when(text.rlike(r"\A\s*\z"), "empty")
        .when(client == "", "no-log-line")  # regexp_extract gives "" for no match
        .when(url == "", "no-request")
    )
    return lines.select(
        "value",
        client.alias("client"),
        url.alias("url"),
        F.nullif(status, F.lit("")).cast("int").alias("status"),
        F.when(size.rlike(r"\A\d"), size).cast("bigint").alias("bytes"),
        reason.alias("reason"),
        F.try_to_timestamp(at, F.lit("dd/MMM/yyyy:HH:mm:ss Z")).alias("at"),
    )


def start(
    lines: DataFrame, store: str, *, checkpoint: str, rejects: str, trigger: dict[str, Any]
) -> list[StreamingQuery]:
    """Start four queries over the same lines, each with a checkpoint of its own.

    Two count the parsed lines, one counts the rejected lines, and one keeps them.
    """
    for query in ("hits_by_client", "hits_by_url", "rejects_by_reason", "rejected_lines"):
        clear_first_offsets(f"{checkpoint}/{query}")  # of a run that was killed before its first batch
    parsed = parse(lines)
    hits = parsed.where("reason IS NULL")
    rejected = parsed.where("reason IS NOT NULL")
    queries = [
        newStream(state, rows)
        .groupBy(column)
        .persistentAggregate(opaque(store), **aggregates)
        .start(f"{checkpoint}/{state}", queryName=state, trigger=trigger)
        for state, rows, column, aggregates in (
            ("hits_by_client", hits, "client", {"hits": Count(), "bytes": Sum("bytes")}),
            ("hits_by_url", hits, "url", {"hits": Count(), "bytes": Sum("bytes")}),
            ("rejects_by_reason", rejected, "reason", {"lines": Count()}),
        )
    ]
    files = rejected.select("value", "reason").writeStream.format("text").partitionBy("reason")
    files = files.option("path", rejects).option("checkpointLocation", f"{checkpoint}/rejected_lines")
    return [*queries, files.queryName("rejected_lines").trigger(**trigger).start()]


def wait_for_signal(queries: list[StreamingQuery]) -> None:
    """Wait for Ctrl-C or SIGTERM. Raises the error of a query that ends before that."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(1):
        for query in queries:
            if not query.isActive:
                query.awaitTermination()
    print("stopped; the next run goes on from here")


def report(store: str, top: int = 10) -> None:
    """Print the busiest clients and URLs, and the rejects, as a service would read them."""
    for state in ("hits_by_client", "hits_by_url"):
        totals = read_all(store, state)
        busiest = heapq.nlargest(top, totals.items(), key=lambda item: (item[1]["hits"], item[1]["bytes"] or 0))
        show(
            f"{state}: {len(totals):,} keys, {sum(fields['hits'] for fields in totals.values()):,} hits",
            (state.removeprefix("hits_by_"), "hits", "bytes"),
            [(key, fields["hits"], fields["bytes"] or 0) for key, fields in busiest],
        )
    rejects = read_all(store, "rejects_by_reason")
    show(
        f"rejects_by_reason: {sum(fields['lines'] for fields in rejects.values()):,} lines",
        ("reason", "lines"),
        [(reason, fields["lines"]) for reason, fields in sorted(rejects.items())],
    )


def read_all(store: str, state: str) -> dict[str, dict[str, Any]]:
    """Read a whole state into memory; {} if no file has come yet."""
    try:
        with open_reader(store, state) as reader:
            return {key: fields for (key,), fields in reader.scan()}
    except StateNotFoundError:
        return {}


def show(title: str, header: Sequence[str], rows: Iterable[tuple[str, *tuple[int, ...]]]) -> None:
    """Print a table of names and numbers; a plain one if rich is not installed."""
    print(f"\n{title}\n")
    # A log can hold control characters, and a terminal would obey them.
    cells = [(re.sub(r"[\x00-\x1f\x7f-\x9f]", "\ufffd", name), *(f"{cell:,}" for cell in rest)) for name, *rest in rows]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for name, *rest in (header, *cells):
            print(f"{name:<50.50}", *(f"{cell:>14}" for cell in rest))
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in header:
        table.add_column(column, justify="left" if column == header[0] else "right", overflow="ellipsis", no_wrap=True)
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Counts hits and bytes per client and per URL of web server logs, exactly once."
    )
    parser.add_argument("--logs", required=True, help="directory of log files, or a pattern: 'logs/access.*.gz'")
    parser.add_argument("--store", required=True, help="sqlite:///hits.db, redis://localhost:6379/0, ...")
    parser.add_argument("--checkpoint", required=True, help="directory for Spark's progress; belongs to the store")
    parser.add_argument("--rejects", required=True, help="directory for lines that could not be parsed")
    parser.add_argument("--follow", action="store_true", help="wait for more files until Ctrl-C")
    parser.add_argument("--max-files-per-trigger", type=int, default=100, metavar="N", help="files per micro-batch")
    parser.add_argument("--partitions", type=int, default=4, metavar="N", help="tasks that write to the store")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows of the report")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
