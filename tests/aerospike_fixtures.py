"""Where the Aerospike tests run: on the stand-in in any case, and on a real server where there is one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import aerospike
import pytest
from aerospike_stand_in import NAMESPACE, Cluster, StandInBackend
from servers import docker_answers

from mapstate.backends.aerospike import AerospikeBackend
from mapstate.backends.aerospike_store import CLAIMS
from mapstate.testing.containers import aerospike_container

SERVER_NAMESPACE = os.environ.get("MAPSTATE_TEST_AEROSPIKE_NAMESPACE", "test")


class Place:
    """A cluster and a set that no other test has. ``cluster`` is the stand-in's own side, None for a real one."""

    def __init__(self, url: str, cluster: Cluster | None) -> None:
        self.cluster = cluster
        self._url, _, self._query = url.partition("?")
        self.namespace = self._url.rpartition("/")[2]
        self.set = f"test-{secrets.token_hex(6)}"
        self.client = self.backend().client()

    def backend(self, **parameters: Any) -> AerospikeBackend:
        """The backend of this place's own set, or of another with ``set``; the rest are parameters of the URL."""
        name = parameters.pop("set", self.set)
        query = "&".join([self._query, *(f"{key}={value}" for key, value in parameters.items())]).strip("&")
        kind = AerospikeBackend if self.cluster is None else StandInBackend
        return kind.from_url(f"{self._url}/{name}?{query}")

    def place(self, key: Any) -> tuple[str, str, Any]:
        """The client's key of a record."""
        return self.namespace, self.set, key

    def bins(self, key: Any) -> Any:
        """What is stored, past the store."""
        return self.client.get(self.place(key))[2]

    def ttl(self, key: Any) -> int:
        """The seconds that a record has left."""
        return self.client.get(self.place(key))[1]["ttl"]

    def clean(self) -> None:
        """Removes what the test has left."""
        if self.cluster is None:
            self.client.truncate(self.namespace, self.set, 0)
            self.client.truncate(self.namespace, CLAIMS, 0)


@pytest.fixture(scope="session")
def aerospike_url() -> Iterator[str]:
    """A real server: that of MAPSTATE_TEST_AEROSPIKE_HOSTS, which then has to work, or one in Docker."""
    hosts = os.environ.get("MAPSTATE_TEST_AEROSPIKE_HOSTS")
    if hosts:
        url = f"aerospike://{hosts}/{SERVER_NAMESPACE}"
        try:
            AerospikeBackend.from_url(url).connect().close()
        except aerospike.exception.AerospikeError as error:
            pytest.fail(f"MAPSTATE_TEST_AEROSPIKE_HOSTS names no Aerospike that answers: {error!r}", pytrace=False)
        yield url
    elif docker_answers():
        with aerospike_container() as url:
            yield url
    else:
        pytest.skip(
            "no Aerospike server: no MAPSTATE_TEST_AEROSPIKE_HOSTS, no Docker. The stand-in has run these tests."
        )


@pytest.fixture(params=["stand-in", pytest.param("server", marks=pytest.mark.aerospike)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each test runs on both."""
    if request.param == "stand-in":
        yield request.getfixturevalue("stand_in")
        return
    one = Place(request.getfixturevalue("aerospike_url"), None)
    yield one
    one.clean()


@pytest.fixture
def stand_in() -> Iterator[Place]:
    """For what a real server cannot be made to do."""
    cluster = Cluster()
    yield Place(f"aerospike://127.0.0.1:{cluster.port}/{NAMESPACE}", cluster)
    cluster.close()
