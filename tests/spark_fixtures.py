"""The one Spark session of a test process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from visits_job import SCHEMA, session

from mapstate import open_reader

AVAILABLE = {"availableNow": True}


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def each_url(request: Any, tmp_path: Path) -> str:
    """A store of each kind, empty."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    return str(request.getfixturevalue("redis_url"))


def finish(query: Any) -> None:
    query.awaitTermination(120)
    assert not query.isActive


def contents(url: Any, state: str) -> dict[Any, Any]:
    """All keys with their fields; as many as the ledger says, wherever it knows and nothing is at work."""
    with open_reader(url, state) as reader:
        before = reader.ledger()
        found = dict(reader.scan())
        if before == reader.ledger() and (before.type == "opaque" or before.in_flight is None):
            assert before.keys_held() in (None, len(found))
        return found


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """local[2], where a task that failed is never tried again."""
    one = session(
        "local[2]",
        **{
            # A task of a job that failed may go on for as long as a test needs it to.
            "spark.python.task.killTimeout": "120s",
            # Two tasks even where there is little to do: one of them can then be late, or die.
            "spark.sql.adaptive.coalescePartitions.enabled": "false",
            "spark.sql.session.timeZone": "America/St_Johns",
        },
    )
    yield one
    one.stop()


def run_job(options: dict[str, Any], *, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """`visits_job` in a process group of its own, which is gone when this returns."""
    job = Path(__file__).with_name("visits_job.py")
    command = [sys.executable, str(job), json.dumps(options)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Visits:
    """A directory of CSV files, one per micro-batch, and an independent count of what is in them."""

    def __init__(self, folder: Path) -> None:
        self.input = folder / "input"
        self.input.mkdir()
        self.checkpoint = folder / "checkpoint"
        self._files: dict[str, list[tuple[str, int]]] = {}
        self._last = 0

    def put(self, name: str, rows: list[tuple[str, int]]) -> None:
        """Adds a file, or replaces its contents."""
        self._files[name] = rows
        partial = self.input / f"_{name}"  # Spark does not see what starts with _
        partial.write_text("".join(f"{user},{size}\n" for user, size in rows))
        # Spark reads files in the order of their times, which are too coarse for two in a row.
        self._last = max(time.time_ns(), self._last + 20_000_000)
        os.utime(partial, ns=(self._last, self._last))
        partial.rename(self.input / f"{name}.csv")

    def rows(self, name: str) -> list[tuple[str, int]]:
        """What a file holds now."""
        return self._files[name]

    def truth(self) -> dict[tuple[str], dict[str, int]]:
        """What the state has to be."""
        rows = [row for rows in self._files.values() for row in rows]
        visits = Counter(user for user, _ in rows)
        size: Counter[str] = Counter()
        for user, one in rows:
            size[user] += one
        return {(user,): {"visits": visits[user], "bytes": size[user]} for user in visits}

    def stream(self, spark: SparkSession) -> Any:
        """The files as a stream, one per micro-batch."""
        return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).csv(str(self.input))


@pytest.fixture
def visits(tmp_path: Path) -> Visits:
    """An empty directory of visits."""
    return Visits(tmp_path)
