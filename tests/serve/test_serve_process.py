"""`mapstate serve` as a process: many clients, slow clients, hostile ones, and a store that is being written."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

import psutil
import pytest
from servers import wait_until
from service import serving
from states import Job, made_of_one_batch
from versions import Version

from mapstate.operations.swap import swap
from mapstate.schema import Field, KeyField

VISITS = (Field("visits", "Count", "bigint"), Field("bytes", "Sum(bytes)", "bigint"))
TEXT = (Field("text", "Last(text)", "string"),)
USER = (KeyField("user_id", "string"),)


def asked(served, path, *, method="GET", body=None, headers=None, seconds=30.0):
    """The status and the document of an answer."""
    connection = HTTPConnection("127.0.0.1", served.port, timeout=seconds)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def raw(served, data=b""):
    made = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    made.sendall(data)
    return made


def taken(connection):
    """All that comes until the other side ends the connection."""
    came = bytearray()
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            came += part
    return came


def is_closed(connection):
    """Whether the other side has ended the connection; waits for it."""
    taken(connection)
    return True


@pytest.fixture
def url(tmp_path):
    made = f"sqlite:///{tmp_path}/s.db"
    made_of_one_batch(made, "visits", USER, VISITS, {f"u{at}": (at, 2 * at) for at in range(1000)})
    return made


def test_it_answers_until_it_is_asked_to_end(url):
    with serving(url) as served:
        assert asked(served, "/states/visits/values?user_id=u7")[1]["value"] == {"visits": 7, "bytes": 14}
        with raw(served, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n") as events:
            assert b"200" in events.recv(100)
            began = time.monotonic()
            assert served.end() in (0, -signal.SIGTERM)  # as uvicorn ends
            assert time.monotonic() - began < 15


def test_an_address_that_is_taken_is_one_message(url):
    with (
        serving(url) as served,
        pytest.raises(AssertionError, match="cannot listen"),
        serving(url, "--port", str(served.port)),
    ):
        pass


def test_no_secret_is_in_a_message_or_an_answer(tmp_path):
    url = "redis://user:s3cr3t-word@127.0.0.1:1/0?retries=0&socket_timeout=1"
    with serving(url) as served:
        for path in ("/states", "/states/s", "/states/s/values?k=1", "/metrics", "/"):
            connection = HTTPConnection("127.0.0.1", served.port, timeout=30)
            connection.request("GET", path)
            answer = connection.getresponse()
            assert b"s3cr3t" not in answer.read()
            assert answer.status == (200 if path in ("/", "/metrics") else 503)
            connection.close()
        served.end()
        assert "s3cr3t" not in served.log.result()


def test_a_token_from_the_environment_lets_other_machines_in(url, monkeypatch):
    monkeypatch.setenv("SERVE_TOKEN", "tok-1")
    with serving(url, "--host", "0.0.0.0", "--token-env", "SERVE_TOKEN") as served:
        assert asked(served, "/states")[0] == 401
        assert asked(served, "/states", headers={"Authorization": "Bearer tok-1", "Host": "other.example"})[0] == 200
    for options in (["--host", "0.0.0.0"], ["--token-env", "NOT_SET"]):
        with pytest.raises(AssertionError, match="token"), serving(url, *options):
            pass


def test_a_client_that_is_slow_with_its_request_is_cut_off(url):
    with serving(url, patches={"_HEAD_SECONDS": 0.5, "_BODY_SECONDS": 1.0}) as served:
        slow = [
            raw(served),
            raw(served, b"GET /health HTTP/1.1\r\nHost:"),
            raw(served, b"POST /states/visits/values HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"),
        ]
        for connection in slow:
            with connection:
                assert is_closed(connection)
        wait_until(lambda: is_healthy(served), "an answer to a client that is in time")


def is_healthy(served):
    """Whether /health answers. A client on a busy machine may be cut off, too."""
    with suppress(OSError, HTTPException):
        return asked(served, "/health")[0] == 200
    return False


def test_a_client_that_sends_the_end_of_a_line_after_an_answer_is_cut_off(url):
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(url, patches={"_HEAD_SECONDS": 4.0}) as served, raw(served, request) as idle:
        idle.settimeout(20)
        assert b"200 OK" in idle.recv(10_000)
        for _ in range(3):
            idle.sendall(b"\r\n")
        assert is_closed(idle)
        assert asked(served, "/health")[0] == 200


@pytest.mark.parametrize("number", [0, 1, 50])
def test_a_client_that_leaves_with_requests_behind_one_under_way_keeps_no_place(url, number):
    events, more = (f"GET /{call} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for call in ("events", "health"))
    with serving(url, code={"mapstate.serve.commits:_MOST_LISTENERS": "1"}) as served:

        def is_taken():
            with raw(served, events) as other:
                return b"200 OK" in other.recv(15)

        with raw(served, events + more * number) as client:
            assert b"200 OK" in client.recv(15)
            assert not is_taken()
        wait_until(is_taken, "the place of a client that has gone", 10)  # the next comment comes after 15 seconds


def test_requests_behind_one_under_way_are_answered_in_their_order(url):
    asks = [f"GET /states/visits/values?user_id=u{at} HTTP/1.1\r\nHost: localhost\r\n" for at in range(300)]
    with serving(url) as served, raw(served, "\r\n".join([*asks, ""]).encode()) as client:
        client.sendall(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        came = taken(client)
        answers = [part.partition(b"\r\n\r\n")[2] for part in came.split(b"HTTP/1.1 ")[1:]]
        assert [json.loads(one)["key"]["user_id"] for one in answers[:-1]] == [f"u{at}" for at in range(300)]
        assert json.loads(answers[-1])["status"] == 404


def test_an_endless_head_is_cut_off(url):
    with serving(url) as served, raw(served, b"GET /health HTTP/1.1\r\n") as endless:
        with pytest.raises(ConnectionError):
            endless.sendall(b"".join(b"X-%d: %s\r\n" % (at, b"a" * 1000) for at in range(100_000)))
        assert asked(served, "/health")[0] == 200
        assert psutil.Process(served.process.pid).memory_info().rss < 200 << 20


def test_a_body_of_a_hundred_megabytes_is_refused(url):
    with serving(url) as served:
        size = 100 << 20
        head = b"POST /states/visits/values HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
        with raw(served, head) as large:
            with suppress(ConnectionError):
                for _ in range(size >> 20):
                    large.sendall(b"x" * (1 << 20))
            assert b"413" in large.recv(1000)
        assert psutil.Process(served.process.pid).memory_info().rss < 200 << 20
        assert asked(served, "/health")[0] == 200


def test_a_client_that_does_not_take_its_answer_is_cut_off(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    made_of_one_batch(url, "s", USER, TEXT, {f"u{at}": "x" * 1000 for at in range(8_000)})
    with serving(url, patches={"_STALL_SECONDS": 0.5}) as served, ExitStack() as stack:
        request = b"GET /states/s/scan HTTP/1.1\r\nHost: localhost\r\n\r\n"
        lazy = [stack.enter_context(raw(served, request)) for _ in range(16)]
        assert [one.recv(1) for one in lazy] == [b"H"] * 16
        server = psutil.Process(served.process.pid)
        wait_until(lambda: not any(one.raddr for one in server.net_connections()), "the lazy clients are cut off")
        assert not any(taken(one).endswith(b"\r\n0\r\n\r\n") for one in lazy)
        assert server.memory_info().rss < 400 << 20


def test_thousands_of_connections_are_held_or_refused(url):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count + 200, hard)), hard))
    try:
        with serving(url) as served, ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(raw(served))
            status, _ = asked_any(served)
            assert status in (200, 503)
            stack.close()
            wait_until(lambda: asked_any(served)[0] == 200, "connections are free again")
            assert psutil.Process(served.process.pid).memory_info().rss < 400 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.redis
def test_ten_times_the_clients_are_answered_or_refused(redis_url):
    """Two thousand clients, each with one connection, that ask without a pause while batches are committed.

    They ask for six seconds, and on until two batches were seen: on a busy machine the first answers, which are all
    of one merged read, may take as long.
    """
    job = Job(redis_url)
    job.batch(a=1, b=1)
    clients, seconds, at_most = 2_000, 6.0, 120.0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(clients + 500, hard)), hard))
    statuses, values = Counter[int](), Counter[int]()
    body = b'{"keys":[{"k":"a"},{"k":"b"}]}'
    request = b"POST /states/s/values HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def client(port, end):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while asyncio.get_running_loop().time() < end or len(values) < 2:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                answer = await reader.readexactly(length)
                statuses[int(head[9:12])] += 1
                if head[9:12] == b"200":
                    first, second = (value["n"] for value in json.loads(answer)["values"])
                    assert first == second  # of one batch
                    values[first] += 1
        finally:
            writer.close()

    async def load(port):
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        asking = asyncio.gather(*(client(port, end) for _ in range(clients)))
        number = 1
        while not asking.done():
            number += 1
            await asyncio.to_thread(job.batch, a=number, b=number)
        await asking

    try:
        with serving(redis_url, patches={"_HEAD_SECONDS": at_most}) as served:
            asyncio.run(asyncio.wait_for(load(served.port), at_most))
            assert set(statuses) <= {200, 503}
            assert statuses[200] > 200
            assert len(values) > 1
            assert psutil.Process(served.process.pid).memory_info().rss < 250 << 20
            assert asked(served, "/states/s/values?k=a")[1]["value"]["n"] >= max(values)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def asked_any(served):
    """As `asked`, for an answer that may be uvicorn's own, in text."""
    connection = HTTPConnection("127.0.0.1", served.port, timeout=30)
    try:
        connection.request("GET", "/states/visits/values?user_id=u7")
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_what_is_no_http_is_refused(url):
    with serving(url) as served:
        for data in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\x00" * 1000, b"GET / HTTP/9.9\r\n\r\n"):
            with raw(served, data) as odd:
                odd.shutdown(socket.SHUT_WR)
                is_closed(odd)
        assert asked(served, "/health")[0] == 200


