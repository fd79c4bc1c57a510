"""What a committed read costs beside a raw one. ``scripts/run python bench/reader_cost.py``.

A thousand keys of an opaque state on a Redis of one's own are read again and again, by turns, so that a slow
moment of the machine hits all ways alike; each ratio is taken within one turn. Medians of all turns, with
their quartiles.

    committed   `open_reader(...).multi_get(keys)`: keys encoded, one round trip with the ledger before and after
                the records, decoded, judged by the one rule, shown as dicts
    latest      the same with consistency="latest"
    map         mapstate's own backing map: keys encoded, `multi_get`, records decoded
    bytes       the backing map's `multi_get` alone: texts in, bytes out
    MGET        redis-py's `mget` with hiredis: names in, bytes out
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from servers import RedisServer

from mapstate import Count, open_reader
from mapstate.backends import resolve
from mapstate.keys import KeyCodec, KeyField
from mapstate.ledger import Ledger
from mapstate.maps import OpaqueMap
from mapstate.maps.serialized import SerializedMap
from mapstate.serializers import RecordCodec, serializer
from mapstate.transitions import Commit, Field, Opening

STATE = "visits"
USER = (KeyField("user_id", "string"),)
FIELDS = (Field("visits", Count().describe(), "bigint"),)


def fill(url: str, users: list[str], batches: int) -> None:
    """A state as a stream leaves it: some batches, each counting every user once."""
    store = resolve(url).open(STATE)
    opening = Opening(
        state=STATE, type="opaque", serializer="json", keys=USER, fields=FIELDS, owner="query", clock_txid=280_000_000
    )
    ledger = Ledger.open(store, opening)
    for batch_id in range(batches):
        begun = ledger.begin(batch_id)
        writer = store.writer(begun.token)
        state = OpaqueMap(SerializedMap(writer, codec()), begun.view)
        state.begin_commit(begun.txid)
        texts = [KeyCodec(USER).encode(user) for user in users]
        state.multi_combine(texts, [1] * len(texts), lambda bases, _: [(base or 0) + 1 for base in bases])
        ledger.commit(Commit(batch_id=batch_id, txid=begun.txid, owner="query"))


def codec() -> RecordCodec:
    return RecordCodec(serializer("json"), STATE, "opaque", FIELDS, [(0, 1)])


def measure(ways: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Seconds of each way in each turn. The first turns warm up and are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(-turns // 10, turns):
        for at in range(len(names)):
            name = names[(at + turn) % len(names)]
            started = time.perf_counter()
            ways[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def spread(values: list[float], scale: float = 1.0) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle * scale:.2f} ({low * scale:.2f} to {high * scale:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=1000)
    options = parser.parse_args()
    users = [f"user-{at}" for at in range(options.keys)]
    with RedisServer().start() as server:
        fill(server.url, users, 3)
        store, keys, records = resolve(server.url).open(STATE), KeyCodec(USER), codec()
        texts = [keys.encode(user) for user in users]
        names = [f"{STATE}:{text}" for text in texts]

        def through_the_map() -> Any:
            asked = keys.encode_all(users)
            return records.loads(asked, store.multi_get(asked))

        with (
            open_reader(server.url, STATE) as committed,
            open_reader(server.url, STATE, consistency="latest") as latest,
            server.client() as client,
        ):
            assert committed.multi_get(users) == latest.multi_get(users) == [{"visits": 3}] * len(users)
            assert client.mget(names) == store.multi_get(texts)
            seconds = measure(
                {
                    "committed": lambda: committed.multi_get(users),
                    "latest": lambda: latest.multi_get(users),
                    "map": through_the_map,
                    "bytes": lambda: store.multi_get(texts),
                    "MGET": lambda: client.mget(names),
                },
                options.turns,
            )
    print(f"{options.keys} keys, {options.turns} turns; medians and quartiles\n")
    print("| way | milliseconds | committed beside it |\n|---|---|---|")
    for name, values in seconds.items():
        ratios = [one / other for one, other in zip(seconds["committed"], values, strict=True)]
        print(f"| {name} | {spread(values, 1000)} | {spread(ratios)} |")


if __name__ == "__main__":
    main()
