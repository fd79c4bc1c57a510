"""The contract of a store, on SQLite."""

from __future__ import annotations

import pytest
from side_doors import SqliteSideDoor

from mapstate.backends.sqlite import SqliteBackend
from mapstate.testing.contracts import StoreContract


class TestSqlite(StoreContract):
    without = {"ttl": "SQLite has no expiry"}
    max_value_bytes = 2_000_000

    @pytest.fixture
    def backend(self, tmp_path):
        return SqliteBackend(str(tmp_path / "contract.db"), max_value_bytes=self.max_value_bytes)

    @pytest.fixture
    def side_door(self, backend):
        return SqliteSideDoor(backend.path)

    @pytest.fixture
    def unreachable(self, tmp_path):
        return SqliteBackend(str(tmp_path))  # a directory
