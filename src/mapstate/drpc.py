"""The client of a DRPC server: requests that are computed over states, by name. It needs nothing but Python."""

from __future__ import annotations

import json
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any, Self
from urllib.parse import quote

from mapstate.errors import ConfigurationError, DRPCError, check_range

PORT = 3772


class DRPCClient:
    """Calls functions of a `mapstate.spark.DRPCServer`, or of ``mapstate serve --functions``. Thread-safe.

    It keeps as many connections as calls were under way at one time.
    """

    def __init__(self, host: str, port: int = PORT, *, token: str | None = None, timeout: float = 120.0) -> None:
        """``timeout`` in seconds, of a connection; the server has one of its own."""
        check_range("timeout", timeout, 0.001, 86_400, " of seconds")
        self._place = host, port
        self._timeout = timeout
        self._headers = {"Content-Type": "text/plain; charset=utf-8"}
        if token is not None:
            if not token.isascii() or not token.isprintable():
                raise ConfigurationError("the token has characters that a header cannot have")
            self._headers["Authorization"] = f"Bearer {token}"
        self._idle: list[HTTPConnection] = []

    def execute(self, function: str, args: str = "") -> Any:
        """The result of a function: of a Spark job, a list with a dict per row.

        A connection that has ended is made anew once, so a function may run twice for one call.

        Raises:
            DRPCError: It failed, or was not answered; ``status`` is None where no answer came.

        """
        data, document = args.encode(), None
        try:
            status, body = self._asked(function, data)
        except (OSError, HTTPException) as error:
            host, port = self._place
            raise DRPCError(f"{host}:{port} has not answered {function!r}: {error!r}", status=None) from error
        with suppress(ValueError):  # of a proxy, or of another server
            document = json.loads(body)
        if not isinstance(document, dict) or (status == 200) != ("result" in document):
            document = {"detail": "this is no answer of a DRPC server, but of a proxy or of another server"}
        if "result" not in document:
            raise DRPCError(f"{function!r} failed ({status}): {document.get('detail', '')}", status=status)
        return document["result"]

    def close(self) -> None:
        """Close the connections that no call uses."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _asked(self, function: str, args: bytes) -> tuple[int, bytes]:
        with suppress(IndexError, ConnectionError, HTTPException):  # none is idle, or the server has ended it meanwhile
            return self._sent(self._idle.pop(), function, args)
        return self._sent(HTTPConnection(*self._place, timeout=self._timeout), function, args)

    def _sent(self, connection: HTTPConnection, function: str, args: bytes) -> tuple[int, bytes]:
        try:
            connection.request("POST", f"/drpc/{quote(function, safe='')}", args, self._headers)
            answer = connection.getresponse()
            body = answer.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer.status, body

    def __repr__(self) -> str:
        return f"<DRPCClient {self._place[0]}:{self._place[1]}>"
