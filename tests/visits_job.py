"""The job that tests run in a process of its own, to kill it: counts visits, from CSV files.

python tests/visits_job.py '{"url": ..., "input": ..., "checkpoint": ..., ...}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from faults import FaultyBackend
from pyspark.sql import SparkSession

from mapstate import Count, Sum, newStream, opaque, transactional
from mapstate.backends import resolve

TESTS = str(Path(__file__).resolve().parent)
SCHEMA = "user_id string, bytes bigint"


def session(master: str, **conf: str) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("mapstate tests")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # short jobs spend their time in the JVM's compiler
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stopTimeout": "30s",
        "spark.log.level": "ERROR",
        "spark.executorEnv.PYTHONPATH": TESTS,  # where the faulty store's module is
    }
    for name, value in (settings | conf).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main(options: dict[str, Any]) -> None:
    backend: Any = resolve(options["url"])
    if "faults" in options:
        backend = FaultyBackend(
            backend,
            options["folder"],
            tuple(options["faults"]),
            after_puts=options.get("after_puts", 1),
            group=os.getpgrp(),
        )
    recipe = {"opaque": opaque, "transactional": transactional}[options.get("type", "opaque")]
    spark = session(options.get("master", "local[2]"), **options.get("conf", {}))
    visits = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).csv(options["input"])
    counts = (
        newStream("visits", visits)
        .groupBy("user_id")
        .persistentAggregate(
            recipe(backend, chunk_size=options.get("chunk_size", 1)), visits=Count(), bytes=Sum("bytes")
        )
    )
    query = counts.start(options["checkpoint"], trigger={"availableNow": True})
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
