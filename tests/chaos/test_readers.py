"""Four reader processes that never pause, while batches commit, attempts die and drivers are killed.

Every batch that counts adds the same to every key, so at any moment all keys show one value, and it never goes
down. Attempts that die add garbage. The writer does what a driver and its tasks do, without Spark: Spark's
batches come too slowly for a million reads under fire; one test at the end is with Spark all the same.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers import wait_until
from spark_fixtures import run_job

from mapstate import Count, Sum, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.errors import StateNotFoundError
from mapstate.keys import KeyCodec, KeyField
from mapstate.ledger import Ledger
from mapstate.maps import OpaqueMap
from mapstate.maps.serialized import SerializedMap
from mapstate.serializers import RecordCodec, serializer
from mapstate.transitions import Begun, Commit, Field, LedgerRecord, Opening
from mapstate.values import OpaqueValue

STATE = "visits"
USER = (KeyField("user_id", "string"),)
FIELDS = (Field("visits", Count().describe(), "bigint"),)
READERS = 4
TASKS = 2
CHUNK = 25
USERS = [f"u{at}" for at in range(100)]

processes = multiprocessing.get_context("spawn")


# The writer


def write_for_ever(url: str, seed: int) -> None:
    """A driver: one batch after the other, with attempts that die and vacuums between them."""
    chance = random.Random(seed)
    backend = resolve(url)
    opening = Opening(
        state=STATE, type="opaque", serializer="json", keys=USER, fields=FIELDS, owner="query", clock_txid=1000
    )
    ledger = Ledger.open(backend.open(STATE), opening)
    for batch_id in itertools.count(ledger.record.owners["query"]):
        while chance.random() < 0.3:
            some = chance.sample(USERS, chance.randrange(1, len(USERS)))
            attempt(backend, ledger, ledger.begin(batch_id), some, 10**6 + chance.randrange(10**6))
        begun = ledger.begin(batch_id)
        attempt(backend, ledger, begun, chance.sample(USERS, len(USERS)), 1)
        ledger.commit(Commit(batch_id=batch_id, txid=begun.txid, owner="query"))
        if chance.random() < 0.1:
            vacuum(backend, ledger)


def attempt(backend: Any, ledger: Ledger, begun: Begun, users: list[str], amount: int) -> None:
    """All tasks of an attempt, chunk by chunk by turns."""
    tasks = [task(backend, ledger.record, begun, at, users[at::TASKS], amount) for at in range(TASKS)]
    for _ in itertools.zip_longest(*tasks):
        pass


def task(
    backend: Any, record: LedgerRecord, begun: Begun, partition: int, users: list[str], amount: int
) -> Iterator[None]:
    store = backend.open(STATE)
    assert store.claim(begun.txid, partition, "holder") == "holder"
    writer = store.writer(begun.token)
    state = OpaqueMap(SerializedMap(writer, codec(record)), begun.view, written_once=True)
    state.begin_commit(begun.txid)
    texts = [KeyCodec(USER).encode(user) for user in users]
    for start in range(0, len(texts), CHUNK):
        some = texts[start : start + CHUNK]
        state.multi_combine(some, [amount] * len(some), add)
        yield


def add(bases: list[Any], partials: list[Any]) -> list[Any]:
    return [(base or 0) + partial for base, partial in zip(bases, partials, strict=True)]


def codec(record: LedgerRecord) -> RecordCodec:
    return RecordCodec(serializer("json"), STATE, "opaque", record.fields, record.layouts)


def vacuum(backend: Any, ledger: Ledger) -> None:
    """What is dead becomes what it stands for, under a txid that will count."""
    begun, store = ledger.begin_vacuum(), backend.open(STATE)
    writer, records = store.writer(begun.token), codec(ledger.record)
    for page in store.scan(CHUNK):
        found = records.loads(page, writer.multi_get(page))
        values = begun.view.values(found, begun.txid)
        dead = {
            key: OpaqueValue(begun.txid, value, value)
            for key, record, value in zip(page, found, values, strict=True)
            if record[0] not in begun.view
        }
        writer.multi_put(list(dead), records.dumps(list(dead.values())))
    ledger.commit_vacuum(begun.txid)


# The readers


def read_for_ever(url: str, users: list[str], stop: Any, counted: Any, told: Any) -> None:
    """Reads all keys again and again, and tells what was wrong, or None; and how many values it saw.

    ``counted`` goes up by the keys that were read.
    """
    wrong, seen, highest = None, 0, -1
    try:
        with open_reader(url, STATE) as reader:
            while wrong is None and not stop.is_set():
                values = reader.multi_get(users)
                if any(value != values[0] for value in values):
                    wrong = f"torn: {values}"
                now = -1 if values[0] is None else values[0]["visits"]
                if now < highest:
                    wrong = f"went back from {highest} to {now}"
                seen += now > highest
                highest = now
                counted.value += len(users)
    except Exception as error:  # noqa: BLE001  whatever it is, the test has to hear of it
        wrong = repr(error)
    told.put((wrong, seen))


class Readers:
    """Reader processes of one state."""

    def __init__(self, url: str, users: list[str], readers: int) -> None:
        self._stop, self._told = processes.Event(), processes.Queue()
        self._counted = [processes.Value("q", 0, lock=False) for _ in range(readers)]
        self._all = [
            processes.Process(target=read_for_ever, args=(url, users, self._stop, counted, self._told), daemon=True)
            for counted in self._counted
        ]
        for one in self._all:
            one.start()

    @property
    def keys(self) -> int:
        """How many keys all of them have read so far."""
        return sum(one.value for one in self._counted)

    @property
    def all_read(self) -> bool:
        return all(one.value for one in self._counted)

    @property
    def alive(self) -> bool:
        return all(one.is_alive() for one in self._all)

    def end(self) -> int:
        """How many different states they saw together. AssertionError where one saw what never was."""
        self._stop.set()
        told = [self._told.get(timeout=60) for _ in self._all]
        for one in self._all:
            one.join(60)
        assert [wrong for wrong, _ in told] == [None] * len(told)
        return sum(seen for _, seen in told)


@contextmanager
def reading(url: str, users: list[str], number: int = READERS) -> Iterator[Readers]:
    readers = Readers(url, users, number)
    try:
        yield readers
    finally:
        for one in readers._all:
            one.kill()
            one.join()


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")


def committed(url: str) -> int:
    """How many batches count."""
    try:
        with open_reader(url, STATE) as reader:
            last = reader.ledger().committed
    except StateNotFoundError:
        return 0
    return 0 if last is None else last.batch_id + 1


def test_readers_under_fire_never_see_half_a_batch_and_never_go_back(url, rounds, tally):
    """SIGKILL of the writer at any place, and another in its place at once."""
    kills, least = rounds(3, 40), rounds(100_000, 3_000_000)
    chance = random.Random(1)
    killed = done = 0

    def writer() -> Any:
        one = processes.Process(target=write_for_ever, args=(url, killed), daemon=True)
        one.start()
        return one

    driver = writer()
    try:
        wait_until(lambda: committed(url) > 0, "the first batch")
        with reading(url, USERS) as readers:
            wait_until(lambda: readers.all_read or not readers.alive, "all read")
            while readers.alive and (killed < kills or readers.keys < least):
                target = done + chance.randrange(1, rounds(6, 20))
                wait_until(lambda target=target: committed(url) >= target, "more batches", 120)
                os.kill(driver.pid, signal.SIGKILL)
                driver.join()
                killed += 1
                done = committed(url)
                driver = writer()
            states = readers.end()
            keys = readers.keys
    finally:
        driver.kill()
        driver.join()
    with open_reader(url, STATE) as reader:
        assert reader.multi_get(USERS) == [{"visits": committed(url)}] * len(USERS)
        assert reader.ledger().dead or reader.ledger().rewrites
    assert states > committed(url) / 4, "the readers slept"
    tally(
        f"readers under fire, {'Redis' if url.startswith('redis') else 'SQLite'}",
        keys_read=keys,
        batches=committed(url),
        writers_killed=killed,
        states_seen=states,
    )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.redis
def test_readers_see_whole_batches_while_spark_drivers_die(redis_url, spark, visits, tmp_path, rounds, tally):
    users = [f"u{at}" for at in range(40)]
    deaths, number = rounds(1, 4), rounds(1, READERS)  # all four would leave a subset's Spark no processor to start on

    def run() -> None:
        counts = newStream(STATE, visits.stream(spark)).groupBy("user_id")
        aggregate = counts.persistentAggregate(opaque(redis_url, chunk_size=4), visits=Count(), bytes=Sum("bytes"))
        query = aggregate.start(visits.checkpoint, trigger={"availableNow": True})
        assert query.awaitTermination(120)

    visits.put("first", [(user, 1) for user in users])
    run()
    options = {
        "url": redis_url,
        "input": str(visits.input),
        "checkpoint": str(visits.checkpoint),
        "chunk_size": 4,
        "faults": [["Kill", {"who": "driver", "call": 3, "after": True}]],
    }
    with reading(redis_url, users, number) as readers:
        for death in range(deaths):
            for batch in range(3):
                visits.put(f"{death}-{batch}", [(user, 1) for user in users])
            folder = tmp_path / f"death-{death}"
            folder.mkdir()
            ended = run_job(options | {"folder": str(folder)})
            assert ended.returncode == -signal.SIGKILL, ended.stderr
            run()
        states, keys = readers.end(), readers.keys
    with open_reader(redis_url, STATE) as reader:
        assert dict(reader.scan()) == visits.truth()
        assert reader.ledger().dead
    assert states > number, "the readers saw one state only"
    tally("readers while Spark drivers die", keys_read=keys, drivers_killed=deaths, states_seen=states)
