"""What `mapstate serve` takes beside the reader that it calls.

One Redis, one service, and its clients in a process of their own: on two cores the three of them share the machine. By
turns:

    GETs      200 clients, each with one connection, ask for one key at a time, for some seconds
    alone     the same, of a service that reads each request's key by itself
    POST      a thousand keys in one request, as objects and as bare values, beside `multi_get` of the same keys; beside
              it with a GET of /health, which is the least that a request takes; and beside what a service of this kind
              is made of: that GET, a read on an event loop, and msgspec's own parsing and encoding
    scan      all keys of a state as lines of JSON, which the client takes and does not parse, beside `scan()`

Then the memory of a service with a hundred states, each of which was listed and read.
"""

from __future__ import annotations

from measuring import ROOT, Answer, Goal, Row, by_turns, ratios, spread, table, timed  # isort: skip  # finds the servers

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import msgspec
import psutil
import uvloop
from counted_state import STATE, CountedState, arrow_batches
from servers import RedisServer
from service import Served, serving
from states import made_of_one_batch

from mapstate import open_async_reader, open_reader
from mapstate.reader.async_reader import AsyncStateReader
from mapstate.schema import Field, KeyField

CLIENTS = 200
KEYS = 1_000
STATES = 100


def loaded(served: Served, seconds: float, users: int) -> dict[str, float]:
    """What the clients have measured."""
    command = [sys.executable, ROOT / "bench/load.py", str(served.port), str(CLIENTS), str(seconds), str(users)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    assert found["errors"] == 0
    return found


class Client:
    """One connection to the service. It takes answers and does not parse them."""

    def __init__(self, served: Served) -> None:
        self.connection = socket.create_connection(("127.0.0.1", served.port))

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        """The body of an answer; of a scan, its end."""
        if body is None:
            self.connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        else:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            self.connection.sendall(head.encode() + body)
        head_end = b"\r\n\r\n"
        data = b""
        while head_end not in data:
            data += self._received()
        start, _, data = data.partition(head_end)
        assert start.startswith(b"HTTP/1.1 200"), start
        if b"chunked" in start:
            while not data.endswith(b"0" + head_end):
                data = data[-500:] + self._received()
            return data.removesuffix(b"\r\n0" + head_end)
        length = int(start.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(data) < length:
            data += self._received()
        return data

    def _received(self) -> bytes:
        if not (data := self.connection.recv(1 << 20)):
            raise ConnectionError("the service has ended the connection within an answer")
        return data


class _Key(msgspec.Struct):
    user_id: str


class _Keys(msgspec.Struct):
    keys: list[_Key]


async def _opened(url: str) -> AsyncStateReader:
    return await open_async_reader(url, "visits")


def ask(turns: int = 5, seconds: int = 4, scanned: int = 1_000_000) -> Answer:
    users = 100_000
    with RedisServer().start() as server:
        visits = (KeyField("user_id", "string"),), (Field("visits", "Count", "bigint"),)
        made_of_one_batch(server.url, "visits", *visits, {f"user-{at}": at for at in range(users)})
        answer = "lambda self, keys, **asked: self._reader.answer(keys, **asked)"
        alone = {"mapstate.serve.states:MergedReads.answer": answer}
        with serving(server.url) as merged, serving(server.url, code=alone) as single:
            found: dict[str, list[dict[str, float]]] = {"merged": [], "alone": []}
            for turn in range(turns):
                for name, served in (("merged", merged), ("alone", single))[:: 1 if turn % 2 else -1]:
                    found[name].append(loaded(served, seconds, users))
        with serving(server.url) as served, open_reader(server.url, "visits") as reader:
            keys = [f"user-{at * 7}" for at in range(KEYS)]
            objects = json.dumps({"keys": [{"user_id": key} for key in keys]}).encode()
            bare = json.dumps({"keys": keys}).encode()
            client = Client(served)
            expected = [{"visits": at * 7} for at in range(KEYS)]
            assert reader.multi_get(keys) == expected
            for body in (objects, bare):
                assert json.loads(client.ask("/states/visits/values", body))["values"] == expected
            ways = {
                "POST": lambda: client.ask("/states/visits/values", objects),
                "bare": lambda: client.ask("/states/visits/values", bare),
                "multi_get": lambda: reader.multi_get(keys),
                "least": lambda: (client.ask("/health"), reader.multi_get(keys)),
            }
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
                on_loop = loop.run(_opened(server.url))

                async def seconds_of_read() -> float:
                    start = time.perf_counter()
                    await on_loop.multi_get(keys)
                    return time.perf_counter() - start

                def parts() -> float:
                    asked = timed(lambda: client.ask("/health"))
                    read = loop.run(seconds_of_read())
                    return asked + read + timed(lambda: (parse(objects), encode({"values": expected})))

                parse, encode = msgspec.json.Decoder(_Keys).decode, msgspec.json.Encoder().encode
                bulk = by_turns(ways | {"parts": parts}, turns * 50, warm_up=50)
                loop.run(on_loop.close())
    with RedisServer().start() as server:
        state = CountedState(server.url)
        state.apply(arrow_batches([f"user-{at}" for at in range(scanned)]))
        with serving(server.url) as served, open_reader(server.url, STATE) as reader:

            def by_http() -> None:  # by a connection of its own: an idle one is ended
                assert json.loads(Client(served).ask(f"/states/{STATE}/scan").splitlines()[-1]) == {
                    "is_end": True,
                    "keys": scanned,
                }

            def by_reader() -> None:
                assert sum(1 for _ in reader.scan(5_000)) == scanned

            scans = by_turns({"scan": by_http, "reader": by_reader}, turns)
    megabytes = memory_of_many()
    rates = {name: [one["answers"] / one["seconds"] for one in own] for name, own in found.items()}
    p99 = [one["p99"] for one in found["merged"]]
    medians = {
        name: [statistics.median(own[at : at + 50]) for at in range(0, len(own), 50)] for name, own in bulk.items()
    }
    return Answer(
        [
            Row(
                f"GETs of {CLIENTS} clients, thousands a second",
                "1",
                [one / 1000 for one in rates["merged"]],
                Goal("least", 5),
            ),
            Row("their 99th percentile, milliseconds", "1", p99, Goal("most", 50)),
            Row("GETs a second", "each key read by itself", ratios(rates["merged"], rates["alone"]), Goal("least", 3)),
            Row(
                f"POST of {KEYS:,} keys",
                "`multi_get`",
                ratios(medians["POST"], medians["multi_get"]),
                Goal("most", 1.5),
            ),
            Row("the same, as bare values", "`multi_get`", ratios(medians["bare"], medians["multi_get"])),
            Row(
                "GET of /health, then `multi_get`",
                "`multi_get`",
                ratios(medians["least"], medians["multi_get"]),
                note="what the goal of POST would be for a service that reads and writes JSON in no time",
            ),
            Row(
                "GET of /health, `multi_get` on an event loop, msgspec's JSON",
                "`multi_get`",
                ratios(medians["parts"], medians["multi_get"]),
                note="the same for a service that adds nothing of its own to them",
            ),
            Row(f"scan of {scanned:,} keys", "`scan()`", ratios(scans["scan"], scans["reader"]), Goal("most", 1.5)),
            Row(f"memory with {STATES} states, megabytes", "1", [megabytes], Goal("most", 120)),
        ],
        f"{turns} turns of {seconds} s of GETs, {50 * turns} POSTs, {turns} scans; {os.cpu_count()} cores for all",
        table(
            "way | measured",
            [
                ("GETs a second", spread(rates["merged"])),
                ("the same, each key read by itself", spread(rates["alone"])),
                ("their median, milliseconds", spread([one["median"] for one in found["merged"]])),
                (f"POST of {KEYS:,} keys, milliseconds", spread(medians["POST"], 1000)),
                ("the same, as bare values", spread(medians["bare"], 1000)),
                ("`multi_get` of them, milliseconds", spread(medians["multi_get"], 1000)),
                (f"scan of {scanned:,} keys, seconds", spread(scans["scan"])),
                ("`scan()` of them, seconds", spread(scans["reader"])),
            ],
        ),
    )


def memory_of_many() -> float:
    """The resident memory of a service with many states in use."""
    with RedisServer().start() as server:
        schema: Any = ((KeyField("k", "string"),), (Field("n", "Count", "bigint"),))
        for at in range(STATES):
            made_of_one_batch(server.url, f"state-{at}", *schema, {"a": at})
        with serving(server.url) as served:
            client = Client(served)
            for _ in range(3):
                assert len(json.loads(client.ask("/states"))["states"]) == STATES
                client.ask("/metrics")
                for at in range(STATES):
                    assert json.loads(client.ask(f"/states/state-{at}/values?k=a"))["value"] == {"n": at}
            return psutil.Process(served.process.pid).memory_info().rss / (1 << 20)


if __name__ == "__main__":
    print(*(row.line() for row in ask().rows), sep="\n")
