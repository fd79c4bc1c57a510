"""Vacuum: rewrites orphaned records, drops empty ones, and leaves a ledger without dead txids.

An operator runs it from any process, between two batches of the stream. It reads first. If no record has to be
rewritten, it begins no attempt and uses no txid. Else it is an attempt like any other, with a txid of its own and
through the fence. No reader sees a value change at any moment.

A key of rolling windows whose rows are older than all of them goes in two attempts, so that its number of keys is right
whenever the vacuum dies: the first one gives it no value, the second one removes the record, as any without a value.

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
from mapstate.errors import CorruptLedgerError, FencedError, StaleBatchError, StateNotFoundError, UsageError
from mapstate.findings import DistinctKeys, Unreadable
from mapstate.keys import StoreKey, contains_none, is_index_key
from mapstate.maps.change_log import is_of_log, is_removable
from mapstate.maps.pane_index import without_gone
from mapstate.maps.record_pass import CodecWithIndex, all_records, check_known, measured_fields
from mapstate.maps.serialized import writer_of
from mapstate.protocol.joint import has_last_batch
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import LedgerRecord, OperatorKind
from mapstate.protocol.records import CommitView
from mapstate.protocol.stored_ledger import check_page_size, read_ledger, record_pages
from mapstate.protocol.upkeep import begin_operator, check_may_begin
from mapstate.serializers.tiles import tiles_of

_log = logging.getLogger("mapstate")


class Vacuumed(NamedTuple):
    """The counts of a vacuum, at its end or so far.

    ``scanned``          keys listed; a scan may list a key twice
    ``rewritten``        records that were written anew
    ``dropped``          records without a value that were removed
    ``txid``             of the vacuum's attempt; None if no record had to be rewritten
    ``unreadable``       keys that hold no record of this state; they are left as they are
    ``unreadable_keys``  the first ten of them
    ``idle``       keys that were removed because all of their rolling windows are empty
    """

    scanned: int
    rewritten: int
    dropped: int
    txid: int | None
    unreadable: int = 0
    unreadable_keys: tuple[str, ...] = ()
    idle: int = 0


def vacuum(
    backend_or_url: Backend | str,
    state: str,
    *,
    page_size: int = 1000,
    take_over: bool = False,
    beside: Sequence[tuple[Backend | str | None, str]] = (),
    on_page: Callable[[Vacuumed], None] | None = None,
) -> Vacuumed:
    """Clean up an opaque state, and return the counts.

    It also removes the keys of rolling windows that are all empty, whatever time is asked for. Where there is a
    lifetime there are none.

    A batch that begins meanwhile fences the vacuum without harm: run it again. After a crash, the next batch or a
    vacuum with ``take_over`` leaves the interrupted one behind. The vacuum reads every record, with 8 bytes of memory
    per key. So a ledger with an unknown number of keys learns it. A known number stays, and missing keys are logged.

    Args:
        backend_or_url: The store of the state.
        state: The state's name.
        page_size: Keys read at a time.
        take_over: Leave an attempt in flight behind, whose driver is gone for good. A living driver is fenced.
        beside: The states of the topology that are committed apart from this one, and those that follow it and are in
            another store, each with its store, or with None if the state is gone. Without them a vacuum that has to
            rewrite records is refused, because the last batch may have to be rolled back, or to be passed on.
        on_page: Called after each page with the counts so far. They begin anew once a record has to be rewritten.

    Raises:
        StateNotFoundError: There is no such state.
        UsageError: The state is not opaque; an attempt is in flight; a state of ``beside`` lacks the last batch; or the
            store has neither fenced nor filtered writes, or cannot list its keys.
        FencedError: A batch began meanwhile, or a state that follows has still to get the last one.
        CorruptRecordError: The store cannot list a record, on Aerospike one without a user key. This vacuum counts as
            none.
        LedgerLostError: There are records without a ledger.
        StoreError: The store failed.

    """
    with opened(backend_or_url, state) as store:
        fenced = isinstance(store, FencedWrites)
        check_able(store, state, "vacuum")
        check_page_size(page_size)
        read_ledger(store, state)  # raises the better error if there is no ledger
        ledger = Ledger(store, state)
        seen = ledger.remember()
        begin_operator(seen, "", "vacuum", take_over=take_over)  # refuses before any record is read
        # Without a fence a late writer may still put an orphaned record after its key was read.
        if (
            (fenced or not seen.dead)
            and seen.ttl != 0
            and (seen.in_flight is None or seen.in_flight.epoch != seen.epoch)
        ):
            clean = _cleaned(store, seen, seen.next_txid, page_size, on_page)
            if clean is not None:
                done, held, _ = clean
                ledger.forget_dead(seen, held)
                _say_missing(seen, held)
                return done
        check_beside(seen, backend_or_url, beside, "vacuum")
        if not fenced:  # a record that cannot be listed would be below the new floor
            for _ in record_pages(store, page_size, index=True):
                pass
        commit = seen.last_commit
        asks = commit is not None and (commit.apart_from or commit.followers)
        attempt = ledger.begin_operator("vacuum", take_over=take_over, seen=seen if asks else None)
        record = ledger.record
        with writer_of(store, attempt.token) as writer:
            cleaned = _cleaned(store, record, attempt.txid, page_size, on_page, writer=writer)
        assert cleaned is not None  # noqa: S101  for the type checker: there is a writer
        done, held, unreadable = cleaned
        if not fenced and not unreadable.is_all_listed:  # a record that came meanwhile; see above
            raise unreadable.error()
        ledger.commit_vacuum(attempt.txid, fenced=fenced, held=held, removed=done.idle)
        _say_missing(ledger.record, held)
    if not done.idle:
        return done
    try:
        last = vacuum(backend_or_url, state, page_size=page_size, beside=beside, on_page=on_page)
    except (UsageError, FencedError) as error:  # a batch has begun meanwhile
        _log.info("state %s: the records of %d idle keys go with the next vacuum: %s", state, done.idle, error)
        return done
    return last._replace(rewritten=done.rewritten + last.rewritten, idle=done.idle + last.idle)


def check_able(store: Any, state: str, kind: OperatorKind) -> None:
    """Raise UsageError for a store on which no operator's attempt can be right."""
    missing = ""
    if not isinstance(store, FencedWrites | FilteredWrites):
        missing = f"refuse late writers, so an orphaned record that comes after the {kind} would count"
    elif not isinstance(store, Scan):
        missing = "list its keys, so records cannot be found"
    if missing:
        raise UsageError(f"state {state!r} cannot have a {kind}: its store cannot {missing}. Nothing was written.")


