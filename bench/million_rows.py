"""A million rows over 400,000 keys a batch, on Spark with two threads and Redis.

Every contestant is a streaming query of its own over the same files:

    noop          the aggregation alone, into Spark's noop sink
    no store      the same, then tasks in Python that only read it
    packed        the same, then commands of equal payloads, packed beforehand and read ahead: the tasks only send
                  them, in one order in each batch, and read the replies. No library that reads and writes each key
                  can be faster
    floor         the same, then raw MGET and MSET of equal payloads, one after the other, in the order that comes
    mapstate      opaque, transactional, non-transactional; and opaque in blocks of 32 keys
    by hand       pipelined INCRBY from foreachPartition; not exactly once
    stateful      Spark's own stateful aggregation on RocksDB, update mode, and an MSET upsert

Figures are seconds of the batch function; Spark's own bookkeeping around it is the same for all. A second table says
which process spent the processor time: a store that costs less could win at most its share.
"""

from __future__ import annotations

from turns import Contestant, Processor, Turns, aggregated, make_file, no_store, noop, run_streams, session  # isort: skip

import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import redis
from measuring import Answer, Goal, Row, ratios, spread, table
from pyspark import TaskContext
from servers import RedisServer

from mapstate import Count, newStream, non_transactional, opaque, open_reader, transactional
from mapstate.backends.redis.layout import StringLayout

