"""What the library does at each step of the protocol, asked once per different question.

`Protocol` runs the library's own code: the transitions of `mapstate.protocol.transitions`, the map states, and the one
rule of `mapstate.protocol.records`. Ledgers and views are numbered, so that a state of the model is a small tuple of
numbers. What the library does with I/O around it (who checks the fence and when, who claims, when a reader looks again)
is a method here, and the steps ask it; a mutant answers otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec

from mapstate.capabilities import FenceToken
from mapstate.errors import LedgerLostError, MapStateError, StaleBatchError
from mapstate.maps import OpaqueMap, TransactionalMap
from mapstate.protocol import transitions, upkeep, ways_back
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, BatchPlan, Commit, LedgerRecord, OpenRequest
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.records import CommitView
from mapstate.schema import Field, OnNewOwner, StateType

__all__ = ["LOST", "REMOVE", "STALE", "ModelAttempt", "Protocol", "Record", "Refused"]

Record = tuple[int, Any, Any] | tuple[int, Any]
"""An opaque or a transactional record; its values are numbers, see `model.world`."""

REMOVE = -1
"""The operation that removes a key; every other number is added."""

STALE = "stale"
LOST = "lost"


class Refused(NamedTuple):
    """The library raised: ``error`` is the class's name."""

    error: str


class ModelAttempt(NamedTuple):
    """An attempt that has begun: the ledger after it, its txid, its view's number, its token."""

    ledger: int
    txid: int
    view: int
    token: FenceToken


