"""Bytes of Redis for each key: an opaque count beside a plain counter of the same key.

`MEMORY USAGE` is the server's own account of a key, `used_memory` what the whole server grew by. The counters are
made by INCRBY, the state by a task; both have been counted up three times.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, table  # isort: skip  # finds the servers

from collections.abc import Callable
from typing import Any

import redis
from counted_state import STATE, CountedState, arrow_batches, chunks
from servers import RedisServer

ROUNDS = 3
SAMPLE = 100  # keys whose MEMORY USAGE is asked


def filled(fill: Callable[[str, redis.Redis], Any], users: list[str]) -> tuple[list[int], int]:
    """`MEMORY USAGE` of some keys and the growth of `used_memory`, on a server of its own."""
    with RedisServer().start() as server, redis.Redis.from_url(server.url) as client:
        before = client.info("memory")["used_memory"]
        fill(server.url, client)
        grown = client.info("memory")["used_memory"] - before
        pipe = client.pipeline(transaction=False)
        for user in users[:: len(users) // SAMPLE]:
            pipe.memory_usage(f"{STATE}:{user}")
        return pipe.execute(), grown


def opaque(users: list[str], by: int) -> Callable[[str, redis.Redis], None]:
    """Fills a state, in batches of ``by`` rows a key."""

    def fill(url: str, _: redis.Redis) -> None:
        state = CountedState(url)
        for _round in range(ROUNDS):
            state.apply(arrow_batches(users, by))
        state.check(users, ROUNDS * by)

    return fill


def counters(users: list[str], by: int) -> Callable[[str, redis.Redis], None]:
    """The same without mapstate."""

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
    rows, lines, figures = [], [], {}
    for by in (1, 20_000):
        (ours, our_growth), (plain, plain_growth) = filled(opaque(users, by), users), filled(counters(users, by), users)
        count = f"counts of {ROUNDS * by:,}"
        shared = "Redis keeps integers below 10,000 once for all keys: such a counter has no value of its own"
        for how, values, note in (
            ("`MEMORY USAGE`", [a / b for a, b in zip(ours, plain, strict=True)], ""),
            ("`used_memory`", [our_growth / plain_growth], shared if by == 1 else ""),
        ):
            what = f"Redis bytes per key, opaque Count, {how}, {count}"
            rows.append(Row(what, "plain INCR counters of the same keys", values, Goal("most", 1.5), note))
        lines.append((f"`MEMORY USAGE`, {count}", f"{sum(ours) / len(ours):.1f}", f"{sum(plain) / len(plain):.1f}"))
        lines.append((f"`used_memory`, {count}", f"{our_growth / keys:.1f}", f"{plain_growth / keys:.1f}"))
        figures = {"redis_memory.bytes": our_growth / keys, "redis_memory.plain": plain_growth / keys}
    return Answer(
        rows,
        f"{keys:,} keys such as `{STATE}:user-42`, counted up {ROUNDS} times",
        table("bytes a key | opaque | INCR", lines),
        figures,
    )
