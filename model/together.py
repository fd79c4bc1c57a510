"""Several states of one topology, in one store or in several: small worlds of their own, one key to a state.

What a state is by itself, with its tasks, copies of tasks and readers, the other worlds explore. Here an attempt
puts one key to each state, and what matters is which batches each of them counts, and what is in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from mapstate.capabilities import FenceToken
from mapstate.errors import MapStateError
from mapstate.protocol import following, joint, transitions, upkeep
from mapstate.protocol.ledger_record import AlreadyCommitted, BatchPlan, Commit, LedgerRecord, OpenRequest
from mapstate.schema import OnNewOwner, StateType
from model.protocol import ModelAttempt, Protocol, Record, Refused
from model.world import Drivers, Label, ViolationError, with_item

__all__ = ["Together", "TogetherProtocol", "TogetherSteps"]

_CORRECTION = (-1, 0, 4**10)
"""What is held of a correction: its digit is in the value, and stands for its entry of the list, too."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """A world of several states.

    ``stores``     the store of each state; those of one store change their ledgers in one write
    ``drivers``    as of `World`
    ``plans``      what an attempt may hold for the key of each state: 0 nothing, 1 rows
    ``failures``   attempts that their driver begins anew, at any moment, also between two commits
    ``lost_replies``  to a commit
    ``rollbacks``  of one state alone, by an operator who rewinds the checkpoint with it
    ``corrections``  how often operators call one correction of all states, with its id; those before may be at work
    """

    name: str
    stores: tuple[int, ...] = (0, 1)
    type: StateType = "opaque"
    drivers: Drivers = ((0, "refuse"), (0, "refuse"))
    batches: int = 2
    attempts: int = 3
    plans: tuple[int, ...] = (1, 0)
    failures: int = 0
    lost_replies: int = 0
    rollbacks: int = 0
    corrections: int = 0

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The states of each store."""
        return [
            tuple(state for state, of in enumerate(self.stores) if of == store) for store in sorted(set(self.stores))
        ]

    @property
    def queries(self) -> int:
        """How many checkpoints there are."""
        return max(query for query, _ in self.drivers) + 1

    def policy(self, driver: int, query: int) -> OnNewOwner:
        """What the spec of a driver says of a new owner; one more driver has that of its query."""
        of = self.drivers[driver : driver + 1] or [one for one in self.drivers if one[0] == query]
        return of[0][1]

    def start(self) -> _State:
        """Nothing is stored, nobody runs."""
        states = len(self.stores)
        return _State((0,) * states, (None,) * states, (0,) * self.queries, (), ((),) * states, _Used())


class _Used(NamedTuple):
    attempts: int = 0
    failures: int = 0
    lost_replies: int = 0
    rollbacks: int = 0


class _Driver(NamedTuple):
    """A driver. ``at`` counts the stores, or the states, that it is done with in its phase.

    ``phase``  "open" and "begin" (stores), "put" (states), "commit" (stores), "committed", "gone"
    ``known``  the ledgers as it last read or wrote them
    ``attempts``  its attempt in each state; None where the batch counts already
    ``adds``   what the attempt has for each key
    """

    query: int
    batch: int
    phase: str = "open"
    at: int = 0
    known: tuple[int, ...] = ()
    attempts: tuple[ModelAttempt | None, ...] = ()
    adds: int = 0

    def gone(self) -> _Driver:
        return _Driver(self.query, 0, "gone")


class _Operator(NamedTuple):
    """An operator with a correction. ``at`` counts the states, or the stores, that it is done with in its phase.

    ``phase``  "read list" (states), "check", "begin" (stores), "put" (states), "commit" (stores), "applied", "gone"
    ``seen``   the ledger of each state as it read it; ``lacks`` the states without the correction
    """

    phase: str = "read list"
    at: int = 0
    seen: tuple[int, ...] = ()
    lacks: tuple[int, ...] = ()
    attempts: tuple[tuple[int, ModelAttempt], ...] = ()

    def to(self, phase: str) -> _Operator:
        return self._replace(phase=phase, at=0)


