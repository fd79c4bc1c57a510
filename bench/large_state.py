"""A state of ten million keys beside one of 100,000: the same batches, by a task called in this process.

Each state has a Redis of its own. Nine of ten million records are written past mapstate, in the form that a
committed batch leaves. There are two kinds of batch: the same keys in both, and keys drawn from the whole of each.
For comparison redis-py reads the same keys and writes them back: that is what a server with more keys costs anybody.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import random
import statistics

import redis
from counted_state import STATE, CountedState, arrow_batches, chunks
from servers import RedisServer

SMALL, LARGE = 100_000, 10_000_000


def fill(url: str, first: int, last: int, txid: int) -> None:
    """Write records ``[txid, 0, 0]`` for users from ``first`` to below ``last``."""
    record = b"[%d,0,0]" % txid
    with redis.Redis.from_url(url) as client:
        for start in range(first, last, 20_000):
            client.mset({f"{STATE}:user-{at}": record for at in range(start, min(start + 20_000, last))})


def ask(keys: int = 50_000, turns: int = 9) -> Answer:
    same = [f"user-{at}" for at in range(keys)]
    batches = arrow_batches(same)
    rng = random.Random(7)
    names = [[f"{STATE}:{user}" for user in some] for some in chunks(same, 2000)]
    with (
        RedisServer().start() as small,
        RedisServer().start() as large,
        small.client() as small_client,
        large.client() as large_client,
    ):
        clients = {SMALL: small_client, LARGE: large_client}
        states = {SMALL: CountedState(small.url), LARGE: CountedState(large.url)}
        counted = {}
        for size, state in states.items():
            state.apply([])
            fill(state.url, 0, size, state.record.last_commit.txid)
            counted[size] = 0

        def same_keys(size: int) -> float:
            counted[size] += 1
            return states[size].apply(batches)

        def any_keys(size: int) -> float:
            drawn = rng.sample(range(keys, size), keys)  # not from the shared keys, whose count is checked
            return states[size].apply(arrow_batches([f"user-{at}" for at in drawn]))

        def raw(size: int) -> None:
            for some in names:
                clients[size].mset(dict(zip(some, clients[size].mget(some), strict=True)))

        ways = {(kind.__name__, size): lambda kind=kind, size=size: kind(size) for kind in (same_keys, any_keys, raw)
                for size in states}  # fmt: skip
        seconds = by_turns(ways, turns, warm_up=2)
        for size, state in states.items():
            state.check(same, counted[size])
    against = f"a state of {SMALL:,} keys"
    return Answer(
        [
            Row(
                f"a state of {LARGE:,} keys, same batches",
                against,
                ratios(seconds["same_keys", LARGE], seconds["same_keys", SMALL]),
                Goal("most", 1.1),
            ),
            Row(
                "the same, keys drawn from the whole state",
                against,
                ratios(seconds["any_keys", LARGE], seconds["any_keys", SMALL]),
                note="more than the goal asks: what the processor's caches do to the server",
            ),
            Row(
                f"redis-py's MGET + MSET of the same keys, {LARGE:,} keys in the server",
                f"{SMALL:,} keys in the server",
                ratios(seconds["raw", LARGE], seconds["raw", SMALL]),
                note="what the goal above would be for a library that takes no time itself",
            ),
        ],
        f"{keys:,} keys a batch, {turns} turns after 2 to warm up",
        table(
            "batch, state | microseconds a key",
            [(f"{kind}, {size:,}", spread(own, 1e6 / keys)) for (kind, size), own in seconds.items()],
        ),
        {f"large_state.{kind}.{size}": statistics.median(own) / keys * 1e6 for (kind, size), own in seconds.items()},
    )
