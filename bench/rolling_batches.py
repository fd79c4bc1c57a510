"""Batches of rolling windows, beside the same batches into a plain state of the same fields.

All contestants keep a count and a sum of the same files, each as a streaming query of its own. Three batches to warm up
come first: 30 days of each key, and then twice a row of each key, so old tiles are folded. 5 % of the keys have rows
each 5 minutes, 50 % ten a day, 45 % a row a week. Then batches come by turns, a second of rows each:

    1 row       each key once
    20 rows     each key twenty times
    hot         1 % of the keys get 90 % of the rows, the others the rest

    plain       an opaque state
    rolling     with windows of 1 hour, 24 hours, 7 days, 30 days and a lifetime, so ten values a key
    recent      with 1 hour alone (Redis only). Its records are the recent tiles: what a batch would write if older
                tiles were in a record of their own, which is read and written once in 5 minutes
    one shuffle rolling, and Spark spreads the rows by key before it combines those of a tile (Redis only)

A figure is the seconds of the batch function. Bytes are what Redis says of its network, records what is stored in the
end under the keys of a batch. What was stored is compared with the rows.
"""

from __future__ import annotations

from turns import Contestant, Turns, run_streams, session  # isort: skip

import datetime as dt
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from measuring import Answer, Goal, Row, ratios, spread, table
from pyspark.sql import DataFrame, SparkSession
from servers import RedisServer

from mapstate import LIFETIME, Count, RollingWindows, Sum, newStream, opaque, open_reader
from mapstate.spark.driver.rolling import RollingGrouping, RollingState
from mapstate.spark.driver.window_rows import TILE

SECOND = 1_000_000
DAY = 86_400 * SECOND
END = time.time_ns() // 1000 // DAY * DAY - DAY  # of the history: rows of the future are set aside
KINDS = ("1 row", "20 rows", "hot")
WARM_UP = 3
SCHEMA = "at timestamp, card string, amount bigint"
HOUR, ALL = ("1 hour",), ("1 hour", "24 hours", "7 days", "30 days", LIFETIME)
TILES = (  # of a key that is never silent: how many, of how many seconds, how long before the end they begin
    (30, 86_400, 37 * 86_400),
    (24, 21_600, 7 * 86_400),
    (23, 3_600, 86_400),
    (12, 300, 3_600),
)


class OneShuffle(RollingState):
    """Rolling windows whose rows are spread by key first."""

    def __init__(self, branch: Any) -> None:
        super().__init__(branch)
        self.make_grouping = partial(_SpreadFirst, windows=self.windows)


class _SpreadFirst(RollingGrouping):
    def of(self, batch_df: DataFrame) -> DataFrame:
        assert self.partials is not None
        rows = batch_df.select("*", *self.keys).repartition(*self.places).groupBy(*self.places, TILE)
        return rows.agg(*self.values).sortWithinPartitions(*self.places, TILE)


