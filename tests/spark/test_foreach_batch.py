"""What a user's own foreachBatch function may do with a state: every row counts once, or an error says why not."""

from __future__ import annotations

import json
import shutil
import sqlite3
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from cases import full
from py4j.java_collections import JavaMap
from pyspark import InheritableThread
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, Visits, contents, finish

from mapstate import Count, Sum, newStream, non_transactional, opaque, open_reader, transactional
from mapstate.errors import IncompleteBatchError, MissingBatchesError, StaleBatchError, StateSchemaError, UsageError
from mapstate.operations.checkpoint import rewind
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.spark import StateUpdater, Topology, with_empty_batches
from mapstate.spark.driver import access
from mapstate.spark.driver.calls import _calls_of
from mapstate.spark.driver.jvm import StartedQuery
from mapstate.spark.driver.query_run import QueryRun

pytestmark = pytest.mark.spark

Function = Callable[[DataFrame, int], Any]
FILES = [[("a", 1), ("b", 2), ("a", 3)], [("b", 4), ("c", 5)], [("a", 6), ("d", 7)], [("c", 8), ("b", 9)]]
PARTS = ["user_id = 'a'", "user_id = 'b'", "user_id = 'c'", "user_id = 'd'"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


@pytest.fixture
def given(visits: Visits) -> Visits:
    """Four batches of rows."""
    for name, rows in enumerate(FILES):
        visits.put(str(name), rows)
    return visits


def counts_of(spark: Any, visits: Visits, spec: Any) -> Any:
    by_user = newStream("visits", visits.stream(spark)).groupBy("user_id")
    return by_user.persistentAggregate(spec, visits=Count(), bytes=Sum("bytes"))


def run(spark: Any, visits: Visits, function: Function, **options: Any) -> None:
    """One start of a query of the user's own, until all files are read; raises what the function raised."""
    raised: list[BaseException] = []

    def noted(rows: DataFrame, batch_id: int) -> None:
        try:
            function(rows, batch_id)
        except BaseException as error:
            raised.append(error)
            raise

    writer = visits.stream(spark).writeStream.foreachBatch(noted).trigger(**AVAILABLE)
    query = writer.option("checkpointLocation", str(visits.checkpoint)).options(**options).start()
    try:
        finish(query)
    except StreamingQueryException:
        raise raised[0] from None


def ledger(url: str, state: str = "visits") -> Any:
    return read_ledger(opaque(url, state).open(), state)


def in_pool(job: Function, rows: DataFrame, batch_id: int, workers: int = 1) -> None:
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(job, rows.where(part), batch_id) for part in PARTS]:
            done.result()


# -- whose batch it is, whatever thread calls


def test_a_whole_batch_from_a_pools_thread_counts_as_from_the_querys_own(url, spark, given):
    job = counts_of(spark, given, opaque(url))
    with ThreadPoolExecutor(3) as pool:
        run(spark, given, lambda rows, batch_id: pool.submit(job, rows, batch_id).result())
    assert contents(url, "visits") == given.truth()
    commit = ledger(url).last_commit
    assert commit.run is not None
    assert commit.plan.fingerprint is not None


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 4])
def test_parts_of_a_batch_from_a_pool_lose_no_row_in_silence(url, spark, given, workers):
    job = counts_of(spark, given, opaque(url))
    with pytest.raises(UsageError, match="twice in one run"):
        run(spark, given, lambda rows, batch_id: in_pool(job, rows, batch_id, workers))
    run(spark, given, counts_of(spark, given, opaque(url)))  # as the message says
    assert contents(url, "visits") == given.truth()


def test_totals_that_come_through_a_pool_are_not_added_up(url, spark, given):
    totals = given.stream(spark).groupBy("user_id").agg(F.sum("bytes").alias("bytes"))
    job = newStream("totals", totals).groupBy("user_id").persistentAggregate(opaque(url), bytes=Sum("bytes"))
    raised: list[BaseException | None] = []

    def function(rows: DataFrame, batch_id: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            called = pool.submit(job, rows, batch_id)
            raised.append(called.exception())
            called.result()

    writer = totals.writeStream.foreachBatch(function).outputMode("update").trigger(**AVAILABLE)
    with pytest.raises(StreamingQueryException):
        finish(writer.option("checkpointLocation", str(given.checkpoint)).start())
    assert isinstance(raised[0], UsageError)
    assert "sends totals" in str(raised[0])


def test_a_job_group_of_the_users_own_hides_no_second_part(url, spark, given):
    job = counts_of(spark, given, opaque(url))

    def function(rows: DataFrame, batch_id: int) -> None:
        for part in PARTS:
            spark.sparkContext.setJobGroup(str(uuid.uuid4()), "the user's own")
            job(rows.where(part), batch_id)

    with pytest.raises(UsageError, match="twice in one run"):
        run(spark, given, function)


def test_a_state_per_tenant_each_in_a_thread_of_its_own(url, spark, given, tmp_path):
    jobs = {
        user: counts_of(spark, given, opaque(f"sqlite:///{tmp_path}/{user}.db", apply_on=where))
        for user, where in zip("abcd", ("driver", "executors", "auto", "driver"), strict=True)
    }

    def function(rows: DataFrame, batch_id: int) -> None:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(job, rows.where(f"user_id = '{user}'"), batch_id) for user, job in jobs.items()]:
                done.result()

    run(spark, given, function)
    found = {
        key: value for user in jobs for key, value in contents(f"sqlite:///{tmp_path}/{user}.db", "visits").items()
    }
    assert found == given.truth()


