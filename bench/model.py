"""What a batch costs as executors, keys and shards grow: a model fitted on bench/answers.json.

    scripts/run python bench/model.py --updates 10e6 --keys 10e9

An update is one key of one batch, after Catalyst has folded the rows of the key.

    measured on one machine   processor time of a task and of the server for each key; bytes of a key in the server;
                              seconds a batch (a start and a slope); the cost of spreading a chunk over a cluster's
                              nodes and slot groups
    counted                   round trips, and bytes on the wire; of blocks these are measured
    of blocks                 measured beside a record per key on one server, by the share of keys that a batch touches:
                              the nearest measured share counts
    assumed                   processor time goes with the number of keys, whatever the number of servers; no server,
                              core or wire is used beyond `--load` of its capacity
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import msgspec
import numpy as np
from measuring import ROOT, Answer, table

KEPT = ROOT / "bench" / "answers.json"


def figures() -> dict[str, float]:
    """The kept answers of all questions."""
    answers = msgspec.json.decode(KEPT.read_bytes(), type=dict[str, Answer])
    return {name: value for answer in answers.values() for name, value in answer.figures.items()}


def wire_bytes(name: int, record: int) -> int:
    """Bytes on the wire for one key, both ways: MGET and its reply, MSET."""
    word = 6  # a dollar, two digits, two line breaks
    return (word + name) + (word + record) + (word + name) + (word + record)


def line(found: dict[str, float]) -> str:
    """Seconds of a batch of no keys, and of each further million, with two tasks on two cores."""
    points = {int(name.removeprefix("growth.")): one for name, one in found.items() if name.startswith("growth.")}
    if not points:
        return "`growth` was not asked"
    slope, start = np.polyfit(list(points), list(points.values()), 1, w=1 / np.array(list(points.values())))
    return f"{start:.2f} + {slope * 1e6:.2f} per million keys"


class Layout(NamedTuple):
    """What a key costs: processor time beside a record per key, bytes on the wire, and bytes in the server."""

    name: str
    of_server: float
    of_task: float
    wire: float
    held: float


def share_of(found: dict[str, float], every: float) -> str:
    """The measured share that is nearest to one key in ``every``."""
    measured = [name.removeprefix("blocks.server.") for name in found if name.startswith("blocks.server.")]
    return min(measured, key=lambda one: abs(math.log(int(one) / max(every, 1.0))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=float, default=10e6, help="keys a second, over all batches")
    parser.add_argument("--keys", type=float, default=10e9, help="keys in the state")
    parser.add_argument("--batch", type=float, default=10.0, help="seconds between batches")
    parser.add_argument("--chunk", type=int, default=2000, help="chunk_size")
    parser.add_argument("--buckets", type=int, default=1024)
    parser.add_argument("--round-trip", type=float, default=0.5, help="milliseconds between executor and store")
    parser.add_argument("--memory", type=float, default=25.0, help="GB of records that one server shall hold")
    parser.add_argument("--load", type=float, default=0.6, help="how much of a core or a wire may be used")
    parser.add_argument("--name", type=int, default=20, help="bytes of a Redis key")
    options = parser.parse_args()

    found = figures()
    client, server = found["one_process.client_cpu"], found["one_process.server_cpu"]
    far_client, far_server = found["cluster.client_cpu"], found["cluster.server_cpu"]
    held = found["redis_memory.bytes"]
    wire = wire_bytes(options.name, 15)

    print(
        table(
            "measured or counted | one server | cluster",
            [
                ("task, microseconds of processor a key", f"{client:.2f}", f"{far_client:.2f}"),
                ("server, microseconds of processor a key", f"{server:.2f}", f"{far_server:.2f}"),
                ("bytes a key on the wire, both ways", f"{wire}", f"{wire}"),
                ("bytes a key in the server", f"{held:.0f}", f"{held + 5:.0f}"),
                ("waits for a reply a chunk: first, every other", "2, 1", "2, 1"),
                ("round trips to begin and commit", "4", "7, to all nodes at once"),
                ("seconds a batch, two tasks on two cores", line(found), ""),
            ],
        )
    )

    lines = []
    for updates, keys in ((1e5, 1e8), (1e6, 1e9), (options.updates, options.keys)):
        every = share_of(found, keys / (updates * options.batch))
        own = Layout("a record per key", 1.0, 1.0, wire, held)
        of_server, of_python, of_wire = (found[f"blocks.{part}.{every}"] for part in ("server", "python", "wire"))
        for layout in (own, Layout(f"blocks, 1 key in {every}", of_server, of_python, of_wire, found["blocks.bytes"])):
            by_memory = keys * layout.held / (options.memory * 1e9)
            one = updates * server * layout.of_server / 1e6 <= options.load and by_memory <= 1
            at_server, at_task = (server, client) if one else (far_server, far_client)
            by_cpu = updates * at_server * layout.of_server / 1e6 / options.load
            servers = max(1, math.ceil(max(by_cpu, by_memory)))
            lines.append(
                (
                    f"{updates:,.0f} a second over {keys:,.0f}",
                    layout.name,
                    f"{by_cpu:.1f}",
                    f"{by_memory:.1f}",
                    f"{servers}, by {'processor' if by_cpu > by_memory else 'memory'}",
                    f"{updates * at_task * layout.of_task / 1e6 / options.load:.1f}",
                    f"{updates * layout.wire * 8 / 1e9:.1f}",
                )
            )
    print()
    print(
        table(
            "updates | layout | servers by processor | by memory | servers needed | cores of tasks "
            "| Gbit/s, all servers",
            lines,
        )
    )

    batch = options.updates * options.batch
    group = options.chunk / options.buckets
    cores = math.ceil(options.updates * far_client / 1e6 / options.load)
    chunks = batch / cores / options.chunk
    waits = (chunks + 1) * options.round_trip / 1000
    full = max(options.chunk, 32 * options.buckets)
    print(
        f"\nA batch every {options.batch:g} s has {batch:,.0f} keys: {cores} tasks have {chunks:,.0f} chunks each, and"
        f" wait for a reply {waits:.1f} s of {options.batch:g} s in all. A chunk of {options.chunk:,} keys over"
        f" {options.buckets} slot groups leaves {group:.1f} keys a group; for 32, as in the figures above, chunk_size"
        f" has to be {full:,}: {full * wire / 2**20:.1f} MB in hand for each chunk."
    )


if __name__ == "__main__":
    main()