def _write(folder: Path, number: int, cards: np.ndarray[Any, Any], times: np.ndarray[Any, Any]) -> None:
    columns = {
        "at": pa.array(times, pa.timestamp("us", tz="UTC")),
        "card": pa.array([f"card-{card}" for card in cards]),
        "amount": pa.array(times // SECOND % 1000 + cards % 90),
    }
    pq.write_table(pa.table(columns), folder / f"batch-{number:03d}.parquet", row_group_size=max(len(cards) // 4, 1))


def make_history(folder: Path, keys: int) -> None:
    """A row for each tile that a key has: all of them, the coarser and a few of the finer, or five."""
    draw = np.random.default_rng(7)
    seconds = [before - at * step for count, step, before in TILES for at in range(count)]
    starts = END - np.array(seconds) * SECOND
    usual = np.concatenate([np.arange(54), 54 + np.arange(0, 23, 2)])
    cards, times = [], []
    for card in range(keys):
        if card % 20 == 0:
            own = starts
        elif card % 20 <= 10:
            own = starts[usual]
        else:
            own = starts[draw.choice(30, 5, replace=False)]
        cards.append(np.full(len(own), card))
        times.append(own + draw.integers(0, 300) * SECOND)
    _write(folder, 0, np.concatenate(cards), np.concatenate(times))


def make_batch(folder: Path, number: int, keys: int, hot_rows: int) -> None:
    """One batch, a second of rows."""
    draw = np.random.default_rng(number)
    kind = KINDS[(number - WARM_UP) % len(KINDS)] if number >= WARM_UP else KINDS[0]
    if kind == "hot":
        many, few = hot_rows * 9 // 10, hot_rows // 10
        hot, others = np.arange(0, keys, 100), np.flatnonzero(np.arange(keys) % 100)
        cards = np.concatenate([draw.choice(hot, many), draw.choice(others, few)])
    else:
        cards = np.arange(keys * int(kind.split()[0])) % keys
    times = END + number * SECOND + draw.integers(0, SECOND, len(cards))
    _write(folder, number, draw.permutation(cards), times)


def contestants(spark: SparkSession, url: str, names: Sequence[str]) -> dict[str, Contestant]:
    """The states."""
    rows = newStream("rows", spark.createDataFrame([], SCHEMA))
    found: dict[str, Contestant] = {}
    for name in names:
        windows = {"plain": None, "recent": HOUR}.get(name, ALL)
        timed = rows if windows is None else rows.window(RollingWindows.of(*windows), timestampField="at")
        spec = opaque(url, name.replace(" ", "-"), serializer="msgpack")
        kept = timed.groupBy("card").persistentAggregate(spec, clicks=Count(), spend=Sum("amount"))
        if name == "one shuffle":
            kept.branch.make_driver = OneShuffle
        found[name] = kept
    return found


class Wire:
    """The bytes that Redis gets and sends while a contestant has its turn."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self.bytes: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def counted(self, name: str, contestant: Contestant) -> Contestant:
        def function(batch_df: DataFrame, batch_id: int) -> None:
            before = self._now()
            contestant(batch_df, batch_id)
            got, sent = (after - own for after, own in zip(self._now(), before, strict=True))
            self.bytes[name].append((got, sent))

        return function

    def _now(self) -> tuple[int, int]:
        found = self._client.info("stats")
        return found["total_net_input_bytes"], found["total_net_output_bytes"]

    def records(self, name: str, cards: Sequence[str]) -> int:
        """The stored bytes of these keys."""
        pipe = self._client.pipeline(transaction=False)
        for card in cards:
            pipe.strlen(f"{name}:{card}")
        return sum(pipe.execute())


def check(url: str, folder: Path, names: Sequence[str]) -> None:
    """Compare each key's whole count and sum, and those of an hour, with the rows."""
    rows, end = pq.read_table(folder / "input"), END + 300 * SECOND
    first = pa.scalar(end - 3600 * SECOND, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    whole, hour = (_counted(some) for some in (rows, rows.filter(pa.compute.greater_equal(rows["at"], first))))
    for name in names:
        with open_reader(url, name.replace(" ", "-")) as reader:
            if name == "plain":
                found = reader.multi_get(list(whole))
                assert found == [{"clicks": count, "spend": total} for count, total in whole.values()], name
                continue
            found = reader.multi_get(list(whole), at=dt.datetime.fromtimestamp(end // SECOND, dt.UTC))
        for card, values in zip(whole, found, strict=True):
            for suffix, right in (("1_hour", hour), ("lifetime", whole))[: 1 if name == "recent" else 2]:
                assert (values[f"clicks_{suffix}"], values[f"spend_{suffix}"]) == right[card], (name, card, suffix)


def _counted(rows: pa.Table) -> dict[str, tuple[int, int]]:
    grouped = rows.group_by("card").aggregate([("card", "count"), ("amount", "sum")])
    columns = (grouped[name].to_pylist() for name in ("card", "card_count", "amount_sum"))
    return {card: (count, total) for card, count, total in zip(*columns, strict=True)}


class Measured(NamedTuple):
    """By kind of batch and contestant the seconds, and the bytes that Redis got and sent.

    ``records`` has of each contestant the stored bytes of the keys of a hot batch: of all of them, and of hot keys.
    """

    seconds: dict[str, dict[str, list[float]]]
    wire: dict[str, dict[str, list[tuple[int, int]]]]
    records: dict[str, tuple[int, int]]


def measured(url: str, names: Sequence[str], turns: int, *, keys: int, hot_rows: int) -> Measured:
    """The contestants by turns, on Redis, or on SQLite without a URL."""
    spark = session(2, spark__sql__session__timeZone="UTC")
    wire = Wire(url) if url else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        (folder / "input").mkdir()
        batches = WARM_UP + len(KINDS) * (turns + 1)  # the first turn warms up, too
        make_history(folder / "input", keys)
        for number in range(1, batches):
            make_batch(folder / "input", number, keys, hot_rows)
        address = url or f"sqlite:///{folder}/state.db"
        states = contestants(spark, address, names)
        own = {name: one if wire is None else wire.counted(name, one) for name, one in states.items()}
        taken = Turns(list(own))
        run_streams(spark, folder, own, taken, schema=SCHEMA)
        check(address, folder, names)
        records = {}
        if wire is not None:
            rows = pq.read_table(folder / "input" / f"batch-{batches - 1:03d}.parquet")
            cards = list(dict.fromkeys(rows["card"].to_pylist()))
            hot = [card for card in cards if int(card[5:]) % 100 == 0]
            states_of = {name: name.replace(" ", "-") for name in names}
            records = {
                name: (wire.records(state, cards), wire.records(state, hot)) for name, state in states_of.items()
            }
    return Measured(_by_kind(taken.seconds), {} if wire is None else _by_kind(wire.bytes), records)


def _by_kind(of: dict[str, list[Any]]) -> dict[str, dict[str, list[Any]]]:
    first = WARM_UP + len(KINDS)
    return {kind: {name: one[first + at :: len(KINDS)] for name, one in of.items()} for at, kind in enumerate(KINDS)}


def ask(keys: int = 100_000, hot_rows: int = 50_000, turns: int = 7) -> Answer:
    with RedisServer().start() as server:
        names = ("plain", "rolling", "recent", "one shuffle")
        on_redis, sent, records = measured(server.url, names, turns, keys=keys, hot_rows=hot_rows)
    on_sqlite, _, _ = measured("", names[:2], turns, keys=keys, hot_rows=hot_rows)

    def bytes_of(name: str) -> list[float]:
        return [got for got, _ in sent["hot"][name]]

    def of(found: dict[str, dict[str, list[float]]], kind: str, one: str, other: str) -> list[float]:
        return ratios(found[kind][one], found[kind][other])

    rows = [
        Row(
            f"rolling windows on {store}, a batch of {keys:,} keys, {kind} each",
            "a plain state",
            of(found, kind, "rolling", "plain"),
            Goal("most", 4),
        )
        for store, found in (("Redis", on_redis), ("SQLite", on_sqlite))
        for kind in KINDS[:2]
    ]
    rows += [
        Row(
            f"rolling windows on {store}, {hot_rows:,} rows, of which 1 % of the keys get 90 %",
            "a plain state",
            of(found, "hot", "rolling", "plain"),
        )
        for store, found in (("Redis", on_redis), ("SQLite", on_sqlite))
    ]
    rows += [
        Row(
            "the same on Redis, seconds a batch",
            "1",
            on_redis["hot"]["rolling"],
            note="a commit each second needs less",
        ),
        Row(
            "the same on Redis",
            "with records of the last hour's tiles alone",
            of(on_redis, "hot", "rolling", "recent"),
            note="the most that a record of recent and one of older tiles could save",
        ),
        Row(
            "bytes that Redis gets, the same",
            "a plain state",
            ratios(bytes_of("rolling"), bytes_of("plain")),
        ),
        Row(
            "bytes that Redis gets, the same",
            "with records of the last hour's tiles alone",
            ratios(bytes_of("rolling"), bytes_of("recent")),
        ),
        *(
            Row(
                f"rows spread by key before tiles are combined, {kind} each",
                "after",
                of(on_redis, kind, "one shuffle", "rolling"),
                note="one shuffle instead of two",
            )
            for kind in KINDS[:2]
        ),
    ]
    lines = [
        (store, name, kind, spread(own, 1000), *(spread([one[at] for one in sent[kind][name]], 1e-6) for at in (0, 1)))
        if store == "Redis"
        else (store, name, kind, spread(own, 1000), "", "")
        for store, found in (("Redis", on_redis), ("SQLite", on_sqlite))
        for kind, contest in found.items()
        for name, own in contest.items()
    ]
    shares = "; ".join(
        f"{name}: {every / 1e6:.2f} MB in records, {hot / 1e6:.2f} of them in those of hot keys"
        for name, (every, hot) in records.items()
    )
    return Answer(
        rows,
        f"{turns} turns; {len(KINDS)} kinds of batches by turns, `local[2]`; the load of the machine was "
        f"{os.getloadavg()[1]:.0f}",
        f"Of the last hot batch, {shares}.\n\n"
        + table("store | contestant | batch | milliseconds | MB that Redis gets | MB that Redis sends", lines),
    )
