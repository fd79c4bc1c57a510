"""Linear DRPC: Storm's own examples over running topologies, many at once, and what fails."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from processes import FIXTURES, job
from pyspark.sql import functions as F
from servers import free_port

from mapstate import Count, TopN, newStream, opaque
from mapstate.drpc import DRPCClient
from mapstate.errors import ConfigurationError, DRPCError, UsageError
from mapstate.spark import DRPCServer, Stream
from mapstate.spark.drpc_server import _Jobs, _Request
from mapstate.testing import wait_for

pytestmark = pytest.mark.spark

SENTENCES = (
    "the cow jumped over the moon",
    "the man went to the store and bought some candy",
    "four score and seven years ago",
    "how many apples can you eat",
)


@contextmanager
def serving(spark: Any, **functions: Any):
    server = DRPCServer(spark, port=0, **functions.pop("options", {}))
    for name, steps in functions.items():
        server.function(name, steps)
    with server, DRPCClient("127.0.0.1", server.port) as client:
        yield client


def words_of(requests: Stream) -> Stream:
    """A row per word of a request."""
    return requests.transform(lambda rows: rows.select("request_id", F.explode(F.split("args", " ")).alias("word")))


@pytest.fixture
def counts(spark, tmp_path: Path, each_url: str):
    """The words of Storm's sentences, counted by a query that runs."""
    (tmp_path / "input").mkdir()
    for at, sentence in enumerate(SENTENCES):
        (tmp_path / "input" / f"{at}.txt").write_text(f"{sentence}\n")
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(tmp_path / "input"))
    words = newStream("words", lines).transform(
        lambda rows: rows.select(F.explode(F.split("value", " ")).alias("word"))
    )
    counts = words.groupBy("word").persistentAggregate(opaque(each_url), count=Count())
    query = counts.start(str(tmp_path / "checkpoint"))
    query.processAllAvailable()
    yield counts
    query.stop()


def test_the_sum_of_the_counts_of_some_words(spark, counts):
    """Storm's word count: "the man" has been said five times, in two words."""

    def total(requests: Stream) -> Stream:
        found = words_of(requests).stateQuery(counts, "word", "count")
        return found.transform(
            lambda rows: rows.groupBy("request_id").agg(F.coalesce(F.sum("count"), F.lit(0)).alias("sum"))
        )

    with serving(spark, words=total) as client:
        assert client.execute("words", "the man") == [{"sum": 5}]
        assert client.execute("words", "cat") == [{"sum": 0}]
        assert client.execute("words", "cat dog the man four") == [{"sum": 6}]


def test_reach(spark, counts):
    """The different words of a request, of which somebody has said any."""

    def reach(requests: Stream) -> Stream:
        found = words_of(requests).stateQuery(counts, "word", "count")
        return found.transform(
            lambda rows: rows.where("count > 0").groupBy("request_id").agg(F.countDistinct("word").alias("reach"))
        )

    with serving(spark, reach=reach) as client:
        assert client.execute("reach", "the the cow nobody") == [{"reach": 2}]
        assert client.execute("reach", "nobody") == []  # a request without rows


def test_the_first_of_many(spark, counts):
    def top(requests: Stream) -> Stream:
        found = words_of(requests).stateQuery(counts, "word", "count")
        return found.groupBy("request_id").aggregate(top=TopN(2, "count"))

    with serving(spark, top=top) as client:
        assert client.execute("top", "cow the and moon") == [{"top": [4, 2]}]
        assert client.execute("top", "moon nobody") == [{"top": [1]}]


def test_two_hundred_at_once_are_few_jobs(spark, counts):
    jobs = itertools.count()

    def count(requests: Stream) -> Stream:
        next(jobs)
        return requests.stateQuery(counts, "args", "count")

    with serving(spark, count=count) as client, ThreadPoolExecutor(200) as pool:
        words = ["the", "cow", "nobody", "four"] * 50
        found = list(pool.map(lambda word: client.execute("count", word), words))
    assert [[row["count"] for row in one] for one in found] == [[4], [1], [None], [1]] * 50
    assert next(jobs) < 100


def test_a_request_fails_for_its_own_arguments_only(spark):
    def number(requests: Stream) -> Stream:
        number = "IF(args RLIKE '^[0-9]+$', CAST(args AS INT), RAISE_ERROR('no number')) AS number"
        return requests.transform(lambda rows: rows.selectExpr("request_id", number))

    def raises(_: Stream) -> Stream:
        raise RuntimeError("no function today")

    def stops(_: Stream) -> Stream:
        raise StopIteration

    with serving(spark, number=number, raises=raises, stops=stops) as client, ThreadPoolExecutor(40) as pool:

        def ask(text: str) -> Any:
            try:
                return client.execute("number", text)
            except DRPCError as error:
                return error.status

        texts = [str(at) if at % 13 else "thirteen" for at in range(1, 120)]
        expected = [[{"number": int(text)}] if text.isdigit() else 500 for text in texts]
        assert list(pool.map(ask, texts)) == expected
        with pytest.raises(DRPCError, match="no function today"):
            client.execute("raises")
        with pytest.raises(DRPCError, match="StopIteration"):
            client.execute("stops")
        with pytest.raises(DRPCError, match="There is no function"):
            client.execute("other")


