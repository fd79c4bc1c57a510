"""The ledger in its store: where a store keeps it, and how it is read and checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec

from mapstate.backing_map import IBackingMap
from mapstate.capabilities import FenceToken, LedgerStore, Scan
from mapstate.errors import (
    CorruptLedgerError,
    MapStateError,
    UsageError,
    cut,
    shown,
)
from mapstate.keys import KeyCodec, is_index_key
from mapstate.protocol.ledger_record import (
    FORMAT_WITH_ROLLING,
    FORMAT_WITHOUT_PACKED,
    NO_LEDGERS,
    LedgerRecord,
    are_times,
    format_of,
)
from mapstate.protocol.refusals import lost_ledger, no_state
from mapstate.schema import Field, KeyField, StateType
from mapstate.serializers import NativeSerializer, RecordCodec, serializer

LEDGER_KEY = "\\ledger"
"""The key of the ledger in a store that offers only `IBackingMap`. No encoded key is equal to it."""

_NO_NUMBER = 1 << 63
_PAGE = 10_000  # keys

_decoder = msgspec.json.Decoder(LedgerRecord)


def decode_ledger(data: bytes, state: str) -> LedgerRecord:
    """Decode a ledger. Raises CorruptLedgerError for anything else, and for a ledger that contradicts itself."""
    try:
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError) and data.startswith(NO_LEDGERS):
            decoded = (
                f"{state!r} is the control record of a topology, mapstate list, or an alias, mapstate ls, and no state."
            )
            raise CorruptLedgerError(decoded, state=state) from None
        raise _corrupt(state, cut(error)) from error
    if record.rolling is not None and record.format == FORMAT_WITHOUT_PACKED:
        record = msgspec.structs.replace(record, format=FORMAT_WITH_ROLLING)  # both forms of tiles are read
    expected = format_of(record.windows, record.changes, record.rolling, record.seed, record.operations)
    if record.format != expected or record.state != state:
        raise CorruptLedgerError(
            f"the ledger of state {shown(record.state)} in format {record.format} is there, where that of {state!r} in "
            f"format {expected} was expected. Nothing was written. Restore the ledger and the records from one backup.",
            state=state,
            found=record.state,
            expected=state,
        )
    flaw = _flaw(record) or _schema_flaw(
        record.serializer, record.type, record.keys, record.fields, record.field_counts
    )
    if flaw is not None:
        raise _corrupt(state, flaw)
    return record


def _corrupt(state: str, why: str) -> CorruptLedgerError:
    return CorruptLedgerError(
        f"the ledger of state {state!r} cannot be read ({why}): another program wrote it, or a newer mapstate. Nothing "
        "was written. Restore the ledger and the records from one backup.",
        state=state,
    )


def _flaw(record: LedgerRecord) -> str | None:
    """The first contradiction that no event can have left in a ledger; None without one."""
    last, attempt, next_txid = record.last_txid, record.in_flight, record.next_txid
    commits = [commit for commit in (record.last_commit, record.previous) if commit is not None]
    numbers = [record.epoch, record.first_txid, next_txid, record.floor, record.rewrites, record.operations or 0]
    numbers += [record.reset_txid, record.undone]
    numbers += record.owners.values()
    numbers += [number for commit in commits for number in (commit.txid, commit.batch_id)]
    numbers += [] if attempt is None else [attempt.txid, attempt.epoch, attempt.batch_id or 0]
    corrected = record.correction
    numbers += [] if corrected is None else [corrected.txid, corrected.last_txid_before or 0]
    bounds = [bound for span in record.dead for bound in span]
    counts = [count for _, count in record.field_counts]
    txids = [event.txid for event in (*commits, attempt, corrected) if event is not None]
    txids += [] if last is None else [last]
    times = ["" if attempt is None else attempt.at, *(commit.at for commit in commits)]
    for is_flaw, flaw in (
        (record.owner not in record.owners, "its owner is not among its owners"),
        (min(numbers) < 0 or max(numbers) >= _NO_NUMBER, "a number is out of range"),
        (max(txids, default=-1) >= next_txid, "a txid is above the next one"),
        (bounds != sorted(bounds) or any(low > high for low, high in record.dead), "its dead txids are not in order"),
        (bool(bounds) and (last is None or bounds[0] < 0 or bounds[-1] >= last), "a dead txid is above the last one"),
        (len(set(record.fields)) < len(record.fields), "a field stands twice"),
        (not counts or counts != sorted(counts) or counts[0] < 0, "its field counts are not in order"),
        (bool(counts) and counts[-1] != len(record.fields), "its last field count differs from the number of fields"),
        (not are_times(times), "a time is not ISO 8601 with an offset"),
        (record.windows is not None and record.windows.has_flaw(record.keys, commits), "its windows are no windows"),
        (record.changes is not None and record.changes.has_flaw(next_txid), "its change log is none"),
        (record.rolling is not None and record.rolling.has_flaw(commits), "its rolling windows are none"),
        (record.seed is not None and (bool(commits) or record.seed.has_flaw(last)), "its seed is none"),
    ):
        if is_flaw:
            return flaw
    return None


@lru_cache(maxsize=64)  # a reader decodes the ledger of each batch, and the schema rarely changes
def _schema_flaw(
    form: str,
    state_type: StateType,
    keys: tuple[KeyField, ...],
    fields: tuple[Field, ...],
    field_counts: tuple[tuple[int, int], ...],
) -> str | None:
    """Why keys or records of this schema cannot be read; None if they can."""
    try:
        chosen = serializer(form)
        KeyCodec(keys, native=form == NativeSerializer.name)
        RecordCodec(chosen, "", state_type, fields, field_counts)
    except (MapStateError, ValueError, TypeError, RecursionError) as error:
        return cut(error)
    return None


def read_ledger(store: Any, state: str) -> LedgerRecord:
    """Read the present ledger, for readers and tools. Errors: see `ledger_bytes` and `decode_ledger`."""
    return decode_ledger(ledger_bytes(store, state), state)


def ledger_bytes(store: Any, state: str) -> bytes:
    """Read the present ledger as it is stored.

    Without a ledger all keys of the store may be listed. Raises LedgerLostError if there are records, else
    StateNotFoundError.
    """
    stored = ledger_store(store).load()
    if stored is None and isinstance(store, Scan) and has_records(store):
        stored = ledger_store(store).load()  # a state that is made meanwhile has its ledger before its first record
        if stored is None:
            raise lost_ledger(state)
    if stored is None:
        raise no_state(state)
    return stored[0]


def check_page_size(page_size: Any, counted: str = "page_size is the number of keys on a page") -> None:
    """Raise UsageError for no number, for an empty page, and for one that no store can give."""
    if not isinstance(page_size, int) or isinstance(page_size, bool) or not 1 <= page_size < 2**31:
        raise UsageError(f"{counted}, an int from 1 to {2**31 - 1}, not {shown(page_size)}.")


def record_pages(store: Scan, page_size: int, *, index: bool = False) -> Iterator[list[Any]]:
    """List the keys of all records, a page at a time. It gives at least the keys that the store holds at the call.

    With ``index``, also those of a pane index, whose records have a codec of their own.
    Raises UsageError for an empty page.
    """
    check_page_size(page_size)
    pages = (records_in(page, index=index) for page in store.scan(page_size))
    return (page for page in pages if page)


def records_in(page: list[Any], *, index: bool = False) -> list[Any]:
    """The keys of a page that are those of records. With ``index``, also those of a pane index."""
    with suppress(TypeError):  # keys that are no text
        if "\n\\" not in "\n".join(["", *page]):  # LEDGER_KEY and those of an index begin with a backslash
            return page
    return [key for key in page if key != LEDGER_KEY and (index or not is_index_key(key))]


def has_records(store: Scan) -> bool:
    """Whether the store holds any record of its state. Without one, all keys may be listed."""
    return next(record_pages(store, _PAGE, index=True), None) is not None


class UnconditionalLedger:
    """A ledger by get and put, for a store without compare-and-set.

    Not guaranteed: of two drivers that open the state at the same moment, both may go on.
    """

    def __init__(self, backing: IBackingMap[str, bytes]) -> None:
        self._backing = backing

    def load(self) -> tuple[bytes, bytes] | None:
        """See `LedgerStore.load`; the version is the record itself."""
        record = self._backing.multi_get([LEDGER_KEY])[0]
        return None if record is None else (record, record)

    def swap(self, record: bytes, expected: bytes | None, fence: FenceToken) -> bytes | None:  # noqa: ARG002
        """See `LedgerStore.swap`. It compares and puts in two steps, and has no fence to move."""
        if self._backing.multi_get([LEDGER_KEY])[0] != expected:
            return None
        self._backing.multi_put([LEDGER_KEY], [record])
        return record


def ledger_store(store: Any) -> LedgerStore:
    """The store itself if it keeps ledgers, else an `UnconditionalLedger`."""
    return store if isinstance(store, LedgerStore) else UnconditionalLedger(store)
