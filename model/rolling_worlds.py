"""The worlds with rolling windows: small ones, explored whole, and settings from which random ones are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from model.rolling import Plan, Rolling
from model.rolling_tiles import Definition, Window
from model.world import Label

__all__ = ["ROLLING", "ROLLING_SETTINGS", "RollingSetting", "weighted"]

LIFETIME = Window(None)
_SHORT, _LONG = Window(2), Window(6, 3)
_ALL = Definition((_SHORT, _LONG, LIFETIME))
_BOUNDED = Definition((_SHORT, _LONG))

ROLLING: tuple[Rolling, ...] = (
    Rolling(
        name="rolling windows: attempts that die",
        definitions=(_ALL,),
        plans=((((0, 1), (1, -1)), ((0, -5),), ((0, 3), (1, -8))),),
        ahead=2,
        strides=((3, 3), (1, 1)),
    ),
    Rolling(
        name="rolling windows: readers",
        definitions=(_ALL,),
        plans=((((0, 0), (1, 0)), ((0, -4),)),),
        attempts=3,
        batches=2,
        most_strides=1,
        reads=1,
        rollbacks=1,
    ),
    Rolling(
        name="rolling windows: rollbacks and a vacuum",
        definitions=(_BOUNDED._replace(lag=1),),
        plans=((((0, 0), (1, -4)), ((1, 0),)),),
        strides=((9, 9),),
        vacuums=1,
        rollbacks=1,
    ),
    Rolling(
        name="rolling windows: a watermark that is advanced",
        definitions=(_BOUNDED._replace(lag=4),),
        plans=((((0, 0), (1, -4)), ((0, -1),), ((0, 1), (1, 0))),),
        strides=((9, 1),),
        rollbacks=1,
        advances=1,
    ),
    Rolling(
        name="rolling windows: a vacuum beside a reader",
        definitions=(_BOUNDED,),
        plans=((((0, 0),), ((1, 0),)),),
        strides=((9, 9),),
        most_strides=1,
        attempts=3,
        drivers=1,
        vacuums=2,
        reads=1,
    ),
    Rolling(
        name="rolling windows: other retentions",
        definitions=(_ALL, _ALL._replace(retention=4), _ALL._replace(retention=2, lag=3)),
        plans=((((0, 0),), ((0, -3), (1, 0))),),
        strides=((4, 4),),
        drivers=3,
        restarts=2,
        rollbacks=1,
    ),
    Rolling(
        name="rolling windows: windows more and less",
        definitions=(
            Definition((_SHORT, Window(4, 2))),
            Definition((_SHORT, Window(4, 2), Window(2, 2))),
            Definition((_SHORT, Window(4, 2), Window(3))),
            Definition((_SHORT, Window(4, 2), Window(7, 2))),
            Definition((_SHORT,)),
            Definition((_SHORT, Window(4, 2), LIFETIME)),
        ),
        plans=((((0, 0), (0, -1), (0, -3)), ((0, 1),)),),
        keys=1,
        strides=((3, 3),),
        drivers=3,
        restarts=2,
        rollbacks=1,
    ),
    Rolling(
        name="rolling windows: a source that is behind",
        definitions=(Definition((Window(2), Window(4, 2))),),
        plans=((((0, 0), (0, -2)), ((0, 1),)),),
        keys=1,
        strides=((2, 2), (20, 1)),
        attempts=3,
    ),
    Rolling(
        name="rolling windows: a unit of two",
        definitions=(Definition((Window(4, 2), Window(6, 6), LIFETIME._replace(step=2)), unit=2, lag=1),),
        plans=((((0, 0), (0, -3)), ((0, 1), (1, -6))),),
        strides=((3, 3), (5, 3)),
        drivers=3,
    ),
)


class RollingSetting(NamedTuple):
    """What random worlds of one kind have in common. Lengths and times are numbers of units.

    ``windows``    as (length, step); a world has two of them, or all
    ``late``       how far behind its source a row may be
    ``more``       windows that a restart may add, if they can be answered
    ``strides``    how far clock and source may go in one step
    """

    name: str
    windows: tuple[tuple[int, int], ...]
    has_lifetime: bool = True
    unit: int = 1
    lags: tuple[int, ...] = (0, 2, 9)
    retentions: tuple[int, ...] = (0,)
    keys: int = 2
    late: int = 300
    more: tuple[tuple[int, int], ...] = ()
    strides: tuple[tuple[int, int], ...] = ((1, 1), (5, 5), (40, 30))
    first: int = 10_000
    vacuums: int = 0

    @property
    def title(self) -> str:
        """The name among those of all worlds."""
        return f"rolling windows: {self.name}, at random"

    def world(self, seed: int) -> Rolling:
        """One of them."""
        draw, unit = random.Random(f"{self.name} {seed}"), self.unit
        kept = [self.windows[0], *draw.sample(self.windows[1:], draw.choice([1, len(self.windows) - 1]))]
        lifetime = [Window(None, unit)] * self.has_lifetime
        windows = (*(self._window(one) for one in kept), *lifetime)
        own = Definition(windows, unit, draw.choice(self.lags) * unit, draw.choice(self.retentions) * unit)
        others = [own._replace(retention=one * unit) for one in self.retentions]
        if self.more:
            others += [own._replace(windows=(*windows, self._window(one))) for one in self.more]
            others += [own._replace(windows=windows[:1] + windows[2:]), own._replace(windows=(*windows[:2], *lifetime))]
            others += [own._replace(windows=tuple(one for one in windows if one.length is not None))]
        longest = max(length for length, _ in self.windows) * unit
        return Rolling(
            name=f"{self.title}: world {seed}",
            definitions=(own, *dict.fromkeys(one for one in others if one != own)),
            plans=tuple(tuple(self._plan(draw) for _ in range(2)) for _ in range(60)),
            keys=self.keys,
            first=self.first,
            ahead=20 * unit,
            strides=tuple((by_clock * unit, by_source * unit) for by_clock, by_source in self.strides),
            most_strides=40,
            batches=25,
            attempts=60,
            drivers=40,
            restarts=10,
            vacuums=self.vacuums,
            rollbacks=5,
            reads=60,
            asked=tuple(draw.choice([0, 1, unit, draw.randrange(2 * longest)]) for _ in range(30)),
        )

    def _window(self, of: tuple[int, int]) -> Window:
        return Window(of[0] * self.unit, of[1] * self.unit)

    def _plan(self, draw: random.Random) -> Plan:
        return tuple((draw.randrange(self.keys), self._time(draw)) for _ in range(draw.choice([0, 1, 2, 5])))

    def _time(self, draw: random.Random) -> int:
        """Mostly near the source; some rows are late or very late, and a few are of a clock that is wrong."""
        least, most = draw.choice([(-3, 3), (-3, 3), (-20, 0), (-self.late, 0), (0, 30)])
        return draw.randint(least * self.unit, most * self.unit)


ROLLING_SETTINGS = (
    RollingSetting("days and weeks", ((4, 1), (30, 4), (200, 12))),
    RollingSetting("without a lifetime", ((12, 1), (47, 4), (96, 24)), has_lifetime=False, vacuums=8),
    RollingSetting("steps that do not divide each other", ((13, 1), (47, 4), (97, 6)), keys=1),
    RollingSetting("a unit of five", ((4, 1), (47, 4), (301, 48)), unit=5, lags=(0, 3), late=400),
    RollingSetting("retentions", ((4, 1), (30, 12)), retentions=(0, 7, 60), vacuums=4),
    RollingSetting(
        "windows that come and go",
        ((6, 1), (30, 4), (96, 12)),
        more=((3, 1), (10, 1), (24, 4), (60, 12), (150, 24)),
        retentions=(0, 20),
    ),
    RollingSetting(
        "a source that is behind",
        ((4, 1), (30, 4), (60, 12)),
        has_lifetime=False,
        strides=((60, 0), (5, 5), (1, 40), (200, 5)),
    ),
    RollingSetting("before 1970", ((13, 1), (30, 12), (96, 48)), unit=5, first=-1500, keys=3, vacuums=8),
)
"""Too large to be explored: for random ways through random worlds."""

_WEIGHTS = {
    "a driver comes with definition": 2.0,
    "StateSchemaError": 0.2,
    "the last batch is rolled back": 0.8,
    "a vacuum begins": 1.5,
    "time goes on, by clock and source to": 5.0,
}


def weighted(chance: random.Random) -> Callable[[Sequence[Label]], int]:
    """What chooses a step for `walk`: rare is what ends an attempt or takes a batch back."""

    def choose(labels: Sequence[Label]) -> int:
        kinds: dict[str, list[int]] = {}
        for at, label in enumerate(labels):
            kinds.setdefault(label[0], []).append(at)
        (kind,) = chance.choices(list(kinds), [_WEIGHTS.get(kind, 10.0) for kind in kinds])
        return chance.choice(kinds[kind])

    return choose
