"""Ways in which a job's packages come to a standalone Spark cluster, each as docs/cluster.md says it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import venv
from contextlib import suppress
from pathlib import Path

import pyspark
import pytest
from processes import cluster
from spark_fixtures import contents

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cluster.md"
BLOCK = re.compile(r"^### ([^\n]+)\n(?:(?!^###? ).)*?^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
WAYS = dict(BLOCK.findall(PAGE.read_text()))

pytestmark = [pytest.mark.full, pytest.mark.local_cluster, pytest.mark.redis, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as address:
        yield address


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [ROOT / ".venv/bin/python", "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture
def submit(master, wheel, redis_url, tmp_path):
    """Runs a block of the page in a folder of its own, in a process group that is gone afterwards."""
    (tmp_path / "visits").mkdir()
    (tmp_path / "visits" / "0.csv").write_text("a,home\na,about\nb,home\n")
    (tmp_path / "page_visits.py").symlink_to(ROOT / "examples" / "page_visits.py")
    (tmp_path / wheel.name).symlink_to(wheel)
    environment = os.environ | {
        "MASTER": master,
        "STORE": redis_url,
        "VISITS": str(tmp_path / "visits"),
        "CHECKPOINT": str(tmp_path / "checkpoint"),
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "PIP_CONSTRAINT": (ROOT / "constraints.txt").as_uri(),
    }

    def run(block, **variables):
        command = ["bash", "-eu", "-c", block]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment | variables,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=600)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, out + err

    return run


@pytest.fixture(scope="module")
def without_mapstate(tmp_path_factory):
    """A Python that has all packages but mapstate: its path file names the folder of .venv's, not the clone."""
    folder = tmp_path_factory.mktemp("python") / "bare"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "others.pth").write_text(f"{Path(pyspark.__file__).parents[1]}\n")
    found = subprocess.run(
        [python, "-c", "import msgspec, redis, mapstate"], capture_output=True, text=True, check=False
    )
    assert "No module named 'mapstate'" in found.stderr
    return str(python)


@pytest.mark.parametrize("way", list(WAYS))
def test_a_way_brings_the_packages_to_the_executors(way, submit, redis_url, without_mapstate):
    is_installed = way == "Installed on every node"
    code, said = submit(WAYS[way], **({} if is_installed else {"PYSPARK_PYTHON": without_mapstate}))
    assert code == 0, said[-4000:]
    assert contents(redis_url, "visits_by_user") == {("a",): {"visits": 2}, ("b",): {"visits": 1}}
    assert contents(redis_url, "users_by_visits") == {(1,): {"users": 1}, (2,): {"users": 1}}


def test_without_a_way_the_first_batch_says_what_is_missing(submit, redis_url, redis_server, without_mapstate):
    code, said = submit(WAYS["Installed on every node"], PYSPARK_PYTHON=without_mapstate)
    assert code != 0
    assert f"({without_mapstate}) lacks a package of this job: ModuleNotFoundError: No module named 'mapstate'" in said
    with redis_server.client() as client:
        assert list(client.scan_iter(f"{redis_url.partition('prefix=')[2]}*")) == []


def test_a_wheel_in_py_files_is_on_no_path(submit, without_mapstate):
    block = WAYS["A zip of Python files"]
    code, said = submit(block.replace("mapstate.zip", "renamed.whl"), PYSPARK_PYTHON=without_mapstate)
    assert code != 0
    assert "No module named 'mapstate'" in said


def test_the_page_has_each_way():
    assert len(WAYS) == 3
