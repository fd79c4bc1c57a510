"""Rows that are partitioned by key first and aggregated once, beside Spark's own plan, which aggregates twice.

Both are foreachBatch queries over the same files on Redis, with the defaults of a state:

    Spark's plan    partial aggregate, exchange, final aggregate
    by key first    `partial_aggregation="never"`: exchange, one aggregate
    Spark's again   Spark's plan once more in the second place: how far two ratios of the same are apart

A batch has 1,000 to 1,000,000 rows, 1 to 25 of a key, each key equally often. Then come rows that are not spread so:
half of all rows on one key, and a tenth with 200 partitions; and wide ones: eight sums, and the greatest of a text.
Figures are seconds of the batch function. Processor time is that of Spark, Python and Redis together. Bytes are those
that Spark writes for the exchange.
"""

from __future__ import annotations

from turns import Contestant, Processor, Turns, run_streams, session  # isort: skip

import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measuring import Answer, Row, ratios, spread, table
from pyspark.sql import DataFrame
from servers import RedisServer

from mapstate import Count, Max, Sum, newStream, opaque, open_reader

SPARKS, BY_KEY = "Spark's plan", "by key first"
RATES = (1.0, 1.25, 2.5, 5.0, 10.0, 25.0)
NUMBERS = tuple(f"number{at}" for at in range(8))
CHUNK = 50_000


@dataclass
class Shape:
    """Batches to compare the plans on. ``hot`` is the share of rows on one key, which is one more than the others."""

    rows: int
    rate: float = 2.5
    hot: float = 0.0
    partitions: int = 2
    columns: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    is_adaptive: bool = True
    is_control: bool = False
    more: str = ""

    @property
    def name(self) -> str:
        return f"{self.rows:,} rows, {self.rate:g} a key{self.more}"

    def users(self, draw: np.random.Generator) -> Any:
        """The number of each row's user, in an order of its own."""
        hot = int(self.rows * self.hot)
        others = self.rows - hot
        users = np.arange(others) % max(round(others / self.rate), 1) + 1
        return draw.permutation(np.concatenate([np.zeros(hot, dtype=users.dtype), users]))

    def table(self, users: Any) -> pa.Table:
        """A batch's rows."""
        columns = {"user_id": pa.array([f"user-{user}" for user in users])}
        for at, name in enumerate(self.columns):
            columns[name] = (
                pa.array([f"{user * 7919 % 1_000_003:0200d}" for user in users])
                if name == "text"
                else pa.array((users * (at + 1) % 1000).astype(float))
            )
        return pa.table(columns)

    @property
    def schema(self) -> str:
        types = (f"{name} {'string' if name == 'text' else 'double'}" for name in self.columns)
        return ", ".join(["user_id string", *types])


def shapes() -> list[Shape]:
    return [
        Shape(1_000, 2.0),
        *(Shape(rows, rate) for rows in (10_000, 100_000, 1_000_000) for rate in RATES),
        *(Shape(rows, is_control=True, more=": Spark's again") for rows in (10_000, 100_000, 1_000_000)),
        Shape(100_000, is_adaptive=False, more=", without adaptive execution"),
        Shape(1_000_000, hot=0.5, more=", and half of all on one key"),
        Shape(1_000_000, hot=0.1, partitions=200, is_adaptive=False, more=", a tenth on one key, 200 partitions"),
        *(
            Shape(300_000, rate, columns=NUMBERS, fields={name: Sum(name) for name in NUMBERS}, more=", eight sums")
            for rate in (1.25, 5.0)
        ),
        *(
            Shape(300_000, rate, columns=("text",), fields={"text": Max("text")}, more=", a text of 200 letters")
            for rate in (1.25, 5.0)
        ),
    ]


