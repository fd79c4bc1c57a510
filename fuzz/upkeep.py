"""What begins, changes and ends what a state holds: a seed before the stream, a correction, a forgotten key, a swap."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from fuzz.habits import Gives, State, build
from fuzz.rows import SCHEMA, Row, equal_key, plain, random_rows, shown
from fuzz.steps import ByHand, Job, Start, Step, Trips
from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.errors import ConfigurationError, CorruptStoreError, MapStateError
from mapstate.operations.forget import forget
from mapstate.operations.swap import swap
from mapstate.testing import Fail, FaultyBackend

if TYPE_CHECKING:
    from fuzz.world import Query, World

__all__ = ["Correct", "Corrected", "Forget", "Forgotten", "Seed", "Swap", "seed", "with_upkeep"]


class Corrected(NamedTuple):
    """Rows that a correction has added to the first state of the first query, and those that it took back."""

    added: tuple[Row, ...]
    taken: tuple[Row, ...]


class Forgotten(NamedTuple):
    """A key that a state has forgotten, with all rows of it from before: of so many files, and given by hand."""

    state: str
    key: tuple[object, ...]
    files: int
    by_hand: int


@dataclass(frozen=True)
class Seed(Step):
    """The states are seeded with all files that are there. The driver dies at a write of a ledger: the ``dies``-th."""

    dies: int = 0
    after: bool = False

    def do(self, world: World) -> None:
        done = [seed(world, query, self) for query in world.queries]
        if all(done):
            world.counted = len(world.files)
            world.check()

    def lines(self, gives: Gives) -> list[str]:
        fault = (
            f", and it dies {'after' if self.after else 'before'} write {self.dies} of a ledger" if self.dies else ""
        )
        return [f"seed{fault}"]


def seed(world: World, query: Query, step: Seed = Seed()) -> bool:
    """Seeds the states of a query, or goes on; whether they count then. What cannot be seeded is started without."""
    backend = resolve(world.url)
    if step.dies:
        marks = world.folder / f"seed-{world.runs}-{query.number}"
        marks.mkdir()
        faults = tuple(
            Fail(method=name, call=step.dies, after=step.after, error=CorruptStoreError)
            for name in ("swap", "swap_all")
        )
        backend = FaultyBackend(backend, str(marks), faults)
    world.runs += 1
    if any(state.window for state in query.states):
        world.lags.add(10**6)  # all files are one batch, in which none makes another's rows late
    rows = world._rows(query, at_once=True)
    try:
        built = build(query.grouped, world.job.together, rows, backend, {"patience": 0.5})
        built.states[0].seed(str(query.checkpoint), buckets=2)
    except MapStateError as error:
        world.note(f"seed: {type(error).__name__}: {str(error)[:400]}")
        if step.dies or isinstance(error, ConfigurationError):
            return False
        raise
    return True


@dataclass(frozen=True)
class Correct(Step):
    """A correction adds these rows, and takes so many back of those that count; it is asked for twice."""

    rows: tuple[Row, ...]
    taken: int

    def do(self, world: World) -> None:
        from fuzz.world import FailureError

        query, name = world.queries[0], f"correction-{len(world.log)}"
        counted = [row for file in world.files[: world.counted] for row in file] + world.by_hand
        counted += [row for each in world.corrections for row in each.added]
        for row in (row for each in world.corrections for row in each.taken):
            counted.remove(row)
        chance = random.Random(f"{world.job.seed} {name}")
        taken = tuple(chance.sample(counted, min(self.taken, len(counted))))
        frames = {
            part: world.spark.createDataFrame([tuple(row.as_dict().values()) for row in rows], SCHEMA)
            for part, rows in (("add", self.rows), ("retract", taken))
            if rows
        }
        options = {"apply_on": "driver", "patience": 0.5}
        stream = world._rows(query, at_once=False)
        counts = build(query.grouped, world.job.together, stream, resolve(world.url), options).states[0]
        for was_done in (False, True):
            try:
                done = counts.correct(id=name, **frames)
            except MapStateError as error:
                world.note(f"correct: {type(error).__name__}: {str(error)[:200]}")
                break
            if done.was_done != was_done:
                raise FailureError("wrong counts", f"correction {name!r} was applied: {done}")
            if not was_done:
                world.corrections.append(Corrected(self.rows, taken))
        world.check()

    def lines(self, gives: Gives) -> list[str]:
        return [f"a correction, twice: add {shown(self.rows)}, take {self.taken} rows back"]


@dataclass(frozen=True)
class Forget(Step):
    """Each state that can forgets one of its keys."""

    def do(self, world: World) -> None:
        for query in world.queries:
            for state in query.states:
                if state.window or state.rolling or state.followed or "u" in state.keys or not state.keys:
                    continue
                keys = sorted(world._contents(state.name, state.keys), key=repr)
                if keys:
                    self._forget(world, state, random.Random(f"{world.job.seed} {len(world.log)}").choice(keys))
        world.check()

    def _forget(self, world: World, state: State, key: tuple[object, ...]) -> None:
        with open_reader(world.url, state.name, follow=None) as reader:
            (where,) = (dict(zip(state.keys, own, strict=True)) for own, _ in reader.scan() if _plain(own) == key)
        try:
            forget(world.url, state.name, where, id=f"ticket-{len(world.log)}")
        except MapStateError as error:
            world.note(f"forget: {type(error).__name__}: {str(error)[:200]}")
            return
        world.forgotten.append(Forgotten(state.name, key, world.counted, len(world.by_hand)))

    def lines(self, gives: Gives) -> list[str]:
        return ["each state forgets a key: mapstate forget"]


@dataclass(frozen=True)
class Swap(Step):
    """Readers of the first query's states are led to those of the second one, or back."""

    is_back: bool = False

    def do(self, world: World) -> None:
        first, second = world.queries
        names = {
            one.name: None if self.is_back else other.name
            for one, other in zip(first.states, second.states, strict=True)
        }
        try:
            swap(world.url, names, force=True)
        except MapStateError as error:
            world.note(f"swap: {type(error).__name__}: {str(error)[:200]}")
            return
        world.led = {name: to or name for name, to in names.items()}
        world.check()

    def lines(self, gives: Gives) -> list[str]:
        return [f"mapstate swap, {'back' if self.is_back else 'to the states of the second query'}"]


