"""The `mapstate` command: looking at a state, cleaning it up, and putting it and its checkpoint back."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The console script. Ends the process: 0, 1 where something was found or declined, 2 for an error."""
    try:
        from mapstate.cli.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mapstate"):
            raise
        sys.exit(f"mapstate: the command needs the package {error.name!r}: pip install 'mapstate[cli]'")
    app()
