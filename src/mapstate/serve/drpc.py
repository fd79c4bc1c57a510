"""Requests that are computed: ``POST /drpc/NAME`` with the arguments as text.

A function is computed by a Spark job (`mapstate.spark.DRPCServer`), or over readers in this process
(``mapstate serve --functions``).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mapstate.backends import resolve
from mapstate.backing_map import Backend
from mapstate.errors import (
    ConfigurationError,
    LedgerLostError,
    MapStateError,
    StaleBatchError,
    StateNotFoundError,
    check_range,
    cut,
)
from mapstate.reader import StateReader, open_reader
from mapstate.serve.answers import Busy, Problem, line
from mapstate.serve.parameters import body_of
from mapstate.serve.states import check_is_there
from mapstate.urls import LIKE_A_URL
from mapstate.values import plain

MOST_WAITING = 1_000
SECONDS = 60.0

_TRIES = 10
_THREADS = 16

_log = logging.getLogger("mapstate")

Execute = Callable[[str], Awaitable[Any]]
"""Computes the result for the arguments of one request, as what JSON can hold."""


class Calls:
    """The calls of all functions, with their bounds."""

    def __init__(
        self, functions: Mapping[str, Execute], *, most_waiting: int = MOST_WAITING, seconds: float = SECONDS
    ) -> None:
        check_range("most_waiting", most_waiting, 1)
        check_range("timeout", seconds, 0.001, 86_400, " of seconds")
        self._functions = functions
        self._most_waiting = most_waiting
        self._seconds = seconds
        self._waiting = 0

    def route(self) -> Route:
        """The route of all functions."""
        return Route("/drpc/{function}", self.answer, methods=["POST"])

    async def answer(self, request: Request) -> Response:
        """Compute one request."""
        name = request.path_params["function"]
        if name not in self._functions:
            raise Problem(404, f"There is no function of this name. There are: {', '.join(sorted(self._functions))}.")
        if self._waiting >= self._most_waiting:
            raise Busy(f"{self._waiting} requests wait.")
        self._waiting += 1
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                try:
                    args = (await body_of(request)).decode()
                except UnicodeDecodeError:
                    raise Problem(400, "The arguments are text in UTF-8.") from None
                result = await self._functions[name](args)
        except (Problem, MapStateError):
            raise
        except Exception as error:  # noqa: BLE001  anybody's function
            if limit.expired():
                found = Problem(504, f"The function has not answered in {self._seconds:g} seconds.", retry_after=1)
            else:
                _log.warning("the DRPC function %s failed: %s", name, type(error).__name__)
                found = Problem(500, _said(error), error=type(error).__name__)
            raise found from None
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

    All reads of one call are as of one batch of each opaque state. Where a batch is committed in between, the call is
    repeated, so a function must do nothing but read.
    """

    def __init__(self, store: Backend | str, module: str) -> None:
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise ConfigurationError(f"the module {module!r} of --functions cannot be imported: {error}") from error
        self._backend = resolve(store)
        self._readers: dict[str, StateReader] = {}
        self._opening = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="mapstate-function")
        self.functions: dict[str, Execute] = {
            name: self._execute(function)
            for name, function in vars(found).items()
            if inspect.isfunction(function) and function.__module__ == found.__name__ and not name.startswith("_")
        }
        if not self.functions:
            raise ConfigurationError(f"the module {module!r} of --functions defines no function")

    def close(self) -> None:
        """Close all readers."""
        self._pool.shutdown(cancel_futures=True)
        for reader in self._readers.values():
            reader.close()

    def reader(self, name: str) -> StateReader:
        """The reader of a state, which all threads share. Raises the errors of `open_reader`."""
        with self._opening:
            if name not in self._readers:
                check_is_there(self._backend, name)
                self._readers[name] = open_reader(self._backend, name)
            return self._readers[name]

    def forget(self, name: str) -> None:
        """Open the state anew at the next call: it is gone, and its reader would look for records. Not closed yet."""
        with self._opening:
            self._readers.pop(name, None)

    def _execute(self, function: Callable[[PinnedStates, str], Any]) -> Execute:
        async def execute(args: str) -> Any:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._call, function, args)

        return execute

    def _call(self, function: Callable[[PinnedStates, str], Any], args: str) -> Any:
        for _ in range(_TRIES):
            states = PinnedStates(self)
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
    """The states that one call of a function reads."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._states: dict[str, _Pinned] = {}
        self.have_moved = False

    def __getitem__(self, name: str) -> _Pinned:
        if name not in self._states:
            forget = partial(self._functions.forget, name)
            self._states[name] = _Pinned(self, self._functions.reader(name), forget)
        return self._states[name]


class _Pinned:
    """One state as of the batch of the call's first read."""

    def __init__(self, states: PinnedStates, reader: StateReader, forget: Callable[[], None]) -> None:
        self._states = states
        self._reader = reader
        self._forget = forget
        self._contents: tuple[Any, ...] | None = None

    def multi_get(self, keys: Sequence[Any]) -> list[dict[str, Any] | None]:
        """As `StateReader.multi_get`."""
        try:
            values, ledger = self._reader.multi_get_as_of(keys)
        except (StateNotFoundError, LedgerLostError):
            self._forget()
            raise
        if ledger.type == "opaque":
            contents = ledger.contents()
            if self._contents not in (None, contents):
                self._states.have_moved = True
                raise StaleBatchError(f"state {ledger.state!r} has gone on since the first read of this call")
            self._contents = contents
        return values

    def get(self, key: Any) -> dict[str, Any] | None:
        """As `StateReader.get`."""
        return self.multi_get([key])[0]
