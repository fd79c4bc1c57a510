"""Checkpoints that come back one batch older than the state: restored from a backup, or without their last entry."""

from __future__ import annotations

import random
import secrets
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from spark_fixtures import AVAILABLE, Visits, contents, finish
from visits_job import SCHEMA

from mapstate import Count, Sum, newStream, opaque, transactional
from mapstate.errors import ReplannedBatchError
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.testing import crash_between

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.slow]

BACK = [
    "restored from a copy",
    "restored twice",
    "without its last entry",
    "restored, its driver dead in the batch anew",
]


class Query:
    """A query that is started again and again over all input that has come since."""

    def __init__(self, spark: Any, visits: Visits, spec: Any) -> None:
        self.spark, self.visits, self.spec = spark, visits, spec
        self.copy = visits.checkpoint.with_name("copy")
        self.batches = 0

    def put(self, chance: random.Random) -> None:
        rows = [(f"user-{chance.randrange(30)}", chance.randrange(100)) for _ in range(chance.randint(1, 40))]
        self.visits.put(f"{self.batches:04}", rows)
        self.batches += 1

    def run(self) -> ReplannedBatchError | None:
        frame = self.spark.readStream.schema(SCHEMA).csv(str(self.visits.input))
        grouped = newStream("visits", frame).groupBy("user_id")
        job = grouped.persistentAggregate(self.spec, visits=Count(), bytes=Sum("bytes"))
        try:
            finish(job.start(str(self.visits.checkpoint), trigger=AVAILABLE))
        except StreamingQueryException:
            if not isinstance(job.last_error, ReplannedBatchError):
                raise
            return job.last_error
        return None

    def back_up(self) -> None:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.visits.checkpoint, self.copy)

    def restore(self, copy: Path | None = None) -> None:
        shutil.rmtree(self.visits.checkpoint)
        shutil.copytree(copy or self.copy, self.visits.checkpoint)

    def lose_the_last_entry(self) -> None:
        for folder in ("offsets", "commits"):
            last = max(int(path.name) for path in (self.visits.checkpoint / folder).iterdir() if path.name.isdigit())
            for name in (str(last), f".{last}.crc"):
                (self.visits.checkpoint / folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["opaque", "transactional"])
@pytest.mark.parametrize("store", ["redis", pytest.param("sqlite", marks=pytest.mark.full)])
def test_no_row_is_lost_and_none_counts_twice_where_the_checkpoint_is_one_batch_older(
    kind, store, spark, visits, store_at, rounds, tally
):
    """Opaque: right after each. Transactional: refused each time, with nothing written, until the newer one is back."""
    seed, url = secrets.randbits(32), store_at(store)
    chance, refused, ways = random.Random(seed), 0, Counter[str]()
    query = Query(spark, visits, (opaque if kind == "opaque" else transactional)(url))
    query.put(chance)
    query.run()
    newer = visits.checkpoint.with_name("newer")
    for _ in range(rounds(2, 25)):
        query.back_up()
        query.put(chance)
        assert query.run() is None
        way = chance.choice(BACK)
        ways[way] += 1
        shutil.rmtree(newer, ignore_errors=True)
        shutil.copytree(visits.checkpoint, newer)
        if way == "without its last entry":
            query.lose_the_last_entry()
        else:
            query.restore()
        query.put(chance)
        before = read_ledger(query.spec.named("visits").open(), "visits")
        error = query.run()
        if kind == "transactional":
            assert isinstance(error, ReplannedBatchError), f"seed {seed}, {way}"
            assert read_ledger(query.spec.named("visits").open(), "visits") == before
            refused += 1
            query.restore(newer)
            assert query.run() is None
        else:
            assert error is None, f"seed {seed}, {way}"
            if way == "restored twice":
                query.restore()
                query.put(chance)
                assert query.run() is None
            elif way == "restored, its driver dead in the batch anew":
                crash_between(visits.checkpoint)
                assert query.run() is None
        assert contents(url, "visits") == visits.truth(), f"seed {seed}, {way}"
    tally(f"checkpoint one batch older, {kind}, {store}", restored=ways.total(), refused=refused)
