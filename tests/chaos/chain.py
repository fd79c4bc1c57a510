"""A chain of kills: one stream over many files, whose driver dies again and again on one checkpoint.

Spark takes one file to a batch, in order, and two where it died between its source's log and its own: which
files a batch has is read from these logs. What the state has to be is counted from the files, by code that knows
nothing of mapstate; only which batches count is asked of the ledger, as any reader would.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from processes import TESTS, job

from mapstate import errors, open_reader
from mapstate.testing import wait_for

KEYS = 16
RANDOM = "at a random moment"
DOWNSTREAM = "in downstream"
GOES_ON = "after a middle put, and the worker goes on"
WENT_ON = "went-on"
# What dies where. All but RANDOM: [fault, ...] in terms of the batch and how many keys, and so puts, it has.
STEPS = (
    "before the ledger's begin",
    "after the ledger's begin",
    "after a claim",
    "after a get",
    "after the first put",
    "after a middle put",
    GOES_ON,
    "after the last put",
    "before the ledger's commit",
    "after the ledger's commit",
    DOWNSTREAM,
    RANDOM,
)
AT_PUTS = ("after the first put", "after a middle put", GOES_ON, "after the last put")
LEFT_COMMITTED = ("after the ledger's commit", DOWNSTREAM)
START = 1_700_000_000  # files are read in the order of their times

Rows = list[tuple[str, int]]
_Truth = dict[tuple[str], dict[str, int]]


def faults(step: str, batch: int, puts: int) -> list[Any]:
    """The faults of `visits_job` that kill the driver at this step of this batch, with the mark "kill"."""

    def kill(method: str, **fields: Any) -> list[Any]:
        return ["Kill", {"who": "driver", "name": "kill", "method": method} | fields]

    def after_puts(number: int, **fields: Any) -> list[Any]:
        """Counted over both tasks: as many marks first, and then the kill."""
        marks = [["Mark", {"after": True, "since": "begun", "name": "put", "times": number - 1}]] if number > 1 else []
        return [begun, *marks, kill("multi_put", after=True, since="begun", **fields)]

    at_begin, at_commit = {"where": ["Begins", batch]}, {"where": ["Commits", batch]}
    begun = ["Mark", {"method": "swap", "after": True, "name": "begun"} | at_begin]
    return {
        "before the ledger's begin": [kill("swap", **at_begin)],
        "after the ledger's begin": [kill("swap", after=True, **at_begin)],
        "after a claim": [begun, kill("claim", after=True, since="begun")],
        "after a get": [begun, kill("multi_get", after=True, since="begun", call=2)],
        "after the first put": after_puts(1),
        "after a middle put": after_puts(puts // 2),
        GOES_ON: [
            *after_puts(puts // 2, spare_caller=True),
            ["Mark", {"after": True, "since": "kill", "name": WENT_ON}],  # a put that went through all the same
        ],
        "after the last put": after_puts(puts),
        "before the ledger's commit": [kill("swap", **at_commit)],
        "after the ledger's commit": [kill("swap", after=True, **at_commit)],
        RANDOM: [
            ["Mark", {"method": "swap", "after": True, "name": f"begun-{at}", "where": ["Begins", at]}]
            for at in (batch, batch + 1)
        ],
    }[step]


class Chain:
    """One stream, its files, and what has to be true after each of its driver's deaths.

    ``due`` is the batch that the ledger waits for. Opaque replays may bring other rows; see `kill`.
    """

    def __init__(self, folder: Path, url: str, *, kind: str, seed: int, files: int) -> None:
        self._folder = folder
        self._url = url
        self._kind = kind
        self._random = random.Random(seed)
        self._files: list[Rows] = []
        self._ever: set[str] = set()
        self.due = 0
        self.kills: Counter[str] = Counter()
        self.other_contents = 0
        self.repeated = 0
        self._starts = 0
        self._log = folder / "job.log"
        (folder / "input").mkdir(parents=True)
        for file in range(files):
            users = self._random.sample(range(60), KEYS)
            self._files.append([])
            self._put(file, [(f"u{user}", self._random.randrange(1000)) for user in users for _ in range(user % 3 + 1)])

    def steps(self) -> list[str]:
        """Where a driver of this state can die; a transactional one makes no claims."""
        return [step for step in STEPS if self._kind == "opaque" or step != "after a claim"]

    @property
    def went_on(self) -> int:
        """How many of the kills that spared the worker were outlived by a put."""
        return len(list(self._folder.glob(f"start-*/{WENT_ON}")))

    def kill(self, step: str) -> None:
        """Starts the driver; it has to redo what the last one left, dies at ``step`` of this or the next batch.

        Then checks all there is to check, and may put other rows into the file of the batch that has to come again.
        """
        # of a transactional replay nobody knows how many puts it has: what is in already is not put again
        fixed = self._kind == "transactional" and step in AT_PUTS
        last_due, again = self.due, self._random.random() < 0.4 and not fixed
        batch = self.due if again else self.due + 1
        folder = self._new_folder()
        options: dict[str, Any] = {"folder": str(folder)}
        if step == DOWNSTREAM:
            options["dies_downstream"] = batch
        else:
            options["faults"] = faults(step, batch, len({user for user, _ in self._rows(batch, batch + 1)}))
        with self._job(options) as process:
            if step == RANDOM:
                self._kill_at_random(process, folder, batch)
            process.wait(240)
        said = self._log.read_text()[-3000:]
        assert process.returncode == -signal.SIGKILL, f"{step} of batch {batch} was never come to: {said}"
        if step == RANDOM:
            least, most = batch + 1, len(self._files)
        else:
            assert (folder / "kill").exists(), f"the driver died, but not {step} of batch {batch}: {said}"
            least = most = batch + (step in LEFT_COMMITTED)
        self.check(least, most, f"killed {step} of batch {batch}")
        self.kills[step] += 1
        self.repeated += batch == last_due == self.due
        if self._kind == "opaque" and self.due == batch and self._random.random() < 0.6:
            self._replace(batch)

    def finish(self) -> None:
        """The driver runs to its end; every key is right."""
        with self._job({}) as process:
            left = len(self._files) - self._files_until(self.due)
            assert process.wait(120 + 5 * left) == 0, self._log.read_text()[-3000:]
        self.check(self.due, len(self._files), "ended")
        assert self._files_until(self.due) == len(self._files)

    def check(self, least: int, most: int, when: str) -> None:
        """The state is that of the batches which the ledger says are committed, and these are as expected."""
        try:
            reader = open_reader(self._url, "visits")
        except errors.StateNotFoundError:
            assert least == 0, when
            return
        with reader:
            ledger = reader.ledger()
            due = 0 if ledger.committed is None else ledger.committed.batch_id + 1
            assert ledger.owners == {self._query_id(): due}, when
            assert max(least, self.due) <= due <= most, f"{when}: batch {due} is due, {self.due} was before"
            keys = [(user,) for user in sorted(self._ever)]
            found = dict(zip(keys, reader.multi_get(keys), strict=True))
            found = {key: value for key, value in found.items() if value is not None}
            scanned = dict(reader.scan())
        truth = self._truth(due)
        if self._kind == "transactional" and ledger.in_flight is not None:
            # Reads are the latest: of the batch in flight each key is there or not, and a worker may still write it.
            half = self._truth(due + 1)
            for read in (found, scanned):
                wrong = {key for key in half if read.get(key) not in (truth.get(key), half[key])}
                assert not wrong, f"{when}: {wrong}"
                assert set(read) <= set(half), when
        else:
            assert found == truth, f"{when}: {_differences(found, truth)}"
            assert scanned == found, when
        self.due = due

    def _truth(self, due: int) -> _Truth:
        visits, size = Counter[str](), Counter[str]()
        for user, one in self._rows(0, due):
            visits[user] += 1
            size[user] += one
        return {(user,): {"visits": visits[user], "bytes": size[user]} for user in visits}

    def _rows(self, first: int, due: int) -> Rows:
        """What is in the files of the batches from ``first`` to the one before ``due``."""
        files = self._files[self._files_until(first) : self._files_until(due)]
        return [row for rows in files for row in rows]

    def _files_until(self, due: int) -> int:
        """How many files the batches before ``due`` have, as Spark wrote it down; or will have, if all goes well."""
        if due == 0:
            return 0
        written = self._folder / "checkpoint" / "offsets" / str(due - 1)
        if written.exists():
            return int(json.loads(written.read_text().splitlines()[-1])["logOffset"]) + 1
        names = [path.name.partition(".")[0] for path in (self._folder / "checkpoint" / "sources" / "0").glob("*")]
        fetched = max((int(name) + 1 for name in names if name.isdigit()), default=0)
        return max(fetched, self._files_until(due - 1)) + 1

    def _replace(self, batch: int) -> None:
        """Other rows: about half of the keys gone, some with other rows, some new."""
        file = self._files_until(batch + 1) - 1  # its last one
        kept = [row for row in self._files[file] if self._random.random() < 0.5]
        new = [(f"new-{batch}-{self._random.randrange(10**6)}", 7) for _ in range(3)]
        more = [(f"u{user}", 1) for user in self._random.sample(range(60), KEYS // 2)]
        self._put(file, [*kept, *new, *more])
        self.other_contents += 1

    def _put(self, file: int, rows: Rows) -> None:
        self._files[file] = rows
        self._ever.update(user for user, _ in rows)
        partial = self._folder / "input" / f"_{file}"  # Spark does not see what starts with _
        partial.write_text("".join(f"{user},{size}\n" for user, size in rows))
        os.utime(partial, (START + file, START + file))
        partial.rename(self._folder / "input" / f"{file:04}.csv")

    def _query_id(self) -> str:
        return str(json.loads((self._folder / "checkpoint" / "metadata").read_text())["id"])

    def _new_folder(self) -> Path:
        self._starts += 1
        folder = self._folder / f"start-{self._starts}"
        folder.mkdir()
        return folder

    def _job(self, options: dict[str, Any]) -> AbstractContextManager[subprocess.Popen[bytes]]:
        options |= {
            "url": self._url,
            "type": self._kind,
            "input": str(self._folder / "input"),
            "checkpoint": str(self._folder / "checkpoint"),
            "conf": {"spark.sql.adaptive.coalescePartitions.enabled": "false"},  # two tasks, however small
        }
        return job(TESTS / "visits_job.py", options, self._log)

    def _kill_at_random(self, process: subprocess.Popen[bytes], folder: Path, batch: int) -> None:
        """Within the life of a batch, as this very driver has it, after the begin of ``batch + 1``."""
        begun = [folder / f"begun-{at}" for at in (batch, batch + 1)]
        wait_for(lambda: begun[1].exists() or process.poll() is not None, f"batch {batch + 1}", 240)
        if begun[1].exists():
            life = begun[1].stat().st_mtime - begun[0].stat().st_mtime
            time.sleep(self._random.uniform(0, 1.5 * life))  # the moment itself is what is tried
            os.killpg(process.pid, signal.SIGKILL)


def _differences(found: _Truth, truth: _Truth) -> dict[Any, Any]:
    keys = found.keys() | truth.keys()
    return {key: (found.get(key), truth.get(key)) for key in keys if found.get(key) != truth.get(key)}
