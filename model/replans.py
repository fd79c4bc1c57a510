"""Checkpoints that are copied and put back, so that Spark plans batches anew. One key to a state.

The input is a row after the other. A batch is a range of them, which a checkpoint knows from when the batch was
planned; a driver whose checkpoint has no plan for its batch makes one, up to any row. What has to be true is that each
state counts each row once, in order, whatever checkpoint a driver comes with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mapstate.protocol.ledger_record import BatchPlan
from mapstate.schema import OnNewOwner, StateType
from model.protocol import ModelAttempt, Protocol, Record, Refused
from model.together import TogetherProtocol
from model.world import Label, ViolationError, with_item

__all__ = ["Replans", "ReplansSteps"]


@dataclass(frozen=True, kw_only=True)
class Replans:
    """A world of checkpoints that are copied.

    ``stores``    the store of each state; those of one store change their ledgers in one write
    ``follows``   each state follows the new values of the one before it, and is committed behind it
    ``drivers``   how many come, each with any of the checkpoints, or in that ``order``
    ``copies``    of a checkpoint, made at any moment
    ``rows``      of the input; a row with an odd number has nothing for the first state, and so on by turns
    ``adopters``  checkpoints of other queries, which start at any row and adopt the state, as the first query does;
                  ``are_silent``: Spark does not tell at which row. In such a world offsets are rows, as Kafka has them
    ``attempts``, ``failures``, ``lost_replies``, ``vacuums`` as in other worlds
    """

    name: str
    stores: tuple[int, ...] = (0,)
    type: StateType = "opaque"
    follows: bool = False
    drivers: int = 3
    order: tuple[int, ...] = ()
    copies: int = 1
    rows: int = 3
    adopters: int = 0
    are_silent: bool = False
    attempts: int = 4
    failures: int = 0
    lost_replies: int = 0
    vacuums: int = 0

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The states that are written together."""
        states = range(len(self.stores))
        if self.follows:
            return [(state,) for state in states]
        return [tuple(state for state in states if self.stores[state] == store) for store in sorted(set(self.stores))]

    def start(self) -> _State:
        """Nothing is stored, nobody runs; there is a checkpoint of each query, with nothing in it."""
        states = len(self.stores)
        checkpoints = (_Checkpoint(), *(_Checkpoint(query=one + 1, start=None) for one in range(self.adopters)))
        return _State((0,) * states, (None,) * states, checkpoints, (), ((),) * states, _Used())


class _Checkpoint(NamedTuple):
    """``plans`` has (when it was planned, where it ends) for each batch; so many of them are in Spark's commit log.

    ``start`` is where ``query`` starts; None before it has planned a batch.
    """

    plans: tuple[tuple[int, int], ...] = ()
    commits: int = 0
    query: int = 0
    start: int | None = 0

    def entry(self, batch: int) -> tuple[int, int, int, int]:
        """When the batch was planned, and the one before it; where it starts and ends."""
        before = self.plans[batch - 1] if batch else (0, self.start or 0)
        return self.plans[batch][0], before[0], before[1], self.plans[batch][1]


class _Used(NamedTuple):
    copies: int = 0
    plans: int = 0
    attempts: int = 0
    failures: int = 0
    lost_replies: int = 0
    vacuums: int = 0


class _Driver(NamedTuple):
    """``phase`` is "plan", "open", "begin", "put", "commit", "committed" or "gone", in the group ``at`` (put: state).

    ``entry`` is what it runs; ``known`` the ledgers as it last read or wrote them; ``attempts`` its attempts,
    None where the batch counts already; ``opened`` the groups that it has opened.
    """

    checkpoint: int
    batch: int
    phase: str = "plan"
    at: int = 0
    entry: tuple[int, int, int, int] = (0, 0, 0, 0)
    known: tuple[int, ...] = ()
    attempts: tuple[ModelAttempt | None, ...] = ()
    opened: int = 0

    def gone(self) -> _Driver:
        return _Driver(self.checkpoint, 0, "gone")

    def plan(self, world: Replans, query: int) -> BatchPlan:
        """What the library sees: offsets are places in a log, as a file source has them, and do not tell rows."""
        planned_at, before, start, end = self.entry
        if not world.adopters:
            return BatchPlan(f"[{self.batch}]", f"[{self.batch + 1}]", planned_at, before or None)
        is_silent = world.are_silent and 0 < query <= world.adopters and self.batch == 0
        return BatchPlan("[null]" if is_silent else _offsets(start), _offsets(end), planned_at, before or None)


