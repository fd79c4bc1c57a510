"""The backend for one Redis server at an address, and what all backends of one server have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from redis.connection import ConnectionPool

from mapstate.backends.redis.connection import MOST_CONNECTIONS, Access, Server, pool_of
from mapstate.backends.redis.hash_layout import HashLayout
from mapstate.backends.redis.layout import Layout, StringLayout
from mapstate.backends.redis.packed_layout import PackedLayout
from mapstate.backends.redis.settings import RedisSettings, driver_module
from mapstate.backends.redis.store import KEY_ENDS, RedisStore
from mapstate.backing_map import Backend
from mapstate.errors import ConfigurationError
from mapstate.schema import KeyOrder
from mapstate.urls import Parameters, Url, shown_address

_MOST_HASHES = 10**9


@dataclass(frozen=True, repr=False, kw_only=True)
class OneServer(RedisSettings):
    """The parameters that are the same wherever one server holds all of a state.

    ``layout``   "string": a Redis key per record. "hash": one Redis hash with all records. "packed": many small hashes,
                 for less memory. Records in hashes have no ttl
    ``buckets``  with layout=packed: the number of hash shards, one for each 32 to 64 expected keys. Fixed when the
                 state is made, and checked from then on
    ``records``  where storm-redis left the records of a state: the name of its hash, or the prefix of each key, which
                 may be empty. It names the records of one state, so no two states can have it
    """

    db: int = 0
    layout: str = "string"
    buckets: int | None = None
    records: str | None = None

    key_order: ClassVar[KeyOrder] = "hash"
    PARAMETERS: ClassVar[Parameters] = {
        **RedisSettings.PARAMETERS,
        "layout": str,
        "buckets": int,
        "records": str,
    }

    def _rules(self) -> list[tuple[str, object, str]]:
        whole, packed = self.records is None or not self.prefix, self.layout == "packed"
        return [
            *super()._rules(),
            ("db", 0 <= self.db <= _MOST_HASHES, f"from 0 to {_MOST_HASHES}"),
            ("layout", self.layout in ("string", "hash", "packed"), "string, hash or packed"),
            ("buckets", packed == (self.buckets is not None), "given with layout=packed, and only there"),
            ("buckets", self.buckets is None or 0 < self.buckets <= _MOST_HASHES, f"from 1 to {_MOST_HASHES}"),
            ("records", whole, "a whole name, without a prefix"),
            ("records", self.records is None or not packed, "for the layouts of storm-redis, string and hash"),
            ("records", self.layout == "string" or self.records != "", "the name of a hash where layout is hash"),
        ]

    @property
    def address(self) -> str:
        """The server's address, for messages."""
        raise NotImplementedError

    def open(self, state: str, *, ttl: float | None = None) -> RedisStore:
        """See `Backend.open`. Makes no connection."""
        return self.open_with(self.pool, state, ttl)

    def on_event_loop(self) -> Backend:
        from mapstate.backends.redis.async_pools import AsyncPools

        return AsyncPools(lambda _: self.new_pool(asynchronous=True), self.open_with)

    def open_with(self, pool: Callable[[], ConnectionPool], state: str, ttl: float | None) -> RedisStore:
        """`open`, with the connections of ``pool``."""
        expiry = self.expiry(state, ttl)
        if expiry is not None and self.layout != "string":
            raise ConfigurationError(
                f"layout={self.layout} has no ttl: Redis expires a hash as a whole. Leave out the ttl, or keep the "
                "state with layout=string"
            )
        name = (self.prefix + state if self.records is None else self.records).encode()
        layout, text = self._layout_of(state, name, expiry)
        return RedisStore(self._server(state, pool), state, name, layout, layout_text=text, commit_domain=self.reached)

    def states(self) -> Iterator[list[tuple[str, bytes]]]:
        """See `ListsStates.states`: SCAN through the whole database. States of every layout.

        Where the URL has ``records``, the one state that has them.
        """
        from mapstate.backends.redis.listing import states_on_server, the_one_state

        if self.records is not None:
            return the_one_state(self._server("*", self.pool), self.records)
        return states_on_server(self._server("*", self.pool), self.prefix.encode())

    def _server(self, state: str, pool: Callable[[], ConnectionPool]) -> Server:
        access = Access(self.address, self.retries, self.socket_timeout, lambda: self.secret, pool)
        return Server(access, state)

    def _layout_of(self, state: str, name: bytes, expiry: bytes | None) -> tuple[Layout, bytes]:
        """The layout of a state's records, and the text by which the state notes it."""
        limit = self.max_value_bytes
        if self.buckets is not None:
            return PackedLayout(state, limit, name + b":", self.buckets), b"packed, %d buckets" % self.buckets
        if self.layout == "hash":
            return HashLayout(state, limit, name), b"hash"
        if self.records is None:
            return StringLayout(state, limit, name + b":", expiry), b"string"
        return StringLayout(state, limit, name, expiry, reserved=KEY_ENDS), b"string, records at " + name

    def pool(self) -> ConnectionPool:
        """The connections of this process; see `pool_of`."""
        return pool_of(self.reached, self.new_pool)

    @cached_property
    def reached(self) -> Self:
        """The backend without the fields that place the records. Backends for which it is equal share connections."""
        return replace(self, prefix="", layout="string", buckets=None, records=None)

    def new_pool(self, *, asynchronous: bool = False) -> Any:
        """A pool of redis-py, or one of ``redis.asyncio``."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisBackend(OneServer):
    """Where a Redis server is and how to reach it.

    ``redis://user:password@host:port/db?prefix=app/&retries=3``, and ``rediss://`` for TLS. The URL's parameters are
    the fields of `RedisSettings`, ``layout``, ``buckets`` and ``records``.
    """

    host: str = "localhost"
    port: int = 6379

    PARAMETERS: ClassVar[Parameters] = OneServer.PARAMETERS
    EXAMPLE: ClassVar[str] = "redis://user:password@host:port/db"
    SCHEMES: ClassVar[tuple[str, ...]] = ("redis", "rediss")

    def _rules(self) -> list[tuple[str, object, str]]:
        return [*super()._rules(), ("port", 0 < self.port < 2**16, "from 1 to 65535")]

    @classmethod
    def _place(cls, url: Url) -> dict[str, Any]:
        ((host, port),) = url.hosts
        return {
            "host": host or "localhost",
            "port": 6379 if port is None else port,
            "db": int(url.path.strip("/") or 0),
        }

    def _url(self, user: str) -> str:
        return f"{'rediss' if self.tls else 'redis'}://{user}{self.address}/{self.db}"

    @property
    def address(self) -> str:
        """``host:port``, for messages."""
        return shown_address((self.host, self.port))

    def new_pool(self, *, asynchronous: bool = False) -> Any:
        driver = driver_module("connection", asynchronous=asynchronous)
        return driver.ConnectionPool(
            connection_class=driver.SSLConnection if self.tls else driver.Connection,
            max_connections=MOST_CONNECTIONS,
            host=self.host,
            port=self.port,
            db=self.db,
            socket_keepalive=True,
            **self.connection_options(asynchronous=asynchronous),
            **self.tls_options(),
        )
