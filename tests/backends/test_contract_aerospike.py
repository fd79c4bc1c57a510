"""The contract of a store, on Aerospike: on the stand-in always, and on a real server where there is one."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace

import pytest
from aerospike_fixtures import SERVER_NAMESPACE
from aerospike_stand_in import NAMESPACE, Cluster, StandInBackend
from servers import free_port
from side_doors import AerospikeSideDoor

from mapstate.backends.aerospike import AerospikeBackend
from mapstate.testing.contracts import StoreContract


class AerospikeContract(StoreContract):
    """What records look like there: ``[curr, prev, txid]``."""

    __test__ = False
    without = {
        "fenced_writes": "no write is atomic over two records: each refuses an older txid by itself",
        "joint_ledgers": "no write is atomic over two records",
        "ledger_reads": "a batch is read in no order",
        "snapshots": "no request reads a whole state at one moment",
        "max_value_bytes": "the server finds what is too large, record by record",
    }
    serializer = "native"
    writes_through = "filtered_writer"
    secret = "hunter2"
    shortest_ttl = 3.0  # a server counts whole seconds, so a record lives up to one less

    def a_record(self, number, txid=0):
        return [number, None, txid]

    def odd_record(self, what):
        record = super().odd_record(what)
        value = {"the word null": "null", "a zero": 0, "a number": 12, "line breaks": "\r\n$-1\r\n"}.get(what, record)
        return [value, record, 0]

    def big_record(self, size):
        return [super().big_record(size), None, 0]

    def values_of(self, type_name):
        """Text without NUL: what has one is refused."""
        values = super().values_of(type_name)
        return [one for one in values if "\0" not in one] if type_name == "string" else values

    @pytest.fixture
    def unreachable(self):
        hosts = (("127.0.0.1", free_port()),)
        return AerospikeBackend(hosts, "test", username="user", password=self.secret, retries=0)


class TestAerospikeStandIn(AerospikeContract):
    __test__ = True

    @pytest.fixture
    def backend(self):
        cluster = Cluster(ticks=True)
        yield StandInBackend((("127.0.0.1", cluster.port),), NAMESPACE)
        cluster.close()

    @pytest.fixture
    def side_door(self, backend):
        return AerospikeSideDoor(backend.client(), NAMESPACE)


@dataclass(frozen=True, repr=False)
class SetsOfItsOwn(AerospikeBackend):
    """Each state in a set that no other test has: tests share the server."""

    def set_of(self, state):
        return f"{self.set}.{state}"

    def states(self):
        for page in AerospikeBackend.states(replace(self, set=None)):  # its own would call itself
            yield [(name[len(self.set) + 1 :], ledger) for name, ledger in page if name.startswith(f"{self.set}.")]


@pytest.mark.aerospike
class TestAerospike(AerospikeContract):
    __test__ = True

    @pytest.fixture
    def backend(self, aerospike_url):
        backend = replace(SetsOfItsOwn.from_url(aerospike_url), set=f"test-{secrets.token_hex(6)}")
        yield backend
        client = backend.client()
        for name in re.findall(rf"set=({backend.set}[^:;]*)", client.info_random_node(f"sets/{SERVER_NAMESPACE}")):
            client.truncate(SERVER_NAMESPACE, name, 0)

    @pytest.fixture
    def side_door(self, backend):
        return AerospikeSideDoor(backend.client(), backend.namespace, f"{backend.set}.")
