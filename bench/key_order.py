"""What a store gains where each batch brings its keys in the order that the store takes best: `Backend.key_order`.

Without Spark: this process calls a task with Arrow batches, whose keys it has sorted, or shuffled anew for each batch.
The sort itself is not in the figures; Spark makes it, see `million_rows` and `window_batches`. Each contestant has a
store of its own:

    Redis    by hash, beside any order: every key of the state in each batch, and one in ten; and every key of a state
             that was first written in any order, which it is in memory from then on
    SQLite   by key, beside any order: every key of the state in each batch
"""

from __future__ import annotations

from measuring import Answer, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from counted_state import CountedState, arrow_batches
from servers import RedisServer


class Batches:
    """Batches of some of a state's users in a given order; all of them come in the first ones.

    These come in any order with ``is_old``.
    """

    def __init__(
        self, url: str, users: int, share: int, key: Callable[[str], Any] | None, *, is_old: bool = False
    ) -> None:
        self._users = np.array([f"user-{at}" for at in range(users)])
        self._key = None if is_old else key
        self._draw = np.random.default_rng(7)
        self._size = users // share
        self.state = CountedState(url)
        drawn = self._draw.permutation(users)
        for at in range(share):
            self.state.apply(self._made(drawn[at * self._size : (at + 1) * self._size]))
        self._key = key

    def apply(self) -> float:
        """A batch, and its seconds a key."""
        drawn = self._draw.choice(len(self._users), self._size, replace=False)
        return self.state.apply(self._made(drawn)) / self._size

    def _made(self, drawn: Any) -> Any:
        some = self._users[drawn].tolist()
        return arrow_batches(some if self._key is None else sorted(some, key=self._key))


def ask(keys: int = 400_000, sqlite_keys: int = 100_000, turns: int = 9) -> Answer:
    rows, lines = [], []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())

        def compared(
            what: str,
            users: int,
            share: int,
            order: str,
            key: Callable[[str], Any],
            *,
            on_redis: bool = True,
            **more: bool,
        ) -> None:
            ways = {}
            for name, own in (("any order", None), (order, key)):
                url = f"sqlite:///{folder}/{name}.db"
                if on_redis:
                    url = stack.enter_context(RedisServer().start()).url
                ways[name] = Batches(url, users, share, own, **more)
            seconds = by_turns({name: way.apply for name, way in ways.items()}, turns, warm_up=2)
            rows.append(Row(f"{what}, keys {order}", "in any order", ratios(seconds[order], seconds["any order"])))
            lines.extend((f"{what}, {name}", spread(own, 1e6)) for name, own in seconds.items())
            if share == 1:
                for way in ways.values():
                    way.state.check([f"user-{at}" for at in range(users)], way.state.batches)

        compared(f"Redis, each of {keys:,} keys", keys, 1, "by hash", hash)
        compared(f"Redis, a tenth of {5 * keys:,} keys", 5 * keys, 10, "by hash", hash)
        compared("Redis, the same, first written in any order", keys, 1, "by hash", hash, is_old=True)
        compared(f"SQLite, each of {sqlite_keys:,} keys", sqlite_keys, 1, "by key", str, on_redis=False)
    return Answer(rows, f"{turns} turns after 2 to warm up", table("batches | microseconds a key", lines))
