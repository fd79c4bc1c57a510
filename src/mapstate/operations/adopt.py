"""Give a ledger to records without one. The records stay as they are.

storm-redis keeps ``[txid,curr,prev]``, ``[txid,val]`` or the bare value as JSON, which are mapstate's own records. Only
the ledger is missing. An operator runs this once, with the topology stopped.

A state of mapstate that lost its ledger has batch reports beside its records. They tell which of the last attempts were
committed. So an orphaned attempt does not count, and its batch is done anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from mapstate.backends import opened
from mapstate.backing_map import Backend
from mapstate.batch_report import BatchReport
from mapstate.capabilities import Scan
from mapstate.errors import CorruptRecordError, KeyEncodingError, UsageError, check_unique, shown
from mapstate.keys import KeyCodec, StoreKey, is_index_key
from mapstate.maps.record_pass import all_records
from mapstate.protocol.ledger_record import Commit, LedgerRecord, encode_ledger
from mapstate.protocol.opening import clock_txid
from mapstate.protocol.stored_ledger import decode_ledger, ledger_store, record_pages
from mapstate.reader.scans import read_reports
from mapstate.schema import Field, KeyField, StateType
from mapstate.serializers import RecordCodec, blocks_of
from mapstate.serializers import serializer as serializer_named

FORMER_OWNER = "storm-redis"
"""The owner in a ledger that `adopt` makes: the first streaming query takes over with on_new_owner="adopt"."""


class Adopted(NamedTuple):
    """The number of records found so far, and their highest txid; None if records have no txid."""

    records: int
    last_txid: int | None


def adopt(
    backend_or_url: Backend | str,
    state: str,
    *,
    type: StateType,  # noqa: A002  as everywhere
    keys: Sequence[KeyField],
    fields: Sequence[Field],
    owner: str | None = None,
    serializer: str = "json",
    page_size: int = 1000,
    dry_run: bool = False,
    on_page: Callable[[Adopted], None] | None = None,
) -> Adopted:
    """Read every record, and make a ledger above the highest txid. No record is written.

    All records of a storm-redis topology count as committed. The topology has to be stopped, with its last batch
    complete. In a state of mapstate, the attempts that the batch reports name count, and all older ones; its query
    starts again without a change. Later writes of an old writer do not count.

    Args:
        backend_or_url: The store of the records.
        state: The state's name.
        type: The type of the records.
        keys: The grouping columns.
        fields: The aggregates.
        owner: For a state of mapstate that lost its ledger: the id of its query, see `query_of`.
        serializer: The format of the records.
        page_size: Keys read at a time.
        dry_run: Check everything, and make no ledger.
        on_page: Called after each page with the counts so far.

    Raises:
        UsageError: There is a ledger already, or no record; the reports do not tell which records count; or the store
            cannot list its keys.
        CorruptRecordError: A record is not of this type.
        DuplicateNameError: Two columns have one name, so no job could open the state.
        KeyEncodingError: A key is not one of these columns as mapstate writes it.
        StoreError: The store failed.

    Not guaranteed: orphaned attempts before the oldest report, a reset, a rollback of the newest report's batch, and
    fields added since are not noticed.

    """
    check_unique([*(key.name for key in keys), *(field.name for field in fields)])
    if blocks_of(serializer) is not None:
        raise UsageError(
            f"state {state!r} has blocks, and their records cannot be adopted. Nothing was written. Restore ledger and "
            "records from one backup, or seed a state of another name."
        )
    with opened(backend_or_url, state) as store:
        can_scan = isinstance(store, Scan)
        if not can_scan:
            raise UsageError(f"the store of state {state!r} cannot list its keys, so it cannot be adopted.")
        if ledger_store(store).load() is not None:
            raise _has_ledger(state)
        form = serializer_named(serializer)
        codec = RecordCodec(form, state, type, fields, [(0, len(fields))])
        history = _history(read_reports(store, state), state, owner)
        adopted = Adopted(0, None)
        key_codec = KeyCodec(keys, native=form.native)
        pages = (_without_index(state, page) for page in record_pages(store, page_size, index=True))
        in_tiles = RecordCodec(form, state, type, fields, [(0, len(fields))], in_tiles=True)

        def loads(part: list[StoreKey], data: Sequence[Any]) -> list[Any]:
            _check_plain(state, part, data, in_tiles)
            return codec.loads(part, data)

        for part, records, _ in all_records(pages, store.multi_get, fields, loads):
            adopted = _with_page(adopted, part, records, key_codec, type)
            if history is not None:
                _check_decided(history, state, type, records)
            if on_page is not None:
                on_page(adopted)
        if not adopted.records:
            raise UsageError(
                f"there is no record of state {state!r} here, so there is nothing to adopt. Check the database number, "
                "and `layout` and `records` in the URL."
            )
        if not dry_run:
            columns = tuple(keys), tuple(fields)
            ledger = _ledger(state, type, *columns, serializer=serializer, adopted=adopted, history=history)
            _make_ledger(store, ledger)
        return adopted


def _check_plain(state: str, part: list[StoreKey], data: Sequence[Any], in_tiles: RecordCodec) -> None:
    """Raise UsageError for records of rolling windows."""
    if all(record is None for record in data):
        return
    try:
        records = in_tiles.loads(part, data)
    except CorruptRecordError:
        return
    if not any(record is not None and (record[1], record[2]) != (None, None) for record in records):
        return  # keys that are removed have the same form in any state
    raise UsageError(
        f"state {state!r} has rolling windows, and which they are was in the ledger alone. Nothing was written. "
        "Restore the store from a backup, or start the windows under another name."
    )


def _without_index(state: str, page: list[StoreKey]) -> list[StoreKey]:
    if any(map(is_index_key, page)):
        raise UsageError(
            f"state {state!r} has windows, a change log, corrections or forgotten keys, and what their records stand "
            "for was in the ledger alone. Nothing was written. Restore the store from a backup, or start the state "
            "under another name."
        )
    return page


class _History(NamedTuple):
    """A state by its batch reports. ``dead`` and ``open`` are ranges of txids: orphaned, and unknown."""

    owner: str
    last: BatchReport
    dead: tuple[tuple[int, int], ...]
    open: tuple[tuple[int, int], ...]


def _history(reports: Sequence[BatchReport], state: str, owner: str | None) -> _History | None:
    """None without an owner. The newest report of a batch counts, because the batch may have been rolled back."""
    if owner is None:
        if reports:
            raise UsageError(
                f"state {state!r} has batch reports, so it is a state of mapstate that lost its ledger. Nothing was "
                "written. Name the query that owned it (owner=..., --checkpoint DIRECTORY), or orphaned attempts would "
                "count."
            )
        return None
    if not reports:
        raise UsageError(
            f"state {state!r} has no batch reports, so nothing tells which attempts were committed. Nothing was "
            "written. Restore ledger and records from one backup; or remove the state (mapstate drop), and replay the "
            "source with a new checkpoint. See docs/operating.md#a-lost-ledger"
        )
    last, dead, undecided = reports[0], list[tuple[int, int]](), list[tuple[int, int]]()
    newer, skipped = last, last.txid
    for report in reports[1:]:
        if report.batch_id >= newer.batch_id:
            skipped = report.txid  # rolled back and done anew, or of another owner
            continue
        if report.txid + 1 < newer.txid:
            between = (report.txid + 1, newer.txid - 1)
            (dead if report.batch_id == newer.batch_id - 1 else undecided).append(between)
        newer, skipped = report, report.txid
    if skipped < newer.txid:
        undecided.append((skipped, newer.txid - 1))
    return _History(owner, last, tuple(reversed(dead)), tuple(undecided))


def _check_decided(history: _History, state: str, state_type: StateType, records: Sequence[Any]) -> None:
    """Raise UsageError for a record of which the reports do not tell the committed value."""
    if state_type == "non-transactional":
        return
    for record in records:
        if record is None:
            continue
        txid = record[0]
        unknown = any(low <= txid <= high for low, high in history.open)
        orphaned = txid > history.last.txid or any(low <= txid <= high for low, high in history.dead)
        if unknown or (orphaned and state_type == "transactional"):
            why = "between two reports of which one is missing" if unknown else "of an orphaned attempt"
            raise UsageError(
                f"state {state!r} has a record with txid {txid}, {why}: the value that counts cannot be told. Nothing "
                "was written. Restore ledger and records from one backup; or remove the state (mapstate drop), and "
                "replay the source with a new checkpoint."
            )


def _with_page(
    adopted: Adopted, page: list[StoreKey], records: list[Any], codec: KeyCodec, state_type: StateType
) -> Adopted:
    count, last = adopted
    for text, record in zip(page, records, strict=True):
        if record is None:  # it expired between scan and read; a removed key has a record
            continue
        _check_key(codec, text)
        count += 1
        if state_type != "non-transactional":
            last = record[0] if last is None else max(last, record[0])
    return Adopted(count, last)


def _check_key(codec: KeyCodec, text: StoreKey) -> None:
    """Refuse a key in another form than mapstate writes: the job would never find it."""
    written = codec.encode(codec.decode(text))
    if written != text:
        raise KeyEncodingError(
            f"the store holds the key {shown(text)}, which mapstate would write as {shown(written)}, so the job would "
            "not find it. Nothing was written. Rename the key in the store, or give the key column another type.",
            key=text,
        )


def _ledger(
    state: str,
    state_type: StateType,
    keys: tuple[KeyField, ...],
    fields: tuple[Field, ...],
    *,
    serializer: str,
    adopted: Adopted,
    history: _History | None,
) -> LedgerRecord:
    after = 0 if adopted.last_txid is None else adopted.last_txid + 1
    ledger = LedgerRecord(
        state=state,
        type=state_type,
        serializer=serializer,
        keys=keys,
        fields=fields,
        field_counts=((0, len(fields)),),
        owner=FORMER_OWNER,
        owners={FORMER_OWNER: 0},
        epoch=1,
        session=FORMER_OWNER,
        first_txid=0,
        next_txid=max(after, clock_txid()),  # above all txids of a topology that may still run
        last_txid=adopted.last_txid,
    )
    if history is None:
        return ledger
    last, has_txids = history.last, state_type != "non-transactional"
    keys_read = last.keys_written + last.keys_skipped
    owner, rows = history.owner, last.rows
    return msgspec.structs.replace(
        ledger,
        owner=owner,
        owners={owner: last.batch_id + 1},
        next_txid=max(ledger.next_txid, last.txid + 1),
        last_txid=last.txid if has_txids else None,
        last_commit=Commit(batch_id=last.batch_id, txid=last.txid, owner=owner, rows=rows, keys=keys_read, at=last.at),
        dead=history.dead if has_txids else (),
    )


def _make_ledger(store: Any, ledger: LedgerRecord) -> None:
    data = encode_ledger(ledger)
    decode_ledger(data, ledger.state)  # refuses a ledger that readers could not decode
    if ledger_store(store).swap(data, None, ledger.fence()) is None:
        raise _has_ledger(ledger.state)


def _has_ledger(state: str) -> UsageError:
    return UsageError(
        f"state {state!r} has a ledger already: it is a state of mapstate, and there is nothing to adopt. Nothing was "
        "written."
    )
