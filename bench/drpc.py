"""What a DRPC request takes: by a Spark job, and over readers in `mapstate serve`, with 1, 10 and 100 that wait.

A state of 100,000 keys on one Redis. Each caller asks for one key after the other. Beside it the same look-up by a GET
of one key, which reads the state without a function.
"""

from __future__ import annotations

from measuring import Answer, Row, spread, table  # isort: skip  # finds the servers

import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from servers import RedisServer
from service import serving
from states import made_of_one_batch
from visits_job import session

from mapstate import opaque
from mapstate.drpc import DRPCClient
from mapstate.schema import Field, KeyField
from mapstate.spark import DRPCServer, Stream, newStaticState

WAITING = (1, 10, 100)
MODULE = "def visits(states, args):\n    return states['visits'].get(args)\n"


def loaded(ask: Callable[[str], Any], waiting: int, seconds: float, users: int) -> tuple[float, list[float]]:
    """Requests a second, and the seconds of each, of so many callers."""
    latencies: list[float] = []
    end = time.monotonic() + seconds

    def call(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end:
            user = draw.randrange(users)
            began = time.perf_counter()
            found = ask(f"user-{user}")
            latencies.append(time.perf_counter() - began)
            assert found == {"visits": user} or found[0]["visits"] == user

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(waiting)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(latencies) / (time.monotonic() - began), sorted(latencies)


def ask(turns: int = 3, seconds: int = 4, users: int = 100_000) -> Answer:
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer().start())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "functions_of_bench.py").write_text(MODULE)
        os.environ["PYTHONPATH"] = str(folder)
        visits = (KeyField("user_id", "string"),), (Field("visits", "Count", "bigint"),)
        made_of_one_batch(server.url, "visits", *visits, {f"user-{at}": at for at in range(users)})
        spark = session("local[2]")
        stack.callback(spark.stop)
        state = newStaticState(opaque(server.url, "visits"))

        def of(requests: Stream) -> Stream:
            found: Stream = requests.stateQuery(state, "args", "visits")
            return found

        jobs = stack.enter_context(DRPCServer(spark, port=0).function("visits", of))
        functions = stack.enter_context(serving(server.url, "--functions", "functions_of_bench"))
        ports = {"a Spark job": jobs.port, "readers": functions.port}
        clients = {name: stack.enter_context(DRPCClient("127.0.0.1", port)) for name, port in ports.items()}
        for turn in range(-1, turns):
            for waiting in WAITING:
                for name, client in clients.items():
                    rate, latencies = loaded(
                        lambda user, client=client: client.execute("visits", user),  # type: ignore[misc]
                        *(waiting, seconds, users),
                    )
                    p99 = latencies[len(latencies) * 99 // 100]
                    if turn >= 0:
                        found.setdefault((name, waiting), []).append((rate, statistics.median(latencies), p99))
    lines = [
        (
            f"{name}, {waiting}",
            spread([one[0] for one in own]),
            spread([one[1] for one in own], 1000),
            spread([one[2] for one in own], 1000),
        )
        for (name, waiting), own in sorted(found.items())
    ]
    return Answer(
        [
            Row(f"DRPC by {name}, {waiting} waiting: requests a second", "1", [one[0] for one in own])
            for (name, waiting), own in sorted(found.items())
        ],
        f"{turns} turns of {seconds} s each; {os.cpu_count()} cores for the store, the servers and the callers, which "
        "are threads of one Python",
        table(
            "computed by, callers that wait | requests a second | median, milliseconds | 99th percentile, milliseconds",
            lines,
        ),
    )


if __name__ == "__main__":
    print(*(row.line() for row in ask().rows), sep="\n")
