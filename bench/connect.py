"""What Spark Connect adds to a batch: the same query from a client of a Connect server, and on classic PySpark.

By turns, into one Redis. In a turn a query has all of the files, one a batch, into a state of its own. Measured is what
Spark says of each batch behind the first two: ``triggerExecution``, from the planning of a batch to its end.
"""

from __future__ import annotations

from measuring import Answer, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from connect_server import connect_server
from pyspark.sql import SparkSession
from servers import RedisServer
from turns import make_file, session

from mapstate import Count, newStream, opaque, open_reader

WARM_UP = 2
SIZES = ((1_000, 500), (500_000, 200_000))
CONF = {
    "spark.driver.memory": "4g",
    "spark.driver.extraJavaOptions": "",
    "spark.executor.extraJavaOptions": "",
    "spark.sql.files.openCostInBytes": "0",
}


def milliseconds(spark: Any, folder: Path, url: str, state: str) -> float:
    """The median of a query's batches."""
    rows = spark.readStream.schema("user_id string").option("maxFilesPerTrigger", 1).parquet(str(folder / "input"))
    counts = newStream("users", rows).groupBy("user_id").persistentAggregate(opaque(url, state), n=Count())
    query = counts.start(str(folder / state), trigger={"availableNow": True})
    query.awaitTermination()
    taken = [one["durationMs"] for one in query.recentProgress]
    return statistics.median([one["triggerExecution"] for one in taken if "addBatch" in one][WARM_UP:])


def of_client(server: str, folder: Path, url: str, state: str) -> float:
    """The same from a client, in a process of its own: classic PySpark is in this one."""
    command = [sys.executable, __file__, json.dumps([server, str(folder), url, state])]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def ask(batches: int = 8, turns: int = 5) -> Answer:
    """Answer the question."""
    spark, states, found, lines = session(), count(), [], []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, RedisServer().start() as redis:
        (Path(place) / "server").mkdir()
        with connect_server(Path(place) / "server", **CONF) as server:
            for rows, keys in SIZES:
                folder = Path(place) / str(rows)
                (folder / "input").mkdir(parents=True)
                for number in range(batches):
                    make_file(folder / "input", number, rows, keys)

                def counted(way: Any, folder: Path, all_rows: int) -> float:
                    state = f"state-{next(states)}"
                    taken: float = way(folder, redis.url, state)
                    with open_reader(redis.url, state) as reader:
                        assert sum(value["n"] for _, value in reader.scan(5_000)) == all_rows
                    return taken

                ways = {"connect": partial(of_client, server.url), "classic": partial(milliseconds, spark)}
                taken = by_turns(
                    {name: partial(counted, way, folder, rows * batches) for name, way in ways.items()}, turns
                )
                batch = f"a batch of {rows:,} rows over {keys:,} keys, over Spark Connect"
                found.append(Row(batch, "classic PySpark", ratios(taken["connect"], taken["classic"])))
                lines += [(f"{rows:,} rows: {name}", spread(own)) for name, own in taken.items()]
    spark.stop()
    how = f"{batches} batches a query, {turns} turns; a server of `local[2]` beside a driver of `local[2]`, by turns"
    return Answer(found, how, table("way | milliseconds a batch", lines))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        where, input_folder, store, name = json.loads(sys.argv[1])
        print(milliseconds(SparkSession.builder.remote(where).create(), Path(input_folder), store, name))
    else:
        answer = ask()
        print(*(row.line() for row in answer.rows), answer.more, sep="\n")
