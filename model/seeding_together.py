"""A seed of two states of one stream, in one store or in two, by drivers that die and go on: random worlds.

Drivers and lost checkpoints are those of `model.seeding`; a transform may give other rows each time that it reads. A
job may leave a state out for a while, and seed the other one alone. What matters is which of the two can be read, and
that a job that has both goes on only if both have the rows of one reading, also with the batches after the seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mapstate.errors import LedgerError, UsageError
from mapstate.protocol import joint, seeding
from mapstate.protocol.ledger_record import Attempt, BatchPlan, Commit, LedgerRecord, OpenRequest
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.transitions import begin, check_session, commit
from mapstate.schema import Field, KeyField
from model.seeding import Wrong

KEYS, BUCKETS, STATES, JOBS = "abcd", 2, (0, 1), "vw"

MUTANTS = {
    "ends_apart": "states of one store end by a write each",
    "ends_when_loaded": "a state ends when its own buckets are loaded, before the other one is",
    "anew_beside_ended": "a seed begins, or begins anew, beside one that has ended",
    "reads_apart": "the stage of each state is a reading of its own",
    "any_stage": "each state goes on with the stage that its ledger names, whichever reading made it",
    "stages_again": "a state of which all is loaded is staged anew where its stage is gone",
    "takes_apart": "a seed of one store is begun anew before an older driver has lost the other store",
    "other_reading": "a state of which all is loaded ends beside one that has ended, whatever their readings are",
    "ends_counted": "where both have ended, whatever jobs did it, nothing more is asked",
    "list_of_now": "where one has ended, the others go on only by the list of forgotten keys that there is now",
    "goes_on": "a batch after the seed does not ask of which reading the seeds were",
    "asks_the_next": "only the batch after the seed asks that, and the one after it",
}


class World:
    """Two states, one query, and whatever happens to them."""

    def __init__(self, number: int, mutant: str = "") -> None:
        self.rng, self.mutant = random.Random(number), mutant
        self.log = [self.rng.choice(KEYS) for _ in range(self.rng.randint(2, 8))]
        self.domains = self.rng.choice([[[0, 1]], [[0], [1]]])
        self.ledgers: list[LedgerRecord | None] = [None, None]
        self.records: list[dict[str, tuple[int, int | None, int | None]]] = [{}, {}]
        self.stages: dict[str, list[Counter[str]]] = {}
        self.plan: BatchPlan | None = None
        self.is_flaky, self.names, self.is_lost = self.rng.random() < 0.6, 0, False
        self.changes, self.drops = self.rng.random() < 0.5, self.rng.random() < 0.3
        self.listed, self.forgets = 0, number % 3 == 1
        self.readings: list[list[str]] = []

    def name(self) -> str:
        self.names += 1
        return f"{self.names}"

    def request(self, at: int, session: str) -> OpenRequest:
        return OpenRequest(
            state=f"s{at}",
            type="opaque",
            serializer="json",
            keys=(KeyField("k", "string"),),
            fields=(Field("n", "Count", "bigint"),),
            owner="q",
            session=session,
            clock_txid=10,
        )

    def held(self, at: int) -> LedgerRecord:
        found = self.ledgers[at]
        assert found is not None
        return found

    def put(self, at: int, token: Any, key: str, record: tuple[int, int | None, int | None]) -> None:
        if token != self.held(at).fence():
            raise LedgerError("fenced")
        self.records[at][key] = record

    def read_history(self, plan: BatchPlan) -> list[str]:
        rows = self.log[: int(plan.end[1:-1])]
        self.readings.append([row for row in rows if not self.is_flaky or self.rng.random() < 0.7])
        return self.readings[-1]

    def grouped(self, at: int, rows: Sequence[str], listed: int) -> list[Counter[str]]:
        """One state counts rows by key; the other one all of them, and those of one key. None of forgotten keys."""
        found, rows = [Counter[str]() for _ in range(BUCKETS)], [row for row in rows if row not in KEYS[:listed]]
        for row in rows:
            found[KEYS.index(row) % BUCKETS][row] += 1
        return found if at == 0 else [Counter(all=len(rows)), Counter(a=rows.count("a"))]

    # ---- a driver

    def seed(self, job: str = "") -> Iterator[None]:
        """By a job that may have been changed, may name its states in another order, and may lack one of them."""
        states: Sequence[int] = STATES
        session, domains = self.name(), self.rng.choice([self.domains, self.domains[::-1]])
        if self.drops and not job:
            states = self.rng.choice([STATES, STATES[:1], STATES[1:]])
            domains = [own for domain in domains if (own := [at for at in domain if at in states])]
        job = job or self.rng.choice(JOBS if self.changes else JOBS[0])
        plan = self.plan
        if plan is None:
            self.plan = plan = BatchPlan("[0]", f"[{len(self.log)}]", int(self.name()))
            yield
        ledgers = [self.ledgers[at] for at in states]
        if all(ledger is not None and ledger.seed is None for ledger in ledgers) and self.mutant == "ends_counted":
            self.counted(states)
            return
        counts = dict.fromkeys(states, self.listed)
        if any(ledger is not None and ledger.seed is None for ledger in ledgers) and self.mutant != "list_of_now":
            seeds = {at: ledger.seed for at, ledger in zip(states, ledgers, strict=True) if ledger is not None}
            counts |= {at: seed.listed for at, seed in seeds.items() if seed is not None}
        yield from self.open(session, f"{plan.digest().fingerprint} {job}", domains, counts)
        if not self.found(states):
            yield from self.stage(session, plan, states)
        for at in states:
            yield from self.load(at, session)
            if self.mutant == "ends_when_loaded":
                self.end([at], session, plan)
                yield
        for domain in [[at] for at in states] if self.mutant == "ends_apart" else domains:
            self.end(domain, session, plan)
            yield
        self.counted(states)

    def counted(self, states: Sequence[int]) -> None:
        """Spark is told that batch 0 is done, unless another driver has taken over: what it has is of one reading."""
        if not self.is_one_reading(states):
            raise Wrong(f"batch 0 is done, of more than one reading: {self.readings}")

    def open(
        self, session: str, digest: str, domains: Sequence[Sequence[int]], counts: Mapping[int, int]
    ) -> Iterator[None]:
        opens = len(domains) == 1 or self.mutant == "takes_apart"
        states = sorted(at for domain in domains for at in domain)
        known = {at: open_ledger(self.ledgers[at], self.request(at, session)) for at in states}
        if not opens:
            self.begun(known, digest, counts)
            for domain in domains:
                for at in domain:
                    opened = open_ledger(self.ledgers[at], self.request(at, session))
                    known[at] = self.seeded(at, opened, digest, counts) if opened.seed is None else opened
                    self.ledgers[at] = known[at]
                yield
        for domain in domains:
            if opens:
                known = {at: open_ledger(self.ledgers[at], self.request(at, session)) for at in states}
            for at in domain:
                known[at] = known[at] if opens else self.held(at)
                check_session(known[at], session)
            after = self.begun(known, digest, counts)
            for at in domain:
                self.ledgers[at] = known[at] = after[at]
            yield

    def seeded(self, at: int, ledger: LedgerRecord, digest: str, counts: Mapping[int, int]) -> LedgerRecord:
        return seeding.open_seed(ledger, f"{digest} {at} {counts[at]}", listed=counts[at])

    def begun(
        self, known: Mapping[int, LedgerRecord], digest: str, counts: Mapping[int, int]
    ) -> dict[int, LedgerRecord]:
        after = {at: self.seeded(at, ledger, digest, counts) for at, ledger in known.items()}
        if self.mutant != "anew_beside_ended":
            is_left = self.mutant == "other_reading"
            seeding.check_together(
                [one for one in after.values() if not (is_left and one.seed is not None and one.seed.is_loaded)]
            )
        return after

    def found(self, states: Sequence[int]) -> bool:
        """Whether the stages are there of all that is not loaded."""
        known = [seed for at in states if (seed := self.held(at).seed) is not None]
        readings = {seed.reading for seed in known}
        if None in readings or (len(readings) > 1 and self.mutant != "any_stage"):
            return False
        return all((seed.is_loaded and self.mutant != "stages_again") or seed.stage in self.stages for seed in known)

    def stage(self, session: str, plan: BatchPlan, states: Sequence[int]) -> Iterator[None]:
        reading, rows, places = self.name(), self.read_history(plan), {}
        yield
        for at in states:
            seed = self.held(at).seed
            if seed is None:
                continue
            if self.mutant == "reads_apart" and at:
                rows = self.read_history(plan)
            places[at] = f"seed-{at}-{reading}"
            self.stages[places[at]] = self.grouped(at, rows, seed.listed)
            yield
        for at, place in places.items():
            count = sum(map(Counter.total, self.stages.get(place, [])))
            self.ledgers[at] = seeding.staged(self.held(at), session, place, files=1, rows=count, buckets=BUCKETS)
            yield

    def load(self, at: int, session: str) -> Iterator[None]:
        while (seed := self.held(at).seed) is not None and not seed.is_loaded:
            self.ledgers[at], attempt = seeding.begin_bucket(self.held(at), session, self.name())
            yield
            if seed.stage not in self.stages:
                raise LedgerError("Spark's error of a file that is gone")
            contents = self.stages[seed.stage][seed.done]
            for key, rows in contents.items():
                self.put(at, attempt.token, key, (attempt.txid, rows, None))
                yield
            sums: dict[str, Any] = {"rows": contents.total(), "keys": len(contents), "keys_delta": len(contents)}
            self.ledgers[at] = seeding.commit_bucket(self.held(at), session, attempt.txid, **sums)
            yield

    def end(self, domain: Sequence[int], session: str, plan: BatchPlan) -> None:
        done = Commit(batch_id=0, txid=0, owner="q", offsets=plan.end)
        after = [seeding.end_seed(self.held(at), session, plan, done) for at in domain]
        for at, ledger in zip(domain, after, strict=True):
            self.ledgers[at] = ledger

    def start(self) -> Iterator[None]:
        """The query is started without seed in the midst of one: it is refused, and nothing is rolled back."""
        session, plan = self.name(), self.plan
        if plan is None or all(ledger is None or ledger.seed is None for ledger in self.ledgers):
            return
        opened = [open_ledger(ledger, self.request(at, session)) for at, ledger in enumerate(self.ledgers)]
        for ledger in joint.reconcile(opened, 0):
            begin(ledger, session, 0, plan=plan)
        yield
        raise Wrong("batch 0 was begun beside a seed")

    # ---- a world

    def go(self) -> None:
        """Some steps of drivers that die; then one that lives; and at each moment a reader. Then batches."""
        self.to_the_end()
        jobs = [STATES, STATES[:1], STATES[1:]] if self.drops else [STATES]
        for _ in range(4):
            if all(ledger is not None and ledger.seed is None for ledger in self.ledgers):
                self.batch(self.rng.choice(jobs))

    def batch(self, states: Sequence[int]) -> None:
        """An empty batch of a job that has these states, as far as Spark may have come with one of them."""
        session, number = self.name(), self.rng.choice([self.held(at).owners["q"] for at in states])
        try:
            opened = [open_ledger(self.ledgers[at], self.request(at, session)) for at in states]
            known = joint.reconcile([self.as_asked(one) for one in opened], number) if len(states) > 1 else opened
            after = [begin(one, session, number) for one in known]
        except (LedgerError, UsageError):
            return
        if not self.is_one_reading(states):
            raise Wrong(f"batch {number} was begun in states {states}, of more than one reading: {self.readings}")
        for at, (ledger, attempt) in zip(states, after, strict=True):
            if isinstance(attempt, Attempt):
                done = Commit(batch_id=number, txid=attempt.txid, owner="q", keys_delta=0)
                self.ledgers[at] = commit(ledger, session, done)

    def as_asked(self, ledger: LedgerRecord) -> LedgerRecord:
        """The ledger without the readings for which a mutant does not ask."""
        last, before = ledger.last_commit, ledger.previous
        is_asked = last is not None and (last.seeded or (before is not None and before.seeded))
        if last is None or self.mutant not in ("goes_on", "asks_the_next") or (is_asked and self.mutant != "goes_on"):
            return ledger
        return msgspec.structs.replace(ledger, last_commit=msgspec.structs.replace(last, reading=None))

    def to_the_end(self) -> None:
        """The seed, to its end or to a refusal."""
        running: list[Iterator[None]] = []
        for _ in range(self.rng.randint(5, 90)):
            self.event(running)
            self.read()
        failed: Exception | None = None
        for job in JOBS * 2:  # where one state has ended, only the job that seeded it can go on
            try:
                for _ in self.seed(job):
                    self.read()
            except (LedgerError, UsageError) as error:
                failed = error
            if all(ledger is not None and ledger.seed is None for ledger in self.ledgers):
                break
        else:
            if failed is not None and (self.is_lost or (self.drops and not self.may_be_one_reading())):
                return  # loudly
            raise Wrong(f"the seed has no end: {failed}")
        self.read()

    def event(self, running: list[Iterator[None]]) -> None:
        draw = self.rng.random()
        seeds = [None if ledger is None else ledger.seed for ledger in self.ledgers]
        is_due = all(seed is not None and seed.is_loaded for seed in seeds)
        has_ended = any(ledger is not None and ledger.seed is None for ledger in self.ledgers)
        if self.forgets and draw < (0.2 if has_ended else 0.02):
            self.listed = min(self.listed + 1, 2)
        elif draw < 0.05:
            self.log.append(self.rng.choice(KEYS))
        elif draw < 0.12:
            self.stages.clear()
        elif draw < 0.14:
            self.is_lost, self.plan = self.is_lost or self.plan is not None, None
        elif draw < 0.18:
            running.append(self.start())
        elif draw < (0.5 if is_due else 0.21) or not running:
            running.append(self.seed())
        else:
            one = running[-1] if self.rng.random() < 0.5 else self.rng.choice(running[-2:])
            try:
                next(one)
            except (StopIteration, LedgerError, UsageError):
                running.remove(one)

    def read(self) -> None:
        """Those of one store can be read together, or not at all; and what can be read is of one reading."""
        done = [at for at, ledger in enumerate(self.ledgers) if ledger is not None and ledger.seed is None]
        if len(done) == 1 and len(self.domains) == 1 and not self.drops:
            raise Wrong(f"state {done[0]} can be read, and the other one cannot")
        for states in [[at] for at in done] if self.drops else [done]:
            if not self.is_one_reading(states):
                raise Wrong(f"states {states} are of no reading of the history: {self.readings}")

    def is_one_reading(self, states: Sequence[int]) -> bool:
        seen = {at: self.values(at) for at in states}
        lists = {at: self.held(at).operations or 0 for at in seen}
        rights = [{at: sum(self.grouped(at, rows, lists[at]), Counter()) for at in seen} for rows in self.readings]
        return not seen or seen in rights

    def may_be_one_reading(self) -> bool:
        """Whether what has ended and what is loaded is of one reading, and nothing else is left."""
        readings = set()
        for ledger in self.ledgers:
            seed, done = (None, None) if ledger is None else (ledger.seed, ledger.last_commit)
            readings.add(seed.is_loaded and seed.reading if seed else done and done.reading)
        return len(readings) == 1 and readings.isdisjoint([None, False])

    def values(self, at: int) -> Counter[str]:
        ledger, found = self.held(at), Counter[str]()
        for key, record in self.records[at].items():
            found[key] = ledger.view().values([record], ledger.next_txid - 1)[0] or 0
        return +found
