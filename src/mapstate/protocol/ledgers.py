"""A driver's hold on the ledgers of a topology: begun together, and committed together.

A state by itself is a topology of one. Fences are a part of the ledger's write on Redis, SQLite and in memory; what is
said of fences here is for stores that keep them apart (`SpreadFences`).

After any crash and any replay all states hold the same batches with the same contents:

- Ledgers of one commit domain (`JointLedgers`) change in one write, so they never differ.
- Ledgers of several commit domains are committed one after the other. A driver that dies in between leaves some of them
  one batch ahead. The next driver opens all ledgers, which fences the old driver everywhere. Only then it rolls back
  those that are ahead, and begins the batch anew in all of them. So these states have to be opaque.

Two simpler ways would be wrong. To keep the commits and repeat the batch in the other states alone: a replay may hold
other rows. To roll back before all are opened: the old driver may still live and commit the others.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import msgspec

from mapstate.capabilities import JointLedgers, Scan, SpreadFences, Swap
from mapstate.errors import MissingBatchesError, StaleBatchError, StoreUnavailableError
from mapstate.protocol import following, joint, refusals, transitions
from mapstate.protocol.fences import Fences
from mapstate.protocol.ledger_record import (
    AlreadyCommitted,
    Attempt,
    BatchPlan,
    Commit,
    InFlight,
    LedgerRecord,
    OpenRequest,
    encode_ledger,
    now,
)
from mapstate.protocol.opening import open_ledger, what_remains
from mapstate.protocol.stored_ledger import decode_ledger, has_records, ledger_store
from mapstate.protocol.windows import PaneChange
from mapstate.schema import OnGap

_TRIES = 8

_log = logging.getLogger("mapstate")


def commit_domains(stores: Sequence[Any]) -> list[list[int]]:
    """Group stores whose ledgers can change in one write. Each group holds indexes into ``stores``."""
    domains: dict[Any, list[int]] = {}
    for index, store in enumerate(stores):
        name = (type(store), store.commit_domain()) if isinstance(store, JointLedgers) else index
        domains.setdefault(name, []).append(index)
    return list(domains.values())


class Ledgers:
    """A driver's hold on all ledgers of a topology, from `open_and_begin` until a newer driver opens them.

    Not thread-safe. Sequences of arguments and results are in the order of the states. ``ledgers`` are those of the
    states, each by itself, and ``domains`` the places of those that change in one write.
    """

    def __init__(self, stores: Sequence[Any], openings: Sequence[OpenRequest], on_gaps: Sequence[OnGap]) -> None:
        self.ledgers = [
            HeldLedger(store, opening.state, opening, on_gap)
            for store, opening, on_gap in zip(stores, openings, on_gaps, strict=True)
        ]
        self.domains = commit_domains(stores)

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
        was; of several it may leave states that were opened, and nothing else. Raises as `open` and `begin` do.
        """
        self = cls(stores, openings, on_gaps)
        if len(self.domains) == 1:
            return self, self._begin(batch_id, plan, opens=True)
        records = [ledger.load() for ledger in self.ledgers]
        try:
            taken = [ledger.opened(record) for ledger, record in zip(self.ledgers, records, strict=True)]
            self._begun(taken, batch_id, plan)
        except MissingBatchesError:
            for ledger, record in zip(self.ledgers, records, strict=True):
                if record is None:
                    ledger.was_created_meanwhile()
            raise
        self.open()
        return self, self.begin(batch_id, plan)

    def open(self) -> None:
        """Take all states for the queries of the openings: one write per commit domain. It fences drivers before it.

        Raises the errors of `open_ledger`, and StoreError.
        """
        self.change(
            lambda domain, before: [self.ledgers[i].opened(record) for i, record in zip(domain, before, strict=True)],
            may_create=True,
        )

    @property
    def records(self) -> list[LedgerRecord]:
        """The ledgers as this driver last read or wrote them. Raises StoreLostError where one is gone."""
        return [ledger.record for ledger in self.ledgers]

    def begin(self, batch_id: int, plan: BatchPlan | None = None) -> list[Attempt | AlreadyCommitted]:
        """Start an attempt in all states: one write per commit domain.

        The results are all `Attempt` or all `AlreadyCommitted`. A state that is one batch ahead, or that counts the
        batch with another plan, is rolled back in the same write.

        Raises StoreLostError where a ledger is gone, RollbackError, and what `transitions.begin` refuses.
        """
        return self._begin(batch_id, plan)

    def commit(self, done: Sequence[Commit], panes: Sequence[PaneChange | None] = ()) -> None:
        """Make an attempt count in all states: one small write per commit domain, one after the other.

        ``panes`` are the changes of states with windows. After an error some domains may have committed, and the next
        `begin` rolls them back.

        Raises FencedError where a newer attempt or driver has taken over, and StoreLostError where a ledger is gone.
        Raises StoreRestartedError where a store may have lost records of the attempt: then it can be begun anew.
        """
        for ledger in self.ledgers:
            ledger.close_fences()
        changes = panes or [None] * len(done)

        def committed(domain: list[int], before: list[Any]) -> list[LedgerRecord]:
            apart = tuple(ledger.state for i, ledger in enumerate(self.ledgers) if i not in domain)
            commits = [msgspec.structs.replace(done[i], apart_from=apart) for i in domain]
            for i, record in zip(domain, before, strict=True):
                self.ledgers[i].check_not_put_back(record)
            return [
                transitions.commit(record, self.ledgers[i].session, commit, changes[i])
                for i, record, commit in zip(domain, before, commits, strict=True)
            ]

        self.change(committed, same_incarnation=True)

    def change(self, transition: Callable[[list[int], list[Any]], list[LedgerRecord]], **how: bool) -> None:
        """One write per commit domain: a transition of the ledgers of one, see `change_all`."""
        for domain in self.domains:
            change_all([self.ledgers[i] for i in domain], partial(transition, domain), **how)

    def _begin(self, batch_id: int, plan: BatchPlan | None, *, opens: bool = False) -> list[Attempt | AlreadyCommitted]:
        nonces, at = [ledger.nonce() for ledger in self.ledgers], now()
        results: list[Any] = [None] * len(self.ledgers)

        def begun(domain: list[int], before: list[Any]) -> list[LedgerRecord]:
            records = [None if i in domain else ledger.record for i, ledger in enumerate(self.ledgers)]
            for i, record in zip(domain, before, strict=True):
                records[i] = self.ledgers[i].opened(record) if opens else record
            every = self._begun(records, batch_id, plan, nonces=nonces, at=at)
            for i in domain:
                results[i] = every[i][1]
            return [every[i][0] for i in domain]

        for domain in self.domains:
            change_all([self.ledgers[i] for i in domain], partial(begun, domain), may_create=opens, verify_fences=True)
            for i in domain:
                self.ledgers[i].after_begin(results[i])
        return results

    def _begun(
        self, records: Sequence[Any], batch_id: int, plan: BatchPlan | None, *, nonces: Sequence[str] = (), at: str = ""
    ) -> list[tuple[LedgerRecord, Attempt | AlreadyCommitted]]:
        """The ledgers of all states after the begin of a batch, with the results. Writes nothing."""
        sessions, on_gaps = [ledger.session for ledger in self.ledgers], [ledger.on_gap for ledger in self.ledgers]
        for ledger, record in zip(self.ledgers, records, strict=True):
            ledger.check_not_put_back(record, batch_id)
        for record, session in zip(records, sessions, strict=True):
            transitions.check_session(record, session)
        reconciled = list(records) if len(records) == 1 else joint.reconcile(records, batch_id)
        if any(record.is_adopted for record in reconciled):
            following.check_adopted(reconciled, on_gaps)
            for ledger, record in zip(self.ledgers, reconciled, strict=True):
                if not ledger.adopts_unchecked:
                    following.check_start(record, batch_id, plan, ledger.on_gap)
        names = nonces or [""] * len(reconciled)
        results = [
            transitions.begin(record, session, batch_id, on_gap, nonce, at=at, plan=plan)
            for record, session, on_gap, nonce in zip(reconciled, sessions, on_gaps, names, strict=True)
        ]
        committed = [isinstance(result, AlreadyCommitted) for _, result in results]
        if batch_id == 0 and plan is not None and following.OF_DELTA in plan.start and not any(committed):
            following.check_first(plan)
        if any(committed) and not all(committed):
            has, lacks = reconciled[committed.index(True)].state, reconciled[committed.index(False)].state
            raise refusals.counted_in_part(has, lacks, batch_id)
        return results


