"""What tools do to the ledger of one state, and a driver to its ledgers after trouble; else it uses `ledgers`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from mapstate.protocol import transitions, upkeep, ways_back
from mapstate.protocol.ledger_record import Attempt, LedgerRecord, OperatorKind, now
from mapstate.protocol.ledgers import HeldLedger, Ledgers, change_all
from mapstate.protocol.seed_refusals import being_seeded
from mapstate.protocol.windows import PaneChange


class Ledger(HeldLedger):
    """The ledger of one state, for operations and the command line. Each change is one small write. Not thread-safe.

    None of them is made while a seed is not complete: SeedingError.
    """

    def rollback(self, txid: int | None = None) -> LedgerRecord:
        """Take the last batch or correction back, if it is ``txid``. See `ways_back.rollback_last`.

        Returns the ledger without it.
        """
        self._change(lambda before: ways_back.rollback_last(before, txid))
        return self.record

    def mark_part(self, batch_id: int) -> None:
        """Mark what counts of a batch that came in parts; the next `begin` refuses it. See `ways_back.take_back`."""
        self._change(lambda before: ways_back.take_back(before, batch_id, can_roll_back=False))

    def begin_operator(
        self, kind: OperatorKind, *, take_over: bool = False, seen: LedgerRecord | None = None, log_from: int = 0
    ) -> Attempt:
        """See `upkeep.begin_operator`."""
        return begin_operators([self], kind, [seen], take_over=take_over, log_from=log_from)[0]

    def commit_vacuum(self, txid: int, *, fenced: bool = True, held: int | None = None, removed: int = 0) -> None:
        """See `upkeep.commit_vacuum`. Raises StoreRestartedError if the store restarted since `begin_operator`."""
        self.close_fences()
        self._change(
            lambda before: upkeep.commit_vacuum(before, txid, fenced=fenced, held=held, removed=removed),
            same_incarnation=True,
        )

    def commit_forget(
        self, txid: int, *, operations: int, held: int | None = None, log: PaneChange | None = None
    ) -> None:
        """See `upkeep.commit_forget`. Raises StoreRestartedError if the store restarted since `begin_operator`."""
        self.close_fences()
        self._change(
            lambda before: upkeep.commit_forget(before, txid, operations=operations, held=held, log=log),
            same_incarnation=True,
        )

    def commit_correction(self, txid: int, *, keys_delta: int | None = None, panes: PaneChange | None = None) -> None:
        """See `commit_corrections`."""
        commit_corrections([self], [(txid, keys_delta, panes)])

    def give_up_operator(self, txid: int) -> None:
        """Leave a failed attempt behind, if it is still in flight, and close its fence. A query's driver goes on."""

        def given_up(before: LedgerRecord) -> LedgerRecord:
            is_own = before.in_flight is not None and before.in_flight.txid == txid
            return ways_back.give_up(before, before.session) if is_own else before

        self._change(given_up)

    def remember(self) -> LedgerRecord:
        """Load the ledger before records are read for `forget_dead` or `recount`. Raises StoreLostError."""
        record = _whole(self.load() or self.raise_lost())
        self.at_begin = self.known
        return record

    def forget_dead(self, seen: LedgerRecord, held: int | None = None) -> None:
        """See `upkeep.forget_dead`. Raises StoreRestartedError if the store restarted since `remember`."""
        self._change(lambda before: upkeep.forget_dead(before, seen, held), same_incarnation=True)

    def recount(self, counted: LedgerRecord, held: int) -> None:
        """See `upkeep.recount`. Raises StoreRestartedError if the store restarted since `remember`."""
        self._change(lambda before: upkeep.recount(before, counted, held), same_incarnation=True)

    def advance(self, to: int, *, take_over: bool = False, back_at: int | None = None) -> LedgerRecord:
        """See `upkeep.advance`; returns the ledger with it."""
        session = secrets.token_hex(8)
        self._change(lambda before: upkeep.advance(before, to, session, take_over=take_over, back_at=back_at))
        return self.record

    def _change(self, transition: Callable[[LedgerRecord], LedgerRecord], **how: bool) -> None:
        change_all([self], lambda before: [transition(_whole(before[0]))], **how)


