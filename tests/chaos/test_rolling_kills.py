"""SIGKILL of a driver with rolling windows at each of its steps, again and again on one checkpoint."""

from __future__ import annotations

import random
import secrets
import signal
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chain import files_until, put_file
from every_store import AEROSPIKE, FULL, REDIS, url_of
from processes import FIXTURES, job
from pyspark.sql import SparkSession
from rolled import Row, floor, shown
from rolling_job import LAG, RETENTION, STATES, started

from mapstate import LIFETIME, errors, open_reader
from mapstate.backends import resolve
from mapstate.capabilities import JointLedgers
from mapstate.protocol.windows import NEVER

pytestmark = [pytest.mark.spark, pytest.mark.slow]

# All states are of one store. On a cluster, and on Aerospike, their ledgers change one after the other: the first dies.
STEPS: dict[str, list[Any]] = {
    "before the begin": [["swap_all", {"where": "Begins"}]],
    "after the begin": [["swap_all", {"after": True, "where": "Begins"}]],
    "after a claim": [["claim", {"after": True, "since": "begun"}]],
    "after a get": [["multi_get", {"after": True, "since": "begun"}]],
    "before a put": [["multi_put", {"since": "begun"}]],
    "after the first put": [["multi_put", {"after": True, "since": "begun"}]],
    "after the fourth put": [["multi_put", {"after": True, "since": "put"}]],
    "before the commit": [["swap_all", {"where": "Commits"}]],
    "after the commit": [["swap_all", {"after": True, "where": "Commits"}]],
}
USERS = "vwxyz"
BEFORE_ANY_ROW = -(10**9)


@pytest.fixture(params=[*FULL[1:], REDIS, AEROSPIKE])
def url(request: Any, tmp_path: Path) -> str:
    return url_of(request, tmp_path)


def test_rolling_windows_are_right_whenever_the_driver_dies(
    url, rounds: Callable[[int, int], int], tally: Callable[..., None], tmp_path: Path, spark
):
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    steps = [step for step in STEPS for _ in range(13)]
    draw.shuffle(steps)
    steps = steps[: rounds(1, len(steps))]
    chain = RollingChain(tmp_path / "chain", url, draw, files=len(steps) + rounds(3, 5))
    for at, step in enumerate(steps):
        try:
            chain.kill(step)
        except BaseException as error:
            error.add_note(f"seed {seed}, after {steps[:at]}")
            raise
    chain.finish(spark)
    for step, number in chain.kills.items():
        tally(f"driver with rolling windows killed {step}", kills=number)
    tally(f"rolling windows on {url.partition(':')[0]}, seed {seed}", read=chain.read, set_aside=chain.late)
    assert chain.read
    assert chain.late


