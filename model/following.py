"""A state with a change log, and somebody who follows it. Two keys, of which an attempt writes one; a fenced store.

The follower has a copy. It plans a step up to the last commit, asks the log which keys were written since, and reads
their values, key by key, at any later moment. What has to be true is that its copy is the state, wherever it is where
the state is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, ClassVar, NamedTuple

import msgspec

from mapstate.errors import ChangesGoneError
from mapstate.protocol import transitions
from mapstate.protocol.changes import ChangesRecord
from mapstate.protocol.ledger_record import Commit, OpenRequest
from mapstate.protocol.windows import PaneChange
from mapstate.reader.changes import Position, asked_for, check_kept, position_of
from mapstate.schema import OnNewOwner, StateType
from model.protocol import ModelAttempt, Protocol, Record, Refused
from model.world import Label, ViolationError, with_item

__all__ = ["Following", "FollowingProtocol", "FollowingSteps"]

_KEYS = 2
_ALL = (1 << _KEYS) - 1


@dataclass(frozen=True, kw_only=True)
class Following:
    """A world with one follower.

    ``drivers``, ``attempts``, ``rollbacks``, ``vacuums`` as in other worlds
    ``followed``  steps of the follower, the first of which reads all keys
    """

    name: str
    type: ClassVar[StateType] = "opaque"
    drivers: int = 2
    attempts: int = 3
    rollbacks: int = 1
    vacuums: int = 0
    followed: int = 3

    def start(self) -> _State:
        """Nothing is stored, nobody runs."""
        return _State(0, (None,) * _KEYS, (), (), _Follower(), _Used())


class FollowingProtocol(Protocol):
    """The library's rules for a change log."""

    kept = 1
    logs_after_the_commit = False

    def opening(self, query: int, session: int, policy: OnNewOwner, incarnation: int = 1) -> OpenRequest:
        """A job that asks for a change log."""
        return msgspec.structs.replace(super().opening(query, session, policy, incarnation), changes=self.kept)

    def commit_logged(self, ledger: int, session: int, batch: int, txid: int, purged: range) -> int | Refused:
        """The ledger after a commit of an attempt that has removed the log of ``purged``."""
        done, panes = Commit(batch_id=batch, txid=txid, owner="q0"), PaneChange(purged=purged, width=1)
        return self._changed(lambda: transitions.commit(self.ledger(ledger), f"s{session}", done, panes))

    def changes(self, ledger: int) -> ChangesRecord:
        """What the ledger says of the log."""
        found = self.ledger(ledger).changes
        assert found is not None
        return found

    def asked(self, ledger: int, start: Position, end: Position) -> tuple[int, ...]:
        """See `asked_for`."""
        return tuple(asked_for(self.ledger(ledger), start, end))

    def check_again(self, ledger: int, start: Position, first: int) -> None:
        """See `check_kept`: after the log."""
        check_kept(self.ledger(ledger), start, first)


class _Used(NamedTuple):
    attempts: int = 0
    rollbacks: int = 0
    vacuums: int = 0
    followed: int = 0


class _Driver(NamedTuple):
    """``phase`` is "begin", "put", "log", "remove", "commit", a mutant's "late log", or "gone".

    ``key`` is the one that its attempt writes, ``purged`` the txids of which it has removed the log.
    """

    session: int
    batch: int = 0
    phase: str = "begin"
    attempt: ModelAttempt | None = None
    key: int = 0
    purged: tuple[int, int] = (0, 0)

    def gone(self) -> _Driver:
        return _Driver(self.session, phase="gone")


class _Follower(NamedTuple):
    """``phase`` is "plan", "ask", "log", "again" or "read"; ``asked`` are txids, ``keys`` are to be read, as bits."""

    phase: str = "plan"
    at: Position | None = None
    planned: Position | None = None
    asked: tuple[int, ...] = ()
    keys: int = 0
    copy: tuple[Any, ...] = (None,) * _KEYS


