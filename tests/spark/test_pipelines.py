"""Spark's declarative pipelines, run by their own command: a state beside one, as docs/versions.md advises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from spark_fixtures import AVAILABLE, DATA_SOURCE, Visits, contents, finish

from mapstate import Count, Sum, newStream, opaque

pytestmark = pytest.mark.spark

TABLE = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()


@dp.table(table_properties={{"pipelines.reset.allowed": "false"}})
def visits():
    return spark.readStream.schema("user_id string, bytes bigint").csv("{input}")
"""
VIEW = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()


@dp.materialized_view
def totals():
    return spark.read.format("mapstate").option("url", "{url}").option("state", "visits").load()
"""


class Pipeline:
    """A pipeline in a folder of its own, with its own catalog."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "code").mkdir(parents=True)
        (folder / "spark-pipeline.yml").write_text(
            f"name: p\nstorage: {(folder / 'storage').as_uri()}\nlibraries:\n  - glob:\n      include: code/**\n"
        )

    def add(self, name: str, text: str) -> None:
        (self._folder / "code" / f"{name}.py").write_text(text)

    def run(self, *arguments: str) -> None:
        command = [str(Path(sys.executable).with_name("spark-pipelines"))]
        command += ["--conf", "spark.sql.catalogImplementation=hive", "run", *arguments]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    def table(self, name: str) -> str:
        return str(self._folder / "spark-warehouse" / name)


@pytest.mark.slow
@pytest.mark.since("4.3", "tables of pipelines that a full refresh leaves")
def test_a_state_counts_a_table_of_a_pipeline_that_reads_the_state(
    spark: SparkSession, visits: Visits, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    pipeline = Pipeline(tmp_path / "pipeline")
    pipeline.add("table", TABLE.format(input=visits.input))

    def count() -> Any:
        rows = spark.readStream.schema("user_id string, bytes bigint").parquet(pipeline.table("visits"))
        stream = newStream("visits", rows).groupBy("user_id")
        counts = stream.persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))
        finish(counts.start(str(visits.checkpoint), trigger=AVAILABLE))
        return contents(url, "visits")

    visits.put("0", [("u1", 10), ("u2", 20), ("u1", 5)])
    pipeline.run()
    assert count() == {("u1",): {"visits": 2, "bytes": 15}, ("u2",): {"visits": 1, "bytes": 20}}
    visits.put("1", [("u1", 1)])
    pipeline.add("view", VIEW.format(url=url))
    pipeline.run("--full-refresh-all")
    seen = {tuple(row) for row in spark.read.parquet(pipeline.table("totals")).collect()}
    assert seen == {("u1", 2, 15), ("u2", 1, 20)}
    assert count() == {("u1",): {"visits": 3, "bytes": 16}, ("u2",): {"visits": 1, "bytes": 20}}


@DATA_SOURCE
def test_the_format_says_that_it_is_no_sink(spark: SparkSession, visits: Visits, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", [("u1", 10)])
    writer = visits.stream(spark).writeStream.format("mapstate").option("url", url).option("state", "visits")
    with pytest.raises(StreamingQueryException, match="mapstate is read, and is no sink. Nothing was written"):
        finish(writer.option("checkpointLocation", str(visits.checkpoint)).trigger(**AVAILABLE).start())
    assert not (tmp_path / "state.db").exists()
