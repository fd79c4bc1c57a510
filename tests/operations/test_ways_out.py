"""A store that lost something, on a real Redis under a real Spark: the first error is right, and its advice works.

Each test does literally what the message says, until the counts are right.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from servers import GivenRedis, RedisServer
from spark_fixtures import AVAILABLE, Visits, contents, finish
from typer.testing import CliRunner

from mapstate import Count, Sum, errors, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.cli.commands import app
from mapstate.testing import Fail, FaultyBackend, Wait, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.redis]

STATE = "visits"
SCHEMA = ("--type", "opaque", "--key", "user_id string", "--field", "visits=Count bigint", "--field")


def job_of(visits: Visits, spark: SparkSession, backend: Any) -> Any:
    return (
        newStream(STATE, visits.stream(spark))
        .groupBy("user_id")
        .persistentAggregate(opaque(backend, chunk_size=1), visits=Count(), bytes=Sum("bytes"))
    )


def run(visits: Visits, spark: SparkSession, backend: Any) -> None:
    finish(job_of(visits, spark, backend).start(visits.checkpoint, trigger=AVAILABLE))


def refused(visits: Visits, spark: SparkSession, backend: Any) -> errors.MapStateError:
    """What the job says as it is started, at once or by its first batch."""
    job = job_of(visits, spark, backend)
    with pytest.raises((StreamingQueryException, errors.MapStateError)) as said:
        job.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination(120)
    error: Any = said.value
    return job.last_error or error


def mapstate(*args: Any) -> str:
    done = CliRunner().invoke(app, [str(one) for one in args])
    assert done.exit_code == 0, done.output
    return done.output


def adopted(url: str, visits: Visits) -> str:
    """`mapstate adopt` of the ledger's own fields, as docs/operating.md has it."""
    return mapstate("adopt", url, STATE, *SCHEMA, "bytes=Sum(bytes) bigint", "--checkpoint", visits.checkpoint, "--yes")


def put(visits: Visits, *batches: int) -> None:
    for batch in batches:
        visits.put(f"{batch}", [(f"u{n}", n) for n in range(batch, batch + 10)])


def lose_ledger(server: GivenRedis) -> None:
    with server.client() as client:
        assert client.delete(*client.keys("*visits!ledger")) == 1


def is_right(url: str, visits: Visits) -> bool:
    return contents(url, STATE) == visits.truth()


def test_a_ledger_lost_while_the_query_is_stopped_is_made_anew_by_adopt(start_redis, spark, visits):
    url = (server := start_redis()).url
    put(visits, 0, 1)
    run(visits, spark, url)
    lose_ledger(server)
    with pytest.raises(errors.LedgerLostError, match="mapstate adopt"):
        open_reader(url, STATE)
    put(visits, 2)
    error = refused(visits, spark, url)
    assert isinstance(error, errors.LedgerLostError)
    assert "mapstate adopt" in str(error)
    adopted(url, visits)
    run(visits, spark, url)
    assert is_right(url, visits)


def test_a_ledger_lost_with_an_attempt_cut_short_is_made_anew_without_what_that_wrote(
    start_redis, spark, visits, tmp_path
):
    url = (server := start_redis()).url
    put(visits, 0, 1)
    run(visits, spark, url)
    put(visits, 2)
    faults = (Fail(method="multi_put", call=4, name="cut-short", error=errors.TooLargeError),)
    assert isinstance(refused(visits, spark, FaultyBackend(resolve(url), str(tmp_path), faults)), errors.TooLargeError)
    lose_ledger(server)
    assert isinstance(refused(visits, spark, url), errors.LedgerLostError)
    adopted(url, visits)
    assert contents(url, STATE) != visits.truth()
    run(visits, spark, url)
    assert is_right(url, visits)


def test_a_ledger_lost_under_a_live_driver_is_made_anew_by_adopt(start_redis, spark, visits, tmp_path):
    url = (server := start_redis()).url
    put(visits, 0)
    job = job_of(visits, spark, url)
    query = job.start(visits.checkpoint)
    query.processAllAvailable()
    lose_ledger(server)
    put(visits, 1)
    with pytest.raises(StreamingQueryException, match="StoreLostError.*its records are there.*mapstate adopt"):
        query.processAllAvailable()
    adopted(url, visits)
    run(visits, spark, url)
    assert is_right(url, visits)


def test_a_ledger_that_cannot_be_made_anew_is_dropped_with_its_state_and_replayed(start_redis, spark, visits, tmp_path):
    url = (server := start_redis()).url
    put(visits, 0, 1)
    run(visits, spark, url)
    with server.client() as client:
        client.delete("visits!ledger", "visits!reports")
    assert isinstance(refused_after(2, visits, spark, url), errors.LedgerLostError)
    args = ("adopt", url, STATE, *SCHEMA, "bytes=Sum(bytes) bigint", "--checkpoint", str(visits.checkpoint), "--yes")
    assert "mapstate drop" in CliRunner().invoke(app, args).stderr
    mapstate("drop", url, STATE, "--yes")
    visits.checkpoint = tmp_path / "new"
    run(visits, spark, url)
    assert is_right(url, visits)


def refused_after(batch: int, visits: Visits, spark: SparkSession, url: str) -> errors.MapStateError:
    put(visits, batch)
    return refused(visits, spark, url)


