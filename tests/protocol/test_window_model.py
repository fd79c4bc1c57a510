"""The model of windows: random worlds without a wrong read, and mutants that have to be found out."""

from __future__ import annotations

import pytest

from model.window_mutants import WINDOW_MUTANTS
from model.window_oracle import SETTINGS
from model.windows import Played, play


def test_in_no_random_world_is_a_window_wrong(rounds):
    total = Played()
    for setting in SETTINGS:
        for seed in range(rounds(4, 12)):
            total.add(play(seed, setting))
    happened = {name: getattr(total, name) for name in Played.__dataclass_fields__}
    assert min(happened.values()) > 0, f"what does not happen is not searched: {happened}"


FOUND = [one for one in WINDOW_MUTANTS if not one.rare]


@pytest.mark.parametrize(
    "mutant",
    [one if not at else pytest.param(one, marks=pytest.mark.full) for at, one in enumerate(FOUND)],
    ids=lambda one: one.name,
)
def test_each_rule_of_windows_is_needed(mutant):
    assert mutant.found(500) is not None


@pytest.mark.parametrize("mutant", WINDOW_MUTANTS, ids=lambda one: one.name)
def test_each_mutant_changes_what_is_there(mutant):
    assert [name for owner, name, _ in mutant.rules().patches() if not hasattr(owner, name)] == []


def test_a_seed_is_one_schedule():
    setting = SETTINGS[0]
    assert play(7, setting) == play(7, setting)
