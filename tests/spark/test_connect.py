"""Spark Connect: a server in a process of its own, the tests of classic PySpark against it, and who dies there."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyspark
import pytest
import spark_fixtures
import visits_job
from cases import full
from connect_server import ConnectServer, connect_server
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, Visits, finish, run_job

# These run here once more, with the session of this module; others in test_connect_once_more.py.
from test_keys_beside_spark import (  # noqa: F401
    test_what_cannot_be_kept_apart_is_refused_when_it_is_declared,
)

from mapstate import Count, Max, Sum, Topology, errors, newStream, opaque, open_reader
from mapstate.spark import with_empty_batches
from mapstate.testing import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.since("4.0", "Spark Connect")]

CONF = {
    "spark.sql.adaptive.coalescePartitions.enabled": "false",
    "spark.sql.collation.trim.enabled": "true",  # also in the parser of a server of 4.0
    "spark.sql.session.timeZone": "America/St_Johns",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    with connect_server(tmp_path_factory.mktemp("server"), **CONF) as one:
        yield one


@pytest.fixture(scope="module")
def spark(server: ConnectServer) -> Iterator[SparkSession]:
    session = visits_job.remote_session(server.url)
    assert session.version == pyspark.__version__, "the server is of another PySpark"
    yield session
    session.stop()
    for name in ("SPARK_CONNECT_MODE_ENABLED", "SPARK_REMOTE"):  # left behind, and no classic session starts then
        os.environ.pop(name, None)


@pytest.fixture
def each_url(url: str) -> str:
    return url


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.redis), pytest.param("sqlite", marks=pytest.mark.full)])
def url(request: Any, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")


def counts_of(visits: Visits, spark: SparkSession, url: str, **options: Any) -> Any:
    stream = newStream("visits", visits.stream(spark)).groupBy("user_id")
    return stream.persistentAggregate(opaque(url, **options), visits=Count(), bytes=Sum("bytes"))


def contents(url: str) -> dict[Any, Any]:
    return spark_fixtures.contents(url, "visits")


def rows_of(batch: int) -> list[tuple[str, int]]:
    return [(f"u{(batch * 3 + n) % 16}", n) for n in range(24)]


def options_of(visits: Visits, url: str, master: str, **options: Any) -> dict[str, Any]:
    return {
        "url": url,
        "input": str(visits.input),
        "checkpoint": str(visits.checkpoint),
        "master": master,
        "chunk_size": 2,
    } | options


def fault(method: str, **fields: Any) -> list[Any]:
    return ["Kill", {"name": "kill", "method": method, **fields}]


def at_begin(batch: int, **fields: Any) -> list[Any]:
    return fault("swap", where=["Begins", batch], **fields)


def at_commit(batch: int, **fields: Any) -> list[Any]:
    return fault("swap", where=["Commits", batch], **fields)


def at_put(_: int, **fields: Any) -> list[Any]:
    return fault("multi_put", **({"call": 2} | fields))


@contextmanager
def client(options: dict[str, Any]) -> Iterator[None]:
    """A client at work, that is killed at the end of the block."""
    command = [sys.executable, str(Path(visits_job.__file__)), json.dumps(options)]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


STEPS: dict[str, tuple[Any, dict[str, bool]]] = {
    "before the commit": (at_commit, {"after": False}),
    "in the writes": (at_put, {"after": True}),
    "after the commit": (at_commit, {"after": True}),
    "after the begin": (at_begin, {"after": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, full(len(STEPS))])
def test_the_server_is_killed_at_a_step_and_replays_hold_other_rows(number, url, visits, tmp_path):
    """SIGKILL of JVM and workers, and of the client; another client starts the query on a new server."""
    steps = random.sample([*STEPS.items()], number)
    with connect_server(tmp_path) as server:
        visits.put("0", rows_of(0))
        assert run_job(options_of(visits, url, server.url)).returncode == 0
        for batch, (name, (step, fields)) in enumerate(steps, 1):
            visits.put(f"{batch}", rows_of(batch))
            folder = tmp_path / f"fault-{batch}"
            folder.mkdir()
            dies = options_of(visits, url, server.url, folder=str(folder))
            with client(dies | {"faults": [step(batch, who=server.pgid, **fields)]}):  # it would try for minutes
                wait_for(lambda: not server.is_alive, f"the server that is killed {name}", 120)
            assert (folder / "kill").exists(), name
            with suppress(errors.StateNotFoundError), open_reader(url, "visits") as reader:
                ledger = reader.ledger()
                counts = ledger.last_commit is not None and ledger.last_commit.batch_id == batch
                assert counts == (name == "after the commit"), name
            if name != "after the commit":  # then its rows count, and a replay brings them again
                visits.put(f"{batch}", [*rows_of(batch)[5:], (f"new{batch}", 7)])
            server.start()
            finished = run_job(options_of(visits, url, server.url))
            assert finished.returncode == 0, finished.stderr
            assert contents(url) == visits.truth(), name


def test_the_worker_of_a_query_is_killed_and_the_query_starts_again_on_the_same_server(
    url, server, spark, visits, tmp_path
):
    for batch, (name, (step, fields)) in enumerate(itertools.islice(STEPS.items(), 2)):
        visits.put(f"{batch}", rows_of(batch))
        folder = tmp_path / f"fault-{batch}"
        folder.mkdir()
        options = options_of(visits, url, server.url, folder=str(folder))
        dies = visits_job.started(spark, options | {"faults": [step(batch, **fields)]})
        if step is at_put:  # of a task: the batch begins anew in the same run
            finish(dies)
        else:
            with pytest.raises(StreamingQueryException):
                dies.awaitTermination(120)
            visits.put(f"{batch}", [*rows_of(batch)[5:], (f"new{batch}", 7)])
        assert (folder / "kill").exists(), name
        assert server.is_alive
        finish(visits_job.started(spark, options))
        assert contents(url) == visits.truth(), name


def test_a_query_goes_on_when_its_client_is_killed_and_another_client_finds_and_stops_it(server, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    for batch in range(6):
        visits.put(f"{batch}", rows_of(batch))

    def has_begun() -> bool:
        with suppress(errors.StateNotFoundError), open_reader(url, "visits") as reader:
            return reader.ledger().last_commit is not None
        return False

    with client(options_of(visits, url, server.url)):
        wait_for(has_begun, "the first batch", 120)
    wait_for(lambda: contents(url) == visits.truth(), "the batches that come without a client", 120)
    finished = run_job(options_of(visits, url, server.url))  # which has nothing to do
    assert finished.returncode == 0, finished.stderr
    assert contents(url) == visits.truth()


def test_the_ledger_says_which_query_and_which_run_a_batch_is_of(url, spark, visits):
    visits.put("0", [("a", 1)])
    job = counts_of(visits, spark, url)
    query = job.start(visits.checkpoint, trigger=AVAILABLE)
    finish(query)
    with open_reader(url, "visits") as reader:
        commit = reader.ledger().last_commit
    assert (commit.owner, commit.run) == (query.id, query.runId)
    assert commit.plan is not None
    visits.put("1", [("a", 1), ("b", 5)])
    again = counts_of(visits, spark, url).start(visits.checkpoint, trigger=AVAILABLE)
    finish(again)
    with open_reader(url, "visits") as reader:
        assert reader.ledger().last_commit.run == again.runId != query.runId
    assert contents(url) == visits.truth()


def test_another_checkpoint_is_another_query_and_is_refused(url, spark, visits, tmp_path):
    visits.put("0", [("a", 1)])
    finish(counts_of(visits, spark, url).start(visits.checkpoint, trigger=AVAILABLE))
    other = counts_of(visits, spark, url)
    with pytest.raises(StreamingQueryException, match="StateOwnershipError"):
        other.start(tmp_path / "other", trigger=AVAILABLE).awaitTermination(120)
    assert isinstance(other.last_error, errors.StateOwnershipError)
    assert other.last_error.facts["owner"] in other.last_error.message
    assert contents(url) == visits.truth()


def test_expressions_and_a_state_that_follows_another(url, spark, visits):
    for batch in range(3):
        visits.put(f"{batch}", rows_of(batch))
    longest = newStream("visits", visits.stream(spark)).groupBy("user_id")
    counts = longest.persistentAggregate(
        opaque(url, name="by_user"), visits=Count(), more=Sum(F.col("bytes") + 1), most=Max(F.col("bytes") + 1)
    )
    by_visits = counts.newValuesStream().groupBy("visits").persistentAggregate(opaque(url, name="users"), n=Count())
    finish(by_visits.start(visits.checkpoint, trigger=AVAILABLE))
    users = spark_fixtures.contents(url, "by_user")
    truth = visits.truth()
    assert {key: value["visits"] for key, value in users.items()} == {key: of["visits"] for key, of in truth.items()}
    assert {key: value["more"] for key, value in users.items()} == {
        key: of["bytes"] + of["visits"] for key, of in truth.items()
    }
    found = spark_fixtures.contents(url, "users")
    numbers = [of["visits"] for of in truth.values()]
    assert found == {(number,): {"n": numbers.count(number)} for number in set(numbers)}


def test_two_different_expressions_of_one_name_are_refused_and_equal_ones_are_one(spark, visits):
    stream = newStream("visits", visits.stream(spark)).groupBy("user_id")
    shown = F.when(F.col("bytes") > 1, F.lit("x"))
    assert stream.persistentAggregate(
        opaque("sqlite:///unused.db"), a=Max(shown), b=Max(F.when(F.col("bytes") > 1, F.lit("x")))
    )
    assert stream.persistentAggregate(opaque("sqlite:///unused.db"), of_column=Max(F.col("bytes")))
    with pytest.raises(errors.DuplicateNameError):
        stream.persistentAggregate(
            opaque("sqlite:///unused.db"),
            a=Max(F.concat(F.lit("user_id"), F.col("user_id"))),
            b=Max(F.concat(F.col("user_id"), F.col("user_id"))),
        )


def test_a_state_is_a_dataframe_there_too(url, spark, visits):
    visits.put("0", rows_of(0))
    finish(counts_of(visits, spark, url).start(visits.checkpoint, trigger=AVAILABLE))
    if " " in sys.executable:  # then Spark looks for no data sources: docs/dataframes.md
        from mapstate.spark.source import MapStateDataSource

        spark.dataSource.register(MapStateDataSource)
    rows = spark.read.format("mapstate").options(url=url, state="visits").load().collect()
    assert {(row.user_id,): {"visits": row.visits, "bytes": row.bytes} for row in rows} == visits.truth()


def test_functions_after_a_batch_run_beside_the_server(url, spark, visits, tmp_path):
    visits.put("0", [("a", 1), ("b", 2)])
    place = str(tmp_path / "seen")

    def keep(rows: Any, batch_id: int) -> None:
        Path(place).write_text(f"{batch_id}: {sorted(row['user_id'] for row in rows.collect())}, {os.getpid()}")

    counts = counts_of(visits, spark, url).newValuesStream().foreachBatch(keep)
    finish(counts.start(visits.checkpoint, trigger=AVAILABLE))
    said, _, pid = Path(place).read_text().rpartition(", ")
    assert said == "0: ['a', 'b']"
    assert int(pid) != os.getpid()


def test_a_batch_given_by_hand_is_of_no_query(url, spark):
    frame = spark.createDataFrame([("a", 1), ("b", 2), ("a", 3)], visits_job.SCHEMA)
    by_user = newStream("visits", frame).groupBy("user_id")
    by_user.persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))(frame, 0)
    assert contents(url) == {("a",): {"visits": 2, "bytes": 4}, ("b",): {"visits": 1, "bytes": 2}}


def test_rows_that_are_aggregated_behind_the_shuffle_alone_count_the_same(url, spark, visits):
    for batch in range(2):
        visits.put(str(batch), rows_of(batch))
    finish(counts_of(visits, spark, url, partial_aggregation="never").start(visits.checkpoint, trigger=AVAILABLE))
    with open_reader(url, "visits") as reader:
        assert [report.partial_aggregation for report in reader.reports()] == [False, False]
    assert contents(url) == visits.truth()


def test_a_quarantine_keeps_the_rows_of_a_batch_that_fails(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", [("a", 1)])
    visits.put("1", [("a", 2), ("bad", 0)])
    visits.put("2", [("a", 3)])
    topology = Topology("site", on_poison="quarantine", quarantine=str(tmp_path / "kept"))
    checked = F.when(F.col("user_id") == "bad", F.raise_error(F.lit("no such user"))).otherwise(F.col("user_id"))
    stream = topology.newStream("visits", visits.stream(spark)).transform(lambda df: df.withColumn("user_id", checked))
    stream.groupBy("user_id").persistentAggregate(opaque(url, max_attempts=1), visits=Count(), bytes=Sum("bytes"))
    finish(topology.start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url) == {("a",): {"visits": 2, "bytes": 4}}
    kept = spark.read.parquet(str(tmp_path / "kept")).collect()
    assert sorted((row["user_id"], row["batch_id"]) for row in kept) == [("a", 1), ("bad", 1)]


def test_a_place_without_a_scheme_is_where_the_server_has_its_files(visits, tmp_path):
    """The worker has a disk, and the server's own file system is another one: there is a decoy on the disk."""
    for name in ("far", "server"):
        (tmp_path / name).mkdir()
    place, url = f"{tmp_path}/near/checkpoint", f"sqlite:///{tmp_path}/state.db"
    Path(place).mkdir(parents=True)
    (Path(place) / "metadata").write_text('{"id":"a decoy"}')
    link = f"spark.hadoop.fs.viewfs.mounttable.here.link.{tmp_path}/near"
    conf = {"spark.hadoop.fs.defaultFS": "viewfs://here/", link: f"file://{tmp_path}/far"}
    visits.put("0", [("a", 1), ("b", 2)])
    with connect_server(tmp_path / "server", **CONF, **conf) as far:
        spark = visits_job.remote_session(far.url)
        stream = newStream("visits", spark.readStream.schema(visits_job.SCHEMA).csv(f"file://{visits.input}"))
        counts = stream.groupBy("user_id").persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))
        finish(counts.start(place, trigger=AVAILABLE))
        visits.put("1", [("a", 3)])
        finish(counts.start(place, trigger=AVAILABLE))
        topology = Topology("site", on_poison="quarantine", quarantine=f"{tmp_path}/near/kept")
        kept = topology.newStream("visits", stream.df).groupBy("user_id")
        kept.persistentAggregate(opaque(url, name="kept"), visits=Count())
        with pytest.raises(StreamingQueryException, match="pyarrow cannot reach viewfs://"):
            topology.start(f"{tmp_path}/near/other", trigger=AVAILABLE).awaitTermination(120)
        spark.stop()
    assert contents(url) == visits.truth()
    with open_reader(url, "visits") as reader:
        ledger = reader.ledger()
    assert ledger.owner == json.loads((tmp_path / "far" / "checkpoint" / "metadata").read_text())["id"]
    assert "newest" in ledger.last_commit.offsets
    with pytest.raises(errors.StateNotFoundError), open_reader(url, "kept") as reader:
        reader.ledger()


