"""An archive of the classes that Spark loads: with it a JVM of the tests starts in about half the time.

``scripts/run python tests/class_archive.py`` makes it, in .venv, as `make venv` does. Where there is none, or where it
is another JVM's, the tests run all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark.jsa"
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"


def options() -> str:
    """For ``spark.driver.extraJavaOptions`` and those of executors."""
    return f'"-XX:SharedArchiveFile={ARCHIVE}" {_QUIET}' if ARCHIVE.exists() else ""


def make() -> None:
    """Runs what every test runs, and lets the JVM write down what it loaded."""
    import pyarrow as pa
    from pyspark.sql import functions as F
    from visits_job import session

    new = ARCHIVE.with_suffix(".new")
    ARCHIVE.unlink(missing_ok=True)
    spark = session("local[2]", **{"spark.driver.extraJavaOptions": f'"-XX:ArchiveClassesAtExit={new}" {_QUIET}'})

    def as_they_are(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return batches

    rows = spark.createDataFrame([("a", 1), ("b", 2)], "user_id string, bytes bigint")
    sums = rows.groupBy("user_id").agg(F.sum("bytes").alias("bytes"), F.count(F.lit(1)).alias("rows"))
    sums.mapInArrow(as_they_are, "user_id string, bytes bigint, rows bigint").collect()
    query = spark.readStream.format("rate").load().writeStream.foreachBatch(lambda *_: None)
    query.trigger(availableNow=True).start().awaitTermination()
    spark.stop()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    gateway.proc.stdin.close()  # the JVM ends, and writes
    gateway.proc.wait(120)
    if new.exists():
        new.rename(ARCHIVE)


if __name__ == "__main__":
    make()
