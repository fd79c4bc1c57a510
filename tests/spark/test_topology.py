"""Topologies on real Spark: several states of one stream, batches that finish, and batches that never do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the job whose driver dies: see the end
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import pytest
from cases import full
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, Visits, contents, finish

from mapstate import Count, Sum, Topology, errors, newStream, non_transactional, opaque, transactional
from mapstate.backends import resolve
from mapstate.spark import Collector, StateFactory, StateUpdater
from mapstate.spark.driver.quarantine import Quarantine
from mapstate.testing import Commits, Fail, FaultyBackend, crash_between

pytestmark = pytest.mark.spark


@pytest.fixture
def url(each_url: str) -> str:
    return each_url


def sizes(visits: Visits) -> dict[Any, Any]:
    """How many visits there are of each size above 1, counted apart from all of this."""
    rows = [size for name in visits._files for _, size in visits.rows(name) if size > 1]
    return {(size,): {"visits": rows.count(size)} for size in rows}


def site(
    spark: SparkSession, visits: Visits, first: Any, second: Any, *, patience: float = 60, **options: Any
) -> Topology:
    topology = Topology("site", **options)
    stream = topology.newStream("visits", visits.stream(spark))
    stream.groupBy("user_id").persistentAggregate(
        opaque(first, "by_user", patience=patience), visits=Count(), bytes=Sum("bytes")
    )
    large = stream.transform(lambda rows: rows.where("bytes > 1"))
    large.groupBy("bytes").persistentAggregate(opaque(second, "by_size", patience=patience), visits=Count())
    return topology


def test_all_states_of_a_stream_hold_each_batch(spark, visits, url):
    visits.put("a", [("u1", 1), ("u2", 2), ("u1", 2)])
    visits.put("b", [("u2", 3), ("u3", 2)])
    finished = []
    topology = site(spark, visits, url, url).on_finished(finished.append)
    finish(topology.start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url, "by_user") == visits.truth()
    assert contents(url, "by_size") == sizes(visits)
    assert [one.batch_id for one in finished] == [0, 1]
    by_user, by_size = finished[0].states["by_user"], finished[0].states["by_size"]
    assert (by_user.rows_sent, by_user.rows, by_user.keys_written, by_user.attempt) == (3, 3, 2, 1)
    assert (by_size.rows_sent, by_size.rows, by_size.keys_written) == (None, 2, 1)
    assert by_user.partitions >= 1


def test_the_batch_is_evaluated_once_for_all_states(spark, visits, url):
    """Its rows are drawn at random: states that were fed by two evaluations would not agree."""
    visits.put("a", [(f"u{at}", at) for at in range(200)])
    drawn = visits.stream(spark).withColumn("draw", F.floor(F.rand() * 1_000_000_000))
    topology = Topology("draws")
    stream = topology.newStream("draws", drawn)
    stream.persistentAggregate(opaque(url, "one"), total=Sum("draw"))
    half = stream.transform(lambda rows: rows.where(F.rand() < 0.5))
    half.persistentAggregate(opaque(url, "two"), total=Sum("draw"), rows=Count())
    half.transform(lambda rows: rows.select("draw")).persistentAggregate(opaque(url, "three"), total=Sum("draw"))
    stream.groupBy("user_id").persistentAggregate(opaque(url, "four"), total=Sum("draw"))
    finish(topology.start(visits.checkpoint, trigger=AVAILABLE))
    one, two, three = (contents(url, name)[()]["total"] for name in ("one", "two", "three"))
    assert one == sum(value["total"] for value in contents(url, "four").values())
    assert two == three
    assert 0 < two < one


def test_new_values_of_each_state_come_after_all_have_committed(spark, visits, url):
    visits.put("a", [("u1", 1), ("u2", 2)])
    seen = []

    def downstream(rows: DataFrame, batch_id: int) -> None:
        seen.append((batch_id, sorted(tuple(row) for row in rows.collect()), len(contents(url, "by_size"))))

    topology = Topology("site")
    stream = topology.newStream("visits", visits.stream(spark))
    by_user = stream.groupBy("user_id").persistentAggregate(opaque(url, "by_user"), n=Count())
    stream.groupBy("bytes").persistentAggregate(opaque(url, "by_size"), n=Count())
    by_user.newValuesStream().foreachBatch(downstream)
    finish(topology.start(visits.checkpoint, trigger=AVAILABLE))
    assert seen == [(0, [("u1", 1), ("u2", 1)], 2)]
    with pytest.raises(errors.UsageError, match="runs already"):
        by_user.newValuesStream().foreachBatch(downstream)


def test_a_batch_that_comes_again_is_told_again_and_counts_once(spark, visits, url):
    visits.put("a", [("u1", 1), ("u2", 2)])
    finish(site(spark, visits, url, url).start(visits.checkpoint, trigger=AVAILABLE))
    assert crash_between(visits.checkpoint) == 0
    visits.put("a", [("u3", 5)])  # a replay with other rows, which comes too late
    finished = []
    again = site(spark, visits, url, url).on_finished(finished.append)
    finish(again.start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url, "by_user") == {("u1",): {"visits": 1, "bytes": 1}, ("u2",): {"visits": 1, "bytes": 2}}
    assert contents(url, "by_size") == {(2,): {"visits": 1}}
    assert [(one.batch_id, one.repeated, one.states["by_user"].rows) for one in finished] == [(0, True, 2)]


def test_a_driver_that_failed_between_two_stores_is_followed_by_one_that_reconciles_them(spark, visits, tmp_path):
    """And the replay has other rows: both states hold those, and nothing of the first attempt."""
    first, second = f"sqlite:///{tmp_path}/one.db", f"sqlite:///{tmp_path}/two.db"
    visits.put("a", [("u1", 1), ("u2", 2)])
    fails = Fail(method="swap", where=Commits(0), error=errors.StoreUnavailableError, times=None)
    broken = FaultyBackend(resolve(second), str(tmp_path), (fails,))
    topology = site(spark, visits, first, broken, patience=0)
    query = topology.start(visits.checkpoint, trigger=AVAILABLE)
    with pytest.raises(StreamingQueryException):
        finish(query)
    assert isinstance(topology.last_error, errors.StoreUnavailableError)
    assert contents(first, "by_user") == visits.truth()
    assert contents(second, "by_size") == {}
    visits.put("a", [("u3", 5), ("u4", 5)])
    finish(site(spark, visits, first, second).start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(first, "by_user") == visits.truth()
    assert contents(second, "by_size") == sizes(visits)


@pytest.mark.timeout(900)  # two jobs, each with a JVM of its own
@pytest.mark.parametrize("stores", [full(1), 2])
def test_a_driver_killed_at_any_write_of_a_ledger_leaves_states_that_agree(spark, visits, tmp_path, stores):
    urls = [f"sqlite:///{tmp_path}/{at}.db" for at in range(stores)]
    visits.put("a", [("u1", 1), ("u2", 2)])
    visits.put("b", [("u1", 3), ("u3", 3)])
    for at in (2, 4) if stores == 1 else (3, 5):
        folder = tmp_path / f"kill{at}"
        folder.mkdir()
        done = run_job(visits, urls, folder, kill_at=at)
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
        visits.put("b", [("u1", at), ("u4", at), ("u5", 1)])  # the replay holds something else
    finish(site(spark, visits, urls[0], urls[-1]).start(visits.checkpoint, trigger=AVAILABLE))
    by_user, by_size = contents(urls[0], "by_user"), contents(urls[-1], "by_size")
    assert sum(one["bytes"] for one in by_user.values() if one) >= 3
    assert by_user == visits.truth()
    assert by_size == sizes(visits)


def run_job(visits: Visits, urls: list[str], folder: Path, kill_at: int) -> subprocess.CompletedProcess[str]:
    """This file as a job of its own; the driver dies before the ``kill_at``th change of a ledger of the last store."""
    options = {
        "urls": urls,
        "input": str(visits.input),
        "checkpoint": str(visits.checkpoint),
        "folder": str(folder),
        "kill_at": kill_at,
    }
    return subprocess.run(
        [sys.executable, __file__, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        start_new_session=True,
    )


def poisoned(spark: SparkSession, visits: Visits, url: str, **options: Any) -> Topology:
    """A branch whose function fails for the visits of one user."""
    topology = Topology("site", **options)
    stream = topology.newStream("visits", visits.stream(spark))
    stream.groupBy("user_id").persistentAggregate(
        opaque(url, "by_user", max_attempts=2), visits=Count(), bytes=Sum("bytes")
    )
    checked = stream.transform(lambda rows: rows.where(F.expr("if(user_id = 'bad', raise_error('no'), bytes > 1)")))
    checked.groupBy("bytes").persistentAggregate(opaque(url, "by_size", max_attempts=2), visits=Count())
    return topology


def test_a_batch_that_always_fails_stops_the_query_and_counts_in_no_state(spark, visits, url):
    visits.put("a", [("u1", 2)])
    finish(poisoned(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE))
    before = visits.truth()
    visits.put("b", [("u1", 1), ("bad", 2)])
    with pytest.raises(StreamingQueryException):
        finish(poisoned(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url, "by_user") == before
    visits.put("b", [("u1", 1), ("good", 2)])
    finish(poisoned(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url, "by_user") == visits.truth()
    assert contents(url, "by_size") == sizes(visits)


def test_a_batch_that_always_fails_goes_to_quarantine_with_its_rows(spark, visits, url, tmp_path):
    visits.put("a", [("u1", 2)])
    finished = []
    kept = str(tmp_path / "kept")

    def job() -> Topology:
        own = poisoned(spark, visits, url, on_poison="quarantine", quarantine=kept)
        return own.on_finished(finished.append)

    finish(job().start(visits.checkpoint, trigger=AVAILABLE))
    visits.put("b", [("u1", 1), ("bad", 2)])
    visits.put("c", [("u4", 3)])
    finish(job().start(visits.checkpoint, trigger=AVAILABLE))
    rows = spark.read.parquet(kept)
    assert sorted(tuple(row) for row in rows.select("user_id", "bytes", "batch_id").collect()) == [
        ("bad", 2, 1),
        ("u1", 1, 1),
    ]
    visits._files.pop("b")
    assert contents(url, "by_user") == visits.truth()
    assert contents(url, "by_size") == sizes(visits)
    assert [one.batch_id for one in finished] == [0, 1, 2]
    place = finished[1].quarantined
    assert spark.read.parquet(place).count() == 2
    assert [finished[1].states[name].rows for name in ("by_user", "by_size")] == [0, 0]
    assert finished[1].states["by_user"].attempt == 2
    assert [(span.name, span.error is None) for span in finished[1].spans] == [
        ("attempt", False),
        ("attempt", False),
        ("commit", True),
    ]
    commit, attempt = finished[2].spans
    assert (commit.name, attempt.name) == ("commit", "attempt")
    assert attempt.began <= commit.began <= commit.ended <= attempt.ended < attempt.began + 60_000_000_000


def test_a_batch_in_quarantine_that_comes_again_fails_nothing_and_goes_nowhere(spark, visits, tmp_path):
    url, finished, seen = f"sqlite:///{tmp_path}/state.db", [], []

    def picky(rows: DataFrame) -> DataFrame:
        if not rows.isStreaming and not rows.where("user_id = 'bad'").isEmpty():
            rows.select(F.expr("raise_error('no')")).collect()
        return rows

    def job() -> Topology:
        topology = Topology("site", on_poison="quarantine", quarantine=str(tmp_path / "kept"))
        stream = topology.newStream("visits", visits.stream(spark)).transform(picky)
        counts = stream.groupBy("user_id").persistentAggregate(opaque(url, "by_user", max_attempts=1), n=Count())
        counts.newValuesStream().foreachBatch(lambda rows, batch_id: seen.append(batch_id))
        return topology.on_finished(finished.append)

    visits.put("a", [("bad", 2)])
    finish(job().start(visits.checkpoint, trigger=AVAILABLE))
    assert crash_between(visits.checkpoint) == 0
    visits.put("b", [("u1", 1)])
    finish(job().start(visits.checkpoint, trigger=AVAILABLE))
    assert [(one.batch_id, one.repeated) for one in finished] == [(0, False), (0, True), (1, False)]
    assert finished[0].quarantined == finished[1].quarantined is not None
    assert seen == [1]
    assert contents(url, "by_user") == {("u1",): {"n": 1}}


def test_what_an_attempt_before_has_kept_goes_where_the_batch_counts_after_all(spark, visits, url, tmp_path):
    kept = tmp_path / "kept"
    visits.put("a", [("u1", 2)])
    finish(poisoned(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE))
    query_id = json.loads(Path(visits.checkpoint, "metadata").read_text())["id"]
    own = kept / "site" / "visits" / f"query_id={query_id}"
    for batch_id in (0, 1, 2):
        (own / f"batch_id={batch_id}").mkdir(parents=True)
        (own / f"batch_id={batch_id}" / "part").write_text("left by a driver that died, or from before a restore")
        (own / f"batch_id={batch_id}" / "__magic_job").mkdir()
        (own / f"batch_id={batch_id}" / "__magic_job" / "part").write_text("of a committer that was killed")
    visits.put("b", [("u1", 1)])
    again = poisoned(spark, visits, url, on_poison="quarantine", quarantine=str(kept))
    finish(again.start(visits.checkpoint, trigger=AVAILABLE))
    assert [path.parent.name for path in own.glob("*/part")] == ["batch_id=0"]  # which counts as it is
    assert len(list(own.glob("*/__magic_job/part"))) == 3  # a driver that has taken over may be writing there
    assert contents(url, "by_user") == visits.truth()


def test_rows_are_kept_once_for_each_topology_and_call_by_hand(spark, tmp_path):
    """Two of one name and batch id; and one whose commit failed, called again."""
    url, kept, finished = f"sqlite:///{tmp_path}/state.db", tmp_path / "kept", []
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    fails = Fail(method="swap", where=Commits(0), error=errors.StoreUnavailableError, times=8)
    broken = FaultyBackend(resolve(url), str(tmp_path), (fails,))
    poison = {"on": True}

    def checked(rows: DataFrame) -> DataFrame:
        if poison["on"] and not rows.isEmpty():
            raise ValueError("mine")
        return rows

    def topology(name: str, backend: Any, *functions: Any) -> Topology:
        own = Topology(name, on_poison="quarantine", quarantine=str(kept)).on_finished(finished.append)
        stream = own.newStream("visits", frame.limit(0))
        for function in functions:
            stream = stream.transform(function)
        stream.persistentAggregate(opaque(backend, name, max_attempts=1, patience=0), n=Count())
        return own

    one, two, good = topology("one", broken, checked), topology("two", url, checked), topology("good", url)
    with pytest.raises(errors.StoreUnavailableError):
        one(frame, 0)
    two(frame, 0)
    good(frame, 0)
    assert [str(path.relative_to(kept)) for path in sorted(kept.glob("*/*/*/*"))] == [
        f"{name}/visits/query_id=visits/batch_id=0" for name in ("one", "two")
    ]
    assert [spark.read.parquet(one.quarantined).count() for one in finished if one.quarantined] == [1]
    poison["on"] = False
    one(frame, 0)
    assert {path.parts[-5] for path in kept.glob("*/*/*/*/part*")} == {"two"}
    assert contents(url, "one") == contents(url, "good") == {(): {"n": 1}}
    assert contents(url, "two") == {}


@dataclass
class Over:
    """Rows above a size. It has no hash, as one that is not frozen."""

    size: int

    def __call__(self, rows: DataFrame) -> DataFrame:
        return rows.where(F.col("bytes") > self.size)


def test_a_branch_may_be_made_by_anything_that_can_be_called(spark, url):
    frame = spark.createDataFrame([("u1", 1), ("u2", 3)], "user_id string, bytes bigint")
    topology = Topology("site")
    large = topology.newStream("visits", frame).transform(Over(2))
    large.persistentAggregate(opaque(url, "one"), n=Count())
    large.groupBy("user_id").persistentAggregate(opaque(url, "two"), n=Count())
    topology(frame, 0)
    assert contents(url, "one") == {(): {"n": 1}}
    assert contents(url, "two") == {("u2",): {"n": 1}}


def test_on_finished_is_called_for_an_empty_batch_and_fails_nothing(spark, url, caplog):
    finished = []

    def told(batch: Any) -> None:
        finished.append(batch)
        raise ValueError("mine")

    topology = Topology("site").on_finished(told)
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    stream = topology.newStream("visits", frame)
    stream.groupBy("user_id").persistentAggregate(opaque(url, "by_user"), n=Count())
    stream.persistentAggregate(opaque(url, "all"), n=Count())
    topology(frame.limit(0), 0)
    topology(frame, 1)
    assert [(one.batch_id, one.states["all"].rows) for one in finished] == [(0, 0), (1, 1)]
    assert "on_finished failed for batch 1" in caplog.text
    assert contents(url, "all") == {(): {"n": 1}}


class Latest(StateFactory):
    """A user's own state: the last total of each user, in a directory that all executors share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_state(self, partition: int, partitions: int) -> Latest:
        return self

    def begin_commit(self, txid: int) -> None:
        self.txid = txid

    def commit(self, txid: int) -> None:
        pass


