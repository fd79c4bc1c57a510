"""Connections of redis.asyncio with the methods that the stores call: each waits as `mapstate.event_loop` does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis import exceptions as driver

from mapstate.backends.redis.pools import new_pool
from mapstate.event_loop import wait_for

T = TypeVar("T")


class AsyncPools:
    """A backend for one async reader: its connections belong to the reader's event loop, and to nobody else."""

    shared_between_processes = True

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._pools: dict[Any, AsyncPool] = {}

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        return self._backend.open_with(self._pool_to, state, ttl)

    def _pool_to(self, address: Any = None) -> AsyncPool:
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = AsyncPool(new_pool(self._backend, address, asynchronous=True))
        return pool


class AsyncPool:
    """What the stores use of `redis.connection.ConnectionPool`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_connection(self) -> AsyncConnection:
        """A connection, which is the caller's until `release`."""
        return AsyncConnection(_answer(self._pool.get_connection()))

    def release(self, connection: AsyncConnection) -> None:
        """Return a connection to the pool."""
        wait_for(self._pool.release(connection.connection))

    def disconnect(self, *, inuse_connections: bool) -> None:
        """Close the connections, and those to sentinels."""
        sentinels = getattr(self._pool, "sentinel_manager", None)
        clients = () if sentinels is None else sentinels.sentinels
        for pool in (self._pool, *(client.connection_pool for client in clients)):
            with suppress(OSError, driver.RedisError):  # they are closed; the loop was too busy to see it in time
                wait_for(pool.disconnect(inuse_connections=inuse_connections))


def _answer(request: Awaitable[T]) -> T:
    """`wait_for`. Where the server has reset the connection, uvloop raises RuntimeError, and asyncio OSError."""
    try:
        return wait_for(request)
    except RuntimeError as error:
        if "handler is closed" not in str(error):
            raise
        raise driver.ConnectionError("Connection closed by server.") from error


class AsyncConnection:
    """What the stores use of `redis.connection.Connection`."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def send_packed_command(self, packed: Sequence[bytes], *, check_health: bool) -> None:
        """Send packed commands."""
        _answer(self._sent(packed, check_health=check_health))

    async def _sent(self, packed: Sequence[bytes], *, check_health: bool) -> None:
        """Send under the connection's timeout. Under its own timeout redis-py makes a task for each send."""
        seconds, self.connection.socket_timeout = self.connection.socket_timeout, None
        try:
            async with asyncio.timeout(seconds):
                await self.connection.send_packed_command(packed, check_health=check_health)
        except TimeoutError as error:  # redis-py has closed the connection
            raise driver.TimeoutError("Timeout writing to socket") from error
        finally:
            self.connection.socket_timeout = seconds

    def read_response(self) -> Any:
        """The next reply."""
        return _answer(self.connection.read_response())

    def disconnect(self) -> None:
        """Close the connection at once, also in a task that is being cancelled."""
        with suppress(OSError):
            wait_for(self.connection.disconnect(nowait=True))
