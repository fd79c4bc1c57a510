"""Bytes of Redis for each key: an opaque count beside a plain counter of the same key.

`MEMORY USAGE` is the server's own figure for a key, `used_memory` the growth of the whole server. INCRBY makes the
counters, and a task makes the state; both count up three times. With `layout=packed`, 50 keys to a hash shard, each
key gets its share of the hashes' memory. The time of a task is compared with that of `layout=string`.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

from collections.abc import Callable
from functools import partial
from typing import Any

import redis
from counted_state import STATE, CountedState, arrow_batches, chunks
from servers import RedisServer

ROUNDS = 3
SAMPLE = 100  # keys to ask MEMORY USAGE for
A_SHARD = 50  # keys of one hash shard
TURNS = 9


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


def opaque(users: list[str], by: int, layout: str = "layout=string") -> Callable[[str, redis.Redis], None]:
    """Fill a state, in batches of ``by`` rows a key."""

    def fill(url: str, _: redis.Redis) -> None:
        state = CountedState(f"{url}?{layout}")
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


def times(users: list[str], field_counts: dict[str, str]) -> dict[str, list[float]]:
    """Measure the seconds of a task in each layout, by turns, on one server."""
    batches = arrow_batches(users)
    with RedisServer().start() as server:
        states = {way: CountedState(f"{server.url}?prefix={way}/&{layout}") for way, layout in field_counts.items()}
        seconds = by_turns({way: partial(one.apply, batches) for way, one in states.items()}, TURNS, warm_up=2)
        for one in states.values():
            one.check(users, one.batches)
    return seconds


def ask(keys: int = 100_000) -> Answer:
    users = [f"user-{at}" for at in range(keys)]
    shards = keys // A_SHARD
    packed = f"layout=packed&buckets={shards}"
    some = [f"{STATE}:{user}" for user in users[:: keys // SAMPLE]]
    hashes = [f"{STATE}:{at:0{len(str(shards - 1))}}" for at in range(shards)]
    rows, lines, figures = [], [], {}
    for by in (1, 20_000):
        ours, our_growth = filled(opaque(users, by), some)
        small, small_growth = filled(opaque(users, by, packed), hashes)
        plain, plain_growth = filled(counters(users, by), some)
        count = f"counts of {ROUNDS * by:,}"
        shared = "Redis keeps integers below 10,000 once for all keys: such a counter has no value of its own"
        packed_usage, plain_usage = sum(small) / keys, sum(plain) / len(plain)
        for layout, goal, usage, growth in (
            ("", 1.5, [a / b for a, b in zip(ours, plain, strict=True)], our_growth),
            (", packed", 1.0, [packed_usage / plain_usage], small_growth),
        ):
            subject = f"Redis bytes per key, opaque Count{layout}"
            note = shared if by == 1 and not layout else ""
            against, most = "plain INCR counters of the same keys", Goal("most", goal)
            rows.append(Row(f"{subject}, `MEMORY USAGE`, {count}", against, usage, most))
            rows.append(Row(f"{subject}, `used_memory`, {count}", against, [growth / plain_growth], most, note))
        means = sum(ours) / len(ours), packed_usage, plain_usage
        growths = [growth / keys for growth in (our_growth, small_growth, plain_growth)]
        lines.append((f"`MEMORY USAGE`, {count}", *(f"{mean:.1f}" for mean in means)))
        lines.append((f"`used_memory`, {count}", *(f"{growth:.1f}" for growth in growths)))
        figures = {"redis_memory.bytes": growths[0], "redis_memory.plain": growths[2]}
    seconds = times(users, {"string": "layout=string", "packed": packed})
    subject = "opaque with layout=packed, one process"
    rows.append(Row(subject, "the same with layout=string", ratios(seconds["packed"], seconds["string"])))
    by_layout = [(layout, spread(own, 1e6 / keys)) for layout, own in seconds.items()]
    return Answer(
        rows,
        f"{keys:,} keys such as `{STATE}:user-42`, counted up {ROUNDS} times; packed into {shards:,} hash shards; "
        f"{TURNS} turns after 2 to warm up",
        table("bytes a key | opaque | packed | INCR", lines) + "\n\n" + table("layout | microseconds a key", by_layout),
        figures,
    )
