"""Readers of every store: threads share one, tasks of an event loop share one, and each read is of one batch."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from servers import free_port

from mapstate import open_async_reader, open_reader
from mapstate.backends import resolve
from mapstate.capabilities import Scan
from mapstate.errors import StoreUnavailableError, UsageError
from mapstate.event_loop import wait_for
from mapstate.maps.serialized import SerializedMap
from mapstate.reader.changes import Position
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
    """Another package's."""

    shared_between_processes = False

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}

    def open(self, state, *, ttl=None):
        return PlainStore(self.records)


class PlainStore:
    """One thread at a time calls it, and it says so if two do."""

    def __init__(self, records: dict[str, bytes]) -> None:
        self.records = records
        self.called = threading.Lock()

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
def test_each_read_of_threads_and_tasks_beside_a_writer_is_of_one_batch(backend, job):
    """Four threads and four tasks read all keys; each committed batch adds one to every key."""
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

    async def in_tasks():
        async def task(tasks_reader):
            seen: list[int] = []
            while not ended.is_set() or len(seen) < 2:
                reading(seen, await tasks_reader.multi_get(some))
            return whole(await tasks_reader.multi_get(some))

        async with open_async_reader(backend, STATE) as tasks_reader:
            return await asyncio.gather(*(task(tasks_reader) for _ in range(4)))

    with open_reader(backend, STATE) as reader, ThreadPoolExecutor(5) as pool:
        threads = [pool.submit(in_thread, number) for number in range(4)]
        tasks = pool.submit(asyncio.run, in_tasks())
        try:
            for batch in range(1, batches):
                attempt = job.begin(batch)
                for at in range(0, len(some), 20):  # a batch is written in pieces
                    attempt.add(dict.fromkeys(some[at : at + 20], 1))
                attempt.commit()
        finally:
            ended.set()
        assert [one.result() for one in threads] == tasks.result() == [batches] * 4


@pytest.mark.parametrize("backend", EVERYWHERE, indirect=True)
def test_an_async_reader_gives_what_a_reader_gives(backend, job):
    job.run(1, {"user-7": 5, "ü|\\": 1})

    async def read():
        reader = await open_async_reader(backend, STATE)
        try:
            return (
                await reader.get("user-7"),
                await reader.multi_get(["user-7", "no", "ü|\\", *KEYS]),
                sorted([item async for item in reader.scan(50)]),
                sorted([item async for item in reader.scan(columns=["n"])]),
                (await reader.ledger()).last_commit,
                await reader.key_count(),
                (await reader.count_keys())[:2],
                await reader.reports(),
                (await reader.to_arrow(columns=["n"])).sort_by("k").to_pydict(),
            )
        finally:
            await reader.close()
            await reader.close()

    with open_reader(backend, STATE) as reader:
        assert asyncio.run(read()) == (
            {"n": 6},
            reader.multi_get(["user-7", "no", "ü|\\", *KEYS]),
            sorted(reader.scan(50)),
            sorted(reader.scan(columns=["n"])),
            reader.ledger().last_commit,
            reader.key_count(),
            reader.count_keys()[:2],
            reader.reports(),
            reader.to_arrow(columns=["n"]).sort_by("k").to_pydict(),
        )


@pytest.mark.parametrize("backend", EVERYWHERE, indirect=True)
def test_a_cancelled_read_leaves_no_reply_for_the_next_one(backend, job):
    """The read is cancelled after each number of turns of the loop, from before its request to after its reply."""
    job.run(1, {"user-7": 5})

    async def read():
        ends: Counter[bool] = Counter()
        async with open_async_reader(backend, STATE) as reader:
            for turns in range(40):
                task = asyncio.create_task(reader.multi_get(KEYS))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                ends[task.cancelled()] += 1
                assert await asyncio.gather(reader.get("user-7"), reader.get("user-8")) == [{"n": 6}, {"n": 1}]
        return ends

    assert asyncio.run(read())[True] > 0


@pytest.mark.parametrize("backend", ON_REDIS, indirect=True)
def test_a_scan_that_is_left_holds_no_connection(backend, job):
    async def read():
        async with open_async_reader(backend, STATE) as reader:
            scan = reader.scan(10)
            assert (await anext(scan))[1] == {"n": 1}
            await scan.aclose()
            return await reader.multi_get(KEYS)

    assert asyncio.run(read()) == [{"n": 1}] * len(KEYS)


@pytest.mark.parametrize("backend", ON_REDIS[-1:], indirect=True)
def test_an_end_of_connections_that_takes_too_long_is_no_error(backend, job, monkeypatch):
    """A busy event loop sees it late, and redis-py waits no longer than for a connection."""
    monkeypatch.setattr(asyncio.StreamWriter, "wait_closed", lambda _: asyncio.Event().wait())

    async def read():
        async with open_async_reader(backend, STATE) as reader:
            return await reader.get("user-7")

    assert asyncio.run(read()) == {"n": 1}


@redis
@pytest.mark.parametrize("shape", ["redis", "redis+cluster", "redis+sentinel"])
def test_an_async_reader_of_a_server_that_is_away_says_so_without_the_password(shape):
    url = f"{shape}://user:hunter2@127.0.0.1:{free_port()}/{'mymaster' if 'sentinel' in shape else '0'}?retries=1"

    async def read():
        async with open_async_reader(url, STATE):
            pytest.fail("nobody answers there")

    with pytest.raises(StoreUnavailableError) as caught:
        asyncio.run(read())
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_reader_is_opened_before_it_reads_and_once(tmp_path):
    backend = PlainBackend()
    CountingQuery(backend.open(STATE), How(backend)).run(0, {"a": 1})

    async def read():
        reader = open_async_reader(backend, STATE)
        with pytest.raises(UsageError, match="async with"):
            await reader.get("a")
        async with reader:
            assert await reader.get("a") == {"n": 1}
            with pytest.raises(UsageError, match="open already"):
                await reader
        with pytest.raises(UsageError, match="async with"):
            await reader.get("a")

    asyncio.run(read())


