"""Kill a streaming job in the middle of a write, start it again, and find every count right.

    make demo
    make demo ARGS='--keep FOLDER'   # and then: mapstate serve sqlite:///FOLDER/visits.db

A job in a process of its own (demo_job.py) counts visits per user from a dozen files, one per
micro-batch, into a SQLite file. This process is a service that reads the counts meanwhile, with `open_reader`
and without Spark.

1. It waits until a batch is half written, and kills the job, its JVM and its workers with SIGKILL.
2. It shows what a reader sees then.
3. It starts the job again on the same checkpoint.
4. It compares every key with a count that plain Python made of the files.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import get_args

import psutil
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mapstate import StateReader, open_reader
from mapstate.errors import StateNotFoundError
from mapstate.reader import Consistency

BATCHES = 12
VISITS = 4_000  # in each
USERS = 5_000
KILL_IN = 5
PATIENCE = 180  # seconds without a new batch before the demo gives up

JOB = Path(__file__).with_name("demo_job.py")
STATE = "visits_by_user"

console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def main() -> int:
    arguments = argparse.ArgumentParser(description="Kills a streaming job, starts it again, and compares every key.")
    arguments.add_argument("--keep", metavar="FOLDER", type=Path, help="a new folder, which keeps the state")
    keep = arguments.parse_args().keep
    if keep is not None:
        keep.mkdir(parents=True)
        with suppress(TooLateError):
            return Demo(keep.resolve()).run()
        sys.exit("the batch was complete before the job was dead: try again, with another folder")
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="mapstate-demo-") as folder, suppress(TooLateError):
            return Demo(Path(folder)).run()
        console.print("\nThe batch was complete before the job was dead. Starting from the beginning.\n")
    sys.exit("three times the batch was complete before the job was dead: this machine is too fast for the demo")


class TooLateError(Exception):
    """The batch was complete before the job was dead."""


class Demo:
    """One demonstration: its files and its steps."""

    def __init__(self, folder: Path) -> None:
        self.visits = folder / "visits"
        self.checkpoint = folder / "checkpoint"
        self.log = folder / "job.log"
        # A commit that survives the process is enough here; the default also survives a loss of power.
        self.store = f"sqlite:///{folder}/visits.db?synchronous=normal"

    def run(self) -> int:
        """Run all steps; 0 if every key is right in the end."""
        self.make_visits()
        console.print(f"{BATCHES} files of {VISITS:,} visits each: a stream of {BATCHES} micro-batches.")
        console.print("Starting the job. Spark needs some seconds to come up.\n")

        self.kill_in_mid_batch()
        if not self.show_half_a_batch():
            return 1

        console.print("\nStarting the job again, on the same checkpoint and the same store.\n")
        with self.job() as job:
            for _ in self.batches(job):
                pass
        return self.compare()

    def make_visits(self) -> None:
        """Write the same visits in every run. Some users come more often than others."""
        self.visits.mkdir()
        chance = random.Random(2026)
        for batch in range(BATCHES):
            path = self.visits / f"{batch:02}.csv"
            with path.open("w", newline="") as file:
                for _ in range(VISITS):
                    user = int(USERS * chance.random() ** 1.5)
                    page = chance.choice(["/", "/search", "/cart"])
                    csv.writer(file).writerow([f"user-{user:04}", page, chance.randrange(600)])
            os.utime(path, (batch, batch))  # Spark takes the oldest file first

    def kill_in_mid_batch(self) -> None:
        """Let the job run until batch `KILL_IN` is half written, and kill it there."""
        with self.job() as job:
            for reader in self.batches(job):
                attempt = reader.ledger().in_flight
                if attempt is not None and attempt.batch_id == KILL_IN:
                    written, users = self.written(KILL_IN, sample=100)
                    if written > users // 4:
                        break
        # The job ran on between the last read and the kill, so read again.
        with open_reader(self.store, STATE) as reader:
            attempt = reader.ledger().in_flight
        written, users = self.written(KILL_IN)
        if attempt is None or attempt.batch_id != KILL_IN or written == users:
            raise TooLateError
        console.print(f"\n[bold]SIGKILL[/] while batch {KILL_IN}, txid {attempt.txid}, was being written")

    def written(self, batch: int, consistency: Consistency = "latest", sample: int | None = None) -> tuple[int, int]:
        """Count the users whose stored value has the batch, and the users of the batch."""
        users = sorted(truth(self.visits, batch, batch + 1))[:sample]
        after = truth(self.visits, 0, batch + 1)
        with open_reader(self.store, STATE, consistency=consistency) as reader:
            seen = zip(users, reader.multi_get(users), strict=True)
            return sum(fields == after[user] for user, fields in seen), len(users)

    def show_half_a_batch(self) -> bool:
        """Show what both kinds of reader see now. False if the committed one sees more than whole batches."""
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("read with")
        table.add_column("visits", justify="right")
        table.add_column(f"users with batch {KILL_IN}", justify="right")
        whole = False
        for consistency in get_args(Consistency):
            with open_reader(self.store, STATE, consistency=consistency) as reader:
                state = read(reader)
            if consistency == "committed":
                whole = state == truth(self.visits, 0, KILL_IN)
            visits = sum(fields["visits"] for fields in state.values())
            written, users = self.written(KILL_IN, consistency)
            table.add_row(f"consistency={consistency!r}", f"{visits:,}", f"{written:,} of {users:,}")
        console.print(table)
        console.print(
            f"A committed reader (the default) sees batches 0 to {KILL_IN - 1} "
            + ("and nothing else: every key is right." if whole else "[red]and something else: WRONG.[/]")
        )
        return whole

    def compare(self) -> int:
        """Compare every key of the state with an independent count."""
        right = truth(self.visits, 0, BATCHES)
        with open_reader(self.store, STATE) as reader:
            state = read(reader)
            dead = [txid for first, last in reader.ledger().dead for txid in range(first, last + 1)]
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("user")
        for name in ("visits", "in the state", "seconds", "in the state"):
            table.add_column(name, justify="right")
        everybody = right.keys() | state.keys()
        busiest = sorted(right, key=lambda user: right[user]["visits"], reverse=True)[:5]
        for name, users in [*((user, [user]) for user in busiest), (f"all {len(right):,} users", everybody)]:
            cells = [
                sum(counts[user][field] for user in users if user in counts)
                for field in ("visits", "seconds")
                for counts in (right, state)
            ]
            table.add_row(name, *(f"{cell:,}" for cell in cells))
        console.print(table)
        differ = sum(right.get(user) != state.get(user) for user in everybody)
        console.print(f"The killed attempt, which never counts: txid {', '.join(map(str, dead))}.")
        console.print(f"[bold]{differ} keys differ[/]")
        return 1 if differ else 0

    @contextmanager
    def job(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the job in a session of its own, and kill all of it afterwards."""
        with self.log.open("ab") as log:
            # A JVM that runs for half a minute would spend most of it compiling.
            java = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
            job = subprocess.Popen(
                [sys.executable, str(JOB), str(self.visits), self.store, str(self.checkpoint)],
                env=os.environ | {"JAVA_TOOL_OPTIONS": java.strip()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield job
        finally:
            kill(job)

    def reader(self, job: subprocess.Popen[bytes]) -> StateReader:
        """Open a reader of the state, as soon as the state exists."""
        deadline = time.monotonic() + PATIENCE
        while True:
            with suppress(StateNotFoundError):
                return open_reader(self.store, STATE)
            self.check(job, deadline)
            time.sleep(0.1)

    def batches(self, job: subprocess.Popen[bytes]) -> Iterator[StateReader]:
        """Follow the job until it has ended, and yield its reader again and again."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        with progress, self.reader(job) as reader:
            last = reader.ledger().last_commit
            bar = progress.add_task("batches committed", total=BATCHES, completed=last.batch_id + 1 if last else 0)
            deadline = time.monotonic() + PATIENCE
            ended = False
            while not ended:
                ended = job.poll() is not None  # first, so that the last batch is shown too
                ledger = reader.ledger()
                if ledger.last_commit is not None and ledger.last_commit != last:
                    last = ledger.last_commit
                    deadline = time.monotonic() + PATIENCE
                    user = reader.get("user-0042") or {"visits": 0}
                    console.print(
                        f"  batch {last.batch_id:2} is committed as txid {last.txid}: {last.rows:,} visits of "
                        f"{last.keys:,} users; user-0042 has {user['visits']}"
                    )
                    progress.update(bar, completed=last.batch_id + 1)
                yield reader
                self.check(job, deadline)
                time.sleep(0.02)

    def check(self, job: subprocess.Popen[bytes], deadline: float) -> None:
        """End the demo, with the job's log, if the job has failed or makes no progress."""
        failed = job.poll() not in (None, 0)
        if failed or time.monotonic() > deadline:
            console.print(self.log.read_text(errors="replace")[-8_000:], markup=False)
            sys.exit("the job failed: its log is above" if failed else f"no new batch in {PATIENCE} seconds")


@cache
def truth(visits: Path, first: int, end: int) -> dict[str, dict[str, int]]:
    """Count visits and seconds per user, in plain Python, of the files from ``first`` to before ``end``."""
    times: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for batch in range(first, end):
        with (visits / f"{batch:02}.csv").open(newline="") as file:
            for user, _, spent in csv.reader(file):
                times[user] += 1
                seconds[user] += int(spent)
    return {user: {"visits": times[user], "seconds": seconds[user]} for user in times}


def read(reader: StateReader) -> dict[str, dict[str, int]]:
    """Read the whole state, by user."""
    return {user: fields for (user,), fields in reader.scan()}


def kill(job: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to the job's whole session: its Python, its JVM, and the JVM's Python workers."""
    while members := [pid for pid in psutil.pids() if session_of(pid) == job.pid]:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended, or belongs to another user
        return None


if __name__ == "__main__":
    sys.exit(main())