def turns_of(shape: Shape, most: int) -> int:
    return most if shape.rows <= 100_000 else max(most // 3, 1)


@dataclass
class Measured:
    """Seconds, processor seconds and shuffled bytes by plan."""

    seconds: dict[str, list[float]]
    spent: dict[str, list[float]]
    shuffled: dict[str, int]


def compared(spark: Any, shape: Shape, turns_wanted: int) -> Measured:
    """Measure a shape, and check what both states hold."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, RedisServer().start() as server:
        folder, draw, counts = Path(place), np.random.default_rng(7), np.zeros(0, dtype=int)
        (folder / "input").mkdir()
        for number in range(turns_wanted + 2):
            users = shape.users(draw)
            counts = np.bincount(users) + (counts if number else 0)
            file = folder / "input" / f"batch-{number:03d}.parquet"
            pq.write_table(shape.table(users), file, row_group_size=max(shape.rows // 4, 1))
        spark.conf.set("spark.sql.shuffle.partitions", shape.partitions)
        spark.conf.set("spark.sql.adaptive.enabled", shape.is_adaptive)
        stream = newStream("rows", spark.createDataFrame([], shape.schema)).groupBy("user_id")
        names, other = {SPARKS: "sparks", BY_KEY: "by-key"}, "always" if shape.is_control else "never"
        specs = {
            SPARKS: opaque(server.url, names[SPARKS], partial_aggregation="always"),
            BY_KEY: opaque(server.url, names[BY_KEY], partial_aggregation=other),
        }
        ways: dict[str, Contestant] = {
            plan: stream.persistentAggregate(spec, n=Count(), **shape.fields) for plan, spec in specs.items()
        }
        shuffled: dict[str, int] = {}
        turns, processor = Turns(list(ways)), Processor()
        counted = {plan: metered(plan, processor.counted(plan, way), shuffled) for plan, way in ways.items()}
        run_streams(spark, folder, counted, turns, schema=shape.schema)
        check(server.url, names, counts)
    return Measured(
        {plan: own[2:] for plan, own in turns.seconds.items()},
        {plan: [sum(turn.values()) - turn["idle"] for turn in own[2:]] for plan, own in processor.seconds.items()},
        shuffled,
    )


def metered(plan: str, contestant: Contestant, shuffled: dict[str, int]) -> Contestant:
    """Keep what the first batch, which warms up, writes for its exchange."""

    def function(batch_df: DataFrame, batch_id: int) -> None:
        if batch_id:
            contestant(batch_df, batch_id)
            return
        before = written(batch_df)
        contestant(batch_df, batch_id)
        shuffled[plan] = written(batch_df) - before

    return function


def written(batch_df: DataFrame) -> int:
    """Bytes that this driver's executor has written for exchanges so far."""
    context: Any = batch_df.sparkSession.sparkContext._jsc.sc()
    context.listenerBus().waitUntilEmpty()
    return int(context.statusStore().executorList(True).apply(0).totalShuffleWrite())


def check(url: str, names: dict[str, str], counts: Any) -> None:
    """Check that each key of both states has its count, and that the other values are the same."""
    numbers = np.flatnonzero(counts)
    with open_reader(url, names[SPARKS]) as sparks, open_reader(url, names[BY_KEY]) as by_key:
        for start in range(0, len(numbers), CHUNK):
            some = numbers[start : start + CHUNK]
            users = [f"user-{number}" for number in some]
            values = sparks.multi_get(users)
            assert [value["n"] for value in values] == counts[some].tolist(), "Spark's plan counted wrong"
            assert by_key.multi_get(users) == values, "rows by key first counted otherwise"


def ask(turns: int = 24, rows: int = 1_000_000) -> Answer:
    answer_rows, lines, figures = [], [], {}
    spark = session(spark__ui__liveUpdate__period=0)
    compared(spark, Shape(10_000), turns)  # else Java compiles what the first plans run, while they are timed
    for shape in shapes():
        if shape.rows > rows:
            continue
        measured = compared(spark, shape, turns_of(shape, turns))
        own = ratios(measured.seconds[BY_KEY], measured.seconds[SPARKS])
        spent = ratios(measured.spent[BY_KEY], measured.spent[SPARKS])
        if shape.is_control:
            answer_rows.append(Row(f"Spark's plan once more, {shape.rows:,} rows", "Spark's plan", own))
        else:
            answer_rows.append(Row(f"rows by key first, {shape.name}", "Spark's plan", own))
        figures[f"partial_aggregate.{shape.name}"] = statistics.median(own)
        milliseconds = [spread(measured.seconds[plan], 1000) for plan in (SPARKS, BY_KEY)]
        bytes_of = [f"{measured.shuffled[plan] / shape.rows:.1f}" for plan in (SPARKS, BY_KEY)]
        lines.append((shape.name, *milliseconds, spread(own), spread(spent), *bytes_of))
        print(*lines[-1], sep=" | ", flush=True)
    spark.stop()
    return Answer(
        answer_rows,
        f"{turns} turns, a third of them where a batch has more than 100,000 rows, after two to warm up; opaque on "
        "Redis, `local[2]`",
        table(
            "batch | milliseconds, Spark's plan | by key first | of Spark's plan | processor time of it "
            "| bytes a row to the exchange, Spark's plan | by key first",
            lines,
        ),
        figures,
    )
