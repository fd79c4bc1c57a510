"""Exploring a world: every state that can be reached, or a long way through a large one.

`explore` is exhaustive, breadth first, so that a counterexample is as short as one can be. It keeps a 64-bit hash
of each state and not the state: among ten million of them two are taken for one with a chance of one in
hundreds of thousands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from model.correcting import Correcting, CorrectingProtocol, CorrectingSteps
from model.following import Following, FollowingProtocol, FollowingSteps
from model.forgetting import Forgetting, ForgettingProtocol, ForgettingSteps
from model.parts import Parts, PartsProtocol, PartsSteps
from model.protocol import Protocol
from model.replans import Replans, ReplansSteps, protocol_of
from model.rolling import Rolling, RollingProtocol, RollingSteps
from model.steps import Steps
from model.swapping import Swapping, SwappingProtocol, SwappingSteps
from model.together import Together, TogetherProtocol, TogetherSteps
from model.world import Label, ViolationError, World

__all__ = ["AnyWorld", "Explored", "explore", "walk"]

AnyWorld = World | Together | Replans | Following | Forgetting | Correcting | Swapping | Parts | Rolling


class Explored(NamedTuple):
    """What came out. ``violation`` and the ``trace`` of steps to it, where there is one.

    ``complete`` is False where the limit came first; ``states`` is how many were looked at. ``labels`` are those of
    all steps that were taken.
    """

    world: str
    states: int
    seconds: float
    complete: bool
    violation: str | None = None
    trace: tuple[Label, ...] = ()
    labels: frozenset[Label] = frozenset()

    def __str__(self) -> str:
        if self.violation is None:
            extent = "all" if self.complete else "the first"
            return f"{self.world}: {extent} {self.states:,} states, no counterexample, {self.seconds:.1f} s"
        steps = "".join(f"\n  {at:2} {_text(label)}" for at, label in enumerate(self.trace, 1))
        return f"{self.world}: {self.violation}, after {len(self.trace)} steps ({self.states:,} states):{steps}"


def _steps_of(world: AnyWorld, protocol: Protocol | None = None) -> Any:
    """The steps of a world, under the library's protocol or a mutant's."""
    if isinstance(world, World):
        return Steps(world, protocol or Protocol(world.type))
    if isinstance(world, Following):
        logged = protocol or FollowingProtocol()
        assert isinstance(logged, FollowingProtocol)
        return FollowingSteps(world, logged)
    if isinstance(world, Forgetting):
        forgets = protocol or ForgettingProtocol()
        assert isinstance(forgets, ForgettingProtocol)
        return ForgettingSteps(world, forgets)
    if isinstance(world, Correcting):
        corrects = protocol or CorrectingProtocol()
        assert isinstance(corrects, CorrectingProtocol)
        return CorrectingSteps(world, corrects)
    if isinstance(world, Swapping):
        swaps = protocol or SwappingProtocol()
        assert isinstance(swaps, SwappingProtocol)
        return SwappingSteps(world, swaps)
    if isinstance(world, Parts):
        in_parts = protocol or PartsProtocol(world.type)
        assert isinstance(in_parts, PartsProtocol)
        return PartsSteps(world, in_parts)
    if isinstance(world, Rolling):
        rolling = protocol or RollingProtocol()
        assert isinstance(rolling, RollingProtocol)
        return RollingSteps(world, rolling)
    if isinstance(world, Replans):
        return ReplansSteps(world, protocol_of(world, protocol))
    own = protocol or TogetherProtocol(world.type)
    assert isinstance(own, TogetherProtocol)
    return TogetherSteps(world, own)


def explore(world: AnyWorld, protocol: Protocol | None = None, *, limit: int = 100_000_000) -> Explored:
    """Looks at every state of a world, or at ``limit`` of them, until one is wrong."""
    started = time.monotonic()
    steps = _steps_of(world, protocol)
    first: Any = world.start()
    parents: dict[int, int] = {hash(first): 0}
    frontier = [first]
    labels: set[Label] = set()
    while frontier:
        following: list[Any] = []
        for state in frontier:
            came_from = hash(state)
            try:
                for label, after in steps.of(state):
                    labels.add(label)
                    number = hash(after)
                    if number not in parents:
                        parents[number] = came_from
                        try:
                            steps.check(after)
                        except ViolationError as error:
                            trace = (*_trace(steps, first, parents, came_from), label)
                            return _found(world, parents, started, error, trace)
                        following.append(after)
            except ViolationError as error:
                trace = (*_trace(steps, first, parents, came_from), ("and then",))
                return _found(world, parents, started, error, trace)
            if len(parents) >= limit:
                return Explored(world.name, len(parents), time.monotonic() - started, complete=False)
        frontier = following
    seconds = time.monotonic() - started
    return Explored(world.name, len(parents), seconds, complete=True, labels=frozenset(labels))


def walk(
    world: World | Rolling,
    choose: Callable[[Sequence[Label]], int],
    protocol: Protocol | None = None,
    *,
    longest: int = 500,
) -> Explored:
    """One way through a world: ``choose`` picks each step by its place among those that can be taken."""
    started = time.monotonic()
    steps = _steps_of(world, protocol)
    state, trace = world.start(), list[Label]()
    try:
        while len(trace) < longest and (offered := list(steps.of(state))):
            label, state = offered[choose([label for label, _ in offered])]
            trace.append(label)
            steps.check(state)
    except ViolationError as error:
        seconds = time.monotonic() - started
        return Explored(world.name, len(trace), seconds, complete=False, violation=str(error), trace=tuple(trace))
    return Explored(world.name, len(trace), time.monotonic() - started, complete=False)


def _found(
    world: AnyWorld,
    parents: dict[int, int],
    started: float,
    error: ViolationError,
    trace: tuple[Label, ...],
) -> Explored:
    seconds = time.monotonic() - started
    return Explored(world.name, len(parents), seconds, complete=False, violation=str(error), trace=trace)


def _trace(steps: Any, first: Any, parents: dict[int, int], number: int) -> list[Label]:
    """The steps to a state, found again by their hashes."""
    way = [number]
    while way[-1] != hash(first):
        way.append(parents[way[-1]])
    state, trace = first, list[Label]()
    for wanted in reversed(way[:-1]):
        label, state = next((label, after) for label, after in steps.of(state) if hash(after) == wanted)
        trace.append(label)
    return trace


def _text(label: Label) -> str:
    return " ".join(str(word) for word in label if word != "")