class KeepLatest(StateUpdater):
    """Writes one file per user, and emits who it was."""

    output = "who string"

    def update_state(self, state: Latest, rows: Any, collector: Collector) -> None:
        for row in rows:
            (state.folder / row["user_id"]).write_text(f"{state.txid} {row['bytes']}")
            collector.emit(row["user_id"])


def everything(spark: SparkSession, visits: Visits, url: str, folder: Path, seen: dict[str, list[Any]]) -> Topology:
    """A topology that uses each method of its stream. What follows the commits is noted in ``seen``."""

    def note(name: str) -> Any:
        def noted(rows: DataFrame, batch_id: int) -> None:
            found = sorted((tuple(row) for row in rows.collect()), key=str)
            seen.setdefault(name, []).append((batch_id, found))

        return noted

    topology = Topology("all")
    stream = topology.newStream("visits", visits.stream(spark))
    counts = stream.groupBy("user_id").persistentAggregate(opaque(url, "by_user"), n=Count(), total=Sum("bytes"))
    counts.newValuesStream().groupBy("n").persistentAggregate(opaque(url, "by_n"), users=Count(), bytes=Sum("total"))
    counts.newValuesStream(old=True).foreachBatch(note("old"))
    stream.stateQuery(counts, "user_id", {"n": "known"}, when="before").foreachBatch(note("before"))
    stream.stateQuery(counts, "user_id", {"n": "known"}, when="after").foreachBatch(note("after"))
    first = stream.stateQuery(counts, "user_id", {"n": "known"}, when="before").transform(
        lambda rows: rows.where("known IS NULL")
    )
    first.persistentAggregate(opaque(url, "first_visits"), n=Count())
    stream.groupBy("user_id").aggregate(largest=Sum("bytes")).maxBy("largest").foreachBatch(note("largest"))
    small = stream.transform(lambda rows: rows.where("bytes < 3"))
    large = stream.transform(lambda rows: rows.where("bytes >= 3"))
    small.merge(large).persistentAggregate(opaque(url, "merged"), n=Count())
    own = stream.partitionPersist(Latest(folder), KeepLatest(), ["user_id"], partitions=2)
    own.newValuesStream().foreachBatch(note("own"))
    return topology


