"""A state that is made to forget its key, between batches that bring rows of it. One key; a fenced store.

An operator gives the key no value, lists it as of the last batch, and removes the record. It may die anywhere, and
another one comes with the same id; or it only hangs, and goes on late. Drivers die and begin batches again, also
committed ones.
What has to be true is that the rows of batches up to the listed one are gone for ever, and that all others count once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from mapstate.protocol import upkeep
from mapstate.schema import StateType
from model.protocol import LOST, STALE, ModelAttempt, Protocol, Record, Refused
from model.world import Label, ViolationError, with_item

__all__ = ["BesideBatches", "Driver", "Forgetting", "ForgettingProtocol", "ForgettingSteps", "Used"]

Entry = tuple[int, int, int | None, bool]
"""Of the list: the txid that wrote it; the last batch before it, -1 for none; that of the entry that was there before,
None without one; and whether the record was purged since."""


@dataclass(frozen=True, kw_only=True)
class Forgetting:
    """A world with one key to forget.

    ``drivers``, ``attempts``, ``rollbacks``  as in other worlds
    ``operators``  that come one after the other with one id; those before may still be at work
    """

    name: str
    type: ClassVar[StateType] = "opaque"
    drivers: int = 2
    attempts: int = 3
    rollbacks: int = 1
    operators: int = 2

    def start(self) -> _State:
        """Nothing is stored, nobody runs."""
        return _State(0, None, None, (), (), Used())


class ForgettingProtocol(Protocol):
    """The library's rules for a forget, and what `mapstate.operations.forget` does around them."""

    def begin_forget(self, ledger: int, session: int, seen: int) -> ModelAttempt | int | Refused:
        """See `upkeep.begin_operator`."""
        return self._begun(
            lambda: upkeep.begin_operator(self.ledger(ledger), f"o{session}", "forget", seen=self.ledger(seen))
        )

    def commit_forget(self, ledger: int, txid: int, *, gone: bool) -> int | Refused:
        """See `upkeep.commit_forget`."""
        held = self.ledger(ledger).keys_held()
        return self._changed(
            lambda: upkeep.commit_forget(
                self.ledger(ledger), txid, operations=1, held=None if held is None else held - gone
            )
        )

    def first(self, txid: int, value: Any, record: Record | None) -> Record | None:
        """The record after the first attempt."""
        return record if value is None else (txid, None, value)

    def second(self, txid: int, value: Any) -> Record | None:
        """The record after the second one; None where it is removed."""
        return None if value is None else (txid, value, value)

    def position(self, *, asked: int, last: int) -> int:  # noqa: ARG002  mutants ask
        """As of which batch the key is listed: of that when the operator was ``asked``, or of the ``last`` one."""
        return last

    has_second = True
    asks_for_the_id = True


class Used(NamedTuple):
    """How often what happened."""

    attempts: int = 0
    rollbacks: int = 0


class Driver(NamedTuple):
    """``phase`` is "begin", "put", "commit" or "gone"."""

    session: int
    batch: int = 0
    phase: str = "begin"
    attempt: ModelAttempt | None = None


class _Operator(NamedTuple):
    """``phase`` is "list", "begin", "put", "commit", and once more with a 2; "done".

    ``seen`` is the ledger under which it listed the keys, ``asked`` the last batch when it came.
    """

    session: int
    asked: int
    phase: str = "list"
    seen: int = 0
    attempt: ModelAttempt | None = None
    had_value: bool = False


class _State(NamedTuple):
    """Everything at one moment."""

    ledger: int
    record: Record | None
    entry: Entry | None
    drivers: tuple[Driver, ...]
    operators: tuple[_Operator, ...]
    used: Used

    def with_driver(self, at: int, driver: Driver) -> _State:
        return self._replace(drivers=with_item(self.drivers, at, driver))

    def with_operator(self, at: int, operator: _Operator) -> _State:
        return self._replace(operators=with_item(self.operators, at, operator))


