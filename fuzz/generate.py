"""A job from a seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fuzz.habits import THROUGH, Gives, Habit, State
from fuzz.rolled import with_rolling_windows
from fuzz.rows import KEYS, Row, random_rows
from fuzz.steps import AddFiles, Break, ByHand, Dies, Event, Job, Start, Step, Trips
from fuzz.upkeep import with_upkeep

__all__ = ["INGREDIENTS", "random_job"]

INGREDIENTS = {
    "parts": "a batch in parts, in the query's own thread",
    "threads": "calls from other threads",
    "job group": "a job group of the user's own",
    "left out": "batches that the function makes no call for",
    "structs": "keys that are structs",
    "repeated by hand": "two calls by hand with one number",
    "filled by hand": "the files of the source, given by hand first",
    "adopt": "on_new_owner='adopt' that stays in the job",
    "ttl": "a ttl that is put in or taken out",
    "createDataFrame": "a frame that is made anew of the batch's rows",
    "swallow": "exceptions of a state that the function swallows",
    "rolling windows": "states with rolling windows",
    "changed windows": "rolling windows that a restart declares otherwise",
    "seed": "states that are seeded before the first run",
    "correction": "rows that are added and taken back between two runs",
    "forget": "keys that are forgotten between two runs",
    "swap": "readers that are led to other states between two runs",
    "blocks": "states with many keys in a record",
}
"""What can be left out, by name."""

_PUT_BACK = {
    "old checkpoint": ("each checkpoint is copied", "the copies of the checkpoints are put back"),
    "old store": ("the store is copied", "the copy of the store is put back"),
}
_IN_BLOCKS = {"s", "i", "f", "day", "at", "raw"}
"""Key columns of states with blocks."""

_THREADS = ("pool of one", "pool of two", "inheritable")
T = TypeVar("T")


class _Generator:
    """One job's choices. Most jobs are plain but for one or two things, so that a failure tells what it is of."""

    def __init__(self, seed: int, *, redis: bool, kills: bool, without: Collection[str]) -> None:
        self.chance = random.Random(seed)
        self.seed, self.redis, self.kills, self.without = seed, redis, kills, without
        self.number = 0
        self.used: set[str] = set()

    def often(self, share: float, ingredient: str = "") -> bool:
        """True so often; never for what is left out."""
        is_so = self.chance.random() < share and ingredient not in self.without
        if is_so and ingredient:
            self.used.add(ingredient)
        return is_so

    def pick(self, *values: T) -> T:
        """One of these."""
        return self.chance.choice(values)

    def job(self) -> Job:
        """The job."""
        self.ttl = self.often(0.08, "ttl") and self.redis
        self.gathers = not self.ttl and self.often(0.05, "left out")
        special = self.ttl or self.gathers
        self.trips = not special and self.often(0.06, "left out")
        gives: Gives = "every row"
        if not special and self.often(0.25):
            gives = "rows where v > 3, if there is one" if self.often(0.4, "left out") else "rows where v > 3"
        store: Any = self.pick("sqlite", "sqlite", "sqlite", "memory", "redis" if self.redis else "memory")
        store = "redis" if self.ttl else store
        self.store = store
        self.states = tuple(self.state(at) for at in range(self.pick(1, 1, 1, 1, 1, 2, 2, 3)))
        self.columns = sorted({column for state in self.states for column in state.keys})
        windowed = any(state.window for state in self.states)
        sources = 2 if not (windowed or special) and self.often(0.15) else 1
        together = self.pick("", "stream", "topology") if len(self.states) > 1 or self.often(0.1) else ""
        self.by_hand_is_possible = not windowed and not special
        self.can_be_at_once = self.by_hand_is_possible and not self.trips
        steps = [*self.first(), *self.files(), self.start()]
        for _ in range(0 if self.gathers else self.pick(0, 0, 1, 1, 1, 2)):
            steps += self.event()
        daily = self.often(0.3) and self.can_be_at_once
        queries = 2 if not self.ttl and self.often(0.05) else 1
        return Job(self.seed, store, self.states, tuple(steps), together, gives, sources, queries, daily)

    def state(self, at: int) -> State:
        """One state."""
        kind = "opaque" if self.ttl else self.pick("opaque", "opaque", "opaque", "transactional", "non_transactional")
        keys = tuple(self.chance.sample(KEYS[:-1], self.pick(1, 1, 1, 2))) if self.often(0.95) else ()
        if self.often(0.06, "structs"):
            keys = ("u", *keys[1:])
        is_plain = kind == "opaque" and not (self.ttl or self.gathers)
        window = self.pick(10, 25) if is_plain and self.often(0.2) else None
        lag = self.pick(0, 5, 100) if window else 0
        followed = kind == "opaque" and not self.ttl and not window and self.often(0.15)
        return State(f"state{at}", kind, keys, window, lag, followed)  # type: ignore[arg-type]

    def files(self) -> list[Step]:
        """Some files, as many as a function needs that gathers two batches, or trips between two."""
        made: list[tuple[Row, ...]] = []
        counts = (2, 4) if self.gathers else (3, 4) if self.trips else (1, 1, 2, 3)
        for _ in range(self.pick(*counts)):
            self.number += 1
            made.append(() if self.often(0.05) else random_rows(self.chance, self.columns, 8 * self.number, 4))
        return [AddFiles(tuple(made))]

    def habit(self) -> Habit:
        """A function; half of them only call the states."""
        if self.gathers:
            return Habit(gathers=True)
        if self.often(0.35):
            return Habit()
        parts = self.pick(1, 1, 2, 3)
        anew, passed_on = ([name for name in THROUGH if ("createDataFrame" in name) == is_anew] for is_anew in (1, 0))
        through = self.pick(*anew) if self.often(0.12, "createDataFrame") else self.pick(*passed_on, "", "")
        return Habit(
            parts=parts,
            united=parts > 1 and not self.often(0.6, "parts"),  # in parts or united: most such functions are wrong
            threads=self.pick(*_THREADS) if self.often(0.25, "threads") else "",
            through=through,
            group=self.pick("mine", "uuid") if self.often(0.15, "job group") else "",
            around=self.pick("retry", "swallow") if self.often(0.2, "swallow") else "",
            early=self.often(0.2, "left out"),
            anew=self.often(0.15),
        )

    def start(self, *, can_fail: bool = True) -> Start:
        """A run, with a fault in a third of them."""
        options: dict[str, Any] = {}
        fault: Break | Dies | Trips | None = None
        if can_fail and not self.gathers and self.often(0.35):
            batch = self.pick(0, 0, 1, 2)
            moments = ("before the calls", "between the calls", "after the calls", "downstream")
            fault = Dies(self.pick(*moments), batch)  # type: ignore[arg-type]
            if self.often(0.5):
                moment: Any = self.pick("begin", "write", "commit")
                fault = Break(moment, batch, self.often(0.5), lasts=moment != "write" and self.often(0.4))
        if can_fail and self.trips:
            fault = Trips(self.pick(0, 1, 1))
        if self.often(0.04):
            options["apply_on"] = "executors" if self.store != "memory" else "auto"
        if self.often(0.1) and not isinstance(fault, Break):
            options["lag"] = self.pick(0, 5, 100)
        if self.ttl and self.often(0.6):
            options["ttl"] = 3600
        if self.often(0.1, "adopt"):
            options["on_new_owner"] = "adopt"
        options = {name: value for name, value in options.items() if name != "lag" or self.has_windows}
        killed = self.often(0.2) and self.kills and isinstance(fault, Break) and self.store != "memory"
        habit = self.habit()
        if isinstance(fault, Break) and fault.lasts and self.often(0.5, "swallow"):
            habit = replace(habit, around="swallow")  # the run goes on after a batch that failed
        if can_fail and habit.parts > 1 and not habit.united and self.often(0.3):
            fault, killed = Dies("between the calls", self.pick(0, 1)), False  # a part counts, the others do not
        return Start(habit, tuple(options.items()), fault, killed)

    @property
    def has_windows(self) -> bool:
        """Whether all states have windows, so that all take a lag."""
        return all(state.window for state in self.states)

    def first(self) -> list[Step]:
        """What happens before the first run."""
        return self.by_hand(0) if self.by_hand_is_possible and self.often(0.08) else []

    def by_hand(self, batch_id: int) -> list[Step]:
        """Calls by hand."""
        if self.often(0.3, "filled by hand"):
            return [*self.files(), ByHand(batch_id, files=True)]
        calls = [ByHand(batch_id, random_rows(self.chance, self.columns, 8 * self.number, 3)) for _ in range(2)]
        return [*calls] if self.often(0.5, "repeated by hand") else [calls[0]]

    def event(self) -> Sequence[Step]:
        """Something that happens between two runs, and the next run."""
        if self.ttl:
            return [*self.files(), self.start(), Event("all records with a ttl expire")]
        kinds = ["files", "files", "old checkpoint", "lost checkpoint", "rollback", "by hand"]
        kinds += ["old store", "old store"] if self.store == "sqlite" else []
        kind = self.pick(*kinds)
        between: list[Step] = []
        at_once = False
        if kind in _PUT_BACK:
            copied, put_back = map(Event, _PUT_BACK[kind])
            between = [copied, *self.files(), self.start(can_fail=False), put_back]
            if kind == "old checkpoint" and self.often(0.4):
                again = Event("the checkpoints that were replaced are put back")
                between += [*self.files(), self.start(can_fail=False), again]
            at_once = self.can_be_at_once and self.often(0.5)  # the batches of before come with other files
        elif kind == "lost checkpoint":
            between = [Event(self.pick("the checkpoints are lost", "the checkpoints are moved away by mistake"))]
        elif kind == "rollback":
            between = [Event("the last batch is taken back: mapstate rollback, mapstate rewind")]
        elif kind == "by hand" and self.by_hand_is_possible:
            between = self.by_hand(self.pick(0, self.number))
        return [*between, *self.files(), replace(self.start(), at_once=at_once)]


