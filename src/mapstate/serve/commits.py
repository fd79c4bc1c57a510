"""Commits as they come: for events, and for requests that wait for a batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from mapstate.batch_report import BatchReport
from mapstate.errors import MapStateError, StateNotFoundError
from mapstate.protocol.ledger_record import Commit, LedgerRecord
from mapstate.reader.committed import mark_of
from mapstate.serve.answers import BadRequest, Busy, Problem, as_of, named, problem_of
from mapstate.serve.states import OpenState, States

_INTERVAL = 0.2  # seconds between two reads of the ledgers that somebody waits for
_MOST_LISTENERS = 500
_MOST_BEHIND = 1_000  # events that wait for one listener; a slower one is cut off
_MOST_WAITING = 500  # requests that wait for a batch; others go on beside them
_TICKS_FOR_REPORT = 5
_HEARTBEAT = 15.0  # seconds
_MOST_OF_ID = 30_000  # characters, some 50 for each state; a head has 64 KiB

Event = dict[str, Any]
Sent = tuple[Event | None, str]  # with its id, "" for none
Place = tuple[str, int]  # how far one has heard of a state: its mark, and the txid of its last commit, -1 before any


class Commits:
    """Reads ledgers five times a second while somebody waits: all of them for a listener, else those waited for."""

    def __init__(self, states: States) -> None:
        self._states = states
        self._listeners: dict[asyncio.Queue[Sent | None], dict[str, Place]] = {}
        self._new = set[asyncio.Queue[Sent | None]]()  # who know no state; else one that they do not know is new
        self._waiting: set[tuple[str, str, asyncio.Future[None]]] = set()
        self._seen: dict[str, Place] = {}
        self._versions: dict[str, str] = {}  # of what is seen: the state to which an alias led then
        self._behind: set[str] = set()  # states of which one that came back has not heard what is seen
        self._unreported: dict[str, int] = {}  # how often the last report was missing
        self._away: set[str] = set()
        self._knows_all = asyncio.Event()  # each state that was there when the first listener came has been seen
        self._following: asyncio.Task[None] | None = None

    async def reached(self, name: str, least: str, seconds: float, *, by_key: bool = False) -> None:
        """Wait until the state has committed the batch, the named commit, or a later one. Raises Problem."""
        with suppress(StateNotFoundError):  # its job may be about to make it
            ledger = await (await self._states.state(name)).ledger()
            if by_key and any(field.name == "min_batch" for field in ledger.keys):
                raise BadRequest(
                    "The key column min_batch is the parameter key.min_batch: min_batch is what to wait for."
                )
            if _has(ledger, least):
                return
        if len(self._waiting) >= _MOST_WAITING:
            raise Busy(f"{len(self._waiting)} requests wait for a batch.")
        waiting = (name, least, asyncio.get_running_loop().create_future())
        self._waiting.add(waiting)
        self._start()
        try:
            await asyncio.wait_for(waiting[2], seconds)
        except TimeoutError:
            ledger = await (await self._states.state(name)).ledger()
            if not _has(ledger, least):
                detail = f"Batch {least} of state {name!r} was not committed within {seconds:g} seconds."
                raise Problem(503, detail, retry_after=1, as_of=as_of(ledger)) from None
        finally:
            self._waiting.discard(waiting)

    def events(self, last_id: str | None = None) -> AsyncGenerator[Sent, None]:
        """An event per commit, and where a state cannot be read; None first, and after a while without one.

        One that comes back names the ``last_id`` that it has, and hears what has come since. All end for a listener
        that is far behind. Raises Busy.
        """
        if len(self._listeners) >= _MOST_LISTENERS:
            raise Busy(f"{len(self._listeners)} clients listen for events.")
        return self._heard(last_id)

    async def _heard(self, last_id: str | None) -> AsyncGenerator[Sent, None]:
        queue: asyncio.Queue[Sent | None] = asyncio.Queue()
        places = _places_of(last_id or "")
        if not self._listeners:
            self._knows_all = asyncio.Event()
            self._seen.clear()
            self._away.clear()
        self._new |= {queue} if places is None else set()
        self._listeners[queue] = heard = {**self._seen} if places is None else places
        self._behind |= {name for name, _ in self._seen.items() ^ heard.items()}
        self._start()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._knows_all.wait(), _HEARTBEAT)
            yield None, _id_of(heard) if places is None and queue.empty() else ""
            if last_id and places is None:
                yield {"event": "gap", "state": None}, ""
            while True:
                try:
                    sent = await asyncio.wait_for(queue.get(), _HEARTBEAT)
                except TimeoutError:
                    sent = None, ""
                if sent is None:
                    return
                yield sent
        finally:
            self._listeners.pop(queue, None)
            self._new.discard(queue)

    async def close(self) -> None:
        """End all events, and every wait."""
        for queue in self._listeners:
            queue.put_nowait(None)
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
                    names |= {*listed, *self._behind}
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
            for waits_for, least, done in self._waiting:
                if waits_for == name and not done.done():
                    try:
                        if _has(ledger, least):
                            done.set_result(None)
                    except Problem as problem:
                        done.set_exception(problem)
            if self._listeners:
                await self._publish(state, ledger)
        except MapStateError as error:
            await self._states.lose_if_gone(name, error)
            is_gone = isinstance(error, StateNotFoundError)  # or is not there yet, for a request that waits
            event = {"event": "problem", "state": name, "problem": problem_of(error).document}
            for queue, places in [*self._listeners.items()]:
                if places.pop(name, None) if is_gone else name not in self._away:
                    self._send(queue, event)
            (self._behind.discard if is_gone else self._away.add)(name)

    async def _publish(self, state: OpenState, ledger: LedgerRecord) -> None:
        """Send what is new since the last time. A report comes shortly after its commit, or not at all."""
        name, last = state.name, ledger.last_commit
        now, is_back = (mark_of(ledger), -1 if last is None else last.txid), name in self._away
        if self._seen.get(name) == now and not is_back and name not in self._behind:
            return
        is_first = not self._knows_all.is_set() and name not in self._seen and self._listeners.keys() <= self._new
        reports = [] if is_first else await state.reports(ledger)
        self._unreported[name] = self._unreported.get(name, 0) + 1
        if reports and reports[0].txid < now[1] and self._unreported[name] <= _TICKS_FOR_REPORT:
            return
        seen, version = self._seen.get(name), self._versions.get(name, ledger.state)
        self._versions[name] = ledger.state
        self._seen[name], self._unreported[name], of = now, 0, named(name, ledger)
        self._away.discard(name)
        self._behind.discard(name)
        for queue, places in [*self._listeners.items()]:
            if not self._knows_all.is_set() and queue in self._new:
                places.setdefault(name, now)
            place = places.get(name, (now[0], -1))
            if place != now or is_back:
                is_swap = version != ledger.state and seen is not None and place[0] == seen[0]
                for event, places[name] in _news(of, ledger, reports, place, "swapped" if is_swap else "gap"):
                    self._send(queue, event)

    def _send(self, queue: asyncio.Queue[Sent | None], event: Event) -> None:
        if queue.qsize() < _MOST_BEHIND:
            queue.put_nowait((event, _id_of(self._listeners[queue])))
        elif self._listeners.pop(queue, None) is not None:
            queue.put_nowait(None)


def _news(
    of: Event, ledger: LedgerRecord, reports: Sequence[BatchReport], place: Place, gap: str
) -> Iterator[tuple[Event, Place]]:
    """The events of the commits behind a place; first a ``gap``, where some may lack or what was heard is undone."""
    told: Event = {"event": "commit", **of, "as_of": as_of(ledger), "keys_held": ledger.keys_held()}
    mark, (of_place, seen) = mark_of(ledger), place
    heard: list[Commit | BatchReport | None] = [ledger.previous, ledger.last_commit, *reports]
    commits = {commit.txid: commit for commit in heard if commit is not None}
    new: list[Commit | BatchReport | None] = [
        commits[txid] for txid in sorted(commits) if txid > seen and mark == of_place
    ]
    start = commits[seen].batch_id + 1 if seen in commits else 0 if seen < 0 else -1
    if (
        mark != of_place
        or start < 0
        or [commit and commit.batch_id for commit in new] != [*range(start, start + len(new))]
    ):
        yield {**told, "event": gap}, place
    for commit in new or heard[1:2]:
        report = msgspec.to_builtins(commit) if isinstance(commit, BatchReport) else None
        held = None if commit in new[:-1] else told["keys_held"]
        event = {**told, "as_of": as_of(ledger, commit), "report": report, "keys_held": held}
        yield event, (mark, -1 if commit is None else commit.txid)


def _id_of(places: dict[str, Place]) -> str:
    text = msgspec.json.encode(places).decode()
    return text if len(text) <= _MOST_OF_ID else "too many states"


def _places_of(text: str) -> dict[str, Place] | None:
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(text, type=dict[str, Place])
    return None


def _has(ledger: LedgerRecord, least: str) -> bool:
    """Whether the ledger has a batch of its owner, or a named commit. Raises Problem for one of another state."""
    last, (mark, _, at) = ledger.last_commit, least.rpartition("-")
    if mark not in ("", mark_of(ledger)):
        was = f"{least} is no commit of state {ledger.state!r}, or of before a drop, a reset or another owner"
        raise Problem(410, f"{was}. Read without min_batch, and go on from the as_of of that answer.")
    is_owners = last is not None and last.owner == ledger.owner
    return last is not None and (last.txid >= int(at) if mark else is_owners and last.batch_id >= int(at))
