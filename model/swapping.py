"""Two versions of a state, an alias that leads readers to one of them, and operators. No records; two ledgers.

Drivers commit batches of both versions. Operators swap, go back, keep one version only, drop, and correct.
Readers look at the alias, also at an old copy of it, and read several keys. Each may die anywhere, or only hang and go
on late. A write compares the alias, and both ledgers where they are ``joint``.
What has to be true is that one call reads one version, that no reader goes back by a swap, nor in the log, and that an
alias leads to a version that is there, which a swap on joint ledgers has never found behind, nor without a correction
of the one before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

from mapstate.capabilities import FenceToken
from mapstate.errors import MapStateError
from mapstate.maps.operator_list import ListEntry
from mapstate.operations import swap as operation
from mapstate.protocol import alias, upkeep
from mapstate.protocol.alias import AliasRecord
from mapstate.protocol.ledger_record import DROPPER
from mapstate.reader.aliased import Alias
from mapstate.schema import StateType
from model.correcting import CorrectingProtocol
from model.protocol import ModelAttempt, Refused
from model.world import Label, ViolationError, with_item

__all__ = ["Swapping", "SwappingProtocol", "SwappingSteps"]

NAME = "v"
VERSIONS = (NAME, "v.2")
_ID = "a correction"
_KEYS = 2  # of a call


@dataclass(frozen=True, kw_only=True)
class Swapping:
    """A world with two versions, which both have their first batch.

    ``operators``  what each of them does: ``("swap", version)``, ``("swap", None)`` for --back, ``("keep",)``,
                   ``("drop", version)``, ``("correct", version)``, which all have one id. Each begins where it likes
    ``batches``    how many more of each version, by a driver that may be fenced
    ``calls``      of the one reader
    ``old_copies`` a look may find the alias as it was before the last write
    ``joint``      one write may compare the alias and both ledgers
    """

    name: str
    type: ClassVar[StateType] = "opaque"
    operators: tuple[tuple[str, int | None] | tuple[str], ...]
    batches: tuple[int, int] = (0, 0)
    calls: int = 0
    old_copies: bool = False
    joint: bool = True

    def start(self) -> _State:
        """The first batches are made by `SwappingSteps`."""
        drivers = tuple(_Driver(session=at) for at in range(2))
        return _State((0, 0), ((), ()), None, None, drivers, tuple(_Operator() for _ in self.operators), _Reader())


class SwappingProtocol(CorrectingProtocol):
    """The library's rules for aliases, and what `mapstate.operations` and `mapstate.reader.aliased` do around them."""

    def __init__(self, state_type: StateType = "opaque") -> None:
        super().__init__(state_type)
        self.planned = cache(self.planned)  # type: ignore[method-assign]

    def planned(
        self, record: AliasRecord | None, to: int | None, ledgers: tuple[int, int], corrected: Corrected
    ) -> _Plan | Refused:
        """See `mapstate.operations.swap`: what a swap writes, under what it has read."""
        present = NAME if record is None else record.to
        if to is None:
            if record is None or record.before is None:
                return Refused("UsageError")
            to = VERSIONS.index(record.before)
        old, new = ledgers[VERSIONS.index(present)], ledgers[to]
        if not new:
            return Refused("StateNotFoundError")
        try:
            after = alias.swap(record, NAME, VERSIONS[to], present if old else None)
            ledger = operation.complete(self.ledger(new))
            if old:
                operation.distance(self.ledger(old), ledger, None, force=False)
            if old and self.uncorrected(corrected[VERSIONS.index(present)], corrected[to]):
                return Refused("UsageError")
        except MapStateError as error:
            return Refused(type(error).__name__)
        is_kept = record is not None and VERSIONS[to] in record.keeps
        return _Plan(after, None if is_kept else alias.keep(record, NAME, VERSIONS[to]))

    def uncorrected(self, old: tuple[str, ...], new: tuple[str, ...]) -> list[str]:
        """See `mapstate.operations.swap.uncorrected`: the corrections of one version that another one lacks."""
        lists = [[ListEntry(kind="correction", id=one, at="", digest="") for one in ids] for ids in (old, new)]
        return operation.uncorrected(*lists)

    def keep_only(self, record: AliasRecord) -> AliasRecord:
        """See `alias.keep_only`."""
        return alias.keep_only(record)

    def taken(self, ledger: int, session: int, *, drops: bool) -> int:
        """See `upkeep.taken`."""
        return self.number(upkeep.taken(self.ledger(ledger), f"{DROPPER if drops else ''} o{session}"))

    def begin_drop(self, ledger: int, session: int) -> int | Refused:
        """See `upkeep.begin_drop`."""
        return self._changed(lambda: upkeep.begin_drop(self.ledger(ledger), "s", f"{DROPPER} o{session}", 0))

    def looked(self, known: AliasRecord | None, found: AliasRecord | None) -> AliasRecord | None:
        """What a reader knows after a look, see `mapstate.reader.aliased.Alias`."""
        with closing(Alias(_Backend(found), NAME)) as one:
            one.last = known
            return one.read()

    def shows(self, ledger: int) -> int | None:
        """The last batch that a version shows; None where it shows nothing."""
        last = self.ledger(ledger).last_commit if ledger else None
        return None if last is None else last.batch_id

    resolves = "call"
    """Readers look at the alias: behind the reads of each "call", which begins anew behind a swap; or "before" them,
    for each "key", or "once"."""
    compares_alias = compares_ledgers = keeps_first = True
    drop_asks: tuple[str, ...] = ("first", "again")


