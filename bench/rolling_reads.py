"""What features of rolling windows cost a reader, beside plain values of the same fields.

Two states on one Redis have the same thousand keys and the same fields, a count and a sum: a plain one, and one with
rolling windows of 1 hour, 24 hours, 7 days, 30 days and a lifetime, so ten values a key. Its keys have 40 days of
rows: 5 % have a row each 5 minutes, 50 % ten rows a day, 45 % a row a week. The last two days came a batch each 5
minutes, so tiles are those of a job. Both are read by `open_reader`, by turns; a turn is the mean of its reads.

    1, 50, 1,000 keys    `multi_get` of so many keys
    two columns          `multi_get` of all keys with ``columns=`` of one window
    same bytes           `multi_get` of a plain state whose only field has as many bytes as a record with tiles: what
                         a library would take that needs no time to decode and to join
    blocks               raw MGET of as many bytes as blocks of 32 such records have, one for each key read, as in a
                         state of far more keys than are read
    by HTTP              POST of 1,000 keys to `mapstate serve`
    a week by the hour   of 50 keys, beside `windows()` of sliding windows with the same rows, 168 panes a key
    during a batch       the same as 1,000 keys, while an attempt has written all keys and is not committed
    beside a job         50 keys, while another process writes 100 keys a batch, as fast as it goes; percentiles of each
                         read
"""

from __future__ import annotations

from measuring import ROOT, Answer, Goal, Row, by_turns, ratios, spread, table, timed  # isort: skip  # finds the servers

import gc
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rolled import Rolled
from rolled import Row as OneRow
from servers import RedisServer
from service import serving
from serving import Client
from states import Tens, made_of_one_batch

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
FIVE_MINUTES = 300_000_000
ROWS_A_DAY = {"a row each 5 minutes": 288.0, "10 rows a day": 10.0, "a row a week": 1 / 7}
WEEK = 168
KEYS_OF_BLOCK = 32
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


def _kind(key: str) -> str:
    number = int(key.removeprefix("card-")) % 20
    return [*ROWS_A_DAY][0 if number == 0 else 1 if number <= 10 else 2]


def _rows(keys: Sequence[str], day: int, draw: random.Random) -> Rows:
    rows: Rows = {}
    for key in keys:
        rate = ROWS_A_DAY[_kind(key)]
        count = int(rate) + (draw.random() < rate % 1)
        if count:
            times = sorted(START + day * DAY + draw.randrange(DAY) for _ in range(count))
            rows[key] = [(time, draw.randint(1, 90_000)) for time in times]
    return rows


