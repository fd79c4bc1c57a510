"""What an editor knows of the public surface: each call completes, and each result has its type."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT, blocks

GIVEN = """\
from pyspark.sql import DataFrame, SparkSession

spark: SparkSession
df: DataFrame
url: str
logs: str
checkpoint: str

"""
REVEALED = """\
from mapstate import Count, Max, Sum, Topology, newStream, opaque, open_async_reader, open_reader

counts = newStream("visits", df).groupBy("user").persistentAggregate(opaque(url, ttl=60), n=Count(), most=Sum("n"))
users = counts.newValuesStream().groupBy("n").persistentAggregate(opaque(url, name="users"), users=Count())
stream = Topology("site").newStream("visits", df)
reveal_type(opaque(url))  # StateSpec
reveal_type(counts)  # PersistentAggregate
reveal_type(counts.newValuesStream(old=True).transform(lambda rows: rows))  # NewValuesStream
reveal_type(users)  # PersistentAggregate
reveal_type(stream)  # Stream
reveal_type(stream.groupBy("user"))  # GroupedStream[PersistentAggregate, Stream]
reveal_type(stream.groupBy("user").persistentAggregate(opaque(url), n=Max("n")))  # PersistentAggregate
reveal_type(stream.groupBy("user").aggregate(n=Count()))  # Stream
reveal_type(stream.aggregate(n=Count()))  # Stream
reveal_type(stream.maxBy("n"))  # Stream
reveal_type(counts.on_batch(print).start(checkpoint, trigger="10 seconds").isActive)  # bool
with open_reader(url, "visits") as reader:
    reveal_type(reader.get("a"))  # dict[str, Any] | None
    reveal_type(reader.multi_get(["a"]))  # list[dict[str, Any] | None]
    reveal_type(reader.scan(columns=["n"]))  # Iterator[tuple[tuple[Any, ...], dict[str, Any]]]


async def read() -> None:
    async with open_async_reader(url, "visits") as reader:
        reveal_type(await reader.get("a"))  # dict[str, Any] | None
        reveal_type(await reader.multi_get(["a"]))  # list[dict[str, Any] | None]
        async for item in reader.scan():
            reveal_type(item)  # tuple[tuple[Any, ...], dict[str, Any]]
    reveal_type(await open_async_reader(url, "visits"))  # AsyncStateReader


opaque(url, tll=60)  # error: Unexpected keyword argument "tll" for "opaque"
counts.start(checkpoint, triger="10 seconds")  # error: Unexpected keyword argument "triger" for "start" of "Startable"
"""


def checked(code: str, folder: Path) -> list[str]:
    """What mypy says of a program, line by line: ``12: note: Revealed type is ...``."""
    path = folder / "program.py"
    path.write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(ROOT / ".mypy_cache")]
    ran = subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.stderr == ""
    return [re.sub(r"^.*?program\.py:", "", line) for line in ran.stdout.splitlines()]


def test_each_result_has_its_type(tmp_path):
    expected = {}
    code = GIVEN + REVEALED
    for number, line in enumerate(code.splitlines(), 1):
        if "  # " in line:
            expected[number] = line.partition("  # ")[2]
    found = {}
    for line in checked(code, tmp_path):
        place, _, said = line.partition(": ")
        said = re.sub(r"\b(?:[\w]+\.)+(?=\w)", "", said).removeprefix("note: ")
        revealed = re.fullmatch(r'Revealed type is "(.*)"', said)
        if revealed or said.startswith("error:"):
            found[int(place)] = revealed[1] if revealed else re.sub(r"(; did you mean.*)?  \[.*\]$", "", said)
    assert found == expected


@pytest.mark.parametrize("number", range(len(blocks(ROOT / "README.md"))))
def test_the_programs_of_the_readme_have_types(number, tmp_path):
    assert checked(blocks(ROOT / "README.md")[number], tmp_path) == []
