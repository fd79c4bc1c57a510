"""`mapstate serve` while its store hangs or is away, while it is asked to end, and when callers go away.

A Redis of each test's own that is stopped with SIGSTOP hangs: it takes connections and answers nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import pytest
from cases import full
from servers import RedisServer, hanging
from service import Served, client_of, serving
from states import Job, Tens

from mapstate.backends import resolve
from mapstate.backends.memory import MemoryBackend
from mapstate.errors import StoreUnavailableError
from mapstate.reader.scans import Answer
from mapstate.serve.guard import Guard
from mapstate.serve.states import MergedReads
from mapstate.testing import wait_for

TIMEOUT, BESIDE_WAIT, END = 2.0, 2.0, 7.0  # as docs/serve.md has them, for --timeout 2
SLACK = 3.0  # of a busy machine

READS = [
    *("/states", "/states/s", "/states/s/values?k=a", "/states/s/scan", "/states/never_opened/values?k=a"),
    *("/states/tens/windows?k=a", "/states/tens/windows/10", "POST /states/s/values", "POST /drpc/reads"),
]
WAITS = ["/states/s/values?k=a&min_batch=0&wait=1", "/states/s/scan?min_batch=9&wait=1", "/states/t?min_batch=0&wait=1"]
MODULE = """
import time

def reads(states, args):
    return states["s"].get("a")

def stubborn(states, args):
    while True:
        try:
            states["s"].get("a")
        except Exception:
            pass

def sleeps(states, args):
    time.sleep(3600)

def pings(states, args):
    return args
