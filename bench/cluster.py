"""A cluster of three on this machine beside a single server: keys per second of the same batches.

A task is called in this process with Arrow batches, for a state on each. All servers share the machine's cores with
the task, so a cluster cannot be faster here: what shows is what spreading a chunk over nodes and buckets costs.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

from counted_state import CountedState, arrow_batches, processor_lines, processor_time
from redis_groups import RedisCluster
from servers import RedisServer


def ask(keys: int = 100_000, turns: int = 9) -> Answer:
    users = [f"user-{at}" for at in range(keys)]
    batches = arrow_batches(users)
    with RedisServer().start() as server, RedisCluster() as nodes:
        states = {"single": CountedState(server.url), "cluster of three": CountedState(nodes.url)}
        seconds = by_turns(
            {name: lambda state=state: state.apply(batches) for name, state in states.items()}, turns, warm_up=2
        )
        clients = [node.client() for node in nodes.masters]
        processor = processor_time(states["cluster of three"], batches, keys, clients)
        for client in clients:
            client.close()
        for state in states.values():
            state.check(users, state.batches)
    return Answer(
        [
            Row(
                "Redis Cluster of three on this machine, keys per second",
                "single Redis",
                ratios(seconds["single"], seconds["cluster of three"]),
                Goal("least", 0.7),
            )
        ],
        f"{keys:,} keys a batch, 64 buckets, chunks of 2,000 keys and of 10,000 in the cluster: each store's default; "
        f"{turns} turns after 2 to warm up",
        table(
            "state on | microseconds a key",
            [
                *((name, spread(own, 1e6 / keys)) for name, own in seconds.items()),
                *processor_lines("cluster", processor),
            ],
        ),
        {f"cluster.{name}": own for name, own in processor.items()},
    )
