"""What stands in front of every call: who may ask, how many at one time, and for how long."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from mapstate.serve.answers import Busy, Problem, lines
from mapstate.serve.metrics import Metrics

MOST_REQUESTS = 1_000
"""Requests under way at one time. Events have a bound of their own."""

_WITHOUT_TOKEN = ("/", "/page.css", "/page.js", "/health", "/ready")  # which hold no data
_BOUNDED = ("/events", "/metrics")  # which have bounds of their own
_BESIDE_WAIT = 3.0  # seconds for all else that a request does which waits for a batch
_LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.ASCII)


class Guard:
    """Answers what is refused before anything is read, and ends requests after ``seconds``. Counts them all."""

    def __init__(
        self, app: ASGIApp, *, token: str | None, local_only: bool, seconds: float, metrics: Metrics | None = None
    ) -> None:
        self._app = app
        self._seconds = seconds
        self._token = None if token is None else token.encode()
        self._local_only = local_only
        self._metrics = metrics
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = _path_of(scope)
        refused = self._refused(scope, path)
        if refused is not None:
            if self._metrics is not None:
                self._metrics.refused(refused.status)
            await refused.response()(scope, receive, send)
            return
        counted = path != "/events"  # which has a bound of its own
        self._running += counted
        began = time.monotonic()
        request = _Request(receive, send, None if path in _BOUNDED else self._seconds)
        try:
            await request.run(self._app, scope)
        finally:
            self._running -= counted
            if self._metrics is not None:
                self._metrics.answered(path, request.status or 500, time.monotonic() - began)

    def _refused(self, scope: Scope, path: str) -> Problem | None:
        headers = dict(scope["headers"])
        if len(headers) < len(scope["headers"]) and [name for name, _ in scope["headers"]].count(b"host") > 1:
            return Problem(400, "A request names one Host.")
        if self._local_only:
            host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
            if headers.get(b"sec-fetch-site") == b"cross-site" and headers.get(b"sec-fetch-mode") != b"navigate":
                return Problem(403, "This service answers its own pages, and not those of another site.")
            is_own_page = not origin or _LOCAL.fullmatch(origin.partition("://")[2])
            if not (is_own_page and _LOCAL.fullmatch(host)):
                return Problem(403, "This service answers localhost, and its pages. Start it with --host and a token.")
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        is_known = self._token is None or (scheme.lower() == b"bearer" and hmac.compare_digest(given, self._token))
        if not is_known and path not in _WITHOUT_TOKEN:
            return Problem(401, "This service needs a token: Authorization: Bearer TOKEN.")
        if self._running >= MOST_REQUESTS and path != "/health":
            return Busy(f"{self._running} requests are under way.")
        return None


class _Request:
    """A request under way. It ends by its deadline, which each part of an answer has anew, or with its client."""

    def __init__(self, receive: Receive, send: Send, seconds: float | None) -> None:
        self._receive, self._send, self._seconds = receive, send, seconds
        self._limit, self._given, self._is_in_parts = asyncio.timeout(seconds), seconds, False
        self.status: int | None = None

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        scope["mapstate.request"] = self
        try:
            async with self._limit:
                await app(scope, self._take, self._put)
        except TimeoutError:
            if not self._limit.expired():
                raise
            status = 504 if _path_of(scope).startswith("/drpc/") else 503
            text = f"No answer in {self._given:g} seconds: the store, or a function, hangs or has too much to do."
            await self._end(scope, Problem(status, f"{text} Retry in a second.", retry_after=1))
        except asyncio.CancelledError:  # by a server that ends, and has given it time
            await self._end(scope, Busy("The service ends."))
        finally:
            del scope["mapstate.request"]

    def wait(self, seconds: float) -> None:
        """Set the deadline of a request that waits for a batch, so many seconds at most."""
        self._given = seconds + min(_BESIDE_WAIT, self._seconds or _BESIDE_WAIT)
        self.within(self._given)

    def leave(self) -> None:
        """End it: its client has gone. One without an answer is counted as other servers count it."""
        self.status = self.status or 499
        self.within(0)

    def within(self, seconds: float | None) -> None:
        """Set the deadline, None while the client takes its time. A request that is being ended has none."""
        with suppress(RuntimeError):  # of a limit that has been exceeded, or left
            self._limit.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    async def _take(self) -> Any:
        message = await self._receive()
        self.within(self._seconds)
        return message

    async def _put(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"].append((b"x-content-type-options", b"nosniff"))
        self._is_in_parts = message.get("more_body", False)
        if self._is_in_parts:
            self.within(None)
        await self._send(message)
        if self._is_in_parts:
            self.within(self._seconds)

    async def _end(self, scope: Scope, problem: Problem) -> None:
        if self.status is None:
            await problem.response()(scope, self._receive, self._put)
        elif self._is_in_parts:
            last = b"" if self._seconds is None else lines([{"is_end": False, "problem": problem.document}])
            await self._put({"type": "http.response.body", "body": last})


def _path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
