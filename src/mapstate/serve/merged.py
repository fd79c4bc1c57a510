"""Reads of many requests as few bulk reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from mapstate.errors import DataError, UsageError, WindowGoneError
from mapstate.keys import Key
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader.async_reader import AsyncStateReader
from mapstate.reader.rolling import At, check_times
from mapstate.reader.scans import Answer
from mapstate.reader.times import Time
from mapstate.serve.answers import Busy

Values = tuple[list[dict[str, Any] | None], LedgerRecord]

_MOST_AT_ONCE = 2  # reads of one state under way
_MOST_KEYS = 5_000  # of one read, unless one request has more
_MOST_WAITING = 50_000  # keys


class _Waiting(NamedTuple):
    """A request. Only those with the same columns and the same kind of time are read together."""

    keys: Sequence[Key]
    at: At
    columns: tuple[str, ...] | None
    values: asyncio.Future[Answer]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is equal for requests that can be read together: all now, all at the watermark, or all at times."""
        return self.columns, self.at if self.at is None or self.at == "watermark" else "times"

    def times(self) -> list[Any]:
        """A time for each key."""
        return [*self.at] if isinstance(self.at, list) else [self.at] * len(self.keys)


class MergedReads:
    """The reads of one state. On the event loop of its reader.

    While reads are under way, requests wait, and then go together: the store is asked at most `_MOST_AT_ONCE` times at
    one time. A request that comes alone waits for nobody.
    """

    def __init__(self, reader: AsyncStateReader) -> None:
        self._reader = reader
        self._waiting: list[_Waiting] = []
        self._keys_waiting = 0
        self._running: dict[asyncio.Task[None], list[_Waiting]] = {}
        self.reads = 0

    async def multi_get(self, keys: Sequence[Key]) -> Values:
        """The values of the keys, and the ledger as of which they are. Raises what the reader raises, and Busy."""
        return (await self.answer(keys))[:2]

    async def answer(
        self, keys: Sequence[Key], *, columns: Sequence[str] | None = None, at: At | list[Time] = None
    ) -> Answer:
        """As `StateReader.answer`; a list has a time for each key. Raises what the reader raises, and Busy."""
        if isinstance(at, list):
            check_times(at, len(keys))
        if self._keys_waiting and self._keys_waiting + len(keys) > _MOST_WAITING:
            raise Busy(f"{self._keys_waiting} keys wait for the store.")
        values: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        request = _Waiting(keys, at, None if columns is None else tuple(columns), values)
        self._waiting.append(request)
        self._keys_waiting += len(keys)
        self._start()
        try:
            return await values
        finally:
            if values.cancelled():  # nobody waits for it any more: its place is free, and that of a read for such alone
                left = [one for one in self._waiting if one is not request]
                self._keys_waiting -= len(keys) * (len(self._waiting) - len(left))
                self._waiting = left
                for task, taken in self._running.items():
                    if taken and all(one.values.done() for one in taken):
                        task.cancel()

    def _start(self) -> None:
        """Start a read, if there is something to read and not enough is under way."""
        if self._waiting and len(self._running) < _MOST_AT_ONCE:
            taken: list[_Waiting] = []
            task = asyncio.create_task(self._read(taken))
            self._running[task] = taken
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
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
                own = slice(place, place + len(request.keys))
                ends = None if answer.ends is None else answer.ends[own]
                if not request.values.done():
                    request.values.set_result(Answer(answer.values[own], answer.ledger, ends))
                place = own.stop


def _fail(taken: Sequence[_Waiting], error: BaseException) -> None:
    for request in taken:
        if not request.values.done():
            if isinstance(error, Exception):
                request.values.set_exception(error)
            else:
                request.values.cancel()
