"""`make demo`, as a whole."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import with_fast_java

DEMO = Path(__file__).resolve().parents[2] / "examples/demo.py"


@pytest.mark.slow
def test_a_job_killed_in_mid_batch_loses_nothing_and_counts_nothing_twice():
    demo = subprocess.run(
        [sys.executable, str(DEMO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=with_fast_java(),
        timeout=280,
        check=False,
    )
    lines = demo.stdout.splitlines()
    assert lines[-1:] == ["0 keys differ"], demo.stdout
    assert demo.returncode == 0, demo.stdout

    def seen(consistency):
        found = re.search(rf"consistency='{consistency}' +([\d,]+) +([\d,]+) of ([\d,]+)", demo.stdout)
        assert found, demo.stdout
        return [int(number.replace(",", "")) for number in found.groups()]

    killed = int(re.search(r"SIGKILL while batch (\d+),", demo.stdout)[1])
    visits, written, users = seen("committed")
    assert (visits, written) == (killed * 4000, 0)
    visits, written, _ = seen("latest")
    assert killed * 4000 < visits < (killed + 1) * 4000
    assert 0 < written < users
