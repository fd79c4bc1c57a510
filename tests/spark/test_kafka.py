"""examples/kafka_orders on a real broker: driver and broker killed, a checkpoint lost, records gone."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing, contextmanager
from datetime import datetime

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from kafka_broker import EXAMPLE, KafkaBroker, jars
from processes import with_fast_java

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.errors import StateNotFoundError
from mapstate.operations.checkpoint import rewind
from mapstate.protocol.ledger import Ledger
from mapstate.testing import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900)]  # of many waits

NEEDED = ("commons-pool2", "kafka-clients", "spark-sql-kafka", "spark-token-provider")


@pytest.fixture(scope="module")
def broker():
    if jars("broker") is None or jars("connector") is None:
        pytest.skip("Kafka's jars cannot be had here: they need Maven, see examples/kafka_orders")
    with KafkaBroker() as one:
        yield one


class Orders:
    """One job with its state and its checkpoint, and all that was sent to the broker so far."""

    def __init__(self, broker, url, folder):
        self.broker, self.url, self.folder = broker, url, folder
        self.admin = AdminClient({"bootstrap.servers": broker.address})
        self.sent = {name: Counter() for name in ("orders", "revenue", "by_minute")}
        self.first = self.runs = 0
        self.checkpoint = folder / "checkpoint"

    @contextmanager
    def producing(self, number, rate=20_000):
        """A producer in a process of its own, which has sent all at the end."""
        counts = self.folder / f"counts-{self.first}.json"
        options = {"kafka": self.broker.address, "orders": number, "first": self.first, "rate": rate, "counts": counts}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        with subprocess.Popen([sys.executable, str(EXAMPLE / "producer.py"), *words]) as process:
            yield
            assert process.wait(240) == 0
        for name, found in json.loads(counts.read_text()).items():
            self.sent[name].update(found)
        self.first += number

    @contextmanager
    def job(self, *options, program=EXAMPLE / "job.py"):
        """The job in a process group of its own, killed at the end if it still runs."""
        self.runs += 1
        log = self.folder / f"job-{self.runs}.log"
        connector = jars("connector")
        needed = [str(jar) for jar in sorted(connector.iterdir()) if jar.name.startswith(NEEDED)]
        assert len(needed) == len(NEEDED)
        conf = {"spark.driver.extraClassPath": ":".join(needed), "spark.ui.enabled": "false"}
        conf |= {"spark.sql.shuffle.partitions": "2", "spark.master": "local[2]"}
        words = [f"--conf {shlex.quote(f'{name}={value}')}" for name, value in conf.items()]
        given = ["--kafka", self.broker.address, "--store", self.url, "--checkpoint", str(self.checkpoint), *options]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, str(program), *given],
                stdout=out,
                stderr=out,
                env=with_fast_java() | {"PYSPARK_SUBMIT_ARGS": " ".join([*words, "pyspark-shell"])},
                start_new_session=True,
            )
        process.log = log  # type: ignore[attr-defined]
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(self, *options):
        """The job to the end of what is there."""
        with self.job("--once", *options) as process:
            assert process.wait(180) == 0, process.log.read_text()[-4000:]

    def counted(self):
        """How many orders count."""
        try:
            with open_reader(self.url, "orders") as reader:
                return sum(value["orders"] for _, value in reader.scan())
        except StateNotFoundError:
            return 0

    def until(self, process, number):
        """At least so many orders count, while the job lives."""
        wait_for(lambda: process.poll() is not None or self.counted() >= number, f"{number} orders", 180)
        assert process.poll() is None, process.log.read_text()[-4000:]

    def check(self):
        """All that was sent counts, each once, in both states, in the topic of the totals, and in the offsets."""
        with open_reader(self.url, "orders") as reader:
            found = {"|".join(key): value for key, value in reader.scan()}
            ledger = reader.ledger()
        assert {key: value["orders"] for key, value in found.items()} == self.sent["orders"]
        assert {key: value["revenue"] for key, value in found.items()} == self.sent["revenue"]
        with open_reader(self.url, "orders_by_minute") as reader:
            by_minute = {f"{key[1]}|{key[0].isoformat()}": value["orders"] for key, value in reader.scan()}
            late = sum(report.rows_late for report in reader.reports())
        assert late == 0
        assert by_minute == self.sent["by_minute"]
        assert self.last_totals() == found
        assert json.loads(ledger.last_commit.offsets) == [{"orders": self.ends("orders")}]

    def remove(self, partition, start, end):
        """What retention does: the records up to ``end`` go, and those from ``start`` on are to count no more."""
        with closing(self.consumer()) as consumer:
            consumer.assign([TopicPartition("orders", partition, start)])
            taken = []
            while len(taken) < end - start:
                taken += consumer.consume(end - start - len(taken), 10)
        for record in taken:
            order, ((_, country),) = json.loads(record.value()), record.headers()
            total, minute = f"{order['product']}|{country.decode()}", datetime.fromisoformat(order["at"])
            by_minute = f"{order['product']}|{minute.replace(second=0, microsecond=0).isoformat()}"
            self.sent["orders"][total] -= 1
            self.sent["revenue"][total] -= order["amount"]
            self.sent["by_minute"][by_minute] -= 1
        self.sent = {name: +found for name, found in self.sent.items()}
        for done in self.admin.delete_records([TopicPartition("orders", partition, end)]).values():
            done.result()

    def reports(self):
        """The reports of the batches, the oldest first."""
        with open_reader(self.url, "orders") as reader:
            return reader.reports()[::-1]

    def begin_anew(self):
        """The topics are deleted."""
        admin, names = self.admin, {"orders", "totals"}
        there = [name for name in admin.list_topics(timeout=60).topics if name in names]
        for done in (admin.delete_topics(there) if there else {}).values():
            done.result()
        wait_for(lambda: not names & admin.list_topics(timeout=60).topics.keys(), "no topics", 60)

    def ends(self, topic):
        """The end of each partition, as Kafka says it."""
        with closing(self.consumer()) as consumer:
            names = consumer.list_topics(topic, timeout=60).topics[topic].partitions
            return {str(at): consumer.get_watermark_offsets(TopicPartition(topic, at), 60)[1] for at in names}

    def last_totals(self):
        """The last total of each key."""
        ends = {int(at): end for at, end in self.ends("totals").items() if end}
        newest = {}
        with closing(self.consumer()) as consumer:
            consumer.assign([TopicPartition("totals", at, OFFSET_BEGINNING) for at in ends])
            left = sum(ends.values())
            while left:
                for record in consumer.consume(left, 10):
                    assert record.error() is None
                    newest[record.key().decode()] = json.loads(record.value())
                    left -= 1
        return newest

    def consumer(self):
        return Consumer({"bootstrap.servers": self.broker.address, "group.id": "test", "enable.auto.commit": False})


@pytest.fixture
def orders(broker, redis_url, tmp_path):
    one = Orders(broker, redis_url, tmp_path)
    one.begin_anew()
    return one


def test_orders_count_once_though_driver_and_broker_are_killed(orders, rounds):
    number, most = rounds(12_000, 30_000), rounds("2000", "3000")
    with orders.producing(number, rate=1_500):
        for least in rounds([], [2_000, 8_000]):
            with orders.job("--most", most) as process:
                orders.until(process, least)
        with orders.job("--most", most) as process:  # which is killed at the end, too
            orders.until(process, 4 * number // 10)
            orders.broker.kill()
            orders.broker.start()
            orders.until(process, 2 * number // 3)
    orders.run()
    orders.check()


@pytest.mark.full
def test_a_new_checkpoint_goes_on_at_the_offsets_of_the_state(orders):
    with orders.producing(5_000):
        pass
    orders.run("--most", "2000")
    orders.check()
    orders.checkpoint = orders.folder / "another"
    with orders.producing(3_000):
        pass
    with orders.job("--once") as process:
        assert process.wait(180) != 0
    assert "StateOwnershipError" in process.log.read_text()
    assert orders.counted() == 5_000
    orders.checkpoint = orders.folder / "third"
    orders.run("--where-the-state-ends")
    orders.check()


@pytest.mark.full
def test_a_store_that_was_put_back_reads_the_orders_since_once_more(orders, redis_server):
    with orders.producing(2_000):
        pass
    orders.run()
    with redis_server.client() as client:
        kept = {key: client.dump(key) for key in client.scan_iter()}
    with orders.producing(3_000):
        pass
    orders.run("--most", "1000")
    with redis_server.client() as client:
        client.flushall()
        for key, data in kept.items():
            client.restore(key, 0, data)
    with orders.job("--once") as process:
        assert process.wait(180) != 0
    assert "Rewind the checkpoint" in process.log.read_text()
    rewind(orders.url, "orders", orders.checkpoint)
    orders.run()
    orders.check()


@pytest.mark.full
def test_a_batch_that_is_taken_back_is_read_again_from_its_own_offsets(orders):
    with orders.producing(5_000):
        pass
    orders.run("--most", "2000")
    for state in ("orders", "orders_by_minute"):
        Ledger(resolve(orders.url).open(state), state).rollback()
    assert orders.counted() < 5_000
    rewind(orders.url, "orders", orders.checkpoint)
    orders.run()
    orders.check()


@pytest.mark.full
def test_records_that_kafka_has_removed_end_the_job_and_nothing_of_the_batch_counts(orders):
    with orders.producing(2_000):
        pass
    orders.run()
    with orders.producing(2_000):
        pass
    ends = [TopicPartition("orders", int(at), end) for at, end in orders.ends("orders").items()]
    for done in orders.admin.delete_records(ends).values():
        done.result()
    with orders.producing(1_000):
        pass
    with orders.job("--once") as process:
        assert process.wait(180) != 0
    assert "Some data may have been lost" in process.log.read_text()
    assert orders.counted() == 2_000


@pytest.mark.full
def test_without_the_records_that_retention_took_all_others_count_once(orders):
    """From "earliest" the other partitions would count twice, from "latest" the rest would be lost."""
    with orders.producing(2_000):
        pass
    orders.run("--most", "700")
    ends = orders.ends("orders")
    with orders.producing(2_000):
        pass
    orders.remove(1, ends["1"], ends["1"] + 50)
    orders.checkpoint = orders.folder / "another"
    with orders.job("--once", "--where-the-state-ends") as process:
        assert process.wait(180) == 1
    log = process.log.read_text()
    assert f"topic orders, partition 1: offsets {ends['1']} to below {ends['1'] + 50} are removed" in log
    assert f"(('orders', 1, {ends['1']}, {ends['1'] + 50}),)" in log
    assert orders.counted() == 2_000
    orders.run("--where-the-state-ends", "--accept-loss")
    assert orders.counted() == 3_950
    orders.check()


@pytest.mark.full
def test_a_partition_that_was_added_is_read_from_its_first_record(orders):
    with orders.producing(2_000):
        pass
    orders.run()
    orders.admin.create_partitions([NewPartitions("orders", 5)])["orders"].result()
    wait_for(lambda: len(orders.ends("orders")) == 5, "five partitions", 60)
    with orders.producing(2_000):
        pass
    assert min(orders.ends("orders").values()) > 0
    orders.checkpoint = orders.folder / "another"
    orders.run("--where-the-state-ends")
    orders.check()


@pytest.mark.full
def test_orders_of_aborted_transactions_do_not_count_and_their_offsets_are_passed(orders):
    with orders.producing(1_000):
        pass
    producer = Producer({"bootstrap.servers": orders.broker.address, "transactional.id": "aborts"})
    producer.init_transactions(60)
    for _ in range(2):
        producer.begin_transaction()
        for at in range(100):
            order = {"product": "never", "amount": at, "at": "2026-01-01T00:00:01+00:00"}
            producer.produce("orders", json.dumps(order), headers={"country": "gr"}, partition=at % 3)
        producer.flush(60)
        producer.abort_transaction(60)
    with orders.producing(1_000):
        pass
    orders.run()
    orders.check()
    (report,) = orders.reports()
    assert (report.rows, report.offsets_passed) == (2_000, 2_000 + 2 * (100 + 3))  # each abort is a record, too


STARTS = """
import sys, threading
from pyspark.sql import SparkSession
from mapstate import Count, newStream, opaque

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
spark = SparkSession.builder.getOrCreate()

