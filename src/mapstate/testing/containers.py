"""Real servers in Docker, for tests of a job: one context manager each, which yields the URL of a store.

    with redis_container() as url:
        newStream("visits", df).groupBy("user_id").persistentAggregate(opaque(url), visits=Count())

    redis_container       Redis
    valkey_container      Valkey
    aerospike_container   Aerospike, with a namespace in memory in which records may have a ttl

Each stops its server, however the test ends. Where the test's process is killed, testcontainers' own reaper does it.
Needs ``mapstate[testing]``, the store's own extra, and a Docker that this user may use. docs/testing-your-job.md
shows fixtures made of these.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from mapstate.errors import ConfigurationError, StoreUnavailableError, missing_driver

# One stanza and one setting a line: the server reads it so.
_AEROSPIKE_CONF = """
service {
    cluster-name mapstate
}
logging {
    console {
        context any info
    }
}
network {
    service {
        address any
        port PORT
        alternate-access-address 127.0.0.1
    }
    heartbeat {
        mode mesh
        address local
        port 3902
        interval 150
        timeout 10
    }
    fabric {
        address local
        port 3901
    }
}
namespace test {
    replication-factor 1
    default-ttl 0
    nsup-period 1
    storage-engine memory {
        data-size 512M
    }
}
"""
_AEROSPIKE_CONF_PATH = "/etc/aerospike/mapstate.conf"


def redis_container(image: str = "", *, seconds: float = 60.0) -> contextlib.AbstractContextManager[str]:
    """Start a Redis for this test, and yield its URL, ``redis://host:port/0``.

    ``image`` is by default that of MAPSTATE_REDIS_IMAGE, else Redis 7.4. Raises ConfigurationError where there is no
    Docker, and StoreUnavailableError where the server does not answer within ``seconds``.
    """
    return _redis_like(image or os.environ.get("MAPSTATE_REDIS_IMAGE", "redis:7.4"), "redis-server", seconds)


def valkey_container(image: str = "", *, seconds: float = 60.0) -> contextlib.AbstractContextManager[str]:
    """Like `redis_container`, with a Valkey: MAPSTATE_VALKEY_IMAGE, else Valkey 8.1. Its URL is ``redis://``, too."""
    return _redis_like(image or os.environ.get("MAPSTATE_VALKEY_IMAGE", "valkey/valkey:8.1"), "valkey-server", seconds)


@contextlib.contextmanager
def aerospike_container(image: str = "", *, seconds: float = 120.0) -> Iterator[str]:
    """Start an Aerospike, and yield ``aerospike://host:port/test?use_services_alternate=true``.

    MAPSTATE_AEROSPIKE_IMAGE, else server 8.1. It is ready when a client connects; its log says so earlier.
    Raises as `redis_container`.
    """
    image = image or os.environ.get("MAPSTATE_AEROSPIKE_IMAGE", "aerospike/aerospike-server:8.1.0.0")
    try:
        aerospike: Any = import_module("aerospike")
    except ModuleNotFoundError as error:
        raise missing_driver("aerospike_container", error, extra="aerospike") from error
    container = _container(image)
    # Clients go where the server says that it is, so the port is the same inside and outside.
    port = _free_port()
    conf = _AEROSPIKE_CONF.replace("PORT", str(port)).encode()
    container.ports[f"{port}/tcp"] = ("127.0.0.1", port)  # with_bind_ports takes no address
    container = container.with_copy_into_container(conf, _AEROSPIKE_CONF_PATH)
    container = container.with_command(["--config-file", _AEROSPIKE_CONF_PATH])
    config = {"hosts": [("127.0.0.1", port)], "use_services_alternate": True}

    def connects() -> bool:
        try:
            aerospike.client(config).connect().close()
        except aerospike.exception.AerospikeError:
            return False
        return True

    with _started(container, connects, seconds):
        yield f"aerospike://127.0.0.1:{port}/test?use_services_alternate=true"


@contextlib.contextmanager
def _redis_like(image: str, server: str, seconds: float) -> Iterator[str]:
    container = _container(image).with_command([server, "--save", "", "--maxmemory-policy", "noeviction"])
    container = container.with_exposed_ports(6379)

    def address() -> tuple[str, int]:
        return container.get_container_host_ip(), int(container.get_exposed_port(6379))

    def answers() -> bool:
        try:
            with socket.create_connection(address(), timeout=2) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(5) == b"+PONG"
        except OSError:
            return False

    with _started(container, answers, seconds):
        host, port = address()
        yield f"redis://{host}:{port}/0"


def _container(image: str) -> Any:
    """A container, not started yet. Raises MissingDriverError, and ConfigurationError where no Docker answers."""
    try:
        docker: Any = import_module("docker")
        container: Any = import_module("testcontainers.core.container")
    except ModuleNotFoundError as error:
        raise missing_driver("a container", error, extra="testing") from error
    problem = _no_docker(docker)
    if problem is not None:
        raise ConfigurationError(
            f"no Docker answers here, so {image} cannot be started: start it and let this user use it (docker info), "
            f"set DOCKER_HOST, or give the test the URL of a server that runs. It said: {problem}",
            image=image,
        )
    return container.DockerContainer(image)


def _no_docker(docker: Any) -> str | None:
    """The reason why no Docker answers, None where one does."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if host.startswith("unix://"):  # first, because docker-py leaves a socket open where nobody listens
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(5)
            try:
                probe.connect(host.removeprefix("unix://"))
            except OSError as error:
                return f"{host}: {error}"
    try:
        client = docker.from_env(timeout=10)
        try:
            client.ping()
        finally:
            client.close()
    except (docker.errors.DockerException, OSError) as error:
        return str(error)
    return None


@contextlib.contextmanager
def _started(container: Any, ready: Callable[[], bool], seconds: float) -> Iterator[None]:
    """Run a container. Raises StoreUnavailableError, with the end of its log, where it does not become ready."""
    try:
        container.start()
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end:
                said = b"".join(container.get_logs()).decode(errors="replace")[-1000:]
                raise StoreUnavailableError(
                    f"the server of {container.image} does not answer within {seconds:g} s; its log ends: {said}",
                    image=container.image,
                )
            time.sleep(0.1)
        yield
    finally:
        container.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
