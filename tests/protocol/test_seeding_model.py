"""The rules of a seed in random worlds, and what each simpler rule leads to."""

from __future__ import annotations

import pytest

from model.seeding import MUTANTS, explore


def test_no_row_is_lost_or_counts_twice_and_no_reader_sees_half_a_seed():
    assert explore(2_000) is None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_simpler_rule_goes_wrong(mutant):
    assert explore(2_000, mutant) is not None
