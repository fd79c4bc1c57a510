"""Random small jobs on real Spark: every run ends right, or with an error of ours whose advice helps.

`make fuzz` runs on, with other seeds and real kills.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cases import full

from fuzz.generate import INGREDIENTS, random_job
from fuzz.habits import Habit, State
from fuzz.mutants import MUTANTS
from fuzz.reduce import shortest
from fuzz.rolling import Rolling
from fuzz.rows import BASE, Row
from fuzz.run import play
from fuzz.steps import AddFiles, Event, Job, Start

pytestmark = [pytest.mark.spark, pytest.mark.redis]

ROOT = Path(__file__).resolve().parents[2]
JOBS, SECONDS, LEAST = 100, 30, 10  # a machine that is too slow for a hundred in that time plays ten


@pytest.mark.timeout(1500)
def test_a_hundred_random_jobs_end_right_or_are_refused():
    asked = {"jobs": JOBS, "seconds": SECONDS, "least": LEAST}
    options = [text for name, number in asked.items() for text in (f"--{name}", str(number))]
    command = [sys.executable, "-m", "fuzz", "--no-kills", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    played, *_ = done.stdout.splitlines()[-1].partition(" jobs in ")
    assert int(played) >= LEAST, done.stdout


def test_a_seed_makes_the_same_job_and_some_job_has_each_ingredient():
    made = [random_job(seed, redis=True) for seed in range(300)]
    assert made == [random_job(seed, redis=True) for seed in range(300)]
    assert set().union(*(used for _, used in made)) == set(INGREDIENTS)
    played = (random_job(seed, redis=True, kills=False) for seed in range(1, 1 + JOBS))
    assert set().union(*(used for _, used in played)) == set(INGREDIENTS)


def test_a_run_that_calls_no_state_is_judged_by_the_next_that_does(spark):
    file, lost = AddFiles(((Row((("s", "a"),), 1, 5),),)), Event("the copy of the store is put back")
    played = play(spark, Job(0, "sqlite", (State("state0"),), (file, Start(), lost, Start())))
    assert played.verdict == "right", played
    assert played.log.index("no state was called: a file comes, so that one is") < len(played.log) - 1, played.log


def test_rows_that_a_function_kept_for_a_run_that_failed_are_no_loss_of_the_state(spark):
    """The second run has counted the first batch as an empty one, and the function has kept its rows."""
    rows = [Row((("u", value),), 1, 5) for value in ({"id": 1, "name": "a"}, None, None, None)]
    files = AddFiles(tuple((row,) for row in rows))
    played = play(spark, Job(0, "memory", (State("state0", keys=("u",)),), (files, Start(Habit(gathers=True)))))
    assert played.verdict == "right", played


_FILES = AddFiles(tuple((Row((("s", "a"),), t, 5), Row((("s", "a"),), t + 3, 2)) for t in (1, 20, 45, 70, 95)))
_ROLLING = State("state0", lag=3, rolling=Rolling(((6, 2), (40, 20)), retention=4))


def _changed(*windows: tuple[int, int]) -> Start:
    return Start(changed=(replace(_ROLLING, rolling=Rolling(windows, retention=4)),))


@pytest.mark.parametrize(
    ("windows", "is_refused"),
    [(((6, 2), (40, 20), (38, 2)), True), full(((6, 2), (40, 20), (0, 0)), True), full(((40, 20),), False)],
    ids=["a window more", "a lifetime more", "a window less"],
)
def test_windows_that_a_restart_changes_are_right_or_refused_before_advice_helps(spark, windows, is_refused):
    played = play(spark, Job(0, "sqlite", (_ROLLING,), (_FILES, Start(), _FILES, _changed(*windows))))
    assert played.verdict == "right", played
    assert any("StateSchemaError" in line for line in played.log) == is_refused, played.log


def test_rows_that_are_set_aside_are_in_no_window():
    rolling = Rolling(((10, 2), (0, 0)), "moment")
    rows = [Row((), t, 1) for t in (None, 10**10, -50, 3, 4, 5)]
    (value,) = rolling.right(rows, (), BASE + 5, BASE + 5, by_fields=False).values()
    assert value == {"rows_10_seconds": 2, "total_10_seconds": 2, "rows_lifetime": 3, "total_lifetime": 3}


@pytest.mark.parametrize("column", [full("t"), "moment"])
def test_windows_that_hold_other_rows_are_found(spark, monkeypatch, column):
    """As of a time, with a watermark, and in the windows of all keys."""
    state = replace(_ROLLING, rolling=replace(_ROLLING.rolling, time=column))
    right = Rolling.right
    job = Job(0, "memory", (state,), (_FILES, Start()))
    assert play(spark, job).verdict == "right"
    monkeypatch.setattr(Rolling, "right", lambda self, rows, *asked, **named: right(self, rows[:-1], *asked, **named))
    assert play(spark, job).verdict == "wrong counts"


def test_a_failing_job_with_a_struct_is_reduced_like_any_other():
    rows = tuple(Row((("u", {"id": number, "name": "a"}),), 1, 5) for number in range(3))
    job = Job(0, "memory", (State("state0", keys=("u",)),), (AddFiles((rows,)), Start(), Start()))
    smallest = shortest(
        job, lambda smaller: any(isinstance(step, AddFiles) and any(step.files) for step in smaller.steps)
    )
    (left,) = smallest.steps
    assert isinstance(left, AddFiles)
    assert [len(rows) for rows in left.files] == [1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_replaces_a_guard_that_exists(mutant):
    with mutant.applied():
        pass
