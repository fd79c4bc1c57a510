"""The `mapstate` command: its commands, in the order of its help, and how they fail.

They parse and print; operations do the work. An error of mapstate prints one message, never a URL, and ends with 2.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mapstate.cli.copy import export
from mapstate.cli.help import explain
from mapstate.cli.look import doctor, get, ledger, ls
from mapstate.cli.serve import serve
from mapstate.cli.show import say
from mapstate.cli.topologies import activate, deactivate, kill, monitor, rebalance, topologies
from mapstate.cli.upkeep import adopt, drop, recount, rewind, rollback, vacuum
from mapstate.cli.watch import watch
from mapstate.cli.windows import advance, windows
from mapstate.errors import MapStateError
from mapstate.urls import LIKE_A_URL
from mapstate.version import VERSION

_ArgumentError: Any = typer.BadParameter.__base__  # click's UsageError; whose click it is depends on typer's version


class CommandGroup(TyperGroup):
    """The commands. An error of mapstate prints one message without a traceback.

    No error shows text that may be a URL, because it may hold a password.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        with _errors_shown():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with _errors_shown():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command."""
        if args and LIKE_A_URL.search(args[0]):
            ctx.fail("the command comes first, and then the URL: mapstate ledger URL STATE")
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command with an optional URL in front of its required arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse more than one URL."""
        rest = super().parse_args(ctx, args)
        urls = ctx.params.get("url") or []
        if len(urls) > 1:
            names = [parameter.name for parameter in self.params if parameter.param_type_name == "argument"]
            given = [*urls, *(ctx.params[name] for name in names[1:])]
            extra = given[len(names) :]
            ctx.fail(f"Got unexpected extra argument{'s' if len(extra) > 1 else ''} ({' '.join(map(str, extra))})")
        return rest


@contextmanager
def _errors_shown() -> Iterator[None]:
    """End with 2 for an error of mapstate, and of output that cannot be written.

    Cut off the message of a wrong argument where a URL begins: the rest may belong to it.
    """
    try:
        yield
    except (MapStateError, OSError, SystemExit) as error:
        said = error.__context__ if isinstance(error, SystemExit) else error  # rich's, for a closed pipe
        if not isinstance(said, MapStateError | OSError):
            raise  # of --show-completion, or of a module of --functions
        say(f"mapstate: {type(said).__name__}: {said}", err=True)
        if not isinstance(error, MapStateError):  # Python would write the rest once more at its end, and end with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(2) from None
    except _ArgumentError as error:
        url = LIKE_A_URL.search(error.message)
        if url is not None:
            error.message = f"{error.message[: url.start()]}... (the rest is not shown: it may hold a password)"
        raise


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
