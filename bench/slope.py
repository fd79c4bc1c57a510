"""Whether a cluster's throughput grows with masters, and with tasks, as `bench/model.py` takes for granted.

Two cores are too few for three masters and two tasks that have one each. So what is in question is slowed down: its
processes are stopped for most of each period of ten milliseconds, as if their cores were slower. The rest has the
machine. A task is a process that applies its part of a batch, all at one time, as Spark's workers do.

    masters     1, 2 and 3, slowed down; two tasks
    tasks       1 and 2, slowed down; three masters

The prediction is the model's: the processor time of servers, or of tasks, for a key, over how many there are and over
the part of the time that they run. The processor times are those of one task and three masters, none slowed down.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, spread, table  # isort: skip  # finds the servers

import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import NamedTuple, Self
from unittest.mock import patch

from counted_state import CountedState, arrow_batches, processor_time, run_task
from redis_groups import RedisCluster

from mapstate.spark.executor import task as executor_task
from mapstate.spark.executor.task import BatchTask

PERIOD = 0.010
SHARE = {"masters": 0.15, "tasks": 0.25}
"""The part of the time that they run."""
WARM_UP = 2


class Running:
    """Seconds that slowed processes were let run, and all seconds."""

    ran = passed = 0.0

    @property
    def share(self) -> float:
        """Which part they ran."""
        return self.ran / self.passed


@contextmanager
def slowed(processes: Sequence[int], share: float) -> Iterator[Running]:
    """Let ``processes`` run for ``share`` of the time."""
    running, over = Running(), threading.Event()

    def take_turns() -> None:
        while not over.is_set():
            started = time.perf_counter()
            for process in processes:
                os.kill(process, signal.SIGCONT)
            time.sleep(share * PERIOD)
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            stopped = time.perf_counter()
            time.sleep((1 - share) * PERIOD)
            running.ran += stopped - started
            running.passed += time.perf_counter() - started
        for process in processes:
            os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        yield running
    finally:
        over.set()
        thread.join()


def apply_part(task: BatchTask, partition: int, users: Sequence[str]) -> None:
    """Run one task of several."""
    with patch.object(executor_task, "partition_id", lambda: partition):
        run_task(task, arrow_batches(users))


class Tasks:
    """Processes that apply a batch together, each its part of the keys."""

    def __init__(self, number: int, users: Sequence[str]) -> None:
        self._pool = ProcessPoolExecutor(number, get_context("fork"))
        self._parts = [users[at::number] for at in range(number)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def processes(self) -> list[int]:
        """Those that the first batch has started."""
        return list(self._pool._processes)

    def run(self, task: BatchTask) -> None:
        """Apply one batch."""
        for done in [self._pool.submit(apply_part, task, at, part) for at, part in enumerate(self._parts)]:
            done.result()


class Point(NamedTuple):
    """Microseconds a key, of each batch, and the part of the time for which what is slowed down ran."""

    micros: list[float]
    share: float


def point(masters: int, tasks: int, slow: str, users: Sequence[str], turns: int) -> Point:
    """Measure batches with so many of each."""
    with RedisCluster(masters) as nodes, Tasks(tasks, users) as own, ExitStack() as clients:
        state = CountedState(nodes.url)
        for _ in range(WARM_UP):
            state.apply_by(own.run)
        servers = [clients.enter_context(node.client()) for node in nodes.masters]
        processes = own.processes() if slow == "tasks" else [one.info("server")["process_id"] for one in servers]
        with slowed(processes, SHARE[slow]) as running:
            seconds = [state.apply_by(own.run) for _ in range(turns)]
        state.check(users, state.batches)
    return Point([one * 1e6 / len(users) for one in seconds], running.share)


def processor(users: Sequence[str]) -> dict[str, float]:
    """Processor microseconds a key, of all masters and of all tasks."""
    with RedisCluster(3) as nodes, ExitStack() as clients:
        state = CountedState(nodes.url)
        for _ in range(WARM_UP):
            state.apply(arrow_batches(users))
        servers = [clients.enter_context(node.client()) for node in nodes.masters]
        spent = processor_time(state, arrow_batches(users), len(users), servers)
    return {"masters": spent["server_cpu"], "tasks": spent["client_cpu"]}


def ask(keys: int = 100_000, turns: int = 7) -> Answer:
    users = [f"user-{at}" for at in range(keys)]
    spent = processor(users)
    rows, lines = [], []
    for slow, points in (("masters", [(1, 2), (2, 2), (3, 2)]), ("tasks", [(3, 1), (3, 2)])):
        first = 0.0
        for number, (masters, tasks) in enumerate(points, 1):
            found = point(masters, tasks, slow, users, turns)
            predicted = spent[slow] / number / found.share
            lines.append((f"{number} {slow}", f"{found.share:.2f}", f"{predicted:.1f}", spread(found.micros)))
            first = first or statistics.median(found.micros)
            if number > 1:
                goal = Goal("least", 0.9 * number)
                rows.append(
                    Row(f"keys per second, {number} {slow}", "one", [first / one for one in found.micros], goal)
                )
    return Answer(
        rows,
        f"{keys:,} keys a batch, {turns} turns; a key takes {spent['masters']:.2f} microseconds of the masters' "
        f"processors, and {spent['tasks']:.2f} of the tasks'",
        table("slowed down | part of the time | microseconds a key, predicted | measured", lines),
    )
