"""Explores all worlds and shows that each mutant is found out: ``python -m model``.

A module of its own: processes that are spawned do not import a package's ``__main__``.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from model.explore import AnyWorld, Explored, explore, walk
from model.mutants import MUTANTS, Mutant
from model.rolling_mutants import ROLLING_MUTANTS
from model.rolling_worlds import ROLLING, ROLLING_SETTINGS, RollingSetting, weighted
from model.window_mutants import WINDOW_MUTANTS, WindowMutant
from model.window_oracle import SETTINGS, Setting
from model.windows import Played, play
from model.world import ViolationError, World
from model.worlds import LARGE, SMALL, WIDE

__all__ = ["Outcome", "main"]


class Outcome(NamedTuple):
    """Of a world or a mutant. ``whole`` is False where --limit came before the last state."""

    right: bool
    whole: bool
    states: int
    line: str


def main(arguments: list[str] | None = None) -> int:
    """Prints a line per world and mutant as it is done, and a last one of them all.

    Returns 0 only where everything came out as it should and every world was explored whole; else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m model", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="worlds and mutants whose name holds TEXT")
    parser.add_argument("--limit", type=int, default=3_000_000, help="the most states of one world (%(default)s)")
    parser.add_argument("--walks", type=int, default=2000, help="ways through each wide world (%(default)s)")
    parser.add_argument("--windows", type=int, default=1000, help="random worlds of each kind of windows (%(default)s)")
    parser.add_argument(
        "--rolling", type=int, default=100, help="random worlds of each kind of rolling windows (%(default)s)"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at one time (%(default)s)")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    work: list[Callable[[], Outcome]] = []
    work += [
        partial(_explored, world, options.limit) for world in (*LARGE, *SMALL, *ROLLING) if options.only in world.name
    ]
    work += [partial(_walked, world, options.walks) for world in WIDE if options.only in world.name]
    mutants = (*MUTANTS, *ROLLING_MUTANTS)
    work += [partial(_mutant, mutant, options.limit) for mutant in mutants if options.only in mutant.name]
    work += [partial(_rolling, one, options.rolling) for one in ROLLING_SETTINGS if options.only in one.title]
    work += [partial(_windows, one, options.windows) for one in SETTINGS if options.only in f"windows: {one}"]
    work += [
        partial(_window_mutant, mutant, 10 * options.windows)
        for mutant in WINDOW_MUTANTS
        if options.only in f"windows: {mutant.name}"
    ]
    if not work:
        parser.error(f"no world and no mutant has {options.only!r} in its name")
    wrong = cut_off = states = 0
    with ProcessPoolExecutor(options.processes, max_tasks_per_child=1) as processes:
        for one in processes.map(_run, work):
            wrong += not one.right
            cut_off += one.right and not one.whole
            states += one.states
            print(f"{'WRONG ' * (not one.right) or 'CUT OFF ' * (not one.whole)}{one.line}", flush=True)
    minutes = (time.monotonic() - started) / 60
    print(
        f"{len(work)} worlds and mutants, {states:,} states, {minutes:.0f} minutes: {wrong} wrong, "
        f"{cut_off} cut off by --limit and not explored whole"
    )
    return 1 if wrong or cut_off else 0


def _run(work: Callable[[], Outcome]) -> Outcome:
    return work()


def _explored(world: AnyWorld, limit: int) -> Outcome:
    found = explore(world, limit=limit)
    return Outcome(found.violation is None, found.complete, found.states, str(found))


def _walked(world: World, walks: int) -> Outcome:
    steps = 0
    for found in _walks(world, walks):
        steps += found.states
        if found.violation is not None:
            return Outcome(False, True, steps, str(found))
    line = f"{world.name}: {walks:,} random ways of {steps:,} steps, no counterexample"
    return Outcome(True, True, steps, line)


def _walks(world: World, walks: int) -> Iterator[Explored]:
    for seed in range(walks):
        chance = random.Random(seed)
        yield walk(world, lambda labels, chance=chance: chance.randrange(len(labels)))  # type: ignore[misc]


def _rolling(setting: RollingSetting, worlds: int) -> Outcome:
    steps = 0
    for seed in range(worlds):
        found = walk(setting.world(seed), weighted(random.Random(seed)), longest=2000)
        steps += found.states
        if found.violation is not None:
            return Outcome(False, True, steps, str(found))
    line = f"{setting.title}: {worlds:,} random worlds of {steps:,} steps, no counterexample"
    return Outcome(True, True, steps, line)


def _windows(setting: Setting, worlds: int) -> Outcome:
    total = Played()
    for seed in range(worlds):
        try:
            total.add(play(seed, setting))
        except ViolationError as error:
            return Outcome(False, True, total.steps, f"windows: {setting}: seed {seed}: {error}")
    return Outcome(True, True, total.steps, f"windows: {setting}: {worlds:,} random worlds, {total}, no counterexample")


def _window_mutant(mutant: WindowMutant, worlds: int) -> Outcome:
    found = mutant.found(worlds)
    line = f"no counterexample in {worlds:,} worlds" if found is None else f"seed {found[0]}: {found[1]}"
    return Outcome(found is not None, True, 0, f"MUTANT windows: {mutant.name}: {line}")


def _mutant(mutant: Mutant, limit: int) -> Outcome:
    """The right protocol's exploration of the same world has to be whole; a mutant's ends where it is found out."""
    wrong = explore(mutant.world, mutant.protocol(mutant.world.type), limit=limit)
    right = explore(mutant.world, limit=limit)
    found_out = mutant.shows in (wrong.violation or "") and right.violation is None
    return Outcome(found_out, right.complete, wrong.states + right.states, f"MUTANT {mutant.name}: {wrong}")
