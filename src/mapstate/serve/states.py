"""The states of a store: found by listing, opened when they are asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from mapstate import errors
from mapstate.aggregators.aggregator import Aggregator
from mapstate.backends import check_state_name, resolve
from mapstate.backing_map import Backend
from mapstate.batch_report import BatchReport
from mapstate.capabilities import ListsStates, close_if_possible
from mapstate.errors import MapStateError, StateNotFoundError
from mapstate.keys import Key
from mapstate.operations.states import state_names
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.stored_ledger import ledger_store
from mapstate.reader.aliased import version_of
from mapstate.reader.async_reader import AsyncStateReader, open_async_reader
from mapstate.reader.capabilities import EventLoops
from mapstate.reader.rolling import At
from mapstate.reader.times import Time
from mapstate.reader.windows import Window
from mapstate.serve.answers import BadRequest, Forms, View
from mapstate.serve.merged import MergedReads

T = TypeVar("T")

_REMEMBERED = 5.0  # seconds for which a lost state is answered for without the store
_REFRESH = 1.0  # seconds between two listings at least
_REFRESH_SHARE = 20  # times what a listing takes, between two of them
MOST_OPEN = 1_000
"""States that are listed and followed, each with a connection or more."""
_MORE_OPEN = 100  # that are asked for by their names
_READY_SECONDS = 3.0
_MOST_BESIDE = 8  # reads of one state beside those that are merged, and scans


class OpenState:
    """One state with its reader, its merged reads, and the forms of its schema.

    Each read that runs has a connection of its own, and the reader keeps it. So they are few at one time.
    """

    def __init__(self, name: str, reader: AsyncStateReader, aggregators: Mapping[str, Aggregator]) -> None:
        self.name = name
        self.reader = reader
        self.merged = MergedReads(reader)
        self._ledgers = MergedReads(reader)  # apart: no ledger waits for keys, nor for a record that is read again
        self._aggregators = aggregators
        self._view: View | None = None
        self._turns = asyncio.Semaphore(_MOST_BESIDE)

    async def ledger(self) -> LedgerRecord:
        """The ledger, read with those of others who ask now. Errors as of `AsyncStateReader.ledger`."""
        return (await self._ledgers.multi_get([]))[1]

    async def reports(self, ledger: LedgerRecord) -> list[BatchReport]:
        """The reports of batches that count under this ledger, newest first: not of those rolled back, or later."""
        async with self._turns:
            reports = await self.reader.reports()
        view = ledger.view()
        return [one for one in reports if one.txid in view]

    async def windows(self, key: Key, since: Time | None, until: Time | None) -> tuple[list[Window], LedgerRecord]:
        async with self._turns:
            return await self.reader.windows_as_of(key, since=since, until=until)

    async def by_schema(self, ask: Callable[[View], Awaitable[T]]) -> T:
        """What ``ask`` returns for the view whose schema is known; or for the newest, if that has another schema.

        For requests whose meaning depends on the key columns: a state may be dropped, and made again with others.
        Raises what ``ask`` raises.
        """
        known = self._view or self.view(await self.ledger())
        try:
            return await ask(known)
        except (errors.KeyEncodingError, errors.UsageError, BadRequest):
            newest = self.view(await self.ledger())
            if (newest.ledger.keys, newest.ledger.time_type) == (known.ledger.keys, known.ledger.time_type):
                raise
            return await ask(newest)

    async def multi_get(
        self, keys: Sequence[Any], known: View, at: At = None, columns: Sequence[str] | None = None
    ) -> tuple[list[dict[str, Any] | None], View]:
        """The values of the keys, and the view as of which they are. Errors as of `MergedReads.answer`, `view`."""
        values, ledger, ends = await self.merged.answer(keys, at=at, columns=columns)
        view = self.view(ledger, known)
        return values, view.ending(ends if isinstance(at, list) else ends[0] if ends else None)

    def view(self, ledger: LedgerRecord, known: View | None = None) -> View:
        """The view of a ledger.

        Raises BadRequest where it has other key columns than the ``known`` one, by which the request was understood.
        """
        if known is not None and known.ledger.keys != ledger.keys:
            raise BadRequest(f"State {ledger.state!r} has been made again, with other key columns.")
        last = self._view
        if last is None or last.ledger is not ledger:
            is_same = last is not None and _schema(last.ledger) == _schema(ledger)
            forms = last.forms if last is not None and is_same else Forms(ledger, self._aggregators)
            last = self._view = View(ledger, forms, self.name)
        return last


class States:
    """The states of one store, on one event loop.

    The store is listed anew at most once a second, and for a twentieth of the time: on Redis a listing walks through
    all keys. A state that is asked for by its name needs no listing.
    """

    def __init__(
        self, url: Backend | str, *, aggregators: Mapping[str, Mapping[str, Aggregator]] | None = None
    ) -> None:
        self._backend = resolve(url)
        self._aggregators = aggregators or {}
        self._open: dict[str, asyncio.Task[OpenState]] = {}
        self._lost: dict[str, tuple[float, MapStateError]] = {}
        self._names: asyncio.Task[list[str]] | None = None
        self._list_again_at = 0.0
        self._closed_reads = 0
        self._asking: asyncio.Task[None] | None = None

    async def names(self) -> list[str]:
        """The states by name: those of the last listing, and those that were asked for since; at most `MOST_OPEN`.

        Errors as of a store.
        """
        if not isinstance(self._backend, ListsStates):
            return sorted(self._open)[:MOST_OPEN]
        if self._names is None or (self._names.done() and time.monotonic() > self._list_again_at):
            self._names = asyncio.create_task(asyncio.to_thread(self._list))
        try:
            listed = await asyncio.shield(self._names)
        except MapStateError:
            self._names = None
            raise
        return sorted({*listed, *self._open})[:MOST_OPEN]

    def _list(self) -> list[str]:
        began = time.monotonic()
        found = [name for page in state_names(self._backend) for name in page]
        ended = time.monotonic()
        self._list_again_at = ended + max(_REFRESH, _REFRESH_SHARE * (ended - began))
        return found

    async def state(self, name: str) -> OpenState:
        """A state, opened if it is not yet.

        Raises StateNotFoundError where it has no ledger, and the errors of `open_async_reader`. An unknown name costs
        the store one small read.
        """
        lost = self._lost.get(name)
        if lost is not None:
            if time.monotonic() < lost[0]:
                raise lost[1].with_traceback(None)  # it would grow with each request
            del self._lost[name]
        while name not in self._open and len(self._open) >= MOST_OPEN + _MORE_OPEN:
            await self._close(next(iter(self._open)))
        task = self._open.pop(name, None)
        if task is None:
            task = asyncio.create_task(self._opened(name))
            task.add_done_callback(partial(self._forget_failed, name))
        self._open[name] = task  # behind all that were asked for before
        return await asyncio.shield(task)

    def _forget_failed(self, name: str, task: asyncio.Task[OpenState]) -> None:  # nobody may wait for it any more
        if (task.cancelled() or task.exception() is not None) and self._open.get(name) is task:
            del self._open[name]

    async def _opened(self, name: str) -> OpenState:
        try:
            check_state_name(name)
        except errors.ConfigurationError:
            raise StateNotFoundError("there is no state of this name: no state can have it") from None
        await self._ask(check_is_there, name)
        aggregators = self._aggregators.get(name, {})
        reader = await open_async_reader(self._backend, name, aggregators=aggregators)
        return OpenState(name, reader, aggregators)

    async def check_answers(self) -> None:
        """Raise the store's error, or TimeoutError, where it does not answer in time. One asks, for all who ask now."""
        if self._asking is None or self._asking.done():
            name = next(reversed(self._open), "ready")  # a user of the store may have rights to some states only
            self._asking = asyncio.create_task(asyncio.wait_for(self._ask(check_exact, name), _READY_SECONDS))
            self._asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())  # all may have gone
        with suppress(StateNotFoundError):
            await asyncio.shield(self._asking)

    async def _ask(self, check: Callable[[Backend, str], None], name: str) -> None:
        if isinstance(self._backend, EventLoops):  # a call that hangs holds no thread, and can be ended
            from mapstate.event_loop import on_loop

            await on_loop(check, self._backend.on_event_loop(), name)
        else:
            await asyncio.to_thread(check, self._backend, name)

    async def lose_if_gone(self, name: str, error: MapStateError) -> None:
        """Remember that an open state is gone, if ``error`` says so.

        The reader looks for what is left of it, in all keys of a Redis, with each read.
        """
        if name in self._open and isinstance(error, (StateNotFoundError, errors.LedgerLostError)):
            self._lost[name] = (time.monotonic() + _REMEMBERED, error)
            await self._close(name)

    def is_open(self, name: str) -> bool:
        """Whether the state is open. It may be closed between two steps of a request."""
        return name in self._open

    def reads(self) -> int:
        """The number of bulk reads so far."""
        states = [task.result() for task in self._open.values() if task.done() and not task.exception()]
        return self._closed_reads + sum(state.merged.reads for state in states)

    async def close(self) -> None:
        """Close all readers."""
        if self._names is not None:
            self._names.cancel()
        for name in list(self._open):
            await self._close(name)

    async def _close(self, name: str) -> None:
        task = self._open.pop(name, None)
        if task is None:
            return
        with suppress(Exception):  # it has not been opened, whatever the reason
            state = await task
            self._closed_reads += state.merged.reads
            await state.reader.close()


def _schema(ledger: LedgerRecord) -> tuple[object, ...]:
    return ledger.keys, ledger.fields, None if ledger.rolling is None else ledger.rolling.definition


def check_is_there(backend: Backend, name: str) -> None:
    """Raises StateNotFoundError where what a name leads to has no ledger. A reader would look for records, too."""
    check_exact(backend, version_of(backend, name))


def check_exact(backend: Backend, name: str) -> None:
    """Raises StateNotFoundError where a state of this very name has no ledger. By one read."""
    store = backend.open(name)
    try:
        if ledger_store(store).load() is None:
            raise StateNotFoundError(f"there is no state {name!r} in this store", state=name)
    finally:
        close_if_possible(store)
