"""A state whose past operators correct, between batches that bring rows of it. One key; a fenced store.

A correction has an id. An operator looks whether the list has it, begins, writes the record and the entry of the list,
and commits. It may die anywhere, and another one comes with the same id; or it only hangs, and goes on late. Drivers
die and begin batches again, also committed ones, and what was done last is taken back where that is allowed. A recount
first cuts a history at the last batch: what that comes to, with a row of its own, takes the place of the value.
What has to be true is that each batch and each correction that is listed is in the value once, and that who was told
that a correction is applied was told the truth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mapstate.protocol import upkeep, ways_back
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.schema import StateType
from model.forgetting import BesideBatches, Driver, Used
from model.protocol import LOST, STALE, ModelAttempt, Protocol, Record, Refused
from model.world import Label, ViolationError, with_item

__all__ = ["Correcting", "CorrectingProtocol", "CorrectingSteps"]

Entry = tuple[int, int, int | None]
"""Of the list: the txid that wrote it, the id, and what was there before it; None without one."""

_FIRST = 6  # of the digits of corrections: those below are of batches


@dataclass(frozen=True, kw_only=True)
class Correcting:
    """A world with one key to correct.

    ``drivers``, ``attempts``, ``rollbacks``  as in other worlds
    ``ids``  of the operators, who come one after the other; those before may still be at work
    ``recounts``  the ids of those that recount
    """

    name: str
    type: ClassVar[StateType] = "opaque"
    drivers: int = 2
    attempts: int = 2
    rollbacks: int = 1
    ids: tuple[int, ...] = (0, 0)
    recounts: tuple[int, ...] = ()

    def start(self) -> _State:
        """Nothing is stored, nobody runs."""
        return _State(0, None, (), (), (), Used())


class CorrectingProtocol(Protocol):
    """The library's rules for a correction, and what `mapstate.spark.driver.correcting` does around them."""

    def begin_correction(self, ledger: int, session: int, seen: int) -> ModelAttempt | int | Refused:
        """See `upkeep.begin_operator`."""
        return self._begun(
            lambda: upkeep.begin_operator(self.ledger(ledger), f"o{session}", "correction", seen=self.ledger(seen))
        )

    def commit_correction(self, ledger: int, txid: int) -> int | Refused:
        """See `upkeep.commit_correction`."""
        return self._changed(lambda: upkeep.commit_correction(self.ledger(ledger), txid))

    def rollback(self, ledger: int) -> int | Refused:
        """See `ways_back.rollback_last`."""
        return self._changed(lambda: ways_back.rollback_last(self.ledger(ledger)))

    def check_still_at(self, ledger: int, position: int) -> int | Refused:
        """See `upkeep.check_still_at`."""

        def checked() -> LedgerRecord:
            upkeep.check_still_at(self.ledger(ledger), self.ledger(position))
            return self.ledger(ledger)

        return self._changed(checked)

    def rows_of_corrections(self, listed: tuple[int, ...]) -> tuple[int, ...]:
        """The corrections whose rows a history has: all that are listed, else the recount is refused."""
        return listed

    def is_applied(self, listed: tuple[int, ...], name: int) -> bool:
        """Whether an operator takes its correction for applied, by the ids that are listed."""
        return name in listed


class _Operator(NamedTuple):
    """``phase`` is "cut", "read list", "begin", "put", "list", "commit", "applied" or "gone"; ``number`` of its entry.

    A recount has the ledger of its cut as its ``position``, and what the history then ``comes_to``.
    """

    session: int
    id: int
    phase: str = "read list"
    seen: int = 0
    number: int = 0
    attempt: ModelAttempt | None = None
    position: int | None = None
    comes_to: int = 0


class _State(NamedTuple):
    """Everything at one moment."""

    ledger: int
    record: Record | None
    entries: tuple[Entry, ...]
    drivers: tuple[Driver, ...]
    operators: tuple[_Operator, ...]
    used: Used

    def with_driver(self, at: int, driver: Driver) -> _State:
        return self._replace(drivers=with_item(self.drivers, at, driver))

    def with_operator(self, at: int, operator: _Operator) -> _State:
        return self._replace(operators=with_item(self.operators, at, operator))


