"""A driver's hold on the ledgers of states that it seeds: the rules of `mapstate.protocol.seeding` as writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mapstate.protocol import seeding
from mapstate.protocol.ledger_record import Attempt, BatchPlan, Commit, LedgerRecord, now
from mapstate.protocol.ledgers import Ledgers, change_all
from mapstate.protocol.transitions import check_session


class SeedLedgers(Ledgers):
    """As `Ledgers`, from `open_seeds` to `end`; then it goes on as any. ``at`` is a state's place."""

    def open_seeds(self, plans: Sequence[str], *, listed: Sequence[int] = (), initial: bool = False) -> None:
        """Take all states and begin their seeds, or go on with them. Raises as `open_ledger` and `check_together` do.

        ``listed`` is how many entries the list of each state has, and () without lists; ``initial`` is whether rows of
        another place are a part of the history.

        This is one write for a single commit domain, else two per domain: before all are taken, an older driver may end
        its seeds, so none is begun anew. Of several domains a refused seed may leave states that were opened, and seeds
        of states that held nothing.
        """
        counts = listed or [0] * len(plans)
        seeds = [
            partial(seeding.open_seed, plan=plan, listed=count, initial=initial)
            for plan, count in zip(plans, counts, strict=True)
        ]
        begun, opens = partial(self._begun_seeds, seeds), len(self.domains) == 1

        def taken(domain: list[int], before: list[Any]) -> list[LedgerRecord]:
            opened = [self.ledgers[i].opened(record) for i, record in zip(domain, before, strict=True)]
            return [
                seeds[i](record) if record.seed is None else record for i, record in zip(domain, opened, strict=True)
            ]

        def together(domain: list[int], before: list[Any]) -> list[LedgerRecord]:
            records = [None if i in domain else ledger.record for i, ledger in enumerate(self.ledgers)]
            for i, record in zip(domain, before, strict=True):
                records[i] = self.ledgers[i].opened(record) if opens else record
            every = begun(records)
            return [every[i] for i in domain]

        if not opens:
            begun([ledger.opened(ledger.load()) for ledger in self.ledgers])  # which raises before anything is written
            self.change(taken, may_create=True)
        self.change(together, may_create=opens, verify_fences=True)

    def _begun_seeds(
        self, seeds: Sequence[Callable[[LedgerRecord], LedgerRecord]], records: Sequence[Any]
    ) -> list[LedgerRecord]:
        """The ledgers of all states, which have been opened, with their seeds. Writes nothing."""
        for ledger, record in zip(self.ledgers, records, strict=True):
            check_session(record, ledger.session)
        after = [seed(record) for seed, record in zip(seeds, records, strict=True)]
        seeding.check_together(after)
        return after

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
        """Batch 0 counts in all states: one write per commit domain, one after the other. See `seeding.end_seed`.

        Raises before the first one where any state lacks something.
        """

        def ended(domain: list[int], before: list[Any]) -> list[LedgerRecord]:
            records_of, every = dict(zip(domain, before, strict=True)), list[LedgerRecord]()
            for i, (ledger, ended) in enumerate(zip(self.ledgers, done, strict=True)):
                record = records_of[i] if i in records_of else ledger.load() or ledger.raise_lost()
                every.append(seeding.end_seed(record, ledger.session, plan, ended))
            return [every[i] for i in domain]

        self.change(ended)
