"""A topology under its control record: its driver dies at each step of a command, hangs, and is started twice."""

from __future__ import annotations

import os
import random
import secrets
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import FIXTURES, job

from mapstate import errors, open_reader
from mapstate.batch_report import BatchReport
from mapstate.operations import control
from mapstate.protocol.control import ControlRecord
from mapstate.testing import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.slow]

# Where the driver dies: the fields of the control record that it writes then, and whether it dies behind that.
STEPS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "a kill was read": ("kill", {"status": "KILLED"}, False),
    "a kill was read, and the driver has beaten": ("kill", {"status": "KILLED"}, True),
    "before the removal": ("kill", {"status": "REMOVED"}, False),
    "after the removal": ("kill", {"status": "REMOVED"}, True),
    "a rebalance was read": ("rebalance", {"partitions": 5, "obeyed": 0}, False),
    "a rebalance was read, and the driver has beaten": ("rebalance", {"partitions": 5, "obeyed": 0}, True),
    "before a rebalance is obeyed": ("rebalance", {"partitions": 5, "obeyed": 1}, False),
    "after a rebalance is obeyed": ("rebalance", {"partitions": 5, "obeyed": 1}, True),
    "before an end is obeyed": ("deactivate", {"status": "INACTIVE", "obeyed": 1}, False),
    "after an end is obeyed": ("deactivate", {"status": "INACTIVE", "obeyed": 1}, True),
}


