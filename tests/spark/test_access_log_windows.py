"""examples/access_log_windows.py against awk, which has every line and no Spark: every window, every late line."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from access_logs import REAL, ROOT, made_up, moved
from cases import full
from processes import with_fast_java

from mapstate import open_reader

LAG = 60

pytestmark = pytest.mark.spark

AWK = r"""
function days(year, month, day) {  # since 1970, in the Gregorian calendar
    if (month < 3) { month += 12; year -= 1 }
    return 365 * year + int(year / 4) - int(year / 100) + int(year / 400) + int((153 * month - 457) / 5) + day - 719469
}
BEGIN {
    split("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec", names, " ")
    for (at in names) month[names[at]] = at
    mark = -1; late = 0; none = 1
}
FNR == 1 { ended(); newest = -1 }
{
    split(substr($4, 2), part, /[\/:]/)
    zone = (substr($5, 1, 1) == "-" ? -1 : 1) * (substr($5, 2, 2) * 3600 + substr($5, 4, 2) * 60)
    seconds = days(part[3], month[part[2]], part[1]) * 86400 + part[4] * 3600 + part[5] * 60 + part[6] - zone
    if (seconds > newest) newest = seconds
    if (!none && seconds < mark - mark % 600) { late++; next }
    for (end = seconds - seconds % 600 + 600; end <= seconds + 3600; end += 600) {
        requests[end " " $7]++
        if ($10 != "-") bytes[end " " $7] += $10
    }
}
function ended() { if (newest - lag > mark) { mark = newest - lag; none = 0 } }
END {
    for (window in requests) {
        size = (window in bytes) ? sprintf("%.0f", bytes[window]) : "-"
        print window, requests[window], size
    }
    print "late", late
}
"""


def awk(files: list[Path]) -> tuple[dict[tuple[int, str], tuple[int, int | None]], int]:
    """The requests and bytes of each window and URL, and the late lines. A file is a batch."""
    done = subprocess.run(
        ["awk", "-v", f"lag={LAG}", AWK, *map(str, files)], capture_output=True, text=True, check=True
    )
    *windows, late = done.stdout.splitlines()
    found = {}
    for line in windows:
        end, url, requests, size = line.split(" ")
        found[int(end), url] = int(requests), None if size == "-" else int(size)
    return found, int(late.split()[1])


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.full), pytest.param("redis", marks=pytest.mark.redis)])
def store(request: Any, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/hours.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")


@pytest.mark.parametrize("log", ["out of order", full("moved")])
def test_every_window_and_every_late_line_is_awks(spark, store, tmp_path, monkeypatch, log):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    access_log, access_log_windows = map(import_module, ("access_log", "access_log_windows"))
    lines = made_up(1)
    if log == "moved":
        lines = moved(REAL.read_text().splitlines() if REAL.exists() else made_up(2))
    logs = tmp_path / "logs"
    logs.mkdir()
    files = []
    size = -(-len(lines) // 6)
    for at in range(6):
        files.append(logs / f"{at}.log")
        files[-1].write_text("".join(f"{line}\n" for line in lines[at * size : (at + 1) * size]))
        os.utime(files[-1], (time.time() - 100 + at,) * 2)
    for part in (1, 2):  # two runs of the job
        hidden = [file.rename(file.with_name(f"_{file.name}")) for file in files[3:]] if part == 1 else []
        frame = access_log.read_logs(spark, str(logs), 1)
        query = access_log_windows.start(frame, store, checkpoint=str(tmp_path / "checkpoint"), lag=f"{LAG} seconds")
        query.awaitTermination()
        for file in hidden:
            file.rename(file.with_name(file.name[1:]))
    expected, late = awk(files)
    found = {}
    with open_reader(store, "hours_by_url") as hours:
        for url in {url for _, url in expected}:
            for window in hours.windows(url):
                assert isinstance(window.end, dt.datetime)
                end = int(window.end.timestamp())
                found[end, url] = window.value["requests"], window.value["bytes"]
        assert sum(report.rows_late for report in hours.reports()) == late
    assert found == expected
    assert late > 0
    with open_reader(store, "late_lines") as counted:
        assert counted.get(()) == {"lines": late}


@pytest.mark.full
def test_the_example_runs_as_its_head_says(tmp_path):
    command = [sys.executable, "examples/access_log_windows.py", "--logs", "tests/data/access_log"]
    command += ["--store", f"sqlite:///{tmp_path}/hours.db", "--checkpoint", str(tmp_path / "checkpoint")]
    environment = with_fast_java()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "hours that are final" in done.stdout
