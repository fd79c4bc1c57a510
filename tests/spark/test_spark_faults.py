"""Drivers and workers that die, tasks that come too late, stores that lose things: on real processes.

Each fault is placed by what has been written, not by time: the store itself fires it, after so many
puts of a task.
"""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import spark_fixtures
from cases import full
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from spark_fixtures import Visits, finish, run_job

from mapstate import Count, Sum, errors, newStream, opaque, open_reader, transactional
from mapstate.backends import resolve
from mapstate.errors import CheckpointError
from mapstate.operations.checkpoint import clear_first_offsets
from mapstate.testing import Fail, FaultyBackend, Kill, Wait, crash_between, wait_for

pytestmark = pytest.mark.spark

AVAILABLE = {"availableNow": True}


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.full), pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Path) -> str:
    """A store that executors write to, of each kind."""
    return f"sqlite:///{tmp_path}/state.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")


def contents(url: str, consistency: Any = "committed") -> dict[Any, Any]:
    if consistency == "committed":
        return spark_fixtures.contents(url, "visits")
    with open_reader(url, "visits", consistency=consistency) as reader:
        return dict(reader.scan())


def count(visits: Visits, spark: SparkSession, backend: Any, spec_of: Any = opaque, **options: Any) -> Any:
    options = {"chunk_size": 1} | options
    return (
        newStream("visits", visits.stream(spark))
        .groupBy("user_id")
        .persistentAggregate(spec_of(backend, **options), visits=Count(), bytes=Sum("bytes"))
    )


def run(job: Any, visits: Visits) -> None:
    query = job.start(visits.checkpoint, trigger=AVAILABLE)
    query.awaitTermination(120)
    assert not query.isActive


def in_flight_keys(url: str) -> set[str]:
    """Users whose records the attempt in flight has written already: what a driver left that died."""
    with open_reader(url, "visits") as reader:
        flight = reader.ledger().in_flight
    assert flight is not None
    committed, latest = contents(url), contents(url, "latest")
    return {key[0] for key in latest if latest[key] != committed.get(key)}


@pytest.mark.slow
def test_replay_that_omits_a_key_leaves_no_phantom(url, spark, visits, tmp_path, rounds):
    """SIGKILL of the driver between the writes of a batch; the replay has other contents each time."""
    visits.put("0", [(f"u{n}", n) for n in range(8)])
    run(count(visits, spark, url), visits)
    visits.put("1", [(f"u{n}", 100 + n) for n in range(4, 20)])
    before = contents(url)
    options = {
        "url": url,
        "input": str(visits.input),
        "checkpoint": str(visits.checkpoint),
        "faults": [["Kill", {"who": "driver", "call": 3, "after": True}]],
    }
    for attempt in range(rounds(1, 2)):
        folder = tmp_path / f"fault-{attempt}"
        folder.mkdir()
        died = run_job(options | {"folder": str(folder)})
        assert died.returncode == -signal.SIGKILL, died.stderr
        phantoms = in_flight_keys(url)
        assert phantoms
        assert contents(url) == before
        # the code or the input changed between crash and restart: what was written does not come again
        visits.put("1", [row for row in visits.rows("1") if row[0] not in phantoms] + [(f"new{attempt}", 1)])
    run(count(visits, spark, url), visits)
    assert contents(url) == visits.truth()
    visits.put("2", [(f"u{n}", 1) for n in range(20)])  # and touching the phantoms again builds on nothing
    run(count(visits, spark, url), visits)
    assert contents(url) == visits.truth()
    with open_reader(url, "visits") as reader:
        assert reader.ledger().dead


@pytest.mark.slow
def test_transactional_state_is_right_when_the_same_batch_is_replayed(url, spark, visits, tmp_path):
    visits.put("0", [(f"u{n % 9}", n) for n in range(30)])
    options = {
        "url": url,
        "type": "transactional",
        "input": str(visits.input),
        "checkpoint": str(visits.checkpoint),
        "faults": [["Kill", {"who": "driver", "call": 2, "after": True}]],
        "folder": str(tmp_path),
    }
    assert run_job(options).returncode == -signal.SIGKILL
    with open_reader(url, "visits") as reader:
        txid = reader.ledger().in_flight.txid
    run(count(visits, spark, url, transactional), visits)
    assert contents(url) == visits.truth()
    with open_reader(url, "visits") as reader:
        assert reader.ledger().last_commit.txid == txid