def test_every_method_of_a_stream_works_in_a_topology(spark, visits, url, tmp_path):
    folder = tmp_path / "own"
    seen: dict[str, list[Any]] = {}
    folder.mkdir()
    visits.put("a", [("u1", 1), ("u2", 2), ("u1", 4)])
    visits.put("b", [("u1", 3), ("u3", 5)])
    finish(everything(spark, visits, url, folder, seen).start(visits.checkpoint, trigger=AVAILABLE))
    expected: dict[str, list[Any]] = {
        "old": [
            (0, [("u1", 2, 5, None, None), ("u2", 1, 2, None, None)]),
            (1, [("u1", 3, 8, 2, 5), ("u3", 1, 5, None, None)]),
        ],
        "before": [
            (0, [("u1", 1, None), ("u1", 4, None), ("u2", 2, None)]),
            (1, [("u1", 3, 2), ("u3", 5, None)]),
        ],
        "after": [(0, [("u1", 1, 2), ("u1", 4, 2), ("u2", 2, 1)]), (1, [("u1", 3, 3), ("u3", 5, 1)])],
        "largest": [(0, [("u1", 5)]), (1, [("u3", 5)])],
        "own": [(0, [("u1",), ("u1",), ("u2",)]), (1, [("u1",), ("u3",)])],
    }
    assert seen == expected
    assert contents(url, "by_user") == {
        ("u1",): {"n": 3, "total": 8},
        ("u2",): {"n": 1, "total": 2},
        ("u3",): {"n": 1, "total": 5},
    }
    assert contents(url, "by_n") == {(3,): {"users": 1, "bytes": 8}, (1,): {"users": 2, "bytes": 7}}
    assert contents(url, "first_visits") == {(): {"n": 4}}
    assert contents(url, "merged") == {(): {"n": 5}}
    assert {file.name: file.read_text()[0] for file in folder.iterdir()} == {"u1": "1", "u2": "0", "u3": "1"}
    before = {name: contents(url, name) for name in ("by_user", "by_n", "first_visits", "merged")}
    assert crash_between(visits.checkpoint) == 1
    seen.clear()
    finish(everything(spark, visits, url, folder, seen).start(visits.checkpoint, trigger=AVAILABLE))
    assert seen == {name: [batches[1]] for name, batches in expected.items()}
    assert {name: contents(url, name) for name in before} == before


