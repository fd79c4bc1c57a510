"""The ledger in its store: the transitions of `mapstate.transitions`, run by compare-and-set.

One small write when a batch begins and one when it commits. Used by the driver alone; readers read
the record with `read_ledger`.
"""

from __future__ import annotations

import datetime as dt
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import msgspec

from mapstate import transitions
from mapstate.backing_map import FenceToken, IBackingMap, JointLedgers, LedgerStore, Scan, SpreadFences, Swap
from mapstate.batch_report import is_time
from mapstate.errors import (
    CorruptLedgerError,
    FencedError,
    LedgerLostError,
    MapStateError,
    MissingBatchesError,
    StaleBatchError,
    StateNotFoundError,
    StoreLostError,
    StoreRestartedError,
    StoreUnavailableError,
    UsageError,
)
from mapstate.fences import Fences
from mapstate.keys import KeyCodec, KeyField
from mapstate.serializers import RecordCodec, serializer
from mapstate.transitions import (
    AlreadyCommitted,
    BatchPlan,
    Begun,
    Commit,
    Field,
    LedgerRecord,
    OnGap,
    Opening,
    StateType,
)
from mapstate.values import cut, shown

__all__ = [
    "LEDGER_KEY",
    "KeptByPut",
    "Ledger",
    "change_all",
    "check_page_size",
    "clock_txid",
    "decode_ledger",
    "encode_ledger",
    "has_records",
    "lost_ledger",
    "read_ledger",
    "record_pages",
]

T = TypeVar("T")

LEDGER_KEY = "\\ledger"
"""Where a store that offers only `IBackingMap` keeps the ledger; no encoded key can be equal to it."""

_EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC).timestamp()
_NO_NUMBER = 1 << 63
_TRIES = 8
_LOOK = 10_000  # keys on a page

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LedgerRecord)


def clock_txid() -> int:
    """Where a new ledger's txids start: deciseconds since 2026.

    Batches are slower than ten a second in the long run, so no earlier life of the same name can have
    given out this txid.
    """
    return max(0, int((time.time() - _EPOCH) * 10))


def now() -> str:
    """The time as the ledger writes it."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def encode_ledger(record: LedgerRecord) -> bytes:
    """The ledger as a store keeps it: JSON, readable in the store's own shell."""
    return _encoder.encode(record)


def decode_ledger(data: bytes, state: str) -> LedgerRecord:
    """The ledger from a store. Raises CorruptLedgerError for anything else, also for one that contradicts itself."""
    try:
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise _corrupt(state, cut(error)) from error
    if record.format != transitions.FORMAT or record.state != state:
        raise CorruptLedgerError(
            f"found the ledger of state {shown(record.state)} in format {record.format} where that of {state!r} in "
            f"format {transitions.FORMAT} was expected. Nothing was written.",
            state=state,
        )
    flaw = _flaw(record) or _schema_flaw(record.serializer, record.type, record.keys, record.fields, record.layouts)
    if flaw is not None:
        raise _corrupt(state, flaw)
    return record


def _corrupt(state: str, why: str) -> CorruptLedgerError:
    return CorruptLedgerError(
        f"the ledger of state {state!r} cannot be read ({why}): something else wrote there, or a newer "
        "mapstate did. Nothing was written. Restore the ledger and the records from one backup.",
        state=state,
    )