class CorrectingSteps(BesideBatches):
    """The steps of one world under one protocol, and what has to be true after each."""

    def of(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """Each step from a state, and the state after it. One who takes no step any more has died."""
        world, used = self.world, state.used
        if len(state.drivers) < world.drivers:
            yield ("a driver comes",), state._replace(drivers=(*state.drivers, Driver(len(state.drivers))))
        for at, driver in enumerate(state.drivers):
            if driver.phase != "gone":
                yield self.driver_step(state, at, driver)
        if not state.ledger or self.protocol.ledger(state.ledger).last_commit is None:
            return
        if len(state.operators) < len(world.ids):
            came, name = len(state.operators), world.ids[len(state.operators)]
            operator = _Operator(came, name, "cut" if name in world.recounts else "read list")
            yield ("an operator comes",), state._replace(operators=(*state.operators, operator))
        if used.rollbacks < world.rollbacks:
            yield from self._rollback(state)
        for at, operator in enumerate(state.operators):
            if operator.phase not in ("applied", "gone"):
                yield self._operator(state, at, operator)

    def _rollback(self, state: _State) -> Iterator[tuple[Label, _State]]:
        after = self.protocol.rollback(state.ledger)
        if not isinstance(after, int):
            return
        taken = state._replace(ledger=after, used=state.used._replace(rollbacks=state.used.rollbacks + 1))
        lost = set(self._listed(state)) - set(self._listed(taken))
        others = tuple(one._replace(phase="gone") if one.id in lost else one for one in state.operators)
        taken_back = "a correction" if lost else "the last batch"
        yield (f"{taken_back} is rolled back",), taken._replace(operators=others if lost else state.operators)

    def _operator(self, state: _State, at: int, own: _Operator) -> tuple[Label, _State]:
        protocol, attempt, label = self.protocol, own.attempt, (f"operator {at}", own.phase, own.id)
        gone = state.with_operator(at, own._replace(phase="gone"))
        if own.phase in ("cut", "read list"):
            listed = self._listed(state)
            if protocol.is_applied(listed, own.id):
                return (*label, "is applied before"), state.with_operator(at, own._replace(phase="applied"))
            if own.phase == "cut":
                rows = sum(4 ** (_FIRST + name) for name in (*protocol.rows_of_corrections(listed), own.id))
                cut = own._replace(position=state.ledger, comes_to=self._batches(state) + rows)
                return label, state.with_operator(at, cut._replace(phase="read list"))
            if own.position is not None and isinstance(protocol.check_still_at(state.ledger, own.position), Refused):
                return (*label, "the history was cut elsewhere"), gone
            looked = own._replace(phase="begin", seen=state.ledger, number=len(listed))
            return label, state.with_operator(at, looked)
        if own.phase == "begin":
            answer = protocol.begin_correction(state.ledger, own.session, own.seen)
            if not isinstance(answer, ModelAttempt):
                return (*label, answer), gone
            putting = state.with_operator(at, own._replace(phase="put", attempt=answer))
            return label, putting._replace(ledger=answer.ledger)
        assert attempt is not None
        if own.phase in ("put", "list"):
            if not protocol.may_write(protocol.fence(state.ledger), attempt.token):
                return (*label, "and is fenced"), gone
            if own.phase == "list":
                entries = self._entered(state, own.number, attempt, own.id)
                return label, state.with_operator(at, own._replace(phase="commit"))._replace(entries=entries)
            rows = 4 ** (_FIRST + own.id)
            if own.position is not None:  # the map adds, so what is there is taken out
                before = protocol.shown(attempt.view, attempt.txid, state.record)
                rows = own.comes_to - (before if isinstance(before, int) else 0)
            record = protocol.applied(attempt.view, attempt.txid, state.record, rows)
            if isinstance(record, Refused):
                return (*label, record.error), gone
            return label, state.with_operator(at, own._replace(phase="list"))._replace(record=record)
        committed = protocol.commit_correction(state.ledger, attempt.txid)
        if isinstance(committed, Refused):
            return (*label, committed.error), gone
        return label, state.with_operator(at, own._replace(phase="applied"))._replace(ledger=committed)

    def _entered(self, state: _State, number: int, attempt: ModelAttempt, name: int) -> tuple[Entry, ...]:
        if number == len(state.entries):
            return (*state.entries, (attempt.txid, name, None))
        before = self.protocol.shown(attempt.view, attempt.txid, self._as_record(state.entries[number]))
        return with_item(state.entries, number, (attempt.txid, name, before))

    def _listed(self, state: _State) -> tuple[int, ...]:
        """The ids of the entries, by the one rule, as many as the ledger says. -1 for an entry without a value."""
        protocol, ledger = self.protocol, self.protocol.ledger(state.ledger)
        view, newest = protocol.view(state.ledger), protocol.newest(state.ledger)
        found = [protocol.shown(view, newest, self._as_record(one)) for one in state.entries[: ledger.operations or 0]]
        return tuple(-1 if one is None else one for one in found)

    def _batches(self, state: _State) -> int:
        """What all rows of the batches that count come to."""
        last = self.protocol.ledger(state.ledger).last_commit
        return sum(4**batch for batch in range(0 if last is None else last.batch_id + 1))

    def _as_record(self, entry: Entry) -> Record:
        return entry

    def check(self, state: _State) -> None:
        """Raises ViolationError unless the value is that of all batches and all listed corrections, each once."""
        if not state.ledger:
            return
        protocol = self.protocol
        listed = self._listed(state)
        right = self._batches(state) + sum(4 ** (_FIRST + name) for name in listed if name >= 0) or None
        shown = protocol.shown(protocol.view(state.ledger), protocol.newest(state.ledger), state.record)
        if shown in (STALE, LOST) or shown != right:
            raise ViolationError(f"the value is {shown}, where {right} is right: corrections {listed}")
        if len(set(listed)) < len(listed) or -1 in listed:
            raise ViolationError(f"the list has {listed}: a correction twice, or an entry that is none")
        missing = [one.id for one in state.operators if one.phase == "applied" and one.id not in listed]
        if missing:
            raise ViolationError(f"correction {missing[0]} was said to be applied, and does not count")
