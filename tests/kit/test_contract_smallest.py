"""The contract on a store that has get and put and nothing else: two methods are a store."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import pytest

from mapstate.backing_map import check_lengths
from mapstate.errors import ConfigurationError
from mapstate.testing.contracts import StoreContract

_records: dict[tuple[str, str], dict[str, bytes]] = {}


@dataclass(frozen=True)
class SmallestBackend:
    name: str

    shared_between_processes = False

    def open(self, state, *, ttl=None):
        if ttl is not None:
            raise ConfigurationError("a dict has no ttl")
        return SmallestStore(_records.setdefault((self.name, state), {}))


class SmallestStore:
    def __init__(self, records):
        self._records = records

    def multi_get(self, keys):
        return [self._records.get(key) for key in keys]

    def multi_put(self, keys, values):
        check_lengths(keys, values, "values")
        self._records.update(zip(keys, values, strict=True))


class SideDoor:
    def __init__(self, backend):
        self._name = backend.name

    def read(self, state, key):
        return _records.get((self._name, state), {}).get(key)

    def write(self, state, key, record):
        _records[self._name, state][key] = record


class TestSmallest(StoreContract):
    without = {
        "conditional_writes": "it has get and put only",
        "claims": "it has get and put only",
        "guarded_writes": "it has get and put only",
        "joint_ledgers": "it has get and put only",
        "drops": "it has get and put only",
        "ledger_reads": "it has get and put only",
        "reports": "it has get and put only",
        "scan": "it has get and put only",
        "states": "it has get and put only",
        "snapshots": "it has get and put only",
        "ttl": "a dict keeps no time",
        "shared_between_processes": "a dict lives in one process",
        "outages": "a dict is always there",
    }

    @pytest.fixture
    def backend(self):
        return SmallestBackend(secrets.token_hex(8))

    @pytest.fixture
    def side_door(self, backend):
        return SideDoor(backend)
