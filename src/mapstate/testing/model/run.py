"""Explores all worlds and shows that each mutant is found out: ``python -m mapstate.testing.model``.

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

from mapstate.testing.model.explore import Explored, explore, walk
from mapstate.testing.model.mutants import MUTANTS, Mutant
from mapstate.testing.model.world import World
from mapstate.testing.model.worlds import LARGE, SMALL, WIDE

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Prints a line per world and mutant as it is done; returns 1 where anything came out other than it should."""
    parser = argparse.ArgumentParser(prog="python -m mapstate.testing.model", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="worlds and mutants whose name holds TEXT")
    parser.add_argument("--limit", type=int, default=3_000_000, help="the most states of one world (%(default)s)")
    parser.add_argument("--walks", type=int, default=2000, help="ways through each wide world (%(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at one time (%(default)s)")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    work: list[Callable[[], tuple[bool, int, str]]] = []
    work += [partial(_explored, world, options.limit) for world in (*LARGE, *SMALL) if options.only in world.name]
    work += [partial(_walked, world, options.walks) for world in WIDE if options.only in world.name]
    work += [partial(_mutant, mutant, options.limit) for mutant in MUTANTS if options.only in mutant.name]
    if not work:
        parser.error(f"no world and no mutant has {options.only!r} in its name")
    right, states = True, 0
    with ProcessPoolExecutor(options.processes, max_tasks_per_child=1) as processes:
        for as_it_should, looked_at, line in processes.map(_run, work):
            right &= as_it_should
            states += looked_at
            print(line if as_it_should else f"WRONG {line}", flush=True)
    print(f"{len(work)} worlds and mutants, {states:,} states, {(time.monotonic() - started) / 60:.0f} minutes")
    return 0 if right else 1


def _run(work: Callable[[], tuple[bool, int, str]]) -> tuple[bool, int, str]:
    return work()


def _explored(world: World, limit: int) -> tuple[bool, int, str]:
    found = explore(world, limit=limit)
    return found.violation is None, found.states, str(found)


def _walked(world: World, walks: int) -> tuple[bool, int, str]:
    steps = 0
    for found in _walks(world, walks):
        steps += found.states
        if found.violation is not None:
            return False, steps, str(found)
    return True, steps, f"{world.name}: {walks:,} random ways of {steps:,} steps, no counterexample"


def _walks(world: World, walks: int) -> Iterator[Explored]:
    for seed in range(walks):
        chance = random.Random(seed)
        yield walk(world, lambda labels, chance=chance: chance.randrange(len(labels)))  # type: ignore[misc]


def _mutant(mutant: Mutant, limit: int) -> tuple[bool, int, str]:
    wrong = explore(mutant.world, mutant.protocol(mutant.world.type), limit=limit)
    right = explore(mutant.world, limit=limit)
    found_out = mutant.shows in (wrong.violation or "") and right.violation is None
    return found_out, wrong.states + right.states, f"MUTANT {mutant.name}: {wrong}"
