"""What a state costs as a DataFrame of Spark beside a reader's own `scan()`.

By turns, of one state on one Redis and in one SQLite file, on two cores for all:

    scan      `open_reader(...).scan()` in this process, each key taken and dropped
    1, 2      `spark.read.format("mapstate")` with one and with two partitions, each value added up
    look-up   the option `keys` with 100 of them, of as many as there are

Spark plans a query in a Python process that it starts for it, which is a part of each figure.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import json
import tempfile
from functools import partial
from typing import Any

from counted_state import STATE, CountedState, arrow_batches
from servers import RedisServer
from visits_job import session

from mapstate import open_reader

PAGE = 5_000


def ask(keys: int = 1_000_000, turns: int = 5) -> Answer:
    spark = session("local[2]")
    rows, lines = [], []
    with RedisServer().start() as server, tempfile.TemporaryDirectory() as folder:
        for store, url in (("Redis", server.url), ("SQLite", f"sqlite:///{folder}/state.db")):
            CountedState(url).apply(arrow_batches([f"user-{at}" for at in range(keys)]))
            read = spark.read.format("mapstate").options(url=url, state=STATE)
            ways: dict[str, Any] = {
                "scan": partial(scanned, url, keys),
                "1": partial(summed, read.option("numPartitions", 1).load(), keys),
                "2": partial(summed, read.option("numPartitions", 2).load(), keys),
                "look-up": partial(looked_up, url, spark, keys),
            }
            found = by_turns(ways, turns, warm_up=2)
            for parts, goal in (("1", 0.7), ("2", 1.5)):
                measured = f"keys a second of a DataFrame with {parts} partition{'s' * (parts > '1')}, {store}"
                rows.append(Row(measured, "`scan()`", ratios(found["scan"], found[parts]), Goal("least", goal)))
            lines += [(f"{store}: {way}, seconds", spread(found[way])) for way in ways]
    spark.stop()
    return Answer(rows, f"{turns} turns of {keys:,} keys", table("way | measured", lines))


def scanned(url: str, keys: int) -> None:
    """All keys, by a reader of its own."""
    with open_reader(url, STATE) as reader:
        assert sum(1 for _ in reader.scan(PAGE)) == keys


def summed(frame: Any, keys: int) -> None:
    """All keys and values, in the JVM."""
    assert frame.selectExpr("count(user_id)", "sum(n)").first()[0] == keys


def looked_up(url: str, spark: Any, keys: int) -> None:
    """A hundred of them."""
    names = json.dumps([f"user-{at * (keys // 100)}" for at in range(100)])
    assert spark.read.format("mapstate").options(url=url, state=STATE, keys=names).load().count() == 100


if __name__ == "__main__":
    answer = ask()
    print(*(row.line() for row in answer.rows), answer.more, sep="\n")
