"""The ledger in its store: its JSON, where a store keeps it, and how readers and tools read it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from mapstate.backing_map import IBackingMap
from mapstate.capabilities import FenceToken, LedgerStore, Scan
from mapstate.errors import (
    CorruptLedgerError,
    LedgerLostError,
    MapStateError,
    StateNotFoundError,
    UsageError,
    cut,
    shown,
)
from mapstate.keys import KeyCodec
from mapstate.protocol.ledger_record import FORMAT, LedgerRecord, is_time
from mapstate.schema import Field, KeyField, StateType
from mapstate.serializers import RecordCodec, serializer

__all__ = [
    "LEDGER_KEY",
    "UnconditionalLedger",
    "check_page_size",
    "decode_ledger",
    "encode_ledger",
    "has_records",
    "ledger_store",
    "lost_ledger",
    "read_ledger",
    "record_pages",
]

LEDGER_KEY = "\\ledger"
"""Where a store that offers only `IBackingMap` keeps the ledger; no encoded key can be equal to it."""

_NO_NUMBER = 1 << 63
_LOOK = 10_000  # keys on a page

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LedgerRecord)


def encode_ledger(record: LedgerRecord) -> bytes:
    """The ledger as a store keeps it: JSON, readable in the store's own shell."""
    return _encoder.encode(record)


def decode_ledger(data: bytes, state: str) -> LedgerRecord:
    """The ledger from a store. Raises CorruptLedgerError for anything else, also for one that contradicts itself."""
    try:
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise _corrupt(state, cut(error)) from error
    if record.format != FORMAT or record.state != state:
        raise CorruptLedgerError(
            f"found the ledger of state {shown(record.state)} in format {record.format} where that of {state!r} in "
            f"format {FORMAT} was expected. Nothing was written.",
            state=state,
        )
    flaw = _flaw(record) or _schema_flaw(
        record.serializer, record.type, record.keys, record.fields, record.field_counts
    )
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
    commits = [one for one in (record.last_commit, record.previous) if one is not None]
    numbers = [record.epoch, record.first_txid, next_txid, record.floor, record.rewrites, *record.owners.values()]
    numbers += [number for one in commits for number in (one.txid, one.batch_id)]
    numbers += [] if at is None else [at.txid, at.epoch, at.batch_id or 0]
    bounds = [bound for span in record.dead for bound in span]
    counts = [count for _, count in record.field_counts]
    begun = [one.txid for one in (*commits, at) if one is not None] + ([] if last is None else [last])
    times = ["" if at is None else at.at, *(one.at for one in commits)]
    for flaw, what in (
        (record.owner not in record.owners, "its owner is not among its owners"),
        (min(numbers) < 0 or max(numbers) >= _NO_NUMBER, "a number is out of range"),
        (max(begun, default=-1) >= next_txid, "a txid is above the next one"),
        (bounds != sorted(bounds) or any(low > high for low, high in record.dead), "its dead txids are in disorder"),
        (bool(bounds) and (last is None or bounds[0] < 0 or bounds[-1] >= last), "a dead txid is above the last one"),
        (len(set(record.fields)) < len(record.fields), "a field is there twice"),
        (not counts or counts != sorted(counts) or counts[0] < 0, "its field counts are in disorder"),
        (bool(counts) and counts[-1] != len(record.fields), "its last field count is not that of its fields"),
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
    field_counts: tuple[tuple[int, int], ...],
) -> str | None:
    """Why nobody can read keys or records of this schema; None where all is well."""
    try:
        chosen = serializer(form)
        KeyCodec(keys, native=chosen.native)
        RecordCodec(chosen, "", state_type, fields, field_counts)
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


class UnconditionalLedger:
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
    return store if isinstance(store, LedgerStore) else UnconditionalLedger(store)