def test_a_query_that_comes_while_another_thread_looks_for_its_own_stops_neither(spark, monkeypatch):
    known: deque[Any] = deque(maxlen=8)

    class Session:
        def equals(self, _: object) -> bool:
            known.appendleft(other)  # as the other thread does, which takes over while the JVM is asked
            return False

    other = StartedQuery(Session(), None, None, QueryRun("other", "run"))
    known.append(other)
    monkeypatch.setattr(access, "_queries", known)
    assert access.ClassicAccess(spark.range(1)).run("by hand") == QueryRun("by hand", None)
    assert len(known) == 2


def test_an_inheritable_thread_serves_its_query(url, spark, given):
    job, raised = counts_of(spark, given, opaque(url)), []

    def function(rows: DataFrame, batch_id: int) -> None:
        def call() -> None:
            try:
                # a frame of the root session: only the thread says of which query it is
                job(spark.createDataFrame(rows.toPandas(), rows.schema), batch_id)
            except BaseException as error:  # noqa: BLE001  raised in the function's own thread
                raised.append(error)

        thread = InheritableThread(target=call)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    run(spark, given, function)
    assert contents(url, "visits") == given.truth()
    assert ledger(url).last_commit.run is not None


@pytest.mark.parametrize(
    "way", ["view", full("own pandas"), "root pandas", full("checkpoint"), "cached", full("union")]
)
def test_a_frame_that_went_another_way_is_of_its_batch(way, url, spark, given):
    job = counts_of(spark, given, opaque(url))

    def function(rows: DataFrame, batch_id: int) -> None:
        if way == "view":
            rows.createOrReplaceTempView("rows_of_the_batch")
            rows = rows.sparkSession.sql("SELECT * FROM rows_of_the_batch")
        elif way == "own pandas":
            rows = rows.sparkSession.createDataFrame(rows.toPandas(), rows.schema)
        elif way == "root pandas":
            rows = spark.createDataFrame(rows.toPandas(), rows.schema)
        elif way == "checkpoint":
            rows = rows.localCheckpoint()
        elif way == "cached":
            rows = rows.cache()
        else:
            rows = rows.where(PARTS[0]).unionByName(rows.where(f"NOT {PARTS[0]}"))
        job(rows, batch_id)

    run(spark, given, function)
    assert contents(url, "visits") == given.truth()
    commit = ledger(url).last_commit
    assert (commit.batch_id, commit.run is None, commit.plan is None) == (3, False, False)


def test_a_frame_that_nothing_tells_of_is_refused_while_a_query_runs(url, spark, given):
    job = counts_of(spark, given, opaque(url))

    def function(rows: DataFrame, batch_id: int) -> None:
        plain = spark.createDataFrame(rows.toPandas(), rows.schema)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(job, plain, batch_id).result()

    with pytest.raises(UsageError, match="nothing tells whether this DataFrame"):
        run(spark, given, function)
    assert not Path(url.removeprefix("sqlite:///")).exists()


def test_a_batch_id_that_is_not_sparks_is_refused(url, spark, given):
    job = counts_of(spark, given, opaque(url))
    with pytest.raises(UsageError, match="got batch 1000, and its query is at batch 0"):
        run(spark, given, lambda rows, batch_id: job(rows, batch_id + 1000))


@pytest.mark.parametrize("number", [True, None, 1.0, "1"])
def test_what_is_no_number_of_a_batch_is_refused_and_the_ledger_can_be_read(number, spark, tmp_path):
    """True counted as batch 1, and stood in the ledger as true, which none reads."""
    rows = spark.createDataFrame([("a",)], "k string")
    url = f"sqlite:///{tmp_path}/s.db"
    job: Any = newStream("rows", rows).groupBy("k").persistentAggregate(opaque(url, "s"), n=Count())
    job(rows, 0)
    with pytest.raises(UsageError, match="the number of a batch is an int"):
        job(rows, number)
    assert ledger(url, "s").last_commit.batch_id == 0
    job(rows, 1)


