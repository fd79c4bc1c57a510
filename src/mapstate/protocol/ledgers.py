"""A driver's hold on the ledgers of a topology: begun together, and committed together.

After any crash and any replay all states hold the same batches with the same contents:

- Ledgers of one commit domain (`JointLedgers`) change in one write, so they never differ.
- Ledgers of several commit domains are committed one after the other. A driver that dies in between leaves some of them
  one batch ahead. The next driver opens all ledgers, which fences the old driver everywhere. Only then it rolls back
  those that are ahead, and begins the batch anew in all of them. So these states have to be opaque.

Two simpler ways would be wrong. To keep the commits and repeat the batch in the other states alone: a replay may hold
other rows. To roll back before all are opened: the old driver may still live and commit the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from mapstate.capabilities import JointLedgers
from mapstate.errors import MissingBatchesError
from mapstate.protocol import following, joint, transitions, ways_back
from mapstate.protocol.held_ledger import HeldLedger, change_all
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, Commit, LedgerRecord, OpenRequest, now
from mapstate.protocol.plans import BatchPlan
from mapstate.protocol.windows import PaneChange
from mapstate.schema import OnGap

_Open = Callable[[LedgerRecord | None], LedgerRecord]


def commit_domains(stores: Sequence[Any]) -> list[list[int]]:
    """Group stores whose ledgers can change in one write. Each group holds indexes into ``stores``."""
    domains: dict[Any, list[int]] = {}
    for index, store in enumerate(stores):
        name = (type(store), store.commit_domain()) if isinstance(store, JointLedgers) else index
        domains.setdefault(name, []).append(index)
    return list(domains.values())


class Ledgers:
    """A driver's hold on all ledgers of a topology, as `Ledger` is on one. Not thread-safe.

    Sequences of arguments and results are in the order of the states.
    """

    def __init__(self, stores: Sequence[Any], openings: Sequence[OpenRequest], on_gaps: Sequence[OnGap]) -> None:
        self.ledgers = [HeldLedger(store, opening.state) for store, opening in zip(stores, openings, strict=True)]
        self._domains = commit_domains(stores)
        self._on_gaps = on_gaps
        self._unchecked = [opening.on_new_owner == "adopt_unchecked" for opening in openings]
        self._opens = [ledger.opening(opening) for ledger, opening in zip(self.ledgers, openings, strict=True)]

    @classmethod
    def open_and_begin(
        cls,
        stores: Sequence[Any],
        openings: Sequence[OpenRequest],
        batch_id: int,
        on_gaps: Sequence[OnGap],
        plan: BatchPlan | None = None,
    ) -> tuple[Ledgers, list[Attempt | AlreadyCommitted]]:
        """Take all states, and begin a batch in all of them or in none; see `begin`.

        This is one write for a single commit domain, else two per domain. A refused batch leaves a single domain as it
        was. Of several domains it may leave states that were opened, and nothing else.
        Raises as `Ledger.open_and_begin` and `begin` do.
        """
        self = cls(stores, openings, on_gaps)
        if len(self._domains) == 1:
            return self, self._begin(batch_id, self._opens, plan)
        records = self._load()
        try:
            self._begun([opens(record) for opens, record in zip(self._opens, records, strict=True)], batch_id, plan)
        except MissingBatchesError:
            for ledger, record in zip(self.ledgers, records, strict=True):
                if record is None:
                    ledger.was_created_meanwhile()
            raise
        for domain in self._domains:
            change_all(self._of(domain), partial(self._opened, domain), may_create=True)
        return self, self.begin(batch_id, plan)

    @property
    def records(self) -> list[LedgerRecord]:
        """The ledgers as this driver last read or wrote them."""
        return [ledger.record for ledger in self.ledgers]

    def begin(self, batch_id: int, plan: BatchPlan | None = None) -> list[Attempt | AlreadyCommitted]:
        """Start an attempt in all states: one write per commit domain.

        The results are all `Attempt` or all `AlreadyCommitted`. A state that is one batch ahead, or that counts the
        batch with another plan, is rolled back in the same write. Raises as `Ledger.begin` does, and RollbackError.
        """
        return self._begin(batch_id, None, plan)

    def commit(self, done: Sequence[Commit], panes: Sequence[PaneChange | None] = ()) -> None:
        """Make an attempt count in all states: one write per commit domain, one after the other.

        ``panes`` are the changes of states with windows. Raises as `Ledger.commit` does. Then some domains may have
        committed, and the next `begin` rolls them back.
        """
        for ledger in self.ledgers:
            ledger.close_fences()
        done = [
            msgspec.structs.replace(commit, apart_from=self._apart_from(index)) for index, commit in enumerate(done)
        ]
        changes = panes or [None] * len(done)
        for domain in self._domains:
            change_all(self._of(domain), partial(self._committed, domain, done, changes), same_incarnation=True)

    def take_back(self, batch_id: int, *, may_roll_back: bool = True) -> bool:
        """Undo what a batch that came in parts has written: one write per commit domain.

        Returns whether nothing is left. What cannot be rolled back in all states, or not in those that follow
        them, is marked, and the next `begin` refuses it.
        """
        can = may_roll_back and ways_back.can_all_roll_back(self.records, batch_id)
        for domain in self._domains:
            change_all(self._of(domain), partial(self._taken_back, domain, batch_id, can))
        return not any(ways_back.is_part(record) for record in self.records)

    def say_what_fenced(self) -> None:
        for ledger in self.ledgers:
            ledger.say_what_fenced()

    def give_up(self) -> None:
        """See `ways_back.give_up`: in all states, one write per commit domain."""
        for domain in self._domains:
            change_all(self._of(domain), partial(self._given_up, domain))

    def _begin(
        self, batch_id: int, opens: Sequence[_Open] | None, plan: BatchPlan | None
    ) -> list[Attempt | AlreadyCommitted]:
        nonces, at = [ledger.nonce() for ledger in self.ledgers], now()
        accept_loss = [on_gap == "accept" for on_gap in self._on_gaps]
        by_index: dict[int, Attempt | AlreadyCommitted] = {}
        for domain in self._domains:

            def begin(before: list[Any], domain: list[int] = domain) -> list[tuple[LedgerRecord, Any]]:
                records = [None if index in domain else ledger.record for index, ledger in enumerate(self.ledgers)]
                for index, record in zip(domain, before, strict=True):
                    records[index] = record if opens is None else opens[index](record)
                every = self._begun(records, batch_id, plan, nonces=nonces, at=at)
                return [every[index] for index in domain]

            attempts = change_all(
                self._of(domain),
                begin,
                may_create=opens is not None,
                verify_fences=True,
                accept_loss=[accept_loss[index] for index in domain],
            )
            for index, result in zip(domain, attempts, strict=True):
                self.ledgers[index].has_begun(result, accept_loss=accept_loss[index])
                by_index[index] = result
        return [by_index[index] for index in range(len(self.ledgers))]

    def _begun(
        self, records: Sequence[Any], batch_id: int, plan: BatchPlan | None, *, nonces: Sequence[str] = (), at: str = ""
    ) -> list[tuple[LedgerRecord, Attempt | AlreadyCommitted]]:
        """The ledgers of all states after the begin of a batch, with the results. Writes nothing."""
        sessions = [ledger.session for ledger in self.ledgers]
        for ledger, record in zip(self.ledgers, records, strict=True):
            ledger.check_not_put_back(record, batch_id)
        reconciled = joint.reconcile(records, sessions, batch_id)
        if any(record.is_adopted for record in reconciled):
            following.check_adopted(reconciled, self._on_gaps)
            for record, on_gap, unchecked in zip(reconciled, self._on_gaps, self._unchecked, strict=True):
                if not unchecked:
                    following.check_start(record, batch_id, plan, on_gap)
        names = nonces or [""] * len(reconciled)
        results = [
            transitions.begin(record, session, batch_id, on_gap, nonce, at=at, plan=plan)
            for record, session, on_gap, nonce in zip(reconciled, sessions, self._on_gaps, names, strict=True)
        ]
        committed = [isinstance(result, AlreadyCommitted) for _, result in results]
        if any(committed) and not all(committed):
            has, lacks = reconciled[committed.index(True)].state, reconciled[committed.index(False)].state
            raise MissingBatchesError(
                f"Spark brings batch {batch_id}, which state {has!r} counts and state {lacks!r} of the same topology "
                "does not: another program wrote one of them, or it was restored alone. Nothing was written. Restore "
                "all of them from one moment and rewind the checkpoint, or reset them all.",
                state=lacks,
                expected=batch_id,
            )
        return results

    def _opened(self, domain: Sequence[int], before: Sequence[Any]) -> list[tuple[LedgerRecord, None]]:
        return [(self._opens[index](record), None) for index, record in zip(domain, before, strict=True)]

    def _taken_back(
        self, domain: Sequence[int], batch_id: int, can: bool, before: Sequence[Any]
    ) -> list[tuple[LedgerRecord, None]]:
        can = can and ways_back.can_all_roll_back(before, batch_id)  # a vacuum may have begun since
        for index, record in zip(domain, before, strict=True):
            transitions.check_session(record, self.ledgers[index].session)
        return [(ways_back.take_back(record, batch_id, can_roll_back=can), None) for record in before]

    def _given_up(self, domain: Sequence[int], before: Sequence[Any]) -> list[tuple[LedgerRecord, None]]:
        return [
            (ways_back.give_up(record, self.ledgers[index].session), None)
            for index, record in zip(domain, before, strict=True)
        ]

    def _committed(
        self, domain: Sequence[int], done: Sequence[Commit], panes: Sequence[Any], before: Sequence[Any]
    ) -> list[tuple[LedgerRecord, None]]:
        for index, record in zip(domain, before, strict=True):
            self.ledgers[index].check_not_put_back(record)
        return [
            (transitions.commit(record, self.ledgers[index].session, done[index], panes[index]), None)
            for index, record in zip(domain, before, strict=True)
        ]

    def _apart_from(self, index: int) -> tuple[str, ...]:
        """The states that are committed in another write than state ``index``."""
        own = next(domain for domain in self._domains if index in domain)
        return tuple(ledger.record.state for other, ledger in enumerate(self.ledgers) if other not in own)

    def _of(self, domain: Sequence[int]) -> list[HeldLedger]:
        return [self.ledgers[index] for index in domain]

    def _load(self) -> list[LedgerRecord | None]:
        loaded = [ledger.load() for ledger in self.ledgers]
        return [None if stored is None else stored.record for stored in loaded]