class Protocol:
    """The protocol as the library has it. A mutant is a subclass that gets one thing wrong.

    Ledgers and views go by number; 0 is "no ledger". Not for several threads.
    """

    def __init__(self, state_type: StateType = "opaque") -> None:
        self.type = state_type
        self._ledgers: list[LedgerRecord | None] = [None]
        self._ledger_numbers: dict[bytes, int] = {}
        self._views: list[CommitView] = []
        self._view_numbers: dict[CommitView, int] = {}
        for name in _REMEMBERED:
            setattr(self, name, cache(getattr(self, name)))  # one memory per protocol

    # The ledger: each is one transition, run by compare-and-set

    def ledger(self, number: int) -> LedgerRecord:
        """The ledger of a number."""
        found = self._ledgers[number]
        assert found is not None
        return found

    def number(self, ledger: LedgerRecord) -> int:
        """The number of a ledger."""
        data = msgspec.json.encode(ledger)
        if data not in self._ledger_numbers:
            self._ledger_numbers[data] = len(self._ledgers)
            self._ledgers.append(ledger)
        return self._ledger_numbers[data]

    def opening(self, query: int, session: int, policy: OnNewOwner, incarnation: int = 1) -> OpenRequest:
        """What a driver brings."""
        return OpenRequest(
            state="s",
            type=self.type,
            serializer="json",
            keys=(),
            fields=(Field("n", "Sum", "bigint"),),
            owner=f"q{query}",
            session=f"s{session}",
            clock_txid=incarnation * 1000,
            on_new_owner=policy,
        )

    def open_and_begin(
        self, ledger: int, query: int, session: int, batch: int, policy: OnNewOwner, incarnation: int, serial: int
    ) -> ModelAttempt | int | Refused:
        """A driver's first write. A number is the ledger of a batch that is committed already."""
        opening = self.opening(query, session, policy, incarnation)

        def first_write() -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
            opened = self.opened(self._ledgers[ledger], opening)
            return self.begun(opened, opening.session, batch, _nonce(opening.session, serial))

        return self._begun(first_write)

    def begin(self, ledger: int, session: int, batch: int, serial: int) -> ModelAttempt | int | Refused:
        """A later attempt of a driver that has opened the state."""
        own = f"s{session}"
        return self._begun(lambda: self.begun(self.ledger(ledger), own, batch, _nonce(own, serial)))

    def opened(self, ledger: LedgerRecord | None, opening: OpenRequest) -> LedgerRecord:
        """See `open_ledger`."""
        return open_ledger(ledger, opening)

    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        """See `transitions.begin`."""
        return transitions.begin(ledger, session, batch, nonce=nonce, plan=plan)

    def commit(
        self, ledger: int, session: int, query: int, batch: int, txid: int, offsets: str | None = None, rows: int = 0
    ) -> int | Refused:
        """The ledger after a commit: the same number where it had been said before."""
        done = Commit(batch_id=batch, txid=txid, owner=f"q{query}", offsets=offsets, rows=rows)
        return self._changed(lambda: self.committed(self.ledger(ledger), f"s{session}", done))

    def committed(self, ledger: LedgerRecord, session: str, done: Commit) -> LedgerRecord:
        """See `transitions.commit`."""
        return transitions.commit(ledger, session, done)

    def give_up(self, ledger: int, session: int) -> int:
        """See `ways_back.give_up`."""
        return self.number(ways_back.give_up(self.ledger(ledger), f"s{session}"))

    def rollback(self, ledger: int) -> int | Refused:
        """See `ways_back.rollback`."""
        return self._changed(lambda: ways_back.rollback(self.ledger(ledger)))

    def begin_vacuum(self, ledger: int, session: int, *, take_over: bool) -> ModelAttempt | int | Refused:
        """See `upkeep.begin_operator`."""
        return self._begun(
            lambda: upkeep.begin_operator(self.ledger(ledger), f"vacuum{session}", "vacuum", take_over=take_over)
        )

    def has_attempt_at_work(self, ledger: int) -> bool:
        """Whether what is in flight was begun in the ledger's own epoch."""
        record = self.ledger(ledger)
        return record.in_flight is not None and record.in_flight.epoch == record.epoch

    def may_look(self, ledger: int, *, fenced: bool) -> bool:
        """Whether a vacuum may find that there is nothing to rewrite, and forget what is dead, by reading alone."""
        return not self.has_attempt_at_work(ledger) and (fenced or not self.ledger(ledger).dead)

    def forget_dead(self, ledger: int, seen: int) -> int | Refused:
        """See `upkeep.forget_dead`."""
        return self._changed(lambda: upkeep.forget_dead(self.ledger(ledger), self.ledger(seen)))

    def commit_vacuum(self, ledger: int, txid: int, *, fenced: bool) -> int | Refused:
        """See `upkeep.commit_vacuum`."""
        return self._changed(lambda: upkeep.commit_vacuum(self.ledger(ledger), txid, fenced=fenced))

    def _begun(
        self, transition: Callable[[], tuple[LedgerRecord, Attempt | AlreadyCommitted]]
    ) -> ModelAttempt | int | Refused:
        try:
            after, result = transition()
        except MapStateError as error:
            return Refused(type(error).__name__)
        if isinstance(result, AlreadyCommitted):
            return self.number(after)
        return ModelAttempt(self.number(after), result.txid, self._view_number(result.view), result.token)

    def _changed(self, transition: Callable[[], LedgerRecord]) -> int | Refused:
        try:
            return self.number(transition())
        except MapStateError as error:
            return Refused(type(error).__name__)

    # What follows from a ledger

    def view(self, ledger: int) -> int:
        """The number of what counts, as of a ledger."""
        return self._view_number(self.ledger(ledger).view())

    def _view_number(self, view: CommitView) -> int:
        if view not in self._view_numbers:
            self._view_numbers[view] = len(self._views)
            self._views.append(view)
        return self._view_numbers[view]

    def newest(self, ledger: int) -> int:
        """The last txid that a ledger has given out."""
        return self.ledger(ledger).next_txid - 1

    def last(self, view: int) -> int | None:
        """The last committed txid of a view."""
        return self._views[view].last

    def fence(self, ledger: int) -> FenceToken | None:
        """The fence that moves in the ledger's own write; none where there is no ledger."""
        return None if ledger == 0 else self.ledger(ledger).fence()

    # Records

    def applied(self, view: int, txid: int, record: Record | None, operation: int) -> Record | Refused | None:
        """What a map state writes over ``record``; None where it writes nothing."""
        one = _OneRecord(record)
        maps: Any = OpaqueMap if self.type == "opaque" else TransactionalMap
        state = maps(one, self._views[view], written_once=True)
        state.begin_commit(txid)
        try:
            state.multi_combine(["key"], [operation], _combine_all)
        except MapStateError as error:
            return Refused(type(error).__name__)
        return None if one.written is None else tuple(one.written)

    def shown(self, view: int, newest: int, record: Record | None) -> Any:
        """What a reader makes of a record: a value or None, STALE, LOST."""
        if self.type == "transactional":
            return None if record is None or not self._views[view].check_age(record[0]) else record[1]
        try:
            return self._views[view].values([record], newest)[0]  # type: ignore[list-item]
        except StaleBatchError:
            return STALE
        except LedgerLostError:
            return LOST

    def stored(self, record: Record) -> Record | None:
        """What is in the store after a put: a removed key leaves a tombstone."""
        return record

    def swept(self, view: int, txid: int, record: Record, *, everything: bool) -> Record | str | None:
        """What a vacuum makes of a record: another, REMOVED, or None where it stays as it is."""
        value = self.shown(view, txid, record)
        if value in (STALE, LOST):
            return None
        if value is None and not everything:  # without a fence a late writer would put it back
            return "removed"
        if everything or record[0] not in self._views[view]:
            return (txid, value, value)
        return None

    # Who may write

    def may_write(self, fence: FenceToken | None, token: FenceToken) -> bool:
        """A fenced store's answer, atomic with the put."""
        return fence == token and not token.closed

    def may_replace(self, stored: Record | None, txid: int) -> bool:
        """A store's answer that filters by record, atomic with the put of it."""
        return stored is None or stored[0] <= txid

    def raised(self, fence: FenceToken | None, before: FenceToken | None, token: FenceToken) -> FenceToken | None:
        """The fence of one node of a cluster after a move to ``token``, by somebody who had read ``before``."""
        return token if fence == before and (before is None or token.rank > before.rank) else fence

    def is_intact(self, fence: FenceToken | None, last: int | None) -> bool:
        """Whether the fence of a node shows all that was committed up to ``last``; asked before it is raised."""
        return last is None or (fence is not None and (fence.txid, fence.closed) >= (last, True))

    closes_fences = True

    def may_make_ledger(self, records: Sequence[Record | None]) -> bool:
        """Whether a state without a ledger gets one, with these records in its store."""
        return all(record is None for record in records)

    def may_commit(self, *, begun_in: int, now: int) -> bool:
        """Whether the store is the one that the attempt wrote to, and not a copy put back; atomic with the commit."""
        return begun_in == now

    def has_to_claim(self, *, empty: bool) -> bool:  # noqa: ARG002  mutants ask
        """Whether a try of a task claims its partition first; also one that is ``empty``."""
        return self.type == "opaque"

    # Readers, vacuum, reset

    def looks_again(self, before: int, after: int, *, absent: bool) -> bool:
        """Whether a reader that found a key ``absent`` has to start over."""
        return absent and (after == 0 or self.purged(before) != self.purged(after))

    def purged(self, ledger: int) -> tuple[int, ...]:
        """What differs between two ledgers if records may have gone from one to the other. See `mapstate.reader`."""
        return self.ledger(ledger).first_txid, self.ledger(ledger).rewrites

    minds_stale_records = True
    reset_deletes = False
    vacuum_is_an_attempt = True
    writes_keys_twice = False


_REMEMBERED = (
    *("open_and_begin", "begin", "commit", "give_up", "rollback", "begin_vacuum", "commit_vacuum", "forget_dead"),
    *("view", "newest", "last", "fence", "applied", "shown", "swept"),
)


def _nonce(session: str, serial: int) -> str:
    """The name of an attempt. It is random but for its order within a session; here the later session's is lower."""
    return f"n{99 - int(session[1:]):02}{serial:04}"


class _OneRecord:
    """A backing map of one key, which remembers what was put."""

    def __init__(self, record: Record | None) -> None:
        self._record = record
        self.written: Any = None

    def multi_get(self, keys: Any) -> list[Any]:
        return [self._record] * len(keys)

    def multi_put(self, keys: Any, values: Any) -> None:
        (self.written,) = values
        assert len(keys) == 1


def _combine_all(bases: list[Any], operations: list[Any]) -> list[Any]:
    return [
        None if operation == REMOVE else (base or 0) + operation
        for base, operation in zip(bases, operations, strict=True)
    ]
