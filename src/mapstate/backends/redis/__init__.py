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

from typing import TYPE_CHECKING, Any

from mapstate.backends.redis.backend import RedisBackend, RedisSentinelBackend, RedisUnixBackend
from mapstate.backends.redis.store import RedisStore

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


def __getattr__(name: str) -> Any:
    """Import the classes for a cluster at first use: a worker's first batch waits for its imports."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mapstate.backends.redis import cluster_store

    return getattr(cluster_store, name)
