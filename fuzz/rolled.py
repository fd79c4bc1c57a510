"""Rolling windows in a job that a seed has made: drawn apart, so that a job without them is what it always was."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from fuzz.habits import State
from fuzz.rolling import Rolling
from fuzz.rows import Row
from fuzz.steps import AddFiles, ByHand, Event, Job, Start, Step

__all__ = ["with_rolling_windows"]

_SPANS = (0, 0, 0, 5, 30)


def with_rolling_windows(job: Job, chance: random.Random, without: Collection[str]) -> tuple[Job, set[str]]:
    """The job with one or two states that have rolling windows, in place of plain ones or beside them.

    Their rows have other times, too, where no state has windows that fire.
    """
    used = {"rolling windows"}
    columns = sorted({column for state in job.states for column in state.keys})
    states = [*job.states]
    plain = [at for at, one in enumerate(states) if (one.type, one.window, one.followed) == ("opaque", None, False)]
    beside = 0 if any(isinstance(step, ByHand) for step in job.steps) else 1  # a call by hand is for one state
    for at in plain[: chance.choice((1 - beside, 1, 1, 2))] or [len(states)]:
        keys = tuple(chance.sample(columns, min(1, len(columns))))
        found = states[at] if at < len(states) else State(f"state{at}", keys=keys)
        if chance.random() < 0.3:
            found = replace(found, keys=())
        states[at : at + 1] = [replace(found, rolling=_drawn(chance), lag=chance.choice((0, 0, 0, 3, 20)))]
    job = replace(job, states=tuple(states))
    pace = 0 if any(state.window for state in states) else chance.choice((1, 3))
    jumps = chance.random() < 0.15
    steps: list[Step] = []
    for number, step in enumerate(job.steps):
        if isinstance(step, AddFiles):
            files = tuple(_more(rows, chance, pace=pace, jumps=jumps) for rows in step.files)
            steps.append(AddFiles(files))
        elif isinstance(step, ByHand):
            steps.append(replace(step, rows=_more(step.rows, chance, pace=pace, jumps=jumps)))
        elif isinstance(step, Start) and number > 2 and chance.random() < 0.35 and "changed windows" not in without:
            used.add("changed windows")
            at = chance.choice([at for at, state in enumerate(states) if state.rolling])
            states[at] = _changed(states[at], chance)
            steps.append(replace(step, changed=(states[at],)))
        else:
            steps.append(step)
    gathers = any(isinstance(step, Start) and step.habit.gathers for step in steps)
    luck = 1.0 if gathers else chance.random()
    if luck < 0.25:
        taken_back = Event("the last batch is taken back: mapstate rollback, mapstate rewind")
        steps += [_later(steps), Start(), taken_back, Start()]
    elif luck < 0.45 and "changed windows" not in without:
        used.add("changed windows")
        at = chance.choice([at for at, state in enumerate(states) if state.rolling])
        steps += [_later(steps), Start(changed=(_changed(states[at], chance),))]
    return replace(job, steps=tuple(steps)), used


def _later(steps: Sequence[Step]) -> AddFiles:
    """The last files again, with later times."""
    *_, last = (step for step in steps if isinstance(step, AddFiles))
    return AddFiles(tuple(tuple(row._replace(t=(row.t or 0) + 12) for row in rows) for rows in last.files))


def _drawn(chance: random.Random) -> Rolling:
    unit = chance.choice((1, 1, 2, 5))
    windows = [(chance.randint(unit, 4 * unit + 8), unit)]
    while len(windows) < 2 + (chance.random() < 0.4):
        length, step = chance.randint(10, 80), unit * chance.choice((1, 2, 4, 5, 10))
        if step <= length and length not in {length for length, _ in windows}:
            windows.append((length, step))
    if chance.random() < 0.5:
        windows.append((0, 0))
    time = chance.choice(("t", "t", "moment"))
    return Rolling(
        tuple(windows),
        "t" if time == "t" else "moment",
        start=chance.choice((0, 0, 0, 3)),
        retention=chance.choice(_SPANS),
        ahead=chance.choice((None, None, None, 60)),
    )


def _more(rows: tuple[Row, ...], chance: random.Random, *, pace: int, jumps: bool) -> tuple[Row, ...]:
    """The rows, and more of their keys; some of them long ago, without a time, or far ahead.

    ``pace`` is how much faster time goes on, 0 where times stay as they are.
    """
    more = [replaced for row in rows for replaced in [_beside(row, chance)] * (chance.random() < 0.6)]
    found = [*rows, *more]
    for at, row in enumerate(found if pace else ()):
        luck, t = chance.random(), (row.t or 0) * pace
        if luck < 0.1:
            found[at] = row._replace(t=t - chance.randint(10, 120))
        elif luck < 0.13:
            found[at] = row._replace(t=None)
        elif jumps and luck < 0.2:
            found[at] = row._replace(t=10**10)
        else:
            found[at] = row._replace(t=t)
    return tuple(found)


def _beside(row: Row, chance: random.Random) -> Row:
    return row._replace(t=max(0, (row.t or 0) + chance.randint(-12, 12)), v=chance.randint(1, 9))


def _changed(state: State, chance: random.Random) -> State:
    """The state as the code of a restart declares it."""
    rolling = state.rolling
    if rolling is None:
        raise AssertionError("a state with rolling windows")
    windows, unit = [*rolling.windows], rolling.unit
    kind = chance.choice(("lag", "retention", "ahead", "less", "less", "more", "more", "more", "other"))
    if kind == "lag":
        return replace(state, lag=chance.choice((0, 3, 20)))
    if kind == "retention":
        return replace(state, rolling=replace(rolling, retention=chance.choice((0, 5, 30))))
    if kind == "ahead":
        return replace(state, rolling=replace(rolling, ahead=chance.choice((None, 60))))
    if kind == "less" and len(windows) > 1:
        gone = chance.choice(windows)
        if any(length for length, _ in windows if length != gone[0]):
            windows.remove(gone)
    elif kind == "other":
        at = chance.choice([at for at, (length, _) in enumerate(windows) if length])
        length, step = windows[at]
        windows[at] = length, min(step * 2, length // unit * unit)
    else:
        length, step = chance.choice(windows) if chance.random() < 0.6 else (80, unit)
        longest, step = length or 80, (step or unit) * chance.choice((1, 1, 2))
        length = chance.randint(min(step, longest), longest)
        if chance.random() < 0.2:
            length = step = 0
        if length not in {known for known, _ in windows} and step <= length:
            windows.append((length, step))
    changed = replace(rolling, windows=tuple(windows))
    are_multiples = all(step % changed.unit == 0 for _, step in windows)
    return replace(state, rolling=changed) if are_multiples else state