def test_a_job_for_which_nobody_waits_is_ended(spark, tmp_path: Path):
    gone, is_over = threading.Event(), tmp_path / "over"

    def sleeps(requests: Stream) -> Stream:
        def sleep(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            end = time.monotonic() + 60
            while time.monotonic() < end and not is_over.exists():  # this session lets it go on after its job
                time.sleep(0.1)
            yield from batches

        return requests.transform(lambda rows: rows.mapInArrow(sleep, rows.schema))

    def late(requests: Stream) -> Stream:
        """Spark has no job yet when the request ends."""
        gone.wait(60)
        return sleeps(requests)

    server = DRPCServer(spark, port=0, timeout=3.0).function("sleeps", sleeps).function("late", late)
    with server, DRPCClient("127.0.0.1", server.port) as client:
        for name in ("late", "sleeps"):
            with pytest.raises(DRPCError) as caught:
                client.execute(name, "x")
            assert caught.value.status == 504
            gone.set()
            wait_for(lambda: not any(jobs._running for jobs in server._jobs), "the end of the job", 30)
    is_over.touch()  # else its process keeps a core of Spark's from the tests that follow


def test_no_half_of_a_job_that_failed_runs_for_nobody(spark):
    loop, calls = asyncio.new_event_loop(), itertools.count(1)
    both = [_Request("x", loop, loop.create_future()) for _ in range(2)]

    def fails(_: Stream) -> Stream:
        if next(calls) == 2:  # the first half
            for request in both:
                request.answer.cancel()
        raise RuntimeError("not today")

    _Jobs(spark, "fails", fails)._run(both)
    assert next(calls) == 3
    loop.close()


def test_a_spark_that_does_not_answer_the_end_of_a_job_holds_up_nobody(spark, monkeypatch):
    go_on, is_asked = threading.Event(), threading.Event()

    def held(requests: Stream) -> Stream:
        is_asked.wait(30)
        return requests

    server = DRPCServer(spark, port=0, timeout=5.0).function("held", held)

    def cancel(_: str) -> None:
        is_asked.set()
        go_on.wait(60)

    monkeypatch.setattr(server._jobs[0]._access, "cancel", cancel)
    with server, DRPCClient("127.0.0.1", server.port) as client:
        with pytest.raises(DRPCError):
            client.execute("held", "x")
        wait_for(is_asked.is_set, "the end of the job to be asked for")

        def is_answered() -> bool:
            with suppress(DRPCError):  # a busy machine may take longer than five seconds for one
                return client.execute("held", "y") == [{"args": "y"}]
            return False

        wait_for(is_answered, "an answer while the end of the first job hangs")
    go_on.set()  # the server has stopped meanwhile


def test_requests_whose_time_is_over_do_not_wait_for_the_next_job(spark):
    go_on = threading.Event()

    def held(requests: Stream) -> Stream:
        go_on.wait(60)
        return requests

    server = DRPCServer(spark, port=0, timeout=1.0).function("held", held)
    with server, DRPCClient("127.0.0.1", server.port) as client, ThreadPoolExecutor(5) as pool:
        for asked in [pool.submit(client.execute, "held", "x") for _ in range(5)]:
            with pytest.raises(DRPCError) as caught:
                asked.result()
            assert caught.value.status == 504
        assert server._jobs[0]._waiting == []
        go_on.set()


def test_a_function_that_ends_its_thread_is_a_function_that_fails(spark):
    def leaves(_: Stream) -> Stream:
        sys.exit("wrong arguments")

    with serving(spark, leaves=leaves) as client:
        for _ in range(2):
            with pytest.raises(DRPCError, match="wrong arguments"):
                client.execute("leaves", "x")


def test_more_than_may_wait_are_refused(spark):
    go_on = threading.Event()

    def held(requests: Stream) -> Stream:
        go_on.wait(30)
        return requests

    with serving(spark, held=held, options={"most_waiting": 5}) as client, ThreadPoolExecutor(20) as pool:

        def ask(_: int) -> int:
            try:
                client.execute("held", "x")
            except DRPCError as error:
                return int(error.status)
            return 200

        asked = [pool.submit(ask, at) for at in range(20)]
        wait_for(lambda: sum(one.done() for one in asked) == 15, "fifteen refusals", 20)
        go_on.set()
        assert sorted(one.result() for one in asked) == [200] * 5 + [503] * 15


def test_wrong_declarations_are_refused(spark):
    with pytest.raises(UsageError, match="token"):
        DRPCServer(spark, host="0.0.0.0")
    server = DRPCServer(spark, port=0, token="s3cr3t-word").function("same", lambda requests: requests)
    with pytest.raises(ConfigurationError, match="already"):
        server.function("same", lambda requests: requests)
    with pytest.raises(ConfigurationError):
        server.function("a/b", lambda requests: requests)
    server.function("bare", lambda requests: requests.transform(lambda rows: rows.select("args")))
    with server:
        with pytest.raises(UsageError, match="runs already"):
            server.start()
        with pytest.raises(ConfigurationError, match="cannot listen"):
            DRPCServer(spark, port=server.port).start()
        with DRPCClient("127.0.0.1", server.port) as client, pytest.raises(DRPCError, match="token"):
            client.execute("same")
        with DRPCClient("127.0.0.1", server.port, token="s3cr3t-word") as client:
            assert client.execute("same", "ü") == [{"args": "ü"}]
            with pytest.raises(DRPCError, match="no column request_id"):
                client.execute("bare")
    with pytest.raises(UsageError, match="it has run"):
        server.start()
    with DRPCClient("127.0.0.1", 1) as client, pytest.raises(DRPCError) as caught:
        client.execute("same")
    assert caught.value.status is None


def test_rows_of_no_request_are_an_error_and_no_silence(spark):
    """They vanished; and a row whose id was made up could be the answer of another request."""
    kept = list[str]()

    def made_up(requests: Stream) -> Stream:
        return requests.transform(lambda rows: rows.select(F.lit("0").alias("request_id"), "args"))

    def null(requests: Stream) -> Stream:
        return requests.transform(lambda rows: rows.select(F.lit(None).cast("string").alias("request_id"), "args"))

    def of_the_job_before(requests: Stream) -> Stream:
        ids = [row.request_id for row in requests.toDF().collect()]
        kept.append(ids[0])
        return requests.transform(lambda rows: rows.select(F.lit(kept[0]).alias("request_id"), "args"))

    def more(requests: Stream) -> Stream:
        return requests.transform(lambda rows: rows.union(rows.selectExpr("request_id || 'x'", "args")))

    def listed(requests: Stream) -> Stream:
        return requests.transform(lambda rows: rows.select(F.array("request_id").alias("request_id"), "args"))

    functions = {"made_up": made_up, "null": null, "before": of_the_job_before, "more": more, "listed": listed}
    with serving(spark, **functions) as client:
        for name, shown in (("made_up", "'0'"), ("null", "'None'"), ("more", "x'"), ("listed", "-0'\\]\"")):
            with pytest.raises(DRPCError, match=f"request_id .*{shown}, which none of its requests has") as caught:
                client.execute(name, "x")
            assert caught.value.status == 409
        assert client.execute("before", "x") == [{"args": "x"}]
        with pytest.raises(DRPCError, match="none of its requests"):
            client.execute("before", "x")


def test_two_columns_of_one_name_are_an_error_because_an_object_has_each_once(spark):
    """The first of them was left out."""

    def twice(requests: Stream) -> Stream:
        return requests.transform(lambda rows: rows.select("request_id", F.lit(1).alias("n"), F.lit("b").alias("n")))

    def two_ids(requests: Stream) -> Stream:
        return requests.transform(lambda rows: rows.select(F.lit("0").alias("request_id"), "request_id"))

    with serving(spark, twice=twice, two_ids=two_ids) as client:
        for name, column in (("twice", "n"), ("two_ids", "request_id")):
            with pytest.raises(DRPCError, match=f"'{column}', which the rows have more than once") as caught:
                client.execute(name)
            assert caught.value.status == 409


@pytest.mark.slow
def test_a_driver_that_is_killed_under_load_is_an_error_and_the_next_one_answers(tmp_path: Path, rounds):
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "0.csv").write_text("a,1\na,1\nb,1\n")
    options = {"url": f"sqlite:///{tmp_path}/state.db", "input": str(tmp_path / "input"), "port": free_port()}
    options["checkpoint"] = str(tmp_path / "checkpoint")
    found: list[Any] = []
    asked: list[Any] = []
    stop = threading.Event()

    def ask(client: DRPCClient) -> Any:
        try:
            return client.execute("visits", "a")
        except DRPCError as error:
            return error.status

    def load(client: DRPCClient) -> None:
        while not stop.is_set():
            found.append(ask(client))
            if found[-1] is None:
                stop.wait(0.1)

    with DRPCClient("127.0.0.1", options["port"]) as client, ThreadPoolExecutor(20) as pool:
        try:
            for kills in rounds((True, False), (True, True)):
                with job(FIXTURES / "drpc_job.py", options, tmp_path / "log") as process:
                    wait_for(
                        lambda: process.poll() is not None or ask(client) == [{"args": "a", "visits": 2}],
                        "an answer",
                        120,
                    )
                    assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                    asked = asked or [pool.submit(load, client) for _ in range(20)]
                    if not kills:
                        break
                    before = len(found)
                    wait_for(lambda: len(found) > before + 100, "a hundred answers", 60)  # noqa: B023
                    os.killpg(process.pid, signal.SIGKILL)
                    before = len(found)
                    wait_for(lambda: found[before + 20 :].count(None) > 20, "errors", 60)  # noqa: B023
        finally:
            stop.set()
        for one in asked:
            one.result()
    assert {str(one) for one in found} <= {str([{"args": "a", "visits": 2}]), "None", "500"}