class _State(NamedTuple):
    """Everything at one moment.

    ``held`` is the audit: by state, what counts, batches as (query, batch, adds), and the correction as `_CORRECTION`.
    """

    ledgers: tuple[int, ...]
    records: tuple[Record | None, ...]
    checkpoints: tuple[int, ...]
    drivers: tuple[_Driver, ...]
    held: tuple[tuple[tuple[int, int, int], ...], ...]
    used: _Used
    operators: tuple[_Operator, ...] = ()

    def with_driver(self, at: int, driver: _Driver) -> _State:
        return self._replace(drivers=with_item(self.drivers, at, driver))

    def with_operator(self, at: int, operator: _Operator) -> _State:
        return self._replace(operators=with_item(self.operators, at, operator))

    def batches(self) -> list[tuple[tuple[int, int, int], ...]]:
        """The batches of each state that count."""
        return [tuple(one for one in held if one != _CORRECTION) for held in self.held]


class TogetherProtocol(Protocol):
    """What `mapstate.protocol.ledgers` does. A mutant gets one thing wrong."""

    opens_all_first = True
    commits_one_store_at_once = True

    def commit_apart(
        self, ledger: int, session: int, query: int, batch: int, txid: int, apart_from: tuple[str, ...]
    ) -> int | Refused:
        """See `transitions.commit`; ``apart_from`` are the states of other stores."""
        done = Commit(batch_id=batch, txid=txid, owner=f"q{query}", apart_from=apart_from)
        return self._changed(lambda: self.committed(self.ledger(ledger), f"s{session}", done))

    def may_be_corrected(self, ledgers: Sequence[int], state: int) -> bool:
        """See `mapstate.spark.driver.correcting`: no state lacks a batch that this one may have to give up."""
        own = self.ledger(ledgers[state])
        others = [self.ledger(one) for one in ledgers]
        return not own.may_lose_last_batch() or all(joint.has_last_batch(own, other) for other in others)

    def begin_correction(self, ledger: int, session: int, seen: int) -> ModelAttempt | int | Refused:
        """See `upkeep.begin_operator`, of one that takes over."""

        def begun() -> tuple[LedgerRecord, Any]:
            known = self.ledger(seen)
            return upkeep.begin_operator(self.ledger(ledger), f"o{session}", "correction", take_over=True, seen=known)

        return self._begun(begun)

    def commit_correction(self, ledger: int, txid: int) -> int | Refused:
        """See `upkeep.commit_correction`."""
        return self._changed(lambda: upkeep.commit_correction(self.ledger(ledger), txid))

    def lacks_correction(self, shown: Any) -> bool:
        """Whether the list of a state, which stands in its value, lacks the correction."""
        return not (shown or 0) // _CORRECTION[2]

    def open_one(self, ledger: int, opening: OpenRequest) -> int | Refused:
        """See `open_ledger`."""
        return self._changed(lambda: self.opened(self._ledgers[ledger], opening))

    def begin_all(
        self,
        ledgers: Sequence[int],
        group: Sequence[int],
        session: int,
        batch: int,
        nonce: str,
        plan: BatchPlan | None = None,
    ) -> list[tuple[ModelAttempt | int, bool]] | Refused:
        """What begins in a group of states, where these are the ledgers of all; and which are rolled back before."""
        before = [self.ledger(one) for one in ledgers]
        try:
            even = self.even(before, [f"s{session}"] * len(before), batch)
            for ledger in (
                even if plan is not None else ()
            ):  # without plans it is as with on_new_owner="adopt_unchecked"
                self.check_start(ledger, batch, plan)
            results = [self.begun(even[state], f"s{session}", batch, nonce, plan) for state in group]
        except MapStateError as error:
            return Refused(type(error).__name__)
        out: list[tuple[ModelAttempt | int, bool]] = []
        for state, (after, one) in zip(group, results, strict=True):
            number, back = self.number(after), even[state] is not before[state]
            if isinstance(one, AlreadyCommitted):
                out.append((number, back))
            else:
                out.append((ModelAttempt(number, one.txid, self._view_number(one.view), one.token), back))
        return out

    def even(self, ledgers: list[LedgerRecord], sessions: list[str], batch: int) -> list[LedgerRecord]:
        """See `joint.reconcile` and `following.check_adopted`."""
        for ledger, session in zip(ledgers, sessions, strict=True):
            transitions.check_session(ledger, session)
        even = joint.reconcile(ledgers, batch)
        following.check_adopted(even, ["refuse"] * len(even))
        return even

    def check_start(self, ledger: LedgerRecord, batch: int, plan: BatchPlan | None) -> None:
        """See `following.check_start`."""
        following.check_start(ledger, batch, plan, "refuse")

    def check_following(self, ledgers: Sequence[int], batch: int, plan: BatchPlan | None) -> Refused | None:
        """See `following.check_follower`: of each state and the one that follows it."""
        found = [self._ledgers[one] for one in ledgers]
        try:
            for pair in pairwise(found):
                plan = self.check_follower(pair, batch, plan)
        except MapStateError as error:
            return Refused(type(error).__name__)
        return None

    def check_follower(
        self, pair: Sequence[LedgerRecord | None], batch: int, plan: BatchPlan | None
    ) -> BatchPlan | None:
        """See `following.check_follower`."""
        return following.check_follower(pair, "q0", ["refuse", "refuse"], batch, plan)


