"""Four reader processes that never pause, while batches commit, attempts die, keys are purged and drivers are killed.

Every batch that counts adds the same to every user, so at any moment all users show one value, and it never goes
down. Guests come and go: what one is follows from how many batches count, which is what the users show. Attempts
that die add garbage, or remove. The writer does what a driver and its tasks do, without Spark: Spark's batches come
too slowly for a million reads under fire; one test at the end is with Spark all the same.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from one_ledger import OneLedger
from servers import wait_until
from spark_fixtures import run_job

from mapstate import Count, Sum, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.errors import StateNotFoundError
from mapstate.keys import KeyCodec
from mapstate.maps import OpaqueMap
from mapstate.maps.serialized import SerializedMap
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger_record import Attempt, Commit, LedgerRecord, OpenRequest
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.schema import Field, KeyField
from mapstate.serializers import RecordCodec, serializer

STATE = "visits"
USER = (KeyField("user_id", "string"),)
FIELDS = (Field("visits", Count().describe(), "bigint"),)
READERS = 4
TASKS = 2
CHUNK = 25
USERS = [f"u{at}" for at in range(100)]
GUESTS = [f"guest{at}" for at in range(40)]
PLACES = {name: at for at, name in enumerate(GUESTS)}
VACUUM_EVERY = 5  # batches
LONGEST_PAUSE = 2.0  # of the slow reader, in seconds

Change = tuple[str, int | None]
"""A key and what is added to it; None removes it."""

processes = multiprocessing.get_context("spawn")


def guest(name: str, batches: int) -> int | None:
    """What a guest is behind so many batches: it comes, is counted once more, is removed, is left alone."""
    step = (batches + PLACES[name]) % 4
    return min(step + 1, batches) if batches and step < 2 else None


def changes(batch_id: int) -> list[Change]:
    """What a batch does, to each key once."""
    steps = [(name, (batch_id + 1 + at) % 4) for name, at in PLACES.items()]
    return [(user, 1) for user in USERS] + [(name, None if step == 2 else 1) for name, step in steps if step < 3]


# The writer


def write_for_ever(url: str, seed: int) -> None:
    """A driver: one batch after the other, with attempts that die and vacuums between them."""
    chance = random.Random(seed)
    backend = resolve(url)
    opening = OpenRequest(
        state=STATE, type="opaque", serializer="json", keys=USER, fields=FIELDS, owner="query", clock_txid=1000
    )
    ledger = OneLedger.open(backend.open(STATE), opening)
    for batch_id in itertools.count(ledger.record.owners["query"]):
        while chance.random() < 0.3:
            some = chance.sample([*USERS, *GUESTS], chance.randrange(1, len(USERS)))
            garbage = [(user, chance.choice([None, 10**6 + chance.randrange(10**6)])) for user in some]
            run_attempt(backend, ledger, ledger.begin(batch_id), garbage)
        attempt, batch = ledger.begin(batch_id), changes(batch_id)
        run_attempt(backend, ledger, attempt, chance.sample(batch, len(batch)))
        ledger.commit(Commit(batch_id=batch_id, txid=attempt.txid, owner="query"))
        if batch_id % VACUUM_EVERY == VACUUM_EVERY - 1:
            vacuum(backend, STATE, page_size=CHUNK)


def run_attempt(backend: Any, ledger: OneLedger, attempt: Attempt, batch: list[Change]) -> None:
    """All tasks of an attempt, chunk by chunk by turns."""
    tasks = [task(backend, ledger.record, attempt, at, batch[at::TASKS]) for at in range(TASKS)]
    for _ in itertools.zip_longest(*tasks):
        pass


def task(backend: Any, record: LedgerRecord, attempt: Attempt, partition: int, batch: list[Change]) -> Iterator[None]:
    store = backend.open(STATE)
    assert store.claim(attempt.txid, partition, "holder") == "holder"
    writer = store.writer(attempt.token)
    state = OpaqueMap(SerializedMap(writer, codec(record)), attempt.view, written_once=True)
    state.begin_commit(attempt.txid)
    keys = KeyCodec(USER)
    for start in range(0, len(batch), CHUNK):
        users, amounts = zip(*batch[start : start + CHUNK], strict=True)
        state.multi_combine([keys.encode(user) for user in users], amounts, add)
        yield


def add(bases: list[Any], amounts: list[Any]) -> list[Any]:
    return [None if one is None else (base or 0) + one for base, one in zip(bases, amounts, strict=True)]


def codec(record: LedgerRecord) -> RecordCodec:
    return RecordCodec(serializer("json"), STATE, "opaque", record.fields, record.field_counts)


# The readers


class Slow:
    """A backend whose readers ask for ledger and keys one by one, and sleep over a vacuum ahead of the last key.

    As a store without `LedgerReads` that consists of several servers. They sleep every other time, because a reader
    that is overtaken by batches at each of its tries rightly gives up. ``overtaken`` goes up where a key was absent
    and a vacuum had begun since the ledger was read: what a reader has to notice, and to read again.
    """

    shared_between_processes = True

    def __init__(self, url: str, overtaken: Any) -> None:
        self._url = url
        self._overtaken = overtaken

    def open(self, state: str, *, ttl: float | None = None) -> SlowStore:
        return SlowStore(resolve(self._url).open(state, ttl=ttl), self._overtaken)


class SlowStore:
    """See `Slow`. Only for a reader."""

    def __init__(self, inner: Any, overtaken: Any) -> None:
        self._inner = inner
        self._overtaken = overtaken
        self._ledger: LedgerRecord | None = None
        self._absent = self._awake = False
        self.close = inner.close

    def load(self) -> Any:
        found, before = self._inner.load(), self._ledger
        self._ledger = None if found is None else decode_ledger(found[0], STATE)
        if self._absent and before is not None and self._ledger is not None:
            self._overtaken.value += before.rewrites != self._ledger.rewrites
        self._absent = False
        return found

    def swap(self, record: bytes, expected: Any, fence: Any) -> Any:
        raise NotImplementedError

    def multi_get(self, keys: Sequence[str]) -> Any:
        found = self._inner.multi_get(keys[:-1])
        self._awake = not self._awake
        end = time.monotonic() + LONGEST_PAUSE * (not self._awake)
        while time.monotonic() < end and not self._vacuumed():
            time.sleep(0.001)
        found += self._inner.multi_get(keys[-1:])
        self._absent = None in found
        return found

    def _vacuumed(self) -> bool:
        """Whether a vacuum has begun and ended since the ledger was read."""
        now = decode_ledger(self._inner.load()[0], STATE)
        at_work = now.in_flight is not None and now.in_flight.batch_id is None
        return self._ledger is not None and now.rewrites != self._ledger.rewrites and not at_work


def read_for_ever(
    backend: Any, users: list[str], guests: list[str], stop: Any, counted: Any, seen: Any, counts_read: Any
) -> None:
    """Reads all keys again and again, or a user and a guest where it is slow; tells what was wrong, or None.

    ``counted`` goes up by the keys that were read, ``seen`` with each state that it had not met.
    """
    wrong, highest = None, -1
    chance = random.Random(0)
    try:
        with open_reader(backend, STATE) as reader:
            while wrong is None and not stop.is_set():
                if isinstance(backend, Slow):
                    here, also = chance.sample(users, 1), chance.sample(guests, 1)
                else:
                    here, also = users, guests
                values = reader.multi_get([*here, *also])
                now = -1 if values[0] is None else values[0]["visits"]
                if any(value != values[0] for value in values[: len(here)]):
                    wrong = f"torn: {values}"
                found = {name: value and value["visits"] for name, value in zip(also, values[len(here) :], strict=True)}
                if found != {name: guest(name, max(now, 0)) for name in also}:
                    wrong = f"guests that are not of batch {now}: {found}"
                if now < highest:
                    wrong = f"went back from {highest} to {now}"
                seen.value += now > highest
                highest = now
                counted.value += len(values)
    except Exception as error:  # noqa: BLE001  whatever it is, the test has to hear of it
        wrong = repr(error)
    counts_read.put(wrong)


class Readers:
    """Reader processes of one state. Where there are guests, the last of them is a slow one."""

    def __init__(self, url: str, users: list[str], readers: int, guests: list[str]) -> None:
        self._stop, self._told = processes.Event(), processes.Queue()
        self._counted = [processes.Value("q", 0, lock=False) for _ in range(readers)]
        self._seen = [processes.Value("q", 0, lock=False) for _ in range(readers)]
        self._overtaken = processes.Value("q", 0, lock=False)
        backends: list[Any] = [url] * readers
        if guests:
            backends[-1] = Slow(url, self._overtaken)
        self._all = [
            processes.Process(
                target=read_for_ever, args=(backend, users, guests, self._stop, counted, seen, self._told), daemon=True
            )
            for backend, counted, seen in zip(backends, self._counted, self._seen, strict=True)
        ]
        for one in self._all:
            one.start()

    @property
    def keys(self) -> int:
        """How many keys all of them have read so far."""
        return sum(one.value for one in self._counted)

    @property
    def states(self) -> int:
        """How many different states each has seen so far, together."""
        return sum(one.value for one in self._seen)

    @property
    def overtaken(self) -> int:
        """How often the slow one found a key absent and a vacuum begun meanwhile."""
        return int(self._overtaken.value)

    @property
    def all_read(self) -> bool:
        return all(one.value for one in self._counted)

    @property
    def alive(self) -> bool:
        return all(one.is_alive() for one in self._all)

    def end(self) -> None:
        """AssertionError where one saw what never was."""
        self._stop.set()
        counts_read = [self._told.get(timeout=60) for _ in self._all]
        for one in self._all:
            one.join(60)
        assert counts_read == [None] * len(counts_read)


@contextmanager
def reading(url: str, users: list[str], number: int = READERS, guests: Sequence[str] = ()) -> Iterator[Readers]:
    readers = Readers(url, users, number, list(guests))
    try:
        yield readers
    finally:
        for one in readers._all:
            one.kill()
            one.join()


@pytest.fixture(
    params=[
        pytest.param("sqlite", marks=pytest.mark.full),
        pytest.param("redis", marks=pytest.mark.redis),
        pytest.param("packed", marks=[pytest.mark.redis, pytest.mark.full]),
    ]
)
def url(request: Any, store_at: Callable[[str], str]) -> str:
    return store_at(request.param)


def committed(url: str) -> int:
    """How many batches count."""
    try:
        with open_reader(url, STATE) as reader:
            last = reader.ledger().last_commit
    except StateNotFoundError:
        return 0
    return 0 if last is None else last.batch_id + 1


@pytest.mark.slow
def test_readers_under_fire_never_see_half_a_batch_and_never_go_back(url, rounds, tally):
    """SIGKILL of the writer at any place, and another in its place at once.

    It goes on until the readers saw many states, and one that found a key absent was often overtaken by a vacuum.
    """
    kills, keys, states, overtaken = rounds(1, 60), rounds(20_000, 3_000_000), rounds(20, 2000), rounds(1, 30)
    chance = random.Random(1)
    killed = done = 0

    def writer() -> Any:
        one = processes.Process(target=write_for_ever, args=(url, killed), daemon=True)
        one.start()
        return one

    driver = writer()
    try:
        wait_until(lambda: committed(url) > 0, "the first batch", 120)
        with reading(url, USERS, guests=GUESTS) as readers:
            wait_until(lambda: readers.all_read or not readers.alive, "all read", 120)
            while readers.alive and not (
                killed >= kills and readers.keys >= keys and readers.states >= states and readers.overtaken >= overtaken
            ):
                target = done + chance.randrange(1, rounds(6, 20))
                wait_until(lambda target=target: committed(url) >= target, "more batches", 120)
                os.kill(driver.pid, signal.SIGKILL)
                driver.join()
                killed += 1
                done = committed(url)
                driver = writer()
            readers.end()
            keys, states, overtaken = readers.keys, readers.states, readers.overtaken
    finally:
        driver.kill()
        driver.join()
    with open_reader(url, STATE) as reader:
        batches = committed(url)
        assert reader.multi_get(USERS) == [{"visits": batches}] * len(USERS)
        there = {(name,): {"visits": guest(name, batches)} for name in GUESTS if guest(name, batches)}
        assert dict(reader.scan()) == there | {(user,): {"visits": batches} for user in USERS}
        assert reader.ledger().rewrites
    tally(
        f"readers under fire, {'Redis' if url.startswith('redis') else 'SQLite'}",
        keys_read=keys,
        batches=batches,
        writers_killed=killed,
        reads_overtaken_by_a_vacuum=overtaken,
        states_seen=states,
    )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.redis
def test_readers_see_whole_batches_while_spark_drivers_die(redis_url, spark, visits, tmp_path, rounds, tally):
    users = [f"u{at}" for at in range(40)]
    deaths, number = rounds(1, 8), rounds(1, READERS)  # all four would leave a subset's Spark no processor to start on

    def run() -> None:
        counts = newStream(STATE, visits.stream(spark)).groupBy("user_id")
        aggregate = counts.persistentAggregate(
            opaque(redis_url, chunk_size=4, apply_on="executors"), visits=Count(), bytes=Sum("bytes")
        )
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
        readers.end()
        states, keys = readers.states, readers.keys
    with open_reader(redis_url, STATE) as reader:
        assert dict(reader.scan()) == visits.truth()
        assert reader.ledger().dead
    assert states > number, "the readers saw one state only"
    tally("readers while Spark drivers die", keys_read=keys, drivers_killed=deaths, states_seen=states)
