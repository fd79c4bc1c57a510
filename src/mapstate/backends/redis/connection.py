"""Connections to one Redis server: taken from this process's pool, asked, tried again, given back."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from redis import exceptions as driver
from redis.connection import Connection, ConnectionPool

from mapstate.backends.redis.problems import DRIVER_ERRORS, problem_of
from mapstate.backends.redis.wire import DISCARD, EXEC, MULTI, UNWATCH, command, raise_first
from mapstate.errors import StoreError

__all__ = ["MOST_CONNECTIONS", "Patience", "Reached", "Server", "pool_of"]

MOST_CONNECTIONS = 2**31
"""Of a pool: as many as there are calls at one time."""

T = TypeVar("T")

_pools: dict[tuple[int, Any], ConnectionPool] = {}


def pool_of(owner: Any, make: Callable[[], ConnectionPool]) -> ConnectionPool:
    """The connections of this process, made at first use; a fork never uses its parent's.

    ``owner`` says to whom they lead, and is compared: equal owners share a pool.
    """
    pid = os.getpid()
    pool = _pools.get((pid, owner))
    if pool is None:
        for known in list(_pools):  # at once: other threads add theirs meanwhile
            if known[0] != pid:
                _pools.pop(known, None)  # closes the copies here, and not the parent's connections
        pool = _pools.setdefault((pid, owner), make())
    return pool


class Patience:
    """How often, and until when, something is tried again: after growing pauses, with a deadline."""

    def __init__(self, retries: int, socket_timeout: float) -> None:
        self._left = retries
        self._deadline = time.monotonic() + 2 * socket_timeout
        self._pause = 0.05

    def ends(self) -> bool:
        """True where it is over; else waits a little, and the caller tries again."""
        if not self._left or time.monotonic() > self._deadline:
            return True
        time.sleep(self._pause * random.uniform(0.5, 1))  # noqa: S311  jitter
        self._pause = min(2 * self._pause, 1.0)
        self._left -= 1
        return False


class Reached(Protocol):
    """What a `Server` has to know of the backend that it belongs to."""

    @property
    def address(self) -> str:
        """For messages."""

    @property
    def secret(self) -> str | None:
        """What messages must not show."""

    @property
    def retries(self) -> int:
        """See `Patience`."""

    @property
    def socket_timeout(self) -> float:
        """Seconds."""

    def pool(self) -> ConnectionPool:
        """The connections of this process."""


class Server:
    """One server, as the store of one state talks to it. Holds no connection by itself."""

    def __init__(self, backend: Reached, state: str) -> None:
        self._backend = backend
        self._state = state

    def ask(self, commands: bytes, replies: int, *, optional: int = 0) -> list[Any]:
        """The replies to what may be asked again. The last ``optional`` ones may be refused, and are None then."""
        return self.retrying(lambda: self.finish(self.take(), commands, replies, optional=optional))

    def tell(self, commands: bytes, replies: int) -> list[Any]:
        """The replies to what may not be sent twice: where the reply is lost, nobody knows whether it was done."""
        conn = self.retrying(self.take)
        return self.retrying(lambda: self.finish(conn, commands, replies), retries=0)

    def retrying(self, ask: Callable[[], T], retries: int | None = None) -> T:
        """What ``ask`` returns; tried again, after pauses, where the trouble may pass."""
        patience = Patience(self._backend.retries if retries is None else retries, self._backend.socket_timeout)
        while True:
            try:
                return ask()
            except DRIVER_ERRORS as error:
                problem, may_pass = self._problem(error)
            if not may_pass or patience.ends():
                raise problem  # not above, where it would have the driver's error as its context

    def take(self) -> Connection:
        """A connection, which is the caller's until it is given back."""
        return self._backend.pool().get_connection()

    def give_back(self, conn: Connection) -> None:
        """To the pool."""
        self._backend.pool().release(conn)

    def drop(self, conn: Connection) -> None:
        """Closes a connection that may be half read, or under a WATCH that nobody minds any more."""
        conn.disconnect()  # type: ignore[no-untyped-call]
        self.give_back(conn)

    def finish(self, conn: Connection, commands: bytes, replies: int, *, optional: int = 0) -> list[Any]:
        """`exchange`, and the connection goes back to the pool."""
        found = self.exchange(conn, commands, replies, optional=optional)
        self.give_back(conn)
        return found

    def exchange(self, conn: Any, commands: bytes, replies: int, *, optional: int = 0) -> list[Any]:
        """Sends, and reads each reply; raises the first that is an error, also inside that of EXEC.

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
        """The second half of `exchange`. The reply to EXEC, if there is one, stands at ``exec_at``."""
        try:
            found = [conn.read_response() for _ in range(count - optional)]
            for _ in range(optional):
                try:
                    found.append(conn.read_response())
                except driver.ResponseError:
                    found.append(None)
            if exec_at is not None and found[exec_at] is not None:
                raise_first(found[exec_at])
        except BaseException:
            self.drop(conn)
            raise
        return found

    def watch(
        self, conn: Connection, key: bytes, more: bytes = b"", replies: int = 0, *, optional: int = 0
    ) -> tuple[Connection, list[Any]]:
        """Puts ``key`` under WATCH and reads it, and then asks for ``more``: one round trip.

        MULTI and DISCARD come first. Where an ACL forbids MULTI that has to show before there is anything
        to write: what follows a refused MULTI would be run at once, unguarded.
        """
        commands = MULTI + DISCARD + command(b"WATCH", key) + command(b"GET", key) + more
        return conn, self.exchange(conn, commands, 4 + replies, optional=optional)[3:]

    def unwatch(self, conn: Connection) -> None:
        """Ends the WATCH and gives the connection back."""
        with suppress(driver.RedisError, OSError):
            self.finish(conn, UNWATCH, 1)

    def _problem(self, error: Exception) -> tuple[StoreError, bool]:
        backend = self._backend
        return problem_of(error, state=self._state, store=backend.address, secret=backend.secret)
