"""Python workers and whole executors that are killed in mid-write, where no two tries bring the same rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import FIXTURES, job
from scattered_job import run, totals, write_files

from mapstate import open_reader
from mapstate.testing import Begins, Kill, Mark, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.redis]

ROWS = 150  # of a file


@pytest.fixture(params=["redis", *(pytest.param(store, marks=pytest.mark.full) for store in ("packed", "sqlite"))])
def url(request: Any, store_at: Callable[[str], str]) -> str:
    return store_at(request.param)


def check(url: str, place: Path, sums: list[int], per_batch: int, kills: list[str]) -> None:
    """Each batch, when it had ended, was all of it and nothing else; and each kill was of an attempt that is dead."""
    expected = [[at, (at + 1) * per_batch * ROWS, total] for at, total in enumerate(accumulate(sums))]
    assert totals(place) == expected
    missing = [kill for kill in kills if not (place / kill).exists()]
    assert not missing, "never fired"
    with open_reader(url, "scattered") as reader:
        dead = reader.ledger().dead
        assert sum(high - low + 1 for low, high in dead) >= len(kills)


def test_a_worker_killed_in_mid_write_mixes_no_two_tries(url, spark, rounds, tally, tmp_path):
    """local[2]: Spark never tries a task again, the batch is begun anew, with other rows under each key."""
    batches = rounds(2, 24)
    sums = write_files(tmp_path / "input", batches, 2, ROWS)
    faults = []
    for batch in range(batches):
        faults.append(Mark(method="swap", where=Begins(batch), after=True, name=f"begun-{batch}"))
        faults.append(Kill(call=1 + batch % 6, after=batch % 2 == 0, since=f"begun-{batch}", name=f"kill-{batch}"))
    run(spark, url, tmp_path, tuple(faults))
    check(url, tmp_path, sums, 2, [f"kill-{batch}" for batch in range(batches)])
    tally("Python worker killed in mid-write, on local", kills=batches)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.local_cluster
def test_an_executor_killed_in_mid_write_mixes_no_two_tries(tally, tmp_path, redis_url):
    """local-cluster: Spark tries the task again by itself, and computes again what the executor held of the shuffle."""
    kinds = ["between tasks", *["executor", "between tasks", "self"] * 5]
    in_cluster(redis_url, tmp_path, kinds)
    rows = {
        "executor": "executor JVM killed in mid-write",
        "between tasks": "executor JVM killed between two tasks",
        "self": "Python worker killed in mid-write, on local-cluster",
    }
    for kind in kinds:
        tally(rows[kind], kills=1)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.local_cluster
def test_an_executor_killed_while_the_driver_writes_mixes_no_two_draws(rounds, tally, tmp_path, redis_url):
    """apply_on="driver", where each row comes: partition by partition; an executor is lost after the first."""
    batches, per_batch = rounds(1, 3), 4
    sums, faults = write_files(tmp_path / "input", batches + 1, per_batch, ROWS), []
    for batch in range(batches):
        begins = {"method": "swap", "where": ["Begins", batch], "after": True}
        faults.append(["Mark", begins | {"name": f"begun-{batch}"}])
        stall = {"call": 2, "until": f"killed-{batch}", "seconds": 100, "since": f"begun-{batch}"}
        faults.append(["Wait", stall | {"name": f"stall-{batch}"}])
    options = cluster_options(redis_url, tmp_path, per_batch, faults) | {"apply_on": "driver", "row_by_row": True}
    log = tmp_path / "job.log"
    with job(FIXTURES / "scattered_job.py", options, log) as process:
        for batch in range(batches):
            stalls = tmp_path / f"stall-{batch}"
            wait_for(lambda stalls=stalls: stalls.exists() or process.poll() is not None, "the write", 240)
            executors_of(process.pid)[0].kill()
            (tmp_path / f"killed-{batch}").touch()
        assert process.wait(240) == 0, log.read_text()[-3000:]
    check(redis_url, tmp_path, sums, per_batch, [])
    tally("executor JVM killed while the driver writes", kills=batches)


def executors_of(driver: int) -> list[psutil.Process]:
    """The executors' JVMs of a local-cluster that live."""
    found = []
    for one in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # which a zombie is too
            if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()):
                found.append(one)
    return found


def in_cluster(url: str, place: Path, kinds: list[str]) -> None:
    """A kill in each batch but the last.

    ``between tasks``: before the third task to come has its claim, so that no task is tried again that had written.
    The shuffle's rows that the executor held are drawn anew for the tasks that come after.
    """
    per_batch, faults = 4, []
    for batch, kind in enumerate(kinds):
        since, name = f"begun-{batch}", f"kill-{batch}"
        begins = {"method": "swap", "where": ["Begins", batch], "after": True, "times": None}
        faults.append(["Mark", begins | {"name": since}])
        if kind == "between tasks":
            for claim in ("first", "second"):
                faults.append(["Mark", {"method": "claim", "since": since, "after": True, "name": f"{claim}-{batch}"}])
                since = f"{claim}-{batch}"
            faults.append(["Kill", {"method": "claim", "who": "executor", "since": since, "name": name}])
        else:
            where = {"call": 1 + batch % 5, "after": True}
            faults.append(["Kill", {"who": kind, "since": since, "name": name} | where])
    sums = write_files(place / "input", len(kinds) + 1, per_batch, ROWS)
    options = cluster_options(url, place, per_batch, faults)
    log = place / "job.log"
    with job(FIXTURES / "scattered_job.py", options, log) as process:
        assert process.wait(200 + 60 * len(kinds)) == 0, log.read_text()[-3000:]
    check(url, place, sums, per_batch, [f"kill-{batch}" for batch in range(len(kinds))])


def cluster_options(url: str, place: Path, per_batch: int, faults: list[Any]) -> dict[str, Any]:
    return {
        "url": url,
        "place": str(place),
        "master": "local-cluster[2,1,1024]",
        "per_batch": per_batch,
        "faults": faults,
        "conf": {
            "spark.deploy.maxExecutorRetries": "-1",
            "spark.task.maxFailures": "20",
            "spark.sql.shuffle.partitions": "4",  # more than there are executors: some tasks come after the kill
            "spark.sql.adaptive.coalescePartitions.enabled": "false",
        },
    }