class KnownLedger(NamedTuple):
    """A ledger as a store has it. ``version`` is the store's own, see `LedgerStore`."""

    record: LedgerRecord
    version: Any


class HeldLedger:
    """The ledger of one state as a session last read or wrote it, and its fences. `change_all` changes it.

    ``session`` is the driver's own, see `LedgerRecord`; "" for a tool, which has no ``opening``.
    ``at_begin`` is the ledger after the begin of the driver's attempt, None before the first attempt.
    """

    def __init__(self, store: Any, state: str, opening: OpenRequest | None = None, on_gap: OnGap = "refuse") -> None:
        self.state = state
        self.session = "" if opening is None else opening.session or secrets.token_hex(8)
        self.on_gap = on_gap
        self.adopts_unchecked = opening is not None and opening.on_new_owner == "adopt_unchecked"
        self.store = ledger_store(store)
        self.known: KnownLedger | None = None
        self.at_begin: KnownLedger | None = None
        self._in_flight: InFlight | None = None  # the attempt that `mark_begun` noted
        self._records = store
        self._fences = Fences(store, state) if isinstance(store, SpreadFences) else None
        self._opening = None if opening is None else msgspec.structs.replace(opening, session=self.session)
        self._attempts = 0
        self._remains: tuple[str, ...] = ()

    @property
    def record(self) -> LedgerRecord:
        """The ledger as this session last read or wrote it; read now if a write left it unknown.

        Raises StoreLostError where there is none.
        """
        return (self.load() if self.known is None else self.known.record) or self.raise_lost()

    def load(self) -> LedgerRecord | None:
        """Read the ledger from the store; None where there is none."""
        ledger = self.store.load()
        self.known = None if ledger is None else KnownLedger(decode_ledger(ledger[0], self.state), ledger[1])
        return None if self.known is None else self.known.record

    def opened(self, before: LedgerRecord | None) -> LedgerRecord:
        """`open_ledger` under a session of this driver's own. Once a batch begins, the log says `what_remains`."""
        assert self._opening is not None  # noqa: S101  a tool opens no ledger
        after = open_ledger(before, self._opening)
        self._remains = tuple(what_remains(before, after))
        return after

    def nonce(self) -> str:
        """A random name that sorts after this driver's earlier ones; see `FenceToken`."""
        self._attempts += 1
        return f"{self._attempts:08x}{secrets.token_hex(8)}"

    def take(self, *, may_create: bool) -> KnownLedger | None:
        """Return the known ledger, or a fresh read. It is forgotten, so that after a failed write it is read anew."""
        if self.known is None and self.load() is None and not may_create:
            self.raise_lost()
        taken, self.known = self.known, None
        return taken

    def mark_begun(self) -> None:
        """Remember the known ledger as that of the driver's attempt; the commit compares with it."""
        self.at_begin = self.known
        self._in_flight = None if self.known is None else self.known.record.in_flight

    def after_begin(self, result: Attempt | AlreadyCommitted) -> None:
        """After the ledger's write: remember the ledger for the commit, and advance fences that are apart from it."""
        self.mark_begun()
        for remains in self._remains:
            _log.warning("state %s: %s. See mapstate help operating#options-that-change", self.state, remains)
        self._remains = ()
        if isinstance(result, Attempt) and self._fences is not None:
            self._fences.advance_to(result.token, None if self.on_gap == "accept" else result.view.last)

    def check_incarnation(self, found: KnownLedger | None) -> None:
        """Raises StoreRestartedError if the attempt's own ledger may be of another incarnation of the store.

        If others have changed the ledger, the transition refuses it. A recount, which may hide another incarnation,
        leaves the attempt in it.
        """
        was = self.at_begin
        if was is None or found is None or was.version == found.version:
            return
        if was.record == found.record or (self._in_flight is not None and self._in_flight == found.record.in_flight):
            raise refusals.store_restarted(self.state)

    def check_not_put_back(self, ledger: LedgerRecord, batch_id: int | None = None) -> None:
        """Refuse a ledger from a copy of the store that is older than this driver's attempt.

        ``batch_id`` is that of a begin. If the copy was made during this driver's run, the begin itself says what is
        missing. Raises StoreRestartedError, and MissingBatchesError where the copy lacks batches.
        """
        known = None if self.at_begin is None else self.at_begin.record
        if known is None or not transitions.is_older(ledger, known):
            return
        if batch_id is not None:
            if ledger.session == self.session:
                return
            due = ledger.owners.get(known.owner, batch_id)
            if due < batch_id:
                raise refusals.missing_batches(ledger, batch_id, due)
        raise refusals.store_put_back(ledger, known)

    def verify_fences(self, before: KnownLedger | None, after: LedgerRecord) -> bool:
        """False if the ledger has changed since ``before``. Raises as `Fences.verify` does."""
        if self._fences is None:
            return True
        known = None if before is None else before.record
        try:
            newest = (after if known is None else known).next_txid - 1
            self._fences.verify(newest, None if self.on_gap == "accept" else after.last_txid)
        except StaleBatchError:
            if known == self.load():
                raise
            return False
        return True

    def close_fences(self) -> None:
        """Before a commit; see `Fences.close`."""
        if self._fences is not None:
            self._fences.close()

    def was_created_meanwhile(self) -> bool:
        """Whether another driver has created a ledger that was missing, and has written records.

        Raises LedgerLostError where there are records and still no ledger.
        """
        if not self._has_records():
            return False
        if self.load() is None:
            raise refusals.lost_ledger(self.state)
        return True

    def raise_lost(self) -> NoReturn:
        """Raises StoreLostError, with the advice that fits: with records, or without any."""
        raise refusals.lost_store(self.state, has_records=self._has_records())

    def _has_records(self) -> bool:
        """May read all keys of the store, so at most once per incarnation of a state."""
        return isinstance(self._records, Scan) and has_records(self._records)