def test_more_clients_than_it_takes_are_answered_or_refused(url):
    with serving(url) as served:
        found: list[int] = []
        body = json.dumps({"keys": [{"user_id": f"u{at}"} for at in range(1000)]})

        def ask(_):
            for _ in range(5):
                status, document = asked(served, "/states/visits/values", method="POST", body=body, seconds=60)
                found.append(status)
                if status == 200:
                    assert len(document["values"]) == 1000

        with ThreadPoolExecutor(100) as pool:
            list(pool.map(ask, range(100)))
        assert len(found) == 500
        assert set(found) <= {200, 503}
        assert 200 in found


@pytest.mark.redis
def test_every_answer_is_of_one_batch_while_a_job_writes(redis_url):
    """A batch writes its number into all keys; some attempts are lost."""
    keys = [f"k{at}" for at in range(300)]
    job = Job(redis_url)
    job.batch(**dict.fromkeys(keys, 0))
    ended, answers = threading.Event(), list[int]()
    body = json.dumps({"keys": [{"k": key} for key in keys]})

    def read(served: Any) -> None:
        for count in itertools.count():
            if ended.is_set():
                return
            _, many = asked(served, "/states/s/values", method="POST", body=body)
            assert {value["n"] for value in many["values"]} == {many["as_of"]["batch_id"]}
            _, one = asked(served, f"/states/s/values?k={keys[count % 300]}")
            assert one["value"]["n"] == one["as_of"]["batch_id"]
            answers.append(many["as_of"]["batch_id"])

    with serving(redis_url) as served, ThreadPoolExecutor(6) as pool:
        reads = [pool.submit(read, served) for _ in range(6)]
        for at in itertools.count(1):
            if len(answers) > 100 and len(set(answers)) > 20:
                break
            if any(one.done() for one in reads):  # which is an error
                break
            if at % 3 == 0:
                job.attempt(**dict.fromkeys(keys, -1))
            job.batch(**dict.fromkeys(keys, at))
        ended.set()
        for one in reads:
            one.result()


