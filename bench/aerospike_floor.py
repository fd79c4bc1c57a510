"""Opaque on Aerospike beside raw `batch_read` and `batch_write` of equal records, and blocks beside a record per key.

The first is one process without Spark, with chunks of the same size; the second as `blocks` has it on Redis, with the
processor time of a server on this machine, if it can be seen.
It needs a server: MAPSTATE_TEST_AEROSPIKE_HOSTS=host:3000, and MAPSTATE_TEST_AEROSPIKE_NAMESPACE if that is not "test".
"""

from __future__ import annotations

from blocks import BLOCKS, STRING, Measured, Shape, Spent, Store, compared  # isort: skip  # finds the servers

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
from counted_state import CountedState, arrow_batches, chunks
from measuring import Answer, Goal, Row, by_turns, ratios, spread, table
from turns import session

CHUNK = 500
_WHAT, _AGAINST = "opaque on Aerospike without Spark, one process", "floor: raw batch_read + batch_write"
_PROCESSOR = "the same, the client's processor time"


def ask(keys: int = 50_000, turns: int = 9, of_blocks: int = 200_000) -> Answer:
    hosts = os.environ.get("MAPSTATE_TEST_AEROSPIKE_HOSTS")
    if not hosts:
        row = Row(_WHAT, _AGAINST, [], Goal("most", 1.15), "no server: MAPSTATE_TEST_AEROSPIKE_HOSTS is not set")
        return Answer([row], "Not asked")
    import aerospike
    from aerospike_helpers.batch import records as batch
    from aerospike_helpers.operations import operations

    namespace = os.environ.get("MAPSTATE_TEST_AEROSPIKE_NAMESPACE", "test")
    name = f"bench-{secrets.token_hex(4)}"
    users = [f"user-{at}" for at in range(keys)]
    batches = arrow_batches(users)
    state = CountedState(f"aerospike://{hosts}/{namespace}/{name}", chunk_size=CHUNK)
    host, _, port = hosts.split(",")[0].partition(":")
    client = aerospike.client({"hosts": [(host, int(port or 3000))]}).connect()
    record = [3, 2, 280_000_009]

    def floor() -> None:
        for some in chunks(users, CHUNK):
            places = [(namespace, f"{name}-raw", user) for user in some]
            client.batch_read(places)
            writes = [batch.Write(place, [operations.write("v", record)]) for place in places]
            client.batch_write(batch.BatchRecords(writes))

    processor: dict[str, list[float]] = {"mapstate": [], "floor": []}

    def counted(name: str, work: Callable[[], object]) -> Callable[[], object]:
        """Do the same work, and add its processor time to ``processor``."""

        def run() -> object:
            before = time.process_time()
            own = work()
            processor[name].append(time.process_time() - before)
            return own

        return run

    ways = {"mapstate": counted("mapstate", lambda: state.apply(batches)), "floor": counted("floor", floor)}
    seconds = by_turns(ways, turns, warm_up=2)
    processor = {name: own[2:] for name, own in processor.items()}
    state.check(users, state.batches)
    for own in (name, f"{name}-raw"):
        client.truncate(namespace, own, 0)
    rows, lines = blocks(Cluster(client, f"aerospike://{hosts}/{namespace}", namespace), of_blocks, turns)
    client.close()
    of_one = table(
        "way | microseconds a key | of the client's processor",
        [(way, spread(seconds[way], 1e6 / keys), spread(processor[way], 1e6 / keys)) for way in seconds],
    )
    return Answer(
        [
            Row(_WHAT, _AGAINST, ratios(seconds["mapstate"], seconds["floor"]), Goal("most", 1.15)),
            Row(_PROCESSOR, _AGAINST, ratios(processor["mapstate"], processor["floor"])),
            *rows,
        ],
        f"{keys:,} keys a batch, chunks of {CHUNK}, {turns} turns after 2 to warm up; then as `blocks`, beside it",
        f"{of_one}\n\n{lines}",
    )


class Cluster(NamedTuple):
    """A client of the cluster, and where the states are."""

    client: Any
    url: str
    namespace: str

    def info(self, command: str) -> list[str]:
        """What each node says."""
        return [text.strip() for _, text in self.client.info_all(f"{command}/{self.namespace}").values()]


def blocks(cluster: Cluster, keys: int, turns: int) -> tuple[list[Row], str]:
    """Compare blocks with a record per key, where batches touch all keys, and one in ten."""
    spark, rows, lines = session(), [], []
    on_aerospike(spark, cluster, Shape(5_000, 1), 3)  # else Java compiles the first plans meanwhile
    for shape in (Shape(keys, 1), Shape(keys, 10)):
        measured = on_aerospike(spark, cluster, shape, turns)
        of_string = ratios(measured.seconds[BLOCKS], measured.seconds[STRING])
        rows.append(Row(f"blocks on Aerospike, {shape.name}", "a record per key", of_string))
        ways = [spread(measured.seconds[way], 1000) for way in (STRING, BLOCKS)]
        servers = [measured.server[way] for way in (STRING, BLOCKS)]
        processors = [spread(server.seconds, 1e6 / shape.touched) for server in servers]
        sizes = [f"{server.bytes_of_key:.1f}" for server in servers]
        lines.append((shape.name, *ways, spread(of_string), *processors, *sizes))
        print(*lines[-1], sep=" | ", flush=True)
        for way, seconds in measured.reads.get(BLOCKS, {}).items():
            both = [measured.reads[STRING][way], seconds]
            reads = (spread(own, 1000) for own in both)
            lines.append((way, *reads, spread(ratios(both[1], both[0])), "", "", "", ""))
    spark.stop()
    return rows, table(
        "a batch touches | milliseconds, a record per key | blocks | of a record per key "
        "| microseconds of the server's processor a key | with blocks | bytes of a key | with blocks",
        lines,
    )


def on_aerospike(spark: Any, cluster: Cluster, shape: Shape, turns: int) -> Measured:
    """Compare in sets of its own, which are emptied at the end."""
    suffix, port = f"-{secrets.token_hex(4)}", cluster.client.get_nodes()[0][1]
    server = [own for own in psutil.process_iter(["name"]) if own.info["name"] == "asd" and port in listening(own)]

    def spent() -> Spent:
        facts = [dict(fact.split("=", 1) for fact in text.split(";")) for text in cluster.info("namespace")]
        memory = sum(int(of[name]) for of in facts for name in ("index_used_bytes", "data_used_bytes"))
        times = [own.cpu_times() for own in server]
        return Spent(sum(own.user + own.system for own in times), 0.0, memory)

    measured = compared(spark, shape, turns, Store(cluster.url, spent, suffix))
    for text in cluster.info("sets"):
        for line in text.split(";"):
            name = dict(fact.split("=", 1) for fact in line.split(":")).get("set", "") if line else ""
            if name.endswith(suffix):
                cluster.client.truncate(cluster.namespace, name, 0)
    return measured


def listening(process: psutil.Process) -> set[int]:
    """The ports on which a process of this machine listens; none where that cannot be seen."""
    with suppress(psutil.Error):
        return {own.laddr.port for own in process.net_connections() if own.status == psutil.CONN_LISTEN}
    return set()
