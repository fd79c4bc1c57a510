"""How many keys to read and write at a time: `chunk_size`, on one server and in a cluster of three.

This process calls a task with Arrow batches of 10,000 rows, as Spark sends them: a chunk ends with its batch.
Chunks of 2,000 are the default. Longer ones block Redis for longer, because it runs one command at a time.
"""

from __future__ import annotations

from measuring import Answer, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

from counted_state import CountedState, arrow_batches
from redis_groups import RedisCluster
from servers import RedisServer

SIZES = (500, 1000, 2000, 5000, 10_000)
DEFAULT = 2000


def ask(keys: int = 100_000, turns: int = 9) -> Answer:
    users = [f"user-{at}" for at in range(keys)]
    batches = arrow_batches(users)
    rows, lines = [], []
    with RedisServer().start() as server, RedisCluster() as nodes:
        for where, url in (("one server", server.url), ("a cluster of three, 64 slot groups", nodes.url)):
            states = {size: CountedState(url, f"chunks-of-{size}", chunk_size=size) for size in SIZES}
            seconds = by_turns(
                {f"{size:,}": lambda state=state: state.apply(batches) for size, state in states.items()},
                turns,
                warm_up=2,
            )
            for state in states.values():
                state.check(users, state.batches)
            rows += [
                Row(f"chunks of {size} keys, {where}", f"chunks of {DEFAULT:,}", ratios(own, seconds[f"{DEFAULT:,}"]))
                for size, own in seconds.items()
                if size != f"{DEFAULT:,}"
            ]
            lines += [(f"{size}, {where}", spread(own, 1e6 / keys)) for size, own in seconds.items()]
    return Answer(
        rows,
        f"{keys:,} keys a batch, {turns} turns after 2 to warm up",
        table("keys of a chunk | microseconds a key", lines),
    )
