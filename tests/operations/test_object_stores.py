"""What is done to a checkpoint in another file system than a disk: on a server that speaks S3, by its own protocol."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from pyarrow import fs
from servers import die_with_parent, free_port
from states import Job
from test_checkpoint import checkpoint, files
from typer.testing import CliRunner

from mapstate.cli.commands import app
from mapstate.errors import CheckpointError, MissingDriverError, StaleBatchError, StateOwnershipError, UsageError
from mapstate.operations.checkpoint import clear_first_offsets, query_of, rewind
from mapstate.operations.folders import folder_of
from mapstate.testing import wait_for

PLACE = "s3a://bucket/check point/50% [of] c"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-p", f"{port}"]
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=silent, stderr=silent, preexec_fn=die_with_parent) as process:  # noqa: PLW1509
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return bool(urlopen(f"{address}/moto-api/").status == 200)
            except URLError:
                return process.poll() is not None

        try:
            wait_for(answers, "the server speaks S3", 60)
            assert process.poll() is None
            yield address
        finally:
            process.kill()


@pytest.fixture
def s3(moto, monkeypatch) -> Any:
    """The server's file system, with nothing in it."""
    for name, value in {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    for path, method in (("moto-api/reset", "POST"), ("bucket", "PUT")):
        with urlopen(Request(f"{moto}/{path}", method=method)):
            pass
    return fs.S3FileSystem(endpoint_override=moto)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A state that has three batches, of query q."""
    job = Job(f"sqlite:///{tmp_path}/state.db")
    for n in range(3):
        job.batch(a=n)
    return f"sqlite:///{tmp_path}/state.db"


def put(system: Any, folder: Path, place: str = PLACE) -> str:
    """The files of a directory, as S3A leaves them: without checksums."""
    for name in files(folder):
        if not name.endswith(".crc"):
            with system.open_output_stream(f"{path_of(place)}/{name}") as file:
                file.write((folder / name).read_bytes())
    return place


def path_of(place: str) -> str:
    return place.partition("://")[2]


def found(system: Any, place: str) -> dict[str, bytes]:
    """All files below a place, and what they hold."""
    root = path_of(place)
    below = system.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
    read = {one.path: system.open_input_stream(one.path).read() for one in below if one.type == fs.FileType.File}
    return {path.removeprefix(f"{root}/"): data for path, data in read.items()}


def test_a_rewind_leaves_the_files_that_it_leaves_on_a_disk(s3, url, tmp_path):
    local = checkpoint(tmp_path / "c", range(7), range(6))
    before = found(s3, put(s3, local))
    assert query_of(PLACE) == "q"
    planned = rewind(url, "s", PLACE, dry_run=True)
    assert found(s3, PLACE) == before
    done, there = rewind(url, "s", PLACE), rewind(url, "s", local)
    assert (done.batch_id, done.moved) == (there.batch_id, there.moved) == (3, planned.moved)
    assert done.to.startswith(f"{PLACE}.rewound-")
    left, aside = found(s3, PLACE), found(s3, done.to)
    assert set(left) == {name for name in files(local) if not name.endswith(".crc")}
    assert set(aside) == {name for name in files(Path(there.to)) if not name.endswith(".crc")}
    assert left | aside == before
    assert rewind(url, "s", PLACE) == (3, (), None)


DYING = """
import os, signal, sys
from mapstate.operations import folders
from mapstate.operations.checkpoint import rewind

url, place, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
kind, methods = folders.folder_of(place).__class__, ("_bytes", "delete")

def dying(method):
    def call(self, name):
        global left
        if name != "metadata":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return method(self, name)
    return call

for name in methods:
    setattr(kind, name, dying(getattr(kind, name)))
rewind(url, "s", place)
"""


def test_a_rewind_that_is_killed_is_finished_by_the_next_and_spark_can_read_its_logs_in_between(
    s3, url, tmp_path, rounds
):
    local = checkpoint(tmp_path / "c", range(6), range(5))
    steps = 2 * len(rewind(url, "s", local, dry_run=True).moved)
    for step in rounds([1, 4, steps - 1], range(steps + 1)):
        place = f"{PLACE} {step}"
        before = found(s3, put(s3, local, place))
        died = subprocess.run([sys.executable, "-c", DYING, url, place, str(step)], timeout=120, check=False)
        assert died.returncode == (-signal.SIGKILL if step < steps else 0)
        between = found(s3, place)
        offsets, commits = (
            sorted(int(n[8:]) for n in between if n.startswith(log)) for log in ("offsets/", "commits/")
        )
        assert offsets == [*range(len(offsets))]  # neither log has a gap
        assert commits == [*range(len(commits))]
        assert len(offsets) >= len(commits)
        rewind(url, "s", place)
        left = found(s3, place)
        assert set(left) == {"metadata", *(f"commits/{n}" for n in range(3)), *(f"offsets/{n}" for n in range(4))}
        asides = {one.base_name for one in s3.get_file_info(fs.FileSelector("bucket/check point"))}
        aside: dict[str, bytes] = {}
        for name in (name for name in asides if name.startswith(f"{Path(place).name}.rewound-")):
            aside |= found(s3, f"s3://bucket/check point/{name}")
        assert left | aside == before


def test_what_is_no_checkpoint_of_the_state_is_refused_there_too(s3, url, tmp_path):
    def refused(place: str, error: Any, match: str) -> None:
        before = found(s3, "s3://bucket")
        with pytest.raises(error, match=match) as raised:
            rewind(url, "s", place)
        assert "s3cret" not in str(raised.value)
        assert found(s3, "s3://bucket") == before

    refused("s3://bucket/nothing", UsageError, "no file 'metadata'")
    refused("s3://no-bucket/nothing", UsageError, "no file 'metadata'")
    refused(put(s3, checkpoint(tmp_path / "b", range(2), range(1)), "s3a://bucket/b"), StaleBatchError, "batch 1")
    of_another = put(s3, checkpoint(tmp_path / "o", range(2), range(1), "z"), "s3a://bucket/o")
    refused(of_another, StateOwnershipError, "has no part in")
    refused("s3a://key:s3cret@bucket/c", UsageError, "password in it, and is not shown")
    refused("redis://:s3cret@host/0", UsageError, "password in it, and is not shown")
    refused("redis:/:s3cret@host/0", UsageError, "no file system redis://")
    refused("hive://host/c", UsageError, "no file system hive://.*Install fsspec")
    refused("s3cret:x@host/0", UsageError, "URL, which is not shown")


def test_a_server_that_does_not_answer_is_said_with_nothing_changed(s3, url, monkeypatch):
    with socket.socket() as taken:  # which nobody listens to
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(CheckpointError, match="ould not connect"):
            rewind(url, "s", PLACE)


def test_files_of_a_driver_that_died_before_its_first_batch_are_cleared(s3):
    for name in ("metadata", "offsets/.0.a-uuid.tmp"):
        with s3.open_output_stream(f"{path_of(PLACE)}/{name}") as file:
            file.write(b"{}")
    assert clear_first_offsets(PLACE) == [f"{PLACE}/offsets/.0.a-uuid.tmp"]
    assert set(found(s3, PLACE)) == {"metadata"}
    assert clear_first_offsets(PLACE) == []
    with s3.open_output_stream(f"{path_of(PLACE)}/offsets/0") as file:
        file.write(b"{}")
    assert clear_first_offsets(PLACE) == []
    assert set(found(s3, PLACE)) == {"metadata", "offsets/0"}


def test_the_commands_take_such_a_checkpoint(s3, url, tmp_path):
    put(s3, checkpoint(tmp_path / "c", range(5), range(4)))
    done = CliRunner().invoke(app, ["rewind", url, "s", PLACE, "--yes", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert '"next_batch_id": 3' in done.stdout
    assert f'"to": "{PLACE}.rewound-' in done.stdout
    wrong = CliRunner().invoke(app, ["rewind", url, "s", "s3a://key:s3cret@bucket/c", "--yes"], catch_exceptions=False)
    assert wrong.exit_code == 2
    assert "s3cret" not in wrong.stderr + wrong.stdout


def test_fsspec_reaches_what_pyarrow_does_not_know(url, tmp_path):
    local = checkpoint(tmp_path / "c", range(5), range(4))
    before = files(local)
    done = rewind(url, "s", f"local://{local}")
    assert done.to.startswith(f"local://{local}.rewound-")
    assert files(local) | files(Path(done.to.removeprefix("local://"))) == before
    assert not files(local) & files(Path(done.to.removeprefix("local://")))
    assert rewind(url, "s", f"local://{local}") == (3, (), None)
    assert folder_of(f"local://{tmp_path}/nothing").listed() == {}


def test_a_directory_that_is_named_like_a_url_may_be_new(tmp_path):
    """A first start of a program that clears what is left, and a quarantine in which nothing is kept yet."""
    assert clear_first_offsets(f"{tmp_path}/9:00@home/checkpoint") == []
    assert folder_of(f"{tmp_path}/9:00@home/kept").listed() == {}


def test_without_pyarrow_it_is_named(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDriverError, match=r"s3a:// needs the package 'pyarrow'.*mapstate\[tables\]"):
        rewind(url, "s", PLACE)