def _say_missing(ledger: LedgerRecord, held: int | None) -> None:
    expected = ledger.keys_held()
    if expected is not None and held is not None and held < expected:
        _log.warning(
            "state %s: the vacuum found %d keys, and the ledger says %d; see mapstate help operating#how-many-keys",
            *(ledger.state, held, expected),
        )


def _cleaned(
    store: Any,
    ledger: LedgerRecord,
    txid: int,
    page_size: int,
    on_page: Callable[[Vacuumed], None] | None,
    *,
    writer: Any = None,
) -> tuple[Vacuumed, int | None, Unreadable] | None:
    """Read all records and write those that are due. Return None at the first one that is due if there is no writer.

    Returns the counts, the number of keys with a value if all can be read, and the keys that cannot.
    """
    everything = not isinstance(store, FencedWrites) or ledger.ttl == 0
    source = store if writer is None else writer
    codec, unreadable, held = CodecWithIndex(ledger), Unreadable(ledger.state), DistinctKeys()

    def loads(keys: list[StoreKey], data: Sequence[Any]) -> list[Any]:
        """Raises errors that name keys without a record of this state."""
        if contains_none(data):  # the store's get raises for a key of another type
            store.multi_get([key for key, value in zip(keys, data, strict=True) if value is None])
        records = codec.loads(keys, data)
        check_known(store, ledger.state, keys, records, ledger.next_txid - 1)
        return records

    done = Vacuumed(0, 0, 0, None if writer is None else txid)
    pages = record_pages(store, page_size, index=True)  # of a writer after the begin: a store may list all at once
    for page, records, scanned in all_records(pages, source.multi_get, measured_fields(ledger), loads, unreadable):
        keys, values, idle, present = _due(page, records, ledger.view(), txid, everything=everything, codec=codec)
        if keys and writer is None:
            return None
        held.update(present)
        if keys:
            after = [None if key in idle else value for key, value in zip(keys, values, strict=True)]
            written = codec.dumps(keys, [(txid, *both) for both in zip(after, values, strict=True)])
            if isinstance(writer, Rewrites) and ledger.ttl != 0:  # else a record without a value stays as a tombstone
                gone = [value is None and not everything for value in values]
                writer.multi_rewrite(
                    keys, [None if is_gone else record for is_gone, record in zip(gone, written, strict=True)]
                )
            else:
                writer.multi_put(keys, written)
        dropped = 0 if everything else sum(value is None for value in values)
        done = done._replace(
            scanned=done.scanned + scanned,
            rewritten=done.rewritten + len(keys) - len(idle) - dropped,
            dropped=done.dropped + dropped,
            idle=done.idle + len(idle),
        )
        if on_page is not None:
            on_page(done)
    done = done._replace(unreadable=unreadable.count, unreadable_keys=tuple(unreadable.keys))
    return done, None if unreadable.count else len(held), unreadable


