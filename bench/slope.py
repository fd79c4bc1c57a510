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

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Self
from unittest.mock import patch

import pyarrow as pa
from counted_state import CountedState, arrow_batches, processor_time, run_task
from redis_groups import RedisCluster
from servers import die_with_parent

from mapstate.spark.executor import task as executor_task
from mapstate.spark.executor.task import BatchTask

WARM_UP = 2
NICE, PART = 10, 110 / 1024
"""The niceness of what is slowed down, and its weight beside that of a process that is not nice."""

Way = tuple[str, int]
"""What is slowed down, and how many there are."""


@contextmanager
def a_busy_core() -> Iterator[None]:
    """Keep a process that never rests on the first core."""
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command, preexec_fn=die_with_parent) as restless:  # noqa: PLW1509
        try:
            os.sched_setaffinity(restless.pid, {_cores()[0]})
            yield
        finally:
            restless.kill()


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def apply_part(task: BatchTask, partition: int) -> None:
    """Run one task of several."""
    with patch.object(executor_task, "partition_id", lambda: partition):
        run_task(task, PARTS[partition])


PARTS: list[list[pa.RecordBatch]] = []
"""The batches of each task, in its process."""


def keep_parts(parts: list[list[pa.RecordBatch]]) -> None:
    """Begin a process for tasks."""
    die_with_parent()
    PARTS[:] = parts


class Point:
    """A state on so many masters, and processes that apply a batch together, each its part of the keys."""

    def __init__(self, masters: int, tasks: int, slow: str, users: Sequence[str]) -> None:
        self._stack = ExitStack()
        self._slow = slow
        self._nodes = self._stack.enter_context(RedisCluster(masters))
        parts = [arrow_batches(users[at::tasks]) for at in range(tasks)]
        self._pool = ProcessPoolExecutor(tasks, get_context("fork"), keep_parts, (parts,))
        self._stack.enter_context(self._pool)
        self._tasks = range(tasks)
        self.state = CountedState(self._nodes.url)

    def __enter__(self) -> Self:
        for _ in range(WARM_UP):
            self.apply()
        clients = [self._stack.enter_context(node.client()) for node in self._nodes.masters]
        masters, tasks = [one.info("server")["process_id"] for one in clients], list(self._pool._processes)
        slowed, others = (masters, tasks) if self._slow == "masters" else (tasks, masters)
        first, second, *_ = _cores()
        for process in slowed:
            os.sched_setaffinity(process, {first})
            os.setpriority(os.PRIO_PROCESS, process, NICE)
        for process in others:
            os.sched_setaffinity(process, {second})
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def apply(self) -> float:
        """Apply one batch; its seconds."""
        return self.state.apply_by(self._run)

    def _run(self, task: BatchTask) -> None:
        for done in [self._pool.submit(apply_part, task, at) for at in self._tasks]:
            done.result()


def processor(users: Sequence[str], rounds: int = 7) -> dict[str, list[float]]:
    """Processor microseconds a key, of all masters and of all tasks."""
    batches = arrow_batches(users)
    with RedisCluster(3) as nodes, ExitStack() as clients:
        state = CountedState(nodes.url)
        for _ in range(WARM_UP):
            state.apply(batches)
        servers = [clients.enter_context(node.client()) for node in nodes.masters]
        spent = [processor_time(state, batches, len(users), servers, rounds=1) for _ in range(rounds)]
    return {"masters": [one["server_cpu"] for one in spent], "tasks": [one["client_cpu"] for one in spent]}


def ask(keys: int = 100_000, turns: int = 7) -> Answer:
    users = [f"user-{at}" for at in range(keys)]
    spent = processor(users)
    ways: dict[Way, tuple[int, int]] = {
        **{("masters", number): (number, 2) for number in (1, 2, 3)},
        **{("tasks", number): (3, number) for number in (1, 2)},
    }
    with ExitStack() as stack:
        points = {way: stack.enter_context(Point(*of, way[0], users)) for way, of in ways.items()}
        stack.enter_context(a_busy_core())
        found = by_turns({f"{number} {slow}": points[slow, number].apply for slow, number in ways}, turns)
        for one in points.values():
            one.state.check(users, one.state.batches)
    rows, lines = [], []
    for slow, number in ways:
        own = found[f"{number} {slow}"]
        part = number * PART / (1 + number * PART)
        predicted = spread(spent[slow], 1 / part)
        lines.append((f"{slow}: {number}", f"{part:.2f}", predicted, spread(own, 1e6 / keys)))
        if number > 1:
            expected = number * (1 + PART) / (1 + number * PART)
            goal = Goal("least", round(0.9 * expected, 2))
            row = Row(f"keys per second, {number} {slow}", "one", ratios(found[f"1 {slow}"], own), goal)
            row.note = f"{expected:.2f} predicted"
            rows.append(row)
    return Answer(
        rows,
        f"{keys:,} keys a batch, {turns} turns after one to warm up",
        table("slowed down | have of a core | microseconds a key, predicted | measured", lines),
    )
