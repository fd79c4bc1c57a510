"""Whether a cluster's throughput grows with masters, and with tasks, as `bench/model.py` takes for granted.

Two cores are too few for three masters and two tasks that have one each. So what is in question shares one core with a
process that never rests, and of that core each gets a small part, by the weights of Linux. The rest has the other core.
A task is a process that applies its part of a batch, all at one time, as Spark's workers do.

    masters     1, 2 and 3 with a small part of a core each; two tasks
    tasks       1 and 2 with a small part of a core each; three masters

The prediction is the model's: the processor time of the masters, or of the tasks, for a key, over the part of a core
that all of them have. The processor times are those of one task and three masters that have all cores.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, spread, table  # isort: skip  # finds the servers

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Self
from unittest.mock import patch

from counted_state import CountedState, arrow_batches, processor_time, run_task
from redis_groups import RedisCluster

from mapstate.spark.executor import task as executor_task
from mapstate.spark.executor.task import BatchTask

WARM_UP = 2
NICE, PART = 10, 110 / 1024
"""The niceness of what is slowed down, and its weight beside that of a process that is not nice."""


@contextmanager
def slowed(slow: Sequence[int], others: Sequence[int]) -> Iterator[None]:
    """Let processes share a core with one that never rests, and the ``others`` have the other core."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as restless:
        os.sched_setaffinity(restless.pid, {first})
        for process in slow:
            os.sched_setaffinity(process, {first})
            os.setpriority(os.PRIO_PROCESS, process, NICE)
        for process in others:
            os.sched_setaffinity(process, {second})
        try:
            yield
        finally:
            restless.kill()


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


def point(masters: int, tasks: int, slow: str, users: Sequence[str], turns: int) -> list[float]:
    """Microseconds a key, of each batch, with so many of each."""
    with RedisCluster(masters) as nodes, Tasks(tasks, users) as own, ExitStack() as clients:
        state = CountedState(nodes.url)
        for _ in range(WARM_UP):
            state.apply_by(own.run)
        servers = [clients.enter_context(node.client()) for node in nodes.masters]
        processes = [[one.info("server")["process_id"] for one in servers], own.processes()]
        with slowed(*(processes if slow == "masters" else reversed(processes))):
            seconds = [state.apply_by(own.run) for _ in range(turns)]
        state.check(users, state.batches)
    return [one * 1e6 / len(users) for one in seconds]


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
            part = number * PART / (1 + number * PART)
            lines.append((f"{number} {slow}", f"{part:.2f}", f"{spent[slow] / part:.1f}", spread(found)))
            first = first or statistics.median(found)
            if number > 1:
                expected = number * (1 + PART) / (1 + number * PART)
                row = Row(
                    f"keys per second, {number} {slow}",
                    "one",
                    [first / one for one in found],
                    Goal("least", round(0.9 * expected, 2)),
                )
                row.note = f"{expected:.2f} predicted"
                rows.append(row)
    return Answer(
        rows,
        f"{keys:,} keys a batch, {turns} turns; a key takes {spent['masters']:.2f} microseconds of the masters' "
        f"processors, and {spent['tasks']:.2f} of the tasks'",
        table("slowed down | have of a core | microseconds a key, predicted | measured", lines),
    )