def _flaw(record: LedgerRecord) -> str | None:
    """What in a ledger's numbers no event can have left there; None where all is well."""
    last, at, next_txid = record.last_txid, record.in_flight, record.next_txid
    commits = [one for one in (record.committed, record.previous) if one is not None]
    numbers = [record.epoch, record.first_txid, next_txid, record.floor, record.rewrites, *record.owners.values()]
    numbers += [number for one in commits for number in (one.txid, one.batch_id)]
    numbers += [] if at is None else [at.txid, at.epoch, at.batch_id or 0]
    bounds = [bound for span in record.dead for bound in span]
    counts = [count for _, count in record.layouts]
    begun = [one.txid for one in (*commits, at) if one is not None] + ([] if last is None else [last])
    times = ["" if at is None else at.at, *(one.at for one in commits)]
    for flaw, what in (
        (record.owner not in record.owners, "its owner is not among its owners"),
        (min(numbers) < 0 or max(numbers) >= _NO_NUMBER, "a number is out of range"),
        (max(begun, default=-1) >= next_txid, "a txid is above the next one"),
        (bounds != sorted(bounds) or any(low > high for low, high in record.dead), "its dead txids are in disorder"),
        (bool(bounds) and (last is None or bounds[0] < 0 or bounds[-1] >= last), "a dead txid is above the last one"),
        (len(set(record.fields)) < len(record.fields), "a field is there twice"),
        (not counts or counts != sorted(counts) or counts[0] < 0, "its layouts are in disorder"),
        (bool(counts) and counts[-1] != len(record.fields), "its last layout does not have all fields"),
        (not all(map(is_time, times)), "a time is not ISO 8601 with an offset"),
    ):
        if flaw:
            return what
    return None


@lru_cache(maxsize=64)  # a reader decodes each batch's ledger, and its schema is the same
def _schema_flaw(
    form: str,
    state_type: StateType,
    keys: tuple[KeyField, ...],
    fields: tuple[Field, ...],
    layouts: tuple[tuple[int, int], ...],
) -> str | None:
    """Why nobody can read keys or records of this schema; None where all is well."""
    try:
        chosen = serializer(form)
        KeyCodec(keys, native=chosen.native)
        RecordCodec(chosen, "", state_type, fields, layouts)
    except (MapStateError, ValueError, TypeError, RecursionError) as error:
        return cut(error)
    return None


def read_ledger(store: Any, state: str) -> LedgerRecord:
    """The ledger as it is now, for readers and tools.

    Raises StateNotFoundError, or LedgerLostError where there are records: to tell, all keys may be listed.
    """
    found = ledger_store(store).load()
    if found is None:
        if isinstance(store, Scan) and has_records(store):
            raise lost_ledger(state)
        raise StateNotFoundError(
            f"there is no state {state!r} here: neither a ledger nor a record was found. Either no batch of it has run "
            "yet, or the store was emptied; or look at the name, the database number, the key prefix and the layout.",
            state=state,
        )
    return decode_ledger(found[0], state)


def lost_ledger(state: str) -> LedgerLostError:
    """There are records, and no ledger that says which of them count."""
    return LedgerLostError(
        f"state {state!r} has records but no ledger: it was deleted, evicted or expired. Nothing was written. Stop the "
        "query. Restore ledger and records from one backup; or give the records a ledger with mapstate adopt; or "
        "remove them with mapstate drop. See docs/operating.md#a-lost-ledger",
        state=state,
    )


def check_page_size(page_size: int) -> None:
    """Raises UsageError for a page of nothing."""
    if page_size < 1:
        raise UsageError(f"page_size is the number of keys on a page, at least 1, not {page_size}")


def record_pages(store: Scan, page_size: int) -> Iterator[list[Any]]:
    """The keys of all records of a store, a page at a time: at least those that are there when this is called.

    Raises UsageError for a page of nothing.
    """
    check_page_size(page_size)
    pages = ([key for key in page if key != LEDGER_KEY] for page in store.scan(page_size))
    return (page for page in pages if page)


def has_records(store: Scan) -> bool:
    """Whether the store holds any record of its state. Where it holds none, all keys may have to be listed."""
    return next(record_pages(store, _LOOK), None) is not None


class KeptByPut:
    """A ledger kept through get and put, for a store that offers no compare-and-set.

    Missing guarantee: two drivers that open the state at the same moment are not told apart.
    """

    def __init__(self, backing: IBackingMap[str, bytes]) -> None:
        self._backing = backing

    def load(self) -> tuple[bytes, bytes] | None:
        """See `LedgerStore.load`; the version is the record itself."""
        record = self._backing.multi_get([LEDGER_KEY])[0]
        return None if record is None else (record, record)

    def swap(self, record: bytes, expected: bytes | None, fence: FenceToken) -> bytes | None:  # noqa: ARG002
        """See `LedgerStore.swap`; compares and then puts, in two steps, and has no fence to move."""
        if self._backing.multi_get([LEDGER_KEY])[0] != expected:
            return None
        self._backing.multi_put([LEDGER_KEY], [record])
        return record