class TogetherSteps:
    """The steps of one world under one protocol, and what has to be true after each."""

    def __init__(self, world: Together, protocol: TogetherProtocol) -> None:
        self.world = world
        self.protocol = protocol
        self._can_finish: dict[tuple[Any, ...], str | None] = {}
        groups = world.groups
        if not protocol.commits_one_store_at_once:
            groups = [(state,) for state in range(len(world.stores))]
        self._groups = groups

    def of(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """Each step from a state, and the state after it. Raises ViolationError for a step that is wrong in itself."""
        world = self.world
        if len(state.drivers) < len(world.drivers):
            query = world.drivers[len(state.drivers)][0]
            driver = _Driver(query, state.checkpoints[query])
            yield ("a driver comes", query), state._replace(drivers=(*state.drivers, driver))
        for at, driver in enumerate(state.drivers):
            if driver.phase != "gone":
                yield from self._driver(state, at, driver)
        if state.used.rollbacks < world.rollbacks:
            yield from self._rollback(state)
        if len(state.operators) < world.corrections and all(state.held):
            yield ("an operator comes",), state._replace(operators=(*state.operators, _Operator()))
        for at, operator in enumerate(state.operators):
            if operator.phase not in ("applied", "gone"):
                yield self._correct(state, at, operator)

    def _driver(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        if driver.phase == "open":
            yield from self._open(state, at, driver)
        elif driver.phase == "begin":
            yield from self._begin(state, at, driver)
        elif driver.phase == "put":
            yield self._put(state, at, driver)
            yield from self._fail(state, at, driver)
        elif driver.phase == "commit":
            yield from self._commit(state, at, driver)
            yield from self._fail(state, at, driver)
        elif driver.phase == "committed":
            yield self._spark_commits(state, at, driver)

    def _open(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        """Where there is one store the opening is one write with the begin."""
        opening = self.protocol.opening(driver.query, at, self.world.policy(at, driver.query))
        group = self._groups[driver.at]
        ledgers = list(state.ledgers)
        for one in group:
            answer = self.protocol.open_one(ledgers[one], opening)
            if isinstance(answer, Refused):
                yield (f"driver {at}", "opens store", driver.at, answer.error), state.with_driver(at, driver.gone())
                return
            ledgers[one] = answer
        after = state._replace(ledgers=tuple(ledgers))
        known = tuple(ledgers[one] if one in group else of for one, of in enumerate(driver.known or ledgers))
        driver = driver._replace(known=known, at=driver.at + 1)
        if len(self._groups) == 1:
            yield from self._begin(after, at, driver._replace(phase="begin", at=0), refused=state)
        elif not self.protocol.opens_all_first:
            yield from self._begin(after, at, driver._replace(phase="begin", at=driver.at - 1), refused=state)
        else:
            if driver.at == len(self._groups):
                driver = driver._replace(phase="begin", at=0)
            yield (f"driver {at}", "opens a store"), after.with_driver(at, driver)

    def _begin(
        self, state: _State, at: int, driver: _Driver, refused: _State | None = None
    ) -> Iterator[tuple[Label, _State]]:
        world = self.world
        if driver.batch >= world.batches or state.used.attempts >= world.attempts:
            return
        group = self._groups[driver.at]
        known = [state.ledgers[one] if one in group else of for one, of in enumerate(driver.known)]
        seen = list(known)
        if not self.protocol.opens_all_first:  # the others are looked at, as they would be opened
            opening = self.protocol.opening(driver.query, at, world.policy(at, driver.query))
            for place in [place for of in self._groups[driver.at + 1 :] for place in of]:
                answer = self.protocol.open_one(state.ledgers[place], opening)
                seen[place] = 0 if isinstance(answer, Refused) else answer
        label: Label = (f"driver {at}", "begins batch", driver.batch, "in store", driver.at)
        answers: Any = Refused("StateOwnershipError")
        if all(seen):
            nonce = f"n{99 - at:02}{state.used.attempts:04}"
            answers = self.protocol.begin_all(seen, group, at, driver.batch, nonce)
        if isinstance(answers, Refused):
            yield (*label, answers.error), (refused or state).with_driver(at, driver.gone())
            return
        ledgers, held, attempts = list(state.ledgers), list(state.held), list(driver.attempts)
        for one, (answer, back) in zip(group, answers, strict=True):
            ledgers[one] = answer if isinstance(answer, int) else answer.ledger
            held[one] = held[one][:-1] if back else held[one]
            attempts.append(None if isinstance(answer, int) else answer)
        if any(back for _, back in answers):
            label = (*label, "which was ahead")
        after = state._replace(ledgers=tuple(ledgers), held=tuple(held))
        now = tuple(ledgers[one] if one in group else of for one, of in enumerate(known))
        driver = driver._replace(known=now, attempts=tuple(attempts), at=driver.at + 1)
        if driver.at < len(self._groups):
            phase = "begin" if self.protocol.opens_all_first or refused is None else "open"
            yield label, after.with_driver(at, driver._replace(phase=phase))
            return
        if driver.attempts.count(None) == len(driver.attempts):
            yield (*label, "which counts already"), after.with_driver(at, driver._replace(phase="committed"))
            return
        own = all(self.protocol.ledger(one).session == f"s{at}" for one in after.ledgers)
        if own and None not in driver.attempts and len(set(after.batches())) > 1:
            raise ViolationError(f"an attempt begins where the states are not even: {after.held}")
        used = after.used._replace(attempts=after.used.attempts + 1)
        for plan in world.plans:
            adds = plan * 4**used.attempts
            run = driver._replace(phase="put", at=0, adds=adds)
            yield (*label, "adds", adds), after._replace(used=used).with_driver(at, run)

    def _put(self, state: _State, at: int, driver: _Driver) -> tuple[Label, _State]:
        place = driver.at
        attempt = driver.attempts[place]
        label = (f"driver {at}", "puts to state", place)
        after = driver._replace(at=place + 1)
        if after.at == len(driver.attempts):
            after = after._replace(phase="commit", at=0)
        if attempt is None or not driver.adds:
            return (*label, "nothing"), state.with_driver(at, after)
        fence: FenceToken | None = self.protocol.fence(state.ledgers[place])
        record = self.protocol.applied(attempt.view, attempt.txid, state.records[place], driver.adds)
        if not self.protocol.may_write(fence, attempt.token) or isinstance(record, Refused):
            return (*label, "and is fenced"), state.with_driver(at, driver.gone())
        records = with_item(state.records, place, record)
        return (*label, record), state._replace(records=records).with_driver(at, after)

    def _fail(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        """A task that ran twice, or a store that was started again; see `StoreRestartedError`."""
        if state.used.failures < self.world.failures:
            used = state.used._replace(failures=state.used.failures + 1)
            again = driver._replace(phase="begin", at=0, attempts=(), adds=0)
            yield (f"driver {at}", "begins anew"), state._replace(used=used).with_driver(at, again)

    def _commit(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        label: Label = (f"driver {at}", "commits batch", driver.batch, "in store", driver.at)
        ledgers, held = list(state.ledgers), list(state.held)
        for one in self._groups[driver.at]:
            attempt = driver.attempts[one]
            if attempt is None:
                continue
            apart = tuple(str(place) for place, of in enumerate(self.world.stores) if of != self.world.stores[one])
            answer = self.protocol.commit_apart(ledgers[one], at, driver.query, driver.batch, attempt.txid, apart)
            if isinstance(answer, Refused):
                yield (*label, answer.error), state.with_driver(at, driver.gone())
                return
            if answer != ledgers[one]:
                held[one] = (*held[one], (driver.query, driver.batch, driver.adds))
            ledgers[one] = answer
        after = state._replace(ledgers=tuple(ledgers), held=tuple(held))
        group = self._groups[driver.at]
        now = tuple(ledgers[one] if one in group else of for one, of in enumerate(driver.known))
        known = driver._replace(known=now)
        done = known._replace(at=driver.at + 1)
        if done.at == len(self._groups):
            done = done._replace(phase="committed", at=0)
        yield label, after.with_driver(at, done)
        if state.used.lost_replies < self.world.lost_replies:
            used = state.used._replace(lost_replies=state.used.lost_replies + 1)
            yield (*label, "and gets no reply"), after._replace(used=used).with_driver(at, known)

    def _spark_commits(self, state: _State, at: int, driver: _Driver) -> tuple[Label, _State]:
        query, batch = driver.query, driver.batch
        checkpoints = with_item(state.checkpoints, query, max(state.checkpoints[query], batch + 1))
        after = state._replace(checkpoints=checkpoints)
        idle = driver._replace(phase="begin", batch=batch + 1, at=0, attempts=(), adds=0)
        return (f"driver {at}", "Spark's own commit of batch", batch), after.with_driver(at, idle)

    def _correct(self, state: _State, at: int, own: _Operator) -> tuple[Label, _State]:
        """The next step of an operator. Without one it has died."""
        protocol, label, gone = self.protocol, (f"operator {at}", own.phase, own.at), own.to("gone")
        groups = [left for group in self._groups if (left := [one for one in group if one in own.lacks])]
        ledgers = list(state.ledgers)
        if own.phase == "read list":
            ledger = ledgers[own.at]
            shown = protocol.shown(protocol.view(ledger), protocol.newest(ledger), state.records[own.at])
            lacks = (*own.lacks, own.at) if protocol.lacks_correction(shown) else own.lacks
            own = own._replace(at=own.at + 1, seen=(*own.seen, ledger), lacks=lacks)
            if own.at == len(ledgers):
                own = own.to("check" if lacks else "applied")
            return label, state.with_operator(at, own)
        if own.phase == "check":  # against the others as they are by now
            known = [[own.seen[one] if place == one else of for place, of in enumerate(ledgers)] for one in own.lacks]
            able = all(protocol.may_be_corrected(of, one) for of, one in zip(known, own.lacks, strict=True))
            return (*label, "" if able else "UsageError"), state.with_operator(at, own.to("begin") if able else gone)
        if own.phase == "begin":
            attempts = dict(own.attempts)
            for one in groups[own.at]:
                answer = protocol.begin_correction(ledgers[one], at, own.seen[one])
                if not isinstance(answer, ModelAttempt):
                    return (*label, answer), state.with_operator(at, gone)
                ledgers[one], attempts[one] = answer.ledger, answer
            own = own._replace(at=own.at + 1, attempts=tuple(attempts.items()))
            own = own.to("put") if own.at == len(groups) else own
            return label, state._replace(ledgers=tuple(ledgers)).with_operator(at, own)
        if own.phase == "put":
            one, attempt = own.attempts[own.at]
            record = protocol.applied(attempt.view, attempt.txid, state.records[one], _CORRECTION[2])
            if not protocol.may_write(protocol.fence(ledgers[one]), attempt.token) or isinstance(record, Refused):
                return (*label, "and is fenced"), state.with_operator(at, gone)
            after = state._replace(records=with_item(state.records, one, record))
            own = own._replace(at=own.at + 1)
            return label, after.with_operator(at, own.to("commit") if own.at == len(own.attempts) else own)
        held = list(state.held)
        for one in groups[own.at]:
            committed = protocol.commit_correction(ledgers[one], dict(own.attempts)[one].txid)
            if isinstance(committed, Refused):
                return (*label, committed.error), state.with_operator(at, gone)
            ledgers[one], held[one] = committed, (*held[one], _CORRECTION)
        own = own._replace(at=own.at + 1)
        own = own.to("applied") if own.at == len(groups) else own
        return label, state._replace(ledgers=tuple(ledgers), held=tuple(held)).with_operator(at, own)

    def _rollback(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """Stops the query, rolls one of the states back where all could be, and rewinds the checkpoint."""
        if len(set(state.held)) > 1 or not state.held[0]:
            return
        answers = [self.protocol.rollback(ledger) for ledger in state.ledgers]
        if any(isinstance(answer, Refused) for answer in answers):
            return
        for place, answer in enumerate(answers):
            if isinstance(answer, int):
                query, batch, _ = state.held[place][-1]
                yield (
                    ("state", place, "is rolled back by hand"),
                    state._replace(
                        ledgers=with_item(state.ledgers, place, answer),
                        held=with_item(state.held, place, state.held[place][:-1]),
                        drivers=tuple(driver.gone() for driver in state.drivers),
                        checkpoints=with_item(state.checkpoints, query, min(state.checkpoints[query], batch)),
                        used=state.used._replace(rollbacks=state.used.rollbacks + 1),
                    ),
                )

    def check(self, state: _State) -> None:
        """Raises ViolationError unless all states count the same, as far as a driver's death may leave them."""
        protocol = self.protocol
        for place, (ledger, record) in enumerate(zip(state.ledgers, state.records, strict=True)):
            found = protocol.shown(protocol.view(ledger), protocol.newest(ledger), record) if ledger else None
            right = sum(adds for _, _, adds in state.held[place])
            if (found or 0) != right:
                raise ViolationError(f"state {place} reads as {found} where {right} is right: {record}")
        batches = state.batches()
        shortest = min(map(len, batches))
        if len({one[:shortest] for one in batches}) > 1:
            raise ViolationError(f"the states differ for ever: {state.held}")
        if any(len({_CORRECTION in state.held[one] for one in group}) > 1 for group in self.world.groups):
            raise ViolationError(f"the states of a store count a correction apart: {state.held}")
        if any(held.count(_CORRECTION) > 1 for held in state.held):
            raise ViolationError(f"a correction counts twice: {state.held}")
        if any(one.phase == "applied" for one in state.operators) and not all(_CORRECTION in one for one in state.held):
            raise ViolationError(f"a correction was said to be applied, and does not count: {state.held}")
        if max(map(len, batches)) > shortest + (len(self.world.groups) > 1 or bool(state.used.rollbacks)):
            raise ViolationError(f"the states are apart: {state.held}")
        for query, due in enumerate(state.checkpoints):
            for held in state.held:
                counted = [batch for of, batch, _ in held if of == query]
                if counted[:due] != list(range(due)):
                    raise ViolationError(f"Spark goes on behind batch {due - 1} of query {query}: {state.held}")
        self._check_somebody_can_go_on(state)

    def _check_somebody_can_go_on(self, state: _State) -> None:
        store = (state.ledgers, state.records, state.checkpoints, state.held)
        if store not in self._can_finish:
            queries = range(self.world.queries)
            whys = (why for query in queries if (why := self._refuses(state, query)))
            self._can_finish[store] = next(whys, None) or self._rest_is_refused(state)
        why = self._can_finish[store]
        if why is not None:
            raise ViolationError(why)

    def _rest_is_refused(self, state: _State) -> str | None:
        """An operator who comes now, and is left alone, ends a correction that some of the states count.

        At the latest after a batch that is left alone.
        """
        counting = [_CORRECTION in held for held in state.held]
        if not any(counting) or all(counting):
            return None
        now = state._replace(operators=(_Operator(),))
        while now.operators[0].phase not in ("applied", "gone"):
            _, now = self._correct(now, 0, now.operators[0])
        if now.operators[0].phase == "applied":
            return None
        later = [self._left_alone(state, query) for query in range(self.world.queries)]
        behind = [one for one in later if isinstance(one, _State)]
        return "the rest of a correction is refused for ever" if not behind else self._rest_is_refused(behind[0])

    def _refuses(self, state: _State, query: int) -> str | None:
        """A driver that comes now, and is left alone, ends its batch in all states."""
        after = self._left_alone(state, query)
        return after if isinstance(after, str) else None

    def _left_alone(self, state: _State, query: int) -> _State | str | None:
        """What is behind the next batch of a query; why it is refused for ever; None where it may be, or has none."""
        batch = state.checkpoints[query]
        if batch >= self.world.batches:
            return None
        alone = TogetherSteps(replace(self.world, attempts=1 << 30, failures=0, lost_replies=0), self.protocol)
        place = len(self.world.drivers)
        gone = (_Driver(0, 0, "gone"),) * place
        now = state._replace(drivers=(*gone, _Driver(query, batch)))
        while now.checkpoints[query] == batch:
            driver = now.drivers[place]
            if driver.phase == "gone":
                return f"batch {batch} of query {query} is refused for ever"
            label, now = next(alone._driver(now, place, driver))
            if label[-1] == "StateOwnershipError":
                return None
        return now
