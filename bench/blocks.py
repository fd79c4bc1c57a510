"""A state with blocks beside one with a record per key, on Redis; `aerospike_floor` has them on Aerospike.

All are foreachBatch queries over the same files, with 32 keys a block:

    string         a record per key, with the defaults of a state
    by key first   the same, with `partial_aggregation="never"`: rows are aggregated once, as those of blocks are
    blocks         `blocks=` a thirty-second of the keys

The first batch writes every key. Each later one has 2.5 rows of each key that it touches: all of them, a tenth or a
hundredth. Figures are seconds of the batch function. Processor time is that of Spark, Python and Redis together. After
the last batch each key of each state is compared with a count of the rows. Reads are those of one thread.

`bench/model.py` takes what a key that a batch touches costs in blocks: processor time of Redis and of Python beside a
record per key, and bytes on the wire.
"""

from __future__ import annotations

from turns import Contestant, Processor, Turns, run_streams, session  # isort: skip

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from measuring import Answer, Row, ratios, spread, table, timed
from servers import RedisServer

from mapstate import Count, StateReader, newStream, opaque, open_reader

STRING, BY_KEY, BLOCKS = "string", "by key first", "blocks"
KEYS_OF_BLOCK = 32
RATE = 2.5
CHUNK = 50_000
READS = 40


@dataclass
class Shape:
    """A state of ``keys``, and batches that touch one in ``every`` of them."""

    keys: int
    every: int

    @property
    def touched(self) -> int:
        return self.keys // self.every

    @property
    def name(self) -> str:
        share = "all" if self.every == 1 else f"1 in {self.every}"
        return f"{share} of {self.keys:,} keys"

    def users(self, draw: np.random.Generator, *, is_first: bool) -> Any:
        """The number of each row's user, in an order of its own."""
        if is_first:
            return draw.permutation(self.keys)
        chosen = draw.permutation(self.keys)[: self.touched]
        return draw.permutation(np.resize(chosen, int(self.touched * RATE)))


@dataclass
class Server:
    """What a way spends of Redis: processor seconds and bytes in and out of each batch, and memory of a key."""

    seconds: list[float]
    wire: list[float]
    bytes_of_key: float = 0.0


@dataclass
class Measured:
    """By way: seconds of batches, processor seconds of all, what Redis spent, and seconds of reads."""

    seconds: dict[str, list[float]]
    spent: dict[str, list[dict[str, float]]]
    server: dict[str, Server]
    reads: dict[str, dict[str, list[float]]]

    def whole(self, way: str) -> list[float]:
        """Processor seconds of each turn."""
        return [sum(turn.values()) - turn["idle"] for turn in self.spent[way]]

    def python(self, way: str) -> float:
        """Processor seconds of Python in all turns, which is too coarse for one."""
        return sum(turn["Python"] for turn in self.spent[way])


class Spent(NamedTuple):
    """Of a store until now: processor seconds and bytes in and out; and how much memory it holds."""

    seconds: float
    wire: float
    memory: float


class Store(NamedTuple):
    """Where the states are. ``suffix`` is that of their names."""

    url: str
    spent: Callable[[], Spent]
    suffix: str = ""


def on_redis(spark: Any, shape: Shape, turns: int) -> Measured:
    """Compare on a server of its own."""
    with RedisServer().start() as server:

        def spent() -> Spent:
            with redis.Redis(port=server.port) as client:
                info: dict[str, Any] = client.info()
            wire = info["total_net_input_bytes"] + info["total_net_output_bytes"]
            return Spent(info["used_cpu_user"] + info["used_cpu_sys"], wire, info["used_memory"])

        return compared(spark, shape, turns, Store(server.url, spent))


