"""The backends for one Redis server: at an address, behind a socket, or the primary that sentinels name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from redis.connection import ConnectionPool

from mapstate.backends.redis.connection import PooledSettings, Server
from mapstate.backends.redis.layout import Layout, StringLayout
from mapstate.backends.redis.store import KEY_ENDS, RedisStore
from mapstate.errors import ConfigurationError
from mapstate.schema import KeyOrder
from mapstate.urls import Address


@dataclass(frozen=True, repr=False, kw_only=True)
class OneServer(PooledSettings):
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

    RECORDS: ClassVar[dict[str, Any]] = {"prefix": "", "layout": "string", "buckets": None, "records": None}
    key_order: ClassVar[KeyOrder] = "hash"

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
        return RedisStore(Server(self, pool, state), state, name, layout, layout_text=text, commit_domain=self.reached)

    def states(self) -> Iterator[list[tuple[str, bytes]]]:
        """See `ListsStates.states`: SCAN through the whole database. States of every layout.

        Where the URL has ``records``, the one state that has them.
        """
        from mapstate.backends.redis.operations import states_on_server

        return states_on_server(Server(self, self.pool, "*"), self.prefix.encode(), self.records)

    def _layout_of(self, state: str, name: bytes, expiry: bytes | None) -> tuple[Layout, bytes]:
        """The layout of a state's records, and the text by which the state notes it."""
        limit = self.max_value_bytes
        if self.layout != "string":
            from mapstate.backends.redis.hash_layouts import HashLayout, PackedLayout

            if self.buckets is None:
                return HashLayout(state, limit, name), b"hash"
            return PackedLayout(state, limit, name + b":", self.buckets), b"packed, %d buckets" % self.buckets
        if self.records is None:
            return StringLayout(state, limit, name + b":", expiry), b"string"
        return StringLayout(state, limit, name, expiry, reserved=KEY_ENDS), b"string, records at " + name


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisBackend(OneServer):
    """Where a Redis server is and how to reach it.

    ``redis://user:password@host:port/db?prefix=app/&retries=3``, and ``rediss://`` for TLS. The URL's parameters are
    the fields of `RedisSettings`, ``layout``, ``buckets`` and ``records``.
    """

    host: str = "localhost"
    port: int = 6379

    KIND: ClassVar[str] = "server"


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisUnixBackend(OneServer):
    """A Redis server on this machine, behind a socket: ``unix://user:password@/run/redis.sock?db=0``."""

    path: str = ""

    KIND: ClassVar[str] = "socket"


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisSentinelBackend(OneServer):
    """A primary with replicas. Sentinels name it each time that a connection is made.

    ``redis+sentinel://user:password@host:26379,host2:26379/mymaster/db?parameter=value``, and ``rediss+sentinel://``
    for TLS, to the sentinels too. User and password are those of the servers.

    ``sentinel_login``  the sentinels ask for the same user and password
    ``retries``         is 20 here, because a failover takes a while. One that takes two ``socket_timeout`` is an error
    """

    sentinels: tuple[Address, ...] = ()
    master: str = ""
    sentinel_login: bool = False
    retries: int = 20

    KIND: ClassVar[str] = "sentinels"
