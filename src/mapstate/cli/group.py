"""How commands fail: an error of mapstate prints one message, with exit code 2, and never a URL."""

from __future__ import annotations

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
        with _no_url_shown():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            with _no_url_shown():
                return super().invoke(ctx)
        except MapStateError as error:
            say(f"mapstate: {type(error).__name__}: {error.message}", err=True)
            raise typer.Exit(2) from None

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
def _no_url_shown() -> Iterator[None]:
    """Cut off the message of a wrong argument where a URL begins: the rest may belong to it."""
    try:
        yield
    except _ArgumentError as error:
        url = LIKE_A_URL.search(error.message)
        if url is not None:
            error.message = f"{error.message[: url.start()]}... (the rest is not shown: it may hold a password)"
        raise
