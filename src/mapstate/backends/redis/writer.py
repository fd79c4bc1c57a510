"""The fenced writer of a task: reads and writes records on a single server under WATCH."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress
from typing import Any

from mapstate.backends.redis.connection import EXEC, MULTI, Server, get_and_watch, token_text
from mapstate.backends.redis.layout import Layout, PackedKeys
from mapstate.backends.redis.problems import DRIVER_ERRORS, fenced
from mapstate.backing_map import check_lengths
from mapstate.capabilities import FenceToken
from mapstate.errors import MapStateError

_NewKeys = tuple[Sequence[str], Sequence[bytes], Sequence[bool]]
_PUT_TRIES = 8
_TOUCHED = "touched again and again"
MOST_AHEAD = 16 * 2**20  # bytes of a put after which no read is sent ahead: its reply would wait in memory


class Writer:
    """The map of one task. See `FencedWrites.writer`.

    The plain way: `multi_get` asks WATCH, GET of the fence and MGET; `multi_put` sends MULTI, MSET and EXEC. The rest
    is reading ahead, and what to do after a lost reply.

    One chunk at a time is under WATCH: EXEC ends every WATCH of its connection, so a second chunk there would be
    unguarded. A read ahead needs no WATCH of its own: a fence never comes back to a token, so a fence that is equal at
    the put was equal since the read; and no other task writes the keys of this one. With a read under way, a put
    carries the next WATCH after its EXEC, and the next put reads its replies: the server stores a chunk while this
    task works on the next. The connection carries, in this order, with a bar where this task reads::

        WATCH, MGET 1, MGET 2 | MULTI, MSET 1, EXEC, WATCH, MGET 3 | MULTI, MSET 2, EXEC, WATCH, MGET 4 | ...
             up to MGET 1's                      MGET 2's, then those to put 1         MGET 3's, then those to put 2

    Each WATCH and each MGET comes with a GET of the fence.
    """

    def __init__(self, server: Server, layout: Layout, fence: bytes, token: FenceToken, state: str) -> None:
        self._server = server
        self._layout = layout
        self._get_fence, self._watch_fence = get_and_watch(fence)
        self._token = token
        self._text = token_text(token)
        self._state = state
        self._watching: Any = None
        self._asked: deque[_PendingRead] = deque()
        self._sent: _PendingPut | None = None
        self._due: deque[_PendingRead | _PendingPut] = deque()
        self._packed: PackedKeys | None = None
        self._absent: list[bool] | None = None
        self._large = False

    def read_ahead(self, keys: Sequence[str]) -> None:
        """See `ReadsAhead.read_ahead`: sent at once, on the connection under WATCH."""
        if not keys or self._large:
            return
        asked = _PendingRead(self._layout.pack(list(keys)))
        if self._own() is None:
            self._start_anew()
        with suppress(*DRIVER_ERRORS):  # multi_get sends it anew, and retries
            self._ask(asked)
            self._asked.append(asked)

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """WATCH, GET of the fence, and the records: one round trip; none after a read ahead. Raises FencedError."""
        if not keys:
            return []
        if self._asked and self._asked[0].packed.keys == keys:
            asked = self._asked.popleft()
        else:
            self.flush()
            asked = _PendingRead(self._layout.pack(list(keys)))
        self._packed = asked.packed
        records = self._server.retrying(lambda: self._read(asked))
        guarded = self._layout.reads_types_as_absent and not all(records) and None in records
        self._absent = [record is None for record in records] if guarded else None
        return records

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """MULTI, the records, EXEC: one round trip, and one before it where no get was. Raises FencedError.

        An idempotent retry where the reply is lost: the same bytes, under the fence again. No other attempt has begun
        then, and in this attempt no other task writes these keys. With a read under way, `flush` reads the replies;
        the next put begins with it.

        Raises CorruptRecordError where a key without a record turns out to have another type. It is not overwritten;
        other keys of this put may be written.
        """
        if len(keys) != len(values):
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
        """See `ReadsAhead.flush`: reads the replies to the put under way."""
        if self._sent is not None:
            self._finish(self._sent)
            self._sent = None

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """See `Rewrites.multi_rewrite`: one transaction. Needs Redis 6.0."""
        check_lengths(keys, values, "values")
        if keys:
            self._send(*self._layout.rewrite(keys, values))

    def _send(self, put: bytes, replies: int, made: _NewKeys | None = None) -> None:
        """Send a put under the fence, after the one before. With a read under way, do not wait for its reply."""
        self.flush()
        sent = _PendingPut(MULTI + put + EXEC, replies, made)
        self._large = len(sent.change) > MOST_AHEAD
        if not self._asked or self._own() is None:
            self._forget_asked()
            self._confirm(sent)
            return
        self._sent = sent
        with suppress(*DRIVER_ERRORS):  # flush retries
            self._put(sent)
        if self._large:
            self.flush()

    def _finish(self, sent: _PendingPut) -> None:
        """Return when a put that was sent is done. Retries where the fence was written, but with the same token."""
        for _ in range(_PUT_TRIES):
            if self._own() is None:  # no new connection before the requests on the old one are done
                break
            try:
                self._read_to(sent)
                self._check(self._taken(), sent.fence)
                if sent.done is not None and self._is_stored(sent):
                    return
                self._put(sent)
            except MapStateError:  # a StoreUnavailableError is an OSError, too
                raise
            except DRIVER_ERRORS:  # the put may be done or not: retried below
                continue
        else:
            raise fenced(self._state, self._token, _TOUCHED)
        self._forget()
        self._confirm(sent)

    def _confirm(self, sent: _PendingPut) -> None:
        """Send a put alone, and wait. Retries as `_finish` does."""
        for _ in range(_PUT_TRIES):
            sent.done = self._server.retrying(lambda: self._transact(sent.change, sent.replies))
            if sent.done is not None and self._is_stored(sent):
                return
        raise fenced(self._state, self._token, _TOUCHED)

    def _is_stored(self, sent: _PendingPut) -> bool:
        """After EXEC: whether the keys that were absent have these records now. Otherwise the put can be repeated.

        Strings may be there from an earlier try, whose reply was lost. Raises CorruptRecordError for another type.
        """
        if not sent.made or all(sent.done):
            return True
        keys, values, absent = sent.made
        layout, made = self._layout, dict(zip(compress(keys, absent), compress(values, absent), strict=True))
        stored = self._server.ask(layout.get(layout.pack(list(made))), 1)[0]
        other = {key: record for key, record in zip(made, stored, strict=True) if record != made[key]}
        if not other:
            return True
        types = self._server.ask(b"".join(layout.types(list(other))), len(other), optional=len(other))
        foreign = {
            key: kind
            for (key, record), kind in zip(other.items(), types, strict=True)
            if record is None and kind not in (b"none", b"string")
        }
        if foreign:
            raise layout.foreign(list(foreign), list(foreign.values()))
        put, sent.replies = layout.put(layout.pack(keys), values)
        sent.change, sent.made = MULTI + put + EXEC, None
        return False

    def _transact(self, change: bytes, replies: int) -> Any:
        """The reply to EXEC. Releases the connection."""
        if self._own() is None:
            conn, (fence,) = self._server.watch(self._watch_fence)
            self._check(conn, fence)
        return self._server.finish(self._taken(), change, replies + 2)[-1]

    def _read(self, asked: _PendingRead) -> list[bytes | None]:
        """The records; requested anew where the connection is gone. Raises FencedError."""
        if self._own() is None:
            self._start_anew()
            asked.records = []
        if not asked.records:
            if asked not in self._due:
                self._ask(asked)
            self._read_to(asked)
        self._check(self._taken(), asked.fence)
        return asked.records

    def _ask(self, asked: _PendingRead) -> None:
        """Send a read, after what is under way."""
        conn, get = self._taken(), self._get_fence + self._layout.get(asked.packed)
        if conn is None:
            conn, (fence,) = self._server.watch(self._watch_fence, get)
            self._due.append(asked)
            self._check(conn, fence)
        else:
            self._server.send(conn, get)
            self._due.append(asked)
            self._watching = conn

    def _put(self, sent: _PendingPut) -> None:
        """Send a put, after what is under way, and the next WATCH after it."""
        conn = self._taken()
        self._server.send(conn, sent.change + self._watch_fence)
        self._due.append(sent)
        self._watching = conn

    def _read_to(self, last: _PendingRead | _PendingPut) -> None:
        """Read the replies that are due, up to those of ``last``. Where that raises, the connection is gone."""
        conn = self._taken()
        while last in self._due:
            self._due.popleft().read(self._server, conn)
        self._watching = conn

    def _start_anew(self) -> None:
        """Finish the put under way and drop reads ahead, for a request alone."""
        self.flush()
        self._forget_asked()

    def _forget_asked(self) -> None:
        """Drop reads ahead, and the connection where replies may be under way."""
        if self._asked or self._due:
            self._forget()

    def _forget(self) -> None:
        """Drop the connection, and all that is under way there."""
        self._asked.clear()
        self._due.clear()
        conn = self._taken()
        if conn is not None:
            self._server.drop(conn)

    def close(self) -> None:
        """Release the connection. A put under way may be done or not. Closing twice is no error."""
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
        """Raises FencedError unless the fence is at the token; otherwise keep the connection under WATCH."""
        if fence != self._text or self._token.closed:
            self._asked.clear()
            with suppress(*DRIVER_ERRORS):  # then the connection is gone
                while self._due:
                    self._due.popleft().read(self._server, conn)
                self._server.unwatch(conn)
            self._due.clear()
            raise fenced(self._state, self._token, fence)
        self._watching = conn

    def _own(self) -> Any:
        """The connection under WATCH, if there is one: a fork does not use its parent's."""
        conn = self._watching
        return conn if conn is not None and conn.pid == os.getpid() else None

    def _taken(self) -> Any:
        """The connection under WATCH, if there is one. From now on it is the caller's."""
        conn, self._watching = self._own(), None
        return conn


class _PendingRead:
    """A read under way: its keys, and the fence and the records as soon as they are read."""

    __slots__ = ("fence", "packed", "records")

    def __init__(self, packed: PackedKeys) -> None:
        self.packed = packed
        self.fence: bytes | None = None
        self.records: list[bytes | None] = []

    def read(self, server: Server, conn: Any) -> None:
        """Called in the order in which reads and puts were sent."""
        self.fence, self.records = server.replies(conn, 2)


class _PendingPut:
    """A put under way, with ``replies`` beside those to MULTI and EXEC; then its result, and the fence after it.

    ``made``: keys, records, and which keys were absent: their records must be new, and replace nothing.
    """

    __slots__ = ("change", "done", "fence", "made", "replies")

    def __init__(self, change: bytes, replies: int, made: _NewKeys | None) -> None:
        self.change = change
        self.replies = replies
        self.made = made
        self.done: Any = None
        self.fence: bytes | None = None

    def read(self, server: Server, conn: Any) -> None:
        """Reads the replies to the WATCH and the GET after it, too."""
        *_, self.done, _, self.fence = server.replies(conn, self.replies + 4, exec_at=-3)