def kafka(**more):
    frame = spark.readStream.format("kafka").option("kafka.bootstrap.servers", options["--kafka"]).options(**more)
    return frame.load().selectExpr("topic")

one = kafka(startingTimestamp="1", subscribe="orders")
other = kafka(startingOffsets="earliest", subscribePattern="tot.*")
files = spark.readStream.text(options["--files"]).selectExpr("'file' topic")
table = spark.createDataFrame([("orders",), ("totals",), ("file",)], "topic string")
every = one.union(files).union(other).join(table, "topic")
counts = newStream("topics", every).groupBy("topic").persistentAggregate(opaque(options["--store"]), n=Count())
if options["--run"] == "yes":
    counts.start(options["--checkpoint"], trigger={"availableNow": True}).awaitTermination()

def ask():
    for start in counts.starting_offsets():
        print("start", start and start.json, start and start.lost)

asks = threading.Thread(target=ask)  # of which Spark knows no session
asks.start()
asks.join()
"""


@pytest.mark.full
def test_each_source_has_its_start_and_a_topic_that_was_made_anew_has_none(orders):
    with orders.producing(300):
        pass
    program, files = orders.folder / "starts.py", orders.folder / "files"
    program.write_text(STARTS)
    files.mkdir()
    (files / "one").write_text("line\n")

    def starts(run="no"):
        with orders.job("--files", str(files), "--run", run, program=program) as process:
            process.wait(180)
        return process.log.read_text()

    log = starts("yes")
    found = [line.split(" ", 1)[1] for line in log.splitlines() if line.startswith("start ")]
    ends = {topic: json.dumps({topic: orders.ends(topic)}) for topic in ("orders", "totals")}
    assert found == [f"{ends['orders']} ()", "None None", f"{ends['totals']} ()"], log[-4000:]
    orders.begin_anew()
    with orders.producing(30):
        pass
    assert "was counted up to offset" in starts()


HISTORY = """
import json, sys
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic
from pyspark.sql import SparkSession
from mapstate import Count, errors, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.spark import Coordinates, InitialRows, StartsAt
from mapstate.testing import Fail, FaultyBackend

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
servers, url, place = options["--kafka"], options["--store"], options["--checkpoint"]
spark = SparkSession.builder.getOrCreate()
admin = AdminClient({"bootstrap.servers": servers})
sent, tables, visits = [], {}, f"visits-{options['--topic']}"
admin.create_topics([NewTopic(visits, 2)])[visits].result()

