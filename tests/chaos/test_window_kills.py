"""SIGKILL of a driver with windows at each of its steps, again and again on one checkpoint."""

from __future__ import annotations

import json
import random
import secrets
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cases import full
from chain import files_until, put_file
from processes import FIXTURES, job
from pyspark.sql import SparkSession
from windows_job import LAG, LENGTH, RETENTION, SLIDE, started
from windows_oracle import Oracle, Row, Windows

from mapstate import errors, open_reader
from mapstate.protocol.windows import NEVER

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.slow]

# The first two states are of one store, and change in one write; the state that follows has a write of its own.
STEPS: dict[str, list[Any]] = {
    "after the begin": [["swap_all", {"after": True, "where": ["Begins", 0]}]],
    "before the put of an index head": [["multi_put", {"where": ["IndexPut"]}]],
    "after the put of an index head": [["multi_put", {"after": True, "where": ["IndexPut"]}]],
    "before a purge": [["multi_rewrite", {}]],
    "in a purge": [["multi_rewrite", {"after": True}]],
    "before the commit": [["swap_all", {"where": ["Commits", 0]}]],
    "after the commit": [["swap_all", {"after": True, "where": ["Commits", 0]}]],
    "downstream, before its begin": [["swap", {"where": ["Begins", 0]}]],
    "downstream, after its commit": [["swap", {"after": True, "where": ["Commits", 0]}]],
}
LEFT_COMMITTED = ("after the commit", "downstream, before its begin", "downstream, after its commit")


@pytest.mark.parametrize(
    ("store", "blocks"), [("redis", None), full("sqlite", None), full("redis", 2), full("sqlite", 2)]
)
def test_windows_are_right_whenever_the_driver_dies(
    store, blocks, rounds: Callable[[int, int], int], tally: Callable[..., None], tmp_path: Path, redis_url: str, spark
):
    seed = secrets.randbits(32)
    url = redis_url if store == "redis" else f"sqlite:///{tmp_path}/state.db"
    draw = random.Random(seed)
    steps = [step for step in STEPS for _ in range(25 if blocks is None else 5)]
    draw.shuffle(steps)
    steps = steps[: rounds(1, len(steps))]
    chain = WindowChain(tmp_path / "chain", url, draw, files=len(steps) + rounds(4, 8), blocks=blocks)
    for at, step in enumerate(steps):
        try:
            chain.kill(step)
        except BaseException as error:
            error.add_note(f"seed {seed}, after {steps[:at]}")
            raise
    chain.finish(spark)
    for step, number in chain.kills.items():
        tally(f"driver with windows{' in blocks' if blocks else ''} killed {step}", kills=number)
    tally(f"windows on {store}", fired=chain.fired, late_rows=chain.late, read=chain.read, purges=chain.purges)
    assert chain.fired


