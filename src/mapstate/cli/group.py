"""How commands fail: an error of mapstate prints one message, with exit code 2, and never a URL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from mapstate.cli.show import say
from mapstate.errors import MapStateError
from mapstate.urls import LIKE_A_URL

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
