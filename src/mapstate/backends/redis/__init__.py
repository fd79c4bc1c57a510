"""Redis in all its shapes: one server, a pair that sentinels watch, a cluster; keys or hashes.

A state ``visits`` lives under these Redis keys, readable in ``redis-cli``::

    visits:user-42     a record, one per key
    visits!ledger      the ledger
    visits!fence       who may write: "epoch:txid:nonce", or "epoch:txid:closed" when nobody may
    visits!claims      a hash, "txid/partition" to holder; removed by the next change of the ledger
    visits!reports     a list, the last batch reports, newest first
    visits!layout      the layout of the records: "string", "hash", or "packed" and the number of hash shards

Redis itself refuses a late put: on one server the fence is under WATCH from the get on, and EXEC does nothing once
the fence has moved. docs/redis.md has all shapes, their URLs, and how they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mapstate.backends.redis.backend import OneServer, RedisBackend
from mapstate.backends.redis.store import RedisStore
from mapstate.urls import Address

if TYPE_CHECKING:
    from mapstate.backends.redis.cluster_store import RedisClusterBackend, RedisClusterStore

__all__ = [
    "RedisBackend",
    "RedisClusterBackend",
    "RedisClusterStore",
    "RedisSentinelBackend",
    "RedisStore",
    "RedisUnixBackend",
]


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


def __getattr__(name: str) -> Any:
    """Import the classes for a cluster at first use: a worker's first batch waits for its imports."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mapstate.backends.redis import cluster_store

    return getattr(cluster_store, name)