CHUNK = 2000
ABOVE = {
    "stateful": "Spark's stateful aggregation on RocksDB with MSET upsert",
    "by hand": "pipelined INCRBY by hand",
}
BOUNDS = {
    "no store": ("tasks in Python without a store", "a store that takes no time"),
    "packed": ("the same plan, the commands packed beforehand", "a library that takes no time"),
}
PAYLOAD = b"[280274529,3,2]"  # the length of an opaque record of a count
SPECS = {"opaque": opaque, "transactional": transactional, "non-transactional": non_transactional}
BLOCKS = "blocks"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def floor(url: str) -> Contestant:
    """Read and write as many bytes as an opaque state, with redis-py and hiredis, a connection for each task."""

    def raw(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = redis.Redis.from_url(url)
        done = 0
        for batch in batches:
            for start in range(0, batch.num_rows, CHUNK):
                keys = ["floor:" + user for user in batch.column(0).slice(start, CHUNK).to_pylist()]
                client.mget(keys)
                client.mset(dict.fromkeys(keys, PAYLOAD))
                done += len(keys)
        client.close()
        yield pa.RecordBatch.from_arrays([pa.array([done])], ["done"])

    return lambda batch_df, _: aggregated(batch_df).mapInArrow(raw, "done bigint").collect()


def packed(url: str, folder: Path, keys: int, partitions: int) -> Contestant:
    """Send each task's share of all keys, chunk by chunk as its rows come, whichever those are."""
    layout = StringLayout("packed", 2**29, b"packed:", None)
    for partition in range(partitions):
        share, commands = [f"user-{key}" for key in range(partition, keys, partitions)], []
        for start in range(0, len(share), CHUNK):
            names = layout.pack(share[start : start + CHUNK])
            commands.append((layout.get(names), layout.put(names, [PAYLOAD] * len(names))[0]))
        (folder / f"packed-{partition}").write_bytes(msgspec.msgpack.encode(commands))

    def raw(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        name = f"packed-{TaskContext.get().partitionId()}"
        commands = msgspec.msgpack.decode((folder / name).read_bytes(), type=list[tuple[bytes, bytes]])
        conn = redis.Redis.from_url(url).connection_pool.get_connection()
        rows = at = 0
        conn.send_packed_command([commands[0][0]], check_health=False)
        for come in chain((batch.num_rows for batch in batches), [len(commands) * CHUNK]):
            rows += come
            while at < len(commands) and (at + 1) * CHUNK <= rows:
                if at + 1 < len(commands):
                    conn.send_packed_command([commands[at + 1][0]], check_health=False)
                if at > 1:  # of the put before the last one
                    assert conn.read_response() == b"OK"
                assert type(conn.read_response()) is list
                conn.send_packed_command([commands[at][1]], check_health=False)
                at += 1
        for _ in range(min(at, 2)):
            assert conn.read_response() == b"OK"
        conn.disconnect()
        yield pa.RecordBatch.from_arrays([pa.array([at])], ["done"])

    return lambda batch_df, _: aggregated(batch_df).mapInArrow(raw, "done bigint").collect()


def by_hand(url: str) -> Contestant:
    """Write by INCRBY, as a job does that ignores crashes."""

    def incr(rows: Iterator[Any]) -> None:
        client = redis.Redis.from_url(url)
        pipe = client.pipeline(transaction=False)
        for at, row in enumerate(rows, 1):
            pipe.incrby("hand:" + row["user_id"], row["n"])
            if at % CHUNK == 0:
                pipe.execute()
        pipe.execute()
        client.close()

    return lambda batch_df, _: aggregated(batch_df).foreachPartition(incr)


def upsert(url: str) -> Contestant:
    """Write the rows of Spark's own state."""

    def raw(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = redis.Redis.from_url(url)
        for batch in batches:
            for start in range(0, batch.num_rows, CHUNK):
                part = batch.slice(start, CHUNK)
                keys = ["spark:" + user for user in part.column(0).to_pylist()]
                client.mset(dict(zip(keys, part.column(1).to_pylist(), strict=True)))
        client.close()
        yield pa.RecordBatch.from_arrays([pa.array([0])], ["done"])

    return lambda batch_df, _: batch_df.mapInArrow(raw, "done bigint").collect()


def check(url: str, batches: int, rows: int, keys: int) -> None:
    """Check that every contestant's store holds the count of every key."""
    each, more = divmod(rows, keys)
    expected = {f"user-{key}": batches * (each + (key < more)) for key in range(keys)}
    users = list(expected)
    client = redis.Redis.from_url(url)
    for start in range(0, len(users), 50_000):
        some = users[start : start + 50_000]
        for prefix in ("packed:", "floor:"):
            assert client.mget([prefix + user for user in some]) == [PAYLOAD] * len(some), f"{prefix} is not whole"
        for prefix in ("hand:", "spark:"):
            values = [int(value or 0) for value in client.mget([prefix + user for user in some])]
            assert values == [expected[user] for user in some], f"{prefix} counted wrong"
    client.close()
    for state in (*SPECS, BLOCKS):
        with open_reader(url, state) as reader:
            for start in range(0, len(users), 50_000):
                some = users[start : start + 50_000]
                assert reader.multi_get(some) == [{"n": expected[user]} for user in some], f"{state} counted wrong"


def ask(batches: int = 7, rows: int = 1_000_000, keys: int = 400_000, partitions: int = 2) -> Answer:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, RedisServer().start() as server:
        folder, url = Path(place), server.url
        (folder / "input").mkdir()
        for number in range(batches + 1):
            make_file(folder / "input", number, rows, keys)
        spark = session(partitions, spark__sql__streaming__stateStore__providerClass=ROCKSDB)
        by_user = newStream("users", spark.createDataFrame([], "user_id string")).groupBy("user_id")
        specs = SPECS | {BLOCKS: partial(opaque, blocks=keys // 32)}
        contestants: dict[str, Contestant] = {
            "noop": noop,
            "no store": no_store,
            "packed": packed(url, folder, keys, partitions),
            "floor": floor(url),
            **{name: by_user.persistentAggregate(spec(url, name), n=Count()) for name, spec in specs.items()},
            "by hand": by_hand(url),
            "stateful": upsert(url),
        }
        turns, processor = Turns(list(contestants)), Processor()
        counted = {name: processor.counted(name, one) for name, one in contestants.items()}
        run_streams(spark, folder, counted, turns, stateful={"stateful": aggregated})
        spark.stop()
        check(url, batches + 1, rows, keys)
    seconds = {name: own[1:] for name, own in turns.seconds.items()}
    spent = {name: own[1:] for name, own in processor.seconds.items()}
    kinds = list(spent["opaque"][0])
    ours, subject = seconds["opaque"], f"opaque on Redis, {rows:,} rows over {keys:,} keys a batch, `local[2]`"
    return Answer(
        [
            Row(subject, "floor: the same plan, raw MGET + MSET", ratios(ours, seconds["floor"]), Goal("most", 0.95)),
            Row(subject, BOUNDS["packed"][0], ratios(ours, seconds["packed"]), Goal("most", 1.1)),
            Row(ABOVE["stateful"], "opaque", ratios(seconds["stateful"], ours), Goal("least", 3)),
            Row(ABOVE["by hand"], "opaque", ratios(seconds["by hand"], ours), Goal("least", 2.5)),
            *(
                Row(above, beside, ratios(seconds[name], seconds[bound]), note=f"what its goal would be for {what_not}")
                for bound, (beside, what_not) in BOUNDS.items()
                for name, above in ABOVE.items()
            ),
            *(Row(above, BLOCKS, ratios(seconds[name], seconds[BLOCKS])) for name, above in ABOVE.items()),
            Row(BLOCKS, "opaque", ratios(seconds[BLOCKS], ours), Goal("most", 0.7)),
            Row(ABOVE["by hand"], "floor", ratios(seconds["by hand"], seconds["floor"])),
            Row("transactional", "floor", ratios(seconds["transactional"], seconds["floor"])),
            Row("non-transactional", "floor", ratios(seconds["non-transactional"], seconds["floor"])),
        ],
        f"{batches} batches after one to warm up; {partitions} shuffle partitions, chunks of {CHUNK:,} keys; of each "
        "process its seconds of processor",
        table(
            f"contestant | seconds a batch | {' | '.join(kinds)}",
            [
                (name, spread(own), *(f"{statistics.median(turn[kind] for turn in spent[name]):.2f}" for kind in kinds))
                for name, own in seconds.items()
            ],
        ),
        {f"million_rows.{name}": statistics.median(own) for name, own in seconds.items()},
    )