def _parts(rows: Rows) -> list[Rows]:
    """The rows of each 5 minutes."""
    parts: dict[int, Rows] = defaultdict(dict)
    for key, own in rows.items():
        for row in own:
            parts[row[0] // FIVE_MINUTES].setdefault(key, []).append(row)
    return [parts[at] for at in sorted(parts)]


def write_on() -> None:
    """Write batches to the state at the address of the command line, until this process is ended."""
    rolling, draw = State(sys.argv[1], "rolling", DEFINITION), random.Random(11)
    rolling.batches = rolling.ledgers.records[0].owners["bench"]
    for at in range(1_000_000):
        cards = [f"card-{draw.randrange(1000)}" for _ in range(100)]
        rolling.apply({card: [(START + DAYS * DAY + at, 1)] for card in cards})
        if not at:
            print("writing", flush=True)


def _beside_a_job(url: str, ways: Any, turns: int) -> dict[str, list[float]]:
    """The 50th and 99th percentile of each way's reads, in milliseconds, in each turn."""
    command = [sys.executable, "-c", "import rolling_reads; rolling_reads.write_on()", url]
    found: dict[str, list[float]] = defaultdict(list)
    with subprocess.Popen(command, cwd=ROOT / "bench", stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout is not None
            job.stdout.readline()
            for _ in range(turns):
                for name, read in ways.items():
                    taken = [timed(read) * 1000 for _ in range(400)]
                    found[f"{name}, p50"].append(statistics.median(taken))
                    found[f"{name}, p99"].append(statistics.quantiles(taken, n=100)[-1])
            assert job.poll() is None, "the job has ended"
        finally:
            job.kill()
    return found


def _week(url: str, turns: int) -> dict[str, list[float]]:
    """Seconds of a week by the hour of 50 keys, by both kinds of windows."""
    draw, users = random.Random(5), [f"user-{at}" for at in range(50)]
    sliding = Tens(url, "sliding", length=WEEK, slide=1)
    rolled = Rolled(url, [(WEEK, 1)], state="week", serializer="msgpack", aggregates={"rows": Count()})
    for hour in range(0, 2 * WEEK, 24):
        rows = [OneRow(hour + draw.randrange(24), user) for user in users for _ in range(48)]
        panes: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for row in rows:
            panes[row.at or 0][row.user] += 1
        sliding.batch(panes, watermark=hour + 23)
        rolled.batch(*rows)
    end = 2 * WEEK - 1
    with open_reader(url, "sliding") as windows, open_reader(url, "week") as rolling:

        def by_windows() -> list[Any]:
            return [windows.windows(user, since=end - 1, until=end)[0].value["n"] for user in users]

        def by_tiles() -> list[Any]:
            return [values and values["rows_168"] for values in rolling.multi_get(users, at=end)]

        assert by_windows() == by_tiles()
        return by_turns({"windows()": by_windows, "tiles": by_tiles}, turns, warm_up=2)


DEFINITION = WINDOWS.definition("timestamp", startTime=0, lag=0, retention=0, idle=None)


def ask(keys: int = 1000, turns: int = 15) -> Answer:
    cards, draw = [f"card-{at}" for at in range(keys)], random.Random(7)
    end = START + DAYS * DAY
    with RedisServer().start() as server:
        plain, rolling = State(server.url, "plain"), State(server.url, "rolling", DEFINITION)
        truth: dict[str, int] = defaultdict(int)
        for day in range(DAYS):
            rows = _rows(cards, day, draw)
            plain.apply(rows)
            for part in _parts(rows) if day >= DAYS - 2 else [rows]:
                rolling.apply(part)
            for key, own in rows.items():
                truth[key] += sum(time < end - FIVE_MINUTES for time, _ in own)
        del rows
        gc.collect()
        gc.freeze()  # what the bench has made is no heap of a service
        with server.client() as client:
            memory = {name: _memory(client, name) for name in ("plain", "rolling")}
            sizes = {card: client.strlen(f"rolling:{card}") for card in cards}
            blocks = {card: bytes(sum(draw.choices([*sizes.values()], k=KEYS_OF_BLOCK))) for card in cards}
            client.mset({f"block:{card}": block for card, block in blocks.items()})
        same = {card: bytes(size) for card, size in sizes.items()}
        made_of_one_batch(
            server.url, "same", (KeyField("card", "string"),), (Field("raw", "Max(raw)", "binary"),), same
        )
        week = _week(server.url, turns)
        with (
            open_reader(server.url, "plain") as flat,
            open_reader(server.url, "rolling") as features,
            open_reader(server.url, "same") as bare,
            serving(server.url) as served,
            server.client() as raw,
        ):
            for card, found in zip(cards, features.multi_get(cards, at="watermark"), strict=True):
                assert (found is None) == (card not in truth)
                assert found is None or found["clicks_lifetime"] == truth[card]
            client = Client(served)
            body = json.dumps({"keys": cards}).encode()
            assert len(json.loads(client.ask("/states/rolling/values", body))["values"]) == keys
            ways: dict[str, Any] = {"POST 1000": lambda: client.ask("/states/rolling/values", body)}
            for count in READS:
                some = cards[:count] if count > 1 else cards[1:2]
                ways[f"plain {count}"] = lambda some=some: flat.multi_get(some)
                ways[f"rolling {count}"] = lambda some=some: features.multi_get(some)
                ways[f"same bytes {count}"] = lambda some=some: bare.multi_get(some)
                ways[f"blocks {count}"] = lambda some=some: raw.mget([f"block:{card}" for card in some])
            columns = ["clicks_7_days", "spend_7_days"]
            ways["two columns 1000"] = lambda: features.multi_get(cards, columns=columns)
            seconds = _by_turns(ways, turns)
            rolling.write({card: [(end, 1)] for card in cards})
            during = _by_turns({name: ways[name] for name in ("plain 1000", "rolling 1000")}, turns)
            beside = _beside_a_job(
                server.url, {name: ways[f"{name} 50"] for name in ("plain", "same bytes", "rolling")}, turns
            )
    of = {name: ratios(seconds[f"rolling {count}"], seconds[f"plain {count}"]) for name, count in _names().items()}
    return Answer(
        [
            Row("ten features of 1 key by the reader", "2 plain values", of["1"], Goal("most", 1.3)),
            Row("ten features of 50 keys", "2 plain values", of["50"], Goal("most", 3.5)),
            Row("ten features of 1,000 keys", "2 plain values", of["1000"], Goal("most", 7)),
            *(
                Row(
                    f"values of as many bytes as the features of {int(count):,} key{'s' if count != '1' else ''}",
                    "2 plain values",
                    ratios(seconds[f"same bytes {count}"], seconds[f"plain {count}"]),
                    note="what the goal above would be for a library that takes no time to decode and to join",
                )
                for count in _names()
            ),
            *(
                Row(
                    f"raw MGET of the blocks of {int(count):,} key{'s' if count != '1' else ''}",
                    "ten features of them",
                    ratios(seconds[f"blocks {count}"], seconds[f"rolling {count}"]),
                    note="what rolling windows in blocks would take, of a record per key, if nothing decoded them",
                )
                for count in _names()
            ),
            Row("p99 of 50 keys beside a job, milliseconds", "1", beside["rolling, p99"], Goal("most", 2)),
            Row("p99 of values of as many bytes as those, milliseconds", "1", beside["same bytes, p99"]),
            Row(
                "a week by the hour of 50 keys by `windows()`",
                "the same by rolling windows",
                ratios(week["windows()"], week["tiles"]),
                Goal("least", 50),
            ),
            Row(
                "POST of 1,000 keys with ten features",
                "`multi_get` of them",
                ratios(seconds["POST 1000"], seconds["rolling 1000"]),
            ),
            *(
                Row(
                    f"Redis bytes of a key with {kind}, `MEMORY USAGE`",
                    "1",
                    [memory["rolling"][kind]],
                    Goal("most", 600) if kind == "10 rows a day" else None,
                )
                for kind in ROWS_A_DAY
            ),
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
        f"{statistics.mean(memory['plain'].values()):.0f} bytes a key in Redis for the plain state; records of "
        f"{statistics.mean(sizes.values()):.0f} bytes in the rolling one; the load of the machine was "
        f"{os.getloadavg()[1]:.0f}, of which 1 is this bench",
        table(
            "way | milliseconds",
            [
                *((name, spread(own, 1000)) for name, own in seconds.items()),
                *((f"during a batch, {name}", spread(own, 1000)) for name, own in during.items()),
                *((f"a week of 50 keys, {name}", spread(own, 1000)) for name, own in week.items()),
                *((f"50 keys beside a job, {name}", spread(own)) for name, own in beside.items()),
            ],
        ),
    )


def _memory(client: Any, name: str) -> dict[str, float]:
    """The bytes of a key of each kind in Redis."""
    found: dict[str, list[int]] = defaultdict(list)
    for key in client.scan_iter(f"{name}:card-*", 1000):
        found[_kind(key.decode().partition(":")[2])].append(client.memory_usage(key) or 0)
    return {kind: statistics.mean(found[kind]) for kind in ROWS_A_DAY}


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
