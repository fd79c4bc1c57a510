"""How old is what a reader gets: from a row's arrival in Kafka until it is in a `get`.

One process sends rows of 500 keys to a broker, and ten times a second a row of one more key, which has a number.
Another one asks for that key all the time. So it knows when each of those rows is in an answer. The contestants run
one after the other, as a streaming query of its own each, at a trigger of a second and as fast as batches go:

    plain         an opaque state of a count, a sum and the greatest number; `get`
    rolling       the same, of 1 hour, 24 hours, 7 days, 30 days and all time; `get`
    Spark's own   withWatermark and groupBy(window) of 1 hour in update mode on RocksDB, and a foreachBatch that
                  collects the rows and writes them to Redis by MSET; GET

An empty batch is one whose rows are all filtered out. It is timed by itself, as a function, beside the same rows into
Spark's noop sink. Without Kafka's jars, which need Maven, nothing is asked of Kafka.
"""

from __future__ import annotations

from turns import noop, session  # isort: skip

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import redis
from kafka_broker import KafkaBroker, jars
from measuring import ROOT, Answer, Row, by_turns, ratios, spread, table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from servers import RedisServer, wait_until

from mapstate import LIFETIME, Count, Max, RollingWindows, Sum, newStream, opaque, open_reader
from mapstate.errors import StateNotFoundError

KEYS, PROBE, TOPIC = 500, "probe", "clicks"
TRIGGERS = {"a batch each second": "1 second", "as fast as it goes": "0 seconds"}
NEEDED = ("commons-pool2", "kafka-clients", "spark-sql-kafka", "spark-token-provider")
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
WINDOWS = RollingWindows.of("1 hour", "24 hours", "7 days", "30 days", LIFETIME)
VALUES: dict[str, Any] = {"clicks": Count(), "spend": Sum("amount"), "last": Max("number")}
SPARKS = "Spark's own"


def send() -> None:
    """Send rows at the rate of the command line, and say when each numbered one was sent, until the process ends."""
    from confluent_kafka import Producer

    producer, rate = Producer({"bootstrap.servers": sys.argv[1], "linger.ms": 0}), int(sys.argv[2])
    begin, rows = time.time(), 0
    for number in count():
        while rows < rate * (number + 1) // 10:
            row = {"card": f"card-{rows * 7919 % KEYS}", "amount": rows % 900, "at": int(time.time() * 1e6)}
            producer.produce(TOPIC, json.dumps(row))
            rows += 1
        now = time.time()
        producer.produce(TOPIC, json.dumps({"card": PROBE, "amount": 1, "number": number, "at": int(now * 1e6)}))
        producer.flush()
        print(number, now, flush=True)
        time.sleep(max(0.0, begin + (number + 1) / 10 - time.time()))


def ask_for_the_probe() -> None:
    """Read the key in the way of the command line, and say when a greater number is there, until the process ends."""
    url, state, contestant = sys.argv[1:]
    read = _by_get(url, state, contestant) if contestant != SPARKS else _by_redis(url)
    known = -1
    while True:
        number = read()
        if number is not None and number > known:
            known = number
            print(number, time.time(), flush=True)
        time.sleep(0.001)


def _by_redis(url: str) -> Callable[[], int | None]:
    client = redis.Redis.from_url(url)

    def read() -> int | None:
        found = client.get(f"spark:{PROBE}")
        return None if found is None else int(found.split(b",")[2])

    return read


def _by_get(url: str, state: str, contestant: str) -> Callable[[], int | None]:
    def opened() -> Any:
        try:
            return open_reader(url, state)
        except StateNotFoundError:
            return None

    reader = wait_until(opened, f"state {state} is there", 120)

    def read() -> int | None:
        found = reader.get(PROBE)
        return None if found is None else found["last" if contestant == "plain" else "last_1_hour"]

    return read


@contextmanager
def saying(function: str, *words: Any) -> Iterator[Path]:
    """The function in a process of its own; the file of what it says."""
    with tempfile.NamedTemporaryFile("r") as file:
        command = [sys.executable, "-c", f"import freshness; freshness.{function}()", *map(str, words)]
        with Path(file.name).open("w") as out, subprocess.Popen(command, cwd=ROOT / "bench", stdout=out) as process:
            try:
                yield Path(file.name)
                assert process.poll() is None, f"{function} has ended"
            finally:
                process.kill()


def said(file: Path) -> list[tuple[int, float]]:
    """The whole lines so far: a number, and a time."""
    lines = file.read_text().split("\n")[:-1]
    return [(int(number), float(at)) for number, at in (line.split() for line in lines)]


def upsert(url: str) -> Callable[[DataFrame, int], None]:
    """Write the rows of Spark's own windows, the last window of a key last."""
    client = redis.Redis.from_url(url)

    def write(batch_df: DataFrame, _batch_id: int) -> None:
        rows = batch_df.select("window.start", "card", "clicks", "spend", "last").collect()
        if rows:
            client.mset({f"spark:{row.card}": f"{row.clicks},{row.spend},{row.last}" for row in sorted(rows)})

    return write


def started(rows: DataFrame, url: str, state: str, contestant: str, trigger: str) -> Any:
    """The query of a contestant."""
    checkpoint = tempfile.mkdtemp(prefix="mapstate-bench-")
    if contestant == SPARKS:
        windows = rows.withWatermark("at", "10 minutes").groupBy(F.window("at", "1 hour"), "card")
        values = windows.agg(
            F.count(F.lit(1)).alias("clicks"), F.sum("amount").alias("spend"), F.max("number").alias("last")
        )
        writer = values.writeStream.outputMode("update").foreachBatch(upsert(url)).trigger(processingTime=trigger)
        return writer.option("checkpointLocation", checkpoint).start()
    kept = _kept(rows, url, state, rolling=contestant == "rolling")
    return kept.start(checkpoint, trigger={"processingTime": trigger})