@pytest.mark.slow
def test_a_crash_between_leaves_what_a_driver_leaves_that_died_there(url, spark, visits, tmp_path):
    """SIGKILL after the ledger's commit on one checkpoint, `crash_between` on another: the same files."""
    for batch in range(2):
        visits.put(f"{batch}", [(f"u{n}", n) for n in range(batch, batch + 9)])
    options = {
        "url": url,
        "input": str(visits.input),
        "checkpoint": str(tmp_path / "killed"),
        "folder": str(tmp_path),
        "faults": [["Kill", {"method": "swap", "where": ["Commits", 1], "after": True, "who": "driver"}]],
    }
    died = run_job(options)
    assert died.returncode == -signal.SIGKILL, died.stderr
    with open_reader(url, "visits") as reader:
        assert reader.ledger().last_commit.batch_id == 1
    by_hand = count(visits, spark, f"sqlite:///{tmp_path}/other.db")
    run(by_hand, visits)
    assert crash_between(visits.checkpoint) == 1
    assert files(visits.checkpoint) == files(tmp_path / "killed")
    for place in (visits.checkpoint, tmp_path / "killed"):
        with pytest.raises(errors.UsageError, match="batch 0 has ended and batch 1 is the last one planned"):
            crash_between(place)
    visits.put("2", [("u1", 1), ("new", 1)])
    run(by_hand, visits)
    assert contents(f"sqlite:///{tmp_path}/other.db") == visits.truth()
    visits.checkpoint = tmp_path / "killed"
    run(count(visits, spark, url), visits)
    assert contents(url) == visits.truth()


def files(checkpoint: Path) -> list[str]:
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def test_a_worker_killed_in_mid_write_on_local_is_begun_anew(url, spark, visits, tmp_path):
    visits.put("0", [(f"u{n}", n) for n in range(20)])
    run(count(visits, spark, url), visits)
    visits.put("1", [(f"u{n}", n) for n in range(10, 30)])
    backend = FaultyBackend(resolve(url), str(tmp_path), (Kill(call=3, after=True, name="kill-worker"),))
    run(count(visits, spark, backend), visits)
    assert backend.fired("kill-worker")
    assert contents(url) == visits.truth()
    with open_reader(url, "visits") as reader:
        assert len(reader.ledger().dead) == 1


