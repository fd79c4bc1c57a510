"""What stands in front of every call."""

from __future__ import annotations

import hmac
import re
import time
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from mapstate.serve.answers import Busy, Problem
from mapstate.serve.metrics import Metrics

MOST_REQUESTS = 1_000
"""Requests under way at one time. Events have a bound of their own."""

_WITHOUT_TOKEN = ("/", "/page.css", "/page.js", "/health")  # which hold no data
_LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.ASCII)


class Guard:
    """Answers what is refused before anything is read: no token, another host, too many requests. Counts them all."""

    def __init__(self, app: ASGIApp, *, token: str | None, local_only: bool, metrics: Metrics | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._local_only = local_only
        self._metrics = metrics
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # where it is mounted
        refused = self._refused(scope, path)
        if refused is not None:
            if self._metrics is not None:
                self._metrics.refused(refused.status)
            await refused.response()(scope, receive, send)
            return
        counted = path != "/events"  # which has a bound of its own
        self._running += counted
        began, status = time.monotonic(), 500

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-content-type-options", b"nosniff"))
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._running -= counted
            if self._metrics is not None:
                self._metrics.answered(path, status, time.monotonic() - began)

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
