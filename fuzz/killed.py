"""The process that dies: it runs one start of a job, and its fault is a real SIGKILL. See `World.start`."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from mapstate.testing import Kill

__all__ = ["kill"]


def kill(**fields: Any) -> Kill:
    """The fault that kills this process with its JVM."""
    return Kill(who=os.getpgrp(), **fields)


def main(pickled: Path) -> None:
    """Run the start. Does not return where its fault is met."""
    from fuzz.run import session

    world, step = pickle.loads(pickled.read_bytes())
    world.spark = session()
    started = [world._start(query, step) for query in world.queries]
    for run, streaming in started:
        world._finish(run, streaming)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