def _kept(rows: DataFrame, url: str, state: str, *, rolling: bool) -> Any:
    stream = newStream("rows", rows)
    timed = stream.window(WINDOWS, timestampField="at") if rolling else stream
    return timed.groupBy("card").persistentAggregate(opaque(url, state, serializer="msgpack"), **VALUES)


def ages(sent: Path, seen: Path, since: float, until: float) -> list[float]:
    """The milliseconds from when a row was sent until a reader had it, of the rows that were sent in this time."""
    answers, found, at = said(seen), [], 0
    for number, when in said(sent):
        if since <= when < until:
            while at < len(answers) and answers[at][0] < number:
                at += 1
            assert at < len(answers), f"row {number} was never seen"
            found.append((answers[at][1] - when) * 1000)
    return found


def from_kafka(spark: SparkSession, url: str, address: str, turns: int, *, rate: int, seconds: int) -> Any:
    """By trigger and contestant the ages of the rows of each turn."""
    schema = "card string, amount bigint, number bigint, at bigint"
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", address)
    parsed = source.option("subscribe", TOPIC).load().select(F.from_json(F.expr("string(value)"), schema).alias("row"))
    rows = parsed.select("row.card", "row.amount", "row.number", F.timestamp_micros("row.at").alias("at"))
    found: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    names = ["plain", "rolling", SPARKS]
    with saying("send", address, rate) as sent:
        wait_until(lambda: len(said(sent)) > 5, "rows are sent")
        for turn in range(turns):
            for how, trigger in TRIGGERS.items():
                for name in (*names[turn % 3 :], *names[: turn % 3]):
                    state = f"{name}-{turn}-{trigger[0]}".replace(" ", "-")
                    query = started(rows, url, state, name, trigger)
                    with saying("ask_for_the_probe", url, state, name) as seen:
                        first = said(sent)[-1][0]
                        is_there = partial(_is_ahead, seen, first + 80)  # eight seconds of batches warm up
                        wait_until(is_there, f"{name} reads rows", 180)
                        since = time.time()
                        time.sleep(seconds)
                        until = time.time()
                        last = max(number for number, when in said(sent) if when < until)
                        wait_until(partial(_is_ahead, seen, last), "all rows are seen", 60)
                        found[how][name].append(ages(sent, seen, since, until))
                    query.stop()
    return found


def _is_ahead(seen: Path, number: int) -> bool:
    return any(own >= number for own, _ in said(seen)[-1:])


def empty_batches(spark: SparkSession, url: str, turns: int) -> dict[str, list[float]]:
    """The seconds of a batch without rows."""
    frame = (
        spark.range(1000, numPartitions=2)
        .where("rand() < 0")
        .selectExpr(
            "string(id) AS card", "id AS amount", "id AS number", "timestamp_micros(id) AS at", "string(id) AS user_id"
        )
    )
    ways: dict[str, Callable[[], Any]] = {"noop": partial(noop, frame, 0)}
    for name in ("plain", "rolling"):
        state = _kept(spark.createDataFrame([], frame.schema), url, f"empty-{name}", rolling=name == "rolling")
        ways[name] = partial(lambda state, ids: state(frame, next(ids)), state, count())
    return by_turns(ways, turns, warm_up=10)


def ask(turns: int = 3, rate: int = 1000, seconds: int = 20, empty: int = 40) -> Answer:
    connector = jars("connector")
    has_kafka = connector is not None and jars("broker") is not None
    config: dict[str, Any] = {
        "spark__sql__streaming__stateStore__providerClass": ROCKSDB,
        "spark__sql__streaming__noDataMicroBatches__enabled": False,
        "spark__sql__session__timeZone": "UTC",
    }
    if connector is not None:
        needed = [str(jar) for jar in sorted(connector.iterdir()) if jar.name.startswith(NEEDED)]
        config["spark__driver__extraClassPath"] = ":".join(needed)
    spark = session(2, **config)
    found: Any = {}
    with RedisServer().start() as server:
        without_rows = empty_batches(spark, server.url, empty)
        if has_kafka:
            with KafkaBroker() as broker:
                made_topic(broker.address)
                found = from_kafka(spark, server.url, broker.address, turns, rate=rate, seconds=seconds)
    spark.stop()

    def percentiles(how: str, name: str, percent: int) -> list[float]:
        return [statistics.quantiles(own, n=100)[percent - 1] for own in found[how][name]] if found else []

    rows = [
        Row(
            f"a row is in a reader's answer, {name}, {how}, p{percent}, milliseconds",
            "1",
            percentiles(how, name, percent),
        )
        for how in TRIGGERS
        for percent in (50, 99)
        for name in ("plain", "rolling", SPARKS)
    ]
    rows += [
        Row(f"an empty batch, {name}", "its rows into `noop`", ratios(without_rows[name], without_rows["noop"]))
        for name in ("plain", "rolling")
    ]
    return Answer(
        rows,
        f"{turns} turns of {seconds} seconds with {rate:,} rows a second over {KEYS} keys, after 8 seconds to warm up; "
        f"`local[2]`; broker, source and reader on the same machine; its load was {os.getloadavg()[1]:.0f}",
        table("empty batch | milliseconds", [(name, spread(own, 1000)) for name, own in without_rows.items()]),
    )


def made_topic(address: str) -> None:
    """The topic, of two partitions."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": address})
    for made in admin.create_topics([NewTopic(TOPIC, num_partitions=2)]).values():
        made.result()
