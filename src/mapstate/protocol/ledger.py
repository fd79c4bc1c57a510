"""A driver's hold on the ledger of one state: the transitions, run against the store.

For tools and tests, and a state that follows another; a streaming query's driver uses `mapstate.protocol.ledgers`. A
batch costs one small write when it begins and one when it commits. Readers use `read_ledger` instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, TypeVar

from mapstate.protocol import transitions, upkeep, ways_back
from mapstate.protocol.held_ledger import HeldLedger, VersionedLedger, change_all
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, Commit, LedgerRecord, OpenRequest, now
from mapstate.protocol.plans import BatchPlan
from mapstate.protocol.windows import PaneChange
from mapstate.schema import OnGap

T = TypeVar("T")


class Ledger:
    """A driver's hold on the ledger of one state, from `open` until a newer driver opens it.

    Not thread-safe: one streaming query runs one batch at a time.
    """

    def __init__(self, store: Any, state: str) -> None:
        self.held = HeldLedger(store, state)

    @classmethod
    def of(cls, held: HeldLedger) -> Ledger:
        """The ledger of one state alone, out of those that a driver holds together in `Ledgers`."""
        self = cls.__new__(cls)
        self.held = held
        return self

    @classmethod
    def open(cls, store: Any, opening: OpenRequest) -> Ledger:
        """Take the state for the query ``opening.owner``; this fences every driver before it.

        Raises the errors of `open_ledger`, and StoreError.
        """
        self = cls(store, opening.state)
        opened = self.held.opening(opening)
        self._change(lambda before: (opened(before), None), may_create=True)
        self.held.mark_begun()
        return self

    @classmethod
    def open_and_begin(
        cls, store: Any, opening: OpenRequest, batch_id: int, on_gap: OnGap = "refuse", plan: BatchPlan | None = None
    ) -> tuple[Ledger, Attempt | AlreadyCommitted]:
        """`open` and `begin` in one write: a refused batch changes nothing."""
        self = cls(store, opening.state)
        held = self.held
        opened, nonce, at = held.opening(opening), held.nonce(), now()

        def first_write(before: LedgerRecord | None) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
            return transitions.begin(opened(before), held.session, batch_id, on_gap, nonce, at=at, plan=plan)

        return self, self._begin(first_write, accept_loss=on_gap == "accept", may_create=True)

    @property
    def record(self) -> LedgerRecord:
        """The ledger as this driver last read or wrote it."""
        return self.held.record

    def load(self) -> VersionedLedger | None:
        """Read the ledger from the store, with its version; None where there is none."""
        return self.held.load()

    def begin(
        self, batch_id: int, on_gap: OnGap = "refuse", plan: BatchPlan | None = None
    ) -> Attempt | AlreadyCommitted:
        """Start an attempt: one small write. See `transitions.begin` for what it refuses.

        Raises StoreLostError when the ledger is gone.
        """
        held = self.held
        nonce, at = held.nonce(), now()

        def begin(before: LedgerRecord) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
            held.check_not_put_back(before, batch_id)
            return transitions.begin(before, held.session, batch_id, on_gap, nonce, at=at, plan=plan)

        return self._begin(begin, accept_loss=on_gap == "accept")

    def _begin(
        self,
        transition: Callable[[Any], tuple[LedgerRecord, T]],
        *,
        accept_loss: bool = False,
        may_create: bool = False,
    ) -> T:
        result = self._change(transition, may_create=may_create, verify_fences=True, accept_loss=accept_loss)
        self.held.has_begun(result, accept_loss=accept_loss)
        return result

    def commit(self, done: Commit, panes: PaneChange | None = None) -> None:
        """Make the attempt ``done.txid`` count, all of it at once: one small write. ``panes`` are as in `Ledgers`.

        Raises FencedError where a newer attempt or driver has taken over, and StoreLostError where the ledger is gone.
        Raises StoreRestartedError where the store may have lost records of the attempt: then it can be begun anew.
        """
        self.held.close_fences()

        def commit(before: LedgerRecord) -> tuple[LedgerRecord, None]:
            self.held.check_not_put_back(before)
            return transitions.commit(before, self.held.session, done, panes), None

        self._change(commit, same_incarnation=True)

    def say_what_fenced(self) -> None:
        self.held.say_what_fenced()

    def give_up(self) -> None:
        self._change(lambda before: (ways_back.give_up(before, self.held.session), None))

    def rollback(self, txid: int | None = None) -> LedgerRecord:
        """Take the last batch back, if it is ``txid``; returns the ledger without it. See `ways_back.rollback`."""

        def rolled_back(before: LedgerRecord) -> tuple[LedgerRecord, LedgerRecord]:
            after = ways_back.rollback(before, txid)
            return after, after

        return self._change(rolled_back)

    def mark_part(self, batch_id: int) -> None:
        """Mark what counts of a batch that came in parts; the next `begin` refuses it. See `ways_back.take_back`."""
        self._change(lambda before: (ways_back.take_back(before, batch_id, can_roll_back=False), None))

    def begin_vacuum(self, *, take_over: bool = False, seen: LedgerRecord | None = None) -> Attempt:
        session, at = secrets.token_hex(8), now()
        return self._begin(lambda before: upkeep.begin_vacuum(before, session, take_over=take_over, at=at, seen=seen))

    def remember(self) -> LedgerRecord:
        """Load the ledger before records are read for `forget_dead` or `recount`. Raises StoreLostError."""
        self.held.at_begin = self.held.load() or self.held.raise_lost()
        return self.held.at_begin.record

    def forget_dead(self, seen: LedgerRecord, held: int | None = None) -> None:
        """See `upkeep.forget_dead`. Raises StoreRestartedError if the store restarted since `remember`."""
        self._change(lambda before: (upkeep.forget_dead(before, seen, held), None), same_incarnation=True)

    def commit_vacuum(self, txid: int, *, fenced: bool = True, held: int | None = None) -> None:
        """See `upkeep.commit_vacuum`. Raises StoreRestartedError as `commit` does."""
        self.held.close_fences()
        self._change(
            lambda before: (upkeep.commit_vacuum(before, txid, fenced=fenced, held=held), None), same_incarnation=True
        )

    def recount(self, counted: LedgerRecord, held: int) -> None:
        """See `upkeep.recount`. Raises StoreRestartedError if the store restarted since `remember`."""
        self._change(lambda before: (upkeep.recount(before, counted, held), None), same_incarnation=True)

    def advance(self, to: int, *, take_over: bool = False, back_at: int | None = None) -> LedgerRecord:
        """See `upkeep.advance`; returns the ledger with it."""
        session = secrets.token_hex(8)

        def advanced(before: LedgerRecord) -> tuple[LedgerRecord, LedgerRecord]:
            after = upkeep.advance(before, to, session, take_over=take_over, back_at=back_at)
            return after, after

        return self._change(advanced)

    def _change(
        self, transition: Callable[[Any], tuple[LedgerRecord, T]], *, accept_loss: bool = False, **how: bool
    ) -> T:
        return change_all([self.held], lambda before: [transition(before[0])], accept_loss=[accept_loss], **how)[0]