def test_a_thread_that_outlives_its_query_writes_nothing(url, spark, given):
    job, kept = counts_of(spark, given, opaque(url)), []
    run(spark, given, lambda rows, batch_id: kept.append((rows, batch_id)))
    with pytest.raises(UsageError, match="a streaming query that has ended"):
        job(*kept[0])
    assert not Path(url.removeprefix("sqlite:///")).exists()


def test_a_thread_that_outlives_the_batches_that_its_state_counted_writes_nothing(url, spark, given):
    job, kept = counts_of(spark, given, opaque(url)), []

    def function(rows: DataFrame, batch_id: int) -> None:
        kept.append((rows, batch_id))
        if batch_id == 1:
            raise ValueError("enough")
        job(rows, batch_id)

    with pytest.raises(ValueError, match="enough"):
        run(spark, given, function)
    before = ledger(url)
    with pytest.raises(UsageError, match="a streaming query that has ended"):
        counts_of(spark, given, opaque(url))(*kept[1])
    assert ledger(url) == before


def test_a_call_behind_the_end_of_the_query_takes_nothing_back(url, spark, given):
    job, kept = counts_of(spark, given, opaque(url)), []

    def function(rows: DataFrame, batch_id: int) -> None:
        kept.append((rows, batch_id))
        job(rows, batch_id)

    run(spark, given, function)
    before = ledger(url)
    with pytest.raises(UsageError, match="a streaming query that has ended"):
        job(*kept[-1])
    assert ledger(url) == before
    assert contents(url, "visits") == given.truth()


def test_a_query_that_is_started_again_and_again_keeps_no_frame_of_the_runs_before(url, spark, given):
    job = counts_of(spark, given, opaque(url))
    for _ in range(3):
        with pytest.raises(StateSchemaError):
            run(spark, given, lambda rows, batch_id: job(rows.drop("bytes"), batch_id))
    query_id = json.loads((given.checkpoint / "metadata").read_text())["id"]
    assert len(_calls_of[query_id]) == 1


def test_the_frame_of_one_query_is_refused_in_the_function_of_another(url, spark, given, tmp_path):
    kept: list[DataFrame] = []
    first = given.stream(spark).writeStream.foreachBatch(lambda rows, _: kept.append(rows))
    first = first.option("checkpointLocation", f"{tmp_path}/first").start()  # goes on
    try:
        first.processAllAvailable()
        job = counts_of(spark, given, opaque(url))
        with pytest.raises(UsageError, match="came to a state in the function of query"):
            run(spark, given, lambda _, batch_id: job(kept[0], batch_id))
    finally:
        first.stop()


def test_two_queries_in_one_session_each_count_their_own(spark, given, tmp_path):
    queries = []
    for name in ("one", "two"):
        job = counts_of(spark, given, opaque(f"sqlite:///{tmp_path}/{name}.db"))

        def function(rows: DataFrame, batch_id: int, job: Any = job) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(job, rows, batch_id).result()

        writer = given.stream(spark).writeStream.foreachBatch(function).trigger(**AVAILABLE)
        queries.append(writer.option("checkpointLocation", f"{tmp_path}/{name}").start())
    owners = set()
    for name, query in zip(("one", "two"), queries, strict=True):
        finish(query)
        url = f"sqlite:///{tmp_path}/{name}.db"
        assert contents(url, "visits") == given.truth()
        owners.add(ledger(url).owner)
    assert owners == {query.id for query in queries}


def test_a_query_that_ends_while_the_running_ones_are_listed_is_no_error_of_another(
    url, spark, given, tmp_path, monkeypatch
):
    """py4j asks a map of the JVM key by key, and has None for one that is gone by then."""
    writer = given.stream(spark).writeStream.format("noop").trigger(processingTime="1 hour")
    other = writer.option("checkpointLocation", f"{tmp_path}/other").start()
    value_of = JavaMap.__getitem__

    def late(self: Any, key: Any) -> Any:
        if str(key) == other.id:
            other.stop()
        return value_of(self, key)

    monkeypatch.setattr(JavaMap, "__getitem__", late)
    run(spark, given, counts_of(spark, given, opaque(url)))
    assert not other.isActive
    assert contents(url, "visits") == given.truth()


def test_a_state_that_is_made_anew_in_each_call_counts_each_batch_once(url, spark, given):
    def function(rows: DataFrame, batch_id: int) -> None:
        counts_of(spark, given, opaque(url))(rows, batch_id)

    run(spark, given, function)
    assert contents(url, "visits") == given.truth()


# -- a batch in parts


def in_parts(job_of: Callable[[], Any], *, swallow: bool = False) -> Function:
    def function(rows: DataFrame, batch_id: int) -> None:
        for part in PARTS:
            try:
                job_of()(rows.where(part), batch_id)
            except Exception:
                if not swallow:
                    raise

    return function


