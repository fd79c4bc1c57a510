"""A foreachBatch function that gives a batch in parts: one key to a state, in one store or in several.

A batch has two rows, each a part of it. A function gives both in one call, or one after the other. Whoever gives a
second part in one run has to notice, and so has whoever brings a batch that counts with more rows than count of it.
Then what counts of the batch is taken back or marked. What has to be true is that no part counts as the whole batch
from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mapstate.errors import MapStateError
from mapstate.protocol import ways_back
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.transitions import check_session
from mapstate.schema import StateType
from model.protocol import ModelAttempt, Record, Refused
from model.together import TogetherProtocol
from model.world import Label, ViolationError, with_item

__all__ = ["IN_PARTS", "WHOLE", "Function", "Parts", "PartsProtocol", "PartsSteps"]


class Function(NamedTuple):
    """What a foreachBatch function does.

    ``parts``     the rows of each of its calls, as bits
    ``since``     the first batch that it gives so; those before it gives as a whole
    ``swallows``  it goes on after a call that raised, as if nothing had happened
    ``tries``     how often it makes a call that raises
    """

    parts: tuple[int, ...] = (0b01, 0b10)
    since: int = 0
    swallows: bool = False
    tries: int = 1

    def of(self, batch: int) -> tuple[int, ...]:
        """The rows of each call for a batch."""
        return self.parts if batch >= self.since else (_ALL,)


_ALL = 0b11
IN_PARTS = Function()
WHOLE = Function((_ALL,))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A world of functions that give batches in parts.

    ``stores``    the store of each state; those of one store change their ledgers in one write
    ``drivers``   the function of each driver, in the order in which they come; all have one checkpoint
    ``failures``  calls that raise: before or after their commit, or where the store gives no answer for long
    ``batches``, ``attempts``, ``lost_replies``, ``vacuums`` as in other worlds
    """

    name: str
    stores: tuple[int, ...] = (0,)
    type: StateType = "opaque"
    drivers: tuple[Function, ...] = (IN_PARTS, WHOLE)
    batches: int = 2
    attempts: int = 4
    failures: int = 0
    lost_replies: int = 0
    vacuums: int = 0

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The states of each store."""
        states = range(len(self.stores))
        return [tuple(state for state in states if self.stores[state] == store) for store in sorted(set(self.stores))]

    def start(self) -> _State:
        """Nothing is stored, nobody runs."""
        states = len(self.stores)
        return _State((0,) * states, (None,) * states, 0, (), ((),) * states, ((0, 0),) * states, _Used())


class _Used(NamedTuple):
    attempts: int = 0
    failures: int = 0
    lost_replies: int = 0
    vacuums: int = 0


class _Driver(NamedTuple):
    """One run. Its next call is for the part ``part`` of ``batch``; ``tried`` says how often that was made.

    ``phase``     "call", "open", "begin", "put", "commit", "downstream", "back" (it takes back), "return" (from the
                  function) or "gone"
    ``at``        the store, or the state, that it comes to in its phase
    ``opened``    the stores that its call has opened, and ``has_opened``: all of them, in some call
    ``last``      the batch of the run's last call, and ``failed``: that call, if it raised
    ``in_parts``  the batch that it has given in parts; ``refuses``: so the run's calls are refused; ``is_told``: what
                  counts of that batch was taken back or marked
    ``recounts``  it takes back a batch that counts with fewer rows than it brings, to begin it anew
    ``raised``    a call for the batch has raised; for the audit
    """

    batch: int
    phase: str = "call"
    at: int = 0
    part: int = 0
    tried: int = 0
    opened: int = 0
    has_opened: bool = False
    known: tuple[int, ...] = ()
    attempts: tuple[ModelAttempt | None, ...] = ()
    last: int = -1
    failed: tuple[int, int] | None = None
    in_parts: int | None = None
    refuses: bool = False
    is_told: bool = False
    can: bool = True
    recounts: bool = False
    raised: bool = False

    def gone(self) -> _Driver:
        return _Driver(0, "gone")


class _State(NamedTuple):
    """Everything at one moment. From ``held`` on it is the audit.

    ``held``    by state, the batches that count: (batch, its rows that are in, 1 if somebody has noticed that it is a
                part and 2 if that was said everywhere)
    ``flight``  by state, of a transactional attempt: the rows that are written, and the same number
    """

    ledgers: tuple[int, ...]
    records: tuple[Record | None, ...]
    commits: int
    drivers: tuple[_Driver, ...]
    held: tuple[tuple[tuple[int, int, int], ...], ...]
    flight: tuple[tuple[int, int], ...]
    used: _Used

    def with_driver(self, at: int, driver: _Driver) -> _State:
        return self._replace(drivers=with_item(self.drivers, at, driver))


class PartsProtocol(TogetherProtocol):
    """What `mapstate.spark.driver.batch` and `mapstate.protocol.ledgers` do. A mutant gets one thing wrong."""

    refuses_at_once = True  # the run, before what counts of the batch is taken back
    takes_back_after_a_failure = True  # where the call that gave the first part has raised
    minds_what_counts_already = True  # in a call that found its batch committed
    takes_back = True
    takes_back_in_all_stores = True

    def has_more(self, ledger: int, rows: int) -> bool:
        """Whether more rows come with a batch than the last commit counts, and nobody has said so."""
        last = self.ledger(ledger).last_commit
        return last is not None and not last.is_part and rows > last.rows

    def is_part(self, last: int, failed: tuple[int, int] | None, call: tuple[int, int]) -> bool:
        """Whether a call for (batch, rows) gives a part: the run's last call was for the batch, and is not made again.

        ``last`` is that call's batch; ``failed`` is that call, where it raised.
        """
        return last == call[0] and failed != call

    def last_failed(self, before: tuple[int, int] | None, call: tuple[int, int]) -> tuple[int, int]:  # noqa: ARG002
        """What is kept of a call that raised, where ``before`` was kept."""
        return call

    def can_roll_back(self, ledgers: Sequence[int], batch: int) -> bool:
        """See `ways_back.can_roll_back`: of all states that count the batch."""
        return ways_back.can_all_roll_back([self.ledger(one) for one in ledgers], batch)

    def taken_back(self, ledgers: Sequence[int], session: int, batch: int, *, can: bool) -> list[int] | Refused:
        """See `Ledgers.take_back`: in the states of one store."""
        can = can and self.can_roll_back(ledgers, batch)
        try:
            after = [self.one_taken_back(self.ledger(one), f"s{session}", batch, can=can) for one in ledgers]
        except MapStateError as error:
            return Refused(type(error).__name__)
        return [self.number(one) for one in after]

    def one_taken_back(self, ledger: LedgerRecord, session: str, batch: int, *, can: bool) -> LedgerRecord:
        """See `ways_back.take_back`."""
        check_session(ledger, session)
        return ways_back.take_back(ledger, batch, can_roll_back=can)

    def is_marked(self, ledger: int) -> bool:
        """Whether the last commit says that it is a part."""
        last = self.ledger(ledger).last_commit
        return last is not None and last.is_part


class PartsSteps:
    """The steps of one world under one protocol, and what has to be true after each."""

    def __init__(self, world: Parts, protocol: PartsProtocol) -> None:
        self.world = world
        self.protocol = protocol
        self._groups = world.groups
        self._ends: dict[tuple[Any, ...], bool] = {}

    def of(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """Each step from a state, and the state after it. Raises ViolationError for a step that is wrong in itself."""
        if len(state.drivers) < len(self.world.drivers):
            yield ("a driver comes",), state._replace(drivers=(*state.drivers, _Driver(state.commits)))
        for at, driver in enumerate(state.drivers):
            if driver.phase != "gone":
                yield from self._driver(state, at, driver)
        if state.used.vacuums < self.world.vacuums:
            yield from self._vacuum(state)

    def _driver(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        if driver.phase == "call":
            yield from self._call(state, at, driver)
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
        elif driver.phase == "downstream":
            done = driver._replace(phase="return", failed=None, part=driver.part + 1, tried=0, attempts=())
            yield (f"driver {at}", "is called back"), self._returned(state, at, done)
            yield from self._fail(state, at, driver)
        elif driver.phase == "back":
            yield from self._take_back(state, at, driver)
            yield from self._fail(state, at, driver)
        else:
            yield self._spark_commits(state, at, driver)

    def _function(self, at: int) -> Function:
        return self.world.drivers[at] if at < len(self.world.drivers) else WHOLE

    def _returned(self, state: _State, at: int, driver: _Driver) -> _State:
        """After a call of the function: the next one, or its end."""
        more = driver.part < len(self._function(at).of(driver.batch))
        return state.with_driver(at, driver._replace(phase="call" if more else "return", at=0))

    def _raised(self, state: _State, at: int, driver: _Driver) -> _State:
        """After a call that raised: the function makes it again, goes on, or ends with the error as the query does."""
        function, tried = self._function(at), driver.tried + 1
        failed = self.protocol.last_failed(driver.failed, (driver.batch, driver.part))
        after = driver._replace(tried=tried, failed=failed, raised=True, opened=0, attempts=(), known=())
        if tried < function.tries:
            return self._returned(state, at, after)
        if function.swallows:
            return self._returned(state, at, after._replace(part=driver.part + 1, tried=0))
        return state.with_driver(at, driver.gone())

    def _call(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        """See `Calls`: whether this run has given another part of the batch before."""
        protocol, batch = self.protocol, driver.batch
        if batch >= self.world.batches:
            return
        label: Label = (f"driver {at}", "gives part", driver.part, "of batch", batch)
        if driver.refuses:
            if driver.is_told or not driver.has_opened:
                yield (*label, "which is refused"), self._raised(state, at, driver)
            else:
                yield (*label, "which is refused, and takes back again"), self._back(state, at, driver)
            return
        is_part = protocol.is_part(driver.last, driver.failed, (batch, driver.part))
        has_failed = driver.failed is not None
        driver = driver._replace(last=batch)
        if is_part:
            driver = driver._replace(in_parts=batch, refuses=protocol.refuses_at_once)
            if has_failed and not protocol.takes_back_after_a_failure:
                driver = driver._replace(refuses=True, is_told=True)
                yield (*label, "which is refused"), self._raised(self._said(state, at, batch), at, driver)
                return
            if driver.has_opened:
                yield (*label, "which is a part"), self._back(state, at, driver)
                return
        phase = "begin" if driver.opened else "open"
        yield label, state.with_driver(at, driver._replace(phase=phase, attempts=()))
        yield from self._fail(state, at, driver)

    def _said(self, state: _State, at: int, batch: int) -> _State:
        """The audit of a driver that has noticed, and is done: unless another has the state, it could have said so."""
        if not all(one and self._is_held(one, at) for one in state.ledgers):
            return state
        return state._replace(held=tuple(_noticed(one, batch, 2) for one in state.held))

    def _back(self, state: _State, at: int, driver: _Driver) -> _State:
        batch = driver.batch if driver.recounts else driver.in_parts
        assert batch is not None
        can = self.protocol.can_roll_back(state.ledgers, batch)
        return state.with_driver(at, driver._replace(phase="back", at=0, known=(), can=can))

    def _fail(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        """The call raises, in whatever phase it is. An attempt in flight is given up."""
        if state.used.failures < self.world.failures:
            used = state.used._replace(failures=state.used.failures + 1)
            ledgers = tuple(self.protocol.give_up(one, at) if one else 0 for one in state.ledgers)
            after = self._raised(state._replace(used=used, ledgers=ledgers), at, driver)
            yield (f"driver {at}", "fails in", driver.phase), after

    def _opened(self, state: _State, at: int, group: Sequence[int]) -> list[int]:
        opening = self.protocol.opening(0, at, "refuse")
        ledgers = list(state.ledgers)
        for one in group:
            answer = self.protocol.open_one(ledgers[one], opening)
            assert isinstance(answer, int)
            ledgers[one] = answer
        return ledgers

    def _open(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        """Several stores are looked at, then opened one by one; one is opened in the write that begins the batch."""
        label: Label = (f"driver {at}", "opens store", driver.at)
        everything = range(len(self.world.stores))
        if driver.at == 0 and len(self._groups) > 1:
            probed = self.protocol.begin_all(self._opened(state, at, everything), everything, at, driver.batch, "probe")
            if isinstance(probed, Refused):
                yield (*label, probed.error), self._raised(state, at, driver)
                return
        opened, group = self._opened(state, at, self._groups[driver.at]), self._groups[driver.at]
        after = state._replace(ledgers=tuple(opened))
        known = tuple(opened[one] if one in group else of for one, of in enumerate(driver.known or opened))
        driver = driver._replace(known=known, opened=driver.opened + 1)
        if len(self._groups) == 1:
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
        group, batch = self._groups[driver.at], driver.batch
        known = [state.ledgers[one] if one in group else of for one, of in enumerate(driver.known or state.ledgers)]
        label: Label = (f"driver {at}", "begins batch", batch, "in store", driver.at)
        answers = self.protocol.begin_all(known, group, at, batch, f"n{99 - at:02}{state.used.attempts:04}")
        if isinstance(answers, Refused):
            opened = 0 if refused is not None else driver.opened
            yield (*label, answers.error), self._raised(refused or state, at, driver._replace(opened=opened))
            return
        ledgers, held, flight = list(state.ledgers), list(state.held), list(state.flight)
        attempts = list(driver.attempts)
        for one, (answer, back) in zip(group, answers, strict=True):
            was = self.protocol.ledger(known[one]).in_flight
            ledgers[one] = answer if isinstance(answer, int) else answer.ledger
            if back:
                held[one] = held[one][:-1]
                label = (*label, "which was ahead")
            if isinstance(answer, ModelAttempt) and (was is None or was.txid != answer.txid):
                flight[one] = (0, 0)
            attempts.append(None if isinstance(answer, int) else answer)
        after = state._replace(ledgers=tuple(ledgers), held=tuple(held), flight=tuple(flight))
        now = tuple(ledgers[one] if one in group else of for one, of in enumerate(known))
        driver = driver._replace(known=now, attempts=tuple(attempts), at=driver.at + 1)
        if driver.at < len(self._groups):
            yield label, after.with_driver(at, driver)
            return
        rows = self._function(at).of(batch)[driver.part].bit_count()
        is_part = driver.in_parts == batch and not driver.has_opened
        counts_already = all(attempt is None for attempt in attempts)
        driver = driver._replace(has_opened=True)
        if is_part:  # it has never opened in this run, and has to know what counts
            yield (*label, "which is a part"), self._back(after, at, driver)
        elif counts_already and any(self.protocol.has_more(one, rows) for one in ledgers):
            yield (*label, "with more rows than count"), self._back(after, at, driver._replace(recounts=True))
        elif counts_already:
            last = driver.last if self.protocol.minds_what_counts_already else -1
            driver = driver._replace(phase="downstream", at=0, last=last)
            yield (*label, "which counts already"), after.with_driver(at, driver)
        else:
            if any(is_noticed for one in held for _, rows, is_noticed in one if rows != _ALL):
                raise ViolationError(f"an attempt counts on a part of a batch: {held}")
            if driver.in_parts is not None:
                raise ViolationError(f"a run goes on that has had batch {driver.in_parts} in parts: {held}")
            used = after.used._replace(attempts=after.used.attempts + 1)
            yield label, after._replace(used=used).with_driver(at, driver._replace(phase="put", at=0))

    def _put(self, state: _State, at: int, driver: _Driver) -> tuple[Label, _State]:
        place, rows = driver.at, self._function(at).of(driver.batch)[driver.part]
        attempt = driver.attempts[place]
        label = (f"driver {at}", "puts to state", place)
        after = driver._replace(at=place + 1)
        if after.at == len(driver.attempts):
            after = after._replace(phase="commit", at=0)
        if attempt is None:
            return (*label, "nothing"), state.with_driver(at, after)
        record = self.protocol.applied(attempt.view, attempt.txid, state.records[place], _amount(driver.batch, rows))
        fence = self.protocol.fence(state.ledgers[place])
        if not self.protocol.may_write(fence, attempt.token) or isinstance(record, Refused):
            return (*label, "and is fenced"), self._raised(state, at, driver)
        if record is None:
            return (*label, "which has it"), state.with_driver(at, after)
        flight = with_item(state.flight, place, (rows, 0))
        records = with_item(state.records, place, record)
        return (*label, record), state._replace(records=records, flight=flight).with_driver(at, after)

    def _commit(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        label: Label = (f"driver {at}", "commits batch", driver.batch, "in store", driver.at)
        ledgers, held, flight = list(state.ledgers), list(state.held), list(state.flight)
        rows = self._function(at).of(driver.batch)[driver.part].bit_count()
        for one in self._groups[driver.at]:
            attempt = driver.attempts[one]
            assert attempt is not None
            answer = self.protocol.commit(ledgers[one], at, 0, driver.batch, attempt.txid, rows=rows)
            if isinstance(answer, Refused):
                yield (*label, answer.error), self._raised(state, at, driver)
                return
            if answer != ledgers[one]:
                held[one] = (*held[one], (driver.batch, *flight[one]))
                flight[one] = (0, 0)
            ledgers[one] = answer
        after = state._replace(ledgers=tuple(ledgers), held=tuple(held), flight=tuple(flight))
        done = driver._replace(at=driver.at + 1)
        if done.at == len(self._groups):
            done = done._replace(phase="downstream", at=0)
        yield label, after.with_driver(at, done)
        if state.used.lost_replies < self.world.lost_replies:
            used = state.used._replace(lost_replies=state.used.lost_replies + 1)
            yield (*label, "and gets no reply"), after._replace(used=used).with_driver(at, driver)

    def _take_back(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        """See `Ledgers.take_back`: one write per store."""
        group, batch = self._groups[driver.at], driver.batch if driver.recounts else driver.in_parts
        assert batch is not None
        label: Label = (f"driver {at}", "takes back batch", batch, "in store", driver.at)
        found = [state.ledgers[one] for one in group]
        answers: list[int] | Refused = found
        takes_back = self.protocol.takes_back or driver.recounts
        if takes_back and (driver.at == 0 or self.protocol.takes_back_in_all_stores):
            answers = self.protocol.taken_back(found, at, batch, can=driver.can)
        if isinstance(answers, Refused):
            yield (*label, answers.error), self._raised(self._said(state, at, batch), at, driver)
            return
        ledgers = list(state.ledgers)
        held, flight = [_noticed(one, batch, 1) for one in state.held], list(state.flight)
        for one, answer in zip(group, answers, strict=True):
            if self.protocol.ledger(answer).last_commit != self.protocol.ledger(ledgers[one]).last_commit:
                if not self.protocol.is_marked(answer):
                    held[one] = held[one][:-1]
                    label = (*label, "from state", one)
                else:
                    label = (*label, "by a mark in state", one)
            ledgers[one] = answer
            flight[one] = (flight[one][0], 2)
        now = state._replace(ledgers=tuple(ledgers), held=tuple(held), flight=tuple(flight))
        if state.used.lost_replies < self.world.lost_replies:
            used = state.used._replace(lost_replies=state.used.lost_replies + 1)
            yield (*label, "and gets no reply"), self._back(now._replace(used=used), at, driver)
        if driver.at + 1 < len(self._groups):
            yield label, now.with_driver(at, driver._replace(at=driver.at + 1))
            return
        if driver.recounts:
            now = now._replace(held=tuple(_noticed(one, batch, 2) for one in held))
            again = driver._replace(phase="begin", at=0, attempts=(), known=(), recounts=False)
            yield label, now.with_driver(at, again)
            return
        ledgers = [self.protocol.give_up(one, at) for one in ledgers]
        done = now._replace(ledgers=tuple(ledgers), held=tuple(_noticed(one, batch, 2) for one in held))
        yield label, self._raised(done, at, driver._replace(refuses=True, is_told=True))

    def _spark_commits(self, state: _State, at: int, driver: _Driver) -> tuple[Label, _State]:
        batch = driver.batch
        if not driver.raised:
            in_parts = len(self._function(at).of(batch)) > 1
            for ledger, held in zip(state.ledgers, state.held, strict=True):
                if self._is_short(ledger, held, batch) and (in_parts or self._is_held(ledger, at)):
                    raise ViolationError(f"Spark goes on after a part of batch {batch} that nobody noticed: {held}")
        idle = driver._replace(phase="call", batch=batch + 1, part=0, tried=0, raised=False)
        after = state._replace(commits=max(state.commits, batch + 1))
        return (f"driver {at}", "Spark's own commit of batch", batch), after.with_driver(at, idle)

    def _is_held(self, ledger: int, at: int) -> bool:
        return self.protocol.ledger(ledger).session == f"s{at}"

    def _is_short(self, ledger: int, held: tuple[tuple[int, int, int], ...], batch: int) -> bool:
        """Whether a state counts a part of a batch, and could know it.

        It cannot of a transactional attempt: a driver died after it had written a part, and the next one, with all
        rows, found the keys done.
        """
        last = self.protocol.ledger(ledger).last_commit
        counted = None if last is None or last.batch_id != batch else last.rows
        return any(of == batch and rows != _ALL and counted in (None, rows.bit_count()) for of, rows, _ in held)

    def _vacuum(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """A vacuum of one state, from its begin to its end. It needs all states to have the last batch of this one."""
        protocol, used = self.protocol, state.used._replace(vacuums=state.used.vacuums + 1)
        if len({held[-1:] for held in state.held}) > 1:
            return
        for place, ledger in enumerate(state.ledgers):
            attempt = protocol.begin_vacuum(ledger, used.vacuums, take_over=False) if ledger else None
            if not isinstance(attempt, ModelAttempt):
                continue
            record = state.records[place]
            swept = record and protocol.swept(attempt.view, attempt.txid, record, everything=False)
            after = protocol.commit_vacuum(attempt.ledger, attempt.txid, fenced=True)
            assert isinstance(after, int)
            records = state.records
            if swept is not None:
                records = with_item(records, place, None if isinstance(swept, str) else swept)
            ledgers = with_item(state.ledgers, place, after)
            yield ("a vacuum of state", place), state._replace(ledgers=ledgers, records=records, used=used)

    def check(self, state: _State) -> None:
        """Raises ViolationError unless each state says what it counts, and a driver can go on."""
        protocol, world = self.protocol, self.world
        shortest = min(map(len, state.held))
        for place, (ledger, record, held) in enumerate(zip(state.ledgers, state.records, state.held, strict=True)):
            if not ledger:
                continue
            if (
                world.type == "opaque" or protocol.ledger(ledger).in_flight is None
            ):  # else readers see what is in so far
                found = protocol.shown(protocol.view(ledger), protocol.newest(ledger), record)
                right = sum(_amount(batch, rows) for batch, rows, _ in held)
                if (found or 0) != right:
                    raise ViolationError(f"state {place} reads as {found} where {right} is right: {record}")
            if [batch for batch, _, _ in held] != list(range(len(held))):
                raise ViolationError(f"state {place} counts batches twice or not at all: {held}")
            for at, (batch, rows, is_noticed) in enumerate(held):
                if rows == 0b10:
                    raise ViolationError(f"state {place} counts the second part of batch {batch} alone")
                if rows == _ALL or not is_noticed or (at + 1 == len(held) and protocol.is_marked(ledger)):
                    continue
                said = any(protocol.is_marked(one) for one in state.ledgers) or shortest <= batch
                if is_noticed == 2 or not said:  # or it is being said, in one store after the other
                    raise ViolationError(f"state {place} counts a part of batch {batch} as if it were whole")
        if max(map(len, state.held)) > shortest + (len(self._groups) > 1):
            raise ViolationError(f"the states are apart: {state.held}")
        if len({tuple((batch, rows) for batch, rows, _ in one[:shortest]) for one in state.held}) > 1:
            raise ViolationError(f"the states differ for ever: {state.held}")
        is_marked = any(protocol.is_marked(ledger) for ledger in state.ledgers if ledger)
        if world.type == "opaque" and not world.vacuums and all(state.ledgers) and not is_marked:
            self._check_a_repaired_driver_ends(state)

    def _check_a_repaired_driver_ends(self, state: _State) -> None:
        """One that gives whole batches and is left alone, with the checkpoint as it is or rewound."""
        store = (state.ledgers, state.records, state.commits, state.held)
        if store not in self._ends:
            due = min(self.protocol.ledger(ledger).owners["q0"] for ledger in state.ledgers)
            self._ends[store] = any(self._ends_alone(state, commits) for commits in {state.commits, due})
        if not self._ends[store]:
            raise ViolationError(f"batch {state.commits} is refused for ever: {state.held}")

    def _ends_alone(self, state: _State, commits: int) -> bool:
        world = replace(self.world, batches=commits + 1, attempts=1 << 30, failures=0, lost_replies=0)
        alone, at = PartsSteps(world, self.protocol), len(self.world.drivers)
        drivers = (*((_Driver(0, "gone"),) * at), _Driver(commits))
        now = state._replace(commits=commits, drivers=drivers)
        while now.commits == commits:
            if now.drivers[at].phase == "gone":
                return False
            *_, (_, now) = alone._driver(now, at, now.drivers[at])
        return True


def _amount(batch: int, rows: int) -> int:
    return sum(4 ** (2 * batch + row) for row in range(2) if rows >> row & 1)


def _noticed(held: tuple[tuple[int, int, int], ...], batch: int, how: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((of, rows, max(how, before) if of == batch else before) for of, rows, before in held)
