"""A topology that runs under its control record, and obeys."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql.streaming.query import StreamingQuery
from spark_fixtures import contents
from visits_job import SCHEMA

from mapstate import Count, Topology, opaque
from mapstate.errors import AlreadyAliveError, ConfigurationError, DataError, NotAliveError, StoreLostError, UsageError
from mapstate.operations import control
from mapstate.operations.control import Control, list_topologies
from mapstate.protocol import control as rules
from mapstate.reader import open_reader
from mapstate.spark.streams import running
from mapstate.spark.streams.query import Startable
from mapstate.testing import wait_for

pytestmark = pytest.mark.spark

POLL = 0.05


class Run:
    """A topology over CSV files, in a thread. Files are numbered, one visit per line."""

    def __init__(self, spark: Any, folder: Path, url: str):
        self.spark, self.folder, self.url = spark, folder, url
        self.input = folder / "input"
        self.input.mkdir(exist_ok=True)
        self.files = 0
        self.held = threading.Event()
        self.entered = threading.Event()
        self.held.set()
        self.fails = False
        self.error: BaseException | None = None

    def put(self, users: str) -> None:
        """One more file, which is there at once and whole."""
        written = self.folder / "written"
        written.write_text("".join(f"{user},1\n" for user in users))
        written.rename(self.input / f"{self.files}.csv")
        self.files += 1

    def topology(self) -> Topology:
        rows = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).csv(str(self.input))
        topology = Topology("site")

        def wait(frame: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():  # a batch, and no declaration
                self.entered.set()
                self.held.wait(60)
                if self.fails:
                    raise ValueError("a function of the user's")
            return frame

        stream = topology.newStream("visits", rows)
        counted = stream.transform(wait).groupBy("user_id")
        counted.persistentAggregate(opaque(self.url, name="visits"), visits=Count())
        return topology

    def start(self, **options: Any) -> threading.Thread:
        topology = self.topology()

        def run() -> None:
            try:
                topology.run(str(self.folder / "checkpoint"), store=self.url, poll=POLL, **options)
            except BaseException as error:  # noqa: BLE001  the test looks at it
                self.error = error

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def counts(self) -> dict[str, int]:
        try:
            return {key[0]: value["visits"] for key, value in contents(self.url, "visits").items()}
        except LookupError:
            return {}

    def until(self, expected: dict[str, int]) -> None:
        wait_for(lambda: self.counts() == expected or self.error is not None, str(expected), 60)
        assert self.error is None, self.error
        assert self.counts() == expected

    def streams(self) -> list[Any]:
        return [query for query in self.spark.streams.active if query.isActive]


@contextmanager
def ended(run: Run, thread: threading.Thread):
    """The run is killed at the end, whatever the test did."""
    try:
        yield
    finally:
        run.held.set()
        if thread.is_alive():
            control.kill(run.url, "site", wait=0)
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def run(spark, tmp_path: Path, each_url: str) -> Run:
    return Run(spark, tmp_path, each_url)


def test_an_operator_stops_it_lets_it_go_on_and_ends_it(run: Run):
    run.put("ab")
    thread = run.start()
    with ended(run, thread):
        run.until({"a": 1, "b": 1})
        (one,) = list_topologies(run.url)
        assert one.record is not None
        assert (one.name, one.record.status, one.record.states) == ("site", "ACTIVE", ("visits",))
        assert control.deactivate(run.url, "site", timeout=120).is_obeyed
        assert run.streams() == []
        run.put("aa")
        assert control.deactivate(run.url, "site", timeout=120).is_obeyed  # once more
        assert run.counts() == {"a": 1, "b": 1}
        assert control.activate(run.url, "site", timeout=120).is_obeyed
        run.until({"a": 3, "b": 1})
        done = control.kill(run.url, "site", wait=30)
        assert (done.is_obeyed, done.record.status) == (True, "REMOVED")
        thread.join(60)
        assert run.error is None
        assert run.streams() == []
    assert list_topologies(run.url) == []
    for command in (control.activate, control.deactivate, control.kill, control.topology):
        with pytest.raises(NotAliveError):
            command(run.url, "site")
    run.put("b")
    thread = run.start()  # a new one, which goes on from the checkpoint
    with ended(run, thread):
        run.until({"a": 3, "b": 2})


def test_the_batch_under_way_ends_before_it_is_inactive(run: Run):
    run.held.clear()
    run.put("a")
    run.put("b")
    thread = run.start()
    with ended(run, thread):
        assert run.entered.wait(60)
        assert not control.deactivate(run.url, "site", timeout=0.5).is_obeyed
        assert control.topology(run.url, "site").status == "INACTIVE"
        run.held.set()
        assert control.deactivate(run.url, "site", timeout=120).is_obeyed
        assert run.counts() == {"a": 1}
        with open_reader(run.url, "visits") as reader:
            assert reader.ledger().in_flight is None
        assert control.activate(run.url, "site", timeout=120).is_obeyed
        run.until({"a": 1, "b": 1})


def test_a_word_that_is_taken_back_before_it_is_obeyed(run: Run):
    run.held.clear()
    run.put("a")
    run.put("b")
    thread = run.start()
    with ended(run, thread):
        assert run.entered.wait(60)
        assert not control.deactivate(run.url, "site", timeout=0.3).is_obeyed
        assert control.activate(run.url, "site", timeout=120).is_obeyed
        run.held.set()
        run.until({"a": 1, "b": 1})


def test_a_kill_gives_up_the_batch_that_takes_too_long(run: Run):
    """What is given up does not count, and is counted once by the next run."""
    run.held.clear()
    run.put("a")
    thread = run.start()
    with ended(run, thread):
        assert run.entered.wait(60)
        assert not control.kill(run.url, "site", wait=0.2, timeout=0.5).is_obeyed  # a function of the user's hangs
        assert control.topology(run.url, "site").status == "KILLED"
        run.held.set()
        thread.join(60)
        assert not thread.is_alive()
        assert run.error is None
    counted = run.counts()
    assert counted in ({}, {"a": 1})  # the function returned before or behind the stop
    thread = run.start()
    with ended(run, thread):
        run.until({"a": 1})


def test_a_batch_that_fails_while_a_kill_waits_is_the_end_of_it(run: Run):
    run.held.clear()
    run.put("a")
    thread = run.start()
    with ended(run, thread):
        assert run.entered.wait(60)
        assert not control.kill(run.url, "site", wait=30, timeout=-29.5).is_obeyed
        run.fails = True
        run.held.set()
        thread.join(60)
    assert run.error is None
    assert list_topologies(run.url) == []
    assert run.counts() == {}


def test_a_query_that_spark_gives_up_to_stop_is_stopped_once_more(spark, tmp_path: Path, monkeypatch):
    """Nothing is obeyed before it has stopped."""
    run = Run(spark, tmp_path, f"sqlite:///{tmp_path}/state.db")
    run.put("a")
    tries: list[bool] = []
    stop = StreamingQuery.stop

    def gives_up_once(query: StreamingQuery) -> None:
        tries.append(query.isActive)
        if len(tries) == 1:
            raise TimeoutError
        stop(query)

    monkeypatch.setattr(StreamingQuery, "stop", gives_up_once)
    thread = run.start()
    with ended(run, thread):
        run.until({"a": 1})
        assert control.deactivate(run.url, "site", timeout=120).is_obeyed
        assert run.streams() == []
        assert tries[:2] == [True, True]


def test_several_streams_stop_and_go_on_together(run: Run):
    """Each has a checkpoint of its own."""
    topology = run.topology()
    more = topology.newStream("more", topology.queries["visits"].df)
    more.groupBy("bytes").persistentAggregate(opaque(run.url, name="by_bytes"), visits=Count())
    places = {name: str(run.folder / name) for name in ("visits", "more")}
    run.put("ab")
    thread = threading.Thread(target=lambda: topology.run(places, store=run.url, poll=POLL))
    thread.start()

    def both(rows: int) -> bool:
        try:
            return contents(run.url, "by_bytes") == {(1,): {"visits": rows}} and sum(run.counts().values()) == rows
        except LookupError:
            return False

    with ended(run, thread):
        wait_for(lambda: both(2), "both states", 60)
        assert control.topology(run.url, "site").states == ("visits", "by_bytes")
        assert len(run.streams()) == 2
        assert control.deactivate(run.url, "site", timeout=120).is_obeyed
        assert run.streams() == []
        run.put("c")
        assert control.activate(run.url, "site", timeout=120).is_obeyed
        wait_for(lambda: both(3), "both states", 60)


def test_other_partitions_from_the_next_batch_on(run: Run):
    run.put("abcdefgh")
    thread = run.start()
    with ended(run, thread):
        run.until(dict.fromkeys("abcdefgh", 1))
        assert control.rebalance(run.url, "site", partitions=5, timeout=120).is_obeyed
        run.put("abcdefgh")
        run.until(dict.fromkeys("abcdefgh", 2))
        assert control.deactivate(run.url, "site", timeout=120).is_obeyed
        assert control.rebalance(run.url, "site", partitions=3, timeout=120).is_obeyed
        assert control.activate(run.url, "site", timeout=120).is_obeyed
        run.put("abcdefgh")
        run.until(dict.fromkeys("abcdefgh", 3))
    with open_reader(run.url, "visits") as reader:
        found = [report.partitions for report in reader.reports()]
    if not run.url.startswith("memory"):  # which is applied on the driver, by one task
        assert found == [3, 5, 2]


def test_a_second_driver_of_the_name_is_refused_and_one_that_is_silent_is_taken_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(running, "_SILENCE", 200)  # looks, 10 s: a busy machine looks once in them
    run.put("a")
    thread = run.start()
    with ended(run, thread):
        run.until({"a": 1})
        with pytest.raises(AlreadyAliveError, match="site"):
            run.topology().run(str(run.folder / "checkpoint"), store=run.url, poll=POLL)
        before = control.topology(run.url, "site")
    assert before.driver is not None
    silent = msgspec.structs.replace(before.driver, silence=0.5)
    with Control(run.url, "gone") as own:  # as a driver leaves it that was killed
        own.change(lambda _: before.__class__(topology="gone", status="INACTIVE", since=before.since, driver=silent))
        topology = run.topology()
        topology.name = "gone"
        checkpoint = str(run.folder / "checkpoint")
        second = threading.Thread(target=lambda: topology.run(checkpoint, store=run.url, poll=POLL))
        second.start()

        def is_taken() -> bool:
            record = own.read()
            return record is not None and record.driver is not None and record.driver.session != silent.session

        wait_for(is_taken, "the other driver", 60)
        assert control.kill(run.url, "gone", timeout=120).is_obeyed
        second.join(60)
        assert not second.is_alive()


def test_a_driver_that_was_taken_over_stops(run: Run):
    run.put("a")
    thread = run.start()
    run.until({"a": 1})
    with Control(run.url, "site") as own:

        def take(record: Any) -> Any:
            driver = record.driver
            other = msgspec.structs.replace(driver, session="other")
            return rules.submit(record, "site", other, (), active=True, at=record.since, dead=driver)

        own.change(take)
        thread.join(60)
        assert type(run.error).__name__ == "FencedError"
        assert run.streams() == []
        assert own.change(lambda record: rules.release(record, "site", "other")).driver is None
    done = control.kill(run.url, "site")  # nobody runs it
    assert done.record.status == "REMOVED"


def test_a_topology_may_begin_inactive_and_keeps_its_status_over_runs(run: Run):
    run.put("a")
    thread = run.start(active=False)
    with ended(run, thread):
        wait_for(lambda: list_topologies(run.url), "the submission", 60)
        assert control.deactivate(run.url, "site", timeout=120).is_obeyed
        assert run.streams() == []
        control.activate(run.url, "site")
        run.until({"a": 1})


def test_it_ends_with_its_queries_and_with_their_errors(run: Run):
    run.put("a")
    thread = run.start(trigger={"availableNow": True})
    thread.join(120)
    assert run.error is None
    assert run.counts() == {"a": 1}
    record = control.topology(run.url, "site")
    assert (record.status, record.driver) == ("ACTIVE", None)
    done = control.deactivate(run.url, "site")
    assert (done.is_obeyed, done.record.status) == (False, "INACTIVE")  # for the next driver
    control.activate(run.url, "site")
    topology = run.topology()

    def fail(finished: Any) -> None:
        raise DataError("a function of the user's fails")

    topology.queries["visits"].plan.branches[0].on_batch.append(fail)
    topology.queries["visits"].plan.branches[0].downstream.append(lambda rows, batch_id: fail(batch_id))
    run.put("b")
    with pytest.raises(DataError, match="of the user's fails"):
        topology.run(str(run.folder / "checkpoint"), store=run.url, poll=POLL)
    assert control.topology(run.url, "site").driver is None
    assert run.streams() == []
    control.kill(run.url, "site")


def test_a_driver_beats_while_its_queries_start(spark, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "POLL", 0.3)
    run = Run(spark, tmp_path, f"sqlite:///{tmp_path}/state.db")
    start = Startable.start
    topology = run.topology()

    def slow(self: Startable, *args: Any, **options: Any) -> Any:
        with pytest.raises(AlreadyAliveError):
            topology.run(str(run.folder / "checkpoint"), store=run.url, poll=POLL)
        return start(self, *args, **options)

    monkeypatch.setattr(Startable, "start", slow)
    run.put("a")
    thread = run.start(trigger={"availableNow": True})
    thread.join(120)
    assert run.error is None
    assert run.counts() == {"a": 1}
    assert control.kill(run.url, "site").record.status == "REMOVED"


@pytest.mark.redis
def test_a_store_that_was_emptied_ends_the_run(spark, tmp_path: Path, start_redis):
    server = start_redis()
    run = Run(spark, tmp_path, server.url)
    run.put("a")
    thread = run.start()
    run.until({"a": 1})
    server.client().flushall()
    thread.join(60)
    assert isinstance(run.error, StoreLostError)
    assert run.streams() == []


def test_wrong_arguments_are_refused_before_anything_is_written(run: Run):
    topology = run.topology()
    for error, checkpoint, options in (
        (ConfigurationError, {"other": "/tmp/x"}, {}),
        (ConfigurationError, "/tmp/x", {"poll": 0}),
        (ConfigurationError, "/tmp/x", {"poll": float("inf")}),
    ):
        with pytest.raises(error):
            topology.run(checkpoint, store=run.url, **{"poll": POLL} | options)
    topology.newStream("more", run.topology().queries["visits"].df)
    with pytest.raises(UsageError, match="2 streams"):
        topology.run("/tmp/x", store=run.url)
    with pytest.raises(UsageError, match="0 streams"):
        Topology("empty").run("/tmp/x", store=run.url)
    with pytest.raises(ConfigurationError, match="name"):
        control.activate(run.url, "x" * 60)
    assert list_topologies(run.url) == []