class WindowChain:
    """One stream with windows, and what has to be true after each of its driver's deaths."""

    def __init__(self, folder: Path, url: str, draw: random.Random, *, files: int, blocks: int | None = None) -> None:
        self._blocks = blocks
        self._folder = folder
        self._url = url
        self._draw = draw
        self._files: list[list[Row]] = []
        self._starts = 0
        self._ends = [0]  # of each committed batch; Spark keeps the offsets of the last hundred only
        self.kills: Counter[str] = Counter()
        self.fired = self.late = self.read = self.purges = 0
        self.due = 0
        (folder / "input").mkdir(parents=True)
        for number in range(files):
            self._files.append([])
            self._put(number)

    def kill(self, step: str) -> None:
        """Starts the driver, which dies at ``step`` of a batch; checks everything, and may change the batch's rows."""
        batch = self.due + (1 if "purge" in step else self._draw.choice([0, 1]))
        method, fields = STEPS[step][0]
        fields = dict(fields)
        if fields.get("where", ["IndexPut"]) != ["IndexPut"]:
            fields["where"] = [fields["where"][0], batch]
        folder = self._new_folder()
        fault = ["Kill", {"who": "driver", "name": "kill", "method": method} | fields]
        with job(FIXTURES / "windows_job.py", self._options(folder, [fault]), self._folder / "job.log") as process:
            process.wait(240)
        said = (self._folder / "job.log").read_text()[-3000:]
        assert process.returncode == -signal.SIGKILL, f"{step} of batch {batch} was never come to: {said}"
        assert (folder / "kill").exists(), said
        before = self.due
        self.check(f"killed {step} of batch {batch}")
        if "purge" not in step and "index" not in step:
            assert self.due == batch + (step in LEFT_COMMITTED), (step, before, batch, self.due)
        self.kills[step] += 1
        if self._draw.random() < 0.7:
            self._put(files_until(self._folder / "checkpoint", self.due + 1) - 1)  # the replay holds other rows

    def finish(self, spark: SparkSession) -> None:
        """The driver runs to its end."""
        assert started(spark, self._options(self._new_folder(), [])).awaitTermination(600)
        self.check("ended")
        assert files_until(self._folder / "checkpoint", self.due) == len(self._files)

    def check(self, when: str) -> None:
        try:
            reader = open_reader(self._url, "recent")
        except errors.StateNotFoundError:
            return
        with reader:
            ledger = reader.ledger()
            self.due = 0 if ledger.last_commit is None else ledger.last_commit.batch_id + 1
            oracle, fired = self._oracle(self.due)
            assert ledger.windows is not None
            assert reader.watermark().time == oracle.mark, when
            purged = ledger.windows.purged
            there = {key: value for key, value in oracle.windows().items() if key[0] > purged}
            for user in "vwxyz":
                found = [(window.end, window.value["rows"], window.value["total"]) for window in reader.windows(user)]
                assert found == sorted((end, *value) for (end, own), value in there.items() if own == user), when
                self.read += len(found)
            for end in {end for end, _ in there}:
                of_window = {key[0]: (value["rows"], value["total"]) for key, value in reader.window(end)}
                assert of_window == {own: value for (at, own), value in there.items() if at == end}, (when, end)
            self.purges = max(self.purges, 0 if purged == NEVER else purged)
        if self.due == 0:
            return
        with open_reader(self._url, "late") as late:
            assert (late.get(()) or {"rows": 0})["rows"] == len(oracle.late), when
        self._check_fired(fired, when)
        self.fired, self.late = sum(map(len, fired.values())), len(oracle.late)

    def _check_fired(self, fired: dict[int, Windows], when: str) -> None:
        """The state that follows has each fired window once; it may lack the last batch, which comes again."""
        batches, found = range(0), {}
        with suppress(errors.StateNotFoundError), open_reader(self._url, "fired") as follows:
            last = follows.ledger().last_commit
            batches = range(0 if last is None else last.batch_id + 1)
            found = {key[0]: (value["windows"], value["total"]) for key, value in follows.scan()}
        assert len(batches) in (self.due - 1, self.due), when
        right: dict[str, tuple[int, int]] = {}
        for batch in batches:
            for (_, user), (_, total) in fired.get(batch, {}).items():
                windows, sum_of = right.get(user, (0, 0))
                right[user] = windows + 1, sum_of + total
        assert found == right, when
        seen: dict[int, Any] = {}
        lines = (self._folder / "fired").read_text().splitlines() if (self._folder / "fired").exists() else []
        for batch, windows in map(json.loads, lines):
            assert seen.setdefault(batch, windows) == windows, f"{when}: batch {batch} fired two different things"
            expected = sorted([end, user, *value] for (end, user), value in fired[batch].items())
            assert windows == expected, when
        assert {batch for batch in fired if fired[batch] and batch < len(batches)} <= set(seen), when

    def _oracle(self, due: int) -> tuple[Oracle, dict[int, Windows]]:
        oracle = Oracle(LENGTH, SLIDE, 0, LAG)
        self._ends += [files_until(self._folder / "checkpoint", at + 1) for at in range(len(self._ends) - 1, due)]
        fired = {}
        for batch, (first, end) in enumerate(pairwise(self._ends)):
            fired[batch] = oracle.add([row for rows in self._files[first:end] for row in rows])
        return oracle, fired

    def _put(self, number: int) -> None:
        time = 100 + 8 * number
        self._files[number] = [
            Row(time + self._draw.randint(-45, 12), self._draw.choice("vwxyz"), self._draw.randint(1, 9))
            for _ in range(self._draw.randint(3, 10))
        ]
        put_file(self._folder / "input", number, [f"{row.at},{row.user},{row.n}" for row in self._files[number]])

    def _new_folder(self) -> Path:
        self._starts += 1
        folder = self._folder / f"start-{self._starts}"
        folder.mkdir()
        return folder

    def _options(self, folder: Path, faults: list[Any]) -> dict[str, Any]:
        return {
            "url": self._url,
            "input": str(self._folder / "input"),
            "checkpoint": str(self._folder / "checkpoint"),
            "folder": str(folder),
            "faults": faults,
            "blocks": self._blocks,
            "purged_on_driver": self._draw.choice([0, 2000]),  # 0: by a job on the executors
        }


assert RETENTION < LENGTH  # so that nearly each batch purges
