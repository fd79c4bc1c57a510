"""The driver's loop of a topology by itself: its queries are none of Spark's, and a test sets when they end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mapstate.errors import StoreUnavailableError
from mapstate.operations import control
from mapstate.operations.control import Control
from mapstate.protocol import control as rules
from mapstate.spark.streams.running import Running
from mapstate.testing import wait_for

POLL = 0.05


class FakeQuery:
    """What `Running` asks of a query of Spark, with times that a test sets."""

    def __init__(self, error: Exception | None = None) -> None:
        self.isActive = error is None
        self.error = error
        self.stops = 0

    def exception(self) -> Exception | None:
        return self.error

    def stop(self) -> None:
        self.stops += 1
        self.isActive = False


class FakeRun:
    """A run of one query that is none of Spark's, in a thread."""

    def __init__(self, url: str, query: Any) -> None:
        self.url, self.query = url, query
        self.stream = SimpleNamespace(plan=SimpleNamespace(branches=[]), last_error=None, around=None)
        self.error: BaseException | None = None
        streams: Any = {"visits": self.stream}
        self.running = Running("site", streams, self._start, url, poll=POLL)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_for(lambda: self.query in self.running._started.values() or self.error, "its start", 60)

    def _start(self, _: str) -> Any:
        return self.query

    def _run(self) -> None:
        try:
            self.running.run(active=True)
        except BaseException as error:  # noqa: BLE001  the test looks at it
            self.error = error

    def until_it_has_beaten(self) -> None:
        """The driver has looked at the record twice from now on."""

        def beat() -> int:
            driver = control.topology(self.url, "site").driver
            assert driver is not None
            return driver.beat

        first = beat()
        wait_for(lambda: beat() > first + 1, "two beats", 60)

    def end(self) -> BaseException | None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.error


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


@pytest.mark.parametrize("active", [0, 2])
def test_a_query_that_fails_while_it_is_looked_at_is_no_good_end(active: int, url: str):
    """Spark may end it between two questions of one step."""

    class Failing:
        looks = 0

        @property
        def isActive(self) -> bool:
            self.looks += 1
            return self.looks <= active

        def exception(self) -> Exception | None:
            return ValueError("it failed") if self.looks > active else None

        def stop(self) -> None:
            """It has ended."""

    assert str(FakeRun(url, Failing()).end()) == "it failed"


def test_a_batch_that_fails_while_it_is_to_stop_is_no_obedience(url: str):
    """Spark cleans up after the batch, and says only then that the query has ended."""
    run = FakeRun(url, FakeQuery())
    with pytest.raises(ValueError, match="it failed"), run.stream.around(None):
        raise ValueError("it failed")
    assert not control.deactivate(url, "site", timeout=0).is_obeyed
    run.until_it_has_beaten()
    assert (control.topology(url, "site").obeyed, run.query.stops) == (0, 0)
    run.query.error = ValueError("it failed")
    run.query.isActive = False
    assert run.end() is run.query.error


def test_nothing_is_obeyed_while_spark_gives_up_to_stop_a_query(url: str):
    """It calls the query ended before it waits for its thread."""

    class Slow(FakeQuery):
        def stop(self) -> None:
            super().stop()
            if self.stops == 1:
                raise TimeoutError

    run = FakeRun(url, Slow())
    assert control.deactivate(url, "site").is_obeyed
    assert run.query.stops == 2
    assert control.kill(url, "site").is_obeyed
    assert run.end() is None


def test_an_end_that_is_taken_back_within_a_batch_was_not_obeyed(url: str):
    """The query never stopped."""
    run = FakeRun(url, FakeQuery())
    with ThreadPoolExecutor() as pool:
        with run.stream.around(None):
            first = pool.submit(control.deactivate, url, "site", timeout=60)
            wait_for(lambda: control.topology(url, "site").status == "INACTIVE", "the command", 60)
            assert control.activate(url, "site", timeout=60).is_obeyed
        done = first.result()
    assert (done.is_obeyed, done.is_superseded, done.record.status) == (False, True, "ACTIVE")
    assert run.query.stops == 0
    assert control.kill(url, "site", timeout=60).is_obeyed
    assert run.end() is None


def test_the_wait_of_a_kill_is_by_the_drivers_clock(url: str):
    """The operator's may be an hour behind it."""
    run = FakeRun(url, FakeQuery())
    with Control(url, "site") as own:
        with run.stream.around(None):
            own.change(lambda record: rules.kill(record, "site", 30, "2026-11-21T10:00:00+00:00"))
            run.until_it_has_beaten()
            assert run.query.stops == 0
        assert run.end() is None
        record = own.read()
        assert record is not None
        assert (record.status, run.query.stops) == ("REMOVED", 1)


def test_a_removal_whose_answer_is_lost_is_the_end(url: str, monkeypatch):
    lost: list[str] = []
    change = Control.change

    def lose(self: Control, event: Any) -> Any:
        record = change(self, event)
        if record.status == "REMOVED" and not lost:
            lost.append(record.status)
            raise StoreUnavailableError("the answer is lost")
        return record

    monkeypatch.setattr(Control, "change", lose)
    run = FakeRun(url, FakeQuery())
    assert control.kill(url, "site").is_obeyed
    assert run.end() is None
    assert lost == ["REMOVED"]


def test_a_driver_beats_while_its_queries_stop(url: str):
    may_stop = threading.Event()

    class Slow(FakeQuery):
        def stop(self) -> None:
            may_stop.wait(60)

    run = FakeRun(url, Slow())
    run.query.error = ValueError("it failed")
    run.query.isActive = False
    run.until_it_has_beaten()
    run.until_it_has_beaten()
    may_stop.set()
    assert run.end() is run.query.error
