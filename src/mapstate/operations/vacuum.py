"""Vacuum: rewrites orphaned records, drops empty ones, and leaves a ledger without dead txids.

An operator runs it from any process, between two batches of the stream. It reads first. If no record has to be
rewritten, it begins no attempt and uses no txid. Else it is an attempt like any other, with a txid of its own and
through the fence. No reader sees a value change at any moment.

A store that filters each record, instead of having a fence, may still take a late write. There the vacuum rewrites
every record, keeps tombstones, and lifts the floor to its txid. It also writes every record of a state whose ttl was
ended: without one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mapstate.backends import opened
from mapstate.backing_map import Backend
from mapstate.capabilities import FencedWrites, FilteredWrites, Rewrites, Scan
from mapstate.distinct_keys import DistinctKeys
from mapstate.errors import FencedError, StaleBatchError, UsageError
from mapstate.findings import Unreadable
from mapstate.keys import StoreKey, is_index_key
from mapstate.maps.serialized import Room, writer_of
from mapstate.protocol.change_log import is_of_log, is_removable
from mapstate.protocol.joint import has_last_batch
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.pane_index import CodecWithIndex, without_gone
from mapstate.protocol.records import CommitView, contains_none
from mapstate.protocol.refusals import newer_than_ledger, newer_txids
from mapstate.protocol.stored_ledger import check_page_size, read_ledger, record_pages
from mapstate.protocol.upkeep import begin_vacuum, check_vacuum

_log = logging.getLogger("mapstate")


class Vacuumed(NamedTuple):
    """The counts of a vacuum, at its end or so far.

    ``scanned``          keys listed; a scan may list a key twice
    ``rewritten``        records that were written anew
    ``dropped``          records without a value that were removed
    ``txid``             of the vacuum's attempt; None if no record had to be rewritten
    ``unreadable``       keys that hold no record of this state; they are left as they are
    ``unreadable_keys``  the first ten of them
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
    """Clean up an opaque state, and return the counts.

    A batch that begins meanwhile fences the vacuum without harm: run it again. After a crash, the next batch or a
    vacuum with ``take_over`` leaves the interrupted one behind. The vacuum reads every record, with 8 bytes of memory
    per key. So a ledger with an unknown number of keys learns it. A known number stays, and missing keys are logged.

    Args:
        backend_or_url: The store of the state.
        state: The state's name.
        page_size: Keys read at a time.
        take_over: Leave an attempt in flight behind, whose driver is gone for good. A living driver is fenced.
        beside: The states of the topology that are committed apart from this one, each with its store. Without them a
            vacuum that has to rewrite records is refused, because the last batch may have to be rolled back.
        on_page: Called after each page with the counts so far. They begin anew once a record has to be rewritten.

    Raises:
        StateNotFoundError: There is no such state.
        UsageError: The state is not opaque; an attempt is in flight; a state of ``beside`` lacks the last batch; or the
            store has neither fenced nor filtered writes, or cannot list its keys.
        FencedError: A batch began meanwhile.
        CorruptRecordError: The store cannot list a record, on Aerospike one without a user key. This vacuum counts as
            none.
        LedgerLostError: There are records without a ledger.
        StoreError: The store failed.

    """
    with opened(backend_or_url, state) as store:
        return _vacuum(store, state, page_size, take_over=take_over, beside=beside, on_page=on_page)


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
            "refuse late writers, so an orphaned record that comes after the vacuum would count",
        ),
        (isinstance(store, Scan), "list its keys, so orphaned records cannot be found"),
    ):
        if not able:
            raise UsageError(f"state {state!r} cannot be vacuumed: its store cannot {why}. Nothing was written.")
    check_page_size(page_size)
    read_ledger(store, state)  # raises the better error if there is no ledger
    ledger = Ledger(store, state)
    seen = ledger.remember()
    begin_vacuum(seen, "", take_over=take_over)  # refuses before any record is read
    # Without a fence a late writer may still put an orphaned record after its key was read.
    if (fenced or not seen.dead) and seen.ttl != 0 and (seen.in_flight is None or seen.in_flight.epoch != seen.epoch):
        clean = _scanned_in_vain(store, seen, page_size, everything=not fenced, on_page=on_page)
        if clean is not None:
            done, held = clean
            ledger.forget_dead(seen, held)
            _say_missing(seen, held)
            return done
    _check_beside(seen, beside)
    if not fenced:  # a record that cannot be listed would be below the new floor
        for _ in record_pages(store, page_size, index=True):
            pass
    apart = seen.last_commit is not None and seen.last_commit.apart_from
    attempt = ledger.begin_vacuum(take_over=take_over, seen=seen if apart else None)
    record = ledger.record
    codec, everything = CodecWithIndex(record), not fenced or record.ttl == 0
    done, held_keys, unreadable = Vacuumed(0, 0, 0, attempt.txid), DistinctKeys(), Unreadable(state)
    room = Room(record.fields)
    with writer_of(store, attempt.token) as writer:
        read = _reading(store, writer, record, attempt.txid, room)
        # After the begin, because a store may list all keys at once.
        for part in (
            part for page in unreadable.listed(record_pages(store, page_size, index=True)) for part in room.parts(page)
        ):
            readable, records = unreadable.read(read, part)
            keys, values, present = _due(
                readable, records or [], attempt.view, attempt.txid, everything=everything, codec=codec
            )
            held_keys.update(present)
            if keys:
                _write(writer, codec, keys, values, attempt.txid, everything=everything)
            dropped = 0 if everything else sum(value is None for value in values)
            done = Vacuumed(
                done.scanned + len(part), done.rewritten + len(keys) - dropped, done.dropped + dropped, attempt.txid
            )
            if on_page is not None:
                on_page(done)
    if not fenced and not unreadable.is_all_listed:  # a record that came meanwhile; see above
        raise unreadable.error()
    held = None if unreadable.count else len(held_keys)
    ledger.commit_vacuum(attempt.txid, fenced=fenced, held=held)
    _say_missing(record, held)
    return done._replace(unreadable=unreadable.count, unreadable_keys=tuple(unreadable.keys))