"""


def asked(served: Served, call: str, seconds: float = 60.0) -> tuple[int, Any, float]:
    """The status of an answer, its document, and the seconds that it took."""
    method, path = call.split() if " " in call else ("GET", call)
    body = '{"keys": ["a"]}' if method == "POST" else None
    connection, began = HTTPConnection("127.0.0.1", served.port, timeout=seconds), time.monotonic()
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        if answer.status == 503:
            assert answer.getheader("Retry-After") == "1"
        text = answer.read().decode()
        is_json = "json" in answer.getheader("content-type", "") and "ndjson" not in answer.getheader("content-type")
        return answer.status, json.loads(text) if is_json else text, time.monotonic() - began
    finally:
        connection.close()


def sent(served: Served, call: str) -> socket.socket:
    """A connection with a request that nobody reads the answer of."""
    method, path = call.split() if " " in call else ("GET", call)
    made = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    made.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
    return made


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "functions_in_an_outage.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "functions_in_an_outage"


@pytest.fixture
def server(start_redis: Callable[..., RedisServer]) -> RedisServer:
    made = start_redis(dbfilename="dump.rdb")  # a process, which can be stopped
    Job(made.url).batch(a=1)
    tens = Tens(made.url, "tens")
    attempt = tens.begin()
    tens.write(attempt, {0: {"a": 3}})
    tens.commit(attempt, {0}, watermark=12)
    return made


def test_every_call_ends_by_its_deadline_while_the_store_hangs(server, functions):
    """Whether the state is open already or not, and with ``wait``, too."""
    with serving(server.url, "--functions", functions, "--timeout", str(TIMEOUT)) as served:

        def all_of(calls: list[str]) -> dict[str, tuple[int, Any, float]]:
            with ThreadPoolExecutor(len(calls)) as pool:
                return dict(zip(calls, pool.map(lambda call: asked(served, call), calls), strict=True))

        known = [call for call in READS if "never" not in call]
        assert {call: answer[0] for call, answer in all_of(known).items()} == dict.fromkeys(known, 200)
        with hanging(server):
            found = all_of([*READS, *WAITS, "/health", "/ready"])
            for call in READS:
                status, document, seconds = found[call]
                if call != "/states" or status != 200:  # whose list may be known
                    assert status == (504 if "drpc" in call else 503), (call, document)
                    assert f"{TIMEOUT:g} seconds" in document["detail"]
                assert seconds < TIMEOUT + SLACK, call
            for call in WAITS:
                status, document, seconds = found[call]
                assert (status, seconds < 1 + BESIDE_WAIT + SLACK) == (503, True), (call, document, seconds)
            assert found["/health"][0] == 200
            assert found["/health"][2] < SLACK
            assert (found["/ready"][0], found["/ready"][2] < TIMEOUT + SLACK) == (503, True)
        wait_for(lambda: {one[0] for one in all_of([*known, "/ready"]).values()} == {200}, "all answers", 30)


def test_a_store_that_is_away_is_not_ready_until_it_is_back(server):
    with serving(server.url) as served:
        assert asked(served, "/ready")[0] == 200
        assert asked(served, "/states/s/values?k=a")[0] == 200
        assert asked(served, "/ready")[0] == 200
        server.kill()
        status, document, seconds = asked(served, "/ready")
        assert (status, seconds < 3 + SLACK) == (503, True)
        assert document["detail"] == "The store does not answer."  # and not its address: anybody may ask
        server.restart()  # empty, and it answers
        wait_for(lambda: asked(served, "/ready")[0] == 200, "the store is back", 30)


@pytest.mark.parametrize(("coverage", "status"), [("yes", 503), full("no", 200)])
def test_a_cluster_without_one_of_its_primaries_is_ready_as_far_as_the_ledgers_primary_says(
    start_cluster, coverage, status
):
    cluster = start_cluster(cluster_require_full_coverage=coverage)
    Job(cluster.url).batch(**{f"k{at}": at for at in range(50)})
    with serving(cluster.url, "--timeout", "3") as served:
        values = [f"/states/s/values?k=k{at}" for at in range(50)]
        assert {asked(served, call)[0] for call in ("/ready", *values)} == {200}
        with cluster.client() as client:
            (ledger,) = client.scan_iter("*!ledger")
            of_ledger = client.get_node_from_key(ledger).port
            next(one for one in cluster.masters if one.port != of_ledger).kill()
        wait_for(lambda: any(asked(served, call)[0] == 503 for call in values), "keys are away", 60)
        wait_for(lambda: asked(served, "/ready")[0] == status, "the cluster's own word", 60)


def test_whoever_may_not_read_is_not_ready_and_needs_no_token_to_hear_it(start_redis):
    server = start_redis(requirepass="right")
    for password, status in (("right", 200), ("wrong", 503)):
        with client_of(server.url.replace(":right@", f":{password}@"), token="word") as client:
            assert client.get("/ready").status_code == status
            assert client.get("/states").status_code == 401


def test_a_store_that_blocks_is_asked_once_for_all_who_ask(monkeypatch):
    """A store without an event loop is asked in a thread, which cannot be ended."""
    monkeypatch.setattr("mapstate.serve.states._READY_SECONDS", 0.2)
    backend, opened = MemoryBackend(), []

    class Blocks:
        shared_between_processes = False

        def open(self, state: str, *, ttl: float | None = None) -> Any:
            opened.append(state)
            if len(opened) == 1:
                time.sleep(1)
                raise StoreUnavailableError("away")
            return backend.open(state, ttl=ttl)

    with client_of(Blocks()) as client, ThreadPoolExecutor(10) as pool:
        assert {one.status_code for one in pool.map(client.get, ["/ready"] * 10)} == {503}
        assert opened == ["ready"]
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("name", [signal.SIGTERM, full(signal.SIGINT)], ids=["SIGTERM", "SIGINT"])
def test_it_ends_in_time_with_calls_waits_and_events_under_way(server, functions, name):
    with serving(server.url, "--functions", functions, "--timeout", "60") as served, ExitStack() as stack:
        assert asked(served, "/states/s/values?k=a")[0] == 200
        calls = [*["POST /drpc/sleeps"] * 20, "/states/s?min_batch=9&wait=60", "/events", "/states/s/scan"]
        for call in calls:
            stack.enter_context(sent(served, call))
        with hanging(server):
            calls = ["POST /drpc/stubborn", "/states/s/values?k=a", "/states", "/states/other", "/ready"]
            late = [stack.enter_context(sent(served, call)) for call in calls]
            time.sleep(0.5)  # for most of them to be under way, which nobody can see from outside
            began = time.monotonic()
            served.process.send_signal(name)
            assert served.process.wait(30) == -name
            assert time.monotonic() - began < END + SLACK
            assert late[1].recv(1000).startswith(b"HTTP/1.1 503")


def no_batch(served: Served) -> str:
    """What one hears who waits for a batch that does not come."""
    detail: str = asked(served, "/states/s?min_batch=9&wait=0")[1]["detail"]
    return detail


def listens(served: Served) -> bool:
    """Whether one more may listen to events."""
    with sent(served, "/events") as events:
        return events.recv(12) == b"HTTP/1.1 200"


def test_callers_who_went_away_keep_no_place(server, functions):
    """Of sixteen calls, of waits, of events, and of all requests; the deadline is far away."""
    bounds = {"commits:_MOST_WAITING": "2", "commits:_MOST_LISTENERS": "2", "guard:MOST_REQUESTS": "40"}
    code = {f"mapstate.serve.{name}": value for name, value in bounds.items()}
    with serving(server.url, "--functions", functions, "--timeout", "600", code=code) as served:
        assert asked(served, "POST /drpc/reads")[0] == 200
        for _ in range(3):
            gone = [sent(served, "/events")]
            while gone[-1].recv(12) == b"HTTP/1.1 200":  # at once, but after a place that was just left
                gone.append(sent(served, "/events"))
            assert len(gone) == 3
            while "2 requests wait" not in no_batch(served):  # which takes a place itself for a moment
                gone.append(sent(served, "/states/s?min_batch=9&wait=60"))
            for one in gone:
                one.close()
            wait_for(lambda: "not committed" in no_batch(served), "a place for a wait", 30)
            wait_for(lambda: listens(served), "a place for a listener", 30)
        with hanging(server):
            gone = [sent(served, f"POST /drpc/{name}") for name in ["reads", "stubborn"] * 15]
            gone += [sent(served, "/states/s/values?k=a") for _ in range(10)]
            wait_for(lambda: asked(served, "/openapi.json")[0] == 503, "all places are taken", 30)
            for one in gone:
                one.close()
            wait_for(lambda: asked(served, "/openapi.json")[0] == 200, "a place for a request", 30)
            assert asked(served, "POST /drpc/pings")[2] < SLACK
        metrics = asked(served, "/metrics")[1]
        counts = dict(re.findall(r'^mapstate_serve_requests_total\{status="(\d+)"\} (\d+)', metrics, re.MULTILINE))
        assert int(counts["499"]) >= 6 + 40


def test_a_read_that_nobody_waits_for_frees_the_place_of_its_keys(monkeypatch):
    """The store hangs for ever; those who ask go away."""
    monkeypatch.setattr("mapstate.serve.states._MOST_WAITING", 5)

    async def main() -> None:
        answers = asyncio.Event()

        class Reader:
            async def answer(self, keys: Any, **_: Any) -> Any:
                await answers.wait()
                return Answer(list(keys), cast("Any", None), None)

        reader: Any = Reader()
        merged = MergedReads(reader)
        tasks: list[Any]
        for _ in range(3):
            tasks = []
            for keys in ([1], [2], [3], [4, 5], [6, 7]):  # two are read, and three wait
                tasks.append(asyncio.create_task(merged.multi_get([(key,) for key in keys])))
                for _ in range(5):
                    await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(one) for one in found} == {asyncio.CancelledError}
        staying = asyncio.create_task(merged.multi_get([(8,)]))
        answers.set()
        assert (await asyncio.wait_for(staying, 30))[0] == [(8,)]

    asyncio.run(main())


def test_a_scan_that_stops_in_the_middle_says_so_in_its_last_line(monkeypatch):
    monkeypatch.setattr("mapstate.serve.app._PAGE", 1)
    backend = MemoryBackend()
    Job(backend).batch(a=1, b=2, c=3)
    resolved: Any = resolve(backend)
    store = resolved.open("s")
    with client_of(backend, timeout=0.5) as client:
        assert client.get("/states/s/scan").text.splitlines()[-1] == '{"is_end":true,"keys":3}'
        scan = type(store).scan

        def stops(self: Any, page_size: int) -> Any:
            for at, page in enumerate(scan(self, page_size)):
                if at == 1:
                    time.sleep(2)
                yield page

        monkeypatch.setattr(type(store), "scan", stops)
        *_, last = client.get("/states/s/scan").text.splitlines()
        assert json.loads(last)["is_end"] is False
        assert json.loads(last)["problem"]["status"] == 503


def test_a_client_that_goes_while_the_service_ends_its_request_is_no_error():
    async def main():
        begins, goes_on, sent = asyncio.Event(), asyncio.Event(), []

        async def app(*_: Any) -> None:
            begins.set()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)
            begins.set()
            await goes_on.wait()  # the client does not take it

        scope: Any = {"type": "http", "path": "/states", "headers": []}
        answer: Any = Guard(app, token=None, local_only=False, seconds=60)(scope, asyncio.Event().wait, send)
        ends = asyncio.create_task(answer)
        await begins.wait()
        request = scope["mapstate.request"]
        begins.clear()
        ends.cancel()  # as uvicorn does, five seconds after SIGTERM
        await begins.wait()
        request.leave()
        goes_on.set()
        await ends
        assert sent[0]["status"] == 503

    asyncio.run(main())
