"""Counts rows under keys drawn at random, anew whenever Spark computes them: no two tries bring the same rows.

What any key has to be nobody can say; that all keys together are as many as the rows is what has to hold after each
batch, and a mixture of two tries breaks it. Runs by itself, to be killed, or in a session of the test's.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from mapstate import CombinerAggregator, Count, Sum, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.testing import Fault, FaultyBackend

KEYS = 80
START = 1_700_000_000
TOTALS = "totals.jsonl"


def write_files(folder: Path, batches: int, per_batch: int, rows: int) -> list[int]:
    """CSV files of numbers, ``per_batch`` of them to a batch; returns the sums, batch by batch."""
    folder.mkdir()
    sums = []
    for batch in range(batches):
        sums.append(0)
        for part in range(per_batch):
            numbers = [secrets.randbelow(1000) for _ in range(rows)]
            sums[-1] += sum(numbers)
            file = folder / f"{batch:04}-{part}.csv"
            file.write_text("".join(f"{number}\n" for number in numbers))
            os.utime(file, (START + batch, START + batch))  # files are read in the order of their times
    return sums


class RowByRow(CombinerAggregator):
    """A count that Spark cannot make by itself, so each row comes."""

    def init(self, _: Any) -> int:
        return 1

    def combine(self, a: int, b: int) -> int:
        return a + b


def run(
    spark: SparkSession,
    url: str,
    place: Path,
    faults: tuple[Fault, ...],
    per_batch: int = 2,
    *,
    row_by_row: bool = False,
    **options: Any,
) -> FaultyBackend:
    """All batches under ``place``; after each, what the state is, all keys together, goes to the file TOTALS."""
    backend = FaultyBackend(resolve(url), str(place), faults, record=True)
    draw = F.udf(lambda: f"k{secrets.randbelow(KEYS)}").asNondeterministic()
    count = RowByRow() if row_by_row else Count()
    rows = spark.readStream.schema("number bigint").option("maxFilesPerTrigger", per_batch).csv(str(place / "input"))
    job = (
        newStream("scattered", rows.withColumn("k", draw()))
        .groupBy("k")
        .persistentAggregate(opaque(backend, **({"chunk_size": 5} | options)), rows=count, total=Sum("number"))
    )

    def then_look(batch_df: Any, batch_id: int) -> None:
        job(batch_df, batch_id)
        with open_reader(url, "scattered") as reader, (place / TOTALS).open("a") as out:
            found = dict(reader.scan()).values()
            totals = [batch_id, sum(one["rows"] for one in found), sum(one["total"] for one in found)]
            out.write(json.dumps(totals) + "\n")

    query = (
        rows.withColumn("k", draw())
        .writeStream.foreachBatch(then_look)
        .option("checkpointLocation", str(place / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(600)
    return backend


def totals(place: Path) -> list[list[int]]:
    """Batch id, rows and sum of all keys, after each batch."""
    return [json.loads(line) for line in (place / TOTALS).read_text().splitlines()]


if __name__ == "__main__":
    from visits_job import fault, session

    given = json.loads(sys.argv[1])
    spark = session(given["master"], **given["conf"])
    run(
        spark,
        given["url"],
        Path(given["place"]),
        tuple(fault(*one) for one in given["faults"]),
        per_batch=given["per_batch"],
        row_by_row=given.get("row_by_row", False),
        **({"apply_on": given["apply_on"]} if "apply_on" in given else {}),
    )
    spark.stop()
