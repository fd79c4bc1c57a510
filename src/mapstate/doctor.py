"""What may be wrong with a state and its store, before it goes wrong: for an operator, without Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from mapstate import transitions
from mapstate.backends import resolve
from mapstate.backing_map import Backend, Checkup, Claims, FencedWrites, FilteredWrites, LedgerStore, Scan, let_go
from mapstate.batch_report import BatchReport, read_reports
from mapstate.errors import CorruptRecordError, MapStateError, StoreError
from mapstate.findings import Finding
from mapstate.ledger import Ledger, read_ledger
from mapstate.reader import CountedKeys, open_reader
from mapstate.spec import check_state_name
from mapstate.transitions import LedgerRecord

__all__ = ["examine", "recount"]

_MOST_DEAD = 1000
_PATIENCE = 600.0
_COUNTS = 3


def examine(
    backend_or_url: Backend | str, state: str, *, replay_horizon: float = 86_400.0, count_keys: bool = True
) -> list[Finding]:
    """Looks at the ledger, the last batch reports, the number of keys, and the store; what is well is told too.

    ``replay_horizon`` in seconds: how long after a batch it may have to be repeated. Reads only. ``count_keys``
    reads all records, and again if batches are committed meanwhile, at most three times; without it, a few small
    requests, but SQLite's own check reads the whole file. Reports that cannot be read are a finding. Raises
    StateNotFoundError, CorruptRecordError, StoreError.
    """
    store: Any = resolve(backend_or_url).open(check_state_name(state))
    try:
        ledger = read_ledger(store, state)
        found = [*_capabilities(store), *_reports(store, ledger), _dead(ledger)]
        if count_keys and isinstance(store, Scan):
            found.append(_keys(backend_or_url, state))
        if isinstance(store, Checkup):
            found += store.checkup(replay_horizon)
        return found
    finally:
        let_go(store)


def _capabilities(store: Any) -> Iterator[Finding]:
    for capability, missing in (
        (LedgerStore, "two drivers that open the state at the same moment are not told apart"),
        (FencedWrites, "what a task writes after its attempt was given up is not refused"),
        (Claims, "two tries of one task can mix their writes in one attempt"),
        (Scan, "the state cannot be scanned or vacuumed"),
    ):
        filters = capability is FencedWrites and isinstance(store, FilteredWrites)
        if not isinstance(store, capability) and not filters:
            yield Finding(
                "warning",
                "store",
                f"the store offers no {capability.__name__}: {missing}",
                "all that docs/guarantees.md lists per store",
                "Run one driver at a time, without speculation; or take another store.",
            )


def _reports(store: Any, ledger: LedgerRecord) -> Iterator[Finding]:
    try:
        reports = read_reports(store, ledger.state)
    except (CorruptRecordError, StoreError) as error:
        reports = []
        advice = "Delete what something else wrote there, or let this user read them (on Redis: LRANGE)."
        yield Finding("warning", "batch reports", error.message, "reports of this state", advice)
    yield _in_flight(ledger, reports)


def _in_flight(ledger: LedgerRecord, reports: list[BatchReport]) -> Finding:
    """Whether an attempt has been in flight for longer than the batches before it would explain."""
    at = ledger.in_flight
    expected = "nothing in flight, or a driver at work"
    if at is None or at.epoch != ledger.epoch:
        return Finding("ok", "in flight", "nothing", expected)
    what = f"txid {at.txid} ({'a vacuum' if at.batch_id is None else f'batch {at.batch_id}'})"
    since = at.at or (ledger.committed.at if ledger.committed is not None else "")
    if not since:
        return Finding("ok", "in flight", f"{what}; nothing tells since when", expected)
    age = (dt.datetime.now(dt.UTC) - _time(since)).total_seconds()
    times = [_time(one.at) for one in reports]
    gaps = [(after - before).total_seconds() for after, before in pairwise(times)]
    longest = max([*gaps, *(one.milliseconds / 1000 for one in reports)], default=0.0)
    began = f"begun {age:.0f} s ago" if at.at else f"the last commit was {age:.0f} s ago"
    found = f"{what}; {began}, and of late the longest pause between two commits was {longest:.0f} s"
    if age <= max(_PATIENCE, 3 * longest):
        return Finding("ok", "in flight", found, expected)
    advice = "Is the job running? Where its driver is gone, start it again: it carries on by itself."
    if at.batch_id is None:
        advice = "Was a vacuum killed? The next batch leaves it behind, and so does mapstate vacuum --take-over."
    return Finding("warning", "in flight", f"{found}: it looks orphaned", expected, advice)


def _dead(ledger: LedgerRecord) -> Finding:
    found = f"{sum(high - low + 1 for low, high in ledger.dead)} dead txids in {len(ledger.dead)} ranges"
    expected = f"at most {_MOST_DEAD} ranges: every reader reads them"
    if len(ledger.dead) <= _MOST_DEAD:
        return Finding("ok", "dead", found, expected)
    return Finding("warning", "dead", found, expected, "Run mapstate vacuum between two batches.")


def recount(backend_or_url: Backend | str, state: str, *, dry_run: bool = False) -> CountedKeys:
    """Counts all keys, and writes the number into the ledger: keys that are missing are accepted as lost.

    For an operator, from any process, between two batches of the stream. ``dry_run`` writes nothing. Raises UsageError
    if a batch or a vacuum was at work, for a state with a ttl, and for a store that cannot list its keys;
    StateNotFoundError, CorruptRecordError, LedgerLostError, StoreError.
    """
    counted = _count(backend_or_url, state)
    transitions.recount(counted.ledger, counted.ledger, counted.found)  # says what is in the way
    if not dry_run:
        store: Any = resolve(backend_or_url).open(state)
        try:
            Ledger(store, state).recount(counted.ledger, counted.found)
        finally:
            let_go(store)
    return counted


def _count(backend_or_url: Backend | str, state: str) -> CountedKeys:
    with open_reader(backend_or_url, state) as reader:
        return reader.count_keys()


def _keys(backend_or_url: Backend | str, state: str) -> Finding:
    """Whether all keys are there that the ledger counts."""
    expected = "as many keys as the ledger says"
    try:
        counted = _count(backend_or_url, state)
        for _ in range(_COUNTS - 1):
            if not counted.settled:
                counted = _count(backend_or_url, state)
    except MapStateError as error:
        advice = "Mend what it says, and run this again; --no-count-keys leaves it out."
        return Finding("warning" if isinstance(error, StoreError) else "error", "keys", error.message, expected, advice)
    found = f"{counted.found} keys"
    if counted.ledger.expires:
        return Finding("ok", "keys", f"{found}; a state with a ttl cannot tell how many it should hold", expected)
    if not counted.settled:
        why = f"{found}, not compared: batches were at work during each of {_COUNTS} counts"
        return Finding("warning", "keys", why, expected, "Run this again between two batches.")
    if counted.held is None:
        advice = "Run mapstate recount, or mapstate vacuum, between two batches: from then on it is known."
        return Finding("warning", "keys", f"{found}; the ledger does not know how many", expected, advice)
    if counted.found == counted.held:
        return Finding("ok", "keys", found, expected)
    both = f"{found}, and the ledger says {counted.held}"
    if counted.found > counted.held:
        advice = "Did something else write records? If they are right, run mapstate recount."
        return Finding("warning", "keys", f"{both}: {counted.found - counted.held} too many", expected, advice)
    advice = (
        "Something else deleted records, or the store evicted or lost them. Restore the store from a copy and rewind "
        "the checkpoint; or accept the loss: mapstate recount."
    )
    return Finding("error", "keys", f"{both}: {counted.held - counted.found} missing", expected, advice)


def _time(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)
