"""Connections to one Redis server: taken from this process's pool, used for requests and retries, released.

Requests are commands packed as RESP; `mapstate.backends.redis.layout` packs those with many keys.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis import exceptions as driver
from redis.connection import Connection, ConnectionPool

from mapstate.backends.redis.problems import DRIVER_ERRORS, problem_of
from mapstate.capabilities import FenceToken
from mapstate.errors import MapStateError, StoreError
from mapstate.retry import Retries, retried

T = TypeVar("T")

_Watched = tuple[Connection, list[Any]]  # under WATCH, and the replies to the GET of the key and to what came along


def command(*words: bytes) -> bytes:
    """Pack one command of a few words."""
    return b"*%d\r\n%b" % (len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words]))


def commands(*each: tuple[bytes, ...]) -> bytes:
    """Pack commands of a few words, one after the other."""
    return b"".join([command(*words) for words in each])


def get_and_watch(key: bytes) -> tuple[bytes, bytes]:
    """GET of a key; and WATCH with GET of it."""
    get = command(b"GET", key)
    return get, command(b"WATCH", key) + get


INFO = command(b"INFO", b"server") + command(b"INFO", b"replication")
"""Two commands, whose replies `incarnation_of` takes."""

MULTI = command(b"MULTI")
DISCARD = command(b"DISCARD")
UNWATCH = command(b"UNWATCH")
EXEC = command(b"EXEC")

_pools: dict[tuple[int, Any, Any], ConnectionPool] = {}


def pool_of(settings: Any, node: Any = None) -> ConnectionPool:
    """The connections of this process, in a cluster to ``node``. Settings whose `reached` is equal share them."""
    pid = os.getpid()
    pool = _pools.get((pid, settings.reached, node))
    if pool is None:
        from mapstate.backends.redis.pools import new_pool

        for known in list(_pools):  # a copy: other threads add theirs meanwhile
            if known[0] != pid:
                _pools.pop(known, None)  # closes this process's copies, not the parent's connections
        pool = _pools.setdefault((pid, settings.reached, node), new_pool(settings, node))
    return pool


class Server:
    """One server, for the store of one state. Holds no connection between requests.

    ``settings``  a `RedisSettings`, how it is reached; ``pool`` returns the connections of this process
    """

    def __init__(self, settings: Any, pool: Callable[[], ConnectionPool], state: str) -> None:
        self.settings = settings
        self.pool = pool
        self.state = state

    def ask(self, commands: bytes, replies: int, *, optional: int = 0) -> list[Any]:
        """The replies to commands that may be sent twice. Where the last ``optional`` are refused, they are None."""
        return self.retrying(lambda: self.finish(self.take(), commands, replies, optional=optional))

    def tell(self, commands: bytes, replies: int, conn: Any = None) -> list[Any]:
        """The replies to commands that must not be sent twice. Where a reply is lost, nobody knows what was done.

        ``conn`` is the connection that `watch` returned, if they depend on its WATCH.
        """
        borrowed = conn or self.retrying(self.take)
        return self.retrying(lambda: self.finish(borrowed, commands, replies), retries=0)

    def transact(self, changes: Sequence[tuple[bytes, ...]], conn: Any = None) -> Any:
        """The reply to EXEC, as `tell`. ``changes`` are commands of a few words."""
        return self.tell(MULTI + commands(*changes) + EXEC, len(changes) + 2, conn)[-1]

    def retrying(self, request: Callable[[], T], retries: int | None = None) -> T:
        """Return what ``request`` returns; retry where the error may pass by itself."""
        began = time.monotonic()
        try:
            return request()
        except MapStateError:  # translated already; a StoreUnavailableError is one of the driver's OSErrors, too
            raise
        except DRIVER_ERRORS as error:
            trouble = self._problem(error)
        settings = self.settings
        limits = Retries(settings.retries if retries is None else retries, 2 * settings.socket_timeout, began)
        return retried(request, trouble, limits, DRIVER_ERRORS, self._problem)

    def take(self) -> Connection:
        """A connection, which is the caller's until `finish` or `drop`."""
        return self.pool().get_connection()

    def drop(self, conn: Connection) -> None:
        """Close and release a connection that may be half read, or under a WATCH that no longer matters."""
        conn.disconnect()  # type: ignore[no-untyped-call]
        self.pool().release(conn)

    def finish(self, conn: Connection, commands: bytes, replies: int, *, optional: int = 0) -> list[Any]:
        """`exchange`, then release the connection."""
        answered = self.exchange(conn, commands, replies, optional=optional)
        self.pool().release(conn)
        return answered

    def exchange(self, conn: Any, commands: bytes, replies: int, *, optional: int = 0) -> list[Any]:
        """Send commands and read each reply. Raises the first that is an error, also one inside that of EXEC.

        After any error the connection is closed, because it may be half read.
        """
        self.send(conn, commands)
        return self.replies(conn, replies, optional=optional, exec_at=-1 if commands.endswith(EXEC) else None)

    def send(self, conn: Any, commands: bytes) -> None:
        """The first half of `exchange`."""
        try:
            conn.send_packed_command([commands], check_health=False)
        except BaseException:
            self.drop(conn)
            raise

    def replies(self, conn: Any, count: int, *, optional: int = 0, exec_at: int | None = None) -> list[Any]:
        """The second half of `exchange`. ``exec_at`` is the place of the reply to EXEC, None where there is none."""
        try:
            read = [conn.read_response() for _ in range(count - optional)]
            for _ in range(optional):
                try:
                    read.append(conn.read_response())
                except driver.ResponseError:
                    read.append(None)
            if exec_at is not None and read[exec_at] is not None:
                _raise_first(read[exec_at])
        except BaseException:
            self.drop(conn)
            raise
        return read

    def watch(self, watching: bytes, more: bytes = b"", replies: int = 0, *, optional: int = 0) -> _Watched:
        """Send WATCH and GET of a key, as `get_and_watch` packs them, and ``more``: one round trip. No retry.

        The connection is the caller's. MULTI and DISCARD come first, to find an ACL that forbids MULTI before there is
        anything to write: the server runs what follows a refused MULTI at once, unguarded.
        """
        conn = self.take()
        return conn, self.exchange(conn, MULTI + DISCARD + watching + more, 4 + replies, optional=optional)[3:]

    def watched(self, watching: bytes, more: bytes = b"", replies: int = 0, *, optional: int = 0) -> _Watched:
        """`watch`, retried."""
        return self.retrying(lambda: self.watch(watching, more, replies, optional=optional))

    def unwatch(self, conn: Connection) -> None:
        """End the WATCH and release the connection."""
        with suppress(driver.RedisError, OSError):
            self.finish(conn, UNWATCH, 1)

    def _problem(self, error: Exception) -> tuple[StoreError, bool]:
        settings = self.settings
        return problem_of(error, state=self.state, store=settings.address, login_changes=settings.login_changes)


def _raise_first(replies: Sequence[Any]) -> None:
    """Raise the first reply that is an error: redis-py does not raise those inside the reply to EXEC."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply


def token_text(token: FenceToken) -> bytes:
    """A fence as it is stored: "epoch:txid:nonce", with ":closed" at its end where nobody may write."""
    nonce = b":%b" % token.nonce.encode() if token.nonce else b""
    return b"%d:%d%b%b" % (token.epoch, token.txid, nonce, b":closed" if token.closed else b"")


def token_of(text: bytes | None) -> FenceToken | None:
    """The fence that is stored as ``text``. Raises ValueError for a text that is none."""
    if text is None:
        return None
    epoch, txid, *more = text.decode().split(":")
    closed = bool(more) and more[-1] == "closed"
    nonce = more[:-1] if closed else more
    return FenceToken(int(epoch), int(txid), closed, "".join(nonce))


def incarnation_of(server: bytes | None, replication: bytes | None) -> bytes | None:
    """The incarnation of a server, which ends with its process or a failover. None where INFO is forbidden."""
    run = re.search(rb"run_id:(\w+)", server or b"")
    history = re.search(rb"master_replid:(\w+)", replication or b"")
    return None if run is None else run[1] + b"/" + (history[1] if history else b"")
