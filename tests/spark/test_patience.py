"""A store that is away for a while: a job retries, with growing pauses, and ends when its patience is over."""

from __future__ import annotations

from typing import Any

import pytest
from cases import full
from pyspark.errors import StreamingQueryException
from servers import RedisServer
from spark_fixtures import AVAILABLE, Visits, contents, finish

from mapstate import Count, Sum, Topology, newStream, non_transactional, opaque, transactional
from mapstate.backends import resolve
from mapstate.errors import StoreUnavailableError
from mapstate.retry import Patience
from mapstate.testing import Begins, Commits, Fail, FaultyBackend
from mapstate.testing.faults import wait_for

pytestmark = pytest.mark.spark


def put(visits: Visits, batches: int = 3) -> None:
    for batch in range(batches):
        visits.put(str(batch), [("ann", 1), ("bob", batch), (f"own-{batch}", 2)])


def counting(spark: Any, visits: Visits, spec: Any) -> Any:
    grouped = newStream("visits", visits.stream(spark)).groupBy("user_id")
    return grouped.persistentAggregate(spec, visits=Count(), bytes=Sum("bytes"))


def together(spark: Any, visits: Visits, spec: Any) -> Any:
    stream = Topology("all").newStream("visits", visits.stream(spark))
    stream.groupBy("user_id").persistentAggregate(spec, visits=Count(), bytes=Sum("bytes"))
    stream.groupBy("bytes").persistentAggregate(opaque(spec.backend, "second"), visits=Count())
    return stream


@pytest.mark.redis
@pytest.mark.parametrize("make", [opaque, full(transactional)])
def test_a_server_that_is_away_for_some_seconds_does_not_end_a_job(spark, visits, caplog, make):
    put(visits)
    with RedisServer(as_process=True).start(appendonly="yes", appendfsync="always") as server:
        job = counting(spark, visits, make(f"{server.url}?retries=0", "visits"))
        job = job.on_batch(lambda done: server.kill() if done.batch_id == 0 else None)
        query = job.start(visits.checkpoint, trigger=AVAILABLE)
        wait_for(lambda: caplog.text.count("is retried in") >= 3, "the job to retry", 60)
        server.restart()
        finish(query)
        assert contents(server.url, "visits") == visits.truth()


@pytest.mark.parametrize("after", [full(False), True])
@pytest.mark.parametrize("where", [Begins(1), None, Commits(1)], ids=["begin", "put", "commit"])
@pytest.mark.parametrize("build", [pytest.param(counting, marks=pytest.mark.full), together])
def test_a_store_that_does_not_answer_at_any_step_is_retried_and_counts_once(
    spark, visits, tmp_path, build, where, after
):
    put(visits)
    url = f"sqlite:///{tmp_path}/state.db"
    swap = "swap" if build is counting else "swap_all"
    fail = Fail(method=swap if where else "multi_put", where=where, after=after, times=3 if after or not where else 20)
    backend = FaultyBackend(resolve(url), str(tmp_path), (fail,))
    finish(build(spark, visits, opaque(backend, "visits", max_attempts=1)).start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url, "visits") == visits.truth()


def test_when_patience_is_over_the_error_is_the_stores_own(spark, visits, tmp_path):
    put(visits)
    url = f"sqlite:///{tmp_path}/state.db"
    fail = Fail(method="swap", where=Begins(1), times=None)
    job = counting(spark, visits, opaque(FaultyBackend(resolve(url), str(tmp_path), (fail,)), "visits", patience=1.5))
    with pytest.raises(StreamingQueryException):
        finish(job.start(visits.checkpoint, trigger=AVAILABLE))
    assert isinstance(job.last_error, StoreUnavailableError)
    assert job.last_error.__notes__ == ["The request was retried for 1.5 seconds (patience)."]
    finish(counting(spark, visits, opaque(url, "visits")).start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url, "visits") == visits.truth()


def test_a_non_transactional_state_does_not_put_again_what_may_be_in(spark, visits, tmp_path):
    put(visits, 1)
    url = f"sqlite:///{tmp_path}/state.db"
    fail = Fail(method="multi_put", after=True)
    spec = non_transactional(FaultyBackend(resolve(url), str(tmp_path), (fail,)), "visits")
    job = counting(spark, visits, spec)
    with pytest.raises(StreamingQueryException):
        finish(job.start(visits.checkpoint, trigger=AVAILABLE))
    assert isinstance(job.last_error, StoreUnavailableError)


def test_a_query_that_was_stopped_waits_for_nothing():
    error = StoreUnavailableError("away")
    with pytest.raises(StoreUnavailableError) as raised:
        Patience(3600, lambda: False).wait(error)
    assert raised.value is error