def test_states_may_aggregate_the_same_expression(spark, url):
    frame = spark.createDataFrame([("u1", 1), ("u2", 3)], "user_id string, bytes bigint")
    topology = Topology("site")
    stream = topology.newStream("visits", frame)
    stream.groupBy("user_id").persistentAggregate(opaque(url, "one"), double=Sum(F.col("bytes") * 2))
    stream.persistentAggregate(opaque(url, "two"), double=Sum(F.col("bytes") * 2))
    topology(frame, 0)
    assert contents(url, "one") == {("u1",): {"double": 2}, ("u2",): {"double": 6}}
    assert contents(url, "two") == {(): {"double": 8}}


class Odd:
    """A function of a user's that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("mine")

    def __hash__(self) -> int:
        return 1

    def __call__(self, rows: DataFrame) -> DataFrame:
        return rows


def test_a_function_that_cannot_be_compared_is_called_for_each_state(spark, url):
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    topology = Topology("site")
    stream = topology.newStream("visits", frame)
    for name in ("one", "two"):
        stream.transform(Odd()).persistentAggregate(opaque(url, name), n=Count())
    topology(frame, 0)
    assert contents(url, "one") == contents(url, "two") == {(): {"n": 1}}


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_batch_in_quarantine_is_an_empty_one_for_a_second_state_too(spark, visits, url, tmp_path, fails):
    """Also where the second state's commit of it fails, and the batch comes again."""
    kept, seen = str(tmp_path / "kept"), []
    fault = Fail(method="swap", where=Commits(1), error=errors.StoreFullError)
    second: Any = FaultyBackend(resolve(url), str(tmp_path), (fault,)) if fails else url

    def job() -> Topology:
        topology = Topology("site", on_poison="quarantine", quarantine=kept)
        stream = topology.newStream("visits", visits.stream(spark))
        checked = stream.transform(lambda rows: rows.where(F.expr("if(user_id = 'bad', raise_error('no'), true)")))
        counts = checked.groupBy("user_id").persistentAggregate(opaque(url, "first", max_attempts=1), n=Count())
        by_n = counts.newValuesStream().groupBy("n")
        by_n.persistentAggregate(opaque(second, "second", max_attempts=1), users=Count())
        counts.newValuesStream().foreachBatch(lambda rows, batch_id: seen.append(batch_id))
        return topology

    visits.put("a", [("u1", 1), ("u2", 1)])
    visits.put("b", [("bad", 1)])
    if fails:
        with pytest.raises(StreamingQueryException):
            finish(job().start(visits.checkpoint, trigger=AVAILABLE))
    visits.put("c", [("u1", 1)])
    finish(job().start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url, "first") == {("u1",): {"n": 2}, ("u2",): {"n": 1}}
    assert contents(url, "second") == {(1,): {"users": 1}, (2,): {"users": 1}}
    assert seen == [0, 2]


