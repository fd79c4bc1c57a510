"""The contract of a store, on memory."""

from __future__ import annotations

import secrets

import pytest
from side_doors import MemorySideDoor

from mapstate.backends import resolve
from mapstate.backends.memory import MemoryBackend
from mapstate.errors import ConfigurationError
from mapstate.testing.contracts import StoreContract


@pytest.mark.parametrize("rest", ["a/b", "a/", "/", "a?x=1", "a?", "a#b", "a:1", "user@a", "user:hunter2@a"])
def test_what_a_url_has_beside_a_name_is_refused_and_not_left_out(rest):
    with pytest.raises(ConfigurationError, match="no login, port, path or parameter") as caught:
        resolve(f"memory://{rest}")
    assert "hunter2" not in str(caught.value)


def test_a_url_is_of_the_backend_with_its_name():
    assert resolve("memory://a%20b") == resolve("MEMORY://a%20b") == MemoryBackend("a%20b")
    assert resolve("memory://") == MemoryBackend()


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