@pytest.mark.parametrize("is_made_anew", [full(False), True])
@pytest.mark.parametrize("swallow", [pytest.param(False, marks=pytest.mark.full), True])
def test_an_opaque_state_takes_a_part_back_and_counts_the_whole_batch_next(url, spark, given, is_made_anew, swallow):
    one = counts_of(spark, given, opaque(url))
    make = (lambda: counts_of(spark, given, opaque(url))) if is_made_anew else (lambda: one)
    if swallow:
        run(spark, given, in_parts(make, swallow=True))
    else:
        for _ in range(2):  # and the next start finds nothing of it
            with pytest.raises(UsageError, match="twice in one run.*taken back: nothing of the batch counts"):
                run(spark, given, in_parts(make))
    assert contents(url, "visits") == {}
    job = counts_of(spark, given, opaque(url))
    if swallow:  # Spark took all batches for done
        given.put("4", [("e", 1)])
        with pytest.raises(MissingBatchesError, match="batch 4, but the state has still to get batch 0"):
            run(spark, given, job)
        rewind(url, "visits", str(given.checkpoint))
    run(spark, given, job)
    assert contents(url, "visits") == given.truth()


@pytest.mark.parametrize("second", [opaque, pytest.param(transactional, marks=pytest.mark.full), non_transactional])
def test_the_second_of_two_states_keeps_no_part_of_a_batch_that_the_first_was_given_in_parts(second, url, spark, given):
    def jobs() -> list[Any]:
        return [counts_of(spark, given, opaque(url, "first")), counts_of(spark, given, second(url, "second"))]

    jobs_in_parts = jobs()

    def function(rows: DataFrame, batch_id: int) -> None:
        for part in PARTS:
            for job in jobs_in_parts:
                job(rows.where(part), batch_id)

    with pytest.raises(UsageError, match="twice in one run.*taken back"):
        run(spark, given, function)
    whole = jobs()

    def repaired(rows: DataFrame, batch_id: int) -> None:
        for job in whole:
            job(rows, batch_id)

    if second is opaque:
        run(spark, given, repaired)
        assert contents(url, "second") == given.truth()
    else:
        with pytest.raises(IncompleteBatchError, match="counts only a part of batch 0"):
            run(spark, given, repaired)


def test_a_part_that_failed_makes_the_next_part_no_batch(url, spark, given):
    """The error of the first part is swallowed, so the second one would be all that counts."""
    job = counts_of(spark, given, opaque(url))

    def function(rows: DataFrame, batch_id: int) -> None:
        for part in (rows.drop("bytes"), rows.where(PARTS[0]), rows.where(PARTS[1])):
            try:
                job(part, batch_id)
            except Exception:  # noqa: BLE001  what people write
                continue

    run(spark, given, function)
    job = counts_of(spark, given, opaque(url))
    given.put("4", [("e", 1)])
    with pytest.raises(MissingBatchesError):
        run(spark, given, job)


def test_a_part_whose_call_failed_after_its_commit_is_taken_back(url, spark, given):
    job = counts_of(spark, given, opaque(url))

    def fails(rows: DataFrame, batch_id: int) -> None:
        raise RuntimeError("downstream")

    job.newValuesStream().foreachBatch(fails)
    run(spark, given, in_parts(lambda: job, swallow=True))
    assert contents(url, "visits") == {}


def test_a_part_that_failed_after_an_earlier_error_makes_the_next_part_no_batch(url, spark, given):
    job = counts_of(spark, given, opaque(url))

    def fails_once(rows: DataFrame, batch_id: int) -> None:
        if batch_id == 0:
            raise RuntimeError("downstream")

    job.newValuesStream().foreachBatch(fails_once)

    def function(rows: DataFrame, batch_id: int) -> None:
        for part in [rows] if batch_id == 0 else [rows.drop("bytes"), rows.where(PARTS[0])]:
            try:
                job(part, batch_id)
            except Exception:  # noqa: BLE001  what people write
                continue

    run(spark, given, function)
    assert ledger(url).last_commit.batch_id == 0


def test_a_retry_with_the_same_frame_is_no_second_part(url, spark, given):
    job, failures = counts_of(spark, given, opaque(url)), []

    def fail_once(rows: DataFrame, batch_id: int) -> None:
        if len(failures) <= batch_id:
            failures.append(batch_id)
            raise RuntimeError("downstream")

    job.newValuesStream().foreachBatch(fail_once)

    def function(rows: DataFrame, batch_id: int) -> None:
        for attempt in range(2):
            try:
                job(rows.where("bytes > 0"), batch_id)
            except RuntimeError:
                assert attempt == 0

    run(spark, given, function)
    assert len(failures) == len(FILES)
    assert contents(url, "visits") == given.truth()


