"""The store held to the contract of mapstate."""

import lmdb
import pytest
from lmdb_store import MAX_KEY_BYTES, LmdbBackend

from mapstate.testing.contracts import StoreContract


class LmdbSideDoor:
    def __init__(self, path):
        self._path = path

    def read(self, state, key):
        with lmdb.open(self._path, subdir=False) as file, file.begin() as transaction:
            return transaction.get(f"r{state}\0{key}".encode())

    def write(self, state, key, record):
        with lmdb.open(self._path, subdir=False) as file, file.begin(write=True) as transaction:
            transaction.put(f"r{state}\0{key}".encode(), record)


class TestLmdb(StoreContract):
    max_key_bytes = MAX_KEY_BYTES
    without = {
        "ttl": "LMDB has no expiry",
        "joint_ledgers": "a state is committed alone",
        "drops": "delete the file",
        "reports": "it keeps none",
        "states": "the file is not asked for its states",
        "snapshots": "it opens none",
    }

    @pytest.fixture
    def backend(self, tmp_path):
        return LmdbBackend(str(tmp_path / "visits.lmdb"))

    @pytest.fixture
    def side_door(self, backend):
        return LmdbSideDoor(backend.path)

    @pytest.fixture
    def unreachable(self, tmp_path):
        return LmdbBackend(str(tmp_path / "no such directory" / "visits.lmdb"))
