"""docs/cli.md: its examples are run, and its tables name every command, and every field of its JSON."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from states import Job, Tens, made_of_one_batch
from test_docs import BLOCK, ROOT
from typer.testing import CliRunner

from mapstate.cli.commands import app
from mapstate.operations.control import Control
from mapstate.protocol.control import DriverRecord, release, submit
from mapstate.schema import Field, KeyField

PAGE = (ROOT / "docs" / "cli.md").read_text()
EXAMPLES = [
    (command, "".join(printed))
    for language, block in BLOCK.findall(PAGE)
    if language == "console"
    for command, printed in re.findall(r"^\$ mapstate (.*\n)((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]
NAMES = [command.name or command.callback.__name__ for command in app.registered_commands]
NO_JSON = ("serve", "help")  # one answers requests, the other prints pages
CHANGING = r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00|\d+\.\d s|\d+ keys/s|txid \d+"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: Any) -> str:
    """The state that the page speaks of, and an empty working directory."""
    url = f"sqlite:///{tmp_path}/state.db"
    fields = (Field("visits", "Count", "bigint"), Field("bytes", "Sum(bytes)", "bigint"))
    rows = {"user-42": (3, 512), "user-7": (1, 1)}
    at = "2026-11-21T10:00:00.000+00:00"
    made_of_one_batch(url, "visits_by_user", (KeyField("user_id", "string"),), fields, rows, at)
    monkeypatch.setenv("MAPSTATE_URL", url)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return url


def test_there_are_examples():
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize(("command", "printed"), EXAMPLES, ids=[command.strip() for command, _ in EXAMPLES])
def test_an_example_prints_what_the_page_says(command, printed, place):
    done = CliRunner().invoke(app, shlex.split(command))
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.sub(CHANGING, "...", done.stdout) == re.sub(CHANGING, "...", printed)


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    below = PAGE.partition(f"{heading}\n")[2]
    lines = re.findall(r"^\|(.*)\|$", re.split(r"^#", below, flags=re.MULTILINE)[0], re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[2:]]


def test_every_command_is_in_the_tables():
    assert [re.search(r"`(\w+)`", row[0])[1] for row in table("# The command line")] == NAMES
    assert {row[0].strip("`") for row in table("## JSON")} == set(NAMES) - {*NO_JSON}


TOPOLOGIES = ("list", "monitor", "activate", "deactivate", "rebalance", "kill")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("rewind", "adopt", *NO_JSON, *TOPOLOGIES)])
def test_the_fields_of_a_commands_json_are_those_of_the_page(name, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    job = Job(url)
    job.batch(a=1)
    job.batch(a=2)
    Job(url, state="t").batch(a=1)
    Job(url, state="same").batch(a=2)
    Tens(url, "tens").batch({15: {"a": 1}}, watermark=15)
    more = {
        "ls": [],
        "get": ["s", "a"],
        "windows": ["tens", "a"],
        "advance": ["tens", "--to", "17", "--yes"],
        "watch": ["s", "--count", "1"],
        "export": ["s", "--to", str(tmp_path / "x.csv")],
        "compare": ["s", "same"],
        "swap": ["s", "--to", "t", "--force"],
        "forget": ["s", "a", "--id", "t", "--yes"],
        **{one: ["s", "--yes"] for one in ("recount", "drop", "rollback")},
    }
    check_json(name, [url, *more.get(name, ["s"])])


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_fields_of_a_topologys_json_are_those_of_the_page(name, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    Job(url).batch(a=1)
    at = "2026-11-24T10:00:00.000+00:00"
    driver = DriverRecord(session="d", host="here", pid=7, started=at, at=at, silence=10.0)
    with Control(url, "site") as own:
        own.change(lambda record: submit(record, "site", driver, ("s",), active=False, at=at))
        own.change(lambda record: release(record, "site", "d"))
    more = {"monitor": ["-i", "0.1", "--count", "1"], "rebalance": ["--partitions", "3"]}
    check_json(name, [url, *(() if name == "list" else ("site",)), *more.get(name, [])])


def check_json(name, words):
    """A command's JSON has the fields of the page's table."""
    done = CliRunner().invoke(app, [name, *words, "--json"])
    assert done.exit_code == 0, done.stderr
    document: Any = json.loads(done.stdout)
    found = document[0] if isinstance(document, list) else document
    (cells,) = [row for row in table("## JSON") if row[0] == f"`{name}`"]
    first_sentence = re.sub(r"\(.*?\)", "", cells[2]).partition(". If")[0]
    assert set(re.findall(r"`(\w+)`", first_sentence)) == set(found)


def test_every_option_of_watch_and_export_is_on_the_page():
    for name in ("watch", "export"):
        (command,) = [one for one in app.registered_commands if one.callback.__name__ == name]
        options = set(command.callback.__annotations__) - {"url", "state", "place", "as_json", "return"}
        assert [option for option in options if f"--{option}" not in PAGE] == []