def test_a_store_emptied_while_the_query_is_stopped_is_replayed_by_a_new_checkpoint(
    start_redis, spark, visits, tmp_path
):
    url = (server := start_redis()).url
    put(visits, 0, 1)
    run(visits, spark, url)
    with server.client() as client:
        client.flushall()
    with pytest.raises(errors.StateNotFoundError, match="the store was emptied"):
        open_reader(url, STATE)
    error = refused_after(2, visits, spark, url)
    assert isinstance(error, errors.MissingBatchesError)
    assert "or take a new checkpoint" in str(error)
    visits.checkpoint = tmp_path / "new"
    run(visits, spark, url)
    assert is_right(url, visits)


def test_a_store_emptied_under_a_live_driver_is_replayed_by_a_new_checkpoint(start_redis, spark, visits, tmp_path):
    url = (server := start_redis()).url
    put(visits, 0)
    run(visits, spark, url)
    put(visits, 1)
    backend = FaultyBackend(resolve(url), str(tmp_path), (Wait(method="multi_put", call=4, until="go", name="mid"),))
    query = job_of(visits, spark, backend).start(visits.checkpoint)
    wait_for(lambda: list(tmp_path.glob("*mid*")), "a task in mid batch")
    with server.client() as client:
        client.flushall()
        (tmp_path / "go").touch()
        with pytest.raises(StreamingQueryException, match="StoreLostError.*so are its records.*a new checkpoint"):
            query.processAllAvailable()
        assert client.keys("visits:*") == []
    visits.checkpoint = tmp_path / "new"
    run(visits, spark, url)
    assert is_right(url, visits)


class Snapshot:
    """A server's whole contents, put back under whoever is connected."""

    def __init__(self, server: GivenRedis | RedisServer) -> None:
        self._server = server
        with server.client() as client:
            self._kept = {key: client.dump(key) for key in client.scan_iter()}

    def put_back(self) -> None:
        with self._server.client() as client, client.pipeline(transaction=True) as together:
            together.flushall()
            for key, data in self._kept.items():
                together.restore(key, 0, data)
            together.execute()


@pytest.mark.parametrize("restarted", [False, True], ids=["of this run", "of an earlier run"])
def test_an_old_snapshot_under_a_live_driver_is_told_as_one_and_rewind_repeats_what_it_lacks(
    start_redis, spark, visits, tmp_path, restarted
):
    url = (server := start_redis()).url
    put(visits, 0)
    run(visits, spark, url)
    snapshot = Snapshot(server)
    query = job_of(visits, spark, url).start(visits.checkpoint)
    put(visits, 1)
    query.processAllAvailable()
    if not restarted:
        snapshot = Snapshot(server)
        put(visits, 2)
        query.processAllAvailable()
    snapshot.put_back()
    put(visits, 3)
    with pytest.raises(StreamingQueryException, match=r"MissingBatchesError.*Rewind the checkpoint"):
        query.processAllAvailable()
    mapstate("rewind", url, STATE, visits.checkpoint, "--yes")
    run(visits, spark, url)
    assert is_right(url, visits)


def test_an_old_snapshot_put_back_in_mid_batch_is_no_second_driver(start_redis, spark, visits, tmp_path):
    url = (server := start_redis()).url
    put(visits, 0)
    run(visits, spark, url)
    snapshot = Snapshot(server)
    put(visits, 1)
    backend = FaultyBackend(resolve(url), str(tmp_path), (Wait(method="multi_put", call=4, until="go", name="mid"),))
    job = job_of(visits, spark, backend)
    query = job.start(visits.checkpoint)
    wait_for(lambda: list(tmp_path.glob("*mid*")), "a task in mid batch")
    snapshot.put_back()
    (tmp_path / "go").touch()
    with pytest.raises(
        StreamingQueryException, match=r"StoreRestartedError.*put back to an older copy.*Start the query"
    ):
        query.processAllAvailable()
    run(visits, spark, url)
    assert is_right(url, visits)


def test_an_old_snapshot_put_back_while_the_query_is_stopped_is_rewound_to(start_redis, spark, visits):
    url = (server := start_redis()).url
    put(visits, 0)
    run(visits, spark, url)
    snapshot = Snapshot(server)
    put(visits, 1, 2)
    run(visits, spark, url)
    snapshot.put_back()
    error = refused_after(3, visits, spark, url)
    assert isinstance(error, errors.MissingBatchesError)
    assert "Rewind the checkpoint" in str(error)
    mapstate("rewind", url, STATE, visits.checkpoint, "--yes")
    run(visits, spark, url)
    assert is_right(url, visits)


@pytest.mark.parametrize("layout", ["string", "hash", "packed&buckets=16"])
def test_a_lost_layout_key_is_set_again_by_the_command_in_the_message(start_redis, spark, visits, layout):
    server = start_redis()
    url = f"{server.url}{'&' if '?' in server.url else '?'}layout={layout}"
    put(visits, 0)
    run(visits, spark, url)
    with server.client() as client:
        assert client.delete("visits!layout") == 1
        error = refused_after(1, visits, spark, url)
        assert isinstance(error, errors.ConfigurationError)
        command = re.search(r"redis-cli (SET .*?)\. Then", str(error))
        assert command is not None
        client.execute_command(*shlex.split(command[1]))
    run(visits, spark, url)
    assert is_right(url, visits)


def test_the_schema_that_adopt_asks_for_is_that_of_the_ledger(start_redis, spark, visits):
    url = start_redis().url
    put(visits, 0)
    run(visits, spark, url)
    with open_reader(url, STATE) as reader:
        ledger = reader.ledger()
    assert [tuple(one) for one in ledger.fields] == [("visits", "Count", "bigint"), ("bytes", "Sum(bytes)", "bigint")]
    assert Path(visits.checkpoint).is_dir()
