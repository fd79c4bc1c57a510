"""Bytes of Redis for each key: an opaque count beside a plain counter of the same key.

`MEMORY USAGE` is the server's own account of a key, `used_memory` what the whole server grew by. The counters are
made by INCR, the state by a task; both have been counted up three times.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, table  # isort: skip  # finds the servers

from collections.abc import Callable
from typing import Any

import redis
from counted_state import STATE, CountedState, arrow_batches, chunks
from servers import RedisServer

ROUNDS = 3


def filled(fill: Callable[[str, redis.Redis], Any], users: list[str]) -> tuple[list[int], int]:
    """`MEMORY USAGE` of each key and the growth of `used_memory`, on a server of its own."""
    with RedisServer().start() as server, redis.Redis.from_url(server.url) as client:
        before = client.info("memory")["used_memory"]
        fill(server.url, client)
        grown = client.info("memory")["used_memory"] - before
        pipe = client.pipeline(transaction=False)
        for user in users[::10]:
            pipe.memory_usage(f"{STATE}:{user}")
        return pipe.execute(), grown


def ask(keys: int = 100_000) -> Answer:
    users = [f"user-{at}" for at in range(keys)]

    def opaque(url: str, _: redis.Redis) -> None:
        state = CountedState(url)
        for _round in range(ROUNDS):
            state.apply(arrow_batches(users))
        state.check(users, ROUNDS)

    def counters(_: str, client: redis.Redis) -> None:
        for _round in range(ROUNDS):
            for some in chunks(users, 2000):
                pipe = client.pipeline(transaction=False)
                for user in some:
                    pipe.incr(f"{STATE}:{user}")
                pipe.execute()
        assert client.mget([f"{STATE}:{user}" for user in users]) == [b"%d" % ROUNDS] * keys

    (ours, our_growth), (plain, plain_growth) = filled(opaque, users), filled(counters, users)
    by_usage = [sum(own) / len(own) for own in (ours, plain)]
    by_growth = [our_growth / keys, plain_growth / keys]
    return Answer(
        [
            Row(
                "Redis bytes per key, opaque Count, `MEMORY USAGE`",
                "plain INCR counters of the same keys",
                [a / b for a, b in zip(ours, plain, strict=True)],
                Goal("most", 1.5),
            ),
            Row(
                "the same, `used_memory`",
                "plain INCR counters of the same keys",
                [by_growth[0] / by_growth[1]],
                Goal("most", 1.5),
                "one value: the whole server's",
            ),
        ],
        f"{keys:,} keys such as `{STATE}:user-42`, counted up {ROUNDS} times",
        table(
            "bytes a key | opaque | INCR",
            [
                ("`MEMORY USAGE`", *(f"{one:.1f}" for one in by_usage)),
                ("`used_memory`", *(f"{one:.1f}" for one in by_growth)),
            ],
        ),
        {"redis_memory.bytes": by_growth[0], "redis_memory.plain": by_growth[1]},
    )