def _plain(key: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(map(plain, key))


def is_forgotten(world: World, state: str, row: Row, keys: Collection[str], file: int, *, by_fields: bool) -> bool:
    """Whether a row of the file of this number was forgotten with its key; -1 - at of one that was given by hand."""
    return any(
        one.state == state
        and (file < one.files if file >= 0 else -1 - file < one.by_hand)
        and one.key == equal_key(row, keys, by_fields=by_fields)
        for one in world.forgotten
    )


def with_upkeep(job: Job, chance: random.Random, without: Collection[str]) -> tuple[Job, set[str]]:
    """The job with a seed before its stream, or with one of the others after a run; and which of them it has."""
    used: set[str] = set()
    runs = [at for at, step in enumerate(job.steps) if isinstance(step, Start)]
    strange = any(
        isinstance(step, Start) and (step.habit.gathers or isinstance(step.fault, Trips) or "ttl" in dict(step.options))
        for step in job.steps
    )
    if strange or job.gives != "every row" or not runs:
        return job, used
    steps, can_be_one = list(job.steps), len(job.states) == 1
    plain_states = all(not (state.window or state.rolling or state.followed) for state in job.states)
    is_opaque = all(state.type == "opaque" for state in job.states)
    draws = {name: chance.random() for name in ("seed", "correction", "forget", "swap")}
    later: Step | None = None
    if draws["correction"] < 0.7 and can_be_one and is_opaque and plain_states and "correction" not in without:
        columns = sorted({column for state in job.states for column in state.keys})
        later = Correct(random_rows(chance, columns, 8, 3), chance.randint(0, 2))
        used.add("correction")
    elif draws["forget"] < 0.4 and plain_states and "forget" not in without:
        later = Forget()
        used.add("forget")
    elif draws["swap"] < 0.5 and is_opaque and "swap" not in without:
        job, later = replace(job, queries=2), Swap()
        used.add("swap")
    if later is not None:
        at = chance.choice(runs) + 1
        steps[at:at] = [later, Swap(is_back=True)] if isinstance(later, Swap) and chance.random() < 0.4 else [later]
    before = steps[: runs[0]]
    can_be_seeded = (can_be_one or job.together == "topology") and not any(isinstance(step, ByHand) for step in before)
    if draws["seed"] < 0.35 and can_be_seeded and "seed" not in without:
        dies = chance.choice((0, 0, *range(1, 7)))
        steps.insert(runs[0], Seed(dies, chance.random() < 0.5))
        used.add("seed")
    return replace(job, steps=tuple(steps)), used
