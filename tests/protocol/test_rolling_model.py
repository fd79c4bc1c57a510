"""The model of rolling windows: small worlds whole, random ones at random, and mutants that have to be found out."""

from __future__ import annotations

import random
from functools import cache

import pytest
from cases import full

from mapstate.protocol.rolling import RollingDefinition, RollingWindow, Tiling
from model import explore, walk
from model.rolling import Rolling
from model.rolling_mutants import ROLLING_MUTANTS
from model.rolling_tiles import NEVER, Definition, Row, Tiles, Window, folded, right, slice_of, undo, undone
from model.rolling_worlds import ROLLING, ROLLING_SETTINGS, weighted

by_name = {"ids": lambda one: one.name}
explored = cache(explore)
_LARGER = ("rolling windows: other retentions", "rolling windows: windows more and less")


def _or_full(world: Rolling) -> object:
    return pytest.param(world, marks=pytest.mark.full) if world.name in _LARGER else world


@pytest.mark.parametrize("world", [_or_full(world) for world in ROLLING], **by_name)
def test_in_no_state_of_a_small_world_is_an_answer_wrong(world):
    found = explored(world)
    assert found.violation is None, str(found)
    assert found.complete


SLOW = ("rolling windows: a second read only for newer records", "rolling windows: a rollback takes the horizon back")


@pytest.mark.parametrize("mutant", [full(one) if one.name in SLOW else one for one in ROLLING_MUTANTS], **by_name)
def test_each_rule_of_rolling_windows_is_needed(mutant):
    found = explore(mutant.world, mutant.protocol(), limit=200_000)
    assert found.violation is not None, f"{mutant.name}: no counterexample in {found.states} states"
    assert mutant.shows in found.violation
    assert mutant.world in ROLLING  # where the right protocol is looked at whole


@pytest.mark.parametrize("worlds", [3, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize("setting", ROLLING_SETTINGS, **by_name)
def test_on_no_way_through_a_random_world_is_an_answer_wrong(setting, worlds):
    for seed in range(worlds):
        found = walk(setting.world(seed), weighted(random.Random(seed)), longest=2000)
        assert found.violation is None, str(found)
        assert found.states > 100


def test_everything_that_is_modelled_happens_somewhere():
    labels = {label for world in ROLLING if world.name not in _LARGER for label in explored(world).labels}
    said = {" ".join(map(str, label)) for label in (*labels, *_offered("windows that come and go"))}
    for happening in (
        "a driver comes with definition 1 and begins",
        "begins batch 2",
        "no rows",
        "StateSchemaError",
        "has nothing for key",
        "commits batch 2",
        "the last batch is rolled back",
        "by taking over",
        "the vacuum gives no value to key",
        "the vacuum removes key",
        "the vacuum has nothing for key",
        "the vacuum ends",
        "reads the ledger again, and starts over",
        f"tiles at ({NEVER},",
    ):
        assert any(happening in one for one in said), happening


def _offered(name):
    """The labels of all steps that can be taken on ways through a few random worlds."""
    setting = next(one for one in ROLLING_SETTINGS if one.name == name)
    offered = set()
    for seed in range(3):
        choose = weighted(random.Random(seed))

        def note(labels, choose=choose):
            offered.update(labels)
            return choose(labels)

        walk(setting.world(seed), note, longest=600)
    return offered


def _definitions(draw):
    for _ in range(60):
        unit = draw.choice([1, 2, 5])
        windows = [Window(draw.randint(1, 20) * unit, draw.randint(1, 7) * unit) for _ in range(3)]
        lifetime = [Window(None, unit)] * draw.randint(0, 1)
        yield Definition((Window(draw.randint(1, 5) * unit, unit), *windows, *lifetime), unit)


def _cuts(definition, horizon, until):
    """Where the windows that end from ``horizon`` on begin and end: listed, window by window."""
    ends = range(horizon, until, definition.unit)
    bounded = [window for window in definition.windows if window.length is not None]
    return {*ends, *(window.begin(end) for window in bounded for end in ends)}


def test_a_tile_begins_where_a_window_begins_or_ends():
    draw = random.Random(5)
    for definition in _definitions(draw):
        horizon = definition.floor(draw.randint(-40, 40))
        longest = max(window.length or 0 for window in definition.windows) + 50
        cuts = _cuts(definition, horizon, horizon + 2 * longest)
        for time in range(horizon - 2 * longest, horizon + 20):
            last = max((cut for cut in cuts if cut <= time), default=NEVER if definition.has_lifetime else None)
            assert definition.tile(time, horizon) == last, (definition, horizon, time)


def test_tiles_answer_as_their_rows_do_however_often_they_are_folded():
    draw = random.Random(7)
    for definition in _definitions(draw):
        rows, horizon = [], NEVER
        value: Tiles = ()
        for number in range(30):
            times = [number - draw.choice([0, 0, 3, 40]) for _ in range(2)]
            more = tuple(Row(0, time, (-3) ** (2 * number + at)) for at, time in enumerate(times))
            before = value
            value = folded(definition, horizon, before, more)
            assert undone(value, undo(before, value)) == before
            rows += more
            for end in range(definition.floor(max(horizon, -60)), number + 30, definition.unit):
                if end < horizon:
                    continue
                for window in definition.windows:
                    assert slice_of(value, window.begin(end), end) == right(rows, window, end, end)
            horizon = max(horizon, definition.floor(number - draw.choice([0, 4])))


def test_a_window_more_is_accepted_only_if_its_cuts_are_there():
    draw, accepted = random.Random(11), 0
    for definition in _definitions(draw):
        horizon = definition.floor(draw.randint(-40, 40))
        for _ in range(20):
            more = Window(draw.randint(1, 30) * definition.unit, draw.randint(1, 12) * definition.unit)
            if definition.has_cuts_of(more, horizon):
                accepted += 1
                added = definition._replace(windows=(*definition.windows, more))
                assert _cuts(added, horizon, horizon + 200) <= _cuts(definition, horizon, horizon + 200)
    assert accepted > 100


def test_the_tiles_of_the_library_are_those_of_the_model():
    """Each has arithmetic of its own: the library counts times in units from an offset on."""
    draw = random.Random(13)
    for definition in _definitions(draw):
        unit, offset = definition.unit, draw.choice([0, 0, 3])
        windows = {one: _of_library(one) for one in definition.windows}
        own = RollingDefinition(windows=tuple(windows.values()), type="bigint", unit=unit, offset=offset)
        horizon = definition.floor(draw.randint(-40, 40))
        for time in range(horizon - 200, horizon + 20):
            expected = definition.tile(time, horizon)
            (start,) = Tiling(own, horizon // unit).tiles([own.units(time + offset)])
            if expected in (None, NEVER):
                assert start is None if expected is None else start < -(10**9)
            else:
                assert own.time(start) == expected + offset, (definition, horizon, time)
        for _ in range(20):
            more = Window(draw.randint(1, 30) * unit, draw.randint(1, 12) * unit)
            can = own.has_cuts_of(_of_library(more), horizon // unit)
            assert can == definition.has_cuts_of(more, horizon), (definition, more, horizon)


def _of_library(window):
    if window.length is None:
        return RollingWindow("lifetime", 0, 0)
    return RollingWindow("some", window.length, window.step)
