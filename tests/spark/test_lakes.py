"""Delta Lake and Iceberg on real tables, as the source of a state and as its history: `make lakes`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kafka_broker import jars
from matrix import pyspark_of
from needed_servers import without_server

from mapstate import errors
from mapstate.backends import opened
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.testing import wait_for

pytestmark = [pytest.mark.redis, pytest.mark.local_cluster, pytest.mark.full, pytest.mark.timeout(900)]

JOB = Path(__file__).parents[1] / "fixtures" / "lakes_job.py"
LAKES = "4.1"
"""The PySpark of the jars in lakes.xml: the last one for which both projects have a release."""

STARTS = "by StartsAt, and the stream starts at"
UNKNOWN = "Spark tells no start by partition of source 0"
CASES = {
    "delta": {
        "exact": "217 as the table",
        "early": STARTS,
        "late": STARTS,
        "whole": UNKNOWN,
        "rows": UNKNOWN,
        "own": "241 as the table",
        "counted": "241 as the table",
        "rewound": "247 as the table",
        "replanned": "255 as the table",
        "lost": "StateOwnershipError",
        "adopts-whole": "a source cannot be compared",
        "adopts-early": "a source starts elsewhere",
        "adopts": "275 as the table",
        "deleted": "DELTA_SOURCE_TABLE_IGNORE_CHANGES",
        "skipped": "280 not as the table",
        "latest-seed": "batch 0 was planned up to version",
        "latest": "ReplannedBatchError: batch 0 was planned up to version",
        "latest-by-number": "70 not as the table",
    },
    "iceberg": {
        "exact": "217 as the table",
        "early": STARTS,
        "late": STARTS,
        "whole": STARTS,
        "future": UNKNOWN,
        "own": "227 as the table",
        "counted": "227 as the table",
        "rewound": "233 as the table",
        "replanned": "241 as the table",
        "lost": "StateOwnershipError",
        "adopts-whole": "a source starts elsewhere",
        "adopts": "a source starts elsewhere",
        "adopts-unchecked": "261 as the table",
        "deleted": "Cannot process overwrite snapshot",
        "skipped": "266 not as the table",
        "expired": "the snapshot was expired or removed",
        "oldest": "those before it have expired",
        "oldest-batch": "those before it have expired",
        "oldest-named": "11 not as the table",
        "before-oldest": "those before it have expired",
        "oldest-and-next": "260 as the table",
    },
}


@contextmanager
def job(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`lakes_job` in a process group of its own, killed at the end if it still runs; it writes to ``folder/log``."""
    found = jars("lakes", JOB.parent)
    if found is None:
        without_server("the jars of Delta Lake and Iceberg cannot be had here: they need Maven")
    needed = [
        str(jar) for jar in sorted(found.iterdir()) if jar.name.startswith(("delta-", "iceberg-", "unitycatalog-"))
    ]
    submit = f"--conf spark.driver.extraClassPath={':'.join(needed)} pyspark-shell"
    environment = os.environ | {"PYTHONPATH": str(pyspark_of(LAKES)), "PYSPARK_SUBMIT_ARGS": submit}
    with (folder / "log").open("ab") as out:
        command = [sys.executable, str(JOB), *words]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def cases(folder: Path) -> dict[str, str]:
    lines = (folder / "log").read_text().splitlines()
    return dict(line.split(" ", 2)[1:] for line in lines if line.startswith("case "))


@pytest.mark.parametrize("kind", CASES)
def test_what_a_table_counts_and_what_is_refused_before_anything_is_written(kind, tmp_path):
    with job(tmp_path, "cases", kind, str(tmp_path)) as process:
        process.wait(800)
    found = cases(tmp_path)
    assert list(found) == list(CASES[kind]), (tmp_path / "log").read_text()[-6000:]
    for name, right in CASES[kind].items():
        text = right if right.endswith("the table") else f"refused {right}"
        assert found[name].startswith(text) or (found[name].startswith("refused") and right in found[name]), name


def progress(url: str) -> int:
    """How many batches or parts of a seed count."""
    try:
        with opened(url, "visits") as store:
            ledger = read_ledger(store, "visits")
    except errors.StateNotFoundError:
        return 0
    return (
        ledger.seed.done if ledger.seed is not None else (ledger.last_commit is not None) + sum(ledger.owners.values())
    )


@pytest.mark.parametrize("does", ["count", "seed"])
@pytest.mark.parametrize("kind", CASES)
def test_a_driver_that_is_killed_again_and_again_counts_each_row_of_a_table_once(kind, does, tmp_path, redis_url):
    arguments = (does, kind, str(tmp_path), redis_url)
    for least in (1, 3, 6):
        with job(tmp_path, *arguments) as process:
            wait_for(lambda: process.poll() is not None or progress(redis_url) >= least, f"{least} parts", 300)  # noqa: B023
            assert process.poll() is None, (tmp_path / "log").read_text()[-6000:]
    with job(tmp_path, *arguments) as process:
        process.wait(400)
    assert cases(tmp_path) == {does: "500 as the table"}, (tmp_path / "log").read_text()[-6000:]
