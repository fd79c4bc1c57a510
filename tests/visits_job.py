"""The job that tests run in a process of its own, to kill it: counts visits, from CSV files.

python tests/visits_job.py '{"url": ..., "input": ..., "checkpoint": ..., ...}'

``faults`` are those of `mapstate.testing`, by name, with their fields: ``["Kill", {"who": "driver", "call": 3}]``.
``who`` may be "driver", which is this process's group; ``where`` is ``["Begins", 7]`` or ``["Commits", 7]``.
``second`` names a state that follows the first, and then the faults are those of its store.
``dies_downstream`` is the batch whose new values the driver does not survive.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import class_archive
from pyspark.sql import DataFrame, SparkSession

from mapstate import Avg, Count, Sum, newStream, non_transactional, opaque, testing, transactional
from mapstate.backends import resolve

TESTS = str(Path(__file__).resolve().parent)
SCHEMA = "user_id string, bytes bigint"


def session(master: str, **conf: str) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("mapstate tests")
    # short jobs spend their time in loading classes and in the JVM's compiler
    fast = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {class_archive.options()}"
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": fast,
        "spark.executor.extraJavaOptions": fast,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stopTimeout": "30s",
        "spark.log.level": "ERROR",
        "spark.executorEnv.PYTHONPATH": TESTS,  # where tests' own functions are found
    }
    for name, value in (settings | conf).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def fault(kind: str, fields: dict[str, Any]) -> testing.Fault:
    fields = dict(fields)
    if "where" in fields:
        name, batch_id = fields["where"]
        fields["where"] = getattr(testing, name)(batch_id)
    if fields.get("who") == "driver":
        fields["who"] = os.getpgrp()
    made: testing.Fault = getattr(testing, kind)(**fields)
    return made


def main(options: dict[str, Any]) -> None:
    backend: Any = resolve(options["url"])
    faulty = backend
    if "faults" in options:
        faulty = testing.FaultyBackend(backend, options["folder"], tuple(fault(*one) for one in options["faults"]))
    if "second" not in options:
        backend = faulty
    recipes = {"opaque": opaque, "transactional": transactional, "non-transactional": non_transactional}
    recipe = recipes[options.get("type", "opaque")]
    spark = session(options.get("master", "local[2]"), **options.get("conf", {}))
    visits = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).csv(options["input"])
    counts = (
        newStream("visits", visits)
        .groupBy("user_id")
        .persistentAggregate(
            recipe(backend, chunk_size=options.get("chunk_size", 1)), visits=Count(), bytes=Sum("bytes")
        )
    )
    if "second" in options:
        by_visits = counts.newValuesStream().groupBy("visits")
        second = opaque(faulty, name=options["second"])
        counts = by_visits.persistentAggregate(second, users=Count(), bytes=Sum("bytes"), mean=Avg("bytes"))
    if "dies_downstream" in options:

        def downstream(new_values: DataFrame, batch_id: int) -> None:
            new_values.count()
            if batch_id == options["dies_downstream"]:
                Path(options["folder"], "kill").touch()
                os.killpg(0, signal.SIGKILL)

        counts = counts.newValuesStream().foreachBatch(downstream)
    query = counts.start(options["checkpoint"], trigger={"availableNow": True})
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
