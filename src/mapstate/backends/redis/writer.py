"""The fenced writer of a task: reads and writes records on a single server under WATCH."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.connection import Connection

from mapstate.backends.redis.connection import Server
from mapstate.backends.redis.layout import Layout
from mapstate.backends.redis.wire import EXEC, MULTI, token_text
from mapstate.backing_map import FenceToken, check_lengths
from mapstate.errors import FencedError

__all__ = ["Writer", "fenced"]

_PUT_TRIES = 8


class Writer:
    """The map of one task. See `FencedWrites.writer`.

    One chunk at a time: EXEC ends every WATCH of its connection, so a second chunk under watch there
    would go unguarded.
    """

    def __init__(self, server: Server, layout: Layout, fence: bytes, token: FenceToken, state: str) -> None:
        self._server = server
        self._layout = layout
        self._fence = fence
        self._token = token
        self._state = state
        self._watching: Any = None

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """WATCH, GET fence, and the records: one round trip. Raises FencedError."""
        if not keys:
            return []
        get = self._layout.get(keys)
        self._watching, (records,) = self._server.retrying(lambda: self._watch(get, 1))
        return records  # type: ignore[no-any-return]

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """MULTI, the records, EXEC: one round trip, and one before it where no get was. Raises FencedError.

        Where the reply is lost the same bytes go out again, under the fence again: no other attempt has
        begun then, and in this one nobody else writes these keys.
        """
        check_lengths(keys, values, "values")
        if keys:
            self._send(*self._layout.put(keys, values))

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """See `Rewrites.multi_rewrite`: one transaction. Needs Redis 6.0."""
        check_lengths(keys, values, "values")
        if keys:
            self._send(*self._layout.rewrite(keys, values))

    def _send(self, put: bytes, replies: int) -> None:
        """A transaction under the fence; again where somebody has touched that, and has left it as it was."""
        server = self._server
        change = MULTI + put + EXEC
        for _ in range(_PUT_TRIES):
            done = server.retrying(lambda: server.finish(self._taken() or self._watch()[0], change, replies + 2))
            if done[-1] is not None:
                return
        raise fenced(self._state, self._token, "touched again and again")

    def close(self) -> None:
        """Lets the connection go. Closing twice is no error."""
        conn = self._taken()
        if conn is not None:
            self._server.unwatch(conn)

    def __del__(self) -> None:
        with suppress(Exception):
            conn = self._taken()
            if conn is not None:
                self._server.drop(conn)

    def _watch(self, more: bytes = b"", replies: int = 0) -> tuple[Connection, list[Any]]:
        conn = self._taken() or self._server.take()
        conn, (fence, *rest) = self._server.watch(conn, self._fence, more, replies)
        if fence != token_text(self._token) or self._token.closed:
            self._server.unwatch(conn)
            raise fenced(self._state, self._token, fence)
        return conn, rest

    def _taken(self) -> Any:
        """The connection under watch, if there is one; now it is the caller's."""
        conn, self._watching = self._watching, None
        return conn if conn is not None and conn.pid == os.getpid() else None


def fenced(state: str, token: FenceToken, found: bytes | str | None) -> FencedError:
    """The error of an attempt that may no longer write. ``found`` is the fence, or what is to be said of it."""
    if isinstance(found, str):
        at = found
    else:
        at = "gone (was the store flushed?)" if found is None else f"at {found.decode()}"
    return FencedError(
        f"state {state!r}: the attempt with txid {token.txid} of epoch {token.epoch} may no longer write: the fence "
        f"is {at}. It has ended, or a newer attempt or driver has taken over.",
        state=state,
        txid=token.txid,
        epoch=token.epoch,
    )
