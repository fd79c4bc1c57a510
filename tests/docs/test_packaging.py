"""What somebody gets who depends on the package: its source, its versions, its extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from matrix import SHORT, WHOLE

from mapstate.version import VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.full
@pytest.mark.slow
def test_the_source_that_is_released_builds_and_passes_its_tests(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(tmp_path / f"mapstate-{VERSION}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"mapstate-{VERSION}"
    for name in ("LICENSE", "REUSE.toml", "SECURITY.md", "Makefile", "constraints.txt", "scripts/run"):
        assert (source / name).is_file(), name
    asked = "import mapstate, sys; sys.exit(not mapstate.__file__.startswith(sys.argv[1]))"
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "PYTHONSAFEPATH": ""}
    subprocess.run([sys.executable, "-c", asked, str(source)], env=environment, check=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/protocol/test_transitions.py"]
    ran = subprocess.run(tests, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    wheel = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(wheel, cwd=source, check=True, capture_output=True)
    assert (tmp_path / f"mapstate-{VERSION}-py3-none-any.whl").is_file()


POINTERS = """
import re, sys
from pathlib import Path
import mapstate
from mapstate import errors
from mapstate.cli.commands import _PAGES, text_of

package = Path(mapstate.__file__).parent
assert package.is_relative_to(sys.argv[1]) and _PAGES.is_relative_to(package), _PAGES
text = "".join(path.read_text() for path in package.rglob("*.py"))
text = re.sub(r'"\\s*\\n\\s*f?"', "", text)
found = set(re.findall(r"\\b(?:docs/|mapstate help )([a-z/-]+)(?:\\.md)?(#[a-z-]+)?", text))
for page, section in sorted(found):
    assert text_of(page + section).startswith("#" if section else ""), page + section
    assert not section or text_of(page + section) != text_of(page), page + section
for name in errors.__all__:
    assert text_of(name).startswith(f"{name}: "), name
print(len(found), errors.MapStateError("See docs/operating.md#passwords"))
"""


def test_what_an_error_points_at_opens_where_the_wheel_is_installed(tmp_path):
    wheel = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(wheel, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(tmp_path / f"mapstate-{VERSION}-py3-none-any.whl") as archive:
        archive.extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": ""}
    asked = [sys.executable, "-c", POINTERS, str(tmp_path / "site")]
    ran = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    count, _, shown = ran.stdout.strip().partition(" ")
    assert int(count) > 20
    assert shown == "See mapstate help operating#passwords"


def test_the_version_is_one_wherever_it_is_written():
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.search(r"^## \[(\d.*?)\]", changes, re.MULTILINE)[1]
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## \[)", changes, re.MULTILINE | re.DOTALL)
    number, _, dev = VERSION.partition(".dev")
    if unreleased and unreleased[1].strip():  # a wheel of what is not released must not pass for the release
        assert dev
        assert [int(part) for part in number.split(".")] > [int(part) for part in released.split(".")]
    else:
        assert released == VERSION
    assert f"mapstate-{VERSION}-py3" in (ROOT / "README.md").read_text()
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


def test_who_installs_all_gets_no_tools_for_tests():
    extras = PROJECT["optional-dependencies"]
    taken = re.findall(r"\[(.*)\]", extras["all"][0])[0].split(",")
    assert not [one for name in taken for one in extras[name] if re.match(r"pytest|testcontainers|hypothesis", one)]


def test_each_python_that_the_matrix_tests_is_a_classifier():
    matrix = re.findall(r"3\.1\d", (ROOT / "docs" / "versions.md").read_text().split("\n\n")[1])
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert set(named) == set(matrix)


def test_the_matrix_names_tests_that_there_are():
    assert all((ROOT / file).is_file() for file in WHOLE)
    for named in SHORT:
        file, test = re.match(r"(.*)::(\w+)", named).groups()
        assert f"\ndef {test}(" in (ROOT / file).read_text()
