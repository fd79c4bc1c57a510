"""Spark's newer ways between its JVM and Python's workers, which are off by default in PySpark 4.3.

    pipelined       spark.python.udf.pipelined.enabled: a worker reads ahead in a thread
    Unix sockets    spark.python.unix.domain.socket.enabled, in place of TCP

By turns, each in a session of its own, because a session has them from its start. In a turn a query has all files,
one a batch, into a state of its own on Redis. Measured is what Spark says of each batch after the first two:
``triggerExecution``, from the planning of a batch to its end.
"""

from __future__ import annotations

from measuring import Answer, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import json
import subprocess
import sys
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

from connect import milliseconds
from servers import RedisServer
from turns import make_file, session

from mapstate import open_reader

WAYS = {
    "by default": {},
    "pipelined": {"spark.python.udf.pipelined.enabled": "true"},
    "Unix sockets": {"spark.python.unix.domain.socket.enabled": "true"},
}
SIZES = ((1_000, 500), (1_000_000, 400_000))


def ask(batches: int = 6, turns: int = 4) -> Answer:
    """Answer the question."""
    states, rows_of_answer, lines = count(), [], []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, RedisServer().start() as redis:
        for rows, keys in SIZES:
            folder = Path(place) / str(rows)
            (folder / "input").mkdir(parents=True)
            for number in range(batches):
                make_file(folder / "input", number, rows, keys)

            def counted(way: str, folder: Path, all_rows: int) -> float:
                state = f"state-{next(states)}"
                command = [sys.executable, __file__, json.dumps([way, str(folder), redis.url, state])]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                with open_reader(redis.url, state) as reader:
                    assert sum(value["n"] for _, value in reader.scan(5_000)) == all_rows
                return float(done.stdout.splitlines()[-1])

            taken = by_turns({way: partial(counted, way, folder, rows * batches) for way in WAYS}, turns)
            for way in list(WAYS)[1:]:
                batch = f"a batch of {rows:,} rows over {keys:,} keys, {way}"
                rows_of_answer.append(Row(batch, "the same by default", ratios(taken[way], taken["by default"])))
            lines += [(f"{rows:,} rows: {way}", spread(figures)) for way, figures in taken.items()]
    how = f"{batches} batches a query, {turns} turns; a session each, by turns"
    return Answer(rows_of_answer, how, table("way | milliseconds a batch", lines))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asked_way, input_folder, store, name = json.loads(sys.argv[1])
        print(milliseconds(session(**WAYS[asked_way]), Path(input_folder), store, name))
    else:
        answer = ask()
        print(*(row.line() for row in answer.rows), answer.more, sep="\n")