def change_all(
    ledgers: Sequence[HeldLedger],
    transition: Callable[[list[Any]], list[LedgerRecord]],
    *,
    may_create: bool = False,
    same_incarnation: bool = False,
    verify_fences: bool = False,
) -> None:
    """Apply a transition to the present ledgers by compare-and-set, all of them in one write.

    The driver calls this. More than one ledger have to be of one commit domain; see `JointLedgers`. A write whose reply
    was lost is an idempotent retry: a ledger carries its driver's session, so an equal one in the store is its own.

    Args:
        ledgers: Ledgers of states, in the order in which ``transition`` gets their records.
        transition: Takes the records, None for a missing ledger; returns each record as it shall be. Nothing is written
            if it returns the very objects that it got. Its last call is the one that counts.
        may_create: Create missing ledgers. Else a missing one raises StoreLostError.
        same_incarnation: Raise StoreRestartedError unless the store is the incarnation in which the attempt began.
        verify_fences: Write only where fences that are apart from the ledger fit it.

    Raises:
        FencedError: Others changed the ledgers in each of eight tries.
        StoreUnavailableError: No try got an answer.

    """
    unanswered: StoreUnavailableError | None = None
    for _ in range(_TRIES):
        known = [ledger.take(may_create=may_create) for ledger in ledgers]
        changed = _apply(ledgers, known, transition)
        if changed is None:
            continue
        changes = [*zip(ledgers, known, changed, strict=True)]
        for ledger, before, _after in changes if same_incarnation else ():
            ledger.check_incarnation(before)
        if all(before is not None and before.record is after for _, before, after in changes):
            for ledger, before, _after in changes:
                ledger.known = before
            return
        if verify_fences and not all(ledger.verify_fences(before, after) for ledger, before, after in changes):
            continue
        try:
            versions = _swap(changes)
        except StoreUnavailableError as error:
            if error.facts.get("waited"):
                raise  # no lost reply: the store refused after a wait of its own
            unanswered = error
            if all([ledger.load() == after for ledger, _, after in changes]):  # noqa: C419  load all
                return
            continue
        if versions is not None:
            for (ledger, _, after), version in zip(changes, versions, strict=True):
                ledger.known = KnownLedger(after, version)
            return
    if unanswered is not None:
        raise unanswered
    raise refusals.changed_all_the_time(ledgers[0].state, _TRIES)


