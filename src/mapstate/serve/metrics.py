"""What Prometheus scrapes: the last batch of each state, sums since the service started, and the service itself."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Callable
from functools import cache
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from mapstate.batch_report import BatchReport
from mapstate.errors import MapStateError
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.windows import NEVER
from mapstate.serve.states import States

_GAUGES = {
    "batch_id": "the last committed batch",
    "commit_timestamp_seconds": "when the last batch was committed",
    "commit_age_seconds": "how long ago that was",
    "keys": "keys in the state, where its ledger knows",
    "batch_rows": "rows of the last batch",
    "batch_keys_written": "keys that the last batch wrote",
    "batch_seconds": "seconds that the last batch took",
    "batch_attempts": "the attempt with which the last batch was committed",
    "watermark_timestamp_seconds": "the watermark of windows whose times are timestamps",
    "attempt_in_flight": "1 while an attempt has begun and is not committed",
    "dead_ranges": "ranges of txids that never count: above a thousand a vacuum is due",
    "up": "1 if the state can be read",
}
_SECONDS = 3.0
"""That a scrape waits for a list of the states, and for their ledgers. Prometheus by itself gives up after ten."""

_SUMS: dict[str, tuple[str, Callable[[BatchReport], float]]] = {
    "batches": ("batches", lambda _: 1),
    "rows": ("rows that arrived", attrgetter("rows")),
    "offsets_passed": ("offsets that were passed, in sources like Kafka", lambda report: report.offsets_passed or 0),
    "keys_written": ("keys that were written", attrgetter("keys_written")),
    "rows_late": ("rows whose first window had fired before, or without a usable time", attrgetter("rows_late")),
    "rows_between": ("rows between two windows", attrgetter("rows_between")),
    "retried_batches": ("batches that were not committed at the first attempt", lambda report: report.attempt > 1),
    "busy_seconds": ("seconds that batches took", lambda report: report.milliseconds / 1000),
}


class Metrics:
    """Made anew for each scrape, but for the sums: those add what the reports since the last scrape say.

    Not guaranteed: a store keeps a hundred reports, so the sums lack batches beyond a hundred between two scrapes.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, states: States) -> None:
        self._states = states
        registry = CollectorRegistry()
        self._registry = registry
        self._gauges = {
            name: Gauge(f"mapstate_{name}", f"Of a state: {text}", ["state"], registry=registry)
            for name, text in _GAUGES.items()
        }
        self._sums = {
            name: Counter(
                f"mapstate_{name}", f"Of a state, since the service started: {text}", ["state"], registry=registry
            )
            for name, (text, _) in _SUMS.items()
        }
        requests = Counter("mapstate_serve_requests", "Requests by answer", ["status"], registry=registry)
        self._of_status = cache(requests.labels)  # to find one by its label takes longer than to count
        self._seconds = Histogram("mapstate_serve_request_seconds", "Seconds of a request", registry=registry)
        self._running = Gauge("mapstate_serve_store_reads", "Bulk reads of the store so far", registry=registry)
        self._is_up = Gauge("mapstate_serve_store_up", "1 if the store has listed its states", registry=registry)
        self._last: dict[str, int] = {}
        self._names: set[str] = set()
        self._listing: asyncio.Task[list[str]] | None = None
        self._measuring: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    def refused(self, status: int) -> None:
        self._of_status(status).inc()

    def answered(self, path: str, status: int, seconds: float) -> None:
        self._of_status(status).inc()
        if path != "/events":
            self._seconds.observe(seconds)

    async def text(self) -> bytes:
        """The answer to a scrape. Of what the store does not say in `_SECONDS` it has that the state is not up."""
        async with self._turn:
            for gauge in self._gauges.values():
                gauge.clear()
            self._is_up.set(await self._list())
            for name in self._names - self._measuring.keys():
                self._measuring[name] = asyncio.create_task(self._measure(name))
            if self._measuring:
                await asyncio.wait(self._measuring.values(), timeout=_SECONDS)
            for name, measuring in list(self._measuring.items()):
                if measuring.done():
                    self._measuring.pop(name).result()
                else:  # the next scrape waits for the same read, and the store gets no second one
                    self._gauges["up"].labels(name).set(0)
            self._running.set(self._states.reads())
            return generate_latest(self._registry)

    async def _list(self) -> bool:
        """Note the states that the store has now; False where it does not say, and those of before stay."""
        self._listing = self._listing or asyncio.create_task(self._states.names())
        await asyncio.wait({self._listing}, timeout=_SECONDS)
        if not self._listing.done():
            return False
        listing, self._listing = self._listing, None
        try:
            self._names = set(listing.result())
        except MapStateError:
            return False
        return True

    async def _measure(self, name: str) -> None:
        try:
            state = await self._states.state(name)
            ledger = await state.ledger()
            reports = await state.reports(ledger)
        except MapStateError as error:
            await self._states.lose_if_gone(name, error)
            self._gauges["up"].labels(name).set(0)
            return
        # The reports are not sorted: that of a driver that was taken over may come late.
        last = max(reports, key=lambda report: report.txid, default=None)
        for metric, value in _gauges_of(ledger, last).items():
            if value is not None:
                self._gauges[metric].labels(name).set(value)
        for counter in self._sums.values() if reports else ():
            counter.labels(name)
        for report in reports:
            if report.txid > self._last.get(name, report.txid):
                for metric, (_, value_of) in _SUMS.items():
                    self._sums[metric].labels(name).inc(value_of(report))
        self._last[name] = max(-1 if last is None else last.txid, self._last.get(name, -1))


def _gauges_of(ledger: LedgerRecord, last: BatchReport | None) -> dict[str, float | None]:
    values: dict[str, float | None] = {
        "up": 1,
        "keys": ledger.keys_held(),
        "attempt_in_flight": ledger.in_flight is not None,
        "dead_ranges": len(ledger.dead),
    }
    if ledger.last_commit is not None:
        values["batch_id"] = ledger.last_commit.batch_id
        if ledger.last_commit.at:
            at = dt.datetime.fromisoformat(ledger.last_commit.at).timestamp()
            values |= {"commit_timestamp_seconds": at, "commit_age_seconds": max(0.0, time.time() - at)}
    if ledger.last_windows() is not None and ledger.time_type == "timestamp":
        mark = ledger.final_mark()
        values["watermark_timestamp_seconds"] = None if mark == NEVER else mark / 1e6
    if last is not None:
        values |= {
            "batch_rows": last.rows,
            "batch_keys_written": last.keys_written,
            "batch_seconds": last.milliseconds / 1000,
            "batch_attempts": last.attempt,
        }
    return values
