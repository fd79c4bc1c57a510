"""The oldest PySpark that mapstate supports, a short set of tests; `make matrix` has the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.parametrize(("tests", "number"), [("shortest", 2), pytest.param("short", 6, marks=pytest.mark.full)])
def test_the_oldest_pyspark_passes_the_short_set(tests, number):
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "scripts/matrix.py", f"--{tests}", "--pyspark", "4.0", "--python", python]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"PySpark 4.0.5    Python {python}   passed" in ran.stdout
    assert f"{number} passed" in ran.stdout