class BesideBatches:
    """The drivers of a world of one key, beside whose batches an operator is at work.

    A state has its ``ledger``, the ``record`` of the key, its ``drivers``, what is ``used``, and `with_driver`.
    """

    def __init__(self, world: Any, protocol: Any) -> None:
        self.world = world
        self.protocol = protocol

    def driver_step(self, state: Any, at: int, driver: Driver) -> tuple[Label, Any]:
        """A driver's next step, and the state after it."""
        protocol, attempt, label = self.protocol, driver.attempt, (f"driver {at}", driver.phase, driver.batch)
        if driver.phase == "begin":
            return self._begin(state, at, driver)
        assert attempt is not None
        if driver.phase == "put":
            if not protocol.may_write(protocol.fence(state.ledger), attempt.token):
                return (*label, "and is fenced"), state.with_driver(at, driver._replace(phase="gone"))
            record = protocol.applied(attempt.view, attempt.txid, state.record, 4**driver.batch)
            if isinstance(record, Refused):
                return (*label, record.error), state.with_driver(at, driver._replace(phase="gone"))
            return label, state._replace(record=record).with_driver(at, driver._replace(phase="commit"))
        answer = protocol.commit(state.ledger, driver.session, 0, driver.batch, attempt.txid)
        if isinstance(answer, Refused):
            return (*label, answer.error), state.with_driver(at, driver._replace(phase="gone"))
        done = driver._replace(batch=driver.batch + 1, phase="begin")
        return label, state._replace(ledger=answer).with_driver(at, done)

    def _begin(self, state: Any, at: int, driver: Driver) -> tuple[Label, Any]:
        """A new driver brings the last committed batch again, as after a crash before Spark's own commit."""
        protocol, used, batch = self.protocol, state.used, driver.batch
        label, gone = (f"driver {at}", "begins"), state.with_driver(at, driver._replace(phase="gone"))
        if used.attempts >= self.world.attempts:
            return label, gone
        if driver.attempt is None:
            due = protocol.ledger(state.ledger).owners.get("q0", 0) if state.ledger else 0
            batch = max(batch, due - 1)
            answer = protocol.open_and_begin(state.ledger, 0, driver.session, batch, "refuse", 1, used.attempts)
            if isinstance(answer, int):  # it is committed already
                batch += 1
                answer = protocol.begin(answer, driver.session, batch, used.attempts)
        else:
            answer = protocol.begin(state.ledger, driver.session, batch, used.attempts)
        if not isinstance(answer, ModelAttempt):
            return (*label, batch, answer), gone
        after = state._replace(ledger=answer.ledger, used=used._replace(attempts=used.attempts + 1))
        return (*label, batch), after.with_driver(at, Driver(driver.session, batch, "put", answer))


