"""Caches that outlive their batch, while partitions move between workers and others write in between. Real Spark.

A stale read is a wrong count: after every batch all keys are compared with an independent count. Where the leases
hold there have to be hits, or the test would prove nothing.
"""

from __future__ import annotations

import json
import logging
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the job of the test on a cluster: see the end
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import pytest
from visits_job import session

from mapstate import Count, Sum, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.errors import StoreUnavailableError
from mapstate.testing import Fail, FaultyBackend, Kill

pytestmark = pytest.mark.spark

USERS = 120
PARTITIONS = "5"
FAULTS = (
    Fail(method="multi_put", call=2, after=True, name="fail"),
    Kill(method="multi_put", call=2, after=True, name="kill"),
)


class Scenario:
    """Batches of one state, given to drivers with a cache and, now and then, to others. Called as Spark would."""

    def __init__(self, spark: Any, url: str, folder: Path, seed: int) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder
        self._chance = random.Random(seed)
        self._truth: Counter[str] = Counter()
        self._batch = 0
        self._cached = self._driver(cached=True)
        for fault in FAULTS:
            self._disarm(fault.name)
        self.done: Counter[str] = Counter()

    def _driver(self, *, cached: bool) -> Any:
        backend = FaultyBackend(resolve(self._url), str(self._folder), FAULTS)
        stream = newStream("visits", self._spark.createDataFrame([], "user_id string, bytes bigint"))
        spec = opaque(backend, cache_size=30 if cached else 0, chunk_size=7, patience=0)
        return stream.groupBy("user_id").persistentAggregate(spec, visits=Count(), bytes=Sum("bytes"))

    def _disarm(self, name: str) -> None:
        (self._folder / name).touch()

    def _arm(self, name: str) -> None:
        (self._folder / name).unlink()

    def _rows(self) -> list[tuple[str, int]]:
        users = self._chance.sample(range(USERS), self._chance.randrange(USERS // 2, USERS))
        return [(f"u{user}", self._chance.randrange(1000)) for user in users]

    def _give(self, driver: Any, rows: list[tuple[str, int]]) -> None:
        driver(self._spark.createDataFrame(rows, "user_id string, bytes bigint"), self._batch)

    def step(self, kind: str) -> None:
        """One batch; and a comparison.

        ``plain``   the driver with a cache, as ever
        ``fails``   an attempt fails in mid-write and is tried again with other rows, by the same driver
        ``dies``    a worker dies in mid-write: the driver begins the batch anew
        ``other``   another driver, without a cache, brings this batch; the first one starts anew after it
        ``starts``  the driver starts anew, in workers that still keep what they had of the last one
        """
        rows = self._rows()
        if kind == "starts":
            self._cached = self._driver(cached=True)
        if kind == "fails":
            self._arm("fail")
            with pytest.raises(StoreUnavailableError, match="a test's fault"):
                self._give(self._cached, rows)
            rows = self._rows()
        if kind == "dies":
            self._arm("kill")
        self._give(self._driver(cached=False) if kind == "other" else self._cached, rows)
        if kind == "other":
            self._cached = self._driver(cached=True)
        for user, size in rows:
            self._truth[f"visits {user}"] += 1
            self._truth[f"bytes {user}"] += size
        assert all((self._folder / fault.name).exists() for fault in FAULTS), "a fault did not fire"
        self._batch += 1
        self._compare()
        self.done[kind] += 1

    def _compare(self) -> None:
        with open_reader(self._url, "visits") as reader:
            found = {f"{name} {key[0]}": value for key, values in reader.scan() for name, value in values.items()}
        assert found == self._truth, f"after batch {self._batch}"
        self.done["values_compared"] += len(found)


KINDS = ["plain"] * 6 + ["fails", "dies", "other", "starts"]


def run_scenario(spark: Any, url: str, folder: Path, batches: int, seed: int) -> dict[str, int]:
    """What was done, with the keys and the hits of the drivers that have a cache."""
    log = logging.getLogger("mapstate")
    seen = Records()
    log.addHandler(seen)
    level = log.level
    log.setLevel("INFO")
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", PARTITIONS)
    kinds = random.Random(seed)
    try:
        scenario = Scenario(spark, url, folder, seed)
        for at in range(batches):
            scenario.step("plain" if at < 3 else kinds.choice(KINDS) if batches > 20 else KINDS[2 + at % 8])
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
        log.setLevel(level)
        log.removeHandler(seen)
    return {"batches": batches, "keys": seen.keys, "hits": seen.hits} | scenario.done


class Records(logging.Handler):
    """Adds up what the driver logs of each commit."""

    keys = hits = 0

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"(\d+) keys, (\d+) of them cached", record.getMessage()):
            self.keys += int(found[1])
            self.hits += int(found[2])


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.full), pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, store_at: Callable[[str], str]) -> str:
    return store_at(request.param)


def counted(tally: Any, where: str, done: dict[str, int]) -> None:
    assert done["hits"] > 0, "no lease ever held"
    rate = 100 * done["hits"] // done["keys"]
    names = ("batches", "fails", "dies", "other", "starts", "values_compared", "hits")
    tally(f"caches, {where}: {rate} % hits", **{name: done.get(name, 0) for name in names})


def test_partitions_that_move_between_local_workers_never_meet_a_stale_cache(url, spark, tmp_path, rounds, tally):
    """local[2], five partitions: a worker gets other ones in each batch."""
    for seed in range(rounds(1, 2)):
        folder = tmp_path / f"faults-{seed}"
        folder.mkdir()
        own = f"{url}.{seed}" if url.startswith("sqlite") else f"{url}{seed}/"
        done = run_scenario(spark, own, folder, rounds(9, 100), seed)
        counted(tally, f"local[2], {url.partition(':')[0]}", done)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.local_cluster
@pytest.mark.redis
@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]"])
def test_partitions_that_move_between_executors_never_meet_a_stale_cache(redis_url, tmp_path, rounds, tally, master):
    """Two executors, each with its worker; a worker that dies comes back empty."""
    options = {"master": master, "url": redis_url, "folder": str(tmp_path), "batches": rounds(9, 100), "seed": 7}
    ran = subprocess.run(
        [sys.executable, __file__, json.dumps(options)], capture_output=True, text=True, timeout=3600, check=False
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    counted(tally, master, json.loads(ran.stdout.splitlines()[-1]))


def main(options: dict[str, Any]) -> None:
    spark = session(options["master"])
    done = run_scenario(spark, options["url"], Path(options["folder"]), options["batches"], options["seed"])
    print(json.dumps(done))  # noqa: T201  the test reads it
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
