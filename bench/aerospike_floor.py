"""Opaque on Aerospike beside raw `batch_read` and `batch_write` of equal records, chunks of the same size.

It needs a server: MAPSTATE_TEST_AEROSPIKE_HOSTS=host:3000, and MAPSTATE_TEST_AEROSPIKE_NAMESPACE if that is not "test".
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import os
import secrets
import time
from collections.abc import Callable

from counted_state import CountedState, arrow_batches, chunks

CHUNK = 500
_WHAT, _AGAINST = "opaque on Aerospike without Spark, one process", "floor: raw batch_read + batch_write"
_PROCESSOR = "the same, the client's processor time"


def ask(keys: int = 50_000, turns: int = 9) -> Answer:
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
    client.close()
    return Answer(
        [
            Row(_WHAT, _AGAINST, ratios(seconds["mapstate"], seconds["floor"]), Goal("most", 1.15)),
            Row(_PROCESSOR, _AGAINST, ratios(processor["mapstate"], processor["floor"])),
        ],
        f"{keys:,} keys a batch, chunks of {CHUNK}, {turns} turns after 2 to warm up",
        table(
            "way | microseconds a key | of the client's processor",
            [(way, spread(seconds[way], 1e6 / keys), spread(processor[way], 1e6 / keys)) for way in seconds],
        ),
    )
