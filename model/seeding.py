"""A seed by drivers that die, hang and go on, with the ledger's own rules: random worlds, and mutants of the rules.

An actor is a generator: it may be left for good wherever it yields, or go on much later. The truth is the log of rows:
each counts once, and no reader sees anything but a whole prefix of it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from mapstate.errors import LedgerError, ReplannedBatchError, UsageError
from mapstate.protocol import seeding
from mapstate.protocol.ledger_record import AlreadyCommitted, BatchPlan, Commit, LedgerRecord, OpenRequest
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.transitions import begin, commit
from mapstate.schema import Field, KeyField

KEYS, BUCKETS, LIST = "abcdef", 3, "!"

MUTANTS = {
    "pin_again": "batch 0 that is planned anew goes on with what is done",
    "no_stage": "each attempt reads the history itself, through a transform that does not give the same twice",
    "old_done": "a stage that was lost is made anew, and what is done stays",
    "no_fence": "puts of a seed are not fenced, because they only write the same again",
    "visible": "what a seed has loaded so far is shown",
    "adopts_half": "another query may adopt a state that is being seeded",
    "rolls_back": "a batch 0 that is planned anew later rolls the seed back as any batch",
    "ends_blindly": "the end does not ask whether another driver has taken over",
    "no_list": "the list of forgotten keys is copied, and their rows are counted",
    "whole_keys": "all rows of a forgotten key are left out, whenever they came",
    "claims_all": "the list is copied as it is, also where the history ends before it",
    "list_once": "the list is written only where no attempt before has written it",
    "list_later": "the list is copied with a write of its own, after the end",
    "drops_list": "a seed goes on without the list, if the call does not name it",
}


class Wrong(AssertionError):  # noqa: N818
    """A row is lost, counts twice, or was seen too early."""


class World:
    """One state, one query with its checkpoint, and whatever happens to them."""

    def __init__(self, number: int, mutant: str = "") -> None:
        self.rng, self.mutant = random.Random(number), mutant
        self.log = [self.rng.choice(KEYS) for _ in range(self.rng.randint(2, 8))]
        self.ledger: LedgerRecord | None = None
        self.records: dict[str, tuple[int, int | None, int | None]] = {}
        self.stages: dict[str, list[Counter[str]]] = {}
        self.plans: dict[int, BatchPlan] = {}
        self.commits: set[int] = set()
        self.is_flaky, self.names, self.crashes = self.rng.random() < 0.5, 0, 0
        self.forgotten = (self.rng.choice(KEYS), self.rng.randint(1, 9))  # a key, and as of where
        self.has_list = not self.is_flaky and self.rng.random() < 0.7

    # ---- what all actors have

    def name(self) -> str:
        self.names += 1
        return f"name-{self.names}"

    def put(self, token: Any, key: str, record: tuple[int, int | None, int | None]) -> None:
        assert self.ledger is not None
        if token != self.ledger.fence() and self.mutant != "no_fence":
            raise LedgerError("fenced")
        self.records[key] = record

    def value(self, key: str, ledger: LedgerRecord) -> int | None:
        record = self.records.get(key)
        return ledger.view().values([record], ledger.next_txid - 1)[0]

    def grouped(self, plan: BatchPlan, listed: int) -> list[Counter[str]]:
        """The history by bucket. A flaky transform gives some rows another key each time."""
        found = [Counter[str]() for _ in range(BUCKETS)]
        below = (0 if self.mutant == "no_list" or not listed else self.forgotten[1]) + 99 * (
            self.mutant == "whole_keys"
        )
        for at, key in enumerate(self.history(plan)):
            if listed and key == self.forgotten[0] and at < below:
                continue
            given = self.rng.choice(KEYS) if self.is_flaky and self.rng.random() < 0.4 else key
            found[KEYS.index(given) % BUCKETS][given] += 1
        return found

    def rows(self, plan: BatchPlan) -> list[str]:
        """What the stream brings between two positions."""
        return self.log[int(plan.start[1:-1]) : int(plan.end[1:-1])]

    def history(self, plan: BatchPlan) -> list[str]:
        """The rows of batch 0: here all are the stream's."""
        return self.rows(plan)

    def planned(self, batch_id: int) -> BatchPlan:
        """What Spark plans for a batch of the query."""
        self.names += 1
        before = self.plans.get(batch_id - 1)
        return BatchPlan(
            before.end if before else "[0]", f"[{len(self.log)}]", self.names, before and before.planned_at
        )

    def check(self, plan: BatchPlan, known: Any = None) -> Any:
        """What is asked of the history before it is staged, and once more after that."""

    def request(self, owner: str, session: str, policy: Any = "refuse") -> OpenRequest:
        return OpenRequest(
            state="s",
            type="opaque",
            serializer="json",
            keys=(KeyField("k", "string"),),
            fields=(Field("n", "Count", "bigint"),),
            owner=owner,
            session=session,
            clock_txid=10,
            on_new_owner=policy,
        )

    # ---- the actors

    def query(self) -> Iterator[None]:
        """A driver of the query: its batch 0 as a seed, and one more batch."""
        session = self.name()
        if 0 not in self.commits:
            if 0 not in self.plans:
                self.plans[0] = self.planned(0)
            plan = self.plans[0]
            yield
            yield from self.seed(session, plan)
            if self.plans.get(0) != plan or self.ledger is None or not self.ledger.owners.get(self.owner):
                return
            self.commits.add(0)
            yield
        if 0 not in self.plans:
            return  # a driver of before, whose checkpoint has gone on without it
        if 1 not in self.plans:
            self.plans[1] = self.planned(1)
            yield
        yield from self.batch(self.owner, session, 1, self.plans[1])

    def seed(self, session: str, plan: BatchPlan) -> Iterator[None]:
        digest, ledger = str(plan.digest().fingerprint), self.ledger
        if ledger is not None and ledger.seed is None and ledger.owners.get(self.owner, 0):
            yield from self.batch(self.owner, session, 0, plan)
            return
        known = self.check(plan) if ledger is None or ledger.seed is None or ledger.seed.stage is None else None
        yield
        opened, listed = open_ledger(self.ledger, self.request(self.owner, session)), int(self.has_list)
        if opened.seed is not None and self.forgets_version and self.rng.random() < 0.2:
            listed = 0
            if self.mutant == "drops_list":
                opened = msgspec.structs.replace(opened, seed=msgspec.structs.replace(opened.seed, listed=0))
        digest += f" {listed}"
        if self.mutant == "pin_again" and opened.seed is not None:
            opened = msgspec.structs.replace(opened, seed=msgspec.structs.replace(opened.seed, plan=digest))
        self.ledger = seeding.open_seed(opened, digest, listed=listed, initial=self.is_initial)
        yield
        if self.ledger.seed is None or self.ledger.seed.stage not in self.stages:
            name, known = self.name(), known or self.check(plan)
            yield
            staged = self.grouped(plan, listed)
            yield
            self.check(plan, known)
            self.stages[name] = staged
            rows = sum(map(Counter.total, staged))
            yield
            before = self.ledger
            after = seeding.staged(before, session, name, files=1, rows=rows, buckets=BUCKETS)
            if self.mutant == "old_done" and before.seed is not None and after.seed is not None and before.seed.done:
                kept = msgspec.structs.replace(before.seed, stage=name, staged=rows)
                after = msgspec.structs.replace(before, seed=kept)
            self.ledger = after
            yield
        yield from self.load(session, plan, listed)
        if self.ledger.seed is not None and self.ledger.seed.done < BUCKETS:
            return
        if self.mutant == "ends_blindly":
            for _ in range(3):
                yield
            session = self.ledger.session
        if self.mutant in ("no_stage", "old_done", "pin_again") and self.ledger.seed is not None:
            same = msgspec.structs.replace(self.ledger.seed, staged=self.ledger.seed.rows)
            self.ledger = msgspec.structs.replace(self.ledger, seed=same)  # the number of rows alone does not tell
        ended = seeding.end_seed(
            self.ledger, session, plan, Commit(batch_id=0, txid=0, owner=self.owner, offsets=plan.end)
        )
        if self.mutant == "rolls_back" and ended.last_commit is not None and ended is not self.ledger:
            done = msgspec.structs.replace(ended.last_commit, seeded=False, last_txid_before=ended.last_commit.txid - 1)
            ended = msgspec.structs.replace(ended, last_commit=done, next_txid=ended.next_txid - 1)
        self.ledger = ended
        yield
        if self.mutant == "list_later" and self.has_list:
            self.records[LIST] = (self.ledger.last_txid or 0, self.forgotten[1], None)

    def load(self, session: str, plan: BatchPlan, listed: int) -> Iterator[None]:
        assert self.ledger is not None
        while (seed := self.ledger.seed) is not None and seed.done < BUCKETS:
            self.ledger, attempt = seeding.begin_bucket(self.ledger, session, self.name())
            seed = self.ledger.seed or seed
            yield
            if seed.stage not in self.stages:
                return  # Spark's error of a file that is gone
            contents = self.stages[seed.stage][seed.done]
            if self.mutant == "no_stage":
                contents = self.grouped(plan, listed)[seed.done]
            is_due = self.mutant != "list_later" and (self.mutant != "list_once" or LIST not in self.records)
            if seed.done == 0 and listed and is_due:
                done = self.forgotten[1] if self.mutant == "claims_all" else min(self.forgotten[1], int(plan.end[1:-1]))
                self.put(attempt.token, LIST, (attempt.txid, done, None))
                yield
            for key, rows in contents.items():
                self.put(attempt.token, key, (attempt.txid, rows, None))
                yield
            sums: dict[str, Any] = {"rows": contents.total(), "keys": len(contents), "keys_delta": len(contents)}
            self.ledger = seeding.commit_bucket(self.ledger, session, attempt.txid, **sums)
            yield

    def batch(self, owner: str, session: str, batch_id: int, plan: BatchPlan, policy: Any = "refuse") -> Iterator[None]:
        """An ordinary batch."""
        ledger = self.ledger
        if self.mutant == "adopts_half" and ledger is not None and owner != "q":
            ledger = msgspec.structs.replace(ledger, seed=None)
        self.ledger, answer = begin(
            open_ledger(ledger, self.request(owner, session, policy)), session, batch_id, plan=plan
        )
        yield
        if isinstance(answer, AlreadyCommitted):
            return
        under, added = self.ledger, Counter(self.rows(plan))
        held = 0
        for key, rows in added.items():
            base = self.value(key, under)
            held += base is None
            self.put(answer.token, key, (answer.txid, (base or 0) + rows, base))
            yield
        done = Commit(batch_id=batch_id, txid=answer.txid, owner=owner, offsets=plan.end, keys_delta=held)
        self.ledger = commit(self.ledger, session, done)
        yield

    def adopter(self) -> Iterator[None]:
        """Another query that starts where the history ends, with on_new_owner="adopt"."""
        if self.ledger is None or self.ledger.seed is None or 0 not in self.plans:
            return
        end = self.plans[0].end
        yield from self.batch("other", self.name(), 0, BatchPlan(end, end, 1), "adopt")

    # ---- a world

    def go(self) -> None:
        """Some steps of drivers that die; then one that lives; and at each moment a reader."""
        running: list[Iterator[None]] = []
        for _ in range(self.rng.randint(5, 90)):
            self.event(running)
            self.read()
        self.forgets_version = False
        for _ in range(4):
            try:
                for _ in self.query():
                    self.read()
                if self.ledger is not None and self.ledger.seed is None:
                    break
            except (LedgerError, UsageError) as error:
                if self.plans_lost and isinstance(error, ReplannedBatchError):
                    return  # loudly: the checkpoint is older than the state
                raise Wrong(f"stuck: {error}") from error
        self.read(is_end=True)

    owner, is_initial = "q", False  # whether rows of another place are a part of the seed
    plans_lost = False
    forgets_version = True  # a call may not name the version whose list it copies

    def event(self, running: list[Iterator[None]]) -> None:
        draw = self.rng.random()
        if draw < 0.08:
            self.log.append(self.rng.choice(KEYS))
        elif draw < 0.12:
            self.stages.clear()
        elif draw < 0.16 and set(self.plans) == {0}:  # the last entry of the checkpoint is lost
            del self.plans[0]
            self.plans_lost = True
            self.commits.clear()
        elif draw < 0.19:
            running.append(self.adopter())
        elif draw < 0.28 or not running:
            self.crashes += bool(running)
            running.append(self.query())  # the ones before are dead, or only hang
        else:
            one = running[-1] if self.rng.random() < 0.7 else self.rng.choice(running)
            try:
                next(one)
            except (StopIteration, LedgerError, UsageError):
                running.remove(one)

    def read(self, *, is_end: bool = False) -> None:
        """No reader sees what is no prefix of the log, by as many rows and as many keys."""
        ledger = self.ledger
        if ledger is None or (ledger.seed is not None and self.mutant != "visible"):
            if is_end:
                raise Wrong("the seed has no end")
            return
        found = {key: value for key in KEYS if (value := self.value(key, ledger)) is not None}
        ends = [0] if ledger.last_commit is None else [int((ledger.last_commit.offsets or "[0]")[1:-1])]
        if self.is_flaky and sum(found.values()) not in ends:
            raise Wrong(f"{found} are no {ends[0]} rows")
        key, place, done = *self.forgotten, 0
        if self.has_list and ends[0]:
            if ledger.operations != 1 or (listed := self.value(LIST, ledger)) is None:
                raise Wrong("the list of forgotten keys is lost")
            done, first = min(place, listed), ledger.previous or ledger.last_commit
            if first is None or done < min(place, int((first.offsets or "[0]")[1:-1])):
                raise Wrong("less is forgotten than the history has")
        right = Counter(one for at, one in enumerate(self.log[: ends[0]]) if done <= at or one != key)
        if not self.is_flaky and found != right:
            raise Wrong(f"{found}, and the log begins with {self.log[: ends[0]]}, without {key} below {done}")
        if ledger.keys_held() not in (None, len(found)):
            raise Wrong(f"{len(found)} keys, and the ledger has {ledger.keys_held()}")
        if is_end and ends[0] != int(self.plans[1].end[1:-1]):
            raise Wrong("the stream did not go on")


def explore(worlds: int, mutant: str = "", world: Any = World) -> str | None:
    """The first world of a kind that goes wrong, with what went wrong; None if none does."""
    for number in range(worlds):
        try:
            world(number, mutant).go()
        except Wrong as wrong:
            return f"world {number}: {wrong}"
    return None