def compared(spark: Any, shape: Shape, turns_wanted: int, store: Store) -> Measured:
    """Measure a shape, and check what all states hold."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder, draw, counts = Path(place), np.random.default_rng(7), np.zeros(shape.keys, dtype=int)
        (folder / "input").mkdir()
        for number in range(turns_wanted + 2):
            users = shape.users(draw, is_first=not number)
            counts += np.bincount(users, minlength=shape.keys)
            rows = pa.table({"user_id": pa.array([f"user-{user}" for user in users])})
            pq.write_table(rows, folder / "input" / f"batch-{number:03d}.parquet", row_group_size=len(users) // 4 or 1)
        stream = newStream("rows", spark.createDataFrame([], "user_id string")).groupBy("user_id")
        names = {STRING: "string", BY_KEY: "by-key", BLOCKS: "blocks"}
        names = {way: f"{name}{store.suffix}" for way, name in names.items()}
        specs = {
            STRING: opaque(store.url, names[STRING]),
            BY_KEY: opaque(store.url, names[BY_KEY], partial_aggregation="never"),
            BLOCKS: opaque(store.url, names[BLOCKS], blocks=shape.keys // KEYS_OF_BLOCK),
        }
        ways: dict[str, Contestant] = {way: stream.persistentAggregate(spec, n=Count()) for way, spec in specs.items()}
        servers = {way: Server([], []) for way in ways}
        turns, processor = Turns(list(ways)), Processor()
        counted = {
            way: weighed(store, shape, processor.counted(way, contestant), servers[way])
            for way, contestant in ways.items()
        }
        run_streams(spark, folder, counted, turns, schema="user_id string")
        of_reads = {way: names[way] for way in (STRING, BLOCKS)}
        reads = read(store.url, of_reads, counts, draw) if shape.every == 1 else {}
        for name in names.values():
            check(store.url, name, counts)
    return Measured(
        {way: own[2:] for way, own in turns.seconds.items()},
        {way: own[2:] for way, own in processor.seconds.items()},
        {way: Server(own.seconds[2:], own.wire[2:], own.bytes_of_key) for way, own in servers.items()},
        reads,
    )


def weighed(store: Store, shape: Shape, contestant: Contestant, server: Server) -> Contestant:
    """Keep what the keys of the first batch take in the store, and what each batch sends and gets."""

    def function(batch_df: Any, batch_id: int) -> None:
        before = store.spent()
        contestant(batch_df, batch_id)
        after = store.spent()
        server.seconds.append(after.seconds - before.seconds)
        server.wire.append(after.wire - before.wire)
        if not batch_id:
            server.bytes_of_key = (after.memory - before.memory) / shape.keys

    return function


def read(url: str, names: dict[str, str], counts: Any, draw: np.random.Generator) -> dict[str, dict[str, list[float]]]:
    """Seconds of reads of each way, by turns: of one key, of a thousand, and of all."""
    with ExitStack() as stack:
        readers = {way: stack.enter_context(open_reader(url, name)) for way, name in names.items()}
        seconds: dict[str, dict[str, list[float]]] = {
            way: {"get": [], "multi_get of 1,000": [], "scan": [], "to_arrow": []} for way in names
        }
        for turn in range(READS):
            users = [f"user-{user}" for user in draw.permutation(len(counts))[:1000]]
            for way, reader in readers.items():
                some = seconds[way]
                some["get"].append(timed(lambda: [reader.get(user) for user in users[:20]]) / 20)  # noqa: B023
                some["multi_get of 1,000"].append(timed(lambda: reader.multi_get(users)))  # noqa: B023
                if turn % 8 == 0:
                    some["scan"].append(timed(lambda: scanned(reader)))  # noqa: B023
                    some["to_arrow"].append(timed(reader.to_arrow))
    return seconds


def scanned(reader: StateReader) -> int:
    return sum(len(page) for page in reader.pages(10_000))


def check(url: str, name: str, counts: Any) -> None:
    """Check that a state has each key, with its count."""
    with open_reader(url, name) as reader:
        assert reader.key_count() == len(counts), f"{name} has another number of keys"
        for start in range(0, len(counts), CHUNK):
            some = counts[start : start + CHUNK]
            values = reader.multi_get([f"user-{start + at}" for at in range(len(some))])
            assert [value and value["n"] for value in values] == some.tolist(), f"{name} counted wrong"


def ask(turns: int = 12, keys: int = 400_000) -> Answer:
    rows, lines, reads, figures = [], [], [], {}
    spark = session()
    on_redis(spark, Shape(10_000, 1), 3)  # else Java compiles what the first plans run, while they are timed
    for shape in [Shape(keys, 1), Shape(keys, 4), Shape(keys, 10), Shape(keys, 100)]:
        measured = on_redis(spark, shape, turns)
        of_string = ratios(measured.seconds[BLOCKS], measured.seconds[STRING])
        of_by_key = ratios(measured.seconds[BLOCKS], measured.seconds[BY_KEY])
        spent = ratios(measured.whole(BLOCKS), measured.whole(STRING))
        of_server = ratios(measured.server[BLOCKS].seconds, measured.server[STRING].seconds)
        figures[f"blocks.server.{shape.every}"] = statistics.median(of_server)
        figures[f"blocks.python.{shape.every}"] = measured.python(BLOCKS) / measured.python(STRING)
        figures[f"blocks.wire.{shape.every}"] = statistics.median(measured.server[BLOCKS].wire) / shape.touched
        rows.append(Row(f"blocks, {shape.name}", "a record per key", of_string))
        figures[f"blocks.{shape.name}"] = statistics.median(of_string)
        milliseconds = [spread(measured.seconds[way], 1000) for way in (STRING, BY_KEY, BLOCKS)]
        of_processors = (spread(spent), spread(of_server))
        lines.append((shape.name, *milliseconds, spread(of_string), spread(of_by_key), *of_processors))
        print(*lines[-1], sep=" | ", flush=True)
        if shape.every > 1:
            continue
        for way_of_reading, seconds in measured.reads[BLOCKS].items():
            own = ratios(seconds, measured.reads[STRING][way_of_reading])
            reads.append(
                (
                    way_of_reading,
                    spread(measured.reads[STRING][way_of_reading], 1000),
                    spread(seconds, 1000),
                    spread(own),
                )
            )
        sizes = [measured.server[way].bytes_of_key for way in (STRING, BLOCKS)]
        figures["blocks.bytes"] = sizes[1]
        reads.append(("bytes of a key", *(f"{size:.1f}" for size in sizes), f"{sizes[1] / sizes[0]:.2f}"))
        print(*reads, sep="\n", flush=True)
    spark.stop()
    batches = table(
        "a batch touches | milliseconds, a record per key | aggregated once | blocks | of a record per key "
        "| of that aggregated once | processor time of a record per key | Redis's alone",
        lines,
    )
    return Answer(
        rows,
        f"{turns} turns after two to warm up; one count, {KEYS_OF_BLOCK} keys a block, {RATE:g} rows of each key that "
        "a batch touches; opaque on Redis, `local[2]`",
        f"{batches}\n\n{table('milliseconds | a record per key | blocks | of a record per key', reads)}",
        figures,
    )