def ledger_store(store: Any) -> LedgerStore:
    """The store's own ledger, or one kept by get and put."""
    return store if isinstance(store, LedgerStore) else KeptByPut(store)


class Ledger:
    """A driver's hold on the ledger of one state, from `open` until a newer driver opens it.

    Not thread-safe: one streaming query runs one batch at a time.
    """

    def __init__(self, store: Any, state: str) -> None:
        self._records = store
        self._store = ledger_store(store)
        self._state = state
        self._fences = Fences(store, state) if isinstance(store, SpreadFences) else None
        self.session = ""
        self._attempts = 0
        self._known: tuple[LedgerRecord, Any] | None = None
        self._begun: tuple[LedgerRecord, Any] | None = None

    @classmethod
    def open(cls, store: Any, opening: Opening) -> Ledger:
        """Takes the state for the query ``opening.owner``; fences every driver before it.

        Raises the errors of `transitions.open_ledger`, and StoreError.
        """
        self = cls(store, opening.state)
        self._change(self.opening(opening), may_create=True)
        self._begun = self._known
        return self

    @classmethod
    def open_and_begin(
        cls, store: Any, opening: Opening, batch_id: int, on_gap: OnGap = "refuse", plan: BatchPlan | None = None
    ) -> tuple[Ledger, Begun | AlreadyCommitted]:
        """`open` and `begin` in one write: a batch that is refused leaves everything as it was."""
        self = cls(store, opening.state)
        opened, nonce, at = self.opening(opening), self.nonce(), now()

        def first_write(found: LedgerRecord | None) -> tuple[LedgerRecord, Begun | AlreadyCommitted]:
            return transitions.begin(opened(found)[0], self.session, batch_id, on_gap, nonce, at=at, plan=plan)

        return self, self._begin(first_write, accept_loss=on_gap == "accept", may_create=True)

    def opening(self, opening: Opening) -> Callable[[LedgerRecord | None], tuple[LedgerRecord, None]]:
        """See `transitions.open_ledger`, under a session of this driver's own."""
        self.session = opening.session or secrets.token_hex(8)
        own = msgspec.structs.replace(opening, session=self.session)
        return lambda found: (transitions.open_ledger(found, own), None)

    def nonce(self) -> str:
        """A random name that stands behind those before it; see `FenceToken`."""
        self._attempts += 1
        return f"{self._attempts:08x}{secrets.token_hex(8)}"

    @property
    def record(self) -> LedgerRecord:
        """The ledger as this driver last read or wrote it."""
        return self._current()[0]

    def begin(self, batch_id: int, on_gap: OnGap = "refuse", plan: BatchPlan | None = None) -> Begun | AlreadyCommitted:
        """Starts an attempt: one small write. See `transitions.begin` for what it refuses.

        Raises StoreLostError when the ledger is gone.
        """
        nonce, at = self.nonce(), now()

        def begin(found: LedgerRecord) -> tuple[LedgerRecord, Begun | AlreadyCommitted]:
            self.check_not_put_back(found, batch_id)
            return transitions.begin(found, self.session, batch_id, on_gap, nonce, at=at, plan=plan)

        return self._begin(begin, accept_loss=on_gap == "accept")

    def _begin(
        self,
        transition: Callable[[Any], tuple[LedgerRecord, T]],
        *,
        accept_loss: bool = False,
        may_create: bool = False,
    ) -> T:
        """A write that begins an attempt, and the fences that are apart from it, if the store has such."""
        begun = self._change(transition, may_create=may_create, looks=True, accept_loss=accept_loss)
        self.has_begun(begun, accept_loss=accept_loss)
        return begun

    def has_begun(self, begun: object, *, accept_loss: bool) -> None:
        """After the ledger's write: which ledger the commit has to find, and the fences that are apart from it."""
        self._begun = self._known
        if self._fences is not None and isinstance(begun, Begun):
            self._fences.raise_to(begun.token, None if accept_loss else begun.view.last)

    def commit(self, done: Commit) -> None:
        """Makes the attempt ``done.txid`` count, all of it at once: one small write.

        Raises FencedError where a newer attempt or driver has taken over, StoreLostError where the
        ledger is gone, and StoreRestartedError where the store may have lost what the attempt wrote: then
        it can be begun anew.
        """
        self.close_fences()

        def commit(found: LedgerRecord) -> tuple[LedgerRecord, None]:
            self.check_not_put_back(found)
            return transitions.commit(found, self.session, done), None

        self._change(commit, same_life=True)

    def check_not_put_back(self, found: LedgerRecord, batch_id: int | None = None) -> None:
        """Whether the store went back to a copy of before this driver's attempt, and no other driver is there.

        Before a begin, with ``batch_id``, also that the driver cannot go on there. Raises StoreRestartedError, and
        MissingBatchesError where the copy lacks batches.
        """
        began = None if self._begun is None else self._begun[0]
        if began is None or not transitions.is_older(found, began):
            return
        if batch_id is not None:
            if found.session == self.session:
                return  # the copy is of this driver's own time: the begin says what it lacks
            due = found.owners.get(began.owner, batch_id)
            if due < batch_id:
                raise transitions.missing_batches(found, batch_id, due)
        raise StoreRestartedError(
            f"the store of state {self._state!r} was put back to an older copy under a running driver: its ledger is "
            f"of epoch {found.epoch} with next txid {found.next_txid}, and this driver had epoch {began.epoch} and "
            f"{began.next_txid}. Nothing of this attempt counts. Start the query again: it goes on, or says what the "
            "copy lacks.",
            state=self._state,
        )

    def say_what_fenced(self) -> None:
        """After a FencedError: raises what the store says, where it is not that another driver has taken over."""
        found = self.load()
        if found is None:
            self._lost()
        began = None if self._begun is None else self._begun[0].in_flight
        self.check_not_put_back(found[0], None if began is None else began.batch_id)

    def give_up(self) -> None:
        """See `transitions.give_up`."""
        self._change(lambda found: (transitions.give_up(found, self.session), None))

    def rollback(self, txid: int | None = None) -> LedgerRecord:
        """Takes the last batch back, if it is ``txid``; returns the ledger without it. See `transitions.rollback`."""

        def taken_back(found: LedgerRecord) -> tuple[LedgerRecord, LedgerRecord]:
            after = transitions.rollback(found, txid)
            return after, after

        return self._change(taken_back)

    def begin_vacuum(self, *, take_over: bool = False, seen: LedgerRecord | None = None) -> Begun:
        """See `transitions.begin_vacuum`."""
        session, at = secrets.token_hex(8), now()
        return self._begin(
            lambda found: transitions.begin_vacuum(found, session, take_over=take_over, at=at, seen=seen)
        )

    def remember(self) -> LedgerRecord:
        """The ledger as it is now, before records are read for `forget_dead` or `recount`. Raises StoreLostError."""
        self._begun = self.load() or self._lost()
        return self._begun[0]

    def forget_dead(self, seen: LedgerRecord, held: int | None = None) -> None:
        """See `transitions.forget_dead`. Raises StoreRestartedError as `commit` does, since `remember`."""
        self._change(lambda found: (transitions.forget_dead(found, seen, held), None), same_life=True)

    def commit_vacuum(self, txid: int, *, fenced: bool = True, held: int | None = None) -> None:
        """See `transitions.commit_vacuum`. Raises StoreRestartedError as `commit` does."""
        self.close_fences()
        self._change(
            lambda found: (transitions.commit_vacuum(found, txid, fenced=fenced, held=held), None), same_life=True
        )

    def recount(self, counted: LedgerRecord, held: int) -> None:
        """See `transitions.recount`. Raises StoreRestartedError as `commit` does, since `remember`."""
        self._change(lambda found: (transitions.recount(found, counted, held), None), same_life=True)

    def close_fences(self) -> None:
        """Before a commit; see `Fences.close`."""
        if self._fences is not None:
            self._fences.close()

    def _look(self, before: LedgerRecord | None, after: LedgerRecord, *, accept_loss: bool) -> bool:
        """False where the ledger has changed meanwhile. Raises as `Fences.look` does."""
        if self._fences is None:
            return True
        newest = (after if before is None else before).next_txid - 1
        try:
            self._fences.look(newest, None if accept_loss else after.last_txid)
        except StaleBatchError:
            found = self.load()
            if before == (None if found is None else found[0]):
                raise
            return False
        return True

    def _current(self) -> tuple[LedgerRecord, Any]:
        return self._known or self.load() or self._lost()

    def load(self) -> tuple[LedgerRecord, Any] | None:
        """The ledger as it is now, with its version; None where there is none."""
        found = self._store.load()
        self._known = None if found is None else (decode_ledger(found[0], self._state), found[1])
        return self._known

    def _lost(self) -> NoReturn:
        if self._has_records():
            raise StoreLostError(
                f"the ledger of state {self._state!r} is gone, and its records are there: the key was deleted, evicted "
                "or expired. Nothing was written and nothing is counted on. Give the records a ledger with mapstate "
                "adopt, or restore both from one backup. See docs/operating.md#a-lost-ledger",
                state=self._state,
            )
        raise StoreLostError(
            f"the ledger of state {self._state!r} is gone, and so are its records: the store was flushed, restarted "
            "empty or replaced, or the state was dropped. Nothing was written and nothing is counted on. Restore the "
            "store from a copy and rewind the checkpoint to it (mapstate rewind); without a copy, start over with a "
            "new checkpoint. See docs/operating.md#a-store-that-was-emptied",
            state=self._state,
        )

    def _is_now(self, record: LedgerRecord) -> bool:
        """Whether the store has this ledger: what a driver writes, nobody else does."""
        found = self.load()
        return found is not None and found[0] == record

    def _check_life(self, found: tuple[LedgerRecord, Any] | None) -> None:
        """Raises StoreRestartedError where the ledger is as the attempt was begun, but in another life of the store."""
        if self._begun is None or found is None or self._begun[0] != found[0] or self._begun[1] == found[1]:
            return
        raise StoreRestartedError(
            f"the store of state {self._state!r} was started again, replaced by its replica or put back while a batch "
            "was written to it: it has the ledger, but may have lost records that it had acknowledged. The attempt is "
            "not committed, and can be begun anew.",
            state=self._state,
        )

    def _taken(self, *, may_create: bool) -> tuple[LedgerRecord, Any] | None:
        """The ledger as it is known, which it is no longer then: whatever happens next may have changed it."""
        found = self._known or self.load()
        if found is None and not may_create:
            self._lost()
        self._known = None
        return found

    def check_not_lost(self) -> None:
        """Of a ledger that was not there. Raises LedgerLostError where there are records and still no ledger."""
        self._was_made_meanwhile()

    def _was_made_meanwhile(self) -> bool:
        """Of a ledger that was not there: whether another driver has made it, and has begun to write.

        Raises LedgerLostError where there are records and still no ledger.
        """
        if not self._has_records():
            return False
        if self.load() is None:
            raise lost_ledger(self._state)
        return True

    def _has_records(self) -> bool:
        """Whether the store holds any, as far as it can tell. Reads all its keys, at most once in a state's life."""
        return isinstance(self._records, Scan) and has_records(self._records)

    def _change(
        self, transition: Callable[[Any], tuple[LedgerRecord, T]], *, accept_loss: bool = False, **how: bool
    ) -> T:
        """`change_all` of this one ledger."""
        return change_all([self], lambda found: [transition(found[0])], accept_loss=[accept_loss], **how)[0]


