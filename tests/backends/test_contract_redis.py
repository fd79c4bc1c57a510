"""The contract of a store, on a real Redis server: records as keys, in one hash, in many, and behind a socket."""

from __future__ import annotations

from dataclasses import replace

import pytest
from servers import free_port
from side_doors import RedisHashSideDoor, RedisPackedSideDoor, RedisSideDoor

from mapstate.backends.redis import RedisBackend, RedisUnixBackend
from mapstate.testing.contracts import StoreContract


@pytest.mark.redis
class TestRedis(StoreContract):
    without = {"snapshots": "no request reads a whole state at one moment"}
    max_value_bytes = 2_000_000
    secret = "hunter2"
    shortest_ttl = 0.3

    @pytest.fixture
    def backend(self, redis_url):
        return replace(RedisBackend.from_url(redis_url), max_value_bytes=self.max_value_bytes)

    @pytest.fixture
    def side_door(self, redis_server, backend):
        with redis_server.client() as client:
            yield RedisSideDoor(client, backend.prefix)

    @pytest.fixture
    def unreachable(self):
        return RedisBackend(port=free_port(), username="user", password=self.secret, retries=0)


class TestRedisHash(TestRedis):
    without = TestRedis.without | {"ttl": "Redis expires a hash as a whole"}

    @pytest.fixture
    def backend(self, redis_url):
        return replace(RedisBackend.from_url(redis_url), layout="hash", max_value_bytes=self.max_value_bytes)

    @pytest.fixture
    def side_door(self, redis_server, backend):
        with redis_server.client() as client:
            yield RedisHashSideDoor(client, backend.prefix)

    @pytest.fixture
    def unreachable(self):
        return RedisBackend(port=free_port(), username="user", password=self.secret, retries=0, layout="hash")


class TestRedisPacked(TestRedis):
    without = TestRedis.without | {"ttl": "Redis expires a hash as a whole"}

    @pytest.fixture
    def backend(self, redis_url):
        settings = {"layout": "packed", "buckets": 13, "max_value_bytes": self.max_value_bytes}
        return replace(RedisBackend.from_url(redis_url), **settings)

    @pytest.fixture
    def side_door(self, redis_server, backend):
        with redis_server.client() as client:
            yield RedisPackedSideDoor(client, backend.prefix, 13)

    @pytest.fixture
    def unreachable(self):
        where = {"port": free_port(), "username": "user", "password": self.secret, "retries": 0}
        return RedisBackend(**where, layout="packed", buckets=13)


@pytest.mark.full  # test_shared_readers has a socket in each run
class TestRedisUnixSocket(TestRedis):
    @pytest.fixture
    def backend(self, socket_url):
        return replace(RedisUnixBackend.from_url(socket_url), max_value_bytes=self.max_value_bytes)

    @pytest.fixture
    def side_door(self, redis_behind_socket, backend):
        with redis_behind_socket[0].client() as client:
            yield RedisSideDoor(client, backend.prefix)

    @pytest.fixture
    def unreachable(self, tmp_path):
        path = str(tmp_path / "gone.sock")
        return RedisUnixBackend(path=path, username="user", password=self.secret, retries=0)