def test_a_damaged_record_stops_a_query_with_quarantine(spark, tmp_path):
    """Its batches have nothing wrong in them: each with this key would be set aside."""
    url, kept = f"sqlite:///{tmp_path}/state.db", tmp_path / "kept"
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    topology = Topology("site", on_poison="quarantine", quarantine=str(kept))
    topology.newStream("visits", frame).groupBy("user_id").persistentAggregate(opaque(url, "s"), n=Count())
    topology(frame, 0)
    store: Any = opaque(url, "s").open()
    store.multi_put(["u1"], [b"garbage"])
    with pytest.raises(errors.CorruptRecordError):
        topology(frame, 1)
    assert not kept.exists()


def test_an_outage_of_a_state_that_is_asked_stops_a_query_with_quarantine(spark, tmp_path):
    """It is no fault of the batch, and its tasks tell of it in a text of Spark's."""
    url, kept = f"sqlite:///{tmp_path}/state.db", tmp_path / "kept"
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    newStream("asked", frame).groupBy("user_id").persistentAggregate(opaque(url, "asked"), n=Count())(frame, 0)
    reads = ("multi_get", "multi_get_with_ledger")
    faults = tuple(Fail(method=one, error=errors.StoreUnavailableError, times=99) for one in reads)
    away = opaque(FaultyBackend(resolve(url), str(tmp_path), faults), "asked")
    topology = Topology("site", on_poison="quarantine", quarantine=str(kept))
    asking = topology.newStream("visits", frame.limit(0)).stateQuery(away, "user_id")
    asking.groupBy("user_id").persistentAggregate(opaque(url, "s", patience=0), n=Count())
    with pytest.raises(errors.StoreUnavailableError):
        topology(frame, 0)
    assert not kept.exists()


