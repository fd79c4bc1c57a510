"""The states of one store: opened, listed and closed, and the reads of many requests as few bulk reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from mapstate import errors
from mapstate.aggregators.aggregator import Aggregator
from mapstate.backends import check_state_name, resolve
from mapstate.backing_map import Backend, close_if_possible
from mapstate.batch_report import BatchReport
from mapstate.capabilities import ListsStates
from mapstate.errors import DataError, MapStateError, StateNotFoundError, UsageError, WindowGoneError
from mapstate.keys import Key
from mapstate.operations.states import state_names
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.stored_ledger import ledger_store
from mapstate.reader.aliased import version_of
from mapstate.reader.async_reader import AsyncStateReader, open_async_reader
from mapstate.reader.capabilities import EventLoops
from mapstate.reader.rolling import At, End, at_given, check_times, columns_given, keys_given
from mapstate.reader.scans import Answer
from mapstate.reader.times import Time
from mapstate.reader.windows import Window
from mapstate.serve.answers import BadRequest, Busy, Forms, View

Values = tuple[list[dict[str, Any] | None], LedgerRecord]

_MOST_AT_ONCE = 2  # reads of one state under way
_MOST_KEYS = 5_000  # of one read, unless one request has more
_MOST_WAITING = 50_000  # keys


class _Waiting(NamedTuple):
    """A request. Only those with the same columns and the same kind of time are read together."""

    keys: list[Key]
    at: Any
    columns: tuple[str, ...] | None
    values: asyncio.Future[Answer]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is equal for requests that can be read together: all now, all at the watermark, or all at times."""
        return self.columns, self.at if self.at is None or isinstance(self.at, str | End) else "times"

    def times(self) -> list[Any]:
        """A time for each key."""
        return self.at if isinstance(self.at, list) else [self.at] * len(self.keys)


class MergedReads:
    """The reads of one state: while `_MOST_AT_ONCE` are under way, requests wait, and then go together."""

    def __init__(self, reader: AsyncStateReader) -> None:
        self._reader = reader
        self._waiting: list[_Waiting] = []
        self._keys_waiting = 0
        self._running: dict[asyncio.Task[None], list[_Waiting]] = {}
        self.reads = 0

    async def multi_get(self, keys: Sequence[Key]) -> Values:
        """The values of the keys, and the ledger as of which they are. Raises what the reader raises, and Busy."""
        return (await self.answer(keys))[:2]

    async def answer(self, keys: Sequence[Key], *, columns: Sequence[str] | None = None, at: At = None) -> Answer:
        """As `StateReader.answer`. Raises what the reader raises, and Busy."""
        keys, at, chosen = keys_given(keys), at_given(at), columns_given(columns)  # what waits is plain and comparable
        check_times(at, len(keys))
        if self._keys_waiting and self._keys_waiting + len(keys) > _MOST_WAITING:
            raise Busy(f"{self._keys_waiting} keys wait for the store.")
        values: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        request = _Waiting(keys, at, None if chosen is None else tuple(chosen), values)
        self._waiting.append(request)
        self._keys_waiting += len(keys)
        self._start()
        try:
            return await values
        finally:
            if values.cancelled():  # nobody waits for it any more: its place is free, and that of a read for such alone
                left = [waiting for waiting in self._waiting if waiting is not request]
                self._keys_waiting -= len(keys) * (len(self._waiting) - len(left))
                self._waiting = left
                for task, taken in self._running.items():
                    if taken and all(request.values.done() for request in taken):
                        task.cancel()

    def _start(self) -> None:
        if self._waiting and len(self._running) < _MOST_AT_ONCE:
            taken: list[_Waiting] = []
            task = asyncio.create_task(self._read(taken))
            self._running[task] = taken
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        taken = self._running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # which nobody foresaw
            _fail(taken or self._waiting, error)
            self._waiting = [request for request in self._waiting if not request.values.done()]
            self._keys_waiting = sum(len(request.keys) for request in self._waiting)
        self._start()

    async def _read(self, taken: list[_Waiting]) -> None:
        await asyncio.sleep(0)  # requests that arrived with this one come along
        count, left = 0, list[_Waiting]()
        for request in self._waiting:
            if taken and (count + len(request.keys) > _MOST_KEYS or request.kind != taken[0].kind):
                left.append(request)
                continue
            taken.append(request)
            count += len(request.keys)
        self._waiting = left
        self._keys_waiting -= count
        await self._answer([request for request in taken if not request.values.done()])  # others' clients are gone

    async def _answer(self, taken: Sequence[_Waiting]) -> None:
        if not taken:
            return
        self.reads += 1
        first, keys = taken[0], [key for request in taken for key in request.keys]
        at = first.at
        if len(taken) > 1 and first.kind[1] == "times":
            at = [time for request in taken for time in request.times()]
        try:
            answer = await self._reader.answer(keys, columns=first.columns, at=at)
        except (DataError, UsageError, WindowGoneError) as error:
            if len(taken) == 1:
                _fail(taken, error)
                return
            for request in taken:  # one of them is wrong, and fails alone
                await self._answer([] if request.values.done() else [request])
        except BaseException as error:  # no request waits for ever
            _fail(taken, error)
            if not isinstance(error, Exception):
                raise
        else:
            place = 0
            for request in taken:
                share = slice(place, place + len(request.keys))
                ends = None if answer.ends is None else answer.ends[share]
                if not request.values.done():
                    request.values.set_result(Answer(answer.values[share], answer.ledger, ends))
                place = share.stop