def send(number, partitions, producer=None):
    producer = producer or Producer({"bootstrap.servers": servers})  # which knows each partition that is there
    for at in range(number):
        sent.append(f"u{at % 97}")
        producer.produce(visits, sent[-1], partition=at % partitions)
    producer.flush(60)

def read(by, **more):
    kafka = by.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", visits)
    rows = kafka.option("kafka.isolation.level", "read_committed").options(**more).load()
    return rows.selectExpr("string(value) user_id", "topic", "partition", "offset")

def keep(name):
    read(spark.read).write.parquet(f"{place}-{name}")
    tables[name] = spark.read.parquet(f"{place}-{name}")
    return {p: n for p, n in tables[name].groupBy("partition").agg({"offset": "max"}).collect()}

def declared(name, start, table, ends, store=None):
    stream = read(spark.readStream, startingOffsets=json.dumps({visits: {str(p): at for p, at in start.items()}}))
    rows = newStream("visits", stream, initialRows=InitialRows(table, ends=ends)).groupBy("user_id")
    return rows.persistentAggregate(opaque(store or url, name, max_attempts=1), n=Count())

def case(name, start, table, holes="refused", ends=None):
    ends = ends or Coordinates("topic", "partition", "offset", holes=holes)
    counts = declared(name, start, table, ends)
    try:
        counts.seed(f"{place}-of-{name}")
        send(50, 2)
        counts.start(f"{place}-of-{name}", trigger={"availableNow": True}).awaitTermination()
        with open_reader(url, name) as reader:
            found = {key[0]: value["n"] for key, value in reader.scan()}
        print("case", name, found == {key: sent.count(key) for key in set(sent)}, sum(found.values()), flush=True)
    except errors.MapStateError as error:
        try:
            open_reader(url, name)
        except errors.StateNotFoundError:
            print("case", name, "refused", error, flush=True)

