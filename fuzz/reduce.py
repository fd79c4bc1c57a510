"""A failing job, reduced: steps, states, rows and habits are left out while it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fuzz.habits import Habit, State
from fuzz.steps import AddFiles, ByHand, Job, Start, Step
from fuzz.upkeep import Correct, Seed

__all__ = ["shortest"]


def shortest(job: Job, still_fails: Callable[[Job], bool], *, plays: int = 60) -> Job:
    """The job without all that it fails without; at most ``plays`` smaller ones are tried."""
    tried: set[str] = set()  # by their texts: a row with a struct has no hash
    found = True
    while found:
        found = False
        for smaller in _smaller(job):
            if len(tried) >= plays:
                return job
            if repr(smaller) in tried:
                continue
            tried.add(repr(smaller))
            if still_fails(smaller):
                job, found = smaller, True
                break
    return job


def _smaller(job: Job) -> Iterator[Job]:
    """Jobs with one thing less, the largest things first."""
    yield from _shorter(job, "steps", 0)
    yield from _shorter(job, "states", 1)
    yield from _simpler(job, daily=False, queries=1, sources=1, together="", gives="every row", store="memory")
    for at, step in enumerate(job.steps):
        for smaller in _smaller_step(step):
            yield replace(job, steps=(*job.steps[:at], smaller, *job.steps[at + 1 :]))
    for at, state in enumerate(job.states):
        defaults = {name: value for name, value in vars(State("")).items() if name != "name"}
        for simpler in _simpler(state, **defaults):
            yield replace(job, states=(*job.states[:at], simpler, *job.states[at + 1 :]))
        if state.rolling is not None:
            fewer = _simpler(state.rolling, start=0, retention=0, ahead=None)
            for rolling in (*_shorter(state.rolling, "windows", 2), *fewer):
                other = replace(state, rolling=rolling)
                yield replace(job, states=(*job.states[:at], other, *job.states[at + 1 :]))


def _smaller_step(step: Step) -> Iterator[Step]:
    if isinstance(step, AddFiles):
        yield from _shorter(step, "files", 1)
        for at, rows in enumerate(step.files):
            for row in range(len(rows)):
                fewer = rows[:row] + rows[row + 1 :]
                yield replace(step, files=(*step.files[:at], fewer, *step.files[at + 1 :]))
    elif isinstance(step, ByHand):
        yield from _shorter(step, "rows", 1)
    elif isinstance(step, Seed):
        yield from _simpler(step, dies=0, after=False)
    elif isinstance(step, Correct):
        yield from _shorter(step, "rows", 0)
        yield from _simpler(step, taken=0)
    elif isinstance(step, Start):
        yield from _simpler(step, killed=False, fault=None, at_once=False)
        yield from _shorter(step, "options", 0)
        yield from _shorter(step, "changed", 0)
        for habit in _simpler(step.habit, **vars(Habit())):
            yield replace(step, habit=habit)


def _shorter(one: Any, name: str, least: int) -> Iterator[Any]:
    """The same with one item less in the tuple of this name."""
    items = getattr(one, name)
    for at in range(len(items) if len(items) > least else 0):
        yield replace(one, **{name: items[:at] + items[at + 1 :]})


def _simpler(one: Any, **defaults: Any) -> Iterator[Any]:
    """The same with one field at its default."""
    for name, value in defaults.items():
        if getattr(one, name) != value:
            yield replace(one, **{name: value})
