"""The contract of a store, in a real Redis cluster of three masters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from servers import free_port
from side_doors import RedisClusterSideDoor

from mapstate.backends.redis import RedisClusterBackend
from mapstate.testing.contracts import StoreContract


@pytest.mark.redis
class TestRedisCluster(StoreContract):
    without = {
        "fence_with_ledger": "a slot group and its fence lie in a slot of their own",
        "joint_ledgers": "each state's ledger lies in a slot of its own",
        "snapshots": "no request reads a whole state at one moment",
    }
    max_value_bytes = 2_000_000
    secret = "hunter2"
    shortest_ttl = 0.3

    @pytest.fixture
    def backend(self, cluster_url):
        return replace(RedisClusterBackend.from_url(cluster_url), max_value_bytes=self.max_value_bytes)

    @pytest.fixture
    def side_door(self, redis_cluster, backend):
        client = redis_cluster.client()
        yield RedisClusterSideDoor(client, backend)
        client.close()

    @pytest.fixture
    def unreachable(self):
        nodes = (("127.0.0.1", free_port()),)
        return RedisClusterBackend(nodes=nodes, username="user", password=self.secret, retries=0)