class _State(NamedTuple):
    """Everything at one moment. ``log`` has the key that each txid wrote."""

    ledger: int
    records: tuple[Record | None, ...]
    log: tuple[tuple[int, int], ...]
    drivers: tuple[_Driver, ...]
    follower: _Follower
    used: _Used

    def with_driver(self, at: int, driver: _Driver) -> _State:
        return self._replace(drivers=with_item(self.drivers, at, driver))


class FollowingSteps:
    """The steps of one world under one protocol, and what has to be true after each."""

    def __init__(self, world: Following, protocol: FollowingProtocol) -> None:
        self.world = world
        self.protocol = protocol

    def of(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """Each step from a state, and the state after it."""
        world, used = self.world, state.used
        if len(state.drivers) < world.drivers:
            yield ("a driver comes",), state._replace(drivers=(*state.drivers, _Driver(len(state.drivers))))
        for at, driver in enumerate(state.drivers):
            if driver.phase != "gone":
                yield from self._driver(state, at, driver)
        if state.ledger:
            if used.rollbacks < world.rollbacks:
                after = self.protocol.rollback(state.ledger)
                if isinstance(after, int):
                    counted = used._replace(rollbacks=used.rollbacks + 1)
                    yield ("the last batch is rolled back",), state._replace(ledger=after, used=counted)
            if used.vacuums < world.vacuums:
                yield from self._vacuum(state)
            yield from self._follower(state, state.follower)

    def _driver(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        if driver.phase == "begin":
            yield from self._begin(state, at, driver)
            return
        label, attempt = (f"driver {at}", driver.phase), driver.attempt
        assert attempt is not None
        if driver.phase == "commit":
            yield self._commit(state, at, driver, attempt)
        elif driver.phase != "late log" and not self.protocol.may_write(
            self.protocol.fence(state.ledger), attempt.token
        ):
            yield (*label, "and is fenced"), state.with_driver(at, driver.gone())
        elif driver.phase == "put":
            yield self._put(state, at, driver, attempt)
        elif driver.phase in ("log", "late log"):
            phase = "remove" if driver.phase == "log" else "begin"
            log = tuple(sorted((*state.log, (attempt.txid, driver.key))))
            yield (*label, driver.key), state._replace(log=log).with_driver(at, driver._replace(phase=phase))
        else:
            changes = self.protocol.changes(state.ledger)
            purged = changes.removed, changes.since
            log = tuple(one for one in state.log if not purged[0] <= one[0] < purged[1])
            after = driver._replace(phase="commit", purged=purged)
            yield (*label, purged), state._replace(log=log).with_driver(at, after)

    def _begin(self, state: _State, at: int, driver: _Driver) -> Iterator[tuple[Label, _State]]:
        """Each attempt has a key of its own, also a replay."""
        protocol, used = self.protocol, state.used
        if used.attempts >= self.world.attempts:
            return
        batch = driver.batch
        if driver.attempt is None:
            batch = protocol.ledger(state.ledger).owners.get("q0", 0) if state.ledger else 0
            answer = protocol.open_and_begin(state.ledger, 0, driver.session, batch, "refuse", 1, used.attempts)
        else:
            answer = protocol.begin(state.ledger, driver.session, batch, used.attempts)
        label = (f"driver {at}", "begins batch", batch)
        if not isinstance(answer, ModelAttempt):
            yield (*label, answer), state.with_driver(at, driver.gone())
            return
        after = state._replace(ledger=answer.ledger, used=used._replace(attempts=used.attempts + 1))
        for key in range(_KEYS):
            yield (*label, "of key", key), after.with_driver(at, _Driver(driver.session, batch, "put", answer, key))

    def _put(self, state: _State, at: int, driver: _Driver, attempt: ModelAttempt) -> tuple[Label, _State]:
        record = self.protocol.applied(
            attempt.view, attempt.txid, state.records[driver.key], 4 ** (attempt.txid % 1000)
        )
        assert record is not None
        assert not isinstance(record, Refused)
        phase = "remove" if self.protocol.logs_after_the_commit else "log"
        after = state._replace(records=with_item(state.records, driver.key, record))
        return (f"driver {at}", "puts key", driver.key), after.with_driver(at, driver._replace(phase=phase))

    def _commit(self, state: _State, at: int, driver: _Driver, attempt: ModelAttempt) -> tuple[Label, _State]:
        answer = self.protocol.commit_logged(
            state.ledger, driver.session, driver.batch, attempt.txid, range(*driver.purged)
        )
        if isinstance(answer, Refused):
            return (f"driver {at}", "commits", answer.error), state.with_driver(at, driver.gone())
        phase = "late log" if self.protocol.logs_after_the_commit else "begin"
        done = driver._replace(batch=driver.batch + 1, phase=phase, purged=(0, 0))
        return (f"driver {at}", "commits", driver.batch), state._replace(ledger=answer).with_driver(at, done)

    def _vacuum(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """From its begin to its end: what drivers do meanwhile, other worlds have."""
        protocol, used = self.protocol, state.used._replace(vacuums=state.used.vacuums + 1)
        attempt = protocol.begin_vacuum(state.ledger, used.vacuums, take_over=True)
        if not isinstance(attempt, ModelAttempt):
            return
        records = list(state.records)
        for key, record in enumerate(records):
            swept = record and protocol.swept(attempt.view, attempt.txid, record, everything=False)
            if swept is not None:
                records[key] = None if isinstance(swept, str) else swept
        after = protocol.commit_vacuum(attempt.ledger, attempt.txid, fenced=True)
        assert isinstance(after, int)
        since = protocol.changes(after).since
        log = tuple(one for one in state.log if one[0] >= since)
        yield ("a vacuum",), state._replace(ledger=after, records=tuple(records), log=log, used=used)

    def _follower(self, state: _State, own: _Follower) -> Iterator[tuple[Label, _State]]:
        if own.phase == "plan" and state.used.followed == self.world.followed:
            return
        label: Label = ("the follower", own.phase)
        try:
            after = self._follows(state, own)
        except ChangesGoneError:
            yield (*label, "and begins anew"), state._replace(follower=_Follower())
            return
        used = state.used._replace(followed=state.used.followed + (own.phase == "plan"))
        yield (*label, after.keys), state._replace(follower=after, used=used)

    def _follows(self, state: _State, own: _Follower) -> _Follower:
        protocol, at, planned = self.protocol, own.at, own.planned
        if own.phase == "plan":
            now = position_of(protocol.ledger(state.ledger))
            if now == at:
                return own
            return own._replace(phase="read" if at is None else "ask", planned=now, keys=_ALL if at is None else 0)
        if own.phase == "read":
            if not own.keys:
                return _Follower(at=planned, copy=own.copy)
            key = _first(own.keys)
            copy = with_item(own.copy, key, self._shown(state, key))
            return own._replace(keys=own.keys & ~(1 << key), copy=copy)
        assert at is not None
        assert planned is not None
        if own.phase == "ask":
            return own._replace(phase="log", asked=protocol.asked(state.ledger, at, planned))
        if own.phase == "log":
            found = reduce(or_, (1 << key for txid, key in state.log if txid in own.asked), 0)
            return own._replace(phase="again", keys=found)
        protocol.check_again(state.ledger, at, min(own.asked, default=at.txid + 1))
        return own._replace(phase="read", asked=())

    def _shown(self, state: _State, key: int) -> Any:
        view, newest = self.protocol.view(state.ledger), self.protocol.newest(state.ledger)
        return self.protocol.shown(view, newest, state.records[key])

    def check(self, state: _State) -> None:
        """Raises ViolationError unless a follower that is where the state is has what the state has.

        Where a later transaction was rolled back it may have the values of that, until the next commit.
        """
        own = state.follower
        if own.phase != "plan" or own.at is None:
            return
        undone = self.protocol.changes(state.ledger).undone
        if position_of(self.protocol.ledger(state.ledger)) != own.at or any(txid > own.at.txid for txid in undone):
            return
        right = tuple(self._shown(state, key) for key in range(_KEYS))
        if own.copy != right:
            raise ViolationError(f"the follower has {own.copy} at {own.at.txid}, where {right} is right")


def _first(keys: int) -> int:
    """The first of some keys."""
    return (keys & -keys).bit_length() - 1
