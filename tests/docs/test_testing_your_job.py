"""docs/testing-your-job.md with the wheel installed: its files, pasted into an empty directory, pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from processes import with_fast_java
from test_docs import ROOT, blocks, save_named

from mapstate.errors import ConfigurationError
from mapstate.testing.containers import redis_container

PAGE = ROOT / "docs" / "testing-your-job.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what is in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("mapstate-*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(wheel)], check=True, capture_output=True)
    return folder / "site"


def run(installed: Path, folder: Path, *arguments: str) -> tuple[dict[str, str], str]:
    """How each test ended, and what pytest printed."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
    environment = with_fast_java() | {"PYTHONPATH": str(installed)}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)
    ended = {}
    for case in ET.parse(report).iter("testcase"):
        ends = [end for end in ("failure", "error", "skipped") if case.find(end) is not None]
        ended[str(case.get("name"))] = ends[0] if ends else "passed"
    return ended, ran.stdout[-6000:] + ran.stderr[-2000:]


def has_docker() -> bool:
    try:
        with redis_container():
            return True
    except ConfigurationError:
        return False


@pytest.mark.slow
def test_the_page_passes_as_it_is_pasted(installed, tmp_path):
    assert save_named(PAGE, tmp_path) == ["test_visits.py", "test_visits_on_servers.py"]
    assert len(blocks(PAGE)) == 2
    where = "\ndef test_where_mapstate_is():\n    import mapstate\n\n    assert mapstate.__file__.startswith({!r})\n"
    (tmp_path / "test_where.py").write_text(where.format(str(installed)))
    ended, printed = run(installed, tmp_path)
    docker = ended.pop("test_visits_are_counted_on_redis")
    assert ended == dict.fromkeys(
        ("test_visits_are_counted", "test_a_batch_that_comes_again_counts_once", "test_where_mapstate_is"), "passed"
    ), printed
    if has_docker():
        assert docker == "passed", printed
    else:
        assert docker == "error"
        assert "ConfigurationError: " in printed
        assert "Docker" in printed


def test_a_fixture_of_ones_own_comes_first(installed, tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["mapstate.testing.plugin"]\n')
    own = "import pytest\n\n@pytest.fixture\ndef spark():\n    return 'mine'\n\n"
    (tmp_path / "test_own.py").write_text(
        own + "def test_own(spark, store):\n    assert spark == 'mine' and store.startswith('sqlite:////')\n"
    )
    ended, printed = run(installed, tmp_path)
    assert ended == {"test_own": "passed"}, printed


def test_a_test_run_that_does_not_ask_for_the_plugin_imports_nothing_of_mapstate(installed, tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\n\ndef test_other():\n    assert not [one for one in sys.modules if one.startswith('mapstate')]\n"
    )
    ended, printed = run(installed, tmp_path)
    assert ended == {"test_other": "passed"}, printed