def begin_operators(
    ledgers: Sequence[Ledger],
    kind: OperatorKind,
    seen: Sequence[LedgerRecord | None],
    *,
    take_over: bool = False,
    log_from: int = 0,
) -> list[Attempt]:
    """Begin an operator's attempt in each state of a commit domain, in one write. See `upkeep.begin_operator`."""
    sessions, at = [secrets.token_hex(8) for _ in ledgers], now()
    pairs: list[tuple[LedgerRecord, Attempt]] = []

    def begin(before: list[LedgerRecord]) -> list[LedgerRecord]:
        pairs[:] = [
            upkeep.begin_operator(
                _whole(record), session, kind, take_over=take_over, at=at, seen=known, log_from=log_from
            )
            for record, session, known in zip(before, sessions, seen, strict=True)
        ]
        return [after for after, _ in pairs]

    change_all(ledgers, begin, verify_fences=True)
    for ledger, (_, attempt) in zip(ledgers, pairs, strict=True):
        ledger.after_begin(attempt)
    return [attempt for _, attempt in pairs]


def commit_corrections(ledgers: Sequence[Ledger], done: Sequence[tuple[int, int | None, PaneChange | None]]) -> None:
    """Commit a correction in each state of a commit domain, in one write. See `upkeep.commit_correction`.

    ``done`` has txid, keys_delta and panes of each. Raises StoreRestartedError if the store restarted since the begin.
    """
    for ledger in ledgers:
        ledger.close_fences()

    def commit(before: list[LedgerRecord]) -> list[LedgerRecord]:
        return [
            upkeep.commit_correction(_whole(record), txid, keys_delta=keys_delta, panes=panes)
            for record, (txid, keys_delta, panes) in zip(before, done, strict=True)
        ]

    change_all(ledgers, commit, same_incarnation=True)


def _whole(ledger: LedgerRecord) -> LedgerRecord:
    """The ledger of a state that is not being seeded. Raises SeedingError."""
    if ledger.seed is not None:
        raise being_seeded(ledger)
    return ledger


def take_back(ledgers: Ledgers, batch_id: int, *, may_roll_back: bool = True) -> bool:
    """Undo what a batch that came in parts has written: one write per commit domain.

    Returns whether nothing is left. What cannot be rolled back in all states, or not in those that follow
    them, is marked, and the next `begin` refuses it.
    """
    can_all = may_roll_back and ways_back.can_all_roll_back(ledgers.records, batch_id)

    def taken_back(domain: list[int], before: list[Any]) -> list[LedgerRecord]:
        can = can_all and ways_back.can_all_roll_back(before, batch_id)  # a vacuum may have begun since
        for i, record in zip(domain, before, strict=True):
            transitions.check_session(record, ledgers.ledgers[i].session)
        return [ways_back.take_back(record, batch_id, can_roll_back=can) for record in before]

    ledgers.change(taken_back)
    return not any(ways_back.is_part(record) for record in ledgers.records)


def say_what_fenced(ledgers: Ledgers) -> None:
    """After a FencedError: raises a store's own trouble, if that and no other driver fenced this one."""
    for ledger in ledgers.ledgers:
        record = ledger.load() or ledger.raise_lost()
        attempt = None if ledger.at_begin is None else ledger.at_begin.record.in_flight
        ledger.check_not_put_back(record, None if attempt is None else attempt.batch_id)


def give_up(ledgers: Ledgers) -> None:
    """See `ways_back.give_up`: in all states, one write per commit domain."""
    ledgers.change(
        lambda domain, before: [
            ways_back.give_up(record, ledgers.ledgers[i].session) for i, record in zip(domain, before, strict=True)
        ]
    )