def test_a_tag_holds_only_for_the_version_and_the_commit_that_it_names(tmp_path):
    """Swapped there and back over HTTP. Both versions have equal values, and count equal batches by equal txids."""
    url = f"sqlite:///{tmp_path}/s.db"
    versions = [Version(url, state=name) for name in ("v", "v.2")]
    for job in versions:
        job.batch_to(5, a=5)

    def answer(tag=None, state="v"):
        connection = HTTPConnection("127.0.0.1", served.port, timeout=30)
        connection.request("GET", f"/states/{state}/values?k=a", headers={"If-None-Match": tag} if tag else {})
        found = connection.getresponse()
        document = json.loads(found.read() or b"{}")
        connection.close()
        return found.status, found.headers["ETag"], document

    def swapped(to, tag, **how):
        """The answer after a swap to one who has that of before: for a second it may be of before."""
        swap(url, {"v": to}, **how)
        return wait_until(lambda: (found := answer(tag))[0] == 200 and found, "the swap is seen")

    with serving(url) as served:
        _, first, document = answer()
        status, second, there = swapped("v.2", first)
        assert (status, there["version"], there["value"]) == (200, "v.2", document["value"])
        assert there["as_of"]["txid"] == document["as_of"]["txid"]
        assert second != first
        assert [answer(second)[0], answer(f"{first}, {second}")[0], answer(first)[0]] == [304, 304, 200]
        status, third, back = swapped("v", second)
        assert (third, back) == (first, document)  # the same version and the same batch
        assert [answer(first)[0], answer(second)[0]] == [304, 200]
        swapped("v.2", first)
        versions[0].batch_to(6, a=6)
        versions[1].batch_to(6, a=5)
        swap(url, {"v": "v"})
        newest = wait_until(lambda: "version" not in (found := answer())[2] and found, "the swap back is seen")
        assert newest[2]["value"] == {"n": 6}
        assert [answer(tag)[0] for tag in (first, second, newest[1])] == [200, 200, 304]


@pytest.mark.redis
def test_a_user_of_redis_who_may_only_read_is_enough(start_redis):
    server = start_redis()
    job = Job(server.url)
    job.batch(a=1, b=2)
    with server.client() as admin:
        rights = ("+get", "+mget", "+exists", "+type", "+scan", "+lrange", "+info", "+hello", "+client", "+select")
        admin.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", *rights)
    with serving(server.url.replace("redis://", "redis://reader:pw@")) as served:
        assert asked(served, "/states/s/values?k=a")[1]["value"] == {"n": 1}
        assert asked(served, "/states")[1]["states"][0]["name"] == "s"
        assert asked(served, "/states/s")[0] == 200
        assert asked_any(served)[0] == 404
        connection = HTTPConnection("127.0.0.1", served.port, timeout=30)
        connection.request("GET", "/states/s/scan")
        assert connection.getresponse().read().count(b'"key"') == 2
        connection.close()
