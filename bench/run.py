"""What mapstate costs beside the wire and beside what people use today. ``make bench``.

Each question is a module of its own with a function ``ask``, and runs in a process of its own. All contestants of a
question take turns, so a slow minute of the machine hits all of them. Each ratio is taken within one turn. Figures are
medians, with the least and the greatest. The first turns warm up and are not counted. Each run compares what was stored
with an independent count. Only the ratios hold on other machines.

bench/answers.json keeps the answers, so a question can be repeated by itself. bench/RESULTS.md is made from them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import msgspec
from measuring import ROOT, Answer

QUESTIONS = (
    "million_rows",
    "one_process",
    "chunk_sizes",
    "key_order",
    "partial_aggregate",
    "blocks",
    "small_batches",
    "large_state",
    "growth",
    "many_batches",
    "seeding",
    "redis_memory",
    "window_batches",
    "window_purge",
    "window_index",
    "cluster",
    "slope",
    "aerospike_floor",
    "sqlite_floor",
    "reader_cost",
    "rolling_reads",
    "rolling_batches",
    "freshness",
    "serving",
    "drpc",
    "dataframes",
    "following",
    "connect",
    "worker_ways",
    "starting",
)
KEPT = ROOT / "bench" / "answers.json"
RESULTS = ROOT / "bench" / "RESULTS.md"

HEAD = """\
# Results

Made by `make bench`; see the head of `bench/run.py` for how, and that of each module for what. `--only NAME` asks one
question again. The spread is from the least to the greatest turn, then the number of turns.

{cores} cores, {system}, Python {python}, PySpark {spark}, redis-py {redis}.

| what | against | goal | measured | spread, turns | note |
|---|---|---|---|---|---|
"""


def asked(name: str, sizes: list[str]) -> Answer | None:
    """Ask a question in a process of its own; None if it failed, after its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--answer", name, "--out", out, "--sizes", *sizes]
        done = subprocess.run(command, check=False)
        return msgspec.json.decode(out.read_bytes(), type=Answer) if done.returncode == 0 else None


def kept_answers() -> dict[str, Answer]:
    """The last answer to each question that was asked, by name."""
    return msgspec.json.decode(KEPT.read_bytes(), type=dict[str, Answer]) if KEPT.exists() else {}


def results(answers: dict[str, Answer]) -> str:
    head = HEAD.format(
        cores=os.cpu_count(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        spark=version("pyspark"),
        redis=version("redis"),
    )
    known = {name: answers[name] for name in QUESTIONS if name in answers}
    lines = [row.line() for answer in known.values() for row in answer.rows]
    lines += [f"| `{name}` | | | not asked yet | | |" for name in QUESTIONS if name not in known]
    parts = [f"\n## {name}\n\n{answer.how}.\n\n{answer.more}".rstrip() + "\n" for name, answer in known.items()]
    return head + "\n".join(lines) + "\n" + "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=QUESTIONS)
    parser.add_argument("--sizes", nargs="*", default=[], help="arguments of the questions' ask, such as keys=1000")
    parser.add_argument("--no-write", action="store_true", help="leave bench/RESULTS.md as it is")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        sizes = {name: int(value) for name, _, value in (one.partition("=") for one in options.sizes)}
        options.out.write_bytes(msgspec.json.encode(importlib.import_module(options.answer).ask(**sizes)))
        return
    answers = kept_answers()
    failed = []
    for name in options.only:
        started = time.monotonic()
        print(f"{name} ...", flush=True)
        answer = asked(name, options.sizes)
        if answer is None:
            failed.append(name)
            continue
        answers[name] = answer
        print(*(row.line() for row in answer.rows), f"{time.monotonic() - started:.0f} s\n", sep="\n", flush=True)
        if not options.no_write:
            KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(answers)) + b"\n")
            RESULTS.write_text(results(answers))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
