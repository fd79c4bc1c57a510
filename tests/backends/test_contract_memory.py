"""The contract of a store, on memory."""

from __future__ import annotations

import secrets

import pytest
from side_doors import MemorySideDoor

from mapstate.backends.memory import MemoryBackend
from mapstate.testing.contracts import StoreContract


class TestMemory(StoreContract):
    without = {
        "ledger_reads": "a reader's three reads are no round trips here",
        "ttl": "it keeps no time",
        "snapshots": "its records are replaced in their place",
        "shared_between_processes": "it lives in one process",
        "outages": "it lives in the process that asks",
        "max_value_bytes": "a record is an object of Python's, of any size",
    }

    @pytest.fixture
    def backend(self):
        return MemoryBackend(secrets.token_hex(8))

    @pytest.fixture
    def side_door(self, backend):
        return MemorySideDoor(backend)