def _offsets(row: int) -> str:
    return json.dumps([{"topic": {"0": row}}])


class _State(NamedTuple):
    """Everything at one moment. ``held`` is the audit: by state, the ranges of rows that count, by batch.

    ``wrote`` is the checkpoint of the driver that began or committed in the first state last.
    """

    ledgers: tuple[int, ...]
    records: tuple[Record | None, ...]
    checkpoints: tuple[_Checkpoint, ...]
    drivers: tuple[_Driver, ...]
    held: tuple[tuple[tuple[int, int, int], ...], ...]
    used: _Used
    wrote: int = 0

    def with_driver(self, at: int, driver: _Driver) -> _State:
        return self._replace(drivers=with_item(self.drivers, at, driver))


class ReplansSteps:
    """The steps of one world under one protocol, and what has to be true after each."""

    def __init__(self, world: Replans, protocol: TogetherProtocol) -> None:
        self.world = world
        self.protocol = protocol
        self._groups = world.groups
        self._ends: dict[tuple[Any, ...], bool] = {}

    def of(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """Each step from a state, and the state after it. Raises ViolationError for a step that is wrong in itself."""
        world, used = self.world, state.used
        if used.copies < world.copies:
            for place, checkpoint in enumerate(state.checkpoints):
                copied = used._replace(copies=used.copies + 1)
                yield (
                    ("checkpoint", place, "is copied"),
                    state._replace(checkpoints=(*state.checkpoints, checkpoint), used=copied),
                )
        if len(state.drivers) < world.drivers:
            came = len(state.drivers)
            for place in world.order[came : came + 1] or range(len(state.checkpoints)):
                driver = _Driver(place, state.checkpoints[place].commits)
                yield ("a driver comes with checkpoint", place), state._replace(drivers=(*state.drivers, driver))
        if used.vacuums < world.vacuums:
            yield from self._vacuum(state)
        for at, driver in enumerate(state.drivers):
            if driver.phase != "gone":
                yield from self._driver(state, at, driver)

    def _driver(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        if driver.phase == "plan":
            yield from self._plan(state, at, driver)
        elif driver.phase == "open":
            yield from self._open(state, at, driver)
        elif driver.phase == "begin":
            yield from self._begin(state, at, driver)
        elif driver.phase == "put":
            yield self._put(state, at, driver)
            yield from self._fail(state, at, driver)
        elif driver.phase == "commit":
            yield from self._commit(state, at, driver)
            yield from self._fail(state, at, driver)
        else:
            yield self._spark_commits(state, at, driver)

    def _plan(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        """Spark replays what its checkpoint has a plan for, and else plans the batch, up to any row that there is."""
        checkpoint, used = state.checkpoints[driver.checkpoint], state.used
        ready = driver._replace(phase="begin" if driver.opened else "open")
        if driver.batch < len(checkpoint.plans):
            again = ready._replace(entry=checkpoint.entry(driver.batch))
            yield (f"driver {at}", "replays batch", driver.batch), state.with_driver(at, again)
            return
        starts = range(self.world.rows) if checkpoint.start is None else (checkpoint.start,)
        starts = (checkpoint.plans[-1][1],) if checkpoint.plans else starts
        for start, end in [(first, last + 1) for first in starts for last in range(first, self.world.rows)]:
            planned = used._replace(plans=used.plans + 1)
            begins = checkpoint.start if checkpoint.plans else start
            longer = checkpoint._replace(plans=(*checkpoint.plans, (planned.plans, end)), start=begins)
            after = state._replace(checkpoints=with_item(state.checkpoints, driver.checkpoint, longer), used=planned)
            label = (f"driver {at}", "plans batch", driver.batch, "of rows", start, "to", end)
            yield label, after.with_driver(at, ready._replace(entry=longer.entry(driver.batch)))

    def _query(self, state: _State, at: int) -> int:
        return state.checkpoints[state.drivers[at].checkpoint].query

    def _opened(self, state: _State, at: int, group: Sequence[int]) -> list[int] | Refused:
        policy: OnNewOwner = "adopt" if self.world.adopters else "refuse"
        opening = self.protocol.opening(self._query(state, at), at, policy)
        ledgers = list(state.ledgers)
        for one in group:
            answer = self.protocol.open_one(ledgers[one], opening)
            if isinstance(answer, Refused):
                return answer
            ledgers[one] = answer
        return ledgers

    def _open(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        """Several stores are looked at, then opened one by one; one is opened in the write that begins the batch."""
        world = self.world
        label: Label = (f"driver {at}", "opens store", driver.at)
        plan = driver.plan(world, self._query(state, at))
        probed: Any = None
        if driver.at == 0 and world.follows:
            probed = self.protocol.check_following(state.ledgers, driver.batch, plan)
        elif driver.at == 0 and len(self._groups) > 1:
            everything = range(len(world.stores))
            ledgers = self._opened(state, at, everything)
            probed = ledgers
            if not isinstance(ledgers, Refused):
                probed = self.protocol.begin_all(ledgers, everything, at, driver.batch, "probe", plan)
        if isinstance(probed, Refused):
            yield (*label, probed.error), state.with_driver(at, driver.gone())
            return
        opened = self._opened(state, at, self._groups[driver.at])
        if isinstance(opened, Refused):
            yield (*label, opened.error), state.with_driver(at, driver.gone())
            return
        after = state._replace(ledgers=tuple(opened))
        group = self._groups[driver.at]
        known = tuple(opened[one] if one in group else of for one, of in enumerate(driver.known or opened))
        driver = driver._replace(known=known, opened=driver.opened + 1)
        if world.follows or len(self._groups) == 1:
            yield from self._begin(after, at, driver._replace(phase="begin"), refused=state)
        elif driver.opened < len(self._groups):
            yield label, after.with_driver(at, driver._replace(at=driver.at + 1))
        else:
            yield label, after.with_driver(at, driver._replace(phase="begin", at=0))

    def _begin(
        self, state: _State, at: int, driver: _Driver, refused: _State | None = None
    ) -> Iterator[tuple[Label, _State]]:
        if state.used.attempts >= self.world.attempts:
            return
        group = self._groups[driver.at]
        known = [state.ledgers[one] if one in group else of for one, of in enumerate(driver.known)]
        asked = [known[one] for one in group] if self.world.follows else known
        places = range(len(group)) if self.world.follows else group
        label: Label = (f"driver {at}", "begins batch", driver.batch, "in store", driver.at)
        nonce = f"n{99 - at:02}{state.used.attempts:04}"
        plan = driver.plan(self.world, self._query(state, at))
        if self.world.follows and driver.at:
            before = driver.attempts[driver.at - 1]
            commit = self.protocol.ledger(driver.known[driver.at - 1]).last_commit
            assert commit is not None
            plan = plan._replace(upstream_txid=commit.txid if before is None else before.txid)
        answers = self.protocol.begin_all(asked, places, at, driver.batch, nonce, plan)
        if isinstance(answers, Refused):
            yield (*label, answers.error), (refused or state).with_driver(at, driver.gone())
            return
        ledgers, held, attempts = list(state.ledgers), list(state.held), list(driver.attempts)
        for one, (answer, back) in zip(group, answers, strict=True):
            ledgers[one] = answer if isinstance(answer, int) else answer.ledger
            was, now = self.protocol.ledger(known[one]).last_commit, self.protocol.ledger(ledgers[one]).last_commit
            if back or was != now:
                held[one] = held[one][:-1]
                label = (*label, "which is rolled back in state", one)
            attempts.append(None if isinstance(answer, int) else answer)
        after = state._replace(ledgers=tuple(ledgers), held=tuple(held))
        if group[0] == 0 and attempts[0] is not None:
            after = after._replace(wrote=driver.checkpoint)
        now_known = tuple(ledgers[one] if one in group else of for one, of in enumerate(known))
        driver = driver._replace(known=now_known, attempts=tuple(attempts))
        last = self.world.follows or driver.at + 1 == len(self._groups)
        if not last:
            yield label, after.with_driver(at, driver._replace(at=driver.at + 1))
        elif attempts[group[0]] is None:
            yield (*label, "which counts already"), after.with_driver(at, self._next_group(driver))
        else:
            counted = after._replace(used=after.used._replace(attempts=after.used.attempts + 1))
            first = group[0] if self.world.follows else 0
            yield label, counted.with_driver(at, driver._replace(phase="put", at=first))

    def _next_group(self, driver: _Driver) -> _Driver:
        """After a commit, or where the batch counts already: the state that follows, or Spark's own commit."""
        if self.world.follows and len(driver.attempts) < len(self._groups):
            place = len(driver.attempts)
            return driver._replace(phase="begin" if driver.opened > place else "open", at=place)
        return driver._replace(phase="committed", at=0)

    def _put(self, state: _State, at: int, driver: _Driver) -> tuple[Label, _State]:
        place = driver.at
        label = (f"driver {at}", "puts to state", place)
        attempt = driver.attempts[place]
        after = driver._replace(at=place + 1)
        if self.world.follows or after.at == len(driver.attempts):
            after = after._replace(phase="commit", at=place if self.world.follows else 0)
        _, _, start, end = driver.entry
        adds = self._amount(start, end, place)
        if attempt is None or not adds:
            return (*label, "nothing"), state.with_driver(at, after)
        record = self.protocol.applied(attempt.view, attempt.txid, state.records[place], adds)
        fence = self.protocol.fence(state.ledgers[place])
        if not self.protocol.may_write(fence, attempt.token) or isinstance(record, Refused):
            return (*label, "and is fenced"), state.with_driver(at, driver.gone())
        if record is None:
            return (*label, "which has it"), state.with_driver(at, after)
        return (*label, record), state._replace(records=with_item(state.records, place, record)).with_driver(at, after)

    def _amount(self, start: int, end: int, place: int) -> int:
        """What rows have for a state. A state that follows another gets what that one got."""
        turn = 0 if self.world.follows else place
        return sum(4**row for row in range(start, end) if (row + turn) % 2 == 0)

    def _fail(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        """The attempt is begun anew: of states that follow, in the one where it failed."""
        if state.used.failures < self.world.failures:
            used = state.used._replace(failures=state.used.failures + 1)
            kept = driver.attempts[:-1] if self.world.follows else ()
            again = driver._replace(phase="begin", at=len(kept), attempts=kept)
            yield (f"driver {at}", "begins anew"), state._replace(used=used).with_driver(at, again)

    def _commit(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        label: Label = (f"driver {at}", "commits batch", driver.batch, "in store", driver.at)
        ledgers, held = list(state.ledgers), list(state.held)
        _, _, start, end = driver.entry
        query, offsets = self._query(state, at), _offsets(end) if self.world.adopters else None
        for one in self._groups[driver.at]:
            attempt = driver.attempts[one]
            if attempt is None:
                continue
            answer = self.protocol.commit(ledgers[one], at, query, driver.batch, attempt.txid, offsets)
            if isinstance(answer, Refused):
                yield (*label, answer.error), state.with_driver(at, driver.gone())
                return
            if answer != ledgers[one]:
                held[one] = (*held[one], (driver.batch, start, end))
            ledgers[one] = answer
        after = state._replace(ledgers=tuple(ledgers), held=tuple(held))
        group = self._groups[driver.at]
        if group[0] == 0 and held[0] != state.held[0]:
            after = after._replace(wrote=driver.checkpoint)
        known = driver._replace(
            known=tuple(ledgers[one] if one in group else of for one, of in enumerate(driver.known))
        )
        if self.world.follows or driver.at + 1 == len(self._groups):
            done = self._next_group(known)
        else:
            done = known._replace(at=driver.at + 1)
        yield label, after.with_driver(at, done)
        if state.used.lost_replies < self.world.lost_replies:
            used = state.used._replace(lost_replies=state.used.lost_replies + 1)
            yield (*label, "and gets no reply"), after._replace(used=used).with_driver(at, known)

    def _spark_commits(self, state: _State, at: int, driver: _Driver) -> tuple[Label, _State]:
        checkpoint = state.checkpoints[driver.checkpoint]
        later = checkpoint._replace(commits=max(checkpoint.commits, driver.batch + 1))
        idle = driver._replace(phase="plan", batch=driver.batch + 1, at=0, attempts=())
        after = state._replace(checkpoints=with_item(state.checkpoints, driver.checkpoint, later))
        return (f"driver {at}", "Spark's own commit of batch", driver.batch), after.with_driver(at, idle)

    def _vacuum(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """A vacuum of one state, from its begin to its end: what drivers do meanwhile, other worlds have."""
        used = state.used._replace(vacuums=state.used.vacuums + 1)
        for place, ledger in enumerate(state.ledgers):
            attempt = self.protocol.begin_vacuum(ledger, used.vacuums, take_over=True) if ledger else None
            if not isinstance(attempt, ModelAttempt):
                continue
            record = state.records[place]
            swept = record and self.protocol.swept(attempt.view, attempt.txid, record, everything=False)
            after = self.protocol.commit_vacuum(attempt.ledger, attempt.txid, fenced=True)
            assert isinstance(after, int)
            records = state.records
            if swept is not None:
                records = with_item(records, place, None if isinstance(swept, str) else swept)
            ledgers = with_item(state.ledgers, place, after)
            yield ("a vacuum of state", place), state._replace(ledgers=ledgers, records=records, used=used)

    def check(self, state: _State) -> None:
        """Raises ViolationError unless each state counts each row once, in order, and a driver can go on."""
        protocol = self.protocol
        for place, (ledger, record) in enumerate(zip(state.ledgers, state.records, strict=True)):
            if ledger and self.world.type == "transactional" and protocol.ledger(ledger).in_flight is not None:
                continue  # readers see what is in so far
            found = protocol.shown(protocol.view(ledger), protocol.newest(ledger), record) if ledger else None
            held = state.held[place]
            right = sum(self._amount(start, end, place) for _, start, end in held)
            if (found or 0) != right:
                raise ViolationError(f"state {place} reads as {found} where {right} is right: {record}")
            starts, ends = [start for _, start, _ in held], [0, *(end for _, _, end in held)]
            if self.world.adopters and held:
                ends[0] = starts[0]  # where nothing counts, a query may start anywhere
            if starts != ends[: len(starts)]:
                raise ViolationError(f"state {place} counts rows twice or not at all: {held}")
        if max(map(len, state.held)) > min(map(len, state.held)) + (len(self._groups) > 1):
            raise ViolationError(f"the states are apart: {state.held}")
        self._check_somebody_can_go_on(state)

    def _check_somebody_can_go_on(self, state: _State) -> None:
        """A driver that comes now, and is left alone, ends its batch: with a checkpoint as it is, or rewound.

        With that of whoever wrote the state last; of a transactional state, which is for those that have the plan of
        what is in flight, with any.
        """
        ledger = state.ledgers[0]
        if not ledger or self.world.vacuums:  # which may be in the way of a rollback
            return
        places = range(len(state.checkpoints)) if self.world.type == "transactional" else (state.wrote,)
        store = (state.ledgers, state.records, state.checkpoints, places, state.held)
        if store not in self._ends:
            self._ends[store] = self._may_be_adopted(state) and any(
                self._ends_alone(state, place, commits)
                for place in places
                for commits in sorted({state.checkpoints[place].commits, self._rewound(state, place)}, reverse=True)
            )
        if not self._ends[store]:
            raise ViolationError(f"checkpoint {state.wrote} is not accepted: {state.checkpoints}")

    def _may_be_adopted(self, state: _State) -> bool:
        """A query that starts where the state ends, in the store that is furthest behind, is accepted."""
        if not self.world.adopters or (self.world.type == "transactional" and self._has_attempt(state)):
            return True
        held = min(state.held, key=len)
        new = _Checkpoint(query=self.world.adopters + 1, start=held[-1][2] if held else 0)
        return self._ends_alone(state._replace(checkpoints=(*state.checkpoints, new)), len(state.checkpoints), 0)

    def _has_attempt(self, state: _State) -> bool:
        return any(ledger and self.protocol.ledger(ledger).in_flight is not None for ledger in state.ledgers)

    def _rewound(self, state: _State, place: int) -> int:
        """See `mapstate.operations.checkpoint.rewind`: back to the batch that the state furthest behind waits for."""
        owner = f"q{state.checkpoints[place].query}"
        due = [self.protocol.ledger(ledger).owners.get(owner, 0) for ledger in state.ledgers if ledger]
        return min(state.checkpoints[place].commits, *due)

    def _ends_alone(self, state: _State, place: int, commits: int) -> bool:
        more = replace(self.world, attempts=1 << 30, failures=0, lost_replies=0, copies=0, rows=self.world.rows + 1)
        alone = ReplansSteps(more, self.protocol)
        checkpoints = with_item(state.checkpoints, place, state.checkpoints[place]._replace(commits=commits))
        at = len(state.drivers)
        now = state._replace(checkpoints=checkpoints, drivers=(*state.drivers, _Driver(place, commits)))
        while now.checkpoints[place].commits == commits:
            if now.drivers[at].phase == "gone":
                return False
            *_, (_, now) = alone._driver(now, at, now.drivers[at])  # of several plans the one with the most rows
        if len(set(now.held)) > 1:
            raise ViolationError(f"the states differ after a batch that is done: {now.held}")
        return True


def protocol_of(world: Replans, protocol: Protocol | None) -> TogetherProtocol:
    """The protocol of such a world: the library's, or a mutant's."""
    own = protocol or TogetherProtocol(world.type)
    assert isinstance(own, TogetherProtocol)
    return own
