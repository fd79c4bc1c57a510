"""TLS to a cluster and to sentinels, which send a client on to addresses of their own.

The redis-server of these tests may have no TLS, so that ends in front of each server, and the servers name the fronts.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme
from driven_reader import WAYS
from one_ledger import OneLedger
from redis_groups import SLOTS, RedisCluster, SentinelPair
from servers import EitherFront, GivenRedis, TlsFront, wait_until
from test_redis_shapes import KEYS, OPENING, commit, count

from mapstate.backends import resolve
from mapstate.errors import StoreUnavailableError

pytestmark = pytest.mark.redis


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Puts a front before a server; ``ca.pem`` in tmp_path vouches for it, ``other.pem`` for nobody here."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with ExitStack() as stack:
        yield lambda server, kind=TlsFront: stack.enter_context(kind(server.url, context))


def two_batches(url: str, between: Callable[[], object]) -> None:
    store: Any = resolve(url).open("visits")
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    count(store, ledger, attempt, KEYS)
    commit(ledger, attempt)
    between()
    attempt = ledger.begin(1)
    count(store, ledger, attempt, KEYS)
    commit(ledger, attempt)
    for way in WAYS.values():
        with way["open_reader"](url, "visits") as reader:
            assert reader.multi_get(KEYS) == [{"n": 2}] * len(KEYS)
            assert len(dict(reader.scan())) == len(KEYS)


# A cluster


@pytest.fixture
def secured_cluster(
    start_cluster: Callable[..., RedisCluster], front: Callable[..., Any]
) -> tuple[Any, list[TlsFront]]:
    """A cluster whose nodes name their fronts."""
    fronts = [front(GivenRedis("redis://127.0.0.1:1")) for _ in range(3)]
    cluster = start_cluster(announced=[one.port for one in fronts])
    for node, own in zip(cluster.masters, fronts, strict=True):
        own.point_to(node.url)
    return cluster, fronts


def test_a_cluster_is_reached_by_tls_and_so_is_each_node_that_it_names(secured_cluster, tmp_path):
    cluster, fronts = secured_cluster
    url = f"rediss+cluster://127.0.0.1:{fronts[0].port}?ssl_ca_certs={tmp_path / 'ca.pem'}"
    slot = resolve(url).open("visits")._groups[0].slot
    at = slot * 3 // SLOTS
    two_batches(url, lambda: cluster.move_slot(slot, cluster.masters[at], cluster.masters[(at + 1) % 3]))  # MOVED, too
    assert all(one.accepted for one in fronts)


def test_a_certificate_is_looked_at_for_each_node_of_a_cluster(secured_cluster, tmp_path):
    _, fronts = secured_cluster
    url = f"rediss+cluster://127.0.0.1:{fronts[0].port}?retries=0&ssl_ca_certs={tmp_path}"
    with pytest.raises(StoreUnavailableError, match=r"(?i)certificate verify failed"):
        resolve(f"{url}/other.pem").open("visits").multi_get(KEYS)
    fronts[1]._context = _self_made()
    with pytest.raises(StoreUnavailableError, match=r"(?i)certificate verify failed"):
        resolve(f"{url}/ca.pem").open("visits").multi_get(KEYS)


def _self_made() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    return context


# Sentinels


@pytest.fixture
def secured_pair(
    start_sentinels: Callable[..., SentinelPair], front: Callable[..., Any]
) -> tuple[SentinelPair, TlsFront, list[EitherFront]]:
    """One sentinel behind a front, that knows primary and replica by theirs; it has no TLS itself."""
    pair = start_sentinels(sentinels=1)
    fronts = [front(one, EitherFront) for one in (pair.primary, pair.replica)]
    with pair.replica.client() as replica:
        replica.config_set("replica-announce-port", fronts[1].port)
        replica.replicaof("NO", "ONE")  # what it announces is said when it connects
        replica.replicaof("127.0.0.1", str(pair.primary.port))
    with pair.sentinels[0].client() as sentinel:
        sentinel.execute_command("SENTINEL", "REMOVE", "mymaster")
        sentinel.execute_command("SENTINEL", "MONITOR", "mymaster", "127.0.0.1", fronts[0].port, 1)
        for name, value in (("down-after-milliseconds", 60_000), ("failover-timeout", 1500)):
            sentinel.execute_command("SENTINEL", "SET", "mymaster", name, value)
        wait_until(
            lambda: {int(one["port"]) for one in sentinel.sentinel_slaves("mymaster")} == {fronts[1].port},
            "the sentinel knows the replica's front",
        )
    return pair, front(pair.sentinels[0]), fronts


def test_sentinels_are_asked_by_tls_and_so_is_each_primary_that_they_name(secured_pair, tmp_path):
    pair, asked, fronts = secured_pair
    url = f"rediss+sentinel://127.0.0.1:{asked.port}/mymaster/0?ssl_ca_certs={tmp_path / 'ca.pem'}"

    def fail_over() -> None:
        assert fronts[0].secured
        assert not fronts[1].secured
        with pair.primary.client() as client:
            assert client.wait(1, 10_000) == 1
        with pair.sentinels[0].client() as sentinel:
            sentinel.execute_command("SENTINEL", "SET", "mymaster", "down-after-milliseconds", 300)
            pair.primary.kill()
            wait_until(
                lambda: int(sentinel.sentinel_get_master_addr_by_name("mymaster")[1]) == fronts[1].port,
                "a failover",
                120,
            )

    two_batches(url, fail_over)
    assert fronts[1].secured


def test_a_certificate_is_looked_at_for_sentinels_and_primary(secured_pair, tmp_path):
    _, asked, fronts = secured_pair
    url = f"rediss+sentinel://127.0.0.1:{asked.port}/mymaster/0?retries=0&ssl_ca_certs={tmp_path}"
    with pytest.raises(StoreUnavailableError):
        resolve(f"{url}/other.pem").open("visits").multi_get(KEYS)
    assert not fronts[0].secured
    fronts[0]._context = _self_made()
    with pytest.raises(StoreUnavailableError, match=r"(?i)certificate verify failed"):
        resolve(f"{url}/ca.pem").open("visits").multi_get(KEYS)
