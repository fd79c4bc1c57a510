"""Clients of an HTTP service in one process: each asks for one key after the other, and waits for each answer.

    python bench/load.py PORT CLIENTS SECONDS USERS

Prints one line of JSON: the answers, their seconds, the median and the 99th percentile in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import uvloop


class Client(asyncio.Protocol):
    """One connection. Answers have a Content-Length, and come whole or in pieces."""

    def __init__(self, users: int, seed: int, latencies: list[float]) -> None:
        self.users, self.latencies = users, latencies
        self.chance = random.Random(seed)
        self.rest = b""
        self.errors = 0

    def connection_made(self, transport: Any) -> None:
        """Ask at once."""
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        """Ask for a key by chance."""
        path = f"/states/visits/values?user_id=user-{self.chance.randrange(self.users)}"
        self.started = time.perf_counter()
        self.transport.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        """Note an answer that is whole, and ask for the next key."""
        self.rest += data
        head, gap, body = self.rest.partition(b"\r\n\r\n")
        if not gap:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return
        self.latencies.append(time.perf_counter() - self.started)
        self.errors += not head.startswith(b"HTTP/1.1 200") or b'"value":{' not in body
        self.rest = b""
        self.ask()


async def main(port: int, clients: int, seconds: float, users: int) -> None:
    loop, latencies = asyncio.get_running_loop(), list[float]()
    made = [Client(users, seed, latencies) for seed in range(clients)]
    for client in made:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.sleep(0.5)  # warm
    latencies.clear()
    started = time.perf_counter()
    await asyncio.sleep(seconds)
    taken, own = time.perf_counter() - started, sorted(latencies)
    errors = sum(client.errors for client in made)
    found = {"answers": len(own), "seconds": taken, "errors": errors}
    found |= {"median": own[len(own) // 2] * 1000, "p99": own[len(own) * 99 // 100] * 1000}
    print(json.dumps(found))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
