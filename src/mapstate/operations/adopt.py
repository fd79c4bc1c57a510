"""Taking over records that have no ledger: they stay where they are, and get one.

storm-redis keeps ``[txid,curr,prev]``, ``[txid,val]`` or the bare value as JSON, which are mapstate's own records; what
it lacks is the ledger. For an operator, once, with the topology stopped.

A state of mapstate whose ledger was lost has batch reports beside its records. They say which of the last attempts were
committed, so an attempt that was cut short does not count, and its batch is done anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from mapstate.backends import resolve
from mapstate.backing_map import Backend
from mapstate.batch_report import BatchReport, read_reports
from mapstate.capabilities import Scan, close_if_possible
from mapstate.errors import KeyEncodingError, UsageError, shown
from mapstate.keys import KeyCodec
from mapstate.maps.serialized import Room
from mapstate.protocol.ledger_record import Commit, LedgerRecord, clock_txid, encode_ledger
from mapstate.protocol.stored_ledger import decode_ledger, ledger_store, record_pages
from mapstate.schema import Field, KeyField, StateType
from mapstate.serializers import RecordCodec
from mapstate.serializers import serializer as serializer_named
from mapstate.spec import check_state_name

__all__ = ["FORMER_OWNER", "Adopted", "adopt"]

FORMER_OWNER = "storm-redis"
"""The owner in a ledger that `adopt` makes: the first streaming query takes over with on_new_owner="adopt"."""


class Adopted(NamedTuple):
    """What an adoption found, or has found so far: records, and the highest txid; None where records have none."""

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
    """Reads every record, and makes a ledger above the highest txid.

    Of a topology of storm-redis all that was found counts as committed: it has to be stopped, and its last batch
    complete. Of a state of mapstate that lost its ledger, ``owner`` is the id of its query (`query_of` its checkpoint).
    Then that counts which the batch reports say, and what is older than they are; the query starts again as it was.
    What is written afterwards does not count. The records are read only. ``dry_run`` makes no ledger. ``on_page`` is
    called after each page.

    Not found out: attempts cut short before the oldest report, a reset, and fields that were added since.

    Raises UsageError where there is a ledger already, where the reports do not say which records count, where the store
    cannot list its keys, or where it holds no record; CorruptRecordError for what is no record of this type,
    KeyEncodingError for what is no key of these columns as mapstate writes it; StoreError.
    """
    store: Any = resolve(backend_or_url).open(check_state_name(state))
    try:
        can_scan = isinstance(store, Scan)
        if not can_scan:
            raise UsageError(f"the store of state {state!r} cannot list its keys, so it cannot be adopted")
        if ledger_store(store).load() is not None:
            raise _has_ledger(state)
        form = serializer_named(serializer)
        codec = RecordCodec(form, state, type, fields, [(0, len(fields))])
        history = _history(read_reports(store, state), state, owner)
        found = Adopted(0, None)
        key_codec = KeyCodec(keys, native=form.native)
        room = Room(fields)
        for part in (part for page in record_pages(store, page_size) for part in room.parts(page)):
            stored = store.multi_get(part)
            room.learn(stored)
            records = codec.loads(part, stored)
            found = _with_page(found, part, records, key_codec, type)
            if history is not None:
                _check_decided(history, state, type, records)
            if on_page is not None:
                on_page(found)
        if not found.records:
            raise UsageError(
                f"there is no record of state {state!r} here, so there is nothing to adopt: look at the database "
                "number, and at `layout` and `records` in the URL"
            )
        if not dry_run:
            ledger = _ledger(state, type, tuple(keys), tuple(fields), found)
            _make_ledger(store, msgspec.structs.replace(_with_history(ledger, history), serializer=serializer))
        return found
    finally:
        close_if_possible(store)


class _History(NamedTuple):
    """What batch reports say of a state. ``dead`` and ``open`` are ranges of txids: not committed, and not known."""

    owner: str
    last: BatchReport
    dead: tuple[tuple[int, int], ...]
    open: tuple[tuple[int, int], ...]


def _history(reports: Sequence[BatchReport], state: str, owner: str | None) -> _History | None:
    """None without an owner. Of a batch that was rolled back and done anew the newest report counts."""
    if owner is None:
        if reports:
            raise UsageError(
                f"state {state!r} has batch reports, so it is a state of mapstate that lost its ledger: say which "
                "query owned it (owner=..., --checkpoint DIRECTORY), or attempts that were cut short would count. "
                "Nothing was written."
            )
        return None
    if not reports:
        raise UsageError(
            f"state {state!r} has no batch reports, so nothing says which attempts were committed. Nothing was "
            "written. Restore ledger and records from one backup; or remove the state (mapstate drop), and replay the "
            "source with a new checkpoint."
        )
    last, dead, undecided = reports[0], list[tuple[int, int]](), list[tuple[int, int]]()
    newer, skipped = last, last.txid
    for one in reports[1:]:
        if one.batch_id >= newer.batch_id:
            skipped = one.txid  # rolled back, and done anew; or of another owner
            continue
        if one.txid + 1 < newer.txid:
            between = (one.txid + 1, newer.txid - 1)
            (dead if one.batch_id == newer.batch_id - 1 else undecided).append(between)
        newer, skipped = one, one.txid
    if skipped < newer.txid:
        undecided.append((skipped, newer.txid - 1))
    return _History(owner, last, tuple(reversed(dead)), tuple(undecided))


def _check_decided(history: _History, state: str, state_type: StateType, records: Sequence[Any]) -> None:
    """The reports say of each record whether it counts, and the record has the value that does. Raises UsageError."""
    if state_type == "non-transactional":
        return
    for record in records:
        if record is None:
            continue
        txid = record[0]
        unknown = any(low <= txid <= high for low, high in history.open)
        orphaned = txid > history.last.txid or any(low <= txid <= high for low, high in history.dead)
        if unknown or (orphaned and state_type == "transactional"):
            why = "between two reports of which one is missing" if unknown else "of an attempt that was cut short"
            raise UsageError(
                f"state {state!r} has a record with txid {txid}, {why}: which value counts cannot be told. Nothing was "
                "written. Restore ledger and records from one backup; or remove the state (mapstate drop), and replay "
                "the source with a new checkpoint."
            )


def _with_history(ledger: LedgerRecord, history: _History | None) -> LedgerRecord:
    if history is None:
        return ledger
    last = history.last
    keys = last.keys_written + last.keys_skipped
    commit = Commit(batch_id=last.batch_id, txid=last.txid, owner=history.owner, rows=last.rows, keys=keys, at=last.at)
    return msgspec.structs.replace(
        ledger,
        owner=history.owner,
        owners={history.owner: last.batch_id + 1},
        next_txid=max(ledger.next_txid, last.txid + 1),
        last_txid=None if ledger.type == "non-transactional" else last.txid,
        last_commit=commit,
        dead=() if ledger.type == "non-transactional" else history.dead,
    )


def _with_page(found: Adopted, page: list[str], records: list[Any], codec: KeyCodec, state_type: StateType) -> Adopted:
    count, last = found
    for text, record in zip(page, records, strict=True):
        if record is None:  # it expired between scan and read; a removed value is no None here
            continue
        _check_key(codec, text)
        count += 1
        if state_type != "non-transactional":
            last = record[0] if last is None else max(last, record[0])
    return Adopted(count, last)


def _check_key(codec: KeyCodec, text: str) -> None:
    """The key reads back as it is written: another text would never be found by its job."""
    written = codec.encode(codec.decode(text))
    if written != text:
        raise KeyEncodingError(
            f"the store holds the key {shown(text)}, which mapstate would write as {shown(written)}, so the job would "
            "begin it anew from nothing. Nothing was written. Rename it in the store, or give the key column another "
            "type.",
            key=text,
        )


def _ledger(
    state: str,
    state_type: StateType,
    keys: tuple[KeyField, ...],
    fields: tuple[Field, ...],
    found: Adopted,
) -> LedgerRecord:
    after = 0 if found.last_txid is None else found.last_txid + 1
    return LedgerRecord(
        state=state,
        type=state_type,
        serializer="json",
        keys=keys,
        fields=fields,
        field_counts=((0, len(fields)),),
        owner=FORMER_OWNER,
        owners={FORMER_OWNER: 0},
        epoch=1,
        session=FORMER_OWNER,
        first_txid=0,
        next_txid=max(after, clock_txid()),  # far above what the topology would give out if it still ran
        last_txid=found.last_txid,
    )


def _make_ledger(store: Any, ledger: LedgerRecord) -> None:
    data = encode_ledger(ledger)
    decode_ledger(data, ledger.state)  # never one that nobody could read
    if ledger_store(store).swap(data, None, ledger.fence()) is None:
        raise _has_ledger(ledger.state)


def _has_ledger(state: str) -> UsageError:
    return UsageError(
        f"state {state!r} has a ledger already: it is a state of mapstate, and there is nothing to adopt. Nothing was "
        "written."
    )
