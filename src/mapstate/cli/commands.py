"""The `mapstate` command: its commands, in the order of its help, how they fail, and help, which prints pages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mapstate import errors
from mapstate.cli.arguments import with_output
from mapstate.cli.export import compare, export
from mapstate.cli.forget import forget
from mapstate.cli.look import doctor, get, ledger, ls, serve, watch, windows
from mapstate.cli.show import say
from mapstate.cli.topologies import activate, deactivate, kill, monitor, rebalance, topologies
from mapstate.cli.upkeep import adopt, advance, drop, recount, rewind, rollback, swap, vacuum
from mapstate.errors import MapStateError
from mapstate.urls import LIKE_A_URL
from mapstate.version import VERSION

_ArgumentError: Any = typer.BadParameter.__base__  # click's UsageError; whose click it is depends on typer's version
_MOST_SECONDS = 10**9  # more than a thread can wait, and no number, are no time either
_PACKAGE = Path(errors.__file__).parent
_PAGES = next(folder for folder in (_PACKAGE / "pages", _PACKAGE.parents[1] / "docs") if folder.is_dir())


class CommandGroup(TyperGroup):
    """The commands. An error prints one message, without a traceback and without what may be a URL."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _errors_shown():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _errors_shown():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and LIKE_A_URL.search(args[0]):
            ctx.fail("the command comes first, and then the URL: mapstate ledger URL STATE")
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command with an optional URL in front of its required arguments. It leaves nothing out that was given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        order: list[Any] = self.make_parser(ctx).parse_args(args=given)[2]
        for option in order:
            value = ctx.params.get(option.name)
            if (
                option.param_type_name == "option"
                and not (option.multiple or option.is_flag)
                and order.count(option) > 1
            ):
                ctx.fail(f"Option '{option.opts[0]}' is given twice.")
            if isinstance(value, float) and not abs(value) <= _MOST_SECONDS:
                ctx.fail(f"Option '{option.opts[0]}' is a number up to {_MOST_SECONDS:,}, not {value}.")
        urls = ctx.params.get("url") or []
        if len(urls) > 1:
            names = [parameter.name for parameter in self.params if parameter.param_type_name == "argument"]
            given = [*urls, *(ctx.params[name] for name in names[1:])]
            extra = given[len(names) :]
            ctx.fail(f"Got unexpected extra argument{'s' if len(extra) > 1 else ''} ({' '.join(map(str, extra))})")
        return rest


@contextmanager
def _errors_shown() -> Iterator[None]:
    """End with 2 for an error of mapstate or of output; cut a wrong argument's message where a URL begins."""
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


def explain(topic: Annotated[str, typer.Argument(metavar="ERROR|PAGE", show_default=False)] = "cli") -> None:
    """Prints what to do after an error, by its class; or a page, or PAGE#SECTION, as the message of an error has it."""
    typer.echo(text_of(topic))


def text_of(topic: str) -> str:
    """What the tables of errors say of one; or a page, or a section of it. Raises UsageError."""
    if topic in errors.__all__:
        kind: type[BaseException] = getattr(errors, topic)
        refusals = text_of("operating#each-refusal-and-what-to-do").replace("](#", "](operating.md#")
        tables = text_of("concepts/errors") + refusals
        rows = re.findall(rf"^(?:\| \d )?\|( [^|]*`{topic}`[^|]*)\|([^|]*)\|(.*)\|$", tables, re.MULTILINE)
        above = {kind.__bases__[0].__name__} & {*errors.__all__} if not rows else ()
        return "\n\n".join([f"{topic}: {kind.__doc__}", *map("\n ".join, rows), *map(text_of, above)])
    pages = {path.relative_to(_PAGES).with_suffix("").as_posix(): path for path in sorted(_PAGES.rglob("*.md"))}
    name, _, section = topic.lstrip("./").replace(".md", "").partition("#")
    if name not in pages:
        known = get_close_matches(name, [*errors.__all__, *pages]) or pages
        raise errors.UsageError(f"there is no error and no page of this name; there is {', '.join(known)}")
    text = pages[name].read_text(encoding="utf-8")
    text = re.sub(r"(?m)^::: (\S+)(\n +options:.*)?$", r"    python -m pydoc \1", text)  # the site has it in place
    parts = re.split(r"(?m)^(?=##+ )", text)
    for i, part in enumerate(parts):
        if re.sub(r"[^\w -]", "", part.partition("\n")[0].lower()).strip().replace(" ", "-") == section:
            return part + "".join(takewhile(lambda below: below.index(" ") > part.index(" "), parts[i + 1 :]))  # noqa: B023
    return "".join(parts)


_COMMANDS: tuple[Callable[..., None], ...] = (
    *(ls, get, windows, watch, serve, export, ledger, doctor),
    *(vacuum, recount, advance, compare, swap, forget, drop, adopt, rollback, rewind),
    *(topologies, monitor, activate, deactivate, rebalance, kill, explain),
)
for _command in _COMMANDS:
    app.command({topologies: "list", explain: "help"}.get(_command), cls=Command)(with_output(_command))