class ForgettingSteps(BesideBatches):
    """The steps of one world under one protocol, and what has to be true after each."""

    def of(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """Each step from a state, and the state after it. One who takes no step any more has died."""
        world, used = self.world, state.used
        if len(state.drivers) < world.drivers:
            yield ("a driver comes",), state._replace(drivers=(*state.drivers, Driver(len(state.drivers))))
        for at, driver in enumerate(state.drivers):
            if driver.phase != "gone":
                yield self.driver_step(state, at, driver)
        if not state.ledger:
            return
        if len(state.operators) < world.operators:
            operator = _Operator(len(state.operators), self._last(state))
            yield ("an operator comes",), state._replace(operators=(*state.operators, operator))
        if used.rollbacks < world.rollbacks:
            after = self.protocol.rollback(state.ledger)
            if isinstance(after, int):
                counted = used._replace(rollbacks=used.rollbacks + 1)
                yield ("the last batch is rolled back",), state._replace(ledger=after, used=counted)
        for at, operator in enumerate(state.operators):
            if operator.phase != "done":
                yield self._operator(state, at, operator)

    def _last(self, state: _State) -> int:
        last = self.protocol.ledger(state.ledger).last_commit
        return -1 if last is None else last.batch_id

    def _operator(self, state: _State, at: int, own: _Operator) -> tuple[Label, _State]:
        protocol, attempt, phase, label = self.protocol, own.attempt, own.phase, (f"operator {at}", own.phase)
        done = state.with_operator(at, own._replace(phase="done"))
        if phase in ("list", "list 2"):
            is_listed = protocol.asks_for_the_id and self._listed(state) is not None
            second = phase == "list 2" or is_listed
            if second and (not protocol.has_second or (state.entry is not None and state.entry[3])):
                return label, done
            number = " 2" if second else ""
            return label, state.with_operator(at, own._replace(phase=f"begin{number}", seen=state.ledger))
        if phase in ("begin", "begin 2"):
            answer = protocol.begin_forget(state.ledger, own.session, own.seen)
            if not isinstance(answer, ModelAttempt):
                return (*label, answer), done
            putting = own._replace(phase=phase.replace("begin", "put"), attempt=answer)
            return label, state._replace(ledger=answer.ledger).with_operator(at, putting)
        assert attempt is not None
        if phase in ("put", "put 2"):
            if not protocol.may_write(protocol.fence(state.ledger), attempt.token):
                return (*label, "and is fenced"), done
            value = protocol.shown(attempt.view, attempt.txid, state.record)
            if value in (STALE, LOST):
                return (*label, value), done
            if phase == "put 2":
                after = state._replace(record=protocol.second(attempt.txid, value))
                return label, after.with_operator(at, own._replace(phase="commit 2"))
            before = self._listed(state)
            entry = attempt.txid, protocol.position(asked=own.asked, last=self._last(state)), before, False
            after = state._replace(record=protocol.first(attempt.txid, value, state.record), entry=entry)
            return label, after.with_operator(at, own._replace(phase="commit", had_value=value is not None))
        committed = protocol.commit_forget(state.ledger, attempt.txid, gone=phase == "commit" and own.had_value)
        if isinstance(committed, Refused):
            return (*label, committed.error), done
        after = state._replace(ledger=committed)
        if phase == "commit":
            return label, after.with_operator(at, own._replace(phase="list 2"))
        assert after.entry is not None
        txid, position, before, _ = after.entry
        return label, after._replace(entry=(txid, position, before, True)).with_operator(at, own._replace(phase="done"))

    def _listed(self, state: _State) -> int | None:
        """As of which batch the key is listed, by the one rule; None where it is not."""
        if state.entry is None:
            return None
        txid, position, before, _ = state.entry
        record = self.protocol.ledger(state.ledger)
        return position if txid in record.view() else before

    def check(self, state: _State) -> None:
        """Raises ViolationError unless the value is that of the rows behind the listed batch, and no byte is older."""
        if not state.ledger:
            return
        protocol, position = self.protocol, self._listed(state)
        ledger = protocol.ledger(state.ledger)
        last = ledger.last_commit
        if position is not None and state.entry is not None and state.entry[2] not in (None, position):
            raise ViolationError(f"rows that came later are forgotten, too: as of {state.entry[2]}, and {position}")
        batches = range(-1 if position is None else position, -1 if last is None else last.batch_id)
        right = sum(4 ** (batch + 1) for batch in batches) or None
        shown = protocol.shown(protocol.view(state.ledger), protocol.newest(state.ledger), state.record)
        if shown != right:
            raise ViolationError(f"the value is {shown}, where {right} is right, forgotten as of {position}")
        is_purged = state.entry is not None and (state.entry[3] or not protocol.has_second)
        if position is not None and is_purged and state.record is not None:
            old = [value for value in state.record[1:] if value is not None and value % 4 ** (position + 1)]
            if old:
                raise ViolationError(f"bytes of what is forgotten as of {position} are in {state.record}")
