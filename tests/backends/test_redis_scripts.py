"""The Lua scripts as files of the package."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mapstate
from mapstate.backends.redis import scripts

FOLDER = Path(scripts.__file__).with_name("lua")
NAMES = sorted(path.stem for path in FOLDER.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_has_no_comment_and_all_the_rest_of_its_file(name):
    lines = (FOLDER / f"{name}.lua").read_bytes().splitlines(keepends=True)
    code = [line for line in lines if not line.lstrip().startswith(b"--")]
    assert 0 < len(code) < len(lines)
    assert scripts.script(name) == b"".join(code)


def test_every_file_is_a_script_that_something_sends():
    calls = re.findall(r"\bscript\((\"[^)]*)\)", Path(scripts.__file__).read_text())
    assert {name for call in calls for name in re.findall(r'"(\w+)"', call)} == set(NAMES)


def test_the_scripts_are_found_in_a_zip_file_as_executors_may_have_the_package(tmp_path):
    package = Path(mapstate.__file__).parent
    with zipfile.ZipFile(tmp_path / "mapstate.zip", "w") as archive:
        for path in package.rglob("*"):
            if path.suffix in (".py", ".lua"):
                archive.write(path, path.relative_to(package.parent))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'mapstate.zip')!r})\n"
        "from mapstate.backends.redis import scripts\n"
        "assert 'mapstate.zip' in scripts.__file__\n"
        "sys.stdout.buffer.write(scripts.script('fence_guard', 'rewrite'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == scripts.script("fence_guard", "rewrite")
