"""examples/access_log_features.py and score_request.py against plain counting of each line, at random times."""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from access_logs import REAL, ROOT, made_up, moved
from processes import with_fast_java
from starlette.testclient import TestClient

from mapstate import open_reader
from mapstate.errors import WindowGoneError
from mapstate.serve import make_app

LAG, MINUTE, DAY = 60, 60, 86_400
# seconds: how long a window is, and to what its beginning is rounded down
LENGTHS = {"5_minutes": (300, 60), "1_hour": (3600, 300), "6_hours": (21_600, 300), "1_day": (DAY, 3600)}
BATCHES, TIMES, KEYS = 5, 40, 60

pytestmark = pytest.mark.spark


def parsed(line: str) -> tuple[int, str, str, int | None]:
    """The seconds, address, URL and bytes of a line."""
    parts = line.split(" ")
    at = dt.datetime.strptime(f"{parts[3]} {parts[4]}", "[%d/%b/%Y:%H:%M:%S %z]")
    return int(at.timestamp()), parts[0], parts[6], None if parts[9] == "-" else int(parts[9])


def counted(rows: list[tuple[int, int | None]], end: int) -> dict[str, int | None]:
    """The features of a key with these times and bytes, as of a time that is a whole minute."""
    found: dict[str, int | None] = {}
    for name, (length, step) in [*LENGTHS.items(), ("lifetime", (0, 0))]:
        first = (end - length) // step * step if length else -(10**12)
        inside = [size for at, size in rows if first <= at < end]
        sizes = [size for size in inside if size is not None]
        found |= {f"requests_{name}": len(inside), f"bytes_{name}": sum(sizes) if sizes else None}
    return found


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.full), pytest.param("redis", marks=pytest.mark.redis)])
def store(request: Any, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/features.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")


@pytest.mark.usefixtures("examples")
def test_every_feature_is_that_of_plain_counting_at_random_times(spark, store, tmp_path, rounds):
    access_log, access_log_features = map(import_module, ("access_log", "access_log_features"))
    lines = moved(REAL.read_text().splitlines() if REAL.exists() else made_up(3))
    logs, draw, mark = tmp_path / "logs", random.Random(7), None
    logs.mkdir()
    rows: dict[str, dict[str, list[tuple[int, int | None]]]] = {
        state: defaultdict(list) for state in ("address", "url")
    }
    size = -(-len(lines) // BATCHES)
    for batch in range(rounds(BATCHES // 2, BATCHES)):
        part = lines[batch * size : (batch + 1) * size]
        file = logs / f"{batch}.log"
        file.write_text("".join(f"{line}\n" for line in part))
        os.utime(file, (time.time() - 100 + batch,) * 2)
        for at, address, url, sent in map(parsed, part):
            rows["address"][address].append((at, sent))
            rows["url"][url].append((at, sent))
        frame = access_log.read_logs(spark, str(logs), 1)
        checkpoint = str(tmp_path / "checkpoint")
        access_log_features.start(frame, store, checkpoint=checkpoint, lag=f"{LAG} seconds").awaitTermination()
        latest = max(at for own in rows["url"].values() for at, _ in own)
        earliest = min(at for own in rows["url"].values() for at, _ in own) if mark is None else mark
        for state, known in rows.items():
            with open_reader(store, f"features_by_{state}") as reader:
                assert reader.key_count() == len(known)
                busiest = sorted(known, key=lambda key: -len(known[key]))[:10]
                for _ in range(TIMES):
                    at = draw.randrange(earliest, latest + DAY // 4)
                    keys = [*busiest, *draw.choices([*known], k=KEYS)]
                    found = reader.multi_get(keys, at=dt.datetime.fromtimestamp(at, dt.UTC))
                    assert found == [counted(known[key], at // MINUTE * MINUTE) for key in keys]
                if mark is not None:
                    with pytest.raises(WindowGoneError):
                        reader.get(busiest[0], at=dt.datetime.fromtimestamp(mark // MINUTE * MINUTE - 1, dt.UTC))
        mark = latest - LAG


@pytest.mark.usefixtures("examples")
def test_a_request_is_scored_by_its_features_and_its_own_arguments(spark, tmp_path):
    access_log, access_log_features = map(import_module, ("access_log", "access_log_features"))
    store, now = f"sqlite:///{tmp_path}/features.db", dt.datetime.now(dt.UTC)
    ages = [("192.0.2.1", 60 + at) for at in range(30)] + [("192.0.2.2", 40_000)]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "1.log").write_text(
        "".join(
            f'{address} - - [{now - dt.timedelta(seconds=age):%d/%b/%Y:%H:%M:%S %z}] "GET /login HTTP/1.1" 200 5\n'
            for address, age in ages
        )
    )
    frame = access_log.read_logs(spark, str(tmp_path / "logs"), 1)
    access_log_features.start(frame, store, checkpoint=str(tmp_path / "c"), lag="1 minute").awaitTermination()
    with TestClient(make_app(store, functions="score_request")) as client:

        def score(**request: Any) -> Any:
            return client.post("/drpc/score", content=json.dumps(request)).json()["result"]

        assert score(address="192.0.2.1", url="/login", bytes=5) == {"score": 2, "why": ["burst", "new pace"]}
        assert score(address="192.0.2.2", url="/login", bytes=5) == {"score": 0, "why": []}
        assert score(address="192.0.2.3", url="/login", bytes=500) == {"score": 2, "why": ["new address", "large"]}
        assert client.post("/drpc/score", content="{}").status_code == 400


@pytest.mark.full
def test_the_example_runs_as_its_head_says(tmp_path):
    command = [sys.executable, "examples/access_log_features.py", "--logs", "tests/data/access_log"]
    command += ["--store", f"sqlite:///{tmp_path}/features.db", "--checkpoint", str(tmp_path / "checkpoint")]
    environment = with_fast_java()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "features_by_address: 28 keys" in done.stdout
    assert "features_by_url" in done.stdout
