"""docs/tutorial.md from its first block to its last: its programs are saved, its commands run, its outputs compared."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from processes import with_fast_java
from test_docs import BLOCK, ROOT

PAGE = ROOT / "docs" / "tutorial.md"
EXPORT = "export STORE=redis://localhost:6379/0\n"


def run(script: str, folder: Path, environment: dict[str, str]) -> str:
    """What the commands print. All that they started is gone when this returns."""
    command = ["bash", "-eu", "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, cwd=folder, env=environment, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{script}\n{out}\n{err[-4000:]}"
    return out


@pytest.mark.full
@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(900)  # five jobs, each with a JVM of its own
def test_a_newcomer_who_follows_the_tutorial_sees_what_it_says(redis_url, tmp_path):
    environment = with_fast_java() | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    out, programs, compared = "", 0, 0
    for language, block in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, f"a program without a name: {block}"
            (tmp_path / name[1]).write_text(block)
            programs += 1
        elif block == EXPORT:
            environment["STORE"] = redis_url
        elif language == "sh":
            out = run(block, tmp_path, environment)
            killed = "kill -9" in block
        else:
            assert language == "text"
            if killed:  # at an unknown moment: any number of whole batches
                last, visits = map(int, re.match(r"batches 0 to (\d+): (\d+) visits", out).groups())
                assert 2 <= last < 12
                assert visits == 1000 * (last + 1)
                assert re.sub(r"\d+", "#", out) == re.sub(r"\d+", "#", block)
            else:  # a kill before Spark has planned the batch of a file that it has found: the next batch has two
                assert re.sub("^batches 0 to 10: 12000 ", "batches 0 to 11: 12000 ", out) == block
            compared += 1
    assert (programs, compared) == (6, 6)
