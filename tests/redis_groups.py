"""Several Redis servers that belong together: a cluster, and a primary with its replica and sentinels.

Processes of the redis-server that servers.py finds; nothing here knows pytest.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self
from urllib.parse import urlsplit

import redis
from redis.exceptions import RedisError
from servers import GivenRedis, RedisServer, wait_until

from mapstate.backends.redis import RedisClusterBackend

SLOTS = 16384


class ClusterNode(RedisServer):
    """A server in cluster mode, whose bus has the port 10,000 above its own."""

    def __init__(self) -> None:
        super().__init__(as_process=True)

    def _free_port(self) -> int:
        while True:
            port = random.randrange(20_000, 30_000)  # below those that the kernel gives out
            with (
                suppress(OSError),
                socket.create_server(("127.0.0.1", port)),
                socket.create_server(("127.0.0.1", port + 10_000)),
            ):
                return port


class RedisCluster:
    """Masters that share the slots evenly, each with as many replicas. A context manager.

    ``announced``  the ports that they give out instead of their own, masters first
    """

    def __init__(self, masters: int = 3, replicas: int = 0, announced: Sequence[int] = (), **config: str) -> None:
        self._stack = ExitStack()
        settings = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": "1500",
            "cluster_replica_validity_factor": "0",
            "repl_diskless_sync": "yes",
            "repl_diskless_sync_delay": "0",
        } | config
        try:
            own = [{"cluster_announce_port": str(port)} for port in announced] or [{}] * masters * (1 + replicas)
            nodes = [self._stack.enter_context(ClusterNode().start(**settings, **one)) for one in own]
            self.masters, self.replicas = nodes[:masters], nodes[masters:]
            self._join(nodes)
        except BaseException:
            self._stack.close()
            raise

    @property
    def url(self) -> str:
        """Names all masters."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.masters)

    def client(self, **options: Any) -> redis.RedisCluster:
        """A plain redis-py client: the side door, past mapstate."""
        return redis.RedisCluster(host="127.0.0.1", port=self.masters[0].port, **options)

    def move_slot(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """Gives a slot with all its keys to another master, as redis-cli does it."""
        self.begin_move(slot, source, target)
        self.end_move(slot, source, target)

    def begin_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """The slot is on the move; no key has gone yet."""
        with source.client() as old, target.client() as new:
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old.cluster("MYID").decode())
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new.cluster("MYID").decode())

    def move_keys(self, slot: int, source: RedisServer, target: RedisServer, keys: list[bytes] | None = None) -> int:
        """Takes these keys of the slot over, or a thousand of them; returns how many."""
        with source.client() as old:
            keys = old.cluster("GETKEYSINSLOT", slot, 1000) if keys is None else keys
            if keys:
                old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        return len(keys)

    def end_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """The other keys go, and the slot is the target's; all masters are told."""
        while self.move_keys(slot, source, target):
            pass
        with target.client() as new:
            owner = new.cluster("MYID").decode()
        for node in (target, source, *self.masters):
            with node.client() as client:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", owner)

    def fail_over(self, at: int) -> None:
        """Kills a master, and waits until its replica has its slots."""
        self.masters[at].kill()
        replica = self.replicas[at]
        wait_until(lambda: _role(replica) == "master", "the replica is promoted")
        others = [node for place, node in enumerate(self.masters) if place != at]
        wait_until(lambda: all(_is_whole(node) for node in (replica, *others)), "the cluster is whole again")

    def stop(self) -> None:
        """Ends all servers. Stopping twice is no error."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _join(self, nodes: list[RedisServer]) -> None:
        share = -(-SLOTS // len(self.masters))
        for at, node in enumerate(self.masters):
            with node.client() as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", at + 1)
                client.execute_command("CLUSTER ADDSLOTS", *range(at * share, min((at + 1) * share, SLOTS)))
        with self.masters[0].client() as client:
            for other in nodes[1:]:
                client.execute_command("CLUSTER MEET", "127.0.0.1", other.port)
        for node in nodes:
            wait_until(lambda node=node: len(_nodes(node)) == len(nodes), "the nodes know each other")
        for at, node in enumerate(self.replicas):
            with self.masters[at].client() as master, node.client() as client:
                owner = master.cluster("MYID").decode()
                wait_until(
                    lambda client=client, owner=owner: _replicates(client, owner), "the replica knows its master"
                )
        for node in nodes:
            wait_until(lambda node=node: _is_whole(node), "the cluster is up")
        for node in self.replicas:
            with node.client() as client:
                wait_until(
                    lambda: client.info("replication").get("master_link_status") == "up", "the replica is in step"
                )


class GivenCluster(RedisCluster):
    """A cluster that somebody else runs, on this machine. Raises RedisError where it does not answer."""

    def __init__(self, url: str) -> None:
        self._stack = ExitStack()
        self._url = url
        self._backend = RedisClusterBackend.from_url(url)
        with self.client() as client:
            ports = [node.port for node in client.get_primaries()]
        self.masters, self.replicas = [self._server(port) for port in ports], []

    @property
    def url(self) -> str:
        """As it was given."""
        return self._url

    def client(self, **options: Any) -> redis.RedisCluster:
        """See `RedisCluster.client`."""
        host, port = self._backend.nodes[0]
        login = {"username": self._backend.username, "password": self._backend.password}
        return redis.RedisCluster(host=host, port=port, **login, **options)

    def _server(self, port: int) -> Any:
        user, at, _ = urlsplit(self._url).netloc.rpartition("@")
        server = GivenRedis(f"redis://{user}{at}127.0.0.1:{port}/0")
        server.port = port
        return server


class SentinelPair:
    """A primary, its replica, and sentinels that know them as "mymaster". A context manager.

    ``down_after`` in milliseconds: how long a primary is silent before the sentinels take another.
    """

    def __init__(self, sentinels: int = 3, *, down_after: int = 300, **config: str) -> None:
        self._stack = ExitStack()
        settings = {"repl_diskless_sync": "yes", "repl_diskless_sync_delay": "0"} | config
        try:
            self._password = config.get("requirepass")
            if self._password:
                settings["masterauth"] = self._password  # whoever becomes the replica
            self.primary = self._stack.enter_context(RedisServer(as_process=True).start(**settings))
            self.replica = self._stack.enter_context(RedisServer(as_process=True).start(**settings))
            with self.replica.client() as client:
                client.replicaof("127.0.0.1", str(self.primary.port))
            wait_until(self._linked, "the replica is in step")
            watched = [f"monitor mymaster 127.0.0.1 {self.primary.port} {sentinels // 2 + 1}"]
            watched += [f"down-after-milliseconds mymaster {down_after}", "failover-timeout mymaster 1500"]
            if self._password:
                watched.append(f"auth-pass mymaster {self._password}")
            self.sentinels = [self._stack.enter_context(Sentinel(watched).start()) for _ in range(sentinels)]
            wait_until(self._ready, "the sentinels know each other and the replica")
        except BaseException:
            self._stack.close()
            raise

    @property
    def url(self) -> str:
        """Names all sentinels."""
        login = f":{self._password}@" if self._password else ""
        return f"redis+sentinel://{login}" + ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels) + "/mymaster/0"

    def fail_over(self) -> None:
        """Kills the primary, and waits until the sentinels name the replica."""
        self.primary.kill()
        self.wait_for_replica()

    def hand_over(self) -> None:
        """The replica becomes the primary, and the other way round, as an operator does it."""
        with self.sentinels[0].client() as client:
            client.execute_command("SENTINEL FAILOVER", "mymaster")
        self.wait_for_replica()
        wait_until(lambda: _role(self.primary) == "slave", "the old primary gives way")  # a while it takes writes still

    def wait_for_replica(self) -> None:
        """Until all sentinels name the replica as the primary."""
        wait_until(lambda: all(self._named(one) == self.replica.port for one in self.sentinels), "a failover")

    def stop(self) -> None:
        """Ends all servers. Stopping twice is no error."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _linked(self) -> bool:
        with self.replica.client() as client:
            return client.info("replication").get("master_link_status") == "up"

    def _ready(self) -> bool:
        for one in self.sentinels:
            with one.client() as client:
                found = client.sentinel_master("mymaster")
                if found["num-slaves"] < 1 or found["num-other-sentinels"] < len(self.sentinels) - 1:
                    return False
        return True

    def _named(self, sentinel: RedisServer) -> int:
        with sentinel.client() as client:
            return int(client.sentinel_get_master_addr_by_name("mymaster")[1])


class Sentinel(RedisServer):
    """One sentinel, told what to watch. It keeps its configuration in a file, which it rewrites."""

    def __init__(self, watched: list[str]) -> None:
        super().__init__(as_process=True)
        self._run.as_sentinel([f"sentinel {one}" for one in watched])


def _nodes(node: RedisServer) -> list[str]:
    with node.client(decode_responses=True) as client:
        return [line for line in client.execute_command("CLUSTER NODES") if "handshake" not in line]


def _replicates(client: Any, owner: str) -> bool:
    try:
        client.execute_command("CLUSTER REPLICATE", owner)
    except RedisError:
        return False
    return True


def _is_whole(node: RedisServer) -> bool:
    with node.client(decode_responses=True) as client:
        info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_slots_ok"] == str(SLOTS)


def _role(node: RedisServer) -> str | None:
    """None where it hangs up, as a primary does that gives way."""
    with suppress(RedisError), node.client() as client:
        return client.info("replication")["role"]
    return None
