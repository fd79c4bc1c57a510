"""What a change log costs a batch, and what it saves those who follow the state.

By turns, on one Redis and in one SQLite file, on two cores for all:

    plain     a batch on Spark into a state without a change log
    logged    the same batch into one that keeps the changes of 3 transactions, and so removes those of one
    scan      all keys of the state and their values, as a follower reads them without a log
    changes   the keys of the last batch, which wrote one in a hundred, and their values
"""

from __future__ import annotations

from measuring import Answer, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from pyspark.sql import DataFrame
from servers import RedisServer
from turns import session

from mapstate import Count, newStream, opaque, open_reader

SCHEMA = "user_id string, n bigint"


def ask(rows: int = 500_000, keys: int = 200_000, turns: int = 7) -> Answer:
    spark = session()
    batch = spark.range(rows).selectExpr(f"concat('user-', id % {keys}) AS user_id", "id AS n").cache()
    few = spark.range(keys // 100).selectExpr("concat('user-', id * 100) AS user_id", "id AS n").cache()
    assert (batch.count(), few.count()) == (rows, keys // 100)
    found, lines = [], []
    with RedisServer().start() as server, tempfile.TemporaryDirectory() as folder:
        for store, url in (("Redis", server.url), ("SQLite", f"sqlite:///{folder}/state.db")):
            states = {"plain": opaque(url, "plain"), "logged": opaque(url, "logged", changes=3)}
            applied = {name: appliers(spark, spec) for name, spec in states.items()}
            seconds = by_turns({name: partial(apply, batch) for name, apply in applied.items()}, turns, warm_up=5)
            with open_reader(url, "logged") as reader:
                before = reader.position()
                applied["logged"](few)
                after = reader.position()
                ways = {"scan": partial(scanned, reader, keys), "changes": partial(changed, reader, before, after)}
                seconds |= by_turns(ways, turns, warm_up=2)
            logged = ratios(seconds["logged"], seconds["plain"])
            found.append(Row(f"a batch that keeps its keys, {store}", "one that does not", logged))
            few_changes = ratios(seconds["changes"], seconds["scan"])
            found.append(Row(f"the changes of 1 in 100 keys, {store}", "`scan()`", few_changes))
            lines += [(f"{store}: {way}", spread(own, 1000)) for way, own in seconds.items()]
    spark.stop()
    how = f"Batches of {rows:,} rows over {keys:,} keys, {turns} turns"
    return Answer(found, how, table("way | milliseconds", lines))


def appliers(spark: Any, spec: Any) -> Callable[[DataFrame], None]:
    """A function that applies the next batch to a state."""
    stream = newStream("rows", spark.createDataFrame([], SCHEMA)).groupBy("user_id")
    state, ids = stream.persistentAggregate(spec, rows=Count()), count()
    return lambda frame: state(frame, next(ids))


def scanned(reader: Any, keys: int) -> None:
    """All keys and values."""
    assert sum(1 for _ in reader.scan(5_000)) == keys


def changed(reader: Any, before: Any, after: Any) -> None:
    """The keys of the last batch, and their values."""
    keys = reader.changed_keys(before, after)
    assert len(reader.multi_get(keys)) == len(keys) > 0


if __name__ == "__main__":
    answer = ask()
    print(*(row.line() for row in answer.rows), answer.more, sep="\n")
