"""A job, and what happens to it, step by step: data that a human can read and a seed makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fuzz.advice import settle
from fuzz.habits import Gives, Habit, State
from fuzz.rows import Row, shown

if TYPE_CHECKING:
    from fuzz.world import World

__all__ = [
    "AddFiles",
    "Break",
    "ByHand",
    "Dies",
    "Event",
    "Job",
    "Start",
    "Step",
    "Trips",
]


class Step:
    """Something that happens to a job.

    `do` raises `fuzz.world.FailureError` for what must not be; `lines` is what a human reads.
    """

    def do(self, world: World) -> None:
        raise NotImplementedError

    def lines(self, gives: Gives) -> list[str]:
        raise NotImplementedError


@dataclass(frozen=True)
class Break:
    """The store fails at ``moment`` of the n-th batch of a run, before or ``after`` it did what it was asked.

    Once, or whenever the batch asks if it ``lasts``: no begin or commit of it is answered then.
    """

    moment: Literal["begin", "write", "commit"]
    batch: int
    after: bool = False
    lasts: bool = False


@dataclass(frozen=True)
class Dies:
    """The driver dies in the n-th batch of a run."""

    moment: Literal["before the calls", "between the calls", "after the calls", "downstream"]
    batch: int


@dataclass(frozen=True)
class Trips:
    """The function's own code fails in the n-th batch of a run before it calls a state; it logs that and goes on."""

    batch: int


@dataclass(frozen=True)
class AddFiles(Step):
    """Files come: each is one batch, or with two sources each pair of them."""

    files: tuple[tuple[Row, ...], ...]

    def do(self, world: World) -> None:
        for rows in self.files:
            world.add_file(rows)

    def lines(self, gives: Gives) -> list[str]:
        return [f"a file: {shown(rows)}" for rows in self.files]


@dataclass(frozen=True)
class Start(Step):
    """The queries run until they have read all files, and what an error advises is done until they end well.

    ``killed``: it runs in a process of its own, and the fault is a real SIGKILL. ``at_once``: its files are one batch.
    ``changed`` are states of the job that are declared so from here on.
    """

    habit: Habit = field(default_factory=Habit)
    options: tuple[tuple[str, Any], ...] = ()
    fault: Break | Dies | Trips | None = None
    killed: bool = False
    at_once: bool = False
    changed: tuple[State, ...] = ()

    def do(self, world: World) -> None:
        settle(world, self)

    def lines(self, gives: Gives) -> list[str]:
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        fault = "" if self.fault is None else f", {'SIGKILL at ' * self.killed}{self.fault}"
        at_once = ", all files in one batch" * self.at_once
        changed = [f"from here on: {state}" for state in self.changed]
        return [*changed, f"start{options}{fault}{at_once}, with def each_batch(rows, batch_id):"] + [
            f"    {line}" for line in self.habit.lines(gives)
        ]


@dataclass(frozen=True)
class ByHand(Step):
    """The states are called by hand: with these rows, or with those of all ``files``."""

    batch_id: int
    rows: tuple[Row, ...] = ()
    files: bool = False

    def do(self, world: World) -> None:
        world.call_by_hand(self.rows, self.batch_id, files=self.files)

    def lines(self, gives: Gives) -> list[str]:
        return [f"counts({'all files' if self.files else shown(self.rows)}, {self.batch_id}) by hand"]


@dataclass(frozen=True)
class Event(Step):
    """What happens between two runs: one of `fuzz.world.EVENTS`."""

    what: str

    def do(self, world: World) -> None:
        from fuzz.world import EVENTS

        EVENTS[self.what](world)

    def lines(self, gives: Gives) -> list[str]:
        return [self.what]


@dataclass(frozen=True)
class Job:
    """What a user declares, and what happens then.

    ``together``  the states are of one "topology", of one "stream", or each of a stream of its own ("")
    ``sources``   directories whose files are united; ``queries``  that run at one time, with the same declarations
    ``daily``     a run has all files that have come in one batch, and else one file in a batch
    """

    seed: int
    store: Literal["memory", "sqlite", "redis"]
    states: tuple[State, ...]
    steps: tuple[Step, ...]
    together: str = ""
    gives: Gives = "every row"
    sources: int = 1
    queries: int = 1
    daily: bool = False

    def script(self) -> Iterator[str]:
        """The job as a human reads it."""
        yield f"seed {self.seed}: {self.store}, {self.queries} queries of {self.sources} sources, {self.gives}" + (
            ", all files of a run in one batch" * self.daily + f", states of one {self.together}" * bool(self.together)
        )
        for state in self.states:
            yield f"    {state}"
        for number, step in enumerate(self.steps, 1):
            first, *others = step.lines(self.gives)
            yield f"  {number}. {first}"
            yield from (f"     {line}" for line in others)