ARGUMENTS: dict[str, tuple[Any, ...]] = {  # of those of a reader's methods that need some
    "get": ("a",),
    "multi_get": (["a"],),
    "multi_get_as_of": (["a"],),
    "answer": (["a"],),
    "found": (["a"],),
    "window": (1,),
    "parts": (1,),
    "changed_keys": (Position(1, 1), Position(2, 1)),
}


def methods_of(reader):
    """What a reader can be asked; what needs no keys and what takes a cursor, too."""
    names = [name for name in dir(reader) if not name.startswith("_") and name not in ("close", "is_thread_safe")]
    assert set(ARGUMENTS) & set(dir(reader)) <= set(names)
    assert len(names) > 12
    return [(name, partial(getattr(reader, name), *ARGUMENTS.get(name, ()))) for name in names] + [
        ("no keys", partial(reader.multi_get, [])),
        ("a page", partial(reader.pages_as_of, 7, cursor="x")),
    ]


def refusal_of(call):
    """What a call of a reader says, or the first step of what it gives."""

    def answer():
        found = call()
        return next(found) if isinstance(found, Iterator) else found

    with pytest.raises(UsageError) as caught:
        answer()
    return caught.value.message


async def async_refusal_of(call):
    async def answer():
        found = call()
        return await (anext(found) if isinstance(found, AsyncIterator) else found)

    with pytest.raises(UsageError) as caught:
        await answer()
    return caught.value.message


@pytest.mark.parametrize("backend", ["sqlite", "third party", *ON_REDIS[:1]], indirect=True)
def test_all_that_a_reader_can_be_asked_is_refused_alike_after_its_end_and_on_another_loop(backend):
    CountingQuery(backend.open(STATE), How(backend)).run(0, {"a": 1, "b": 2})
    said = dict[str, str]()
    with open_reader(backend, STATE) as reader:
        scan = reader.pages(1) if isinstance(backend.open(STATE), Scan) else iter([reader.get("a")])
        next(scan)
        ARGUMENTS["part"] = (reader.parts(1)[0],)
    if isinstance(backend.open(STATE), Scan):
        said["closed in a scan"] = refusal_of(lambda: scan)
    for name, call in methods_of(reader):
        said[f"closed: {name}"] = refusal_of(call)
    said["closed: with"] = refusal_of(reader.__enter__)
    reader.close()

    async def opened():
        return await open_async_reader(backend, STATE)

    async def on_another_loop(reader):
        for name, call in methods_of(reader):
            said[f"other loop: {name}"] = await async_refusal_of(call)
        said["other loop: close"] = await async_refusal_of(reader.close)

    async def after_its_end(reader):
        assert await reader.get("a") == {"n": 1}
        await reader.close()
        await reader.close()
        for name, call in methods_of(reader):
            said[f"closed on a loop: {name}"] = await async_refusal_of(call)
        said["closed on a loop: with"] = await async_refusal_of(reader.__aenter__)

    with asyncio.Runner() as own, asyncio.Runner() as other:
        reader = own.run(opened())
        other.run(on_another_loop(reader))
        own.run(after_its_end(reader))
    assert len(set(said.values())) == 1, Counter(said.values())
    assert "is not open here" in said["closed: get"]


class BusyBackend(PlainBackend):
    """Its store notes the ends of reads and the close. A read waits until somebody has called ``go_on``."""

    def __init__(self, *, on_loop: bool) -> None:
        super().__init__()
        self.ends: list[str] = []
        self.reading, self.go_on = threading.Event(), threading.Event()
        self.pause = (lambda: wait_for(asyncio.sleep(0))) if on_loop else (lambda: None)
        if on_loop:
            self.on_event_loop = lambda: self

    def open(self, state, *, ttl=None):
        return BusyStore(self)


class BusyStore:
    thread_safe = True

    def __init__(self, backend: BusyBackend) -> None:
        self.backend = backend

    def multi_get(self, keys):
        backend = self.backend
        if "a" in keys:
            backend.reading.set()
            while not backend.go_on.wait(0.01):
                backend.pause()
            backend.ends.append("read")
        return [backend.records.get(key) for key in keys]

    def close(self):
        self.backend.ends.append("close")


@pytest.mark.parametrize("on_loop", [False, True], ids=["threads", "event loop"])
def test_the_connections_are_closed_after_the_reads_that_run(on_loop):
    """Otherwise the connection of such a read would stay open."""
    backend = BusyBackend(on_loop=on_loop)
    CountingQuery(PlainStore(backend.records), How(backend)).run(0, {"a": 1})

    async def read():
        reader = await open_async_reader(backend, STATE)
        found = asyncio.create_task(reader.get("a"))
        assert await asyncio.to_thread(backend.reading.wait, 30)
        closing = asyncio.create_task(reader.close())
        for _ in range(3):
            await asyncio.sleep(0.01)
        backend.go_on.set()
        await closing
        return await found

    assert asyncio.run(read()) == {"n": 1}
    assert backend.ends == ["read", "close", "close"]  # the store of the state, and that of its alias


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
