"""What a Python worker costs before its first record: its imports, and its first batch, beside an empty mapInArrow.

A process of its own does the imports: those of Spark's worker for a mapInArrow, and those that unpickling a task
and opening Redis add. mapstate's modules are compiled first, as pip compiles what it installs. If Python may not
write beside the source, each process would compile them again. First batches are jobs of one small partition with
`spark.python.worker.reuse` off, so each has a worker that has never run anything.
"""

from __future__ import annotations

from turns import no_store, session  # isort: skip

import compileall
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table
from servers import RedisServer

import mapstate
from mapstate import Count, newStream, opaque, open_reader
from mapstate.protocol.ledger_record import Commit

WORKER = "import pyspark.worker, pyarrow, pandas, pyspark.sql.pandas.serializers"
DRIVER = f"{WORKER}; import redis, msgspec"
TASK = f"{WORKER}; import mapstate.spark.executor.task, mapstate.backends.redis"


def imports(code: str) -> Any:
    """Run the imports in a new Python."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return lambda: subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def ask(turns: int = 15) -> Answer:
    assert compileall.compile_dir(Path(mapstate.__file__).parent, quiet=1)
    imported = by_turns(
        {"worker": imports(WORKER), "redis-py, msgspec": imports(DRIVER), "task": imports(TASK)}, turns, warm_up=2
    )
    with RedisServer().start() as server:
        spark = session(1, spark__python__worker__reuse="false")
        batch = spark.range(100).selectExpr("concat('user-', id) AS user_id").coalesce(1).cache()
        batch.count()
        state = opaque(server.url, "visits")
        aggregate = newStream("users", batch).groupBy("user_id").persistentAggregate(state, n=Count())
        done = iter(range(10_000))
        count = turns + 2
        first = by_turns(
            {"empty": lambda: no_store(batch), "opaque": lambda: aggregate(batch, next(done))}, turns, warm_up=2
        )
        with open_reader(server.url, "visits") as reader:
            assert reader.get("user-7") == {"n": count}
            assert isinstance(reader.ledger().last_commit, Commit)
        spark.stop()
    return Answer(
        [
            Row(
                "import time of a worker",
                "an empty mapInArrow",
                ratios(imported["task"], imported["worker"]),
                Goal("most", 1.3),
            ),
            Row(
                "import time of a worker with redis-py and msgspec alone",
                "an empty mapInArrow",
                ratios(imported["redis-py, msgspec"], imported["worker"]),
                note="what the goal above would be for a library that takes no time itself",
            ),
            Row(
                "first batch of a worker, begun and committed",
                "an empty mapInArrow",
                ratios(first["opaque"], first["empty"]),
                Goal("most", 1.3),
            ),
        ],
        f"{turns} turns after 2 to warm up",
        table(
            "what | milliseconds",
            [(name, spread(own, 1000)) for name, own in (imported | first).items()],
        ),
    )
