"""A driver's hold on the ledgers of states that it seeds: the rules of `mapstate.protocol.seeding` as writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mapstate.protocol import seeding
from mapstate.protocol.ledger_record import Attempt, BatchPlan, Commit, LedgerRecord, now
from mapstate.protocol.ledgers import Ledgers, change_all


class SeedLedgers(Ledgers):
    """As `Ledgers`, from `open_seeds` to `end`; then it goes on as any. ``at`` is a state's place."""

    def open_seeds(self, plans: Sequence[str], *, listed: int = 0) -> None:
        """Take all states and begin their seeds, or go on with them. Raises as `open_ledger` and `open_seed` do."""
        self.change(
            lambda domain, before: [
                seeding.open_seed(self.ledgers[i].opened(record), plans[i], listed=listed)
                for i, record in zip(domain, before, strict=True)
            ],
            may_create=True,
            verify_fences=True,
        )

    def staged(self, at: int, stage: str, **found: Any) -> None:
        """See `seeding.staged`."""
        held = self.ledgers[at]
        change_all([held], lambda before: [seeding.staged(before[0], held.session, stage, **found)])

    def begin_bucket(self, at: int) -> Attempt:
        """See `seeding.begin_bucket`."""
        held, nonce, began = self.ledgers[at], self.ledgers[at].nonce(), now()
        attempts: list[Attempt] = []

        def begun(before: Sequence[LedgerRecord]) -> list[LedgerRecord]:
            held.check_not_put_back(before[0], 0)
            after, attempt = seeding.begin_bucket(before[0], held.session, nonce, at=began)
            attempts.append(attempt)
            return [after]

        change_all([held], begun, verify_fences=True)
        held.after_begin(attempts[-1])
        return attempts[-1]

    def commit_bucket(self, at: int, txid: int, **done: Any) -> None:
        """See `seeding.commit_bucket`. Raises StoreRestartedError, too: then the bucket can be begun anew."""
        held = self.ledgers[at]
        held.close_fences()

        def committed(before: Sequence[LedgerRecord]) -> list[LedgerRecord]:
            held.check_not_put_back(before[0])
            return [seeding.commit_bucket(before[0], held.session, txid, **done)]

        change_all([held], committed, same_incarnation=True)

    def end(self, plan: BatchPlan, done: Sequence[Commit]) -> None:
        """Batch 0 counts in all states: one write per commit domain, one after the other. See `seeding.end_seed`."""
        self.change(
            lambda domain, before: [
                seeding.end_seed(record, self.ledgers[i].session, plan, done[i])
                for i, record in zip(domain, before, strict=True)
            ]
        )