@pytest.mark.parametrize("spec_of", [opaque, pytest.param(transactional, marks=pytest.mark.full)])
def test_a_part_that_counts_though_its_call_failed_is_taken_back_or_marked(spec_of, url, spark, given):
    """A function downstream fails after the commit of the first part, and the function of the user's own goes on."""
    job = counts_of(spark, given, spec_of(url))

    def fail(_: DataFrame, __: int) -> None:
        raise RuntimeError("downstream")

    job.newValuesStream().foreachBatch(fail)

    def function(rows: DataFrame, batch_id: int) -> None:
        with suppress(RuntimeError):
            job(rows.where(PARTS[0]), batch_id)
        job(rows.where(f"NOT {PARTS[0]}"), batch_id)

    with pytest.raises(UsageError, match="twice in one run"):
        run(spark, given, function)
    job = counts_of(spark, given, spec_of(url))
    if spec_of is opaque:
        run(spark, given, job)  # as the message says
        assert contents(url, "visits") == given.truth()
    else:
        with pytest.raises(IncompleteBatchError, match="only a part of batch 0, 2 rows"):
            run(spark, given, job)


def test_a_part_is_marked_where_a_state_that_follows_cannot_go_back(url, spark, given):
    def job(**options: Any) -> Any:
        first = counts_of(spark, given, opaque(url, **options))
        return first.newValuesStream().persistentAggregate(transactional(url, "second", **options), keys=Count())

    parts = job()
    with pytest.raises(UsageError, match="What came first counts, and the next start says so"):
        run(spark, given, in_parts(lambda: parts))
    with pytest.raises(IncompleteBatchError, match=r"'visits' counts only a part of batch 0, 2 rows"):
        run(spark, given, job())
    run(spark, given, job(on_gap="accept"))  # goes on without the rest, in both
    kept = {("a",): {"visits": 3, "bytes": 10}, ("b",): {"visits": 2, "bytes": 13}}
    assert contents(url, "visits") == given.truth() | kept
    assert contents(url, "second") == {(): {"keys": 4}}


@pytest.mark.parametrize("spec_of", [transactional, pytest.param(non_transactional, marks=pytest.mark.full)])
def test_a_part_that_cannot_be_taken_back_is_named_by_the_next_start(spec_of, url, spark, given):
    job = counts_of(spark, given, spec_of(url))
    with pytest.raises(UsageError, match="What came first counts, and the next start says so"):
        run(spark, given, in_parts(lambda: job))
    assert ledger(url).last_commit.is_part
    for _ in range(2):
        with pytest.raises(IncompleteBatchError, match=r"only a part of batch 0, 2 rows.*Union the parts, then reset"):
            run(spark, given, counts_of(spark, given, spec_of(url)))
    run(spark, given, counts_of(spark, given, spec_of(url, on_gap="accept")))  # goes on without the rest
    kept = {("a",): {"visits": 3, "bytes": 10}, ("b",): {"visits": 2, "bytes": 13}}
    assert contents(url, "visits") == given.truth() | kept
    if spec_of is transactional:
        shutil.rmtree(given.checkpoint)
        run(spark, given, counts_of(spark, given, spec_of(url, on_new_owner="reset")))
        assert contents(url, "visits") == given.truth()


def dies_behind_the_first_part(job: Any) -> Function:
    def function(rows: DataFrame, batch_id: int) -> None:
        job(rows.where(PARTS[0]), batch_id)
        raise RuntimeError("the driver dies")

    return function


def test_a_batch_whose_first_part_a_killed_driver_committed_is_taken_back(url, spark, given):
    """The driver died between the two parts; the next run gives the parts again."""
    with pytest.raises(RuntimeError):
        run(spark, given, dies_behind_the_first_part(counts_of(spark, given, opaque(url))))
    assert contents(url, "visits") == {("a",): {"visits": 2, "bytes": 4}}
    anew = in_parts(lambda: counts_of(spark, given, opaque(url)))
    with pytest.raises(UsageError, match="taken back"):
        run(spark, given, anew)
    run(spark, given, counts_of(spark, given, opaque(url)))
    assert contents(url, "visits") == given.truth()


@pytest.mark.parametrize("is_filtered", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_whole_batch_of_which_a_killed_driver_committed_a_part_is_counted_anew(url, spark, given, is_filtered):
    """The driver died between the two parts, and the program was changed to the union before it had raised."""

    def job() -> Any:
        stream = newStream("visits", given.stream(spark))
        stream = stream.transform(lambda rows: rows.where("bytes > 0")) if is_filtered else stream
        return stream.groupBy("user_id").persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))

    with pytest.raises(RuntimeError):
        run(spark, given, dies_behind_the_first_part(job()))
    txid = ledger(url).last_commit.txid
    finished: list[Any] = []
    run(spark, given, job().on_batch(finished.append))
    assert contents(url, "visits") == given.truth()
    assert finished[0].batch_id == 0
    assert finished[0].txid > txid


