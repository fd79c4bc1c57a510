"""The backend for a Redis Cluster. Imported only where there is one: a worker's first batch waits for its imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from redis.connection import ConnectionPool

from mapstate.backends.redis.cluster_map import ClusterMap
from mapstate.backends.redis.cluster_store import RedisClusterStore
from mapstate.backends.redis.connection import PooledSettings
from mapstate.backends.redis.slot_groups import SlotGroup
from mapstate.errors import ConfigurationError
from mapstate.schema import KeyOrder
from mapstate.urls import Address


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisClusterBackend(PooledSettings):
    """A Redis cluster: ``redis+cluster://user:password@host:port,host2:port?buckets=64``.

    ``rediss+cluster://`` is the same with TLS. The hosts are asked in turn at first contact; one is enough.

    ``buckets``  the number of slot groups: at least some for each node, and so few that a chunk has many keys of each.
                 Fixed when the state is made, and checked from then on
    ``retries``  is 20 here, because a failover takes a while. One that takes two ``socket_timeout`` is an error
    """

    nodes: tuple[Address, ...] = (("localhost", 6379),)
    buckets: int = 64
    retries: int = 20

    KIND: ClassVar[str] = "cluster"
    RECORDS: ClassVar[dict[str, Any]] = {"prefix": "", "buckets": 1}

    chunk_size: ClassVar[int] = 10_000
    """Each slot group has a share of a chunk. Takes 5/6 of the time of chunks of 2,000 (``bench/chunk_sizes.py``)."""

    @property
    def key_order(self) -> KeyOrder:
        """See `Backend`: slot group after slot group."""
        return self.buckets

    def open_with(self, pool: Callable[..., ConnectionPool], state: str, ttl: float | None) -> RedisClusterStore:
        if "{" in state or "}" in state:
            raise ConfigurationError(f"{state!r} cannot name a state in a cluster: braces choose the slot there")
        name = (self.prefix + state).encode()
        expiry = self.expiry(state, ttl)
        groups = [SlotGroup(name, number, state, self.max_value_bytes, expiry) for number in range(self.buckets)]
        return RedisClusterStore(ClusterMap(self, self.nodes, pool, state), state, self.prefix, groups)

    def states(self) -> Iterator[list[tuple[str, bytes]]]:
        """See `ListsStates.states`: SCAN, one node after the other."""
        from mapstate.backends.redis.listing import states_in_cluster

        return states_in_cluster(ClusterMap(self, self.nodes, self.pool, "*"), self.prefix.encode())

    def host_options(self, node: Address) -> dict[str, Any]:
        return {"host": node[0], "port": node[1]}
