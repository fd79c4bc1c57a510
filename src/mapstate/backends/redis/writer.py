"""The fenced writer of a task: reads and writes records on a single server under WATCH."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress
from typing import Any

from mapstate.backends.redis.connection import Server
from mapstate.backends.redis.layout import Layout
from mapstate.backends.redis.problems import DRIVER_ERRORS
from mapstate.backends.redis.wire import EXEC, MULTI, PackedKeys, command, token_text
from mapstate.backing_map import FenceToken, check_lengths
from mapstate.errors import FencedError
from mapstate.values import any_none

__all__ = ["MOST_AHEAD", "Writer", "fenced"]

_Made = tuple[Sequence[str], Sequence[bytes], Sequence[bool]]
_PUT_TRIES = 8
_TOUCHED = "touched again and again"
MOST_AHEAD = 16 * 2**20  # bytes of a put, after which the next read is not sent ahead: it would wait in memory


class Writer:
    """The map of one task. See `FencedWrites.writer`.

    One chunk at a time is under watch: EXEC ends every WATCH of its connection, so a second one there would go
    unguarded. What is read ahead needs no watch of its own. A fence never comes back to a token, so one that is equal
    at the put was equal since the read; and nobody else writes the keys of this task. With a read under way a put
    carries the next WATCH behind its EXEC, and its replies are read when the next put has to know them: the server
    stores a chunk while this task works on the one after. On the connection, in turn, a bar where this task reads::

        WATCH, MGET 1, MGET 2 | MULTI, MSET 1, EXEC, WATCH, MGET 3 | MULTI, MSET 2, EXEC, WATCH, MGET 4 | ...
             up to MGET 1's                      MGET 2's, then those to put 1         MGET 3's, then those to put 2

    Beside each WATCH and each MGET the fence is read.
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
        self._sent: _Sent | None = None
        self._due: deque[_Asked | _Sent] = deque()
        self._packed: PackedKeys | None = None
        self._absent: list[bool] | None = None
        self._large = False

    def read_ahead(self, keys: Sequence[str]) -> None:
        """See `ReadsAhead.read_ahead`: sent now, behind what is under way on the connection under watch."""
        if not keys or self._large:
            return
        asked = _Asked(self._layout.pack(list(keys)))
        if self._own() is None:
            self._start_anew()
        with suppress(*DRIVER_ERRORS):  # then multi_get asks anew, and has the patience for it
            self._ask(asked)
            self._asked.append(asked)

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """WATCH, GET fence, and the records: one round trip; none where they were read ahead. Raises FencedError."""
        if not keys:
            return []
        if self._asked and self._asked[0].packed.keys == keys:
            asked = self._asked.popleft()
        else:
            self.flush()
            asked = _Asked(self._layout.pack(list(keys)))
        self._packed = asked.packed
        records = self._server.retrying(lambda: self._read(asked))
        guarded = self._layout.reads_types_as_absent and any_none(records)
        self._absent = [record is None for record in records] if guarded else None
        return records

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """MULTI, the records, EXEC: one round trip, and one before it where no get was. Raises FencedError.

        Where the reply is lost the same bytes go out again, under the fence again: no other attempt has
        begun then, and in this one nobody else writes these keys. With a read under way the replies are left to
        `flush`, which the next put begins with.

        Raises CorruptRecordError where a key whose get gave nothing is there and of another type: nothing is written
        over it. Of this put other keys may be written.
        """
        check_lengths(keys, values, "values")
        if keys:
            packed, self._packed = self._packed, None
            absent, self._absent = self._absent, None
            if packed is None or packed.keys != keys:
                known = () if packed is None or absent is None else set(compress(packed.keys, absent))
                absent = list(map(known.__contains__, keys)) if known else None
                packed = self._layout.pack(keys)
            made = None if absent is None else (keys, values, absent)
            self._send(*self._layout.put(packed, values, absent), made)

    def flush(self) -> None:
        """See `ReadsAhead.flush`: reads the replies to the put that is under way."""
        if self._sent is not None:
            self._finish(self._sent)
            self._sent = None

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """See `Rewrites.multi_rewrite`: one transaction. Needs Redis 6.0."""
        check_lengths(keys, values, "values")
        if keys:
            self._send(*self._layout.rewrite(keys, values))

    def _send(self, put: bytes, replies: int, made: _Made | None = None) -> None:
        """A transaction under the fence. The one before it is done then; with a read under way this one may not be."""
        self.flush()
        sent = _Sent(MULTI + put + EXEC, replies, made)
        self._large = len(sent.change) > MOST_AHEAD
        if not self._asked or self._own() is None:
            self._forget_asked()
            self._confirm(sent)
            return
        self._sent = sent
        with suppress(*DRIVER_ERRORS):  # flush has the patience for it
            self._put(sent)
        if self._large:
            self.flush()

    def _finish(self, sent: _Sent) -> None:
        """Returns when a put that was sent is done; again where the fence was touched, and left as it was."""
        for _ in range(_PUT_TRIES):
            if self._own() is None:  # a connection is never taken anew before what was sent on the old one is done
                break
            with suppress(*DRIVER_ERRORS):  # what was sent may be done or not: again, below
                self._read_to(sent)
                self._check(self._taken(), sent.fence)
                if sent.done is not None and self._is_stored(sent):
                    return
                self._put(sent)
        else:
            raise fenced(self._state, self._token, _TOUCHED)
        self._forget()
        self._confirm(sent)

    def _confirm(self, sent: _Sent) -> None:
        """Sends by itself, and waits; again as `_finish` does."""
        for _ in range(_PUT_TRIES):
            sent.done = self._server.retrying(lambda: self._transact(sent.change, sent.replies))
            if sent.done is not None and self._is_stored(sent):
                return
        raise fenced(self._state, self._token, _TOUCHED)

    def _is_stored(self, sent: _Sent) -> bool:
        """After EXEC: whether the keys that were absent have these records now; else it can be sent again.

        Strings may be there from an earlier sending, whose reply was lost. Raises CorruptRecordError for another type.
        """
        if not sent.made or all(sent.done):
            return True
        keys, values, absent = sent.made
        layout, made = self._layout, dict(zip(compress(keys, absent), compress(values, absent), strict=True))
        found = self._server.ask(layout.get(layout.pack(list(made))), 1)[0]
        other = {key: one for key, one in zip(made, found, strict=True) if one != made[key]}
        if not other:
            return True
        types = self._server.ask(b"".join(layout.types(list(other))), len(other), optional=len(other))
        foreign = {
            key: kind
            for (key, one), kind in zip(other.items(), types, strict=True)
            if one is None and kind not in (b"none", b"string")
        }
        if foreign:
            raise layout.foreign(list(foreign), list(foreign.values()))
        put, sent.replies = layout.put(layout.pack(keys), values)
        sent.change, sent.made = MULTI + put + EXEC, None
        return False

    def _transact(self, change: bytes, replies: int) -> Any:
        """The reply to EXEC. The connection goes back."""
        if self._own() is None:
            conn, (fence,) = self._server.watch(self._server.take(), self._fence)
            self._check(conn, fence)
        return self._server.finish(self._taken(), change, replies + 2)[-1]

    def _read(self, asked: _Asked) -> list[bytes | None]:
        """The records; asked for again where the connection has gone. Raises FencedError."""
        if self._own() is None:
            self._start_anew()
            asked.records = []
        if not asked.records:
            if asked not in self._due:
                self._ask(asked)
            self._read_to(asked)
        self._check(self._taken(), asked.fence)
        return asked.records

    def _ask(self, asked: _Asked) -> None:
        """Sends it, behind what is under way if there is something."""
        conn, get = self._taken(), command(b"GET", self._fence) + self._layout.get(asked.packed)
        if conn is None:
            conn, (fence,) = self._server.watch(self._server.take(), self._fence, get)
            self._due.append(asked)
            self._check(conn, fence)
        else:
            self._server.send(conn, get)
            self._due.append(asked)
            self._watching = conn

    def _put(self, sent: _Sent) -> None:
        """Sends it, behind what is under way, and the next WATCH behind it."""
        conn = self._taken()
        self._server.send(conn, sent.change + command(b"WATCH", self._fence) + command(b"GET", self._fence))
        self._due.append(sent)
        self._watching = conn

    def _read_to(self, last: _Asked | _Sent) -> None:
        """Reads what is due on the connection, up to and with ``last``. Where that raises the connection is gone."""
        conn = self._taken()
        while last in self._due:
            self._due.popleft().read(self._server, conn)
        self._watching = conn

    def _start_anew(self) -> None:
        """For a request by itself: nothing is under way any more, neither a put nor what was read ahead."""
        self.flush()
        self._forget_asked()

    def _forget_asked(self) -> None:
        """Lets go what was read ahead; the connection with it, where replies may be under way there."""
        if self._asked or self._due:
            self._forget()

    def _forget(self) -> None:
        """Lets the connection go, and all that is under way there."""
        self._asked.clear()
        self._due.clear()
        conn = self._taken()
        if conn is not None:
            self._server.drop(conn)

    def close(self) -> None:
        """Lets the connection go, and a put that is under way to its fate. Closing twice is no error."""
        self._sent = None
        self._forget_asked()
        conn = self._taken()
        if conn is not None:
            self._server.unwatch(conn)

    def __del__(self) -> None:
        with suppress(Exception):
            conn = self._taken()
            if conn is not None:
                self._server.drop(conn)

    def _check(self, conn: Any, fence: bytes | None) -> None:
        """Raises FencedError unless the fence is at the token; else the connection is the one under watch."""
        if fence != self._text or self._token.closed:
            self._asked.clear()
            with suppress(*DRIVER_ERRORS):  # then it is gone
                while self._due:
                    self._due.popleft().read(self._server, conn)
                self._server.unwatch(conn)
            self._due.clear()
            raise fenced(self._state, self._token, fence)
        self._watching = conn

    def _own(self) -> Any:
        """The connection under watch, if there is one: a fork leaves its parent's alone."""
        conn = self._watching
        return conn if conn is not None and conn.pid == os.getpid() else None

    def _taken(self) -> Any:
        """The connection under watch, if there is one; now it is the caller's."""
        conn, self._watching = self._own(), None
        return conn


class _Asked:
    """Keys whose records were asked for; the fence and the records as soon as they are read."""

    __slots__ = ("fence", "packed", "records")

    def __init__(self, packed: PackedKeys) -> None:
        self.packed = packed
        self.fence: bytes | None = None
        self.records: list[bytes | None] = []

    def read(self, server: Server, conn: Any) -> None:
        """In the order in which they were asked for."""
        self.fence, self.records = server.replies(conn, 2)


class _Sent:
    """A transaction of ``replies`` beside those to MULTI and EXEC; then what it came to, and the fence behind it.

    ``made``: keys, records, and which of them were absent: those are to be made, and to replace nothing.
    """

    __slots__ = ("change", "done", "fence", "made", "replies")

    def __init__(self, change: bytes, replies: int, made: _Made | None) -> None:
        self.change = change
        self.replies = replies
        self.made = made
        self.done: Any = None
        self.fence: bytes | None = None

    def read(self, server: Server, conn: Any) -> None:
        """With those to the WATCH and the GET behind it."""
        *_, self.done, _, self.fence = server.replies(conn, self.replies + 4, exec_at=-3)


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