def test_a_part_that_had_no_row_for_one_of_two_states_is_counted_anew_in_both(url, spark, given):
    def job() -> Any:
        topology = Topology("site")
        rows = topology.newStream("visits", given.stream(spark))
        rows.groupBy("user_id").persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))
        of_b = rows.transform(lambda frame: frame.where("user_id = 'b'"))
        of_b.groupBy("user_id").persistentAggregate(opaque(url, "of_b"), visits=Count())
        return topology

    with pytest.raises(RuntimeError):
        run(spark, given, dies_behind_the_first_part(job()))
    assert ledger(url, "of_b").last_commit.rows == 0
    run(spark, given, job())
    assert contents(url, "visits") == given.truth()
    assert contents(url, "of_b") == {("b",): {"visits": given.truth()["b",]["visits"]}}


@pytest.mark.parametrize("spec_of", [pytest.param(transactional, marks=pytest.mark.full), non_transactional])
def test_a_part_that_a_killed_driver_committed_is_named_where_it_cannot_be_taken_back(spec_of, url, spark, given):
    with pytest.raises(RuntimeError):
        run(spark, given, dies_behind_the_first_part(counts_of(spark, given, spec_of(url))))
    for _ in range(2):
        with pytest.raises(IncompleteBatchError, match=r"only a part of batch 0, 2 rows .* came again with more rows"):
            run(spark, given, counts_of(spark, given, spec_of(url)))
    run(spark, given, counts_of(spark, given, spec_of(url, on_gap="accept")))  # goes on without the rest
    kept = {("a",): {"visits": 3, "bytes": 10}, ("b",): {"visits": 2, "bytes": 13}}
    assert contents(url, "visits") == given.truth() | kept


def a_part_and_dies(job: Any, of: int = 0) -> Function:
    return lambda rows, batch_id: (dies_behind_the_first_part(job) if batch_id == of else job)(rows, batch_id)


def parts_from(job: Any, of: int = 0) -> Function:
    return lambda rows, batch_id: (in_parts(lambda: job) if batch_id == of else job)(rows, batch_id)


# Both ways in `make chaos`, one of them in `make test`.
THE_DRIVER_DIES = pytest.mark.parametrize("way", [a_part_and_dies, pytest.param(parts_from, marks=pytest.mark.full)])
IN_PARTS = pytest.mark.parametrize("way", [pytest.param(a_part_and_dies, marks=pytest.mark.full), parts_from])


@THE_DRIVER_DIES
def test_windows_that_have_fired_are_not_taken_back_but_named(url, spark, given, way):
    """What was final stays so."""

    def job() -> Any:
        windows = newStream("visits", given.stream(spark)).tumblingWindow(2, timestampField="bytes")
        return windows.groupBy("user_id").persistentAggregate(opaque(url), visits=Count())

    def final() -> list[Any]:
        with open_reader(url, "visits") as reader:
            return [(one.start, one.value) for one in reader.windows("a") if one.final]

    with pytest.raises((RuntimeError, UsageError)):
        run(spark, given, way(job()))
    assert final() == [(0, {"visits": 1})]
    with pytest.raises(IncompleteBatchError, match="only a part of batch 0"):
        run(spark, given, job())
    assert final() == [(0, {"visits": 1})]


@IN_PARTS
def test_windows_of_which_none_has_fired_are_taken_back(url, spark, given, way):
    def job() -> Any:
        windows = newStream("visits", given.stream(spark)).tumblingWindow(100, timestampField="bytes")
        return windows.groupBy("user_id").persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))

    with pytest.raises((RuntimeError, UsageError)):
        run(spark, given, way(job(), of=2))
    run(spark, given, job())
    with open_reader(url, "visits") as reader:
        found = {(user,): one.value for user in "abcd" for one in reader.windows(user)}
    assert found == given.truth()


@IN_PARTS
def test_a_part_is_marked_where_a_state_after_the_commit_cannot_go_back(url, spark, given, way):
    def job(**options: Any) -> Any:
        topology = Topology("site")
        visits = topology.newStream("visits", given.stream(spark))
        first = visits.groupBy("user_id").persistentAggregate(opaque(url, **options), visits=Count())
        asked = visits.stateQuery(first, "user_id", ["visits"], when="after").groupBy("user_id")
        asked.persistentAggregate(transactional(url, "second", **options), rows=Count())
        return topology

    with pytest.raises((RuntimeError, UsageError)):
        run(spark, given, way(job()))
    with pytest.raises(IncompleteBatchError, match=r"'visits' counts only a part of batch 0, 2 rows"):
        run(spark, given, job())
    run(spark, given, job(on_gap="accept"))  # goes on without the rest, in both
    counted = {("a",): 3, ("b",): 2, ("c",): 2, ("d",): 1}
    assert contents(url, "visits") == {key: {"visits": number} for key, number in counted.items()}
    assert contents(url, "second") == {key: {"rows": number} for key, number in counted.items()}


