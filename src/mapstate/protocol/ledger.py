"""A driver's hold on the ledger of one state: the transitions, run against the store.

A batch costs one small write when it begins and one when it commits. Readers use `read_ledger` instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from mapstate.errors import StoreRestartedError
from mapstate.protocol import transitions, upkeep
from mapstate.protocol.held_ledger import HeldLedger, VersionedLedger, change_all
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, Commit, LedgerRecord, OpenRequest, now
from mapstate.protocol.plans import BatchPlan
from mapstate.schema import OnGap

__all__ = ["Ledger"]

T = TypeVar("T")


class Ledger:
    """A driver's hold on the ledger of one state, from `open` until a newer driver opens it.

    Not thread-safe: one streaming query runs one batch at a time.
    """

    def __init__(self, store: Any, state: str) -> None:
        self.held = HeldLedger(store, state)
        self.session = ""
        self._attempts = 0

    @classmethod
    def open(cls, store: Any, opening: OpenRequest) -> Ledger:
        """Take the state for the query ``opening.owner``; this fences every driver before it.

        Raises the errors of `transitions.open_ledger`, and StoreError.
        """
        self = cls(store, opening.state)
        self._change(self.opening(opening), may_create=True)
        self.held.mark_begun()
        return self

    @classmethod
    def open_and_begin(
        cls, store: Any, opening: OpenRequest, batch_id: int, on_gap: OnGap = "refuse", plan: BatchPlan | None = None
    ) -> tuple[Ledger, Attempt | AlreadyCommitted]:
        """`open` and `begin` in one write: a refused batch changes nothing."""
        self = cls(store, opening.state)
        opened, nonce, at = self.opening(opening), self.nonce(), now()

        def first_write(before: LedgerRecord | None) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
            return transitions.begin(opened(before)[0], self.session, batch_id, on_gap, nonce, at=at, plan=plan)

        return self, self._begin(first_write, accept_loss=on_gap == "accept", may_create=True)

    def opening(self, opening: OpenRequest) -> Callable[[LedgerRecord | None], tuple[LedgerRecord, None]]:
        """`transitions.open_ledger` under a session of this driver's own."""
        self.session = opening.session or secrets.token_hex(8)
        own = msgspec.structs.replace(opening, session=self.session)
        return lambda before: (transitions.open_ledger(before, own), None)

    def nonce(self) -> str:
        """A random name that sorts behind this driver's earlier ones; see `FenceToken`."""
        self._attempts += 1
        return f"{self._attempts:08x}{secrets.token_hex(8)}"

    @property
    def record(self) -> LedgerRecord:
        """The ledger as this driver last read or wrote it."""
        return self.held.current().record

    def load(self) -> VersionedLedger | None:
        """Read the ledger from the store, with its version; None where there is none."""
        return self.held.load()

    def begin(
        self, batch_id: int, on_gap: OnGap = "refuse", plan: BatchPlan | None = None
    ) -> Attempt | AlreadyCommitted:
        """Start an attempt: one small write. See `transitions.begin` for what it refuses.

        Raises StoreLostError when the ledger is gone.
        """
        nonce, at = self.nonce(), now()

        def begin(before: LedgerRecord) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
            self.check_not_put_back(before, batch_id)
            return transitions.begin(before, self.session, batch_id, on_gap, nonce, at=at, plan=plan)

        return self._begin(begin, accept_loss=on_gap == "accept")

    def _begin(
        self,
        transition: Callable[[Any], tuple[LedgerRecord, T]],
        *,
        accept_loss: bool = False,
        may_create: bool = False,
    ) -> T:
        result = self._change(transition, may_create=may_create, verify_fences=True, accept_loss=accept_loss)
        self.has_begun(result, accept_loss=accept_loss)
        return result

    def has_begun(self, result: object, *, accept_loss: bool) -> None:
        """After the ledger's write: remember the ledger for the commit, and advance fences that are apart from it."""
        self.held.mark_begun()
        if isinstance(result, Attempt):
            self.held.advance_fences(result.token, None if accept_loss else result.view.last)

    def commit(self, done: Commit) -> None:
        """Make the attempt ``done.txid`` count, all of it at once: one small write.

        Raises FencedError where a newer attempt or driver has taken over, and StoreLostError where the ledger is gone.
        Raises StoreRestartedError where the store may have lost records of the attempt: then it can be begun anew.
        """
        self.held.close_fences()

        def commit(before: LedgerRecord) -> tuple[LedgerRecord, None]:
            self.check_not_put_back(before)
            return transitions.commit(before, self.session, done), None

        self._change(commit, same_incarnation=True)

    def check_not_put_back(self, ledger: LedgerRecord, batch_id: int | None = None) -> None:
        """Refuse a ledger from a copy of the store that is older than this driver's attempt.

        ``batch_id`` is that of a begin. Where the copy is of this driver's own time, the begin itself says what is
        missing. Raises StoreRestartedError, and MissingBatchesError where the copy lacks batches.
        """
        known = None if self.held.at_begin is None else self.held.at_begin.record
        if known is None or not transitions.is_older(ledger, known):
            return
        if batch_id is not None:
            if ledger.session == self.session:
                return
            due = ledger.owners.get(known.owner, batch_id)
            if due < batch_id:
                raise transitions.missing_batches(ledger, batch_id, due)
        raise StoreRestartedError(
            f"the store of state {ledger.state!r} was put back to an older copy under a running driver: its ledger is "
            f"of epoch {ledger.epoch} with next txid {ledger.next_txid}, and this driver had epoch {known.epoch} and "
            f"{known.next_txid}. Nothing of this attempt counts. Start the query again: it goes on, or says what the "
            "copy lacks.",
            state=ledger.state,
        )

    def say_what_fenced(self) -> None:
        """After a FencedError: raises the store's own trouble, if that and no other driver fenced this one."""
        stored = self.held.load() or self.held.raise_lost()
        attempt = None if self.held.at_begin is None else self.held.at_begin.record.in_flight
        self.check_not_put_back(stored.record, None if attempt is None else attempt.batch_id)

    def give_up(self) -> None:
        """See `transitions.give_up`."""
        self._change(lambda before: (transitions.give_up(before, self.session), None))

    def rollback(self, txid: int | None = None) -> LedgerRecord:
        """Take the last batch back, if it is ``txid``; returns the ledger without it. See `transitions.rollback`."""

        def rolled_back(before: LedgerRecord) -> tuple[LedgerRecord, LedgerRecord]:
            after = transitions.rollback(before, txid)
            return after, after

        return self._change(rolled_back)

    def begin_vacuum(self, *, take_over: bool = False, seen: LedgerRecord | None = None) -> Attempt:
        """See `upkeep.begin_vacuum`."""
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

    def _change(
        self, transition: Callable[[Any], tuple[LedgerRecord, T]], *, accept_loss: bool = False, **how: bool
    ) -> T:
        return change_all([self.held], lambda before: [transition(before[0])], accept_loss=[accept_loss], **how)[0]
