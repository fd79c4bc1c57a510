"""Requests that are computed, by a Spark job or over readers in this process: ``POST /drpc/NAME``."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mapstate.errors import ConfigurationError, MapStateError, StaleBatchError, check_range, cut
from mapstate.reader.rolling import At, End, now_of
from mapstate.reader.scans import Answer
from mapstate.serve.answers import Busy, Problem, body_of, line
from mapstate.serve.states import States
from mapstate.urls import LIKE_A_URL
from mapstate.values import plain

MOST_WAITING = 1_000
_TRIES = 10
_THREADS = 16

_log = logging.getLogger("mapstate")

Execute = Callable[[str], Awaitable[Any]]
"""Computes the result for the arguments of one request, as what JSON can hold."""


class Calls:
    """The calls of all functions, with their bounds."""

    def __init__(self, functions: Mapping[str, Execute], *, most_waiting: int = MOST_WAITING) -> None:
        check_range("most_waiting", most_waiting, 1)
        self._functions = functions
        self._most_waiting = most_waiting
        self._waiting = 0

    def route(self) -> Route:
        return Route("/drpc/{function}", self.answer, methods=["POST"])

    async def answer(self, request: Request) -> Response:
        name = request.path_params["function"]
        if name not in self._functions:
            raise Problem(404, f"There is no function of this name. There are: {', '.join(sorted(self._functions))}.")
        if self._waiting >= self._most_waiting:
            raise Busy(f"{self._waiting} requests wait.")
        self._waiting += 1
        try:
            try:
                args = (await body_of(request)).decode()
            except UnicodeDecodeError:
                raise Problem(400, "The arguments are text in UTF-8.") from None
            result = await self._functions[name](args)
        except (Problem, MapStateError):
            raise
        except Exception as error:  # noqa: BLE001  anybody's function
            _log.warning("the DRPC function %s failed: %s", name, type(error).__name__)
            raise Problem(500, _said(error), error=type(error).__name__) from None
        finally:
            self._waiting -= 1
        return Response(line({"result": result}), media_type="application/json", headers={"Cache-Control": "no-store"})


def _said(error: Exception) -> str:
    """What an error says, without what may be a URL with a password."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else "it says nothing"
    url = LIKE_A_URL.search(text)
    return cut(text if url is None else f"{text[: url.start()]}... (the rest is not shown: it may hold a password)")


class Functions:
    """Functions of a module over readers: ``def reach(states, args)``. ``states["visits"]`` has ``get``, ``multi_get``.

    All reads of one call are as of one batch of each opaque state, whose rolling windows end at one now. Where a batch
    is committed in between, the call is repeated, so a function must do nothing but read.
    """

    def __init__(self, states: States, module: str) -> None:
        try:
            loaded = importlib.import_module(module)
        except ImportError as error:
            raise ConfigurationError(f"the module {module!r} of --functions cannot be imported: {error}") from error
        self._states = states
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="mapstate-function")
        self.functions: dict[str, Execute] = {
            name: self._execute(function)
            for name, function in vars(loaded).items()
            if inspect.isfunction(function) and function.__module__ == loaded.__name__ and not name.startswith("_")
        }
        if not self.functions:
            raise ConfigurationError(f"the module {module!r} of --functions defines no function")

    def close(self) -> None:
        """Take no call any more. One that hangs in its function goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _execute(self, function: Callable[[PinnedStates, str], Any]) -> Execute:
        async def execute(args: str) -> Any:
            states = PinnedStates(self._states)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._pool, self._call, function, args, states)
            finally:
                states.end()

        return execute

    def _call(self, function: Callable[[PinnedStates, str], Any], args: str, states: PinnedStates) -> Any:
        for _ in range(_TRIES):
            states.begin()
            try:
                result = plain(function(states, args))
            except StopIteration as error:  # which no future can hold
                if not states.have_moved:
                    raise RuntimeError(repr(error)) from error
            except Exception:
                if not states.have_moved:
                    raise
            else:
                if not states.have_moved:  # else the function has swallowed the error
                    return result
        raise StaleBatchError(
            f"a batch was committed within each of {_TRIES} calls of {function.__name__!r} in a row: batches come "
            "faster than it reads"
        )


class PinnedStates:
    """The states that one call of a function reads, on the event loop: what it reads ends with its request."""

    def __init__(self, states: States) -> None:
        self._opened, self._loop = states, asyncio.get_running_loop()
        self._last: Future[Answer] | None = None
        self._have_ended = False
        self.begin()

    def begin(self) -> None:
        """Forget the batches that were read: the call begins."""
        self._states: dict[str, _Pinned] = {}
        self.have_moved = False

    def end(self) -> None:
        """Nobody waits for the call any more. On the event loop."""
        self._have_ended = True
        if self._last is not None:
            self._last.cancel()

    def __getitem__(self, name: str) -> _Pinned:
        return self._states.setdefault(name, _Pinned(self, name))

    def multi_get_as_of(self, name: str, keys: Sequence[Any], columns: Sequence[str] | None, at: At) -> Answer:
        self._last = read = asyncio.run_coroutine_threadsafe(self._read(name, keys, columns, at), self._loop)
        if self._have_ended:
            read.cancel()
        try:
            return read.result()
        except CancelledError:  # becomes one that is no Exception: no function goes on with another read
            raise asyncio.CancelledError from None

    async def _read(self, name: str, keys: Sequence[Any], columns: Sequence[str] | None, at: At) -> Answer:
        try:
            return await (await self._opened.state(name)).merged.answer(keys, columns=columns, at=at)
        except MapStateError as error:
            await self._opened.lose_if_gone(name, error)
            raise


class _Pinned:
    """One state as of the batch, and of the now, of the call's first read."""

    def __init__(self, states: PinnedStates, name: str) -> None:
        self._states = states
        self._name = name
        self._contents: tuple[Any, ...] | None = None
        self._now: End | None = None  # where the first read's rolling windows end

    def multi_get(
        self, keys: Sequence[Any], *, columns: Sequence[str] | None = None, at: At = None
    ) -> list[dict[str, Any] | None]:
        at = self._now if at is None else at
        values, ledger, ends = self._states.multi_get_as_of(self._name, keys, columns, at)
        if at is None and ends:
            self._now = now_of(ledger, ends[0])
        if ledger.type == "opaque":
            contents = ledger.contents()
            if self._contents not in (None, contents):
                self._states.have_moved = True
                raise StaleBatchError(f"state {ledger.state!r} has gone on since the first read of this call")
            self._contents = contents
        return values

    def get(self, key: Any, *, columns: Sequence[str] | None = None, at: At = None) -> dict[str, Any] | None:
        return self.multi_get([key], columns=columns, at=at)[0]