Corrected = tuple[tuple[str, ...], tuple[str, ...]]
"""The ids of the corrections that each version counts."""


class _Backend:
    """Where an alias is found."""

    shared_between_processes = False

    def __init__(self, record: AliasRecord | None) -> None:
        self._record = record

    def open(self, state: str, *, ttl: float | None = None) -> Any:  # noqa: ARG002
        return self

    def load(self) -> tuple[bytes, int] | None:
        return None if self._record is None else (alias.encode_alias(self._record), 1)

    def swap(self, record: bytes, expected: Any, fence: FenceToken) -> None:
        raise NotImplementedError


class _Plan(NamedTuple):
    """The alias as a swap writes it, and as it keeps the version first, unless it does."""

    after: AliasRecord
    keeping: AliasRecord | None


class _Driver(NamedTuple):
    """``phase`` is "begin", "commit" or "gone"."""

    session: int
    batch: int = 0
    phase: str = "begin"
    attempt: ModelAttempt | None = None


class _Operator(NamedTuple):
    """``phase`` is the step that comes next; "done" in the end. ``read`` is the alias, ``ledgers`` both or its own.

    ``corrected`` is read with ``ledgers``.
    """

    phase: str = "comes"
    read: AliasRecord | None = None
    ledgers: tuple[int, ...] = ()
    corrected: Corrected = ((), ())
    attempt: ModelAttempt | None = None


class _Reader(NamedTuple):
    """``known`` is the alias of the last look; ``began`` the alias's number at the beginning of the present call.

    ``seen`` are the versions whose keys it has read in the call, as of ``batch``; ``newest`` is that of all calls.
    """

    known: AliasRecord | None = None
    calls: int = 0
    began: int | None = None
    seen: tuple[str, ...] = ()
    batch: int | None = None
    newest: int = -1


class _State(NamedTuple):
    """Everything at one moment. ``old`` is the alias before the last write of it."""

    ledgers: tuple[int, int]
    corrected: Corrected
    alias: AliasRecord | None
    old: AliasRecord | None
    drivers: tuple[_Driver, ...]
    operators: tuple[_Operator, ...]
    reader: _Reader

    def with_ledger(self, at: int, ledger: int) -> _State:
        return self._replace(ledgers=with_item(self.ledgers, at, ledger))

    def with_driver(self, at: int, driver: _Driver) -> _State:
        return self._replace(drivers=with_item(self.drivers, at, driver))

    def with_operator(self, at: int, operator: _Operator) -> _State:
        return self._replace(operators=with_item(self.operators, at, operator))

    def with_alias(self, record: AliasRecord) -> _State:
        """Raises ViolationError where an operator undoes what another one did meanwhile."""
        if record.number < _number(self.alias):
            raise ViolationError(f"swap {_number(self.alias)} is undone by number {record.number}")
        return self._replace(alias=record, old=self.alias)


