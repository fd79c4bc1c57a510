"""The server: uvicorn, with bounds for clients that are slow, many, or say too much."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mapstate.errors import ConfigurationError

_HEAD_SECONDS = 10.0  # for the head of a request to arrive
_BODY_SECONDS = 60.0  # for its body after it
_STALL_SECONDS = 30.0  # for a client to take what waits for it
_HEAD_BYTES = 64 << 10
_MOST_BEHIND = 100  # requests that a client sends behind one under way; then it is read no further
_MOST_CONNECTIONS = 10_000
_OTHER_FILES = 4_000  # beside connections of clients: a few for each state
# A collection stops every request: by Python's own thresholds one request in a hundred took twice as long.
_GC = (100_000, 50, 100)
_SHUTDOWN_SECONDS = 5  # for requests that are under way at the end


def run(app: ASGIApp, host: str, port: int, *, on_start: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM; ``on_start`` gets the address. Raises ConfigurationError if it cannot be bound."""
    with listening(host, port) as (bound, address):
        on_start(address)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # by which it ends at last: Python would wait for all threads
        server_of(app).run(sockets=[bound])


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """A socket that takes connections, and its address. Raises ConfigurationError where it cannot be bound."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    with bound:
        shown = f"[{host}]" if ":" in host else host
        yield bound, f"http://{shown}:{bound.getsockname()[1]}/"


def server_of(app: ASGIApp) -> uvicorn.Server:
    """A server with the bounds of this module; outside of the main thread it takes no signals."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_Impatient,
            ws="none",
            loop="uvloop",
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_most_connections(),
            timeout_keep_alive=int(_HEAD_SECONDS),
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
    )


def _most_connections() -> int:
    """Raise the limit of open files as far as needed. Returns the connections that it has room for."""
    wanted = _MOST_CONNECTIONS + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(soft, wanted) - min(_OTHER_FILES, soft // 2)


class _Impatient(HttpToolsProtocol):
    """A connection that is cut where a request does not arrive in time, or its answer is not taken in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._is_head = True
        self._head_bytes = 0
        self._cycles: list[Any] = []  # the request that is under way, and those behind it
        self._arrival: asyncio.TimerHandle | None = None
        self._departure: asyncio.TimerHandle | None = None
        self._expect(_HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and end the request that is under way: uvicorn tells the last one that has arrived."""
        self._expect(None)
        self.resume_writing()
        super().connection_lost(exc)
        for cycle in self._cycles:
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()
            if "mapstate.request" in cycle.scope:
                cycle.scope["mapstate.request"].leave()

    def data_received(self, data: bytes) -> None:
        """Cut off a head that is too long, and one that does not come after all: a line end may stand before it."""
        cycle: Any = self.cycle  # None before the first head
        if self._arrival is None and cycle is not None and cycle.response_complete:
            self._expect(_HEAD_SECONDS)
        if self._is_head:
            if self._head_bytes > _HEAD_BYTES:
                self.transport.abort()
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_head, self._head_bytes = True, 0
        self._expect(_HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        """Start the time of the body. Where another request is under way, read on, to hear if the client leaves."""
        self._is_head = False
        self._expect(_BODY_SECONDS)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in (*self._cycles, self.cycle) if not cycle.response_complete]
        if 0 < len(self.pipeline) < _MOST_BEHIND:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """The request is there. Its answer may take its time."""
        self._expect(None)
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._departure = self.loop.call_later(_STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._departure is not None:
            self._departure.cancel()
            self._departure = None

    def _expect(self, seconds: float | None) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
        self._arrival = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
