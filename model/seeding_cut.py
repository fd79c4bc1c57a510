"""A seed whose history is another table than the stream: random worlds in which both meet, or are refused.

A log has partitions, and the table some of its rows, each with its place. The stream starts anywhere in each partition:
too early, where the table ends, or too late. Some offsets are those of no row, as markers of transactions are.
A table that is changed and put back between two looks at it is none of these worlds: only the source can tell of that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mapstate.errors import ReplannedBatchError, UsageError
from mapstate.protocol import seeding
from mapstate.protocol.cuts import Held, check_meets, check_reading, lacks_history, starts_of, unread, without_place
from mapstate.protocol.ledger_record import BatchPlan, Commit, by_partition
from mapstate.protocol.opening import open_ledger
from model.seeding import BUCKETS, KEYS, Wrong
from model.seeding import World as OneLog

MUTANTS = {
    "no_cut": "the table is read whole, wherever the stream starts",
    "no_reach": "nobody asks whether the table reaches the start",
    "no_holes": "nobody asks whether offsets lack below the start",
    "no_repeats": "nobody asks whether an offset is there twice",
    "reads_unread": "rows of partitions that the stream did not read at its start are history",
    "drops_null": "rows without a place are left out",
    "asked_start": "the cut is where the job says, and not where the checkpoint does",
    "checks_once": "nobody asks whether the table was the same behind the stage",
    "opens_first": "the ledger is written before the table is checked",
    "drops_history": "a job without the initial rows begins the seed anew",
    "starts_alone": "a query that is started without a seed counts on a state that holds nothing",
}

Row = tuple[Any, Any, str]  # partition and offset, and the key


class World(OneLog):
    """One state, a stream with partitions, and a table that somebody writes."""

    def __init__(self, number: int, mutant: str = "") -> None:
        super().__init__(number, mutant)
        self.is_flaky = self.has_list = False
        rng = self.rng
        self.holes: Any = rng.choice(("refused", "before", "allowed"))
        self.parts: list[list[str | None]] = [[self.one() for _ in range(rng.randint(0, 5))] for _ in range(2)]
        self.first = [rng.randint(0, 2) if self.holes == "before" else 0 for _ in range(9)]  # of the table
        self.table: list[Row] = []
        self.grow(whole=False)
        self.asked = [
            max(0, min(len(part), self.reach(at) + rng.choice((-2, -1, 0, 0, 0, 1)))) for at, part in self.each()
        ]
        self.pinned: dict[str, int] | None = None
        self.is_damaged = False  # until the user mends it

    def one(self) -> str | None:
        return None if self.holes == "allowed" and self.rng.random() < 0.3 else self.rng.choice(KEYS)

    def each(self) -> list[tuple[int, list[str | None]]]:
        return list(enumerate(self.parts))

    def reach(self, at: int) -> int:
        """Where the table ends."""
        return max((row[1] + 1 for row in self.table if row[0] == at and row[1] is not None), default=0)

    def grow(self, *, whole: bool) -> None:
        """The table gets more rows of the log. ``whole``: and all that lack, and no row twice."""
        ends = {at: len(part) if whole else self.rng.randint(self.reach(at), len(part)) for at, part in self.each()}
        if whole:
            self.table = []
        for at, part in self.each():
            for offset in range(max(self.first[at], self.reach(at)), ends[at]):
                if (key := part[offset]) is not None:
                    self.table.append((at, offset, key))

    def damage(self) -> None:
        """Somebody's upsert is half done. Of a table that may have holes nobody can tell that a row is gone."""
        draw = self.rng.random()
        if not self.table:
            return
        row, self.is_damaged = self.rng.choice(self.table), True
        if draw < 0.4:
            self.table.append(row)
        elif draw < 0.7 and self.holes == "refused":
            self.table.remove(row)
        else:
            self.table[self.table.index(row)] = (row[0], None, row[2])

    # ---- what Spark knows

    is_initial = True

    def ends(self) -> str:
        return json.dumps([{"t": {str(at): len(part) for at, part in self.each()}}])

    def planned(self, batch_id: int) -> BatchPlan:
        if self.pinned is None:
            self.pinned = {str(at): start for at, start in enumerate(self.asked)}
        self.names += 1
        before = self.plans.get(batch_id - 1)
        start = before.end if before else json.dumps([{"t": self.pinned}])
        return BatchPlan(start, self.ends(), self.names, before and before.planned_at)

    def rows(self, plan: BatchPlan) -> list[str]:
        (start,), (end,) = (map(by_partition, json.loads(text)) for text in (plan.start, plan.end))
        assert start is not None
        assert end is not None
        return [
            key for (_, at), stop in end.items() for key in self.parts[int(at)][start.get(("t", at), 0) : stop] if key
        ]

    # ---- the seed

    def starts(self, plan: BatchPlan) -> dict[tuple[str, str], int]:
        if self.mutant == "asked_start":
            return {("t", str(at)): start for at, start in enumerate(self.asked)}
        return starts_of(plan.start)

    def history(self, plan: BatchPlan) -> list[str]:
        starts = self.starts(plan)
        own = [
            key
            for at, offset, key in self.table
            if offset is not None and (self.mutant == "no_cut" or offset < starts.get(("t", str(at)), 99))
        ]
        return own + self.rows(plan)

    def check(self, plan: BatchPlan, known: Any = None) -> Any:
        if known is not None and self.mutant == "checks_once":
            return known
        starts, held, places = self.starts(plan), {}, Counter[Any]()
        if self.mutant != "drops_null" and (lost := sum(row[1] is None for row in self.table)):
            raise without_place(lost)
        for at, offset, _ in self.table:
            if offset is not None:
                places["t", str(at), offset] += 1
        for one in {place[:2] for place in places}:
            if one not in starts:
                if self.mutant == "reads_unread":
                    continue
                raise unread(one, 1)
            below = sorted(place[2] for place in places if place[:2] == one and place[2] < starts[one])
            rows = len(below) if self.mutant == "no_repeats" else sum(places[(*one, offset)] for offset in below)
            reach = max(place[2] for place in places if place[:2] == one)
            first, last = (below[0], below[-1]) if below else (None, None)
            held[one] = Held(rows, len(below), first, last, reach, hash(tuple(below)))
        if known is not None:
            check_reading(known, held)
            return held
        if self.mutant == "no_reach":
            starts = {at: min(start, (held[at].last or -1) + 1 if at in held else 0) for at, start in starts.items()}
        check_meets(starts, held, "allowed" if self.mutant == "no_holes" else self.holes, lambda _, begins: begins)
        return held

    def seed(self, session: str, plan: BatchPlan) -> Iterator[None]:
        if self.mutant == "opens_first" and self.ledger is None:
            digest = f"{plan.digest().fingerprint} 0"
            self.ledger = seeding.open_seed(open_ledger(None, self.request(self.owner, session)), digest, initial=True)
            yield
        if (
            self.ledger is not None
            and self.ledger.seed is not None
            and self.forgets_version
            and self.rng.random() < 0.1
        ):
            yield from self.seed_of_an_older_job(session, plan)
            return
        yield from super().seed(session, plan)

    def seed_of_an_older_job(self, session: str, plan: BatchPlan) -> Iterator[None]:
        """Which has no initial rows."""
        opened = open_ledger(self.ledger, self.request(self.owner, session))
        self.ledger = seeding.open_seed(opened, "older", initial=self.mutant == "drops_history")
        yield
        name, rows = self.name(), Counter(self.rows(plan))
        parts = [
            Counter({key: n for key, n in rows.items() if KEYS.index(key) % BUCKETS == at}) for at in range(BUCKETS)
        ]
        self.stages[name] = parts
        self.ledger = seeding.staged(self.ledger, session, name, files=1, rows=rows.total(), buckets=BUCKETS)
        yield from self.load(session, plan, 0)
        done = Commit(batch_id=0, txid=0, owner=self.owner, offsets=plan.end)
        self.ledger = seeding.end_seed(self.ledger, session, plan, done)

    def start(self) -> Iterator[None]:
        """The query is started, and not seeded."""
        if 0 in self.commits:
            return
        if 0 not in self.plans:
            self.plans[0] = self.planned(0)
        plan = self.plans[0]
        yield
        if self.mutant != "starts_alone" and lacks_history(self.ledger, self.owner, resets=False):
            raise UsageError("seed it")
        yield from self.batch(self.owner, self.name(), 0, plan)

    # ---- a world

    def event(self, running: list[Iterator[None]]) -> None:
        draw = self.rng.random()
        if draw < 0.06:
            self.rng.choice(self.parts).append(self.one())
        elif draw < 0.08 and len(self.parts) < 4:
            self.parts.append([self.one()])
        elif draw < 0.13:
            if not self.is_damaged:
                self.grow(whole=self.rng.random() < 0.5)
        elif draw < 0.16:
            if not self.is_damaged:
                self.damage()
        elif draw < 0.20:
            self.asked = [self.rng.randint(0, len(part)) for part in self.parts]  # of a job that has a checkpoint
        elif draw < 0.23:
            running.append(self.start())
        elif draw < 0.26:
            self.stages.clear()
        else:
            super().event(running)

    def adopter(self) -> Iterator[None]:
        yield from ()

    def go(self) -> None:
        """Drivers that die, and a user who mends the table, and then the start, until it is not refused."""
        running: list[Iterator[None]] = []
        for _ in range(self.rng.randint(5, 60)):
            self.event(running)
            self.read()
        self.forgets_version = False
        for tried in range(4):
            self.grow(whole=True)
            if self.pinned is not None:  # new partitions are the stream's
                self.table = [row for row in self.table if str(row[0]) in self.pinned]
            try:
                for _ in self.query():
                    self.read()
                if self.ledger is not None and self.ledger.seed is None:
                    break
            except ReplannedBatchError as error:
                if self.plans_lost:
                    return  # loudly: the checkpoint is older than the state
                raise Wrong(f"stuck: {error}") from error
            except UsageError as error:
                if self.ledger is not None:
                    raise Wrong(f"refused, and something was written: {error}") from error
                self.owner, self.pinned = f"q{tried}", None  # a new checkpoint
                self.plans.clear()
                self.grow(whole=True)
                self.asked = [self.reach(at) for at, _ in self.each()]
        self.read(is_end=True)

    def read(self, *, is_end: bool = False) -> None:
        """Each row once, from the first one of the table to where the last batch has ended."""
        ledger = self.ledger
        if ledger is None or ledger.seed is not None:
            if is_end:
                raise Wrong("the seed has no end")
            return
        found = {key: value for key in KEYS if (value := self.value(key, ledger)) is not None}
        last, starts = ledger.last_commit, self.pinned or {}
        ends = by_partition(json.loads(last.offsets)[0]) if last is not None and last.offsets else {}
        right = Counter(
            key
            for (_, at), end in (ends or {}).items()
            for key in self.parts[int(at)][min(self.first[int(at)], starts.get(at, 0)) : end]
            if key
        )
        if found != right:
            raise Wrong(f"{found}, and the log has {right} up to {ends}; the stream started at {starts}")
        if ledger.keys_held() not in (None, len(found)):
            raise Wrong(f"{len(found)} keys, and the ledger has {ledger.keys_held()}")