def dies(name, start, table):
    fault = Fail(method="swap", call=2, error=errors.CorruptStoreError)
    store = FaultyBackend(resolve(url), f"{place}-{name}", [fault])
    try:
        declared(name, start, table, Coordinates("topic", "partition", "offset"), store).seed(f"{place}-of-{name}")
    except errors.CorruptStoreError:
        print("case", name, "died", flush=True)
"""

MEETS = """
send(4_000, 2)
ends = {p: last + 1 for p, last in keep("first").items()}
send(3_000, 2)
case("early", {p: end - 1000 for p, end in ends.items()}, tables["first"])
case("exact", ends, tables["first"])
case("late", {**ends, 1: ends[1] + 1}, tables["first"])
case("named", ends, tables["first"], ends=StartsAt({visits: ends}))
case("misnamed", ends, tables["first"], ends=StartsAt({visits: {**ends, 1: 7}}))
"""

ENDS = """
send(400, 2)
ends = {p: last + 1 for p, last in keep("first").items()}
send(300, 2)
import os; os.mkdir(f"{place}-again")
dies("again", ends, tables["first"])
case("again", {p: 0 for p in ends}, tables["first"])  # the checkpoint has the start
admin.create_partitions([NewPartitions(visits, 3)])[visits].result()
while len(admin.list_topics(visits).topics[visits].partitions) < 3: pass
send(300, 3)
keep("second")
case("new", {**ends, 2: 0}, tables["first"])
case("newer", {**ends, 2: 40}, tables["second"])
case("lacks", {**ends, 2: 1}, tables["first"])
admin.delete_records([TopicPartition(visits, 0, ends[0])]) [TopicPartition(visits, 0, ends[0])].result()
case("removed", {0: ends[0], 1: 0, 2: 0}, tables["first"])
transactional = Producer({"bootstrap.servers": servers, "transactional.id": visits})
transactional.init_transactions(60)
for _ in range(2):
    transactional.begin_transaction()
    send(60, 3, transactional)
    transactional.commit_transaction(60)
