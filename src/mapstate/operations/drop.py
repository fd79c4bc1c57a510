"""Remove a whole state: its records, and all that is stored beside them.

An operator runs it with the query stopped. The removal takes the ledger first and removes it last. So a living driver
is fenced, no query can open a half-removed state, and an interrupted removal can be repeated.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mapstate.backends import opened, resolve
from mapstate.backing_map import Backend
from mapstate.capabilities import Drops, LedgerStore, Scan, SpreadFences
from mapstate.errors import CorruptRecordError, FencedError, StateNotFoundError, UsageError
from mapstate.findings import named_in
from mapstate.operations.swap import aliases_of
from mapstate.protocol.fences import Fences
from mapstate.protocol.ledger_record import DROPPER, LedgerRecord, encode_ledger, now
from mapstate.protocol.opening import clock_txid
from mapstate.protocol.stored_ledger import decode_ledger, has_records, ledger_store
from mapstate.protocol.upkeep import begin_drop, taken


class Dropped(NamedTuple):
    """The counts of a removal, at its end or so far.

    ``ledger``        as it was before, None if it was lost
    ``records``       the number of records removed
    ``foreign``       keys under the state's name that are no records of it; they are left
    ``foreign_keys``  the first ten of them
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
    """Remove a state: records, ledger, fences, claims, reports. It cannot be undone.

    Stop the query first. A driver between two batches cannot be told from a dead one: at its next batch it finds the
    state gone, and stops. Run an interrupted removal again.

    Args:
        backend_or_url: The store of the state.
        state: The state's name.
        force: Also remove a state with an attempt in flight, with a ledger that cannot be read, or kept by an alias.
        dry_run: Check everything, and remove nothing.
        on_page: Called after each page of records with the counts so far.

    Raises:
        UsageError: An attempt is in flight, an alias keeps the state, or the store has no `Drops`.
        StateNotFoundError: There is neither a ledger nor a record.
        CorruptRecordError: The ledger cannot be read.
        FencedError: Another driver or operator changed the ledger meanwhile.
        StoreError: The store failed.

    """
    backend = resolve(backend_or_url)
    with opened(backend, state) as store:
        if not isinstance(store, Drops) or store.drop is None:
            raise UsageError(
                f"the store of state {state!r} offers no Drops, so it cannot remove a state. Nothing was removed. "
                "Remove the keys under the state's name with the store's own tools."
            )
        ask = partial(_check_aliases, backend, state)
        if not force:
            ask()
        return _drop(store, state, ask, force=force, dry_run=dry_run, on_page=on_page)


def _check_aliases(backend: Backend, state: str) -> None:
    names = aliases_of(backend, state)
    if names:
        raise UsageError(
            f"the alias {names[0]!r} keeps state {state!r} for its readers. Nothing was removed. Have them read "
            f"another version, mapstate swap {names[0]} --to VERSION; then mapstate swap {names[0]} --keep-only."
        )


def _drop(
    store: Any,
    state: str,
    ask: Callable[[], None],
    *,
    force: bool,
    dry_run: bool,
    on_page: Callable[[Dropped], None] | None,
) -> Dropped:
    ledgers = ledger_store(store)
    stored = ledgers.load()
    try:
        ledger = None if stored is None else decode_ledger(stored[0], state)
    except CorruptRecordError:
        if not force:
            raise
        ledger = None
    if stored is None and isinstance(store, Scan) and not has_records(store):
        raise StateNotFoundError(
            f"there is no state {state!r} here, neither a ledger nor a record. Nothing was removed. Check the name, "
            "the database number, the key prefix and the layout.",
            state=state,
        )
    session = f"{DROPPER} {secrets.token_hex(8)}"  # to such a ledger no swap leads
    after = begin_drop(ledger, state, session, clock_txid(), force=force, at=now())
    done, version = Dropped(ledger, 0), None if stored is None else stored[1]
    if dry_run:
        return done
    if ledger is not None and not force:  # a swap may have come since the aliases were asked
        ledger = taken(ledger, session)
        version = _written(ledgers, ledger, version)
        try:
            ask()
        except BaseException:
            _written(ledgers, taken(ledger, secrets.token_hex(8)), version)
            raise
        after = begin_drop(ledger, state, session, clock_txid(), at=now())
    fences = Fences(store, state) if isinstance(store, SpreadFences) else None
    if fences is not None:
        fences.verify(after.next_txid, None)
    version = _written(ledgers, after, version)
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


def _written(ledgers: LedgerStore, ledger: LedgerRecord, expected: Any) -> Any:
    """Its version. Raises FencedError."""
    version = ledgers.swap(encode_ledger(ledger), expected, ledger.fence())
    if version is None:
        raise FencedError(
            f"the ledger of state {ledger.state!r} has changed meanwhile: a driver or another operator is at work. "
            "Nothing was removed. Stop it, and run the removal again.",
            state=ledger.state,
        )
    return version
