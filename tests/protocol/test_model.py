"""The protocol's model: small worlds as a whole, large ones at random, and mutants that have to be found out."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from cases import full
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model import MUTANTS, SMALL, WIDE, World, explore, walk

ROOT = Path(__file__).resolve().parents[2]
by_name = {"ids": lambda one: one.name}
explored = cache(explore)  # several tests and mutants ask for one world


@pytest.mark.parametrize("world", SMALL, **by_name)
def test_in_no_state_of_a_small_world_does_a_count_go_wrong(world):
    found = explored(world)
    assert found.violation is None, str(found)
    assert found.complete


QUICK = {  # one for each kind of world
    "one next batch for all owners",
    "two stores, what is done is skipped",
    "adopt takes unknown for equal",
    "a batch in parts is not noticed",
    "who follows looks once at what is kept",
    "a batch is rolled back over an operator's attempt",
    "a correction has no id",
    "the alias is looked at for each key",
}
assert len({type(one.world) for one in MUTANTS if one.name in QUICK}) == len({type(one.world) for one in MUTANTS})


@pytest.mark.parametrize(
    "mutant",
    [one if one.name in QUICK else full(one) for one in MUTANTS],
    **by_name,
)
def test_each_protection_is_needed(mutant):
    wrong = explore(mutant.world, mutant.protocol(mutant.world.type), limit=200_000)
    assert wrong.violation is not None, f"{mutant.name}: no counterexample in {wrong.states} states"
    assert mutant.shows in wrong.violation
    assert wrong.trace
    right = explored(mutant.world)
    assert right.violation is None, str(right)
    assert right.complete


@pytest.mark.parametrize("world", WIDE, **by_name)
def test_on_no_long_way_through_a_wide_world_does_a_count_go_wrong(world):
    @settings(max_examples=25, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.data())
    def ways(data):
        found = walk(world, lambda labels: data.draw(st.integers(0, len(labels) - 1)), longest=200)
        assert found.violation is None, str(found)

    ways()


def test_everything_that_is_modelled_happens_somewhere():
    """A step that no world can take would prove nothing."""
    said = {" ".join(map(str, label)) for world in SMALL for label in explored(world).labels}
    for happening in (
        "a driver comes",
        "committed already",
        "FencedError",
        "MissingBatchesError",
        "StateOwnershipError",
        "StoreLostError",
        "StoreRestartedError",
        "LedgerLostError",
        "StaleBatchError",
        "and gets no reply",
        "gets no reply to the fence",
        "arrives late",
        "begins anew",
        "tries task again",
        "loses its claim",
        "is refused the put",
        "is fenced at the get",
        "has key in already",
        "the follower log",
        "and begins anew",
        "vacuum begins",
        "by taking over",
        "the vacuum is fenced",
        "the vacuum ends",
        "rolled back",
        "the store is emptied",
        "the ledger is lost",
        "the copy is put back",
        "expires",
        "the reader was overtaken",
        "the reader looks at the ledger again",
        "which was ahead",
        "which counts already",
        "is rolled back by hand",
        "is copied",
        "replays batch",
        "which is rolled back in state 0",
        "which is rolled back in state 1",
        "ReplannedBatchError",
        "and is fenced",
        "which is a part",
        "takes back batch 0 in store 0 from state 0",
        "takes back batch 0 in store 1 from state 1",
        "by a mark in state 0",
        "which is refused, and takes back again",
        "fails in back",
        "fails in downstream",
        "IncompleteBatchError",
        "writes what is kept",
        "writes and begins anew",
        "writes UsageError",
        "writes StateNotFoundError",
        "drops v.2 removes",
        "drops v.2 gives back",
        "drops v.2 takes FencedError",
        "drops v.2 comes and is refused",
        "a call looks, and ends with an old copy",
        "a call looks, and begins anew",
        "corrects v commits",
    ):
        assert any(happening in one for one in said), happening


def test_a_counterexample_is_told_step_by_step():
    mutant = next(one for one in MUTANTS if one.name == "no claims")
    found = explore(mutant.world, mutant.protocol())
    lines = str(found).splitlines()
    assert "is right" in lines[0]
    assert len(lines) == 1 + len(found.trace)
    assert "1 a driver comes 0" in lines[1]


def test_an_exploration_that_meets_its_limit_says_so():
    found = explore(World(name="some"), limit=100)
    assert not found.complete
    assert "the first" in str(found)


def test_the_whole_program_tells_what_it_looked_at():
    mutant = run_program("--only", "a key written twice", "--processes", "2")
    assert mutant.returncode == 0, mutant.stderr
    assert "MUTANT a key written twice in one attempt: one driver: key 0 reads as" in mutant.stdout
    assert "0 wrong, 0 cut off" in mutant.stdout.splitlines()[-1]
    wide = run_program("--only", "a wide cluster", "--walks", "2", "--processes", "1")
    assert wide.returncode == 0, wide.stderr
    assert "2 random ways" in wide.stdout


def test_a_world_that_is_cut_off_never_looks_complete():
    program = run_program("--only", "a second query is refused", "--limit", "10", "--processes", "1")
    assert program.returncode == 1, program.stderr
    world, last = program.stdout.splitlines()
    assert world.startswith("CUT OFF a second query is refused: the first ")
    assert last.endswith("0 wrong, 1 cut off by --limit and not explored whole")


def test_the_whole_program_refuses_a_name_that_nothing_has():
    program = run_program("--only", "no such world")
    assert program.returncode == 2
    assert "no world and no mutant has 'no such world'" in program.stderr


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As `make model` starts it: its processes have to find their work in it."""
    command = [sys.executable, "-m", "model", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
