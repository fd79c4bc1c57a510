"""Runs tests/newcomer.md as a newcomer would: from a fresh clone, and from the built wheel, in empty environments.

    make newcomer

The folders have a space in their names. The clone holds what is committed. Each way is one shell, which stops at the
first command that fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
WAYS = {"Install from a clone": "a clone", "Install from a wheel": "a wheel"}
# A newcomer's shell has none of this project's environment.
OURS = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME"}


def main() -> None:
    """Both ways, one after the other."""
    sections = dict(SECTION.findall((ROOT / "tests" / "newcomer.md").read_text()))
    common = [code for title, code in sections.items() if title not in WAYS]
    venv = f"{ROOT / '.venv' / 'bin'}"
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    environment["PATH"] = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != venv)
    environment |= {"REPOSITORY": str(ROOT), "PIP_CONSTRAINT": (ROOT / "constraints.txt").as_uri()}
    wheel = next((ROOT / "dist").glob("mapstate-*.whl"))
    with tempfile.TemporaryDirectory(prefix="new comer ") as folder:
        for title, way in WAYS.items():
            place = Path(folder, way)
            place.mkdir()
            if way == "a wheel":
                shutil.copy(wheel, place)
            print(f"== {title}", flush=True)
            script = "\n".join([sections[title], *common])
            done = subprocess.run(["bash", "-euxo", "pipefail", "-c", script], cwd=place, env=environment, check=False)
            if done.returncode != 0:
                sys.exit(f"a command of tests/newcomer.md failed, from {way}: exit code {done.returncode}")
    print("every command of tests/newcomer.md ran, from a clone and from a wheel")


if __name__ == "__main__":
    main()