def check_beside(
    ledger: LedgerRecord, place: Backend | str, beside: Sequence[tuple[Backend | str | None, str]], kind: OperatorKind
) -> None:
    """Raise UsageError unless the states that are committed apart have the last batch, too.

    Each is looked for in its store ``beside``; one that follows else in ``place``, the state's own. Raises FencedError
    for a follower that counts another batch. States that the last commit does not name have to be there. Followers
    without a store must not be in ``place``: they are gone by the caller's word.
    """
    last, given = ledger.last_commit, {name for _, name in beside}
    apart, followers = ((), ()) if last is None else (last.apart_from, last.followers)
    if not {name for its_place, name in beside if its_place is not None}.issuperset(apart):
        check_may_begin(ledger, kind)
    for its_place, name in [*((place, name) for name in followers if name not in given), *beside]:
        is_gone = its_place is None
        try:
            with opened(place if its_place is None else its_place, name) as store:
                other = read_ledger(store, name)
        except (StateNotFoundError, CorruptLedgerError) as error:
            # Where a place has one state, as a set of Aerospike has, the name may lead to this one.
            if isinstance(error, CorruptLedgerError) and error.facts.get("found") != ledger.state:
                raise
            if is_gone:
                continue
            if name not in followers:
                raise
            raise UsageError(
                f"state {ledger.state!r} is followed by {name!r}, which is not in its store. No attempt was begun. "
                f"Name it with its store (beside=[(store, {name!r})], --beside URL#{name}), or say that it is gone "
                f"(beside=[(None, {name!r})], --gone {name}).",
                state=ledger.state,
            ) from error
        if is_gone:
            raise UsageError(
                f"state {name!r} is said to be gone, and is in the store of state {ledger.state!r}. No attempt was "
                "begun. Leave that out, and the state is asked; or drop it first (mapstate drop).",
                state=ledger.state,
            )
        if name in followers and not has_last_batch(ledger, other):
            raise FencedError(
                f"state {name!r} follows state {ledger.state!r} and counts another last batch: a {kind} may remove "
                f"keys that it has still to get. No attempt was begun. See that the job runs, and run the {kind} after "
                "its next batch.",
                state=ledger.state,
            )
        if name in apart and not has_last_batch(ledger, other):
            raise UsageError(
                f"state {ledger.state!r} has records to rewrite, and counts another last batch than {name!r}. The next "
                f"start of the job rolls one of them back, which a {kind} would prevent. Nothing was written. Start "
                f"the job, and run the {kind} after its next batch.",
                state=ledger.state,
            )


def _due(
    page: list[StoreKey], records: list[Any], view: CommitView, txid: int, *, everything: bool, codec: CodecWithIndex
) -> tuple[list[StoreKey], list[Any], set[StoreKey], list[StoreKey]]:
    """The keys to write, their values by the one rule, those of them that get no value, and the keys that have one.

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
    idle = _idle(codec.ledger, page, values)
    due = [
        (key, value)
        for key, record, value in zip(page, records, values, strict=True)
        if record is not None and record[0] != txid
        if everything or value is None or record[0] not in view or key in idle
        if not is_of_log(key)  # which is of one txid for as long as it is kept
    ]
    due += [(key, None) for key in page if is_of_log(key) and is_removable(codec.ledger, key)]
    present = [key for key in codec.keys_with_value(page, values) if key not in idle]
    return [key for key, _ in due], [value for _, value in due], idle, present


def _idle(ledger: LedgerRecord, page: list[StoreKey], values: list[Any]) -> set[StoreKey]:
    """The keys whose rows are older than all rolling windows that can still be asked for."""
    kept = ledger.rolling
    if kept is None or kept.definition.has_lifetime:
        return set()
    tiling = kept.tiling
    return {
        key
        for key, value in zip(page, values, strict=True)
        if value is not None and not is_index_key(key)
        if tiling.tiles(tiles_of(value).starts[-1:]) in ([], [None])
    }