def change_all(
    ledgers: Sequence[Ledger],
    transition: Callable[[list[Any]], list[tuple[LedgerRecord, T]]],
    *,
    may_create: bool = False,
    same_life: bool = False,
    looks: bool = False,
    accept_loss: Sequence[bool] = (),
) -> list[T]:
    """Applies a transition to ledgers as they are, whoever else changes them meanwhile; all of them in one write.

    More than one have to be of one place; see `JointLedgers`. With ``same_life``, only where the store lives the
    life in which the attempt was begun. With ``looks``, only where fences that are apart from the ledger fit it.

    A reply that was lost is asked again: what a driver writes carries its session, so a ledger
    equal to what was to be written *was* written, by this driver.
    """
    unanswered: StoreUnavailableError | None = None
    for _ in range(_TRIES):
        known = [one._taken(may_create=may_create) for one in ledgers]
        changed = _changed(ledgers, known, transition)
        if changed is None:
            continue
        after, results = [record for record, _ in changed], [result for _, result in changed]
        changes = list(zip(ledgers, known, after, strict=True))
        if same_life:
            for one, found, _ in changes:
                one._check_life(found)
        if all(found is not None and found[0] is record for _, found, record in changes):
            for one, found, _ in changes:
                one._known = found
            return results
        if looks and not _look(changes, accept_loss):
            continue
        try:
            versions = _swap(changes)
        except StoreUnavailableError as error:
            unanswered = _may_be_lost(error)
            if all([one._is_now(record) for one, _, record in changes]):  # noqa: C419  load all
                return results
            continue
        if versions is not None:
            for one, record, version in zip(ledgers, after, versions, strict=True):
                one._known = (record, version)
            return results
    if unanswered is not None:
        raise unanswered
    raise FencedError(
        f"the ledger of state {ledgers[0]._state!r} could not be changed in {_TRIES} tries: others change it all the "
        "time. Nothing is counted on."
    )


