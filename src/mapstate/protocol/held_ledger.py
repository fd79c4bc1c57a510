"""One ledger in its store as a driver last saw it, and the compare-and-set that changes one or several of them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec

from mapstate.capabilities import JointLedgers, Scan, SpreadFences, Swap
from mapstate.errors import (
    FencedError,
    MissingBatchesError,
    StaleBatchError,
    StoreRestartedError,
    StoreUnavailableError,
)
from mapstate.protocol import transitions
from mapstate.protocol.fences import Fences
from mapstate.protocol.ledger_record import Attempt, InFlight, LedgerRecord, OpenRequest, encode_ledger
from mapstate.protocol.opening import open_ledger, what_remains
from mapstate.protocol.refusals import lost_store, missing_batches
from mapstate.protocol.stored_ledger import decode_ledger, has_records, ledger_store, lost_ledger

T = TypeVar("T")

_TRIES = 8

_log = logging.getLogger("mapstate")


class VersionedLedger(NamedTuple):
    """A ledger as a store has it. ``version`` is the store's own, see `LedgerStore`."""

    record: LedgerRecord
    version: Any


class HeldLedger:
    """The ledger of one state and its fences, for one driver. It keeps the last ledger that it read or wrote.

    ``session`` is the driver's own, see `LedgerRecord`; "" before the driver opens the state. ``at_begin`` is the
    ledger after the begin of the driver's attempt, None before the first attempt.
    """

    def __init__(self, store: Any, state: str) -> None:
        self.state = state
        self.session = ""
        self.at_begin: VersionedLedger | None = None
        self._records = store
        self._store = ledger_store(store)
        self._fences = Fences(store, state) if isinstance(store, SpreadFences) else None
        self._cached: VersionedLedger | None = None
        self._own: InFlight | None = None  # the attempt as of `mark_begun`
        self._attempts = 0
        self._remains: tuple[str, ...] = ()

    @property
    def record(self) -> LedgerRecord:
        """The ledger as this driver last read or wrote it. Raises StoreLostError where there is none."""
        return (self._cached or self.load() or self.raise_lost()).record

    def load(self) -> VersionedLedger | None:
        """Read the ledger from the store; None where there is none."""
        stored = self._store.load()
        self._cached = None if stored is None else VersionedLedger(decode_ledger(stored[0], self.state), stored[1])
        return self._cached

    def opening(self, opening: OpenRequest) -> Callable[[LedgerRecord | None], LedgerRecord]:
        """`open_ledger` under a session of this driver's own. Once a batch begins, the log says `what_remains`."""
        self.session = opening.session or secrets.token_hex(8)
        own = msgspec.structs.replace(opening, session=self.session)

        def opened(before: LedgerRecord | None) -> LedgerRecord:
            after = open_ledger(before, own)
            self._remains = tuple(what_remains(before, after))
            return after

        return opened

    def nonce(self) -> str:
        """A random name that sorts after this driver's earlier ones; see `FenceToken`."""
        self._attempts += 1
        return f"{self._attempts:08x}{secrets.token_hex(8)}"

    def take(self, *, may_create: bool) -> VersionedLedger | None:
        """Return the cached ledger and clear the cache, because the next write may change the ledger."""
        taken = self._cached or self.load()
        if taken is None and not may_create:
            self.raise_lost()
        self._cached = None
        return taken

    def keep(self, ledger: VersionedLedger | None) -> None:
        """Cache a ledger that this driver has read or written."""
        self._cached = ledger

    def mark_begun(self) -> None:
        """Remember the cached ledger as that of the driver's attempt; the commit compares with it."""
        self.at_begin = self._cached
        self._own = None if self._cached is None else self._cached.record.in_flight

    def has_begun(self, result: object, *, accept_loss: bool) -> None:
        """After the ledger's write: remember the ledger for the commit, and advance fences that are apart from it."""
        self.mark_begun()
        for remains in self._remains:
            _log.warning("state %s: %s. See mapstate help operating#options-that-change", self.state, remains)
        self._remains = ()
        if isinstance(result, Attempt) and self._fences is not None:
            self._fences.advance_to(result.token, None if accept_loss else result.view.last)

    def is_stored(self, record: LedgerRecord) -> bool:
        """Whether the store holds exactly this ledger. No two drivers write equal ones."""
        stored = self.load()
        return stored is not None and stored.record == record

    def check_incarnation(self, ledger: VersionedLedger | None) -> None:
        """Raises StoreRestartedError if the attempt's own ledger may be of another incarnation of the store."""
        was, now = self.at_begin, ledger
        if was is None or now is None or was.version == now.version:
            return
        if was.record != now.record and (self._own is None or self._own != now.record.in_flight):
            return  # others changed it; a recount, which may hide another incarnation, leaves the attempt in it
        raise StoreRestartedError(
            f"the store of state {self.state!r} was started again, replaced by its replica or put back while a batch "
            "was written to it (or its keys were recounted meanwhile, which looks the same): it has the ledger, but "
            "may have lost records that it had acknowledged. The attempt is not committed, and can be begun anew.",
            state=self.state,
        )

    def check_not_put_back(self, ledger: LedgerRecord, batch_id: int | None = None) -> None:
        """Refuse a ledger from a copy of the store that is older than this driver's attempt.

        ``batch_id`` is that of a begin. Where the copy is of this driver's own time, the begin itself says what is
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
                raise missing_batches(ledger, batch_id, due)
        raise StoreRestartedError(
            f"the store of state {ledger.state!r} was put back to an older copy under a running driver: its ledger is "
            f"of epoch {ledger.epoch} with next txid {ledger.next_txid}, and this driver had epoch {known.epoch} and "
            f"{known.next_txid}. Nothing of this attempt counts. Start the query again: it goes on, or says what the "
            "copy lacks.",
            state=ledger.state,
        )

    def say_what_fenced(self) -> None:
        """After a FencedError: raises the store's own trouble, if that and no other driver fenced this one."""
        stored = self.load() or self.raise_lost()
        attempt = None if self.at_begin is None else self.at_begin.record.in_flight
        self.check_not_put_back(stored.record, None if attempt is None else attempt.batch_id)

    def verify_fences(self, before: LedgerRecord | None, after: LedgerRecord, *, accept_loss: bool) -> bool:
        """False if the ledger has changed since ``before``. Raises as `Fences.verify` does."""
        if self._fences is None:
            return True
        newest = (after if before is None else before).next_txid - 1
        try:
            self._fences.verify(newest, None if accept_loss else after.last_txid)
        except StaleBatchError:
            stored = self.load()
            if before == (None if stored is None else stored.record):
                raise
            return False
        return True

    def close_fences(self) -> None:
        """Before a commit; see `Fences.close`."""
        if self._fences is not None:
            self._fences.close()

    def swap(self, before: VersionedLedger | None, after: LedgerRecord) -> Swap:
        """The compare-and-set that replaces ``before``; None creates the ledger."""
        return Swap(self._store, encode_ledger(after), None if before is None else before.version, after.fence())

    def was_created_meanwhile(self) -> bool:
        """Whether another driver has created a ledger that was missing, and has written records.

        Raises LedgerLostError where there are records and still no ledger.
        """
        if not self._has_records():
            return False
        if self.load() is None:
            raise lost_ledger(self.state)
        return True

    def raise_lost(self) -> NoReturn:
        """Raises StoreLostError, with the advice that fits: with records, or without any."""
        raise lost_store(self.state, has_records=self._has_records())

    def _has_records(self) -> bool:
        """May read all keys of the store, so at most once per incarnation of a state."""
        return isinstance(self._records, Scan) and has_records(self._records)


