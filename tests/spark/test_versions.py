"""The oldest PySpark that mapstate supports, a short set of tests; `make matrix` has the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.parametrize("tests", ["shortest", pytest.param("short", marks=pytest.mark.full)])
def test_the_oldest_pyspark_passes_the_short_set(tests):
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    release, of_short = ("3.5.7", "4 passed, 2 skipped") if python == "3.11" else ("4.0.5", "6 passed")
    command = [sys.executable, "scripts/matrix.py", f"--{tests}", "--oldest", "--python", python]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"PySpark {release}    Python {python}   passed" in ran.stdout
    assert f"\n{of_short if tests == 'short' else '2 passed'} in" in ran.stdout