def _fail(taken: Sequence[_Waiting], error: BaseException) -> None:
    for request in taken:
        if not request.values.done():
            if isinstance(error, Exception):
                request.values.set_exception(error)
            else:
                request.values.cancel()


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
    """One state with its reader, its merged reads, and the forms of its schema. Few reads run at one time."""

    def __init__(self, name: str, reader: AsyncStateReader, aggregators: Mapping[str, Aggregator]) -> None:
        self.name = name
        self.reader = reader
        self.merged = MergedReads(reader)
        self._ledgers = MergedReads(reader)  # apart: no ledger waits for keys, nor for a record that is read again
        self._aggregators = aggregators
        self._view: View | None = None
        self._turns = asyncio.Semaphore(_MOST_BESIDE)

    async def ledger(self) -> LedgerRecord:
        """The ledger, read with those of others who ask now. Errors: see `AsyncStateReader.ledger`."""
        return (await self._ledgers.multi_get([]))[1]

    async def reports(self, ledger: LedgerRecord) -> list[BatchReport]:
        """The reports of batches that count under this ledger, newest first: not of those rolled back, or later."""
        async with self._turns:
            reports = await self.reader.reports()
        view = ledger.view()
        return [report for report in reports if report.txid in view]

    async def windows(self, key: Key, since: Time | None, until: Time | None) -> tuple[list[Window], LedgerRecord]:
        async with self._turns:
            return await self.reader.windows_as_of(key, since=since, until=until)

    async def by_schema(self, ask: Callable[[View], Awaitable[T]]) -> T:
        """What ``ask`` returns for the known view, or for the newest one, if that has another schema."""
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
        """The values of the keys, and the view as of which they are. Errors: see `MergedReads.answer`, `view`."""
        values, ledger, ends = await self.merged.answer(keys, at=at, columns=columns)
        view = self.view(ledger, known)
        return values, view.ending(ends if isinstance(at, list) else ends[0] if ends else None)

    def view(self, ledger: LedgerRecord, known: View | None = None) -> View:
        """The view of a ledger. Raises BadRequest where its key columns are not those of the ``known`` one."""
        if known is not None and known.ledger.keys != ledger.keys:
            raise BadRequest(f"State {ledger.state!r} has been made again, with other key columns.")
        last = self._view
        if last is None or last.ledger is not ledger:
            is_same = last is not None and _schema(last.ledger) == _schema(ledger)
            forms = last.forms if last is not None and is_same else Forms(ledger, self._aggregators)
            last = self._view = View(ledger, forms, self.name)
        return last


class States:
    """The states of one store, on one event loop, listed at most once a second and for a twentieth of the time."""

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
        """At most `MOST_OPEN` states: of the last listing, and asked for since. Errors as of a store."""
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
        names = [name for page in state_names(self._backend) for name in page]
        ended = time.monotonic()
        self._list_again_at = ended + max(_REFRESH, _REFRESH_SHARE * (ended - began))
        return names

    async def state(self, name: str) -> OpenState:
        """A state, opened by one small read if it is not yet. Raises StateNotFoundError, and as `open_async_reader`."""
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
        """Remember that an open state is gone, if ``error`` says so: its reader would look for it in all keys."""
        if name in self._open and isinstance(error, (StateNotFoundError, errors.LedgerLostError)):
            self._lost[name] = (time.monotonic() + _REMEMBERED, error)
            await self._close(name)

    def is_open(self, name: str) -> bool:
        """Whether the state is open. It may be closed between two steps of a request."""
        return name in self._open

    def reads(self) -> int:
        states = [task.result() for task in self._open.values() if task.done() and not task.exception()]
        return self._closed_reads + sum(state.merged.reads for state in states)

    async def close(self) -> None:
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
