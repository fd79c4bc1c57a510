"""The contract on what stands in front of a store: cache, micro-batches, and the stores that fail on purpose."""

from __future__ import annotations

import secrets

import pytest
from side_doors import MemorySideDoor, SqliteSideDoor

from mapstate.backends.memory import MemoryBackend
from mapstate.backends.sqlite import SqliteBackend
from mapstate.maps import CachedMap, MicroBatchBackingMap
from mapstate.testing import FaultyBackend, FaultyStore, ForgetfulBackend, Mark
from mapstate.testing.contracts import BackingMapContract, MapStateContract, StoreContract


class OverSqlite(BackingMapContract):
    max_value_bytes = 2_000_000

    @pytest.fixture
    def inner(self, tmp_path):
        path = str(tmp_path / "inner.db")
        store = SqliteBackend(path, synchronous="normal", max_value_bytes=2_000_000).open(self.state)
        yield store
        store.close()

    @pytest.fixture
    def side_door(self, inner, tmp_path):
        return SqliteSideDoor(str(tmp_path / "inner.db"))


class TestCachedMap(OverSqlite, MapStateContract):
    @pytest.fixture
    def store(self, inner):
        return CachedMap(inner, 100_000)


class TestCachedMapOfOneEntry(OverSqlite, MapStateContract):
    @pytest.fixture
    def store(self, inner):
        return CachedMap(inner, 1)


class TestMicroBatchBackingMap(OverSqlite, MapStateContract):
    without = {"max_value_bytes": "a put goes out in parts: what came before the part that is refused is stored"}
    max_value_bytes = None

    @pytest.fixture
    def store(self, inner):
        return MicroBatchBackingMap(inner, 300)


class TestMicroBatchesOfOneKey(MapStateContract):
    @pytest.fixture
    def backend(self):
        return MemoryBackend(secrets.token_hex(8))

    @pytest.fixture
    def store(self, backend):
        return MicroBatchBackingMap(backend.open(self.state), 1)

    @pytest.fixture
    def side_door(self, backend):
        return MemorySideDoor(backend)


class TestCachedMicroBatches(TestMicroBatchesOfOneKey):
    @pytest.fixture
    def store(self, backend):
        return CachedMap(MicroBatchBackingMap(backend.open(self.state), 7), 50)


class TestFaultyStore(OverSqlite, MapStateContract):
    @pytest.fixture
    def store(self, inner):
        return FaultyStore(inner, Mark(times=None), record=True)


class TestFaultyBackend(StoreContract):
    without = {"ttl": "SQLite has no expiry"}
    max_value_bytes = 2_000_000

    @pytest.fixture
    def backend(self, tmp_path):
        path = str(tmp_path / "inner.db")
        inner = SqliteBackend(path, synchronous="normal", max_value_bytes=self.max_value_bytes)
        return FaultyBackend(inner, str(tmp_path), (Mark(method="multi_get"),))

    @pytest.fixture
    def side_door(self, backend):
        return SqliteSideDoor(backend.inner.path)

    @pytest.fixture
    def unreachable(self, tmp_path):
        return FaultyBackend(SqliteBackend(str(tmp_path)), str(tmp_path))


class TestForgetfulBackend(StoreContract):
    without = {
        "drops": "it passes on what a batch needs, and no more",
        "joint_ledgers": "it passes on what a batch needs, and no more",
        "ledger_reads": "nor has the memory under it",
        "max_value_bytes": "nor has the memory under it",
        "outages": "it lives in the process that asks",
        "reports": "it passes on what a batch needs, and no more",
        "rewrites": "it passes on what a batch needs, and no more",
        "states": "it passes on what a batch needs, and no more",
        "snapshots": "it passes on what a batch needs, and no more",
        "shared_between_processes": "what it has not passed on yet is this process's",
        "ttl": "nor has the memory under it",
    }

    @pytest.fixture
    def backend(self):
        return ForgetfulBackend(MemoryBackend(secrets.token_hex(8)), last=1)

    @pytest.fixture
    def side_door(self, backend):
        return PrimarySideDoor(backend)


class PrimarySideDoor(MemorySideDoor):
    """What is acknowledged is in the replica, which is memory, or still on its way there."""

    def __init__(self, backend):
        super().__init__(backend.inner)
        self._primary = backend

    def read(self, state, key):
        waiting = self._primary.open(state)._waiting
        on_its_way = [write.records[key] for write in waiting if key in write.records]
        return on_its_way[-1] if on_its_way else super().read(state, key)

    def write(self, state, key, record):
        self._primary.open(state).multi_put([key], [record])
