"""A Redis that fails in the middle of a stream: networks, memory, restarts, lost writes, failovers. Real Spark.

Each fault is placed by what goes over the wire, not by time: a proxy stands between the job and the server and
acts at a byte or at a request. After every batch all values are compared with an independent count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Lock
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from servers import CuttingProxy, RedisServer, Tap, find_redis, wait_until
from spark_fixtures import Visits

from mapstate import Count, Sum, errors, newStream, opaque, open_reader

pytestmark = [pytest.mark.spark, pytest.mark.redis]

PUT = b"MSET"
LEDGER = b"SET\r\n$13\r\nvisits!ledger"
USERS = 40


def put(visits: Visits, batch: int, users: int = 24) -> None:
    """The file of one batch: other keys and amounts each time."""
    name = f"{batch:05d}"
    visits.put(name, [(f"u{(batch * 7 + at) % USERS}", 10**batch % 97 + at) for at in range(users)])
    os.utime(visits.input / f"{name}.csv", (1e9 + 10 * batch,) * 2)  # Spark takes the oldest first


def truth(visits: Visits, batches: int) -> dict[Any, Any]:
    """What the state has to be after so many batches."""
    found: dict[Any, Any] = {}
    for batch in range(batches):
        for user, size in visits.rows(f"{batch:05d}"):
            old = found.get((user,), {"visits": 0, "bytes": 0})
            found[(user,)] = {"visits": old["visits"] + 1, "bytes": old["bytes"] + size}
    return found


def contents(url: str) -> dict[Any, Any]:
    with open_reader(url, "visits") as reader:
        return dict(reader.scan())


def everything(server: RedisServer) -> dict[bytes, Any]:
    """Every key of the server as it is stored: the side door."""
    with server.client() as client:
        return {key: client.dump(key) for key in client.keys("*")}


@pytest.fixture
def starter() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Calls a function in a thread that lives as long as the test: a server dies with the thread that started it."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()


class Stream:
    """The counting query over what there is, run as far as it comes, started again after errors."""

    def __init__(self, visits: Visits, spark: SparkSession, url: str, looking: str, **options: Any) -> None:
        self._visits = visits
        self._spark = spark
        self._options = {"chunk_size": 4} | options
        self.url = url
        self._looking = looking
        self.checks = 0

    def run(self, before: Callable[[int], object] = lambda _: None) -> errors.MapStateError | None:
        """One start of the query; ``before`` is called ahead of each batch. Returns the error that stopped it.

        After each batch that counts the whole state is compared.
        """
        stream = self._visits.stream(self._spark)
        job = (
            newStream("visits", stream)
            .groupBy("user_id")
            .persistentAggregate(opaque(self.url, patience=0, **self._options), visits=Count(), bytes=Sum("bytes"))
        )

        def each(batch_df: Any, batch_id: int) -> None:
            before(batch_id)
            job(batch_df, batch_id)
            assert contents(self._looking) == truth(self._visits, batch_id + 1)
            self.checks += 1

        query = (
            stream.writeStream.foreachBatch(each)
            .option("checkpointLocation", str(self._visits.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(240)
        except StreamingQueryException:
            if job.last_error is None:
                raise
            return job.last_error
        return None


@pytest.mark.parametrize(
    ("direction", "retries"),
    [
        ("requests", 0),
        ("replies", 3),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("replies", 0), ("requests", 3))),
    ],
)
def test_connections_cut_anywhere_never_make_a_wrong_count(
    start_redis, spark, visits, rounds, tally, direction, retries
):
    """One cut per batch, each time some bytes further; a query whose retries were used up is started again."""
    server = start_redis()
    batches = rounds(4, 80)
    with CuttingProxy(server.url) as proxy:
        stream = Stream(visits, spark, f"{proxy.url}retries={retries}", server.url)
        for batch in range(2):
            put(visits, batch)
        passed = []
        assert stream.run(lambda _: passed.append(getattr(proxy, direction))) is None
        length = getattr(proxy, direction) - passed[1]  # of a batch that is not the first
        for batch in range(2, 2 + batches):
            put(visits, batch)
        points = [1 + at * length // batches for at in range(batches)]
        cuts = failures = 0

        def cut(_: int) -> None:
            nonlocal cuts
            if points and not proxy.is_armed:
                proxy.cut(direction, points.pop(0))
                cuts += 1

        while (error := stream.run(cut)) is not None:
            assert isinstance(error, errors.StoreUnavailableError), error
            failures += 1
        proxy.disarm()
        assert contents(server.url) == truth(visits, batches + 2)
        assert cuts >= batches - 1
        assert failures == 0 if retries else failures > 0
    tally("connections cut in mid-batch, Redis", cuts=cuts, batches_compared=stream.checks, queries_failed=failures)


WHERE = [(PUT, 2), (LEDGER, 1), (LEDGER, 2)]  # in a put, at begin, at commit


def test_replies_and_requests_that_come_too_late_never_make_a_wrong_count(start_redis, spark, visits, rounds, tally):
    """Each batch loses one reply; or one request arrives after its sender gave up on it, or after the commit."""
    server = start_redis()
    cases = [(*where, how) for how in ("swallow", "late", "after commit") for where in WHERE]
    cases = rounds(cases[::4], cases * 10)
    batches = len(cases)
    for batch in range(batches + 1):
        put(visits, batch)
    with Tap(server.url) as tap:
        stream = Stream(visits, spark, f"{tap.url}socket_timeout=2", server.url)

        def lose(batch_id: int) -> None:
            assert not tap.is_armed
            assert tap.fired == batch_id
            tap.deliver.set()
            marker, nth, how = cases[batch_id % len(cases)]
            if batch_id == batches:
                return
            if how == "after commit":
                tap.deliver.clear()
            tap.on(marker, nth, how="late" if how == "after commit" else how)

        assert stream.run(lose) is None
        assert tap.fired == batches
    tally("replies lost, requests late, in puts and ledger changes", times=batches, batches_compared=stream.checks)


def test_a_put_that_is_never_answered_ends_the_query_and_counts_nothing(start_redis, spark, visits, rounds, tally):
    server = start_redis()
    with Tap(server.url) as tap:
        stream = Stream(visits, spark, f"{tap.url}socket_timeout=2&retries=1", server.url)
        put(visits, 0)
        assert stream.run() is None
        for batch in range(1, 1 + rounds(1, 6)):
            put(visits, batch)
            before = contents(server.url)
            error = stream.run(lambda _, nth=batch % 3 + 1: tap.on(PUT, nth, how="swallow", always=True))
            assert isinstance(error, errors.StoreUnavailableError), error
            assert contents(server.url) == before
            tap.off()
            assert stream.run() is None
            assert contents(server.url) == truth(visits, batch + 1)
            tally("puts that are never answered", times=1)


def test_a_store_that_gets_full_in_mid_batch_counts_nothing_of_it_and_goes_on_with_more_memory(
    start_redis, spark, visits, rounds, tally
):
    server = start_redis(maxmemory_policy="noeviction")
    stream = Stream(visits, spark, server.url, server.url, chunk_size=50)
    put(visits, 0)
    assert stream.run() is None
    for batch in range(1, 1 + rounds(1, 4)):
        visits.put(f"{batch:05d}", [(f"{batch}-{at:04d}-" + "k" * 1000, at) for at in range(3000)])
        before, stored = contents(server.url), len(everything(server))
        with server.client() as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] + 10**6 + 10**5 * batch)
            error = stream.run()
            assert isinstance(error, errors.StoreFullError), error
            assert client.dbsize() > stored, "it was not in mid-batch"
            assert contents(server.url) == before
            client.config_set("maxmemory", "0")
        assert stream.run() is None
        assert contents(server.url) == truth(visits, batch + 1)
        tally("maxmemory reached in mid-batch", times=1, keys_compared=len(before) + 3000)


@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_a_server_killed_in_mid_write_keeps_what_it_acknowledged(
    start_redis, starter, spark, visits, rounds, tally, direction
):
    """SIGKILL at some byte of a batch, and back up at once from its append-only file."""
    server = start_redis(appendonly="yes", appendfsync="always")
    batches = rounds(3, 50)
    with CuttingProxy(server.url) as proxy:
        stream = Stream(visits, spark, f"{proxy.url}retries=4", server.url)
        for batch in range(2):
            put(visits, batch)
        passed = []
        assert stream.run(lambda _: passed.append(getattr(proxy, direction))) is None
        length = getattr(proxy, direction) - passed[1]
        for batch in range(2, 2 + batches):
            put(visits, batch)
        kills = failures = 0
        due = Lock()

        def back_up() -> None:
            nonlocal kills
            if due.acquire(blocking=False):  # two connections may come to the place at once
                starter(lambda: (server.kill(), server.restart()))
                kills += 1

        def kill(batch_id: int) -> None:
            if not proxy.is_armed:
                due.acquire(blocking=False)
                due.release()
                proxy.cut(direction, 1 + (batch_id - 2) * length // batches, back_up)

        while (error := stream.run(kill)) is not None:
            assert isinstance(error, errors.StoreUnavailableError), error
            failures += 1
        proxy.disarm()
        assert contents(server.url) == truth(visits, 2 + batches)
        assert kills >= batches - 1
    row = "SIGKILL of Redis in mid-batch, append-only file"
    tally(row, kills=kills, batches_compared=stream.checks, queries_failed=failures)


@pytest.mark.parametrize("running", [True, False], ids=["running", "started again"])
def test_a_server_that_came_back_from_an_older_snapshot_is_noticed_and_nothing_is_written(
    start_redis, starter, spark, visits, rounds, tally, running
):
    """Saved in front of batch 2, replaced by that some batches later: within a run of the query, or between two."""
    server = start_redis()
    stream = Stream(visits, spark, server.url, server.url)
    for number in range(rounds(1, 6)):
        last = 3 + number
        visits.checkpoint = visits.checkpoint.with_name(f"checkpoint-{number}")
        for batch in range(last + running):
            put(visits, batch)
        snapshot: dict[bytes, Any] = {}

        def go_back(snapshot: dict[bytes, Any] = snapshot) -> None:
            server.kill()
            starter(server.restart)  # with the snapshot, and without what came after it
            snapshot |= everything(server)

        with server.client() as client:
            client.flushall()
            before = {2: client.save, last: go_back}
            error = stream.run(lambda batch_id, before=before: before.get(batch_id, int)())
        if not running:
            assert error is None
            go_back()
            put(visits, last)
            error = stream.run()
        for _ in range(3):  # however often it is started
            assert isinstance(error, errors.MissingBatchesError), error
            assert (error.found, error.expected) == (last, 2)
            assert everything(server) == snapshot
            error = stream.run()
        assert contents(server.url) == truth(visits, 2)
        rewind(visits, 2)
        assert stream.run() is None
        assert contents(server.url) == truth(visits, last + 1)
        tally("Redis back from an older snapshot", times=1)


def rewind(visits: Visits, batch: int) -> None:
    """The checkpoint as it was in front of this batch."""
    for log in ("commits", "offsets", "sources/0"):
        for path in (visits.checkpoint / log).iterdir():
            number = path.name.strip(".").split(".")[0]
            if number.isdigit() and int(number) >= batch:
                path.unlink()


def test_a_store_flushed_during_the_writes_of_a_batch_is_noticed_and_nothing_is_counted_on(
    start_redis, spark, visits, rounds, tally
):
    """FLUSHALL in front of the n-th put, or of the commit."""
    server = start_redis()
    places = [(PUT, nth) for nth in range(1, 7)] + [(LEDGER, 2)]
    places = places[:: rounds(3, 1)] * rounds(1, 5)
    for number, (marker, nth) in enumerate(places):
        visits.checkpoint = visits.checkpoint.with_name(f"checkpoint-{number}")
        for batch in range(2):
            put(visits, batch)
        with Tap(server.url) as tap, server.client() as client:
            stream = Stream(visits, spark, tap.url, server.url)
            error = stream.run(lambda batch_id, at=(marker, nth): tap.on(*at, client.flushall) if batch_id else None)
            assert tap.fired == 1
            assert type(error) is errors.StoreLostError, error
            assert client.keys("*:*") == [], "records after the flush"
            with pytest.raises(errors.StateNotFoundError):
                contents(server.url)
            assert isinstance(stream.run(), errors.MissingBatchesError)
            assert client.keys("*:*") == client.keys("*!ledger") == []
            client.flushall()
        tally("FLUSHALL during a batch's writes", times=1)


class Pair:
    """A primary and its replica; jobs reach them by one address, and replication goes by way of ``link``."""

    def __init__(self, start: Callable[..., RedisServer], stack: ExitStack) -> None:
        self.primary, self.replica = start(), start()
        self.link = stack.enter_context(CuttingProxy(self.primary.url))
        self.front = stack.enter_context(Tap(self.primary.url))
        self.client = stack.enter_context(self.primary.client())
        with self.replica.client() as client:
            client.replicaof("127.0.0.1", str(self.link.port))
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica is in step")

    def replicated(self) -> None:
        """Returns once the replica has all that the primary has."""
        assert self.client.wait(1, 20_000) == 1

    def stop_replication(self) -> None:
        """What the primary takes from here on never reaches the replica. The primary does not know."""
        self.replicated()
        self.link.hold("replies")

    def fail_over(self) -> None:
        """The primary dies; the replica is promoted, under the same address."""
        self.primary.kill()
        with self.replica.client() as client:
            client.replicaof("NO", "ONE")
        self.front.point_to(self.replica.url)


@pytest.fixture
def pair(start_redis: Callable[..., RedisServer]) -> Iterator[Callable[[], Pair]]:
    """Starts a primary and a replica."""
    if find_redis() == "docker":
        no_pair = pytest.fail if os.environ.get("CI") else pytest.skip
        no_pair("a replica in Docker does not reach its primary on 127.0.0.1: this test needs redis-server itself")
    with ExitStack() as stack:
        yield lambda: Pair(start_redis, stack)


@pytest.mark.parametrize("running", [True, False], ids=["running", "started again"])
def test_a_replica_promoted_without_the_last_batches_is_noticed_and_nothing_is_counted_on(
    pair, spark, visits, rounds, tally, running
):
    for number in range(rounds(1, 8)):
        servers, last = pair(), 3 + number % 3
        visits.checkpoint = visits.checkpoint.with_name(f"checkpoint-{number}")
        stream = Stream(visits, spark, servers.front.url, servers.front.url)
        for left in visits.input.glob("*.csv"):
            left.unlink()
        for batch in range(last + running):
            put(visits, batch)
        promoted: dict[bytes, Any] = {}

        def fail_over(servers: Pair = servers, promoted: dict[bytes, Any] = promoted) -> None:
            servers.fail_over()
            promoted |= everything(servers.replica)

        before = {2: servers.stop_replication, last: fail_over}
        error = stream.run(lambda batch_id, before=before: before.get(batch_id, int)())
        if not running:
            assert error is None  # to the job all is well
            fail_over()
            put(visits, last)
            error = stream.run()
        for _ in range(2):
            assert isinstance(error, errors.MissingBatchesError), error
            assert (error.found, error.expected) == (last, 2)
            assert everything(servers.replica) == promoted
            error = stream.run()
        assert contents(servers.front.url) == truth(visits, 2)
        tally("failover to a replica without the last batches", times=1)


def test_a_failover_that_lost_the_begin_of_a_batch_ends_it_and_it_is_counted_once_after(
    pair, spark, visits, rounds, tally
):
    """Between begin and commit, to a replica that never heard of the attempt. A put is refused, a commit repeated."""
    for number in range(rounds(1, 8)):
        servers = pair()
        visits.checkpoint = visits.checkpoint.with_name(f"checkpoint-{number}")
        stream = Stream(visits, spark, servers.front.url, servers.front.url)
        for batch in range(2):
            put(visits, batch)
        places = [(PUT, nth) for nth in (3, 1, 2, 4, 5)] + [(LEDGER, 2)]

        def before(batch_id: int, servers: Pair = servers, place: Any = places[number % 6]) -> None:
            if batch_id == 1:
                servers.stop_replication()
                servers.front.on(*place, servers.fail_over)

        error = stream.run(before)
        assert servers.front.fired == 1
        if places[number % 6][0] == LEDGER:  # the commit finds an older ledger, and the batch is begun anew
            assert error is None
        else:
            assert isinstance(error, errors.FencedError), error
            assert contents(servers.front.url) == truth(visits, 1)
        assert stream.run() is None
        assert contents(servers.front.url) == truth(visits, 2)
        tally("failover that lost a batch's begin", times=1)


def test_a_failover_that_lost_a_part_of_a_batchs_records_is_noticed(pair, spark, visits, rounds, tally):
    """The replica has the begin and the first puts, not those acknowledged after them, and takes the rest.

    The fence and the ledger are as they should be, so only the change of servers shows that records are missing.
    """
    for number in range(rounds(1, 8)):
        servers = pair()
        visits.checkpoint = visits.checkpoint.with_name(f"checkpoint-{number}")
        stream = Stream(visits, spark, servers.front.url, servers.front.url)
        for batch in range(2):
            put(visits, batch)

        def split(servers: Pair = servers, at: Any = [(PUT, 2), (LEDGER, 1)][number % 2]) -> None:
            servers.stop_replication()
            servers.front.on(*at, servers.fail_over)

        def before(batch_id: int, servers: Pair = servers, split: Any = split) -> None:
            if batch_id == 1:
                servers.front.on(PUT, 2, split)

        error = stream.run(before)
        assert servers.front.fired == 2, "it never failed over"
        assert error is None or isinstance(error, errors.MapStateError)
        while error is not None:
            assert contents(servers.front.url) == truth(visits, 1)
            error = stream.run()
        assert contents(servers.front.url) == truth(visits, 2)
        with open_reader(servers.front.url, "visits") as reader:
            assert reader.ledger().dead, "the attempt that lost records was committed"
        tally("failover that lost a part of a batch's records", times=1)
