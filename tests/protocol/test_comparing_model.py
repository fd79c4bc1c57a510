"""The rules of a comparison in random worlds, and what each simpler rule leads to."""

from __future__ import annotations

import pytest

from model.comparing import MUTANTS, explore


def test_what_a_comparison_says_of_a_key_is_true_as_of_its_position(rounds):
    wrong, settled, moving = explore(rounds(400, 1_000))
    assert wrong is None
    assert min(settled, moving) > 1_000


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_simpler_rule_goes_wrong(mutant):
    assert explore(1_000, mutant)[0] is not None
