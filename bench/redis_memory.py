"""Bytes of Redis for each key: an opaque count beside a plain counter of the same key.

`MEMORY USAGE` is the server's own figure for a key, `used_memory` the growth of the whole server. INCRBY makes the
counters, and a task makes the state; both count up three times. Those of blocks are in `bench/blocks.py`.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, table  # isort: skip  # finds the servers

from collections.abc import Callable
from typing import Any

import redis
from counted_state import STATE, CountedState, arrow_batches, chunks
from servers import RedisServer

ROUNDS = 3
SAMPLE = 100  # keys to ask MEMORY USAGE for


def filled(fill: Callable[[str, redis.Redis], Any], names: list[str]) -> tuple[list[int], int]:
    """Measure `MEMORY USAGE` of these Redis keys and the growth of `used_memory`, on a server of its own."""
    with RedisServer().start() as server, redis.Redis.from_url(server.url) as client:
        before = client.info("memory")["used_memory"]
        fill(server.url, client)
        grown = client.info("memory")["used_memory"] - before
        pipe = client.pipeline(transaction=False)
        for name in names:
            pipe.memory_usage(name, samples=0)
        return pipe.execute(), grown


def opaque(users: list[str], by: int) -> Callable[[str, redis.Redis], None]:
    """Fill a state, in batches of ``by`` rows a key."""

    def fill(url: str, _: redis.Redis) -> None:
        state = CountedState(url)
        for _round in range(ROUNDS):
            state.apply(arrow_batches(users, by))
        state.check(users, ROUNDS * by)

    return fill


def counters(users: list[str], by: int) -> Callable[[str, redis.Redis], None]:
    """Fill plain counters, without mapstate."""

    def fill(_: str, client: redis.Redis) -> None:
        for _round in range(ROUNDS):
            for some in chunks(users, 2000):
                pipe = client.pipeline(transaction=False)
                for user in some:
                    pipe.incrby(f"{STATE}:{user}", by)
                pipe.execute()
        assert client.mget([f"{STATE}:{user}" for user in users]) == [b"%d" % (ROUNDS * by)] * len(users)

    return fill


def ask(keys: int = 100_000) -> Answer:
    users = [f"user-{at}" for at in range(keys)]
    some = [f"{STATE}:{user}" for user in users[:: keys // SAMPLE]]
    rows, lines, figures = [], [], {}
    for by in (1, 20_000):
        ours, our_growth = filled(opaque(users, by), some)
        plain, plain_growth = filled(counters(users, by), some)
        count, subject = f"counts of {ROUNDS * by:,}", "Redis bytes per key, opaque Count"
        shared = "Redis keeps integers below 10,000 once for all keys: such a counter has no value of its own"
        against, most = "plain INCR counters of the same keys", Goal("most", 1.5)
        usage, growth = [a / b for a, b in zip(ours, plain, strict=True)], [our_growth / plain_growth]
        rows.append(Row(f"{subject}, `MEMORY USAGE`, {count}", against, usage, most))
        rows.append(Row(f"{subject}, `used_memory`, {count}", against, growth, most, shared if by == 1 else ""))
        means = sum(ours) / len(ours), sum(plain) / len(plain)
        growths = our_growth / keys, plain_growth / keys
        lines.append((f"`MEMORY USAGE`, {count}", *(f"{mean:.1f}" for mean in means)))
        lines.append((f"`used_memory`, {count}", *(f"{mean:.1f}" for mean in growths)))
        figures = {"redis_memory.bytes": growths[0], "redis_memory.plain": growths[1]}
    return Answer(
        rows,
        f"{keys:,} keys such as `{STATE}:user-42`, counted up {ROUNDS} times",
        table("bytes a key | opaque | INCR", lines),
        figures,
    )