class Nowhere:
    """A state of the user's own, and what makes it."""

    def make_state(self, partition: int, partitions: int) -> Nowhere:
        return self

    def begin_commit(self, txid: int) -> None:
        pass

    def commit(self, txid: int) -> None:
        pass


class Users(StateUpdater):
    output = "user_id string"

    def update_state(self, state: Any, rows: Any, collector: Any) -> None:
        for user in sorted({row["user_id"] for row in rows}):
            collector.emit(user)


@THE_DRIVER_DIES
def test_a_part_is_marked_where_a_state_of_the_users_own_had_it_too(url, spark, given, way):
    def job() -> Any:
        topology = Topology("site")
        visits = topology.newStream("visits", given.stream(spark))
        visits.groupBy("user_id").persistentAggregate(opaque(url), visits=Count())
        users = visits.partitionPersist(Nowhere(), Users(), ["user_id"], partitions=2).newValuesStream()
        users.groupBy("user_id").persistentAggregate(opaque(url, "second"), batches=Count())
        return topology

    with pytest.raises((RuntimeError, UsageError)):
        run(spark, given, way(job()))
    with pytest.raises(IncompleteBatchError, match=r"'visits' counts only a part of batch 0, 2 rows"):
        run(spark, given, job())
    assert contents(url, "second") == {("a",): {"batches": 1}}


def test_a_part_is_marked_where_all_states_are_behind_one_of_the_users_own(url, spark, given):
    def job(**options: Any) -> Any:
        topology = Topology("site")
        visits = topology.newStream("visits", given.stream(spark))
        users = visits.partitionPersist(Nowhere(), Users(), ["user_id"], partitions=2).newValuesStream()
        users.groupBy("user_id").persistentAggregate(opaque(url, "second", **options), batches=Count())
        return topology

    with pytest.raises(UsageError, match="batch 0 was given to the stream"):
        run(spark, given, parts_from(job()))
    with pytest.raises(IncompleteBatchError, match=r"'second' counts only a part of batch 0"):
        run(spark, given, job())
    assert contents(url, "second") == {("a",): {"batches": 1}}
    run(spark, given, job(on_gap="accept"))


def test_a_part_is_marked_where_a_vacuum_has_begun_in_a_state_that_follows(url, spark, given):
    def job(**options: Any) -> Any:
        first = counts_of(spark, given, opaque(url, **options))
        return first.newValuesStream().persistentAggregate(opaque(url, "second", **options), keys=Count())

    with pytest.raises(RuntimeError):
        run(spark, given, dies_behind_the_first_part(job()))
    follower = Ledger(opaque(url, "second").open(), "second")
    follower.load()
    follower.begin_operator("vacuum")
    with pytest.raises(IncompleteBatchError, match=r"'visits' counts only a part of batch 0, 2 rows"):
        run(spark, given, job())
    run(spark, given, job(on_gap="accept"))
    assert contents(url, "second") == {(): {"keys": 4}}


def test_a_batch_that_comes_again_with_fewer_rows_counts_as_it_did(url, spark, given):
    """A source may lose rows that were counted; those that count did come."""

    def dies(rows: DataFrame, batch_id: int) -> None:
        counts_of(spark, given, opaque(url))(rows, batch_id)
        raise RuntimeError("the driver dies")

    with pytest.raises(RuntimeError):
        run(spark, given, dies)
    job, seen = counts_of(spark, given, opaque(url)), []

    def less(rows: DataFrame, batch_id: int) -> None:
        seen.append(batch_id)
        job(rows.where(PARTS[0]) if batch_id == 0 else rows, batch_id)

    run(spark, given, less)
    assert seen[0] == 0
    assert contents(url, "visits") == given.truth()


# -- batches that the function leaves out


def only_with(part: str, job: Any) -> Function:
    def function(rows: DataFrame, batch_id: int) -> None:
        found = rows.where(part)
        if not found.isEmpty():
            job(found, batch_id)

    return function


def test_a_batch_that_the_function_left_out_is_named_and_not_taken_for_a_lost_one(url, spark, given):
    job = counts_of(spark, given, opaque(url))
    with pytest.raises(
        MissingBatchesError, match=r"did not call state 'visits' for batches 1 to 1.*with_empty_batches"
    ):
        run(spark, given, only_with(PARTS[0], job))
    rewind(url, "visits", str(given.checkpoint))
    job = counts_of(spark, given, opaque(url))
    run(spark, given, with_empty_batches(only_with(PARTS[0], job), job))
    assert contents(url, "visits") == {("a",): given.truth()[("a",)]}
    done = max(int(entry.name) for entry in (given.checkpoint / "commits").glob("[0-9]*"))
    assert ledger(url).last_commit.batch_id == done  # that one was left out