read(spark.read, startingOffsets=json.dumps({visits: {"0": ends[0], "1": 0, "2": 0}})).write.parquet(f"{place}-third")
third = spark.read.parquet(f"{place}-third").union(tables["first"].where(f"partition = 0 and offset < {ends[0]}"))
last = {p: n for p, n in third.groupBy("partition").agg({"offset": "max"}).collect()}
case("marked", {p: n + 1 for p, n in last.items()}, third)
case("passed", {p: n + 2 for p, n in last.items()}, third, "allowed")  # of a marker, or of a row: nothing tells
case("allowed", {p: n + 1 for p, n in last.items()}, third, "allowed")
"""


MET = {"early": "True 7050", "exact": "True 7100", "late": "refused", "named": "True 7150", "misnamed": "refused"}
ENDED = {
    "again": "True 750",
    "new": "True 1100",
    "newer": "True 1150",
    "lacks": "refused",
    "removed": "True 1200",
    "marked": "refused",
    "passed": "refused",
    "allowed": "True 1370",
}


@pytest.mark.parametrize(
    ("cases", "right"), [(MEETS, MET), pytest.param(ENDS, ENDED, marks=pytest.mark.full)], ids=["starts", "partitions"]
)
def test_a_table_and_a_topic_meet_exactly_or_are_refused(broker, tmp_path, cases, right):
    program = tmp_path / "history.py"
    program.write_text(HISTORY + cases)
    one = Orders(broker, f"sqlite:///{tmp_path}/state.db", tmp_path)
    with one.job("--topic", tmp_path.name, program=program) as process:
        process.wait(300)
    log = process.log.read_text()
    found = dict(line.split(" ", 2)[1:] for line in log.splitlines() if line.startswith("case "))
    assert {name: text[: len(right.get(name, ""))] for name, text in found.items()} == right, log[-6000:]