def test_a_batch_that_another_driver_has_committed_is_not_kept(spark, tmp_path):
    url, kept = f"sqlite:///{tmp_path}/state.db", tmp_path / "kept"
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")

    def topology(check: Any) -> Topology:
        own = Topology("site", on_poison="quarantine", quarantine=str(kept))
        checked = own.newStream("visits", frame.limit(0)).transform(check)
        checked.groupBy("user_id").persistentAggregate(opaque(url, "s", max_attempts=1), n=Count())
        return own

    def overtaken(rows: DataFrame) -> DataFrame:
        if not rows.isEmpty():
            topology(lambda same: same)(frame, 0)
            raise ValueError("mine")
        return rows

    with pytest.raises(errors.FencedError):
        topology(overtaken)(frame, 0)
    assert not kept.exists()
    assert contents(url, "s") == {("u1",): {"n": 1}}


@pytest.mark.parametrize("is_left", [full(False), True])
def test_what_is_kept_is_not_removed_by_a_driver_that_was_overtaken(spark, tmp_path, monkeypatch, is_left):
    """It stands still behind its begin, while another one, for which a function fails, sets the batch aside.

    Rows of the same batch may lie there from a crash before.
    """
    url, kept = f"sqlite:///{tmp_path}/state.db", tmp_path / "kept"
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")

    def fails(rows: DataFrame) -> DataFrame:
        if not rows.isEmpty():
            raise ValueError("mine")
        return rows

    def topology(check: Any) -> Topology:
        own = Topology("site", on_poison="quarantine", quarantine=str(kept))
        checked = own.newStream("visits", frame.limit(0)).transform(check)
        checked.groupBy("user_id").persistentAggregate(opaque(url, "s", max_attempts=1), n=Count())
        return own

    place = kept / "site" / "visits" / "query_id=visits" / "batch_id=0"
    if is_left:
        frame.write.parquet(str(place))
    left = {path.name for path in place.glob("part*")}
    forget = Quarantine.forget

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(Quarantine, "forget", forget)
        topology(fails)(frame, 0)
        forget(*arguments)

    monkeypatch.setattr(Quarantine, "forget", late)
    with pytest.raises(errors.FencedError):
        topology(lambda same: same)(frame, 0)
    assert [tuple(row) for row in spark.read.parquet(str(kept)).select("user_id", "bytes").collect()] == [("u1", 1)]
    assert not left & {path.name for path in place.iterdir()}


