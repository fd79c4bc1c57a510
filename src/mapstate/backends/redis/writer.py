"""The fenced writer of a task: reads and writes records on a single server under WATCH."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.connection import Connection

from mapstate.backends.redis.connection import Server
from mapstate.backends.redis.layout import Layout
from mapstate.backends.redis.problems import DRIVER_ERRORS
from mapstate.backends.redis.wire import EXEC, MULTI, PackedKeys, command, token_text
from mapstate.backing_map import FenceToken, check_lengths
from mapstate.errors import FencedError

__all__ = ["MOST_AHEAD", "Writer", "fenced"]

_PUT_TRIES = 8
MOST_AHEAD = 16 * 2**20  # bytes of a put, after which the next read is not sent ahead: it would wait in memory


class Writer:
    """The map of one task. See `FencedWrites.writer`.

    One chunk at a time is under watch: EXEC ends every WATCH of its connection, so a second one there would go
    unguarded. What is read ahead needs no watch of its own. A fence never comes back to a token, so one that is equal
    at the put was equal since the read; and nobody else writes the keys of this task. With a read under way a put
    carries the next WATCH behind its EXEC, in the same round trip.
    """

    def __init__(self, server: Server, layout: Layout, fence: bytes, token: FenceToken, state: str) -> None:
        self._server = server
        self._layout = layout
        self._fence = fence
        self._token = token
        self._text = token_text(token)
        self._state = state
        self._watching: Any = None
        self._asked: deque[_Asked] = deque()
        self._packed: PackedKeys | None = None
        self._large = False

    def read_ahead(self, keys: Sequence[str]) -> None:
        """See `ReadsAhead.read_ahead`: sent now, behind what is under way on the connection under watch."""
        if not keys or self._large:
            return
        asked = _Asked(self._layout.pack(list(keys)))
        get = self._layout.get(asked.packed)
        conn = self._taken()
        with suppress(*DRIVER_ERRORS):  # then multi_get asks anew, and has the patience for it
            if conn is not None:
                self._server.send(conn, get)
            else:
                self._asked.clear()
                conn, (fence,) = self._server.watch(self._server.take(), self._fence, get)
                self._check(conn, fence, unread=True)
            self._watching = conn
            self._asked.append(asked)

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """WATCH, GET fence, and the records: one round trip; none where they were read ahead. Raises FencedError."""
        if not keys:
            return []
        records = self._read(keys)
        if records is None:
            self._packed = self._layout.pack(list(keys))
            get = self._layout.get(self._packed)
            self._watching, (records,) = self._server.retrying(lambda: self._watch(get, 1))
        return records

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """MULTI, the records, EXEC: one round trip, and one before it where no get was. Raises FencedError.

        Where the reply is lost the same bytes go out again, under the fence again: no other attempt has
        begun then, and in this one nobody else writes these keys.
        """
        check_lengths(keys, values, "values")
        if keys:
            packed, self._packed = self._packed, None
            if packed is None or packed.keys != keys:
                packed = self._layout.pack(keys)
            self._send(*self._layout.put(packed, values))

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """See `Rewrites.multi_rewrite`: one transaction. Needs Redis 6.0."""
        check_lengths(keys, values, "values")
        if keys:
            self._send(*self._layout.rewrite(keys, values))

    def _send(self, put: bytes, replies: int) -> None:
        """A transaction under the fence; again where somebody has touched that, and has left it as it was."""
        server = self._server
        change = MULTI + put + EXEC
        self._large = len(change) > MOST_AHEAD
        for _ in range(_PUT_TRIES):
            if server.retrying(lambda: self._transact(change, replies + 2)) is not None:
                return
        raise fenced(self._state, self._token, "touched again and again")

    def _transact(self, change: bytes, replies: int) -> Any:
        """The reply to EXEC. The connection goes back, unless something was read ahead on it."""
        server, conn = self._server, self._taken()
        if not self._asked or conn is None:
            self._asked.clear()
            return server.finish(conn or self._watch()[0], change, replies)[-1]
        server.send(conn, change + command(b"WATCH", self._fence) + command(b"GET", self._fence))
        for asked in self._asked:
            asked.read(server, conn)
        *_, done, _, fence = server.replies(conn, replies + 2, exec_at=-3)
        self._check(conn, fence)
        self._watching = conn
        return done

    def _read(self, keys: Sequence[str]) -> list[bytes | None] | None:
        """The records, if just these keys were read ahead."""
        if not self._asked:
            return None
        if self._own() is not None and self._asked[0].packed.keys == keys:
            asked, conn = self._asked.popleft(), self._taken()
            with suppress(*DRIVER_ERRORS):
                asked.read(self._server, conn)
                self._watching, self._packed = conn, asked.packed
                return asked.records
        self._forget()
        return None

    def _forget(self) -> None:
        """Lets go what was read ahead, with its connection: replies may be under way there."""
        self._asked.clear()
        conn = self._taken()
        if conn is not None:
            self._server.drop(conn)

    def close(self) -> None:
        """Lets the connection go. Closing twice is no error."""
        if self._asked:
            self._forget()
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
        self._check(conn, fence)
        return conn, rest

    def _check(self, conn: Any, fence: bytes | None, *, unread: bool = False) -> None:
        """Raises FencedError unless the fence is at the token."""
        if fence != self._text or self._token.closed:
            self._asked.clear()
            if unread:
                self._server.drop(conn)
            else:
                self._server.unwatch(conn)
            raise fenced(self._state, self._token, fence)

    def _own(self) -> Any:
        """The connection under watch, if there is one: a fork leaves its parent's alone."""
        conn = self._watching
        return conn if conn is not None and conn.pid == os.getpid() else None

    def _taken(self) -> Any:
        """The connection under watch, if there is one; now it is the caller's."""
        conn, self._watching = self._own(), None
        return conn


class _Asked:
    """Keys whose records were asked for, and the records as soon as they are read."""

    __slots__ = ("packed", "records")

    def __init__(self, packed: PackedKeys) -> None:
        self.packed = packed
        self.records: list[bytes | None] | None = None

    def read(self, server: Server, conn: Any) -> None:
        """In the order in which they were asked for."""
        if self.records is None:
            (self.records,) = server.replies(conn, 1)


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