def _changed(
    ledgers: Sequence[Ledger],
    known: Sequence[tuple[LedgerRecord, Any] | None],
    transition: Callable[[list[Any]], list[tuple[LedgerRecord, T]]],
) -> list[tuple[LedgerRecord, T]] | None:
    """What a transition makes of ledgers; None where one was made meanwhile.

    A batch that an empty state would not take is refused for the records of a lost ledger first.
    """
    missing = [one for one, found in zip(ledgers, known, strict=True) if found is None]
    try:
        changed = transition([None if found is None else found[0] for found in known])
    except MissingBatchesError:
        if not any([one._was_made_meanwhile() for one in missing]):  # noqa: C419  ask of all
            raise
        return None
    return None if any([one._was_made_meanwhile() for one in missing]) else changed  # noqa: C419  ask of all


def _may_be_lost(error: StoreUnavailableError) -> StoreUnavailableError:
    """The error, if it may be that of a lost reply. Raises it where the store has waited for its turn, in vain."""
    if error.facts.get("waited"):
        raise error
    return error


_Change = tuple[Ledger, tuple[LedgerRecord, Any] | None, LedgerRecord]
"""A ledger, as it was found and as it shall be."""


def _look(changes: Sequence[_Change], accept_loss: Sequence[bool]) -> bool:
    """See `Ledger._look`, of all."""
    return all(
        one._look(None if found is None else found[0], record, accept_loss=loss)
        for (one, found, record), loss in zip(changes, accept_loss, strict=True)
    )


def _swap(changes: Sequence[_Change]) -> list[Any] | None:
    """The new versions, or None where a ledger has changed meanwhile."""
    swaps = [
        Swap(one._store, encode_ledger(record), None if found is None else found[1], record.fence())
        for one, found, record in changes
    ]
    if len(swaps) > 1:
        together: JointLedgers = swaps[0].store
        return together.swap_all(swaps)
    version = swaps[0].store.swap(*swaps[0][1:])
    return None if version is None else [version]
