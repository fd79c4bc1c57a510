"""`mapstate serve` through outages of its Redis, which hangs (SIGSTOP), is killed, or both, while batches commit.

A batch writes its number into all keys. So an answer is right if all of its values are that of its batch, and no
answer is of a batch before one that the same client has seen.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest
from servers import RedisServer, hanging, wait_until
from service import Served, serving
from states import Job

from mapstate.errors import StoreUnavailableError

pytestmark = [pytest.mark.redis, pytest.mark.slow]

TIMEOUT = 2.0  # of a request, by --timeout
WAIT = 1.0  # of a request that waits for a batch
BACK = 30.0  # seconds after which all is right again
END = 7.0  # seconds after which SIGTERM has ended it
SLACK = 6.0  # of a busy machine
CLIENTS = 4
KEYS = [f"k{at}" for at in range(50)]
BODY = json.dumps({"keys": KEYS})


class Writer:
    """A driver that commits one batch after the other. Where the store is away, it opens the state anew."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}?socket_timeout=1&retries=0"
        self.committed = -1

    def write(self, ended: threading.Event) -> None:
        job: Job | None = None
        while not ended.is_set():
            try:
                job = job or Job(self._url)
                job.batch(**dict.fromkeys(KEYS, job.next))
                self.committed = job.next - 1
            except StoreUnavailableError:
                job = None


class Clients:
    """Clients that ask without a pause, each for itself, and look at each answer."""

    def __init__(self, served: Served, writer: Writer) -> None:
        self._served, self._writer = served, writer
        self.answers = Counter[str]()
        self.newest = -1

    def ask(self, method: str, path: str, most: float, body: str | None = None) -> tuple[int, bytes]:
        """An answer, which has to come in time."""
        connection, began = HTTPConnection("127.0.0.1", self._served.port, timeout=most + SLACK), time.monotonic()
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            found = answer.status, answer.read()
        finally:
            connection.close()
        assert time.monotonic() - began < most + SLACK, (path, found)
        return found

    def read(self, seed: int, ended: threading.Event) -> None:
        chance, seen = random.Random(seed), -1
        while not ended.is_set():
            call = chance.choice([self.values, self.value, self.scan, self.wait, self.is_healthy])
            batch = call(chance)
            if batch is not None:
                assert batch >= seen, f"{call.__name__} went back from {seen} to {batch}"
                seen, self.newest = batch, max(self.newest, batch)

    def values(self, _: random.Random) -> int | None:
        return self._seen(*self.ask("POST", "/states/s/values", TIMEOUT, BODY))

    def value(self, chance: random.Random) -> int | None:
        return self._seen(*self.ask("GET", f"/states/s/values?k={chance.choice(KEYS)}", TIMEOUT))

    def wait(self, _: random.Random) -> int | None:
        least = self._writer.committed + 1
        status, body = self.ask("GET", f"/states/s/values?k=k0&min_batch={least}&wait={WAIT}", WAIT + TIMEOUT)
        batch = self._seen(status, body)
        assert batch is None or batch >= least
        return batch

    def scan(self, _: random.Random) -> int | None:
        body = self.ask("GET", "/states/s/scan", TIMEOUT)[1]
        *rows, last = map(json.loads, body.splitlines())
        if not last.get("is_end"):
            return self._refused(last.get("problem", last))
        batch, keys = -1, set()
        for row in rows:  # of pages, each as of a batch
            if "as_of" in row:
                assert row["as_of"]["batch_id"] >= batch
                batch = row["as_of"]["batch_id"]
            if "value" in row:
                keys.add(row["key"]["k"])
                assert row["value"] == {"n": batch}
        assert keys == set(KEYS)
        self.answers["right"] += 1
        return batch

    def is_healthy(self, _: random.Random) -> None:
        assert self.ask("GET", "/health", 0)[0] == 200
        self.answers["health"] += 1

    def is_ready(self) -> bool:
        status, _ = self.ask("GET", "/ready", TIMEOUT)
        assert status in (200, 503)
        return status == 200

    def _seen(self, status: int, body: bytes) -> int | None:
        document = json.loads(body)
        if status != 200:
            return self._refused(document)
        return self._right(document["as_of"]["batch_id"], document.get("values") or [document["value"]])

    def _right(self, batch: int, values: list[dict[str, int]]) -> int:
        assert {value["n"] for value in values} == {batch}
        self.answers["right"] += 1
        return batch

    def _refused(self, problem: dict[str, Any]) -> None:
        assert problem["status"] == 503, problem
        self.answers["refused"] += 1


@contextmanager
def killed(server: RedisServer) -> Iterator[None]:
    server.kill()
    yield
    server.restart()


@contextmanager
def hung_and_killed(server: RedisServer) -> Iterator[None]:
    server.send(signal.SIGSTOP)
    yield
    server.kill()
    server.restart()


OUTAGES = [hung_and_killed, hanging, killed]


def test_every_answer_in_an_outage_is_right_or_refused_and_comes_in_time(start_redis, rounds, tally):
    server = start_redis(dbfilename="dump.rdb", appendonly="yes", appendfsync="always")
    writer, ended, outages = Writer(server.url), threading.Event(), rounds(1, 100)
    with serving(server.url, "--timeout", str(TIMEOUT)) as served, ThreadPoolExecutor(CLIENTS + 1) as pool:
        clients = Clients(served, writer)
        threads = [pool.submit(writer.write, ended)]

        def until(true: Callable[[], Any], event: str) -> None:
            """Waits, as long as no client has met what must not be."""
            for one in threads:
                if one.done():
                    one.result()
            wait_until(lambda: true() or any(one.done() for one in threads), event, BACK)

        try:
            until(lambda: writer.committed >= 0, "the first batch")
            threads += [pool.submit(clients.read, at, ended) for at in range(CLIENTS)]
            for outage, _ in zip(itertools.cycle(OUTAGES), range(outages), strict=False):
                newest = clients.newest
                until(lambda newest=newest: clients.newest > newest, "newer batches")
                with outage(server):
                    refused = clients.answers["refused"]
                    until(lambda: not clients.is_ready(), "it is not ready")
                    until(lambda refused=refused: clients.answers["refused"] > refused + CLIENTS, "refused requests")
                until(clients.is_ready, "it is ready")
                newest = writer.committed
                until(lambda newest=newest: clients.newest > newest, "newer batches after the outage")
        finally:
            ended.set()
        for one in threads:
            one.result()
        with hanging(server):
            waiting = HTTPConnection("127.0.0.1", served.port)
            waiting.request("GET", "/states/s/values?k=k0&min_batch=1000000&wait=60")
            began = time.monotonic()
            assert served.end() == -signal.SIGTERM
            assert time.monotonic() - began < END + SLACK
            waiting.close()
    answers = clients.answers
    tally("serve in outages of Redis", outages=outages, right_answers=answers["right"], refused=answers["refused"])
    assert min(answers[one] for one in ("right", "refused", "health")) > 0
