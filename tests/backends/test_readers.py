"""Readers of every store: threads share one, and each read is of one batch."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.maps.serialized import SerializedMap
from mapstate.serializers import RecordCodec, serializer
from mapstate.testing.contracts.driver import CountingQuery

STATE = "visits"
KEYS = [f"user-{at}" for at in range(300)]
redis = pytest.mark.redis
ON_REDIS = [
    pytest.param("redis", marks=redis),
    pytest.param("hash", marks=redis),
    pytest.param("packed", marks=redis),
    pytest.param("socket", marks=redis),
    pytest.param("cluster", marks=redis),
    pytest.param("sentinel", marks=redis),
]
EVERYWHERE = ["memory", "sqlite", "third party", "aerospike", *ON_REDIS]


class PlainBackend:
    """Another package's store: one thread at a time calls it, and it says so if two do."""

    shared_between_processes = False

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.called = threading.Lock()

    def open(self, state, *, ttl=None):
        return self

    def multi_get(self, keys):
        assert self.called.acquire(blocking=False), "two threads are in the store"
        try:
            return [self.records.get(key) for key in keys]
        finally:
            self.called.release()

    def multi_put(self, keys, values):
        self.records.update(zip(keys, values, strict=True))

    def scan(self, page_size):
        keys = list(self.records)
        for at in range(0, len(keys), page_size):
            assert self.called.acquire(blocking=False), "two threads are in the store"
            page = keys[at : at + page_size]
            self.called.release()
            yield page


class How:
    """How a `CountingQuery` writes here."""

    state = STATE

    def __init__(self, backend: Any) -> None:
        self.serializer = "native" if getattr(backend, "native_records", False) else "json"

    def records_of(self, store, kind, fields):
        return SerializedMap(store, RecordCodec(serializer(self.serializer), STATE, kind, fields, [(0, len(fields))]))

    def writer_of(self, store, token):
        for name in ("writer", "filtered_writer"):
            if hasattr(store, name):
                return getattr(store, name)(token)
        return store


@pytest.fixture
def backend(request, tmp_path):
    def url_of(name, more=""):
        url = request.getfixturevalue(name)
        return url + (("&" if "?" in url else "?") + more if more else "")

    if request.param == "third party":
        return PlainBackend()
    if request.param == "aerospike":
        return request.getfixturevalue("stand_in").backend()
    urls = {
        "memory": lambda: f"memory://{tmp_path.name}",
        "sqlite": lambda: f"sqlite:///{tmp_path}/visits.db",
        "redis": lambda: url_of("redis_url"),
        "hash": lambda: url_of("redis_url", "layout=hash"),
        "packed": lambda: url_of("redis_url", "layout=packed&buckets=16"),
        "socket": lambda: url_of("socket_url"),
        "cluster": lambda: url_of("cluster_url"),
        "sentinel": lambda: url_of("sentinel_url"),
    }
    return resolve(urls[request.param]())


@pytest.fixture
def job(backend):
    """A driver that has counted each key once."""
    query = CountingQuery(backend.open(STATE), How(backend))
    query.run(0, dict.fromkeys(KEYS, 1))
    return query


def at_one_time(work, threads):
    """What ``work`` returns in each of so many threads that start together."""
    start = threading.Barrier(threads)

    def started(number):
        start.wait(30)
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(started, range(threads)))


@pytest.mark.parametrize("backend", EVERYWHERE, indirect=True)
def test_eight_threads_share_a_reader_and_each_gets_its_own_answers(backend, job):
    job.run(1, {key: at for at, key in enumerate(KEYS)})
    expected = {(key,): {"n": 1 + at} for at, key in enumerate(KEYS)}

    def read(number):
        own = KEYS[number::8]
        for _ in range(5):
            assert reader.multi_get(own) == [expected[key,] for key in own]
            assert [reader.get(key) for key in own[:3]] == [expected[key,] for key in own[:3]]
            assert dict(reader.scan(50)) == expected
            assert reader.key_count() == len(KEYS)
            assert reader.ledger().last_commit.batch_id == 1
            assert reader.reports() == []
        return True

    with open_reader(backend, STATE) as reader:
        assert at_one_time(read, 8) == [True] * 8


def whole(found):
    """The number of batches that a read shows."""
    values = {fields["n"] for fields in found}
    assert len(values) == 1, "a read shows pieces of several batches"
    return values.pop()


@pytest.mark.parametrize("backend", EVERYWHERE, indirect=True)
def test_each_read_of_threads_beside_a_writer_is_of_one_batch(backend, job):
    """Four threads read all keys; each committed batch adds one to every key."""
    batches, ended = 15, threading.Event()
    some = KEYS[:60]

    def reading(seen, found):
        seen.append(whole(found))
        assert seen[-1] >= max(seen), "a later read shows an older batch"

    def in_thread(_):
        seen: list[int] = []
        while not ended.is_set() or len(seen) < 2:
            reading(seen, reader.multi_get(some))
        return whole(reader.multi_get(some))

    with open_reader(backend, STATE) as reader, ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(in_thread, number) for number in range(4)]
        try:
            for batch in range(1, batches):
                attempt = job.begin(batch)
                for at in range(0, len(some), 20):  # a batch is written in pieces
                    attempt.add(dict.fromkeys(some[at : at + 20], 1))
                attempt.commit()
        finally:
            ended.set()
        assert [one.result() for one in threads] == [batches] * 4


@pytest.mark.parametrize("backend", ["sqlite", *ON_REDIS], indirect=True)
def test_a_reader_is_used_on_both_sides_of_a_fork(backend, job):
    def wrong(reader, number):
        own = KEYS[number::4]
        return sum(reader.multi_get(own) != [{"n": 1}] * len(own) for _ in range(20))

    with open_reader(backend, STATE) as reader:
        at_one_time(lambda number: reader.multi_get(KEYS), 4)  # so that the pool has several connections
        children = []
        for _ in range(3):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                found: Any = "it raised"
                try:
                    found = at_one_time(lambda number: wrong(reader, number), 4)
                finally:
                    os.write(writing, pickle.dumps(found))
                    os._exit(0)
            os.close(writing)
            children.append((pid, reading))
        assert at_one_time(lambda number: wrong(reader, number), 4) == [0] * 4
        for pid, pipe in children:
            with os.fdopen(pipe, "rb") as said:
                assert pickle.loads(said.read()) == [0] * 4
            os.waitpid(pid, 0)
