"""Python workers and whole executors that are killed in mid-write, where no two tries bring the same rows."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from processes import job
from scattered_job import run, totals, write_files

from mapstate import open_reader
from mapstate.testing import Begins, Kill, Mark

pytestmark = [pytest.mark.spark, pytest.mark.redis]

ROWS = 150  # of a file


@pytest.fixture(params=["redis", "sqlite"])
def url(request: Any, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")


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
    batches = rounds(4, 24)
    sums = write_files(tmp_path / "input", batches, 2, ROWS)
    faults = []
    for batch in range(batches):
        faults.append(Mark(method="swap", where=Begins(batch), after=True, name=f"begun-{batch}"))
        faults.append(Kill(call=1 + batch % 6, after=batch % 2 == 0, since=f"begun-{batch}", name=f"kill-{batch}"))
    run(spark, url, tmp_path, tuple(faults))
    check(url, tmp_path, sums, 2, [f"kill-{batch}" for batch in range(batches)])
    tally("Python worker killed in mid-write, on local", kills=batches)


@pytest.mark.slow
@pytest.mark.local_cluster
def test_an_executor_killed_in_mid_write_mixes_no_two_tries(rounds, tally, tmp_path, redis_url):
    """local-cluster: Spark tries the task again by itself, and computes again what the executor held of the shuffle."""
    kinds: list[Any] = ["executor", "self"] * rounds(1, 10)
    in_cluster(redis_url, tmp_path, kinds)
    tally("executor JVM killed in mid-write", kills=kinds.count("executor"))
    tally("Python worker killed in mid-write, on local-cluster", kills=kinds.count("self"))


def in_cluster(url: str, place: Path, kinds: list[Any], **kill: Any) -> None:
    """A kill in each batch but the last."""
    per_batch, faults = 4, []
    for batch, who in enumerate(kinds):
        since = f"begun-{batch}"
        faults.append(
            ["Mark", {"method": "swap", "where": ["Begins", batch], "after": True, "times": None, "name": since}]
        )
        where = {"call": 1 + batch % 5, "after": True} | kill
        faults.append(["Kill", {"who": who, "since": since, "name": f"kill-{batch}"} | where])
    sums = write_files(place / "input", len(kinds) + 1, per_batch, ROWS)
    options = {
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
    log = place / "job.log"
    with job(Path(__file__).with_name("scattered_job.py"), options, log) as process:
        assert process.wait(200 + 60 * len(kinds)) == 0, log.read_text()[-3000:]
    check(url, place, sums, per_batch, [f"kill-{batch}" for batch in range(len(kinds))])
