"""What the index of a state's windows takes on Redis, beside the records of the keys that it names.

A task writes records of new keys, all in one window. Then the index of the same keys is written, as the task does
behind its last chunk. `used_memory` is the growth of the whole server. Each turn has a server of its own.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, ratios, spread, table  # isort: skip  # finds the servers

import time

import redis
from counted_state import CountedState, arrow_batches, chunks
from servers import RedisServer

from mapstate.maps.pane_index import PaneIndex, index_codec, key_pages, slices
from mapstate.maps.serialized import writer_of

CHUNK = 2000
PANE = "2026-11-22T10:00:00.000000Z"


def turn(keys: list[str]) -> tuple[float, float, float, float]:
    """Write records, then their index: seconds of each, and bytes of each by key."""
    with RedisServer().start() as server, redis.Redis.from_url(server.url) as client:
        state = CountedState(server.url)
        empty = client.info("memory")["used_memory"]
        of_records = state.apply(arrow_batches(keys))
        records = client.info("memory")["used_memory"]
        (attempt,) = state.ledgers.begin(state.batches)
        codec = index_codec(state.spec.serializer, state.name)
        with writer_of(state.store, attempt.token) as writer:
            started = time.perf_counter()
            index = PaneIndex(writer, codec, attempt.view, attempt.txid, 0)
            for some in chunks(keys, CHUNK):
                index.note(some, [None] * len(some))
            index.write()
            of_index = time.perf_counter() - started
        both = client.info("memory")["used_memory"]
        check(state, keys)
    return of_records, of_index, (records - empty) / len(keys), (both - records) / len(keys)


def check(state: CountedState, keys: list[str]) -> None:
    """Read the index back: every key, once. The attempt's own values are the newest."""
    codec = index_codec(state.spec.serializer, state.name)

    def read(names: list[str]) -> list[object]:
        records = codec.loads(names, state.store.multi_get(names))
        return [None if record is None else record[1] for record in records]

    rests = [rest for part in slices(read, [PANE], 1) for page in key_pages(read, part) for rest in page]
    assert [f"{PANE}|{rest}" for rest in rests] == keys, "the index does not have every key"


def ask(keys: int = 100_000, turns: int = 5) -> Answer:
    names = [f"{PANE}|user-{key:08d}" for key in range(keys)]
    of_records, of_index, records, index = zip(*(turn(names) for _ in range(turns)), strict=True)
    return Answer(
        [
            Row("index of windows on Redis, bytes a key, `used_memory`", "nothing", list(index), Goal("most", 25)),
            Row("writing the index of new keys", "writing their records", ratios(of_index, of_records)),
        ],
        f"{keys:,} counts of 13 letters in one window, {turns} turns",
        table(
            "what | seconds | bytes a key",
            [("records", spread(of_records), spread(records)), ("index", spread(of_index), spread(index))],
        ),
        {},
    )
