"""The `mapstate` command: its commands, in the order of its help. They parse and print; operations do the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from mapstate.cli.copy import export
from mapstate.cli.group import Command, CommandGroup
from mapstate.cli.help import explain
from mapstate.cli.look import doctor, get, ledger, ls
from mapstate.cli.serve import serve
from mapstate.cli.topologies import activate, deactivate, kill, monitor, rebalance, topologies
from mapstate.cli.upkeep import adopt, drop, recount, vacuum
from mapstate.cli.watch import watch
from mapstate.cli.ways_back import rewind, rollback
from mapstate.cli.windows import advance, windows
from mapstate.version import VERSION

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # which would show local variables, and a URL among them
    help="Shows the states of a store and their values, cleans them up and rolls them back, and directs running jobs.",
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"mapstate {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version")
    ] = False,
) -> None:
    """The options in front of the command."""


_COMMANDS: tuple[Callable[..., None], ...] = (
    *(ls, get, windows, watch, serve, export, ledger, doctor),
    *(vacuum, recount, advance, drop, adopt, rollback, rewind),
    *(topologies, monitor, activate, deactivate, rebalance, kill, explain),
)
for _command in _COMMANDS:
    app.command({topologies: "list", explain: "help"}.get(_command), cls=Command)(_command)
