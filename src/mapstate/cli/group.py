"""How the commands fail: an error of the tree is one message and exit code 2, and no URL is repeated."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from mapstate.errors import MapStateError

__all__ = ["CommandGroup"]


class CommandGroup(TyperGroup):
    """The commands, with mapstate's errors told as a person wants them."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except MapStateError as error:
            typer.echo(f"mapstate: {type(error).__name__}: {error.message}", err=True)
            raise typer.Exit(2) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command. What may be a URL is not shown in the error: it may hold a password."""
        if args and "://" in args[0]:
            ctx.fail("the command comes first, and then the URL: mapstate ledger URL STATE")
        return super().resolve_command(ctx, args)
