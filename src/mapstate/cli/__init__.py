"""The `mapstate` command: looking at a state, cleaning it up, and putting it and its checkpoint back."""

from __future__ import annotations

import os
import sys

from mapstate.errors import missing_driver

__all__ = ["main"]


def main() -> None:
    """The console script. Ends the process: 0, 1 where something was found or declined, 2 for an error."""
    if sys.stdout is None:  # it is closed: what is written there is lost without an error
        os.dup2(os.open(os.devnull, os.O_RDONLY), 1)  # one that takes nothing, and no other file gets its number
        sys.stdout = open(1, "w")  # noqa: SIM115  until the end
    try:
        from mapstate.cli.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mapstate"):
            raise
        print(f"mapstate: {missing_driver('the command', error, extra='cli')}", file=sys.stderr)
        sys.exit(2)
    app()
