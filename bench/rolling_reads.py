"""What features of rolling windows cost a reader, beside plain values of the same fields.

Two states on one Redis have the same thousand keys and the same fields, a count and a sum: a plain one, and one with
rolling windows of 1 hour, 24 hours, 7 days, 30 days and a lifetime, so ten values a key. Its keys have 40 days of
rows: 5 % have a row each 5 minutes, 50 % ten rows a day, 45 % a row a week. Both are read by `open_reader`, by turns;
a turn is the mean of its reads.

    1, 50, 1,000 keys    `multi_get` of so many keys
    two columns          `multi_get` of all keys with ``columns=`` of one window
    during a batch       the same as 1,000 keys, while an attempt has written all keys and is not committed
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import gc
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from servers import RedisServer

from mapstate import LIFETIME, Count, RollingWindows, Sum, opaque, open_reader
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.tiles import TileFields
from mapstate.maps import OpaqueMap
from mapstate.maps.serialized import SerializedMap, writer_of
from mapstate.protocol.ledger_record import Commit, OpenRequest
from mapstate.protocol.ledgers import Ledgers
from mapstate.protocol.windows import WindowCommit
from mapstate.schema import Field, KeyField
from mapstate.serializers import RecordCodec, serializer
from mapstate.serializers.tiles import Tiles

READS = {1: 200, 50: 50, 1000: 10}
DAYS = 40
DAY = 86_400_000_000
START = 20_700 * DAY
ROWS_A_DAY = (288.0, 10.0, 1 / 7)
WINDOWS = RollingWindows.of("1 hour", "24 hours", "7 days", "30 days", LIFETIME)
AGGREGATORS = {"clicks": Count(), "spend": Sum("amount")}
FIELDS = tuple(Field(name, one.describe(), "bigint") for name, one in AGGREGATORS.items())

Rows = dict[str, list[tuple[int, int]]]
"""Of each key the times and amounts."""


class State:
    """A state of two fields, to which batches are applied without Spark."""

    def __init__(self, url: str, name: str, windows: Any = None) -> None:
        self.spec = opaque(url, name, serializer="msgpack")
        self.store = self.spec.open()
        self.is_rolling = windows is not None
        opening = OpenRequest(
            state=name,
            type="opaque",
            serializer="msgpack",
            keys=(KeyField("card", "string"),),
            fields=FIELDS,
            owner="bench",
            clock_txid=280_000_000,
            rolling=windows,
        )
        self.ledgers = Ledgers([self.store], [opening], ["refuse"])
        self.ledgers.open()
        self.batches = 0

    def write(self, rows: Rows) -> Any:
        """Begin a batch and write it; the attempt."""
        (attempt,) = self.ledgers.begin(self.batches)
        record = self.ledgers.records[0]
        codec = RecordCodec(
            serializer("msgpack"), record.state, "opaque", FIELDS, record.field_counts, in_tiles=self.is_rolling
        )
        with writer_of(self.store, attempt.token) as writer:
            state: OpaqueMap[Any] = OpaqueMap(SerializedMap(writer, codec), attempt.view, written_once=True)
            state.begin_commit(attempt.txid)
            if record.rolling is None:
                plain = [(len(own), sum(amount for _, amount in own)) for own in rows.values()]
                state.multi_combine(list(rows), plain, Fields(FIELDS, AGGREGATORS).combine_all)
            else:
                kept = record.rolling
                tiles = [_tiles(kept.definition.units, kept.tiling, own) for own in rows.values()]
                state.multi_combine(list(rows), tiles, TileFields(FIELDS, AGGREGATORS, kept.tiling).combine_all)
        return attempt

    def apply(self, rows: Rows) -> None:
        """One batch."""
        attempt = self.write(rows)
        newest = max(time for own in rows.values() for time, _ in own)
        done = Commit(batch_id=self.batches, txid=attempt.txid, owner="bench")
        if self.is_rolling:
            done = Commit(
                batch_id=self.batches,
                txid=attempt.txid,
                owner="bench",
                windows=WindowCommit(watermark=newest, newest=newest),
            )
        self.ledgers.commit([done])
        self.batches += 1


def _tiles(units: Any, tiling: Any, rows: Sequence[tuple[int, int]]) -> Tiles:
    by_start: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for start, (_, amount) in zip(tiling.tiles([units(time) for time, _ in rows]), rows, strict=True):
        by_start[start][0] += 1
        by_start[start][1] += amount
    starts = sorted(by_start)
    return Tiles(starts, [[by_start[start][at] for start in starts] for at in (0, 1)])


def _rows(keys: Sequence[str], day: int, draw: random.Random) -> Rows:
    rows: Rows = {}
    for number, key in enumerate(keys):
        rate = ROWS_A_DAY[0 if number % 20 == 0 else 1 if number % 20 <= 10 else 2]
        count = int(rate) + (draw.random() < rate % 1)
        if count:
            times = sorted(START + day * DAY + draw.randrange(DAY) for _ in range(count))
            rows[key] = [(time, draw.randint(1, 90_000)) for time in times]
    return rows


def ask(keys: int = 1000, turns: int = 15) -> Answer:
    cards, draw = [f"card-{at}" for at in range(keys)], random.Random(7)
    end = START + DAYS * DAY
    definition = WINDOWS.definition("timestamp", startTime=0, lag=0, retention=0, idle=None)
    with RedisServer().start() as server:
        plain, rolling = State(server.url, "plain"), State(server.url, "rolling", definition)
        truth: dict[str, int] = defaultdict(int)
        for day in range(DAYS):
            rows = _rows(cards, day, draw)
            plain.apply(rows)
            rolling.apply(rows)
            for key, own in rows.items():
                truth[key] += sum(time < end - 300_000_000 for time, _ in own)
        del rows
        gc.collect()
        gc.freeze()  # what the bench has made is no heap of a service
        with open_reader(server.url, "plain") as flat, open_reader(server.url, "rolling") as features:
            for card, found in zip(cards, features.multi_get(cards, at="watermark"), strict=True):
                assert (found is None) == (card not in truth)
                assert found is None or found["clicks_lifetime"] == truth[card]
            ways = {}
            for count in READS:
                some = cards[:count] if count > 1 else cards[1:2]
                ways[f"plain {count}"] = lambda some=some: flat.multi_get(some)
                ways[f"rolling {count}"] = lambda some=some: features.multi_get(some)
            columns = ["clicks_7_days", "spend_7_days"]
            ways["two columns 1000"] = lambda: features.multi_get(cards, columns=columns)
            seconds = _by_turns(ways, turns)
            rolling.write({card: [(end, 1)] for card in cards})
            during = _by_turns({name: ways[name] for name in ("plain 1000", "rolling 1000")}, turns)
        with server.client() as client:
            memory = {
                name: statistics.mean(client.memory_usage(key) or 0 for key in client.scan_iter(f"{name}:card-*", 1000))
                for name in ("plain", "rolling")
            }
    of = {name: ratios(seconds[f"rolling {count}"], seconds[f"plain {count}"]) for name, count in _names().items()}
    return Answer(
        [
            Row("ten features of 1 key by the reader", "2 plain values", of["1"], Goal("most", 1.3)),
            Row("ten features of 50 keys", "2 plain values", of["50"], Goal("most", 3.5)),
            Row("ten features of 1,000 keys", "2 plain values", of["1000"], Goal("most", 7)),
            Row(
                "two of ten features of 1,000 keys, `columns=`",
                "2 plain values",
                ratios(seconds["two columns 1000"], seconds["plain 1000"]),
            ),
            Row(
                "ten features of 1,000 keys, during a batch",
                "the same, between batches",
                ratios(during["rolling 1000"], seconds["rolling 1000"]),
            ),
        ],
        f"{turns} turns of {', '.join(f'{count} reads of {size}' for size, count in READS.items())}; "
        f"{memory['plain']:.0f} bytes a key in Redis for the plain state, {memory['rolling']:.0f} for the rolling one",
        table("way | milliseconds", [(name, spread(own, 1000)) for name, own in seconds.items()]),
    )


def _names() -> dict[str, int]:
    return {str(count): count for count in READS}


def _by_turns(ways: Any, turns: int) -> dict[str, list[float]]:
    """Each way's seconds in each turn: the median of its reads."""

    def repeated(name: str) -> Any:
        reads = READS[int(name.rsplit(" ", 1)[1])]

        def work() -> None:
            for _ in range(reads):
                ways[name]()

        return work

    found = by_turns({name: repeated(name) for name in ways}, turns, warm_up=2)
    return {name: [one / READS[int(name.rsplit(" ", 1)[1])] for one in own] for name, own in found.items()}