def test_a_write_that_broke_off_is_nothing_that_is_kept(spark, tmp_path):
    """A driver died in it: an empty batch that comes again was not set aside."""
    kept, finished = tmp_path / "kept", []
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    topology = Topology("site", on_poison="quarantine", quarantine=str(kept)).on_finished(finished.append)
    stream = topology.newStream("visits", frame.limit(0))
    spec = opaque(f"sqlite:///{tmp_path}/state.db", "s", repeat="allowed")
    stream.groupBy("user_id").persistentAggregate(spec, n=Count())
    place = kept / "site" / "visits" / "query_id=visits" / "batch_id=0"
    (place / "_temporary" / "0").mkdir(parents=True)
    topology(frame.limit(0), 0)
    topology(frame.limit(0), 0)
    assert [(one.quarantined, one.repeated) for one in finished] == [(None, False), (None, True)]
    assert (place / "_temporary").exists()  # a driver that has taken over may be writing there


def test_a_function_that_fails_without_rows_too_holds_no_batch_up_that_was_set_aside(spark, tmp_path, caplog):
    """No state follows, so nobody needs its columns."""
    url, fails = f"sqlite:///{tmp_path}/state.db", {"on": False}
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")

    def asks(rows: DataFrame) -> DataFrame:
        if fails["on"]:
            raise ValueError("a service is down")
        return rows

    topology = Topology("site", on_poison="quarantine", quarantine=str(tmp_path / "kept"))
    stream = topology.newStream("visits", frame.limit(0)).transform(asks)
    stream.groupBy("user_id").persistentAggregate(opaque(url, "s", max_attempts=1), n=Count())
    fails["on"] = True
    topology(frame, 0)
    fails["on"] = False
    topology(frame, 1)
    assert contents(url, "s") == {("u1",): {"n": 1}}
    assert "a service is down" in caplog.text


def test_why_a_batch_was_to_be_set_aside_is_logged_where_its_rows_cannot_be_kept(spark, tmp_path, caplog):
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    (tmp_path / "kept").write_text("a file")
    topology = Topology("site", on_poison="quarantine", quarantine=str(tmp_path / "kept"))
    stream = topology.newStream("visits", frame.limit(0))
    wrong = stream.transform(lambda rows: rows.where(F.expr("raise_error('wrong row') is null")))
    wrong.groupBy("user_id").persistentAggregate(opaque(f"sqlite:///{tmp_path}/s.db", max_attempts=1), n=Count())
    with pytest.raises(Exception, match="kept"):
        topology(frame, 0)
    assert "wrong row" in caplog.text


def test_a_job_group_of_the_users_is_no_run(spark, visits, tmp_path):
    """It is the same at each start."""
    url = f"sqlite:///{tmp_path}/state.db"

    def start() -> Any:
        counts = newStream("visits", visits.stream(spark)).groupBy("user_id")
        state = counts.persistentAggregate(opaque(url, "s"), visits=Count(), bytes=Sum("bytes"))

        def grouped(rows: DataFrame, batch_id: int) -> None:
            spark.sparkContext.setJobGroup("etl", "my job")
            state(rows, batch_id)

        query = visits.stream(spark).writeStream.foreachBatch(grouped).option("checkpointLocation", visits.checkpoint)
        return query.trigger(availableNow=True).start()

    visits.put("a", [("u1", 2)])
    finish(start())
    assert crash_between(visits.checkpoint) == 0
    finish(start())  # the batch comes again
    visits.put("b", [("u1", 3)])
    finish(start())
    assert contents(url, "s") == visits.truth()


