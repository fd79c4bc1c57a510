"""Removing a state whole: its records, and all that lies beside them.

To be run by an operator, with the query stopped. The ledger is taken first and goes last: a driver that lives is
fenced, no query can open what is half gone, and a removal that was interrupted is done again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from mapstate.backends import resolve
from mapstate.backing_map import Backend
from mapstate.capabilities import Drops, Scan, SpreadFences, close_if_possible
from mapstate.errors import CorruptRecordError, FencedError, StateNotFoundError, UsageError
from mapstate.findings import named_in
from mapstate.protocol.fences import Fences
from mapstate.protocol.ledger_record import LedgerRecord, clock_txid, encode_ledger, now
from mapstate.protocol.stored_ledger import decode_ledger, has_records, ledger_store
from mapstate.protocol.upkeep import begin_drop
from mapstate.spec import check_state_name

__all__ = ["Dropped", "drop"]


class Dropped(NamedTuple):
    """What is there to be removed, or was: the ledger, None where it was lost; and how many records.

    ``foreign`` keys under the state's name are no records of it, and were left; ``foreign_keys`` are the first ten.
    """

    ledger: LedgerRecord | None
    records: int
    foreign: int = 0
    foreign_keys: tuple[str, ...] = ()


def drop(
    backend_or_url: Backend | str,
    state: str,
    *,
    force: bool = False,
    dry_run: bool = False,
    on_page: Callable[[Dropped], None] | None = None,
) -> Dropped:
    """Removes a state: records, ledger, fences, claims, reports. It cannot be undone.

    By an operator, with the query stopped. A driver between two batches cannot be told from one that is gone: it
    finds its state gone at its next batch and stops. If it is interrupted, run it again. ``force`` also removes a state
    with an attempt in flight, or with a ledger that cannot be read. ``dry_run`` only looks. ``on_page`` is called
    after each page of records.

    Raises UsageError with an attempt in flight, and for a store without `Drops`; StateNotFoundError where there is
    neither ledger nor record; CorruptRecordError; FencedError where somebody else opens or drops the state meanwhile;
    StoreError.
    """
    store: Any = resolve(backend_or_url).open(check_state_name(state))
    try:
        if not isinstance(store, Drops) or store.drop is None:
            raise UsageError(
                f"the store of state {state!r} offers no Drops, so it cannot remove a state. Nothing was removed. "
                "Remove what is under the state's name with the store's own tools."
            )
        return _drop(store, state, force=force, dry_run=dry_run, on_page=on_page)
    finally:
        close_if_possible(store)


def _drop(store: Any, state: str, *, force: bool, dry_run: bool, on_page: Callable[[Dropped], None] | None) -> Dropped:
    found = ledger_store(store).load()
    try:
        ledger = None if found is None else decode_ledger(found[0], state)
    except CorruptRecordError:
        if not force:
            raise
        ledger = None
    if found is None and isinstance(store, Scan) and not has_records(store):
        raise StateNotFoundError(
            f"there is no state {state!r} here, neither a ledger nor a record: look at the name, the database number, "
            "the key prefix and the layout.",
            state=state,
        )
    after = begin_drop(ledger, state, secrets.token_hex(8), clock_txid(), force=force, at=now())
    done = Dropped(ledger, 0)
    if dry_run:
        return done
    fences = Fences(store, state) if isinstance(store, SpreadFences) else None
    if fences is not None:
        fences.verify(after.next_txid, None)
    version = ledger_store(store).swap(encode_ledger(after), None if found is None else found[1], after.fence())
    if version is None:
        raise FencedError(
            f"the ledger of state {state!r} has changed meanwhile: a driver or another operator is at work. Nothing "
            "was removed. Stop it, and run this again.",
            state=state,
        )
    if fences is not None:
        fences.advance_to(after.fence(), None)
    try:
        for records in store.drop(version, after.fence()):
            done = done._replace(records=done.records + records)
            if on_page is not None:
                on_page(done)
    except CorruptRecordError as error:
        keys = named_in(error)
        if not keys:
            raise
        done = done._replace(foreign=error.facts.get("count", len(keys)), foreign_keys=tuple(keys))
    return done
