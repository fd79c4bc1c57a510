"""Prints which files one batch or one read of one opaque state runs through, to the store and back.

    scripts/run python scripts/reading_path.py
    scripts/run python scripts/reading_path.py redis --way "first batch"

A file counts with all of its lines as soon as one of its functions runs, on the driver or in a task; ``run`` is the
share of these lines that are in functions that run. What runs while a module is imported does not count, and neither
does what a dataclass generates, nor what runs inside of the store. An entry is a call, or a step of a generator, that
takes control from one file of the package into another, or from outside of it.

The first batch opens the state, the second continues it in a worker that knows it: batches in between, which are not
printed, go through all workers. A first read opens its reader, or the service its state. Of a GET only what runs on the
event loop counts: all of it on Redis, the service's own part where a store needs threads.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections import Counter
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
SCHEMA = "country string, bytes bigint, at timestamp"
FILES = (
    ['{"country": "DE", "bytes": 1, "at": "2026-11-22T10:00:00Z"}'],
    *4 * ([f'{{"country": "{country}", "bytes": 0, "at": "2026-11-22T10:00:00Z"}}' for country in ("DE", "FR")],),
    [f'{{"country": "{country}", "bytes": 3, "at": "2026-11-22T10:05:00Z"}}' for country in ("DE", "FR")],
)
WAYS = ("first batch", "second batch", "batch that fires", "first get", "second get", "second GET")


class Calls:
    """What runs of the package: for each file, its functions with the time of their first call, and its entries."""

    def __init__(self) -> None:
        self.first: dict[str, dict[str, float]] = {}
        self.entries: Counter[str] = Counter()
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
            file = code.co_filename[len(self._root) :]
            self.first.setdefault(file, {}).setdefault(code.co_qualname, time.monotonic())
            self.entries[file] += self._caller(frame) != code.co_filename

    def _caller(self, frame: FrameType) -> str | None:
        """The file of the package that is left, whatever library it calls in between."""
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self._root):
            caller = caller.f_back
        return None if caller is None else caller.f_code.co_filename

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
        (self.directory / f"{uuid.uuid4().hex}.json").write_text(json.dumps([calls.first, calls.entries]))


@dataclass(frozen=True)
class CalledFile:
    """A file on the path of a batch, with its functions in order of their first call.

    ``lines`` are all of its lines, ``run`` those of the functions. ``entries`` is how often control came into it.
    """

    name: str
    lines: int
    functions: list[str]
    run: int
    entries: int


def reading_path(spark: Any, url: str) -> dict[str, list[CalledFile]]:
    """The files on each of `WAYS`, in order of their first call."""
    from pyspark import cloudpickle

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)  # a worker cannot import this file
    try:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
            batches = _traced_batches(spark, url, Path(folder))
            fires = _traced_batches(spark, url, Path(other), has_windows=True)[1]
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return dict(zip(WAYS, [*batches, fires, *_traced_reads(url), _traced_request(url)], strict=True))


def _traced_batches(spark: Any, url: str, folder: Path, *, has_windows: bool = False) -> list[list[CalledFile]]:
    (folder / "input").mkdir()
    for number, lines in enumerate(FILES):
        file = folder / "input" / f"{number}.json"
        file.write_text("\n".join(lines))
        os.utime(file, (number, number))
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(folder / "input"))
    stream: Any = mapstate.newStream("requests", rows)
    if has_windows:
        stream = stream.window(mapstate.TumblingDurationWindow.of("1 minute"), timestampField="at")
    spec = mapstate.opaque(url, "windows" if has_windows else "bytes")
    state = stream.groupBy("country").persistentAggregate(spec, bytes=mapstate.Sum("bytes"))
    paths: list[list[CalledFile]] = []

    def traced(batch_df: Any, batch_id: int) -> None:
        tasks = folder / f"tasks-{batch_id}"
        tasks.mkdir()
        map_in_arrow = type(batch_df).mapInArrow

        def with_calls(frame: Any, task: Any, *args: Any, **options: Any) -> Any:
            return map_in_arrow(frame, TracedTask(task, tasks), *args, **options)

        calls = Calls()
        on_executors = patch("mapstate.spark.driver.state.SMALL_IN_A_ROW", len(FILES))  # else small batches leave them
        with on_executors, patch.object(type(batch_df), "mapInArrow", with_calls), calls.recorded():
            state(batch_df, batch_id)
        paths.append(
            _in_order([(calls.first, calls.entries), *(json.loads(file.read_text()) for file in tasks.glob("*.json"))])
        )

    writer = rows.writeStream.foreachBatch(traced).trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()
    assert len(paths) == len(FILES)
    return [paths[0], paths[-1]]


def _traced_reads(url: str) -> Iterator[list[CalledFile]]:
    calls = Calls()
    with calls.recorded():
        reader = mapstate.open_reader(url, "bytes")
        assert reader.get("DE") == {"bytes": 4}
    yield _in_order([(calls.first, calls.entries)])
    calls = Calls()
    reader.get("DE")  # which looks at the alias again if a second has passed
    with calls.recorded():
        reader.get("FR")
    yield _in_order([(calls.first, calls.entries)])
    reader.close()


def _traced_request(url: str) -> list[CalledFile]:
    """The second of two requests over HTTP."""
    from mapstate.serve import make_app

    calls, app = Calls(), make_app(url)

    async def get(country: str) -> bytes:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)  # no client leaves
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/states/bytes/values", "headers": [(b"host", b"localhost")]}
        await app(scope | {"query_string": f"country={country}".encode()}, receive, send)
        return b"".join(message.get("body", b"") for message in sent)

    async def ask() -> None:
        async with app.router.lifespan_context(app):
            await get("DE")
            await get("DE")  # which looks at the alias again if the first took a second
            with calls.recorded():
                answer = await get("FR")
            assert json.loads(answer)["value"] == {"bytes": 3}, answer

    asyncio.run(ask())
    return _in_order([(calls.first, calls.entries)])


def _in_order(calls: list[tuple[dict[str, dict[str, float]], dict[str, int]]]) -> list[CalledFile]:
    first: dict[str, dict[str, float]] = {}
    entries: Counter[str] = Counter()
    for called, entered in calls:
        entries.update(entered)
        for file, functions in called.items():
            known = first.setdefault(file, {})
            known |= {name: min(at, known.get(name, at)) for name, at in functions.items()}
    return [
        _called(file, functions, entries[file])
        for file, functions in sorted(first.items(), key=lambda found: min(found[1].values()))
    ]


def _called(file: str, functions: dict[str, float], entries: int) -> CalledFile:
    text = (PACKAGE / file).read_text()
    run = {line for name, lines in _functions(ast.parse(text)) if name in functions for line in lines}
    names = sorted(functions, key=functions.__getitem__)
    return CalledFile(file, len(text.splitlines()), names, len(run), entries)


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, range]]:
    """The functions of a file by their qualified names, each with its lines. A function has those inside of it, too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            start = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield f"{prefix}{child.name}", range(start, (child.end_lineno or start) + 1)
            yield from _functions(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from _functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


def main(arguments: list[str]) -> None:
    """Traces the stores that are asked for, one after the other, in one Spark."""
    parser = argparse.ArgumentParser(
        description="Prints which files a batch or a read of one opaque state runs through."
    )
    parser.add_argument(
        "stores", nargs="*", metavar="STORE", help=f"of {', '.join(STORES)}; all of them if none is named"
    )
    parser.add_argument("--way", choices=WAYS, help="this one only")
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
            for way, path in reading_path(spark, url).items():
                if asked.way in {None, way}:
                    print(f"\n{store}, {way}")
                    for file in path:
                        print(f"{file.lines:6} {file.run:5} {file.entries:4}  {file.name}")
                        if asked.functions:
                            print(textwrap.indent(textwrap.fill(", ".join(file.functions), 106), " " * 12))
                    totals.append((store, way, path))
    print("\n store    way               files  lines   run  entries")
    for store, way, path in totals:
        lines = sum(file.lines for file in path)
        share = sum(file.run for file in path) / lines
        print(f" {store:8} {way:16} {len(path):6} {lines:6} {share:5.0%} {sum(file.entries for file in path):8}")


if __name__ == "__main__":
    main(sys.argv[1:])
