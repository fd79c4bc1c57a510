"""Commits as they come: for events, and for requests that wait for a batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import msgspec

from mapstate.errors import MapStateError
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.serve.answers import Busy, Problem, as_of, problem_of
from mapstate.serve.states import OpenState, States

_INTERVAL = 0.2  # seconds between two reads of the ledgers that somebody waits for
_MOST_LISTENERS = 500
_MOST_BEHIND = 1_000  # events that wait for one listener; a slower one is cut off
_MOST_WAITING = 500  # requests that wait for a batch; others go on beside them
_TICKS_FOR_REPORT = 5
_HEARTBEAT = 15.0  # seconds

Event = dict[str, Any]


class Commits:
    """Reads ledgers five times a second while somebody waits: all of them for a listener, else those waited for."""

    def __init__(self, states: States) -> None:
        self._states = states
        self._listeners: set[asyncio.Queue[Event | None]] = set()
        self._waiting: set[tuple[str, int, asyncio.Future[None]]] = set()
        self._seen: dict[str, tuple[int | None, int]] = {}  # the last txid, and how often its report was missing
        self._away: set[str] = set()
        self._knows_all = asyncio.Event()  # each state that was there when the first listener came has been seen
        self._following: asyncio.Task[None] | None = None

    async def reached(self, name: str, batch_id: int, seconds: float) -> None:
        """Wait until the state has committed the batch, or a later one. Raises Problem after so many seconds."""
        state = await self._states.state(name)
        if _has(await state.ledger(), batch_id):
            return
        if len(self._waiting) >= _MOST_WAITING:
            raise Busy(f"{len(self._waiting)} requests wait for a batch.")
        done = asyncio.get_running_loop().create_future()
        waiting = (name, batch_id, done)
        self._waiting.add(waiting)
        self._start()
        try:
            await asyncio.wait_for(done, seconds)
        except TimeoutError:
            ledger = await (await self._states.state(name)).ledger()
            if _has(ledger, batch_id):
                return
            detail = f"Batch {batch_id} of state {name!r} was not committed within {seconds:g} seconds."
            raise Problem(503, detail, retry_after=1, as_of=as_of(ledger)) from None
        finally:
            self._waiting.discard(waiting)

    def events(self) -> AsyncGenerator[Event | None, None]:
        """An event per commit of any state, and where a state cannot be read.

        First comes None: what is committed from then on is an event. More of them come after a while without an event,
        also before, where the store is away or takes long to be listed. All end for a listener that is far behind.
        Raises Busy.
        """
        if len(self._listeners) >= _MOST_LISTENERS:
            raise Busy(f"{len(self._listeners)} clients listen for events.")
        return self._heard()

    async def _heard(self) -> AsyncGenerator[Event | None, None]:
        queue: asyncio.Queue[Event | None] = asyncio.Queue(_MOST_BEHIND)
        if not self._listeners:
            self._knows_all = asyncio.Event()
            self._seen.clear()
            self._away.clear()
        self._listeners.add(queue)
        self._start()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._knows_all.wait(), _HEARTBEAT)
            yield None
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), _HEARTBEAT)
                except TimeoutError:
                    yield None
                    continue
                if event is None:
                    return
                yield event
        finally:
            self._listeners.discard(queue)

    async def close(self) -> None:
        """End all events, and every wait."""
        for queue in self._listeners:
            _end(queue)
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following

    def _start(self) -> None:
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        """No poll waits for another one, or for a listing: on a large Redis each may look through all keys."""
        listing: asyncio.Task[list[str]] | None = None
        listed: list[str] = []
        polls: dict[str, asyncio.Task[None]] = {}
        first: tuple[asyncio.Event, list[asyncio.Task[None]]] | None = None  # the polls of a listener's first listing
        try:
            while self._listeners or self._waiting:
                names, is_listed = {name for name, _, _ in self._waiting}, False
                if self._listeners:
                    listing = listing or asyncio.create_task(self._states.names())
                    await asyncio.wait({listing}, timeout=_INTERVAL)
                    if listing.done():
                        with suppress(MapStateError):  # each state says by itself that the store is away
                            listed, is_listed = listing.result(), True
                        listing = None
                    names.update(listed)
                polls = {name: poll for name, poll in polls.items() if not poll.done()}
                polls |= {name: asyncio.create_task(self._poll(name)) for name in names - polls.keys()}
                if is_listed and first is None and not self._knows_all.is_set():
                    first = self._knows_all, list(polls.values())
                if polls:
                    await asyncio.wait(polls.values(), timeout=_INTERVAL)
                if first is not None and all(poll.done() for poll in first[1]):
                    first[0].set()
                    first = None
                await asyncio.sleep(_INTERVAL)
        finally:
            for task in (listing, *polls.values()):
                if task is not None:
                    task.cancel()

    async def _poll(self, name: str) -> None:
        try:
            state = await self._states.state(name)
            ledger = await state.ledger()
            self._answer_waiting(ledger)
            if self._listeners:
                await self._publish(state, ledger)
        except MapStateError as error:
            await self._states.lose_if_gone(name, error)
            if name not in self._away:
                self._away.add(name)
                self._send({"event": "problem", "state": name, "problem": problem_of(error).document})

    def _answer_waiting(self, ledger: LedgerRecord) -> None:
        for name, batch_id, done in self._waiting:
            if name == ledger.state and not done.done() and _has(ledger, batch_id):
                done.set_result(None)

    async def _publish(self, state: OpenState, ledger: LedgerRecord) -> None:
        """Send what is new since the last time. A report comes shortly after its commit, or not at all."""
        name, last = ledger.state, ledger.last_commit
        txid = None if last is None else last.txid
        is_back = name in self._away
        seen = self._seen.setdefault(name, (None if self._knows_all.is_set() else txid, 0))
        if seen[0] == txid and not is_back:
            return
        reports = await state.reports(ledger)
        if reports and txid is not None and reports[0].txid < txid and seen[1] < _TICKS_FOR_REPORT:
            self._seen[name] = (seen[0], seen[1] + 1)
            return
        self._seen[name] = (txid, 0)
        self._away.discard(name)
        new = reports[:1] if seen[0] is None else [one for one in reversed(reports) if one.txid > seen[0]]
        for report in new:
            at = {"batch_id": report.batch_id, "txid": report.txid, "committed_at": report.at}
            held = ledger.keys_held() if report.txid == txid else None
            document = msgspec.to_builtins(report)
            self._send({"event": "commit", "state": name, "as_of": at, "report": document, "keys_held": held})
        if txid is None or not new or new[-1].txid < txid:
            held = ledger.keys_held()
            self._send({"event": "commit", "state": name, "as_of": as_of(ledger), "report": None, "keys_held": held})

    def _send(self, event: Event) -> None:
        for queue in list(self._listeners):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._listeners.discard(queue)
                _end(queue)


def _has(ledger: LedgerRecord, batch_id: int) -> bool:
    last = ledger.last_commit
    return last is not None and last.owner == ledger.owner and last.batch_id >= batch_id


def _end(queue: asyncio.Queue[Event | None]) -> None:
    while queue.full():
        queue.get_nowait()
    queue.put_nowait(None)
