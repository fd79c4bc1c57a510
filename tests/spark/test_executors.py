"""Executors whose Python lacks what a job needs: one clear error, and a store in which nothing was written."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import venv
from pathlib import Path

import pytest
from cases import full
from pyspark.errors import StreamingQueryException
from spark_fixtures import contents, finish, run_job

import mapstate
from mapstate import Count, newStream, opaque, open_reader
from mapstate.errors import ExecutorEnvironmentError

PACKAGE = Path(mapstate.__file__).parent
ROWS = [("a", 1), ("b", 2), ("a", 3)]


def job_on_cluster(url, visits, **conf):
    """One batch on two executors in processes of their own."""
    visits.put("0", ROWS)
    options = {"url": url, "input": str(visits.input), "checkpoint": str(visits.checkpoint)}
    return run_job(options | {"master": "local-cluster[2,1,1024]", "conf": conf})


def of_version(folder, version):
    """A copy of the package that says another version."""
    shutil.copytree(PACKAGE, folder / "mapstate", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "mapstate" / "version.py"
    said = f'VERSION = "{mapstate.__version__}"'
    assert said in file.read_text()
    file.write_text(file.read_text().replace(said, f'VERSION = "{version}"'))
    return str(folder)


@pytest.mark.slow
@pytest.mark.local_cluster
@pytest.mark.full
def test_an_executor_without_the_package_is_one_error_before_the_store_is_opened(visits, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    done = job_on_cluster(f"sqlite:///{tmp_path}/state.db", visits)
    assert done.returncode != 0
    assert f"({python}) lacks a package of this job: ModuleNotFoundError: No module named 'mapstate'" in done.stderr
    assert "ExecutorEnvironmentError" in done.stderr
    assert not (tmp_path / "state.db").exists()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.local_cluster
def test_an_executor_with_another_version_is_one_error_before_the_store_is_opened(visits, tmp_path):
    other = of_version(tmp_path / "other", "0.0.1")
    conf = {"spark.executorEnv.PYTHONPATH": other}
    done = job_on_cluster(f"sqlite:///{tmp_path}/state.db", visits, **conf)
    assert done.returncode != 0
    assert f"has mapstate 0.0.1, and the driver has {mapstate.__version__}. Nothing was written" in done.stderr
    assert not (tmp_path / "state.db").exists()


@pytest.mark.slow
@pytest.mark.local_cluster
@pytest.mark.redis
@pytest.mark.full
def test_an_executor_without_the_stores_driver_is_one_error_before_the_store_is_opened(visits, tmp_path, start_redis):
    server = start_redis()
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "redis.py").write_text("raise ModuleNotFoundError(\"No module named 'redis'\", name='redis')\n")
    done = job_on_cluster(server.url, visits, **{"spark.executorEnv.PYTHONPATH": str(absent)})
    assert done.returncode != 0
    assert "lacks a package of this job: " in done.stderr
    assert "No module named 'redis'" in done.stderr
    with server.client() as client:
        assert client.keys("*") == []


@pytest.mark.slow
@pytest.mark.local_cluster
@pytest.mark.full  # test_spark_faults has such executors in each run
def test_executors_with_all_packages_pass_the_check(visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    done = job_on_cluster(url, visits)
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents(url, "visits") == visits.truth()


AGGREGATOR = """
from mapstate import CombinerAggregator

class Rows(CombinerAggregator):
    def init(self, value):
        return 1

    def combine(self, a, b):
        return a + b
"""


@pytest.mark.spark
def test_a_task_that_cannot_import_is_translated_and_no_second_attempt_is_begun(spark, visits, tmp_path, monkeypatch):
    """As on an executor that joined after the check. A local master is not checked."""
    (tmp_path / "driver_only").mkdir()
    (tmp_path / "driver_only" / "rows_aggregator.py").write_text(AGGREGATOR)
    monkeypatch.syspath_prepend(tmp_path / "driver_only")
    aggregator = importlib.import_module("rows_aggregator").Rows()
    visits.put("0", ROWS)
    url = f"sqlite:///{tmp_path}/state.db"
    job = newStream("visits", visits.stream(spark)).groupBy("user_id")
    state = job.persistentAggregate(opaque(url), rows=aggregator)
    with pytest.raises(StreamingQueryException, match="an executor cannot import what a task needs"):
        finish(state.start(str(visits.checkpoint), trigger={"availableNow": True}))
    assert isinstance(state.last_error, ExecutorEnvironmentError)
    assert "No module named 'rows_aggregator'" in state.last_error.message
    with open_reader(url, "visits") as reader:
        ledger = reader.ledger()
        assert ledger.last_commit is None
        assert ledger.dead == ()
    del sys.modules["rows_aggregator"]


@pytest.mark.spark
def test_a_task_of_another_version_writes_nothing(spark, visits, tmp_path, monkeypatch):
    """As on an executor that joined after the check."""
    monkeypatch.setattr("mapstate.spark.executor.task.VERSION", "0.0.1")  # here, and not in the workers
    visits.put("0", ROWS)
    url = f"sqlite:///{tmp_path}/state.db"
    state = newStream("visits", visits.stream(spark)).groupBy("user_id").persistentAggregate(opaque(url), n=Count())
    with pytest.raises(StreamingQueryException, match="and the driver has 0.0.1"):
        finish(state.start(str(visits.checkpoint), trigger={"availableNow": True}))
    assert isinstance(state.last_error, ExecutorEnvironmentError)
    with open_reader(url, "visits") as reader:
        assert reader.ledger().last_commit is None
        assert dict(reader.scan()) == {}


@pytest.mark.slow
@pytest.mark.parametrize("named", [full(False), full(True)])
def test_workers_of_a_local_master_are_of_the_drivers_python_unless_another_is_named(named, visits, tmp_path):
    """In a virtual environment that is not activated, as in an IDE or a cron job, python3 is another Python."""
    visits.put("0", ROWS)
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho this is another Python >&2\nexit 9\n")
    other.chmod(0o755)
    environment = os.environ | {"PATH": f"{other.parent}:{os.environ['PATH']}"}
    environment.pop("PYSPARK_DRIVER_PYTHON", None)
    environment.pop("PYSPARK_PYTHON", None)
    if named:
        environment["PYSPARK_PYTHON"] = str(other)
    url = f"sqlite:///{tmp_path}/state.db"
    options = {"url": url, "input": str(visits.input), "checkpoint": str(visits.checkpoint), "master": "local[2]"}
    done = run_job(options, env=environment)
    assert (done.returncode != 0) == named, done.stderr[-3000:]
    if named:
        assert "this is another Python" in done.stderr
    else:
        assert contents(url, "visits") == visits.truth()
