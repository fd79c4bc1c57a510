"""Prints which files one batch of one opaque state runs through, from foreachBatch to the store and back.

    scripts/run python scripts/reading_path.py
    scripts/run python scripts/reading_path.py redis --batch 0

A file counts with all of its lines as soon as one of its functions runs, on the driver or in a task. What runs while a
module is imported does not count, and neither does what a dataclass generates, nor what runs inside of the store. Batch
0 opens the state, batch 1 continues it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import mapstate

PACKAGE = Path(mapstate.__file__).parent
STORES = ("memory", "sqlite", "redis")
SCHEMA = "country string, bytes bigint"
FILES = (['{"country": "DE", "bytes": 1}'], ['{"country": "DE", "bytes": 2}', '{"country": "FR", "bytes": 3}'])


class Calls:
    """The functions of the package that run in a thread, each with the time of its first call, by files."""

    def __init__(self) -> None:
        self.first: dict[str, dict[str, float]] = {}
        self._root = f"{PACKAGE}{os.sep}"
        self._importing: dict[int, int] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """The function for `sys.setprofile`."""
        code = frame.f_code
        if event not in {"call", "return"} or not code.co_filename.startswith(self._root):
            return
        thread = threading.get_ident()
        if code.co_name == "<module>":
            self._importing[thread] = self._importing.get(thread, 0) + (1 if event == "call" else -1)
        elif event == "call" and not self._importing.get(thread):
            functions = self.first.setdefault(code.co_filename[len(self._root) :], {})
            functions.setdefault(code.co_qualname, time.monotonic())

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records this thread, and those that it starts."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


class TracedTask:
    """A task that leaves a file with the calls of each of its runs in a directory.

    The task is unpickled only when it runs, because that calls functions of the package, too.
    """

    def __init__(self, task: Callable[..., Iterator[Any]], directory: Path) -> None:
        from pyspark import cloudpickle

        self.task = cloudpickle.dumps(task)
        self.directory = directory

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Runs on an executor, once per partition."""
        import pickle

        calls = Calls()
        with calls.recorded():
            yield from pickle.loads(self.task)(batches)
        (self.directory / f"{uuid.uuid4().hex}.json").write_text(json.dumps(calls.first))


@dataclass(frozen=True)
class CalledFile:
    """A file on the path of a batch: its whole length, and its functions in order of their first call."""

    name: str
    lines: int
    functions: list[str]


def reading_path(spark: Any, url: str) -> list[list[CalledFile]]:
    """The files that the first two batches of a state call, batch by batch, in order of their first call."""
    from pyspark import cloudpickle

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)  # a worker cannot import this file
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _traced_batches(spark, url, Path(folder))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _traced_batches(spark: Any, url: str, folder: Path) -> list[list[CalledFile]]:
    (folder / "input").mkdir()
    for number, lines in enumerate(FILES):
        file = folder / "input" / f"{number}.json"
        file.write_text("\n".join(lines))
        os.utime(file, (number, number))
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(folder / "input"))
    grouped = mapstate.newStream("requests", rows).groupBy("country")
    state = grouped.persistentAggregate(mapstate.opaque(url, "bytes"), bytes=mapstate.Sum("bytes"))
    paths: list[list[CalledFile]] = []

    def traced(batch_df: Any, batch_id: int) -> None:
        tasks = folder / f"tasks-{batch_id}"
        tasks.mkdir()
        map_in_arrow = type(batch_df).mapInArrow

        def with_calls(frame: Any, task: Any, *args: Any, **options: Any) -> Any:
            return map_in_arrow(frame, TracedTask(task, tasks), *args, **options)

        calls = Calls()
        with patch.object(type(batch_df), "mapInArrow", with_calls), calls.recorded():
            state(batch_df, batch_id)
        paths.append(_in_order([calls.first, *(json.loads(file.read_text()) for file in tasks.glob("*.json"))]))

    writer = rows.writeStream.foreachBatch(traced).trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()
    assert len(paths) == len(FILES)
    return paths


def _in_order(calls: list[dict[str, dict[str, float]]]) -> list[CalledFile]:
    first: dict[str, dict[str, float]] = {}
    for called in calls:
        for file, functions in called.items():
            known = first.setdefault(file, {})
            known |= {name: min(at, known.get(name, at)) for name, at in functions.items()}
    return [
        CalledFile(file, len((PACKAGE / file).read_text().splitlines()), sorted(functions, key=functions.__getitem__))
        for file, functions in sorted(first.items(), key=lambda found: min(found[1].values()))
    ]


def main(arguments: list[str]) -> None:
    """Traces the stores that are asked for, one after the other, in one Spark."""
    parser = argparse.ArgumentParser(description="Prints which files one batch of one opaque state runs through.")
    parser.add_argument(
        "stores", nargs="*", metavar="STORE", help=f"of {', '.join(STORES)}; all of them if none is named"
    )
    parser.add_argument("--batch", type=int, choices=range(len(FILES)), help="this batch only")
    parser.add_argument("--functions", action="store_true", help="name also the functions that run in each file")
    asked = parser.parse_args(arguments)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))
    from servers import RedisServer
    from visits_job import session

    totals = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        spark = session("local[1]")
        stack.callback(spark.stop)
        for store in asked.stores or STORES:
            url = {"memory": "memory://", "sqlite": f"sqlite:///{folder}/state.db"}.get(store)
            url = url or stack.enter_context(RedisServer(as_process=True).start()).url
            for batch_id, path in enumerate(reading_path(spark, url)):
                if asked.batch in {None, batch_id}:
                    print(f"\n{store}, batch {batch_id}")
                    for file in path:
                        print(f"{file.lines:6}  {file.name}")
                        if asked.functions:
                            print(textwrap.indent(textwrap.fill(", ".join(file.functions), 106), " " * 12))
                    totals.append((store, batch_id, path))
    print("\n store   batch  files  lines")
    for store, batch_id, path in totals:
        print(f" {store:7} {batch_id:5} {len(path):6} {sum(file.lines for file in path):6}")


if __name__ == "__main__":
    main(sys.argv[1:])
