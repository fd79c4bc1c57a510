"""SIGKILL of a driver that seeds, at each of its steps, again and again on one checkpoint."""

from __future__ import annotations

import random
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import clicks as clicks_job
import pytest
import visits_job
from clicks import Clicks
from processes import FIXTURES, job
from spark_fixtures import Visits, contents

from mapstate import errors, open_reader

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.slow]

BUCKETS = 4
# the writes of the ledger: the opening, the stage, begin and commit of each bucket; and a task at its puts
STEPS: list[tuple[str, dict[str, Any]]] = [
    *(("swap", {"call": call, "after": after}) for call in (1, 2, 3, 4) for after in (False, True)),
    ("multi_put", {"after": False}),
    ("multi_put", {"after": True}),
]


NAMES = {
    "rolling": ["features"],
    "sliding": ["windows"],
    "sessions": ["windows"],
    "together": ["features", "windows"],  # in two stores, whose ends are two writes
}
SQLITE = pytest.param("sqlite", marks=pytest.mark.full)


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.full) for kind in [*NAMES][:-1]), "together"])
@pytest.mark.parametrize("store", ["redis", SQLITE])
def test_a_seed_of_windows_is_right_whenever_its_driver_dies(
    store, kind, rounds: Callable[[int, int], int], tally: Callable[..., None], tmp_path: Path, redis_url: str, spark
):
    seed = secrets.randbits(32)
    draw, clicks = random.Random(seed), Clicks(tmp_path)
    clicks.history(draw, end=rounds(600, 2_000))
    url = redis_url if store == "redis" else f"sqlite:///{tmp_path}/state.db"
    urls = {"features": url, "windows": f"sqlite:///{tmp_path}/other.db" if kind == "together" else url}
    options: dict[str, Any] = {"url": url, "other": urls["windows"], "folder": str(tmp_path), "buckets": BUCKETS}
    options["kind"] = kind
    for at in range(rounds(1, 20)):
        method, how = draw.choice(STEPS)
        fault = ["Kill", {"who": "driver", "method": method, "name": f"kill-{at}", **how}]
        code = run(options | {"faults": [fault]}, tmp_path / f"log-{at}", "clicks.py")
        assert code in (0, -signal.SIGKILL), (seed, at, (tmp_path / f"log-{at}").read_text()[-3000:])
        if code == 0:
            break
        for name in NAMES[kind]:
            with suppress(errors.StateNotFoundError), open_reader(urls[name], name) as reader:
                if reader.ledger().seed is not None:
                    with pytest.raises(errors.SeedingError):
                        reader.key_count()
        tally(f"driver that seeds windows killed {'after' if how['after'] else 'before'} {method}", kills=1)
    clicks_job.seed(spark, options)
    if "features" in NAMES[kind]:
        assert clicks.check(url) == 0
    if "windows" in NAMES[kind]:
        assert clicks.check_fired(urls["windows"], "sliding" if kind == "together" else kind) > 0
    assert not Path(clicks.checkpoint, "mapstate").exists()


@pytest.mark.parametrize("store", ["redis", SQLITE])
def test_a_seed_is_right_whenever_its_driver_dies(
    store, rounds: Callable[[int, int], int], tally: Callable[..., None], tmp_path: Path, redis_url: str, spark
):
    seed = secrets.randbits(32)
    draw, visits = random.Random(seed), Visits(tmp_path)
    for at in range(3):
        visits.put(f"{at}", [(f"u{draw.randrange(300)}", draw.randrange(99)) for _ in range(1_000)])
    url = redis_url if store == "redis" else f"sqlite:///{tmp_path}/state.db"
    options: dict[str, Any] = {
        "url": url,
        "input": str(visits.input),
        "checkpoint": str(visits.checkpoint),
        "folder": str(tmp_path),
    }
    options |= {"seed": BUCKETS, "chunk_size": 20}
    steps = [draw.choice(STEPS) for _ in range(rounds(1, 20))]
    done, floor = 0, 0
    for at, (method, how) in enumerate(steps):
        fault = ["Kill", {"who": "driver", "method": method, "name": f"kill-{at}", **how}]
        code = run(options | {"faults": [fault]}, tmp_path / f"log-{at}")
        assert code in (0, -signal.SIGKILL), (seed, at, (tmp_path / f"log-{at}").read_text()[-3000:])
        try:
            with open_reader(url, "visits") as reader:
                ledger = reader.ledger()
        except errors.StateNotFoundError:
            continue
        if ledger.seed is None:
            break
        with open_reader(url, "visits") as reader, pytest.raises(errors.SeedingError):
            reader.get("u1")
        assert (ledger.floor, ledger.seed.done) >= (floor, done), (seed, steps[: at + 1])
        done, floor = ledger.seed.done, ledger.floor
        tally(f"driver that seeds killed {'after' if how['after'] else 'before'} {method}", kills=1)
    assert visits_job.started(spark, options).awaitTermination(240), seed
    assert contents(url, "visits") == visits.truth(), seed
    assert not Path(visits.checkpoint, "mapstate").exists()


def run(options: dict[str, Any], log: Path, program: str = "visits_job.py") -> int:
    """The exit code of a driver."""
    with job(FIXTURES / program, options, log) as process:
        return process.wait(240)