def test_what_cannot_hold_is_refused_before_anything_is_written(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", [("a", 1)])
    counts = counts_of(visits, spark, url)
    with pytest.raises(errors.UsageError, match="needs a checkpointLocation"):
        counts.start(trigger=AVAILABLE)
    with pytest.raises(errors.UsageError, match="starting_offsets from classic PySpark"):
        counts.starting_offsets()
    with pytest.raises(errors.UsageError, match="increments or totals"):
        counts.start(visits.checkpoint, trigger=AVAILABLE, outputMode="update")
    with pytest.raises(errors.ConfigurationError, match="lives in one process"):
        counts_of(visits, spark, "memory://").start(visits.checkpoint, trigger=AVAILABLE)
    query = counts_of(visits, spark, f"sqlite:///{tmp_path}/other.db")
    finish(query.start(tmp_path / "other", trigger=AVAILABLE))  # after which it is of no checkpoint again
    writer = visits.stream(spark).writeStream
    for function in (query, counts, lambda rows, _: counts(rows, 0), with_empty_batches(counts, counts)):
        with pytest.raises(errors.UsageError, match="cannot tell which query it serves"):
            writer.foreachBatch(function)

    def of_its_own(rows: Any, batch_id: int) -> None:
        newStream("visits", rows).persistentAggregate(opaque(url), visits=Count())(rows, batch_id)

    by_hand = writer.foreachBatch(of_its_own).option("checkpointLocation", str(visits.checkpoint))
    with pytest.raises(StreamingQueryException, match="cannot tell which query it serves"):
        by_hand.trigger(availableNow=True).start().awaitTermination(120)
    topology = Topology("site")
    stream = topology.newStream("visits", visits.stream(spark)).groupBy("user_id")
    stream.persistentAggregate(opaque(url), visits=Count())
    with pytest.raises(errors.UsageError, match="run holds and spreads batches"):
        topology.run(str(visits.checkpoint), store=url)
    with pytest.raises(errors.StateNotFoundError), open_reader(url, "visits"):
        pass


CLIENT_ALONE = "import sys\nsys.modules.update(dict.fromkeys(['py4j', 'pyspark.core', 'pyspark.sql.classic']))\n"
"""What the distribution pyspark-client does not have."""


@pytest.mark.parametrize("lacks", ["", CLIENT_ALONE], ids=["pyspark", "pyspark-client"])
def test_the_page_of_the_docs_runs(lacks, server, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "visits.csv").write_text("user-42,500\nuser-7,1\nuser-42,10\nuser-42,2\n")
    page = Path(__file__).resolve().parents[2] / "docs" / "connect.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names = {"server": server.url, "logs": str(logs), "checkpoint": str(tmp_path / "checkpoint")}
    names["url"] = f"sqlite:///{tmp_path}/state.db"
    program = lacks + "".join(f"{name} = {value!r}\n" for name, value in names.items()) + code
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    with open_reader(names["url"], "visits") as state:
        assert state.get("user-7") == {"visits": 1}
