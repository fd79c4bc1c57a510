"""Reads of many requests as few bulk reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from mapstate.errors import DataError, UsageError
from mapstate.keys import Key
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader.async_reader import AsyncStateReader
from mapstate.serve.answers import Busy

Values = tuple[list[dict[str, Any] | None], LedgerRecord]

_MOST_AT_ONCE = 2  # reads of one state under way
_MOST_KEYS = 5_000  # of one read, unless one request has more
_MOST_WAITING = 50_000  # keys


class _Waiting(NamedTuple):
    keys: Sequence[Key]
    values: asyncio.Future[Values]


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
        if self._keys_waiting and self._keys_waiting + len(keys) > _MOST_WAITING:
            raise Busy(f"{self._keys_waiting} keys wait for the store.")
        values: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
        request = _Waiting(keys, values)
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
        count = 0
        for request in self._waiting:
            if taken and count + len(request.keys) > _MOST_KEYS:
                break
            taken.append(request)
            count += len(request.keys)
        del self._waiting[: len(taken)]
        self._keys_waiting -= count
        await self._answer([request for request in taken if not request.values.done()])  # others' clients are gone

    async def _answer(self, taken: Sequence[_Waiting]) -> None:
        if not taken:
            return
        self.reads += 1
        keys = taken[0].keys if len(taken) == 1 else [key for request in taken for key in request.keys]
        try:
            values, ledger = await self._reader.multi_get_as_of(keys)
        except (DataError, UsageError) as error:
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
            at = 0
            for request in taken:
                own = values if len(request.keys) == len(values) else values[at : at + len(request.keys)]
                if not request.values.done():
                    request.values.set_result((own, ledger))
                at += len(request.keys)


def _fail(taken: Sequence[_Waiting], error: BaseException) -> None:
    for request in taken:
        if not request.values.done():
            if isinstance(error, Exception):
                request.values.set_exception(error)
            else:
                request.values.cancel()