def test_streams_of_a_topology_are_merged_before_anything_else(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    topology = Topology("site")
    one, two = topology.newStream("one", frame), topology.newStream("two", frame.limit(0))
    both = one.merge(two)
    both.persistentAggregate(opaque(url, "all"), n=Count())
    topology(frame, 0)
    assert contents(url, "all") == {(): {"n": 1}}
    with pytest.raises(errors.UsageError, match="merged into 'one'"):
        two.persistentAggregate(opaque(url, "two"), n=Count())
    topology = Topology("late")
    one, two = topology.newStream("one", frame), topology.newStream("two", frame.limit(0))
    one.persistentAggregate(opaque(url, "first"), n=Count())
    with pytest.raises(errors.UsageError, match="merge streams before anything else"):
        one.merge(two)


def test_a_name_used_twice_is_an_error(spark, tmp_path):
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    topology = Topology("site")
    stream = topology.newStream("visits", frame)
    with pytest.raises(errors.DuplicateNameError, match="has a stream 'visits' already"):
        topology.newStream("visits", frame)
    stream.groupBy("user_id").persistentAggregate(opaque("memory://x"), n=Count())
    with pytest.raises(errors.DuplicateNameError, match="has a state 'visits' already"):
        stream.groupBy("bytes").persistentAggregate(opaque(f"sqlite:///{tmp_path}/x.db"), n=Count())
    other = topology.newStream("others", frame)
    with pytest.raises(errors.DuplicateNameError, match="has a state 'visits' already"):
        other.persistentAggregate(opaque("memory://y", "visits"), n=Count())


def test_what_cannot_be_is_refused_when_it_is_declared(spark, tmp_path):
    frame = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    topology = Topology("site")
    with pytest.raises(errors.UsageError, match="0 streams"):
        topology.start()
    stream = topology.newStream("visits", frame)
    with pytest.raises(errors.UsageError, match="no state"):
        topology(frame, 0)
    with pytest.raises(errors.UsageError, match="no stream"):
        topology.start()
    stream.persistentAggregate(transactional(f"sqlite:///{tmp_path}/x.db", "one"), n=Count())
    stream.persistentAggregate(transactional(f"sqlite:///{tmp_path}/x.db", "two"), n=Count())
    with pytest.raises(errors.ConfigurationError, match="'one' is transactional"):
        stream.persistentAggregate(opaque(f"sqlite:///{tmp_path}/y.db", "three"), n=Count())
    topology.newStream("others", frame)
    with pytest.raises(errors.UsageError, match="2 streams"):
        topology.start()
    with pytest.raises(errors.ConfigurationError, match="go together"):
        Topology("site", on_poison="quarantine")
    with pytest.raises(errors.ConfigurationError, match="one of stop, quarantine"):
        Topology("site", on_poison="skip")
    kept = Topology("kept", on_poison="quarantine", quarantine=str(tmp_path)).newStream("visits", frame)
    with pytest.raises(errors.ConfigurationError, match="is transactional"):
        kept.persistentAggregate(transactional("memory://x"), n=Count())
    kept.persistentAggregate(non_transactional("memory://x"), n=Count())
    with pytest.raises(errors.DuplicateNameError, match="a column 'Batch_ID'"):
        Topology("kept", on_poison="quarantine", quarantine=str(tmp_path)).newStream(
            "visits", frame.withColumnRenamed("bytes", "Batch_ID")
        )


def main(options: dict[str, Any]) -> None:
    from visits_job import SCHEMA, session

    from mapstate import testing

    backends: list[Any] = [resolve(url) for url in options["urls"]]
    method = "swap_all" if len(backends) == 1 else "swap"
    fault = testing.Kill(method=method, call=options["kill_at"], who=os.getpgrp())
    backends[-1] = testing.FaultyBackend(backends[-1], options["folder"], (fault,))
    spark = session("local[2]")
    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).csv(options["input"])
    topology = Topology("site")
    stream = topology.newStream("visits", frame)
    stream.groupBy("user_id").persistentAggregate(opaque(backends[0], "by_user"), visits=Count(), bytes=Sum("bytes"))
    large = stream.transform(lambda rows: rows.where("bytes > 1"))
    large.groupBy("bytes").persistentAggregate(opaque(backends[-1], "by_size"), visits=Count())
    topology.start(options["checkpoint"], trigger=AVAILABLE).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