def _say_missing(ledger: LedgerRecord, held: int | None) -> None:
    expected = ledger.keys_held()
    if expected is not None and held is not None and held < expected:
        _log.warning(
            "state %s: the vacuum found %d keys, and the ledger says %d; see mapstate help operating#how-many-keys",
            *(ledger.state, held, expected),
        )


def _reading(
    store: Any, records: Any, ledger: LedgerRecord, newest: int, room: Room
) -> Callable[[list[StoreKey]], list[Any]]:
    """A function that reads the records of listed keys. Its errors name keys without a record of this state."""
    codec = CodecWithIndex(ledger)

    def read(keys: list[StoreKey]) -> list[Any]:
        data = records.multi_get(keys)
        room.learn(data)
        if contains_none(data):  # the store's get raises for a key of another type
            store.multi_get([key for key, value in zip(keys, data, strict=True) if value is None])
        loaded = codec.loads(keys, data)
        if newer_txids(keys, loaded, newest):
            known = read_ledger(store, ledger.state).next_txid - 1
            unknown = newer_txids(keys, loaded, known)
            if unknown:
                raise newer_than_ledger(ledger.state, unknown, known)
        return loaded

    return read


def _scanned_in_vain(
    store: Any,
    ledger: LedgerRecord,
    page_size: int,
    *,
    everything: bool,
    on_page: Callable[[Vacuumed], None] | None,
) -> tuple[Vacuumed, int | None] | None:
    """The counts, and the number of keys with a value if all can be read. None if a record has to be written."""
    scanned, held, unreadable = 0, DistinctKeys(), Unreadable(ledger.state)
    room = Room(ledger.fields)
    read, codec = _reading(store, store, ledger, ledger.next_txid - 1, room), CodecWithIndex(ledger)
    for part in (
        part for page in unreadable.listed(record_pages(store, page_size, index=True)) for part in room.parts(page)
    ):
        readable, records = unreadable.read(read, part)
        due, _, present = _due(
            readable,
            records or [],
            ledger.view(),
            ledger.next_txid,
            everything=everything,
            codec=codec,
        )
        if due:
            return None
        scanned += len(part)
        held.update(present)
        if on_page is not None:
            on_page(Vacuumed(scanned, 0, 0, None))
    done = Vacuumed(scanned, 0, 0, None, unreadable.count, tuple(unreadable.keys))
    return done, None if unreadable.count else len(held)


def _check_beside(ledger: LedgerRecord, beside: Sequence[tuple[Backend | str, str]]) -> None:
    """Raise UsageError unless the states that are committed apart have the last batch, too."""
    if ledger.last_commit is not None and not set(ledger.last_commit.apart_from) <= {name for _, name in beside}:
        check_vacuum(ledger)
    for backend_or_url, name in beside:
        with opened(backend_or_url, name) as store:
            other = read_ledger(store, name)
        if not has_last_batch(ledger, other):
            raise UsageError(
                f"state {ledger.state!r} has records to rewrite, and counts another last batch than {name!r}. The next "
                "start of the job rolls one of them back, which a vacuum would prevent. Nothing was written. Start the "
                "job, and vacuum after its next batch.",
                state=ledger.state,
            )


def _due(
    page: list[StoreKey], records: list[Any], view: CommitView, txid: int, *, everything: bool, codec: CodecWithIndex
) -> tuple[list[StoreKey], list[Any], list[StoreKey]]:
    """The keys to write, their values by the one rule, and the keys that have a value.

    A record that counts and has a value stays, unless ``everything`` is to be written. The vacuum's own records stay.
    """
    try:
        values = view.values(records, txid)
    except StaleBatchError as error:
        raise FencedError(
            f"the vacuum with txid {txid} met a record of a later attempt: a batch has begun meanwhile. No value has "
            "changed. Run the vacuum again between two batches.",
            txid=txid,
        ) from error
    values = without_gone(codec.ledger, codec.ledger.last_windows(), page, values)
    due = [
        (key, value)
        for key, record, value in zip(page, records, values, strict=True)
        if record is not None and record[0] != txid and (everything or value is None or record[0] not in view)
        if not is_of_log(key)  # which is of one txid for as long as it is kept
    ]
    due += [(key, None) for key in page if is_of_log(key) and is_removable(codec.ledger, key)]
    present = [key for key, value in zip(page, values, strict=True) if value is not None and not is_index_key(key)]
    return [key for key, _ in due], [value for _, value in due], present


def _write(
    writer: Any, codec: CodecWithIndex, keys: list[StoreKey], values: list[Any], txid: int, *, everything: bool
) -> None:
    """Write a page. A record without a value is removed if the store can and may, else a tombstone stays."""
    records = codec.dumps(keys, [(txid, value, value) for value in values])
    if isinstance(writer, Rewrites) and codec.ledger.ttl != 0:
        pairs = zip(records, values, strict=True)
        writer.multi_rewrite(keys, [None if value is None and not everything else record for record, value in pairs])
    else:
        writer.multi_put(keys, records)