def random_job(
    seed: int, *, redis: bool = False, kills: bool = False, without: Collection[str] = ()
) -> tuple[Job, set[str]]:
    """The job of a seed, and which `INGREDIENTS` it has: the same for the same arguments.

    ``without`` names those that are left out, ``redis`` and ``kills`` say what there may be.
    """
    generator = _Generator(seed, redis=redis, kills=kills, without=without)
    job, chance = generator.job(), random.Random(f"rolling windows {seed}")
    used = set[str]()
    if not (generator.ttl or chance.random() > 0.3 or "rolling windows" in without):
        job, used = with_rolling_windows(job, chance, without)
    chance = random.Random(f"blocks {seed}")
    if not (generator.ttl or chance.random() > 0.4 or "blocks" in without):
        job, more = _with_blocks(job, chance, random.Random(f"windows in blocks {seed}"))
        used |= more
    if generator.ttl or (chance := random.Random(f"upkeep {seed}")).random() > 0.6:
        return job, generator.used | used
    job, more = with_upkeep(job, chance, without)
    return job, generator.used | used | more


def _with_blocks(job: Job, chance: random.Random, of_windows: random.Random) -> tuple[Job, set[str]]:
    """The job with some of the states in blocks that can be, and whether it has any."""
    states = []
    for state in job.states:
        draw, has_keys = of_windows if state.window else chance, {*state.keys} <= _IN_BLOCKS and state.keys
        if state.type == "opaque" and not state.rolling and has_keys and draw.random() < 0.7:
            blocks = draw.choice((1, 3, 40))
            state = replace(state, blocks=blocks, followed=state.followed or (draw.random() < 0.3 and not state.window))  # noqa: PLW2901
        states.append(state)
    return replace(job, states=tuple(states)), {"blocks"} if tuple(states) != job.states else set()