class Site:
    """The input of the topology, its store, and what its counts have to be."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.files: list[Counter[str]] = []
        self._logs = 0
        (folder / "input").mkdir(parents=True)

    def put(self) -> None:
        """One more file, which is there at once and whole, and makes one batch or a part of one."""
        rows = [f"user-{(len(self.files) * 7 + at) % 23}" for at in range(30)]
        written = self.folder / "written"
        written.write_text("".join(f"{user},1\n" for user in rows))
        os.utime(written, (1_700_000_000 + len(self.files),) * 2)
        written.rename(self.folder / "input" / f"{len(self.files)}.csv")
        self.files.append(Counter(rows))

    @contextmanager
    def driver(self, *faults: Any, **options: Any) -> Iterator[Any]:
        """A driver that runs, killed at the end."""
        self._logs += 1
        folder = self.folder / f"run-{self._logs}"
        folder.mkdir()
        options |= {"url": self.url, "input": str(self.folder / "input"), "folder": str(folder), "faults": faults}
        options["checkpoint"] = str(self.folder / "checkpoint")
        with job(FIXTURES / "controlled_job.py", options, folder / "log") as process:
            process.log = folder / "log"  # type: ignore[attr-defined]
            yield process

    def check(self) -> int:
        """The counts are those of some first files, whole. Returns how many."""
        with open_reader(self.url, "visits") as reader:
            found = {key[0]: value["visits"] for key, value in reader.scan()}
        total, files = sum(found.values()), Counter[str]()
        for number, rows in enumerate(self.files, 1):
            files += rows
            if files.total() == total:
                assert found == files
                return number
        assert total == 0, f"{total} rows are no whole number of files"
        return 0

    def until_counted(self, process: Any) -> None:
        """All files are counted, each once."""
        wait_for(lambda: process.poll() is not None or self._all(), "all files", 120)
        assert process.poll() is None, said(process)

    def _all(self) -> bool:
        try:
            return self.check() == len(self.files)
        except errors.StateNotFoundError:
            return False

    def last_report(self, process: Any) -> BatchReport:
        """The report of the last batch. The driver keeps it after the commit."""

        def is_kept() -> bool:
            last = reader.ledger().last_commit
            return last is not None and reader.reports()[0].batch_id == last.batch_id

        with open_reader(self.url, "visits") as reader:
            wait_for(lambda: process.poll() is not None or is_kept(), "its report", 60)
            assert is_kept(), said(process)
            return reader.reports()[0]

    def record(self) -> ControlRecord | None:
        with control.Control(self.url, "site") as own:
            return own.read()

    def until(self, process: Any, holds: Callable[[ControlRecord], bool], event: str) -> None:
        """The record says so, while the driver lives."""

        def reached() -> bool:
            record = self.record()
            return process.poll() is not None or (record is not None and holds(record))

        wait_for(reached, event, 120)
        record = self.record()
        assert record is not None
        assert holds(record), said(process)


def said(process: Any) -> str:
    return str(process.log.read_text()[-3000:])


@pytest.fixture(params=["redis", pytest.param("sqlite", marks=pytest.mark.full)])
def site(request: Any, tmp_path: Path) -> Site:
    url = f"sqlite:///{tmp_path}/state.db"
    return Site(tmp_path / "site", url if request.param == "sqlite" else request.getfixturevalue("redis_url"))


def test_a_command_is_obeyed_whenever_the_driver_dies(
    site: Site, rounds: Callable[[int, int], int], tally: Callable[..., None]
):
    """Whoever starts the driver again, as a supervisor does, need not know of the command."""
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    steps = draw.sample(list(STEPS), rounds(1, len(STEPS)))
    for step in steps:
        try:
            _die_at(site, step)
        except BaseException as error:
            error.add_note(f"seed {seed}, {step}, in {steps}")
            raise
        tally(f"driver killed where {step}", kills=1)


def _die_at(site: Site, step: str) -> None:
    command, fields, after = STEPS[step]
    before = site.record()
    number = 0 if before is None else before.command
    fields = {name: number + value if name == "obeyed" else value for name, value in fields.items()}
    site.put()
    with site.driver([fields, after]) as process:
        site.until_counted(process)
        site.put()
        if command == "kill":
            control.kill(site.url, "site", wait=30, timeout=-30)  # and not removed by the command
        elif command == "rebalance":
            control.rebalance(site.url, "site", partitions=5, timeout=0)
        else:
            control.deactivate(site.url, "site", timeout=0)
        assert process.wait(60) == -signal.SIGKILL, said(process)
    counted = site.check()
    record = site.record()
    assert record is not None
    if record.status == "REMOVED":
        assert step == "after the removal"
    elif command == "kill":
        with site.driver() as process:  # it finishes the removal, says so, and runs no batch
            assert process.wait(120) == 1, said(process)
            assert "NotAliveError: topology 'site' was killed before this start" in said(process)
        record = site.record()
        assert record is not None
        assert record.status == "REMOVED"
        assert site.check() == counted
    with site.driver() as process:
        if (
            command == "deactivate"
        ):  # a driver that died behind it had obeyed already, and this one may not have come yet
            dead = record.driver
            site.until(process, lambda one: one.obeyed == one.command and one.driver != dead, "the command is obeyed")
            assert site.check() == counted
            assert control.activate(site.url, "site", timeout=120).is_obeyed
        elif command == "rebalance":
            site.until(process, lambda one: one.obeyed == one.command, "the command is obeyed")
            site.put()
        else:
            site.until(process, lambda one: one.status == "ACTIVE", "the submission")  # all may be counted before it
        site.until_counted(process)
        if command == "rebalance":
            assert site.last_report(process).partitions == 5
        assert control.kill(site.url, "site", timeout=120).is_obeyed
        assert process.wait(60) == 0, said(process)


@pytest.mark.full
def test_a_kill_of_a_dead_driver_is_done_by_the_command_or_said_by_the_next_start(site: Site):
    """A start that ran nothing and ended with 0 would pass for a run."""
    site.put()
    with site.driver() as process:
        _sigkill(site, process)
    done = control.kill(site.url, "site", wait=0)
    assert (done.is_obeyed, done.record.status) == (True, "REMOVED")
    assert done.dead is not None
    assert done.dead.pid == process.pid
    site.put()
    with site.driver() as process:  # which runs as if that one had never been
        _sigkill(site, process)
    assert not control.kill(site.url, "site", wait=0, timeout=0).is_obeyed  # too short to know
    site.put()
    with site.driver() as process:
        assert process.wait(120) == 1, said(process)
        assert "NotAliveError: topology 'site' was killed before this start" in said(process)
    record = site.record()
    assert record is not None
    assert (record.status, site.check()) == ("REMOVED", 2)


def _sigkill(site: Site, process: Any) -> None:
    site.until_counted(process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


@pytest.mark.full
def test_of_two_drivers_one_runs_and_one_that_hung_is_taken_over(site: Site):
    site.put()
    with ExitStack() as stack:
        first, second = (stack.enter_context(site.driver(poll=1.0)) for _ in range(2))
        wait_for(lambda: first.poll() is not None or second.poll() is not None, "one of them is refused", 120)
        alive, refused = (first, second) if first.poll() is None else (second, first)
        assert refused.returncode == 1
        assert "AlreadyAliveError" in said(refused)
        site.until_counted(alive)
        _stop(site, alive)
        done = control.deactivate(site.url, "site", timeout=1)
        assert not done.is_obeyed  # it hangs
        third = stack.enter_context(site.driver())
        site.until(third, lambda one: one.obeyed == one.command, "the command is obeyed by another driver")
        assert control.activate(site.url, "site", timeout=120).is_obeyed
        site.put()
        site.until_counted(third)
        os.killpg(alive.pid, signal.SIGCONT)
        assert alive.wait(60) == 1
        assert "FencedError" in said(alive)
        site.put()
        site.until_counted(third)
        assert control.kill(site.url, "site", timeout=120).is_obeyed
        assert third.wait(60) == 0, said(third)


def _stop(site: Site, process: Any) -> None:
    """Stops a driver outside of a write: within one, it would keep the lock of a SQLite file."""
    while True:
        os.killpg(process.pid, signal.SIGSTOP)
        if not site.url.startswith("sqlite") or _is_free(site.url.removeprefix("sqlite:///")):
            return
        os.killpg(process.pid, signal.SIGCONT)


def _is_free(path: str) -> bool:
    with closing(sqlite3.connect(path, timeout=0.2)) as file:
        try:
            file.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        file.rollback()
        return True


@pytest.mark.full
def test_a_hundred_commands_by_chance_beside_kills_of_the_driver(site: Site, tally: Callable[..., None]):
    """Each file is counted once, and readers see whole batches all along."""
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    done = Counter[str]()
    with ExitStack() as stack:
        process: Any = stack.enter_context(site.driver(poll=0.3))
        for at in range(100):
            word = draw.choice(["activate", "deactivate", "rebalance", "kill", "SIGKILL"])
            try:
                site.put()
                if process.poll() is not None:  # what a supervisor does
                    process = stack.enter_context(site.driver(poll=0.3))
                record = site.record()
                is_there = record is not None and record.status != "REMOVED"
                if word == "SIGKILL":
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(60)
                elif is_there:
                    _give(site, word, draw)
                    done[word] += 1
                if is_there:
                    with_state = site.check() if _has_state(site) else 0
                    done["files read"] = max(done["files read"], with_state)
            except BaseException as error:
                error.add_note(f"seed {seed}, {word} at {at}")
                raise
        if process.poll() is not None:
            process = stack.enter_context(site.driver())
        for _ in range(2):  # the first one may find a kill, and finish it
            site.until(process, lambda one: one.status == "REMOVED" or one.driver is not None, "a driver")
            record = site.record()
            assert record is not None
            if record.status in ("KILLED", "REMOVED"):
                assert process.wait(120) == 0 or "NotAliveError" in said(process), said(process)
                process = stack.enter_context(site.driver())
                site.until(process, lambda one: one.status == "ACTIVE" and one.driver is not None, "a new driver")
        control.activate(site.url, "site")
        site.until_counted(process)
        assert control.kill(site.url, "site", timeout=120).is_obeyed
    tally("commands by chance", files=len(site.files), **done)


def _give(site: Site, word: str, draw: random.Random) -> None:
    """A command, which is refused only where it has to be."""
    timeout = draw.choice([0, 2])
    try:
        if word == "rebalance":
            control.rebalance(site.url, "site", partitions=draw.randrange(1, 6), timeout=timeout)
        elif word == "kill":
            control.kill(site.url, "site", wait=draw.choice([0, 1, 4]), timeout=timeout)
        else:
            getattr(control, word)(site.url, "site", timeout=timeout)
    except (errors.UsageError, errors.NotAliveError):
        record = site.record()
        if record is None or record.status not in ("KILLED", "REMOVED"):
            raise


def _has_state(site: Site) -> bool:
    try:
        with open_reader(site.url, "visits"):
            return True
    except errors.StateNotFoundError:
        return False
