"""The contract of a store, on a real Redis primary that sentinels watch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from servers import free_port
from side_doors import RedisSideDoor

from mapstate.backends.redis import RedisSentinelBackend
from mapstate.testing.contracts import StoreContract


@pytest.mark.full  # test_redis_shapes and test_shared_readers have sentinels in each run
@pytest.mark.redis
class TestRedisSentinel(StoreContract):
    without = {"snapshots": "no request reads a whole state at one moment"}
    max_value_bytes = 2_000_000
    secret = "hunter2"
    shortest_ttl = 0.3

    @pytest.fixture
    def backend(self, sentinel_url):
        return replace(RedisSentinelBackend.from_url(sentinel_url), max_value_bytes=self.max_value_bytes)

    @pytest.fixture
    def side_door(self, sentinel_pair, backend):
        with sentinel_pair.primary.client() as client:
            yield RedisSideDoor(client, backend.prefix)

    @pytest.fixture
    def unreachable(self):
        return RedisSentinelBackend(
            sentinels=(("127.0.0.1", free_port()),),
            master="mymaster",
            username="user",
            password=self.secret,
            retries=0,
        )