@pytest.mark.parametrize("left_out", [0, full(1)])
def test_a_batch_that_was_left_out_before_the_first_call_of_a_run_is_named(left_out, url, spark, visits):
    def start() -> None:
        job = counts_of(spark, visits, opaque(url))
        run(spark, visits, lambda rows, batch_id: None if batch_id == left_out else job(rows, batch_id))

    for name in range(left_out + 1):  # the last of them is left out
        visits.put(str(name), FILES[name])
    start()
    visits.put("next", FILES[2])
    with pytest.raises(MissingBatchesError):
        start()  # of another run's batches Spark does not tell
    if left_out:
        rewind(url, "visits", str(visits.checkpoint))
    else:
        shutil.rmtree(visits.checkpoint)
    with pytest.raises(MissingBatchesError, match=f"'visits' for batches {left_out} to {left_out}.*with_empty_batches"):
        start()


def test_a_topology_is_given_empty_batches_too(url, spark, given):
    topology = Topology("site")
    stream = topology.newStream("visits", given.stream(spark)).groupBy("user_id")
    stream.persistentAggregate(opaque(url, "visits"), visits=Count(), bytes=Sum("bytes"))
    run(spark, given, with_empty_batches(only_with(PARTS[0], topology), topology))
    assert contents(url, "visits") == {("a",): given.truth()[("a",)]}
    assert ledger(url).last_commit.batch_id == len(FILES) - 1


def test_a_lost_store_is_noticed_behind_batches_that_were_left_out(url, spark, visits, tmp_path):
    def copy(source: str, target: str) -> None:
        with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
            one.backup(other)

    def start() -> None:
        job = counts_of(spark, visits, opaque(url))
        run(spark, visits, with_empty_batches(only_with(PARTS[0], job), job))

    place, kept = url.removeprefix("sqlite:///"), str(tmp_path / "copy")
    for name, rows in enumerate(FILES[:2]):  # the function leaves the second one out
        visits.put(str(name), rows)
    start()
    copy(place, kept)
    for name, rows in enumerate(FILES[2:], start=2):
        visits.put(str(name), rows)
    start()
    copy(kept, place)
    visits.put("4", [("a", 1)])
    with pytest.raises(MissingBatchesError, match="batch 4, but the state has still to get batch 2"):
        start()
    rewind(url, "visits", str(visits.checkpoint))
    start()
    assert contents(url, "visits") == {("a",): visits.truth()[("a",)]}


def test_an_error_that_the_function_swallowed_is_no_batch_that_was_left_out(url, spark, given):
    job = counts_of(spark, given, opaque(url))

    def function(rows: DataFrame, batch_id: int) -> None:
        try:
            job(rows.drop("bytes") if batch_id == 1 else rows, batch_id)
        except Exception:
            if batch_id > 1:
                raise

    with pytest.raises(MissingBatchesError, match=r"for batch 1 failed \(StateSchemaError\), the foreachBatch"):
        run(spark, given, function)
    shutil.rmtree(given.checkpoint)
    Path(url.removeprefix("sqlite:///")).unlink()
    job = counts_of(spark, given, opaque(url))
    with pytest.raises(Exception, match="the batch brings the column"):
        run(spark, given, with_empty_batches(function, job))


def test_rows_gathered_over_two_batches_count_with_the_second(url, spark, given):
    job, kept = counts_of(spark, given, opaque(url)), []

    def function(rows: DataFrame, batch_id: int) -> None:
        if batch_id % 2 == 0:
            kept.append(rows.localCheckpoint())
        else:
            job(kept.pop().unionByName(rows), batch_id)

    run(spark, given, with_empty_batches(function, job))
    assert contents(url, "visits") == given.truth()


# -- calls by hand


def test_a_number_that_counts_already_is_refused_by_hand(url, spark):
    frame = spark.createDataFrame([("a", 1)], "user_id string, bytes bigint")

    def job(**options: Any) -> Any:
        return newStream("fill", frame).groupBy("user_id").persistentAggregate(opaque(url, **options), visits=Count())

    fill = job()
    fill(frame, 0)
    for again in (fill, job()):
        with pytest.raises(StaleBatchError, match="counts batch 0 of a call by hand already"):
            again(frame, 0)
    job(repeat="allowed")(frame, 0)
    job()(frame, 1)
    assert contents(url, "fill") == {("a",): {"visits": 2}}
