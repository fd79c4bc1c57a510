"""The backend for a Redis Cluster. Imported only where there is one: a worker's first batch waits for its imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from redis.connection import ConnectionPool

from mapstate.backends.redis.cluster_map import ClusterAccess, ClusterMap
from mapstate.backends.redis.cluster_store import RedisClusterStore
from mapstate.backends.redis.connection import MOST_CONNECTIONS, pool_of
from mapstate.backends.redis.settings import RedisSettings, driver_module
from mapstate.backends.redis.slot_groups import SlotGroup
from mapstate.backing_map import Backend
from mapstate.errors import ConfigurationError
from mapstate.schema import KeyOrder
from mapstate.urls import Address, Parameters, Url, shown_address

_MOST_BUCKETS = 1024


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisClusterBackend(RedisSettings):
    """A Redis cluster: ``redis+cluster://user:password@host:port,host2:port?buckets=64``.

    ``rediss+cluster://`` is the same with TLS. The hosts are asked in turn at first contact; one is enough.

    ``buckets``  the number of slot groups: at least some for each node, and so few that a chunk has many keys of each.
                 Fixed when the state is made, and checked from then on
    ``retries``  is 20 here, because a failover takes a while. One that takes two ``socket_timeout`` is an error
    """

    nodes: tuple[Address, ...] = (("localhost", 6379),)
    buckets: int = 64
    retries: int = 20

    PARAMETERS: ClassVar[Parameters] = {
        **RedisSettings.PARAMETERS,
        "buckets": int,
    }
    EXAMPLE: ClassVar[str] = "redis+cluster://user:password@host:port,host2:port"
    SCHEMES: ClassVar[tuple[str, ...]] = ("redis+cluster", "rediss+cluster")

    chunk_size: ClassVar[int] = 10_000
    """Each slot group has a share of a chunk. Takes 5/6 of the time of chunks of 2,000 (``bench/chunk_sizes.py``)."""

    @property
    def key_order(self) -> KeyOrder:
        """See `Backend`: slot group after slot group."""
        return self.buckets

    def _rules(self) -> list[tuple[str, object, str]]:
        ports = all(host and 0 < port < 2**16 for host, port in self.nodes)
        return [
            *super()._rules(),
            ("nodes", self.nodes and ports, "one or more hosts, with ports from 1 to 65535"),
            ("buckets", 0 < self.buckets <= _MOST_BUCKETS, f"from 1 to {_MOST_BUCKETS}"),
        ]

    @classmethod
    def _place(cls, url: Url) -> dict[str, Any]:
        if url.path.strip("/") not in ("", "0"):
            raise ValueError("a cluster has database 0 only")
        nodes = tuple((host or "localhost", 6379 if port is None else port) for host, port in url.hosts)
        return {"nodes": nodes}

    def _url(self, user: str) -> str:
        return f"{'rediss' if self.tls else 'redis'}+cluster://{user}{self.address}"

    @property
    def address(self) -> str:
        """The nodes to ask first, for messages."""
        return ",".join(map(shown_address, self.nodes))

    def open(self, state: str, *, ttl: float | None = None) -> RedisClusterStore:
        """See `Backend.open`. Makes no connection."""
        return self.open_with(self.pool_to, state, ttl)

    def on_event_loop(self) -> Backend:
        from mapstate.backends.redis.async_pools import AsyncPools

        return AsyncPools(lambda node: self._new_pool(node, asynchronous=True), self.open_with)

    def open_with(
        self, pool_to: Callable[[Address], ConnectionPool], state: str, ttl: float | None
    ) -> RedisClusterStore:
        """`open`, with the connections of ``pool_to``."""
        if "{" in state or "}" in state:
            raise ConfigurationError(f"{state!r} cannot name a state in a cluster: braces choose the slot there")
        name = (self.prefix + state).encode()
        expiry = self.expiry(state, ttl)
        groups = [SlotGroup(name, number, state, self.max_value_bytes, expiry) for number in range(self.buckets)]
        return RedisClusterStore(self._access(pool_to), state, self.prefix, groups)

    def states(self) -> Iterator[list[tuple[str, bytes]]]:
        """See `ListsStates.states`: SCAN, one node after the other."""
        from mapstate.backends.redis.listing import states_in_cluster

        return states_in_cluster(ClusterMap(self._access(self.pool_to), "*"), self.prefix.encode())

    def _access(self, pool_to: Callable[[Address], ConnectionPool]) -> ClusterAccess:
        return ClusterAccess(
            owner=self._reached,
            nodes=self.nodes,
            address=self.address,
            retries=self.retries,
            socket_timeout=self.socket_timeout,
            secret=lambda: self.secret,
            pool_to=pool_to,
        )

    def pool_to(self, node: Address) -> ConnectionPool:
        """The connections of this process to one node; see `pool_of`."""
        return pool_of((self._reached, node), lambda: self._new_pool(node))

    @cached_property
    def _reached(self) -> Self:
        return replace(self, prefix="", buckets=1)

    def _new_pool(self, node: Address, *, asynchronous: bool = False) -> Any:
        driver = driver_module("connection", asynchronous=asynchronous)
        return driver.ConnectionPool(
            connection_class=driver.SSLConnection if self.tls else driver.Connection,
            max_connections=MOST_CONNECTIONS,
            host=node[0],
            port=node[1],
            socket_keepalive=True,
            **self.connection_options(asynchronous=asynchronous),
            **self.tls_options(),
        )
