"""The worlds with rolling windows: small ones, explored whole, and settings from which random ones are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from model.rolling import Plan, Rolling
from model.rolling_tiles import Definition, Window
from model.world import Label

__all__ = ["ROLLING"]

LIFETIME = Window(None)
_SHORT, _LONG = Window(2), Window(6, 3)
_ALL = Definition((_SHORT, _LONG, LIFETIME))
_BOUNDED = Definition((_SHORT, _LONG))

ROLLING: tuple[Rolling, ...] = (
    Rolling(
        name="rolling windows: attempts that die",
        definitions=(_ALL,),
        plans=((((0, 0), (1, -1)), ((0, -5),), ((0, 2), (1, -8))),),
        drivers=3,
        attempts=4,
        ahead=1,
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
        strides=((3, 3), (9, 9)),
        vacuums=1,
        rollbacks=1,
        drivers=3,
    ),
    Rolling(
        name="rolling windows: a vacuum beside a reader",
        definitions=(_BOUNDED,),
        plans=((((0, 0),), ((1, 0),)),),
        strides=((9, 9),),
        vacuums=1,
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
            Definition((_SHORT, Window(4, 2), Window(7, 2))),
            Definition((_SHORT,)),
            Definition((_SHORT, Window(4, 2), LIFETIME)),
        ),
        plans=((((0, 0), (0, -1), (0, -3)), ((0, 1),)),),
        keys=1,
        strides=((3, 3),),
        drivers=3,
        restarts=2,
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