@pytest.mark.slow
@pytest.mark.local_cluster
def test_a_worker_killed_in_mid_write_on_a_cluster_loses_its_claim(url, visits, tmp_path):
    """Spark tries the task again by itself; the second try may have other contents, so it must not write."""
    for batch in range(3):
        visits.put(f"{batch}", [(f"u{n}", n) for n in range(batch * 5, batch * 5 + 20)])
    done = run_job(
        {
            "url": url,
            "input": str(visits.input),
            "checkpoint": str(visits.checkpoint),
            "master": "local-cluster[2,1,1024]",
            "faults": [["Kill", {"call": 4, "after": True, "name": "kill-worker"}]],
            "folder": str(tmp_path),
        }
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kill-worker").exists()
    assert contents(url) == visits.truth()
    with open_reader(url, "visits") as reader:
        assert len(reader.ledger().dead) == 1


def test_a_task_of_a_failed_attempt_that_goes_on_writing_is_refused(url, spark, visits, tmp_path):
    """One task stalls, the other's worker dies, the batch is begun anew and committed; then the first writes."""
    visits.put("0", [(f"u{n}", n) for n in range(40)])
    # each hits one task: the kill comes to the one that finds the other stalled
    faults = (Wait(call=3, until="go", name="stall"), Kill(call=3, name="kill-worker"))
    backend = FaultyBackend(resolve(url), str(tmp_path), faults, record=True)
    run(count(visits, spark, backend), visits)
    assert contents(url) == visits.truth()
    (tmp_path / "go").touch()
    wait_for(lambda: "FencedError" in {call.outcome for call in backend.calls}, "the late writer")
    assert contents(url) == visits.truth()
    visits.put("1", [(f"u{n}", n) for n in range(40)])
    run(count(visits, spark, url), visits)
    assert contents(url) == visits.truth()


@pytest.mark.redis
def test_a_flushed_store_in_mid_stream_is_noticed_and_nothing_is_counted_on(start_redis, spark, visits):
    """FLUSHALL between two batches of a running query."""
    server = start_redis()
    url, client = server.url, server.client()
    visits.put("0", [("a", 1), ("b", 1)])
    job = count(visits, spark, url)
    query = job.start(visits.checkpoint)
    query.processAllAvailable()
    client.flushall()
    visits.put("1", [("a", 1)])
    with pytest.raises(StreamingQueryException, match="StoreLostError.*'visits' is gone"):
        query.processAllAvailable()
    assert isinstance(job.last_error, errors.StoreLostError)
    query.stop()
    assert client.keys() == []
    # a restart meets an empty store: batch 1 is not what a new ledger waits for
    with pytest.raises(
        StreamingQueryException,
        match="MissingBatchesError.*batch 1, not 0, but there is no state.*If the checkpoint is another state's: take",
    ):
        run(count(visits, spark, url), visits)
    assert client.keys("*:*") == []
    client.close()


@pytest.mark.redis
def test_a_ledger_deleted_by_itself_is_noticed_and_nothing_is_counted_on(start_redis, spark, visits, tmp_path):
    server = start_redis()
    url, client = server.url, server.client()
    visits.put("0", [("a", 1), ("b", 1)])
    run(count(visits, spark, url), visits)
    records = {key: client.get(key) for key in client.keys("*visits:*")}
    assert len(records) == 2
    client.delete(*client.keys("*visits!*"))
    visits.put("1", [("a", 1)])
    with pytest.raises(StreamingQueryException, match="LedgerLostError"):
        run(count(visits, spark, url), visits)
    # with a new checkpoint as well, only the records can tell, and they do
    visits.checkpoint = tmp_path / "new"
    with pytest.raises(StreamingQueryException, match="LedgerLostError"):
        run(count(visits, spark, url), visits)
    assert {key: client.get(key) for key in records} == records
    client.close()


@pytest.mark.parametrize("spec_of", [opaque, full(transactional)])
def test_a_first_run_that_failed_on_the_executors_leaves_the_state_to_a_new_checkpoint(
    spec_of, url, spark, visits, tmp_path
):
    visits.put("0", [(f"u{n}", n) for n in range(20)])
    visits.put("1", [("u1", 1)])
    faults = (Fail(method="multi_put", call=2, name="no-luck", error=errors.TooLargeError),)
    backend = FaultyBackend(resolve(url), str(tmp_path), faults)
    with pytest.raises(StreamingQueryException, match="TooLargeError"):
        run(count(visits, spark, backend, spec_of=spec_of), visits)
    visits.checkpoint = tmp_path / "new"
    run(count(visits, spark, url, spec_of=spec_of), visits)
    assert contents(url) == visits.truth()


@pytest.mark.parametrize("policy", ["refuse", "adopt", "adopt_unchecked", "reset"])
def test_a_new_checkpoint_on_an_old_state(policy, url, spark, visits, tmp_path):
    visits.put("0", [("a", 1), ("b", 1)])
    visits.put("1", [("a", 1), ("c", 1)])
    run(count(visits, spark, url), visits)
    before = contents(url)
    visits.checkpoint = tmp_path / "new"
    job = count(visits, spark, url, on_new_owner=policy)
    why = {"refuse": "StateOwnershipError.*on_new_owner='adopt'", "adopt": "ReplannedBatchError.*files_not_counted"}
    if policy in why:  # the new checkpoint brings all files again, from batch 0 on
        with pytest.raises(StreamingQueryException, match=why[policy]):
            run(job, visits)
        assert contents(url) == before
        return
    run(job, visits)
    once = visits.truth()
    twice = {key: {name: 2 * value for name, value in values.items()} for key, values in once.items()}
    assert contents(url) == (twice if policy == "adopt_unchecked" else once)
    visits.put("2", [("a", 5), ("d", 5)])
    run(count(visits, spark, url, on_new_owner=policy), visits)  # its own now: neither adopted nor reset again
    expected = visits.truth()
    if policy == "adopt_unchecked":
        expected = {
            key: {name: value + once.get(key, {}).get(name, 0) for name, value in values.items()}
            for key, values in expected.items()
        }
    assert contents(url) == expected


def test_an_older_checkpoint_is_refused_and_nothing_is_written(url, spark, visits):
    visits.put("0", [("a", 1)])
    run(count(visits, spark, url), visits)
    copy = visits.checkpoint.with_name("copy")
    shutil.copytree(visits.checkpoint, copy)
    visits.put("1", [("a", 1)])
    visits.put("2", [("a", 1)])
    run(count(visits, spark, url), visits)
    visits.checkpoint = copy
    with pytest.raises(StreamingQueryException, match="StaleBatchError.*older than the state"):
        run(count(visits, spark, url), visits)
    assert contents(url) == visits.truth()


def test_a_second_driver_on_the_same_checkpoint_fences_the_first(url, spark, visits):
    """Two objects that stand for two driver processes, called as Spark would, by turns."""
    frame = spark.createDataFrame([("a", 1), ("b", 2)], "user_id string, bytes bigint")
    stream = newStream("visits", frame).groupBy("user_id")
    first, second = (stream.persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes")) for _ in range(2))
    first(frame, 0)
    second(frame, 1)
    with pytest.raises(errors.FencedError, match="opened again, as epoch 2"):
        first(frame, 1)
    with pytest.raises(errors.FencedError):
        first(frame, 2)
    second(frame, 2)
    assert contents(url) == {("a",): {"visits": 3, "bytes": 3}, ("b",): {"visits": 3, "bytes": 6}}


def died_at_its_first_offsets(visits: Any, place: Path) -> Path:
    """A copy of the checkpoint as it would be."""
    shutil.copytree(visits.checkpoint, place)
    shutil.rmtree(place / "commits")
    (place / "offsets" / "0").rename(place / "offsets" / ".0.2cd2a4f1.tmp")
    return place


@pytest.mark.since("4.0", "this refusal of Spark's own")
def test_spark_itself_starts_no_query_whose_driver_died_as_it_wrote_the_first_offsets(spark, visits, tmp_path):
    visits.put("0", [("a", 1)])

    def run(checkpoint: Path) -> None:
        writer = visits.stream(spark).writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        finish(writer.trigger(availableNow=True).start())

    run(visits.checkpoint)
    says = "STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY|concurrently using"  # by its version
    with pytest.raises(StreamingQueryException, match=says):
        run(died_at_its_first_offsets(visits, tmp_path / "itself"))


def test_a_checkpoint_whose_driver_died_as_it_wrote_the_first_offsets_says_what_to_delete(spark, visits, tmp_path):
    visits.put("0", [("a", 1)])
    url = f"sqlite:///{tmp_path}/state.db"

    def counts() -> Any:
        return newStream("visits", visits.stream(spark)).groupBy("user_id").persistentAggregate(opaque(url), n=Count())

    finish(counts().start(visits.checkpoint, trigger=AVAILABLE))
    died = died_at_its_first_offsets(visits, tmp_path / "died")
    for place in (died, f"file:{died}"):
        with pytest.raises(CheckpointError, match=r"Delete (.+) and start again") as caught:
            counts().start(place, trigger=AVAILABLE)
        for said in (
            "is writing the first offsets",
            "no driver but that of Topology.run beats",
            "second copy of the job: if one lives, leave the files",
        ):
            assert said in str(caught.value)
    again = tmp_path / "again"
    shutil.copytree(died, again)
    for file in re.search("Delete (.+) and start", str(caught.value))[1].split(", "):
        Path(file).unlink()
    finish(counts().start(died, trigger=AVAILABLE))
    assert contents(url) == {("a",): {"n": 1}}
    assert [path.parent for path in clear_first_offsets(again)] == [again / "offsets"] * 2
    finish(counts().start(again, trigger=AVAILABLE))
    assert contents(url) == {("a",): {"n": 1}}
    assert clear_first_offsets(again) == []
