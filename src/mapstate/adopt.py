"""Taking over a state that storm-redis wrote: its records stay where they are, and get a ledger.

storm-redis keeps ``[txid,curr,prev]``, ``[txid,val]`` or the bare value as JSON, which are mapstate's own records; what
it lacks is the ledger. For an operator, once, with the topology stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mapstate.backends import resolve
from mapstate.backing_map import Backend, Scan, let_go
from mapstate.errors import KeyEncodingError, UsageError
from mapstate.keys import DistinctKeys, KeyCodec, KeyField
from mapstate.ledger import clock_txid, encode_ledger, ledger_store, record_pages
from mapstate.serializers import RecordCodec, serializer
from mapstate.spec import check_state_name
from mapstate.transitions import Field, LedgerRecord, StateType

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
    page_size: int = 1000,
    dry_run: bool = False,
    on_page: Callable[[Adopted], None] | None = None,
) -> Adopted:
    """Reads every record, and makes a ledger above the highest txid: all that was found counts as committed.

    The topology that wrote them has to be stopped, and its last batch complete: what it writes afterwards does not
    count. The records are read only. ``dry_run`` makes no ledger. ``on_page`` is called after each page.

    Raises UsageError where there is a ledger already, where the store cannot list its keys, or where it holds no
    record; CorruptRecordError for what is no record of this type, KeyEncodingError for what is no key of these columns
    as mapstate writes it; StoreError.
    """
    store: Any = resolve(backend_or_url).open(check_state_name(state))
    try:
        can_scan = isinstance(store, Scan)
        if not can_scan:
            raise UsageError(f"the store of state {state!r} cannot list its keys, so it cannot be adopted")
        if ledger_store(store).load() is not None:
            raise _has_ledger(state)
        codec = RecordCodec(serializer("json"), state, type, fields, [(0, len(fields))])
        found, held = Adopted(0, None), DistinctKeys()
        key_codec = KeyCodec(keys)
        for page in record_pages(store, page_size):
            records = codec.loads(page, store.multi_get(page))
            found = _with_page(found, page, records, key_codec, type)
            held.update(_held(page, records, type))
            if on_page is not None:
                on_page(found)
        if not found.records:
            raise UsageError(
                f"there is no record of state {state!r} here, so there is nothing to adopt: look at the database "
                "number, and at `layout` and `records` in the URL"
            )
        if not dry_run:
            _make_ledger(store, _ledger(state, type, tuple(keys), tuple(fields), found, held=len(held)))
        return found
    finally:
        let_go(store)


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


def _held(page: list[str], records: list[Any], state_type: StateType) -> list[str]:
    """The keys that have a value; of a removed one storm-redis leaves a record without."""
    values = records if state_type == "non-transactional" else [None if one is None else one[1] for one in records]
    return [text for text, value in zip(page, values, strict=True) if value is not None]


def _check_key(codec: KeyCodec, text: str) -> None:
    """The key reads back as it is written: another text would never be found by its job."""
    written = codec.encode(codec.decode(text))
    if written != text:
        raise KeyEncodingError(
            f"the store holds the key {text!r}, which mapstate would write as {written!r}, so the job would begin it "
            "anew from nothing. Nothing was written. Rename it in the store, or give the key column another type.",
            key=text,
        )


def _ledger(
    state: str,
    state_type: StateType,
    keys: tuple[KeyField, ...],
    fields: tuple[Field, ...],
    found: Adopted,
    *,
    held: int,
) -> LedgerRecord:
    after = 0 if found.last_txid is None else found.last_txid + 1
    return LedgerRecord(
        state=state,
        type=state_type,
        serializer="json",
        keys=keys,
        fields=fields,
        layouts=((0, len(fields)),),
        owner=FORMER_OWNER,
        owners={FORMER_OWNER: 0},
        epoch=1,
        session=FORMER_OWNER,
        first_txid=0,
        next_txid=max(after, clock_txid()),  # far above what the topology would give out if it still ran
        last_txid=found.last_txid,
        first_keys=held,
    )


def _make_ledger(store: Any, ledger: LedgerRecord) -> None:
    if ledger_store(store).swap(encode_ledger(ledger), None, ledger.fence()) is None:
        raise _has_ledger(ledger.state)


def _has_ledger(state: str) -> UsageError:
    return UsageError(
        f"state {state!r} has a ledger already: it is a state of mapstate, and there is nothing to adopt. Nothing was "
        "written."
    )
