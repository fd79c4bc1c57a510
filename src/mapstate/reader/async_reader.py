"""Read a state on an event loop, as of a whole batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from mapstate.aggregators.aggregator import Aggregator
from mapstate.backends import check_state_name, resolve
from mapstate.backing_map import Backend
from mapstate.errors import UsageError, missing_driver
from mapstate.keys import Key
from mapstate.reader.aliased import reader_of
from mapstate.reader.capabilities import EventLoops
from mapstate.reader.committed import FOLLOW, Consistency, checked, not_open
from mapstate.reader.forms import reader_html
from mapstate.reader.scans import CountedKeys, ScanPage
from mapstate.reader.state_reader import StateReader

if TYPE_CHECKING:
    from mapstate.reader.rolling import At
    from mapstate.reader.times import Time

T = TypeVar("T")
P = ParamSpec("P")

_MOST_THREADS = 8
_WINDOW_PAGE = 1000  # keys


def open_async_reader(
    backend_or_url: Backend | str,
    state: str,
    *,
    consistency: Consistency = "committed",
    aggregators: Mapping[str, Aggregator] | None = None,
    max_age: float | timedelta | None = None,
    follow: float | None = FOLLOW,
) -> AsyncStateReader:
    """Open a reader of one state, on an event loop, while the stream runs.

    ``async with open_async_reader(...) as reader`` opens and closes it. ``reader = await open_async_reader(...)`` opens
    it; call `AsyncStateReader.close` then. Arguments and errors are those of `mapstate.open_reader`; errors of the
    store come when it is awaited.

    On Redis, requests wait on the loop, with redis.asyncio. Other stores block, so they are called in up to 8 threads
    of the reader; in a single one, if the store is not `mapstate.reader.capabilities.ThreadSafe`.

    Raises:
        ConfigurationError: An argument cannot be used.

    """
    bound = checked(consistency, max_age, follow)
    return AsyncStateReader(
        resolve(backend_or_url), state, consistency, aggregators or {}, max_age=bound, follow=follow
    )


def _awaited(
    method: Callable[Concatenate[StateReader, P], T],
) -> Callable[Concatenate[AsyncStateReader, P], Coroutine[Any, Any, T]]:
    """A method that returns what a method of `StateReader` does, and lets the loop go on meanwhile."""

    @wraps(method)
    async def call(self: AsyncStateReader, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._call(method, *args, **kwargs)

    return call


class AsyncStateReader:
    """Committed reads of one state on one event loop; see `open_async_reader`. An async context manager.

    It has the methods of `mapstate.StateReader`, with the same arguments, results and errors. Any number of tasks may
    read at one time, each on a connection of its own. A cancelled read ends at once, and its connection is closed. In
    a store that is called in threads, the thread ends its request and the result is dropped.

    The reader belongs to the event loop that opened it, and does not survive a fork.
    """

    def __init__(
        self,
        backend: Backend,
        state: str,
        consistency: Consistency,
        aggregators: Mapping[str, Aggregator],
        *,
        before: tuple[str, int] | None = None,
        max_age: float | None = None,
        follow: float | None = None,
    ) -> None:
        self._backend = backend
        self._state = check_state_name(state)
        options: dict[str, Any] = {"state": state, "consistency": consistency, "aggregators": aggregators}
        self._open_reader = partial(reader_of, **options, before=before, max_age=max_age, follow=follow)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: _OnLoop | _InThreads | None = None
        self._reader: StateReader | None = None

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    ledger = _awaited(StateReader.ledger)
    reports = _awaited(StateReader.reports)
    key_count = _awaited(StateReader.key_count)
    get = _awaited(StateReader.get)
    multi_get = _awaited(StateReader.multi_get)
    multi_get_as_of = _awaited(StateReader.multi_get_as_of)
    answer = _awaited(StateReader.answer)
    watermark = _awaited(StateReader.watermark)
    windows = _awaited(StateReader.windows)
    windows_as_of = _awaited(StateReader.windows_as_of)
    position = _awaited(StateReader.position)
    changed_keys = _awaited(StateReader.changed_keys)
    to_arrow = _awaited(StateReader.to_arrow)
    to_pandas = _awaited(StateReader.to_pandas)
    to_polars = _awaited(StateReader.to_polars)

    async def count_keys(self, page_size: int = 1000) -> CountedKeys:
        """See `StateReader.count_keys`."""
        return await self._call(StateReader.count_keys, page_size)

    async def scan(
        self, page_size: int = 1000, *, columns: Sequence[str] | None = None, at: At = None
    ) -> AsyncIterator[tuple[Key, dict[str, Any]]]:
        """See `StateReader.scan`: ``async for key, fields in reader.scan()``."""
        async for page in self.pages(page_size, columns=columns, at=at):
            for item in page:
                yield item

    async def pages(
        self, page_size: int = 1000, *, columns: Sequence[str] | None = None, at: At = None
    ) -> AsyncIterator[list[tuple[Key, dict[str, Any]]]]:
        """See `StateReader.pages`. The loop goes on while a page is read."""
        pages = await self._call(StateReader.pages, page_size, columns=columns, at=at)
        while (page := await self._run(lambda: next(pages, None))) is not None:
            yield page

    async def pages_as_of(
        self, page_size: int = 1000, *, columns: Sequence[str] | None = None, at: At = None, cursor: str = ""
    ) -> AsyncIterator[ScanPage]:
        """See `StateReader.pages_as_of`."""
        pages = await self._call(StateReader.pages_as_of, page_size, columns=columns, at=at, cursor=cursor)
        while (page := await self._run(lambda: next(pages, None))) is not None:
            yield page

    async def window(self, end: Time) -> AsyncIterator[tuple[Key, dict[str, Any]]]:
        """See `StateReader.window`: ``async for key, fields in reader.window(end)``."""
        items = await self._call(StateReader.window, end)
        while page := await self._run(lambda: list(islice(items, _WINDOW_PAGE))):
            for item in page:
                yield item

    def _repr_html_(self) -> str:
        return reader_html(self._state, None) if self._reader is None else self._reader._repr_html_()

    async def close(self) -> None:
        """Close the connections on the reader's loop, after the reads of other tasks. Closing twice is no error."""
        if self._loop is not asyncio.get_running_loop() and self._reader is not None:
            raise not_open(self._state)
        reader, calls = self._reader, self._calls
        self._reader = self._calls = None
        if calls is not None:
            await calls.end(reader)

    async def _open(self) -> None:
        if self._loop is not None:
            raise not_open(self._state) if self._reader is None else UsageError("the reader is open already")
        self._loop = asyncio.get_running_loop()
        backend = self._backend
        if isinstance(backend, EventLoops):
            self._calls = _OnLoop()
            backend = backend.on_event_loop()
        else:
            self._calls = _InThreads(1)
        try:
            self._reader = await self._calls.run(partial(self._open_reader, backend))
            if isinstance(self._calls, _InThreads) and self._reader.is_thread_safe:
                await self._calls.end(None)
                self._calls = _InThreads(_MOST_THREADS)
            await self._call(StateReader.ledger)
        except BaseException:
            await self.close()
            self._loop = None
            raise

    async def _call(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        reader, calls = self._reader, self._calls
        if reader is None or calls is None or self._loop is not asyncio.get_running_loop():
            raise not_open(self._state)
        return await calls.run(partial(getattr(reader, method.__name__), *args, **kwargs))

    async def _run(self, function: Callable[[], T]) -> T:  # what has begun in a version goes on in it
        if self._reader is None or self._calls is None or self._loop is not asyncio.get_running_loop():
            raise not_open(self._state)
        return await self._calls.run(function)


class _OnLoop:
    """Runs a reader's blocking calls on the loop. `end` waits for them, and closes the reader and what they ran in."""

    def __init__(self) -> None:
        try:
            from mapstate.event_loop import on_loop
        except ModuleNotFoundError as error:
            raise missing_driver("open_async_reader on Redis", error, extra="redis") from error
        self._run = on_loop
        self._running = 0
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    async def run(self, function: Callable[[], T]) -> T:
        self._running += 1
        self._none_runs.clear()
        try:
            return await self._run(function)
        finally:
            self._running -= 1
            if not self._running:
                self._none_runs.set()

    async def end(self, reader: StateReader | None) -> None:
        try:
            await self._none_runs.wait()  # a connection that is at work goes back to the pool, and would stay open
        finally:
            if reader is not None:
                await self._run(reader.close)


class _InThreads:
    """As `_OnLoop`, in threads."""

    def __init__(self, most: int) -> None:
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="mapstate-reader")

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def end(self, reader: StateReader | None) -> None:
        def close() -> None:
            self._threads.shutdown()  # waits, also for requests whose tasks were cancelled
            if reader is not None:
                reader.close()

        await asyncio.to_thread(close)