class _Change(NamedTuple):
    ledger: HeldLedger
    before: VersionedLedger | None
    after: LedgerRecord


def change_all(
    ledgers: Sequence[HeldLedger],
    transition: Callable[[list[Any]], list[tuple[LedgerRecord, T]]],
    *,
    may_create: bool = False,
    same_incarnation: bool = False,
    verify_fences: bool = False,
    accept_loss: Sequence[bool] = (),
) -> list[T]:
    """Apply a transition to the present ledgers by compare-and-set, all of them in one write.

    The driver calls this. More than one ledger have to be of one commit domain; see `JointLedgers`. A write whose reply
    was lost is an idempotent retry: a ledger carries its driver's session, so an equal one in the store is its own.

    Args:
        ledgers: Ledgers of states, in the order in which ``transition`` gets their records.
        transition: Takes the records, None for a missing ledger; returns each record as it shall be, and a result.
        may_create: Create missing ledgers. Else a missing one raises StoreLostError.
        same_incarnation: Raise StoreRestartedError unless the store is the incarnation in which the attempt began.
        verify_fences: Write only where fences that are apart from the ledger fit it.
        accept_loss: For each ledger, skip the check that its fences were closed at the last commit.

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
        results = [result for _, result in changed]
        changes = [_Change(*change) for change in zip(ledgers, known, [record for record, _ in changed], strict=True)]
        for ledger, before, _ in changes if same_incarnation else ():
            ledger.check_incarnation(before)
        if all(before is not None and before.record is after for _, before, after in changes):
            for ledger, before, _ in changes:
                ledger.keep(before)
            return results
        if verify_fences and not _fences_fit(changes, accept_loss):
            continue
        try:
            versions = _swap(changes)
        except StoreUnavailableError as error:
            if error.facts.get("waited"):
                raise  # no lost reply: the store refused after a wait of its own
            unanswered = error
            if all([ledger.is_stored(after) for ledger, _, after in changes]):  # noqa: C419  load all
                return results
            continue
        if versions is not None:
            for (ledger, _, after), version in zip(changes, versions, strict=True):
                ledger.keep(VersionedLedger(after, version))
            return results
    if unanswered is not None:
        raise unanswered
    raise FencedError(
        f"the ledger of state {ledgers[0].state!r} could not be changed in {_TRIES} tries: others change it all the "
        "time. Nothing is counted on."
    )


def _apply(
    ledgers: Sequence[HeldLedger],
    known: Sequence[VersionedLedger | None],
    transition: Callable[[list[Any]], list[tuple[LedgerRecord, T]]],
) -> list[tuple[LedgerRecord, T]] | None:
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


def _fences_fit(changes: Sequence[_Change], accept_loss: Sequence[bool]) -> bool:
    return all(
        ledger.verify_fences(None if before is None else before.record, after, accept_loss=loss)
        for (ledger, before, after), loss in zip(changes, accept_loss, strict=True)
    )


def _swap(changes: Sequence[_Change]) -> list[Any] | None:
    """The new versions, or None where a ledger has changed meanwhile."""
    swaps = [ledger.swap(before, after) for ledger, before, after in changes]
    if len(swaps) > 1:
        together: JointLedgers = swaps[0].store
        return together.swap_all(swaps)
    version = swaps[0].store.swap(*swaps[0][1:])
    return None if version is None else [version]
