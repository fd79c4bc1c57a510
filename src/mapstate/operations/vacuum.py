"""Vacuum: rewrites what does not count, drops what is empty, and leaves a ledger without dead txids.

It reads first. Where nothing has to be rewritten it begins no attempt and uses no txid. Otherwise it is an attempt like
any other, with a txid of its own and through the fence. No value changes, for no reader at no moment. To be run by an
operator, from any process, between two batches of the stream.

Where the store has no fence and filters each record instead, a late writer may still come: so there every record is
written anew, tombstones stay, and the floor rises to the vacuum's txid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mapstate.backends import resolve
from mapstate.backing_map import Backend
from mapstate.capabilities import FencedWrites, FilteredWrites, Rewrites, Scan, close_if_possible
from mapstate.distinct_keys import DistinctKeys
from mapstate.errors import FencedError, StaleBatchError, UsageError
from mapstate.findings import Unreadable
from mapstate.keys import StoreKey
from mapstate.maps.serialized import Room, writer_of
from mapstate.protocol.joint import has_last_batch
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.records import CommitView, contains_none, newer_than_ledger, newer_txids
from mapstate.protocol.stored_ledger import check_page_size, read_ledger, record_pages
from mapstate.protocol.upkeep import begin_vacuum, check_vacuum
from mapstate.serializers import RecordCodec, serializer
from mapstate.spec import check_state_name

__all__ = ["Vacuumed", "vacuum"]

_log = logging.getLogger("mapstate")


class Vacuumed(NamedTuple):
    """What a vacuum has done, or has done so far. ``scanned`` may count a key twice, as a scan may give it twice.

    ``txid`` is None where there was nothing to rewrite: then no attempt was begun. ``unreadable`` keys hold what is no
    record of this state, and were left as they are; ``unreadable_keys`` are the first ten of them.
    """

    scanned: int
    rewritten: int
    dropped: int
    txid: int | None
    unreadable: int = 0
    unreadable_keys: tuple[str, ...] = ()


def vacuum(
    backend_or_url: Backend | str,
    state: str,
    *,
    page_size: int = 1000,
    take_over: bool = False,
    beside: Sequence[tuple[Backend | str, str]] = (),
    on_page: Callable[[Vacuumed], None] | None = None,
) -> Vacuumed:
    """Cleans up an opaque state; returns what it did.

    ``take_over`` leaves an attempt in flight behind, where its driver is gone for good: a driver that lives
    is fenced. ``beside`` names the states of the same topology that are committed apart from this one, each with its
    store: without them a vacuum that has to rewrite something is refused, because the last batch may have to be rolled
    back. ``on_page`` is called after each page.

    A batch that begins meanwhile fences the vacuum: FencedError, nothing is lost, run it again. The same
    after a crash: the next vacuum leaves the dead one behind with ``take_over``, or a batch has by then.
    It reads every record, so a ledger that does not know how many keys the state holds knows it from here on. Of a
    known number it changes nothing: keys that are missing are logged. 8 bytes of memory per key.
    Raises StateNotFoundError; UsageError for other state types, with an attempt in flight, where a state of
    ``beside`` lacks the last batch, and for stores without fenced (or filtered) writes or without scan;
    LedgerLostError, StoreError.
    """
    store: Any = resolve(backend_or_url).open(check_state_name(state))
    try:
        return _vacuum(store, state, page_size, take_over=take_over, beside=beside, on_page=on_page)
    finally:
        close_if_possible(store)


def _vacuum(
    store: Any,
    state: str,
    page_size: int,
    *,
    take_over: bool,
    beside: Sequence[tuple[Backend | str, str]],
    on_page: Callable[[Vacuumed], None] | None,
) -> Vacuumed:
    fenced = isinstance(store, FencedWrites)
    for able, why in (
        (
            fenced or isinstance(store, FilteredWrites),
            "refuse late writers, and one that comes after a vacuum would bring orphaned records back",
        ),
        (isinstance(store, Scan), "list its keys, so what is dead there cannot be found"),
    ):
        if not able:
            raise UsageError(f"state {state!r} cannot be vacuumed: its store cannot {why}")
    check_page_size(page_size)
    read_ledger(store, state)  # says what is wrong where there is none
    ledger = Ledger(store, state)
    seen = ledger.remember()
    begin_vacuum(seen, "", take_over=take_over)  # says what is wrong before anything is read
    # Without a fence a late writer may still put what is dead, behind a key's reading.
    if (fenced or not seen.dead) and (seen.in_flight is None or seen.in_flight.epoch != seen.epoch):
        found = _scanned_in_vain(store, seen, page_size, everything=not fenced)
        if found is not None:
            done, held = found
            ledger.forget_dead(seen, held)
            _say_missing(seen, held)
            return done
    _check_beside(seen, beside)
    apart = seen.last_commit is not None and seen.last_commit.apart_from
    attempt = ledger.begin_vacuum(take_over=take_over, seen=seen if apart else None)
    record = ledger.record
    codec = RecordCodec(serializer(record.serializer), state, record.type, record.fields, record.field_counts)
    done, held_keys, unreadable = Vacuumed(0, 0, 0, attempt.txid), DistinctKeys(), Unreadable(state)
    room = Room(record.fields)
    with writer_of(store, attempt.token) as writer:
        read = _reading(store, writer, record, attempt.txid, room)
        # Not before the begin: a store may list its keys at once.
        for part in (part for page in unreadable.listed(record_pages(store, page_size)) for part in room.parts(page)):
            readable, records = unreadable.read(read, part)
            keys, values, there = _due(readable, records or [], attempt.view, attempt.txid, everything=not fenced)
            held_keys.update(there)
            if keys:
                _write(writer, codec, keys, values, attempt.txid, removing=fenced)
            dropped = sum(value is None for value in values) if fenced else 0
            done = Vacuumed(
                done.scanned + len(part), done.rewritten + len(keys) - dropped, done.dropped + dropped, attempt.txid
            )
            if on_page is not None:
                on_page(done)
    held = None if unreadable.count else len(held_keys)
    ledger.commit_vacuum(attempt.txid, fenced=fenced, held=held)
    _say_missing(record, held)
    return done._replace(unreadable=unreadable.count, unreadable_keys=tuple(unreadable.keys))


def _say_missing(ledger: LedgerRecord, held: int | None) -> None:
    expected = ledger.keys_held()
    if expected is not None and held is not None and held < expected:
        _log.warning(
            "state %s: the vacuum found %d keys, and the ledger says %d; see docs/operating.md#how-many-keys",
            *(ledger.state, held, expected),
        )


def _reading(
    store: Any, records: Any, ledger: LedgerRecord, newest: int, room: Room
) -> Callable[[list[StoreKey]], list[Any]]:
    """What reads records of listed keys. Its errors name the keys that hold no record of this state."""
    codec = RecordCodec(serializer(ledger.serializer), ledger.state, ledger.type, ledger.fields, ledger.field_counts)

    def read(keys: list[StoreKey]) -> list[Any]:
        data = records.multi_get(keys)
        room.learn(data)
        if contains_none(data):  # a listed key without a record is gone, or of another type: the store's get tells
            store.multi_get([key for key, one in zip(keys, data, strict=True) if one is None])
        found = codec.loads(keys, data)
        if newer_txids(keys, found, newest):
            known = read_ledger(store, ledger.state).next_txid - 1
            unknown = newer_txids(keys, found, known)
            if unknown:
                raise newer_than_ledger(ledger.state, unknown, known)
        return found

    return read


def _scanned_in_vain(
    store: Any, ledger: LedgerRecord, page_size: int, *, everything: bool
) -> tuple[Vacuumed, int | None] | None:
    """What was read, and how many keys have a value if all can be read; None where a record has to be written."""
    scanned, held, unreadable = 0, DistinctKeys(), Unreadable(ledger.state)
    room = Room(ledger.fields)
    read = _reading(store, store, ledger, ledger.next_txid - 1, room)
    for part in (part for page in unreadable.listed(record_pages(store, page_size)) for part in room.parts(page)):
        readable, records = unreadable.read(read, part)
        due, _, there = _due(readable, records or [], ledger.view(), ledger.next_txid, everything=everything)
        if due:
            return None
        scanned += len(part)
        held.update(there)
    done = Vacuumed(scanned, 0, 0, None, unreadable.count, tuple(unreadable.keys))
    return done, None if unreadable.count else len(held)


def _check_beside(ledger: LedgerRecord, beside: Sequence[tuple[Backend | str, str]]) -> None:
    """The states that are committed apart have the last batch too. Raises UsageError."""
    if ledger.last_commit is not None and not set(ledger.last_commit.apart_from) <= {name for _, name in beside}:
        check_vacuum(ledger)
    for backend_or_url, name in beside:
        store: Any = resolve(backend_or_url).open(check_state_name(name))
        try:
            other = read_ledger(store, name)
        finally:
            close_if_possible(store)
        if not has_last_batch(ledger, other):
            raise UsageError(
                f"state {ledger.state!r} has records to rewrite, and counts another last batch than {name!r}: the next "
                "start of the job rolls one of them back, and a vacuum would prevent that. Nothing was written. "
                "Start the job, and vacuum after its next batch.",
                state=ledger.state,
            )


def _due(
    page: list[StoreKey], records: list[Any], view: CommitView, txid: int, *, everything: bool
) -> tuple[list[StoreKey], list[Any], list[StoreKey]]:
    """The keys that have to be written, and their values by the one rule; then the keys that have a value.

    What counts and has a value stays as it is, unless ``everything`` is to be written; what this vacuum has written
    itself stays in any case.
    """
    try:
        values = view.values(records, txid)
    except StaleBatchError as error:
        raise FencedError(
            f"the vacuum with txid {txid} met a record of a later attempt: a batch has begun meanwhile. No value "
            "has changed. Run it again, between two batches.",
            txid=txid,
        ) from error
    due = [
        (key, value)
        for key, record, value in zip(page, records, values, strict=True)
        if record is not None and record[0] != txid and (everything or value is None or record[0] not in view)
    ]
    there = [key for key, value in zip(page, values, strict=True) if value is not None]
    return [key for key, _ in due], [value for _, value in due], there


def _write(
    writer: Any, codec: RecordCodec, keys: list[StoreKey], values: list[Any], txid: int, *, removing: bool
) -> None:
    """One write per page, and one per record: removed where the store can and may, else left as a tombstone."""
    records = codec.dumps([(txid, value, value) for value in values])
    if isinstance(writer, Rewrites):
        pairs = zip(records, values, strict=True)
        writer.multi_rewrite(keys, [None if removing and value is None else record for record, value in pairs])
    else:
        writer.multi_put(keys, records)
