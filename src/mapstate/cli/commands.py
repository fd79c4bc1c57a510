"""The `mapstate` command: its commands, in the order of its help. They parse and print; operations do the work."""

from __future__ import annotations

import typer

from mapstate.cli.copy import export
from mapstate.cli.group import Command, CommandGroup
from mapstate.cli.look import doctor, get, ledger, ls
from mapstate.cli.upkeep import adopt, drop, recount, vacuum
from mapstate.cli.watch import watch
from mapstate.cli.ways_back import rewind, rollback

__all__ = ["app"]

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # which would show local variables, and a URL among them
    help="Shows the states of a store and their values, cleans them up, and rolls a state and its checkpoint back.",
)
for _command in (ls, get, watch, export, ledger, doctor, vacuum, recount, drop, adopt, rollback, rewind):
    app.command(cls=Command)(_command)
