"""How many keys a state holds, as its batches on real Spark add and remove them; counted beside by a whole scan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import full
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_fixtures import Visits, contents, run_job

from mapstate import (
    Count,
    ReducerAggregator,
    Sum,
    Topology,
    errors,
    newStream,
    non_transactional,
    opaque,
    open_reader,
    transactional,
)
from mapstate.backends import resolve
from mapstate.testing import Fail, FaultyBackend

pytestmark = pytest.mark.spark


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


def frame(spark: SparkSession, keys: Any, number: int = 1) -> DataFrame:
    return spark.createDataFrame([(str(key), number) for key in keys], "k string, n bigint")


def counts(spark: SparkSession, spec: Any) -> Any:
    grouped = newStream("s", frame(spark, ["none"])).groupBy("k")
    return grouped.persistentAggregate(spec, rows=Count(), n=Sum("n"))


def held(url: Any, state: str = "s") -> int | None:
    """What the ledger says; and if it says something, it is what a scan finds."""
    with open_reader(url, state) as reader:
        said = reader.key_count()
    found = contents(url, state)
    assert said in (None, len(found))
    return said


@pytest.mark.parametrize("options", [{}, full({"chunk_size": 3}), {"apply_on": "driver"}], ids=str)
@pytest.mark.parametrize("spec_of", [opaque, full(transactional), non_transactional])
def test_each_batch_says_how_many_keys_it_adds(spec_of, options, each_url, spark):
    job = counts(spark, spec_of(each_url, repeat="allowed", **options))
    seen = []
    for batch_id, keys in enumerate([range(20), range(10, 30), range(5), [], ["more"]]):
        job(frame(spark, keys), batch_id)
        with open_reader(each_url, "s") as reader:
            seen.append((reader.ledger().last_commit.keys_delta, held(each_url)))
    assert seen == [(20, 20), (10, 30), (0, 30), (0, 30), (1, 31)]
    job(frame(spark, range(50)), 4)  # committed already
    assert held(each_url) == 31


class Balance(ReducerAggregator):
    """A sum in plain Python, whose key is removed at 0."""

    def columns(self) -> tuple[str, ...]:
        return ("n",)

    def init(self) -> int:
        return 0

    def reduce(self, acc: int, row: Any) -> int | None:
        return acc + row["n"] or None


@pytest.mark.parametrize("chunk_size", [1, 2000])
def test_a_key_that_a_reducer_removes_is_held_no_more(chunk_size, url, spark):
    grouped = newStream("s", frame(spark, ["none"])).groupBy("k")
    job = grouped.persistentAggregate(opaque(url, chunk_size=chunk_size), balance=Balance())
    seen = []
    for batch_id, (keys, number) in enumerate([(range(9), 1), (range(3, 6), -1), (range(3, 5), -1), (["x"], 0)]):
        job(frame(spark, keys, number), batch_id)
        seen.append(held(url))
    assert seen == [9, 6, 8, 8]


def test_what_a_state_follows_takes_back_is_held_no_more(url, spark):
    first = newStream("s", frame(spark, ["none"])).groupBy("k").persistentAggregate(opaque(url, "first"), n=Count())
    second = first.newValuesStream().groupBy("n").persistentAggregate(opaque(url, "second"), keys=Count())
    for batch_id, (keys, first_held, second_held) in enumerate([("ab", 2, 1), ("ac", 3, 2), ("bc", 3, 1)]):
        second(frame(spark, keys), batch_id)
        assert (held(url, "first"), held(url, "second")) == (first_held, second_held)


def failing(url: str, tmp_path: Path, number: int) -> Any:
    """The store, whose n-th put of any task fails once, after it was done."""
    return FaultyBackend(resolve(url), str(tmp_path), (Fail(call=number, after=True),))


@pytest.mark.parametrize(
    ("spec_of", "expected"),
    [(opaque, 13), (transactional, None), (non_transactional, None)],
    ids=["opaque", "transactional", "non-transactional"],
)
def test_after_a_failed_attempt_only_an_opaque_state_knows(spec_of, expected, url, spark, tmp_path):
    job = counts(spark, spec_of(failing(url, tmp_path, 3), chunk_size=2, patience=0))
    first = [3, 4] if spec_of is opaque else range(13)  # a transactional replay is identical
    with pytest.raises(errors.StoreUnavailableError):
        job(frame(spark, range(30) if spec_of is opaque else first), 0)
    job(frame(spark, range(13)), 0)
    assert held(url) == expected
    job(frame(spark, range(12, 15)), 1)
    assert held(url) == (None if expected is None else expected + 2)


def test_a_transactional_attempt_that_had_written_nothing_knows_when_it_is_repeated(url, spark, tmp_path):
    backend = FaultyBackend(resolve(url), str(tmp_path), (Fail(call=1, times=2),))  # in both tasks
    job = counts(spark, transactional(backend, patience=0))
    with pytest.raises(errors.StoreUnavailableError):
        job(frame(spark, range(30)), 0)
    job(frame(spark, range(30)), 0)
    assert held(url) == 30


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "expected"), [full("non-transactional", None), ("opaque", 20)])
def test_a_task_that_spark_tries_again_by_itself_is_no_reason_to_count_wrongly(
    kind, expected, url, visits: Visits, tmp_path
):
    visits.put("0", [(f"u{n}", n) for n in range(20)])
    done = run_job(
        {
            "url": url,
            "type": kind,
            "input": str(visits.input),
            "checkpoint": str(visits.checkpoint),
            "master": "local[2,4]",
            "faults": [["Kill", {"call": 4, "after": True, "name": "kill-worker"}]],
            "folder": str(tmp_path),
        }
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kill-worker").exists()
    assert held(url, "visits") == expected


def test_a_lost_store_whose_gap_is_accepted_holds_what_came_since(url, spark, tmp_path):
    counts(spark, opaque(url))(frame(spark, range(9)), 0)
    for file in tmp_path.glob("state.db*"):
        file.unlink()
    counts(spark, opaque(url, on_gap="accept"))(frame(spark, range(4)), 1)
    assert held(url) == 4


@pytest.mark.redis
def test_a_state_with_a_ttl_does_not_say(redis_url, spark):
    counts(spark, opaque(redis_url, ttl=3600))(frame(spark, range(9)), 0)
    assert held(redis_url) is None
    with open_reader(redis_url, "s") as reader:
        assert (reader.ledger().has_had_ttl, reader.ledger().last_commit.keys_delta) == (True, 9)


def test_each_state_of_a_topology_has_its_own_number_and_a_batch_in_quarantine_changes_none(url, spark, tmp_path):
    topology = Topology("site", on_poison="quarantine", quarantine=str(tmp_path / "kept"))
    stream = topology.newStream("s", frame(spark, ["none"]))
    stream.groupBy("k").persistentAggregate(opaque(url, "by_k", max_attempts=2), n=Count())
    odd = stream.transform(lambda rows: rows.where(F.expr("if(k = 'bad', raise_error('no'), k % 2 = 1)")))
    odd.groupBy("k").persistentAggregate(opaque(url, "odd", max_attempts=2), n=Count())
    seen = []
    for batch_id, keys in enumerate([range(10), ["bad", *range(20, 30)], range(8, 12)]):
        topology(frame(spark, keys), batch_id)
        seen.append((held(url, "by_k"), held(url, "odd")))
    assert seen == [(10, 5), (10, 5), (12, 6)]
