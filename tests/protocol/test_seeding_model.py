"""The rules of a seed in random worlds, and what each simpler rule leads to."""

from __future__ import annotations

import pytest
from cases import full

from model import seeding_cut, seeding_together, seeding_windows
from model.seeding import MUTANTS, explore


def test_no_row_is_lost_or_counts_twice_and_no_reader_sees_half_a_seed():
    assert explore(2_000) is None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_simpler_rule_goes_wrong(mutant):
    assert explore(2_000, mutant) is not None


def test_a_seed_of_rolling_windows_is_what_batches_of_its_rows_would_be():
    assert explore(500, world=seeding_windows.World) is None


@pytest.mark.parametrize("mutant", seeding_windows.MUTANTS)
def test_each_simpler_rule_of_rolling_windows_goes_wrong(mutant):
    assert explore(2_000, mutant, seeding_windows.World) is not None


def test_a_seed_of_windows_that_fire_is_what_batches_of_its_rows_would_be():
    assert explore(500, world=seeding_windows.FiredWorld) is None


@pytest.mark.parametrize("mutant", seeding_windows.FIRED_MUTANTS)
def test_each_simpler_rule_of_windows_that_fire_goes_wrong(mutant):
    assert explore(2_000, mutant, seeding_windows.FiredWorld) is not None


def test_a_seed_of_sessions_is_what_batches_of_its_rows_would_be():
    assert explore(2_000, world=seeding_windows.SessionWorld) is None


@pytest.mark.parametrize("mutant", seeding_windows.SESSION_MUTANTS)
def test_each_simpler_rule_of_sessions_goes_wrong(mutant):
    assert explore(2_000, mutant, seeding_windows.SessionWorld) is not None


def test_states_that_are_seeded_together_have_one_history():
    assert explore(3_000, world=seeding_together.World) is None


SLOW = ("takes_apart", "anew_beside_ended", "stages_again")


@pytest.mark.parametrize("mutant", [full(one) if one in SLOW else one for one in seeding_together.MUTANTS])
def test_each_simpler_rule_of_states_together_goes_wrong(mutant):
    assert explore(6_000, mutant, seeding_together.World) is not None


def test_a_history_of_another_place_counts_each_row_once_or_is_refused():
    assert explore(3_000, world=seeding_cut.World) is None


@pytest.mark.parametrize("mutant", seeding_cut.MUTANTS)
def test_each_simpler_rule_of_the_cut_goes_wrong(mutant):
    assert explore(3_000, mutant, seeding_cut.World) is not None