class RollingChain:
    """One stream with rolling windows, and what has to be true after each of its driver's deaths."""

    def __init__(self, folder: Path, url: str, draw: random.Random, *, files: int) -> None:
        self._folder = folder
        self._url = url
        self._draw = draw
        self._files: list[list[Row]] = []
        self._starts = 0
        self._joint = isinstance(resolve(url).open("all"), JointLedgers)
        self._ahead: dict[Any, list[Row]] = {}
        self._ends = [0]  # of each committed batch; Spark keeps the offsets of the last hundred only
        self.kills: Counter[str] = Counter()
        self.read = self.late = self.due = 0
        (folder / "input").mkdir(parents=True)
        for number in range(files):
            self._files.append([])
            self._put(number)

    def kill(self, step: str) -> None:
        """Starts the driver, which dies at ``step`` of a batch; checks everything, and may change the batch's rows."""
        batch = self.due + self._draw.choice([0, 1])
        ((method, fields),) = STEPS[step]
        fields = dict(fields)
        swap = "swap_all" if self._joint else "swap"
        method = method.replace("swap_all", swap)
        if "where" in fields:
            fields["where"] = [fields["where"], batch]
        folder = self._new_folder()
        at_begin = ["Mark", {"method": swap, "after": True, "name": "begun", "where": ["Begins", batch]}]
        puts = ["Mark", {"method": "multi_put", "after": True, "since": "begun", "name": "put", "times": 3}]
        fault = ["Kill", {"who": "driver", "name": "kill", "method": method} | fields]
        faults = [fault] if "where" in fields else [at_begin, puts, fault]
        with job(FIXTURES / "rolling_job.py", self._options(folder, faults), self._folder / "job.log") as process:
            process.wait(240)
        said = (self._folder / "job.log").read_text()[-3000:]
        assert process.returncode == -signal.SIGKILL, f"{step} of batch {batch} was never come to: {said}"
        assert (folder / "kill").exists(), said
        self.check(f"killed {step} of batch {batch}")
        assert self.due == batch + (step == "after the commit" and self._joint), (step, batch, self.due)
        self.kills[step] += 1
        if self._draw.random() < 0.7:
            self._put(files_until(self._folder / "checkpoint", self.due + 1) - 1)  # the replay holds other rows

    def finish(self, spark: SparkSession) -> None:
        """The driver runs to its end."""
        assert started(spark, self._options(self._new_folder(), [])).awaitTermination(600)
        self.check("ended")
        assert files_until(self._folder / "checkpoint", self.due) == len(self._files)

    def check(self, when: str) -> None:
        """Every key and window of every time that can be asked for, as of the batches that the ledger has."""
        try:
            with open_reader(self._url, "all") as plain:
                last = plain.ledger().last_commit
                self.due = 0 if last is None else last.batch_id + 1
                batches = self._batches(self.due)
                counts = Counter(row.user for rows in batches for row in rows)
                assert {key[0]: value["rows"] for key, value in plain.scan()} == counts, when
        except errors.StateNotFoundError:
            self.due = 0
            return
        self.late = 0
        for name, windows in STATES.items():
            self._check_state(name, windows, when)

    def _check_state(self, name: str, windows: Any, when: str) -> None:
        with open_reader(self._url, f"{name}-late") as late:
            aside, _, _, _ = self._expected(windows, self._batches_of(late))
            assert (late.get(()) or {"rows": 0})["rows"] == aside, when
        self.late += aside
        unit = min(one[1] for one in windows if one != LIFETIME)
        with open_reader(self._url, name) as reader:
            ledger = reader.ledger()
            batches = self._batches_of(reader)
            _, kept, horizon, mark = self._expected(windows, batches)
            if mark is None:
                assert reader.multi_get(list(USERS)) == [None] * 5, when
                return
            safe = reader.watermark().time  # where a batch may still be taken back, that of the one before
            assert safe in (mark, *([] if self._joint else [self._expected(windows, batches[:-1])[3]])), when
            newest = mark + LAG
            # A begin behind the last commit may have moved the horizon; no batch may move it further.
            due_end = floor(mark - RETENTION, unit)
            assert ledger.rolling is not None
            has_horizon = ledger.rolling.horizon != NEVER
            first_end = ledger.rolling.definition.time(ledger.rolling.horizon) if has_horizon else None
            assert first_end in (horizon, due_end), when
            live = floor(newest, unit)
            ends = [first_end, None if safe is None else floor(safe, unit)]
            marked = max((end for end in ends if end is not None), default=BEFORE_ANY_ROW)
            asked: list[Any] = [(None, live, live + unit), ("watermark", marked, marked)]
            asked += [(at, floor(at, unit), floor(at, unit)) for at in range(due_end, newest + 80, 7)]
            for at, end, until in asked:
                found = reader.multi_get(list(USERS), at=at)
                right = [shown(kept, user, windows, end=end, until=until) for user in USERS]
                assert found == right, (when, name, at)
                self.read += len(found)

    def _batches_of(self, reader: Any) -> list[list[Row]]:
        """The rows of a state's batches. Where ledgers change one by one, it may be one ahead, which is taken back."""
        ledger = reader.ledger()
        last = ledger.last_commit
        due = 0 if last is None else last.batch_id + 1
        assert due in (self.due, self.due if self._joint else self.due + 1)
        batches = self._batches(due)
        if due > self.due:  # its file may have other rows since
            batches[-1] = self._ahead.setdefault((ledger.state, last.txid), batches[-1])
        return batches

    def _expected(self, windows: Any, batches: list[list[Row]]) -> tuple[int, list[Row], int | None, int | None]:
        """Of the first batches: how many rows are set aside, those that count, the horizon and the watermark."""
        unit = min(one[1] for one in windows if one != LIFETIME)
        kept: list[Row] = []
        aside, horizon, mark = 0, None, None
        for rows in batches:
            horizon = horizon if mark is None else floor(mark - RETENTION, unit)
            first = None
            if horizon is not None and LIFETIME not in windows:
                first = min(floor(horizon - length, step) for length, step in windows)
            own = [row for row in rows if row.at is not None and (first is None or row.at >= first)]
            aside += len(rows) - len(own)
            kept += own
            mark = max((row.at - LAG for row in kept if row.at is not None), default=None)
        return aside, kept, horizon, mark

    def _batches(self, due: int) -> list[list[Row]]:
        """The rows of the first batches. Spark keeps the offsets of each from its first attempt on."""
        more = range(len(self._ends) - 1, due)
        self._ends += [files_until(self._folder / "checkpoint", at + 1) for at in more]
        return [
            [row for rows in self._files[first:end] for row in rows] for first, end in pairwise(self._ends[: due + 1])
        ]

    def _put(self, number: int) -> None:
        time = 100 + 12 * number
        self._files[number] = [
            Row(
                None if self._draw.random() < 0.1 else time + self._draw.randint(-150, 12),
                self._draw.choice(USERS),
                self._draw.randint(-9, 9),
            )
            for _ in range(self._draw.randint(6, 14))
        ]
        lines = [f"{'' if row.at is None else row.at},{row.user},{row.n}" for row in self._files[number]]
        put_file(self._folder / "input", number, lines)

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
            "apply_on": self._draw.choice(["executors", "executors", "auto"]),
        }