def _apply(
    ledgers: Sequence[HeldLedger],
    known: Sequence[KnownLedger | None],
    transition: Callable[[list[Any]], list[LedgerRecord]],
) -> list[LedgerRecord] | None:
    """The ledgers after a transition; None where another driver has created one of them meanwhile.

    A lost ledger explains missing batches better than the transition, so it is looked for first.
    """
    missing = [ledger for ledger, before in zip(ledgers, known, strict=True) if before is None]
    try:
        changed = transition([None if before is None else before.record for before in known])
    except MissingBatchesError:
        if not any([ledger.was_created_meanwhile() for ledger in missing]):  # noqa: C419  ask of all
            raise
        return None
    return None if any([ledger.was_created_meanwhile() for ledger in missing]) else changed  # noqa: C419  ask of all


def _swap(changes: Sequence[tuple[HeldLedger, KnownLedger | None, LedgerRecord]]) -> list[Any] | None:
    """The new versions, or None where a ledger has changed meanwhile."""
    swaps = [
        Swap(ledger.store, encode_ledger(after), None if before is None else before.version, after.fence())
        for ledger, before, after in changes
    ]
    if len(swaps) > 1:
        together: JointLedgers = swaps[0].store
        return together.swap_all(swaps)
    version = swaps[0].store.swap(*swaps[0][1:])
    return None if version is None else [version]