class SwappingSteps:
    """The steps of one world under one protocol, and what has to be true after each."""

    def __init__(self, world: Swapping, protocol: SwappingProtocol) -> None:
        self.world = world
        self.protocol = protocol

    def of(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """Each step from a state, and the state after it. One who takes no step any more has died."""
        if not any(state.ledgers) and state.alias is None and all(not driver.batch for driver in state.drivers):
            yield ("both versions have a batch",), self._made(state)
            return
        for at, driver in enumerate(state.drivers):
            if driver.phase != "gone" and (driver.phase == "commit" or driver.batch <= self.world.batches[at]):
                yield self._driver(state, at, driver)
        for at, operator in enumerate(state.operators):
            if operator.phase != "done":
                way = {"swap": self._swap, "keep": self._keep, "drop": self._drop, "correct": self._correct}
                yield way[self.world.operators[at][0]](state, at, operator)
        yield from self._reader(state)

    def _made(self, state: _State) -> _State:
        for at, driver in enumerate(state.drivers):
            attempt = self.protocol.open_and_begin(0, 0, driver.session, 0, "refuse", 1, 0)
            assert isinstance(attempt, ModelAttempt)
            _, state = self._commit(state.with_ledger(at, attempt.ledger), at, driver._replace(attempt=attempt))
        return state

    def _driver(self, state: _State, at: int, driver: _Driver) -> tuple[Label, _State]:
        if driver.phase == "commit":
            return self._commit(state, at, driver)
        label, gone = ("driver", VERSIONS[at], "begins", driver.batch), driver._replace(phase="gone", attempt=None)
        answer = (
            self.protocol.begin(state.ledgers[at], driver.session, driver.batch, driver.batch)
            if state.ledgers[at]
            else Refused("StoreLostError")
        )
        if not isinstance(answer, ModelAttempt):
            return (*label, answer), state.with_driver(at, gone)
        commits = driver._replace(phase="commit", attempt=answer)
        return label, state.with_ledger(at, answer.ledger).with_driver(at, commits)

    def _commit(self, state: _State, at: int, driver: _Driver) -> tuple[Label, _State]:
        label, gone = ("driver", VERSIONS[at], "commits", driver.batch), driver._replace(phase="gone", attempt=None)
        assert driver.attempt is not None
        if not state.ledgers[at]:
            return (*label, "StoreLostError"), state.with_driver(at, gone)
        offsets = json.dumps([{"t": {"0": driver.batch + 1}}])
        after = self.protocol.commit(
            state.ledgers[at], driver.session, 0, driver.batch, driver.attempt.txid, offsets=offsets
        )
        if isinstance(after, Refused):
            return (*label, after.error), state.with_driver(at, gone)
        done = _Driver(driver.session, driver.batch + 1)
        return label, state.with_ledger(at, after).with_driver(at, done)

    def _swap(self, state: _State, at: int, own: _Operator) -> tuple[Label, _State]:
        protocol, label = self.protocol, (f"operator {at}", *self.world.operators[at], own.phase)
        if own.phase == "comes":
            return label, state.with_operator(at, _Operator("reads", state.alias))
        if own.phase == "reads":
            return label, state.with_operator(at, _Operator("writes", own.read, state.ledgers, state.corrected))
        to_version = self.world.operators[at][1]  # type: ignore[misc]
        planned = protocol.planned(own.read, to_version, own.ledgers, own.corrected)  # type: ignore[arg-type]
        if isinstance(planned, Refused):
            return (*label, planned.error), state.with_operator(at, _Operator("done"))
        is_new = protocol.compares_alias and own.read != state.alias
        if is_new or (self.world.joint and protocol.compares_ledgers and own.ledgers != state.ledgers):
            return (*label, "and begins anew"), state.with_operator(at, _Operator())
        if not self.world.joint and protocol.keeps_first and planned.keeping is not None:
            return (*label, "what is kept"), state.with_alias(planned.keeping).with_operator(at, _Operator())
        to, present = planned.after.to, NAME if state.alias is None else state.alias.to
        ends = [protocol.shows(state.ledgers[VERSIONS.index(one)]) for one in (present, to)]
        if self.world.joint and None not in ends and ends[0] > ends[1]:  # type: ignore[operator]
            raise ViolationError(f"{to} is swapped to at batch {ends[1]}, behind {present} at {ends[0]}")
        lacks = {*state.corrected[VERSIONS.index(present)]} - {*state.corrected[VERSIONS.index(to)]}
        if self.world.joint and lacks:
            raise ViolationError(f"{to} is swapped to without the correction {min(lacks)} of {present}")
        return label, state.with_alias(planned.after).with_operator(at, _Operator("done"))

    def _correct(self, state: _State, at: int, own: _Operator) -> tuple[Label, _State]:
        version = self.world.operators[at][1]  # type: ignore[misc]
        assert version is not None
        label, done = (
            (f"operator {at}", "corrects", VERSIONS[version], own.phase),
            state.with_operator(at, _Operator("done")),
        )
        ledger = state.ledgers[version]
        if not ledger or (own.phase == "comes" and _ID in state.corrected[version]):
            return (*label, "and need not"), done
        if own.phase == "comes":
            attempt = self.protocol.begin_correction(ledger, at, ledger)
            if not isinstance(attempt, ModelAttempt):
                return (*label, attempt), done
            return label, state.with_ledger(version, attempt.ledger).with_operator(
                at, _Operator("commits", attempt=attempt)
            )
        assert own.attempt is not None
        after = self.protocol.commit_correction(ledger, own.attempt.txid)
        if isinstance(after, Refused):
            return (*label, after.error), done
        counted = with_item(state.corrected, version, (*state.corrected[version], _ID))
        return label, done.with_ledger(version, after)._replace(corrected=counted)

    def _keep(self, state: _State, at: int, own: _Operator) -> tuple[Label, _State]:
        label, done = (f"operator {at}", "keeps one", own.phase), state.with_operator(at, _Operator("done"))
        if own.phase == "comes":
            return label, done if state.alias is None else state.with_operator(at, _Operator("writes", state.alias))
        assert own.read is not None
        if self.protocol.compares_alias and own.read != state.alias:
            return (*label, "and begins anew"), state.with_operator(at, _Operator())
        return label, done.with_alias(self.protocol.keep_only(own.read))

    def _drop(self, state: _State, at: int, own: _Operator) -> tuple[Label, _State]:
        protocol, version = self.protocol, self.world.operators[at][1]  # type: ignore[misc]
        assert version is not None
        label, phase = (f"operator {at}", "drops", VERSIONS[version], own.phase), own.phase
        is_kept = state.alias is not None and VERSIONS[version] in state.alias.keeps
        done, ledger = state.with_operator(at, _Operator("done")), state.ledgers[version]
        if phase == "comes":
            if not ledger or ("first" in protocol.drop_asks and is_kept):
                return (*label, "and is refused"), done
            return label, state.with_operator(at, _Operator("loads"))
        if phase == "loads":
            if not ledger or isinstance(protocol.begin_drop(ledger, at), Refused):
                return (*label, "and is refused"), done
            following = "takes" if "again" in protocol.drop_asks else "empties"
            return label, state.with_operator(at, _Operator(following, None, (ledger,)))
        if phase == "asks":
            return label, state.with_operator(at, own._replace(phase="gives back" if is_kept else "empties"))
        (seen,) = own.ledgers
        if ledger != seen:
            return (*label, "FencedError"), done
        if phase == "takes":
            taken = protocol.taken(ledger, at, drops=True)
            return label, state.with_ledger(version, taken).with_operator(at, _Operator("asks", None, (taken,)))
        if phase == "gives back":
            return label, done.with_ledger(version, protocol.taken(ledger, at, drops=False))
        if phase == "empties":
            after = protocol.begin_drop(ledger, at)
            assert isinstance(after, int)
            return label, state.with_ledger(version, after).with_operator(at, _Operator("removes", None, (after,)))
        return label, done.with_ledger(version, 0)

    def _reader(self, state: _State) -> Iterator[tuple[Label, _State]]:
        own, protocol = state.reader, self.protocol
        if own.began is None:
            if own.calls < self.world.calls:
                began = own._replace(calls=own.calls + 1, began=_number(state.alias), seen=())
                if protocol.resolves == "before":
                    began = began._replace(known=protocol.looked(own.known, state.alias))
                yield ("a call begins",), state._replace(reader=began)
        elif len(own.seen) < _KEYS:
            known = protocol.looked(own.known, state.alias) if protocol.resolves == "key" else own.known
            to = NAME if known is None else known.to
            if to not in (own.seen or (to,)):
                raise ViolationError(f"one call reads {to} and {own.seen[0]}")
            batch = protocol.shows(state.ledgers[VERSIONS.index(to)])
            after = own._replace(known=known, seen=(*own.seen, to), batch=own.batch if own.seen else batch)
            yield ("a call reads a key", len(own.seen)), state._replace(reader=after)
        elif protocol.resolves in ("before", "key") or (protocol.resolves == "once" and own.calls > 1):
            yield ("a call ends",), state._replace(reader=self._ended(own))
        else:
            for found in {state.alias, *([state.old] if self.world.old_copies else [])}:
                known = protocol.looked(own.known, found)
                if _number(known) < _number(own.known):
                    raise ViolationError(f"a reader goes back from swap {_number(own.known)} to {_number(known)}")
                label = "" if found == state.alias else "with an old copy"
                if _number(known) == _number(own.known):
                    yield ("a call looks, and ends", label), state._replace(reader=self._ended(own))
                else:
                    again = own._replace(known=known, seen=(), batch=None)
                    yield ("a call looks, and begins anew", label), state._replace(reader=again)

    def _ended(self, own: _Reader) -> _Reader:
        """The reader, whose call returns what it has read. Raises ViolationError where that is of before."""
        assert own.began is not None
        if not self.world.old_copies and _number(own.known) < own.began:
            raise ViolationError(f"a call that began after swap {own.began} reads by swap {_number(own.known)}")
        if self.world.joint and not self.world.old_copies and own.batch is not None:
            if own.batch < own.newest:
                raise ViolationError(f"a reader goes back from batch {own.newest} to {own.batch}")
            own = own._replace(newest=own.batch)
        return own._replace(began=None, seen=(), batch=None)

    def check(self, state: _State) -> None:
        """Raises ViolationError unless the alias leads to a version that is there, which readers can read."""
        record = state.alias
        if (
            record is not None
            and record.number
            and self.protocol.shows(state.ledgers[VERSIONS.index(record.to)]) is None
        ):
            raise ViolationError(f"readers of {NAME} are led to {record.to}, which is gone")


def _number(record: AliasRecord | None) -> int:
    return 0 if record is None else record.number
