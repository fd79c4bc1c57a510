"""Two versions of a state that are compared while both go on: the library's rules in random worlds, and their mutants.

Each version takes in one log of two partitions, in batches of its own, which may end in the middle, be begun anew, or
be rolled back; vacuums come between. The value of a key is a function of its number of rows; at some numbers the key
is removed. Key "c" is counted wrongly by the second version. What a comparison says has to be true of the log: a key
that it compares has, in both versions, the value of the position that it names.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from mapstate.errors import MapStateError, StaleBatchError
from mapstate.protocol.ledger_record import Attempt, Commit, LedgerRecord, OpenRequest
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.transitions import begin, commit
from mapstate.protocol.upkeep import begin_operator, commit_vacuum
from mapstate.protocol.ways_back import (
    behind_by,
    further,
    goes_on,
    is_behind,
    keeps_absent,
    offsets_of,
    rollback,
    stood_still,
)
from mapstate.schema import Field, KeyField

KEYS, VERSIONS = "abcd", (0, 1)

MUTANTS = {
    "one_pass": "all that was read once is compared, whenever it was written",
    "no_wait": "nobody waits until both have passed the position",
    "position_first": "the position is taken before the ledgers from which on records have to stand still",
    "the_nearer": "the position is the nearer one of the two",
    "own_ledger": "a record stood still by the ledger under which it is read",
    "absent": "a key without a record never had one, whatever was removed meanwhile",
    "rolled_back": "nobody asks whether a version was rolled back meanwhile",
}

Record = tuple[int, int | None, int | None]


class Wrong(AssertionError):  # noqa: N818
    """A comparison says what is not true."""


class World:
    """One log, two versions of it, and one who compares them."""

    def __init__(self, number: int, mutant: str = "") -> None:
        self.rng, self.mutant = random.Random(number), mutant
        self.log: tuple[list[str], list[str]] = ([], [])
        self.records: list[dict[str, Record]] = [{}, {}]
        self.ledgers = [open_ledger(None, self._request(str(version))) for version in VERSIONS]
        self.settled = self.moving = self.refused = 0

    def _request(self, session: str) -> OpenRequest:
        schema = {"keys": (KeyField("k", "string"),), "fields": (Field("n", "Count", "bigint"),), "clock_txid": 10}
        return OpenRequest(state="s", type="opaque", serializer="json", owner="q", session=session, **schema)  # type: ignore[arg-type]

    def true(self, version: int, key: str, position: str | None) -> int | None:
        """The value of a key in a version as of a position."""
        ends = json.loads(position)[0]["t"] if position else {}
        rows = sum(part[: ends.get(str(at), 0)].count(key) for at, part in enumerate(self.log))
        return None if rows % 3 == 0 else rows + (version == 1 and key == "c")

    def driver(self, version: int) -> Iterator[None]:
        """Batch after batch, some of them begun anew, or rolled back by an operator and planned anew."""
        for _ in range(6):
            self.ledgers[version], attempt = begin(
                open_ledger(self.ledgers[version], self._request(str(version))),
                str(version),
                self.ledgers[version].owners["q"],
            )
            assert isinstance(attempt, Attempt)
            start = json.loads(offsets_of(self.ledgers[version]) or '[{"t":{}}]')[0]["t"]
            lows = [start.get(str(at), 0) for at in range(2)]
            ends = [self.rng.randint(low, len(part)) for low, part in zip(lows, self.log, strict=True)]
            plan = json.dumps([{"t": {str(at): end for at, end in enumerate(ends)}}])
            yield
            for key in KEYS:
                if any(key in part[low:end] for part, low, end in zip(self.log, lows, ends, strict=True)):
                    base = attempt.view.values([self.records[version].get(key)], attempt.txid)[0]
                    self.records[version][key] = attempt.txid, self.true(version, key, plan), base
                    yield
            if self.rng.random() < 0.2:
                continue  # it dies, and the batch is begun anew, to another end
            done = Commit(batch_id=attempt.batch_id, txid=attempt.txid, owner="q", offsets=plan)
            self.ledgers[version] = commit(self.ledgers[version], str(version), done)
            yield
            if self.rng.random() < 0.2:
                self.ledgers[version] = rollback(self.ledgers[version])
                yield
            elif self.rng.random() < 0.3:
                yield from self.vacuum(version)

    def vacuum(self, version: int) -> Iterator[None]:
        """Orphaned records are written anew, and records without a value removed."""
        self.ledgers[version], attempt = begin_operator(self.ledgers[version], "vacuum", "vacuum")
        yield
        for key, record in [*self.records[version].items()]:
            value = attempt.view.values([record], attempt.txid)[0]
            if value is None:
                del self.records[version][key]
            elif record[0] not in attempt.view:
                self.records[version][key] = attempt.txid, value, value
            yield
        self.ledgers[version] = commit_vacuum(self.ledgers[version], attempt.txid)

    def read(self, version: int, key: str) -> Iterator[tuple[LedgerRecord, Record | None, int | None] | None]:
        """The ledger, the record and its value, as `CommittedReads.read` gives them. None is a step."""
        while True:
            before = self.ledgers[version]
            yield None
            record = self.records[version].get(key)
            yield None
            try:
                value = before.view().values([record], before.next_txid - 1)[0]
            except StaleBatchError:
                continue
            if record is not None or self.ledgers[version].rewrites == before.rewrites:
                yield before, record, value
                return

    def compare(self) -> Iterator[None]:
        """One pass of a comparison."""
        first = [*self.ledgers]
        position = ""
        for step in self.wait(first):
            if step is None:
                yield
            else:
                position = step
        if position:
            yield from self.pass_over(first, position)

    def wait(self, first: list[LedgerRecord]) -> Iterator[str | None]:
        """Fill in the ledgers from which on records have to stand still, and give the position. None is a step."""
        position = further(*map(offsets_of, self.ledgers))
        if self.mutant == "position_first":
            yield None
        for version in VERSIONS:
            first[version] = self.ledgers[version]
            yield None
        if self.mutant != "position_first":
            position = further(*map(offsets_of, first))
        if position is None:
            return
        if self.mutant == "the_nearer":
            position = next((end for end in map(offsets_of, first) if end not in (position, None)), position)
            assert position is not None
        for _ in range(200):
            now = [*self.ledgers]
            for version in VERSIONS:
                if not goes_on(first[version], now[version]) and self.mutant != "rolled_back":
                    raise StaleBatchError("rolled back")
                if behind_by(offsets_of(now[version]), position) == []:
                    first[version] = now[version]
            if self.mutant == "no_wait" or not any(is_behind(ledger, position) for ledger in now):
                yield position
                return
            yield None

    def pass_over(self, first: list[LedgerRecord], position: str) -> Iterator[None]:
        """Read all keys of both versions, and say what they were."""
        found: dict[tuple[int, str], tuple[bool, int | None]] = {}
        absent: list[tuple[int, str]] = []
        for version in VERSIONS:
            for key in KEYS:
                for step in self.read(version, key):
                    if step is None:
                        yield
                        continue
                    ledger, record, value = step
                    stale = not goes_on(first[version], ledger) or is_behind(ledger, position)
                    if stale and self.mutant not in ("rolled_back", "no_wait"):
                        raise StaleBatchError("rolled back")
                    if record is None:
                        absent.append((version, key))
                    by = ledger if self.mutant == "own_ledger" else first[version]
                    still = self.mutant == "one_pass" or record is None or stood_still(record[0], by)
                    found[version, key] = still, value
        sure = [keeps_absent(first[version], self.ledgers[version]) for version in VERSIONS]
        for version, key in absent:
            found[version, key] = sure[version] or self.mutant in ("absent", "one_pass"), None
        self.judge(position, found)

    def judge(self, position: str, found: dict[tuple[int, str], tuple[bool, int | None]]) -> None:
        for key in KEYS:
            if not all(found[version, key][0] for version in VERSIONS):
                self.moving += 1
                continue
            self.settled += 1
            for version in VERSIONS:
                value, true = found[version, key][1], self.true(version, key, position)
                if value != true:
                    raise Wrong(f"{key} of version {version} is {value} as of {position}, and was {true}")

    def go(self) -> None:
        drivers = [self.driver(version) for version in VERSIONS]
        comparison = self.compare()
        for _ in range(self.rng.randint(60, 400)):
            draw = self.rng.random()
            if draw < 0.06:
                self.rng.choice(self.log).append(self.rng.choice(KEYS))
                continue
            which = self.rng.choice(VERSIONS)
            try:
                next(comparison if draw < 0.75 else drivers[which])
            except StopIteration:
                if draw < 0.75:
                    comparison = self.compare()
                else:
                    drivers[which] = self.driver(which)
            except MapStateError:
                self.refused += 1
                if draw < 0.75:
                    comparison = self.compare()
                else:
                    drivers[which] = self.driver(which)


def explore(worlds: int, mutant: str = "") -> tuple[str | None, int, int]:
    """The first world that goes wrong, None if none does; and how many keys were compared, and were in motion."""
    settled = moving = 0
    for number in range(worlds):
        world = World(number, mutant)
        try:
            world.go()
        except Wrong as wrong:
            return f"world {number}: {wrong}", settled, moving
        settled, moving = settled + world.settled, moving + world.moving
    return None, settled, moving
