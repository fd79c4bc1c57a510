"""Where a Redis cluster is. Imported only where there is one: a worker's first batch waits for its imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from redis.connection import Connection, ConnectionPool, SSLConnection

from mapstate.backends.redis.cluster_store import RedisClusterStore
from mapstate.backends.redis.connection import MOST_CONNECTIONS, pool_of
from mapstate.backends.redis.settings import Address, RedisSettings, Url, shown_address
from mapstate.errors import ConfigurationError

__all__ = ["RedisClusterBackend"]

_MOST_BUCKETS = 1024


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisClusterBackend(RedisSettings):
    """A Redis cluster: ``redis+cluster://user:password@host:port,host2:port?buckets=64``.

    ``rediss+cluster://`` is the same with TLS. The hosts are those that are asked first; one is enough while it lives.

    ``buckets``  into how many groups a state's records go, each in a slot of its own: at least some for each node, and
                 not so many that a chunk falls into crumbs. Settled when the state is made, and checked from then on
    ``retries``  is 20 here: a failover takes a while. One that takes two ``socket_timeout`` is an error
    """

    nodes: tuple[Address, ...] = (("localhost", 6379),)
    buckets: int = 64
    retries: int = 20

    PARAMETERS: ClassVar[Mapping[str, Callable[[str], Any]]] = RedisSettings.PARAMETERS | {  # type: ignore[operator]
        "buckets": int
    }
    EXAMPLE: ClassVar[str] = "redis+cluster://user:password@host:port,host2:port"
    SCHEMES: ClassVar[tuple[str, ...]] = ("redis+cluster", "rediss+cluster")

    chunk_size: ClassVar[int] = 10_000
    """Each bucket has a share of a chunk; five sixths of the time of chunks of 2,000 (``bench/chunk_sizes.py``)."""

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
        """Where it is asked first, for messages."""
        return ",".join(map(shown_address, self.nodes))

    def open(self, state: str, *, ttl: float | None = None) -> RedisClusterStore:
        """See `Backend.open`. Makes no connection."""
        if "{" in state or "}" in state:
            raise ConfigurationError(f"{state!r} cannot name a state in a cluster: braces choose the slot there")
        return RedisClusterStore(self, state, self.expiry(state, ttl))

    def pool_to(self, node: Address) -> ConnectionPool:
        """The connections of this process to one node; see `pool_of`."""
        return pool_of((self._reached, node), lambda: self._new_pool(node))

    @cached_property
    def _reached(self) -> Self:
        """See `OneServer`."""
        return replace(self, prefix="", buckets=1)

    def _new_pool(self, node: Address) -> ConnectionPool:
        return ConnectionPool(
            connection_class=SSLConnection if self.tls else Connection,
            max_connections=MOST_CONNECTIONS,
            host=node[0],
            port=node[1],
            socket_keepalive=True,
            **self.connection_options(),
            **self.tls_options(),
        )
