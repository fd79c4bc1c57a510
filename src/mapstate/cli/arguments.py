"""What commands share: their arguments, what these name (a store, a state, keys, a time), and the end of a command."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from mapstate.backends import check_state_name
from mapstate.cli.show import AskingOutput, Output
from mapstate.errors import MapStateError, UsageError
from mapstate.operations.states import state_names
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader.forms import time_given
from mapstate.urls import LIKE_A_URL, quoted

T = TypeVar("T")

_URL_VARIABLE = "MAPSTATE_URL"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_COMPLETION = 1.0  # seconds that a listing may take, with one more request, before a shell gets the names so far
_URL_HELP = (
    "the store: redis://..., sqlite:///..., or @FILE, a file with the URL. By default the variable "
    f"{_URL_VARIABLE}, which other users of the machine do not see, unlike an argument"
)


def _names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The states that a shell offers, once the store is known. An error offers none."""
    given = [ctx.params.get("state"), *(ctx.params.get("url") or ()), *(ctx.params.get("place") or ())]
    words = [word for word in given if isinstance(word, str)]
    urls = [word for word in words if _is_url(word)]
    if len(words) > len(urls):
        return []  # the state is there already
    names: list[str] = []
    end = time.monotonic() + _COMPLETION
    try:
        for page in state_names(store_url(urls)):
            names += [name for name in page if name.startswith(incomplete)]
            if time.monotonic() > end:
                break
    except MapStateError:
        return []
    return sorted({*names})


StoreUrl = Annotated[list[str] | None, typer.Argument(metavar="URL", help=_URL_HELP, show_default=False)]
Url = Annotated[  # a list, because the arguments behind it are filled first; see `Command`
    list[str] | None,
    typer.Argument(metavar="URL", help=_URL_HELP, show_default=False, autocompletion=_names),
]
State = Annotated[str, typer.Argument(metavar="STATE", help="the state's name", show_default=False)]
Place = Annotated[
    list[str],
    typer.Argument(
        metavar="[URL] STATE [KEY]",
        help=f"the store, or nothing if {_URL_VARIABLE} has it; the state's name; and the values of the key columns, "
        "one argument each",
        show_default=False,
        autocompletion=_names,
    ),
]
Topology = Annotated[str, typer.Argument(metavar="NAME", help="the topology's name", show_default=False)]
Topologies = Annotated[
    list[str],
    typer.Argument(
        metavar="[URL] NAME...",
        help=f"the store, or nothing if {_URL_VARIABLE} has it; and the names of topologies",
        show_default=False,
    ),
]
Exact = Annotated[bool, typer.Option("--exact", help="the state of this name, whatever its alias says")]
Names = Annotated[
    list[str],
    typer.Argument(
        metavar="[URL] NAME...",
        help=f"the store, or nothing if {_URL_VARIABLE} has it; and the names that readers use",
        show_default=False,
        autocompletion=_names,
    ),
]
Beside = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL#STATE", help="a state of the same topology in another store; once for each", show_default=False
    ),
]
Gone = Annotated[
    list[str] | None,
    typer.Option(metavar="STATE", help="a state of the same job that was dropped; once for each", show_default=False),
]
TakeOver = Annotated[bool, typer.Option("--take-over", help="leave an attempt in flight behind; fences its driver")]
_AS_JSON = Annotated[bool, typer.Option("--json", help="for a program")]
_YES = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]


def with_output(function: Callable[..., None]) -> Callable[..., None]:
    """A command that prints by an `Output` gets --json, and --yes if it asks; it exits with 1 where that has failed."""
    whole = signature(function, eval_str=True)
    first, *parameters = whole.parameters.values()
    options: dict[str, Any] = {"as_json": _AS_JSON}
    if first.annotation is AskingOutput:
        options = {"yes": _YES, **options}
    elif first.annotation is not Output:
        return function
    parameters += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind) for name, kind in options.items()
    ]

    @wraps(function)
    def run(*, as_json: bool, yes: bool = False, **arguments: Any) -> None:
        out = first.annotation(as_json=as_json, yes=yes)
        function(out, **arguments)
        if out.has_failed:
            raise typer.Exit(1)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = whole.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def store_url(url: list[str] | None) -> str:
    """The store's URL, from the argument, the variable, or a file that it names. Raises UsageError."""
    given = url[0] if url else os.environ.get(_URL_VARIABLE, "")
    if not given:
        raise UsageError(
            f"there is no URL. Put it into the environment variable {_URL_VARIABLE}, or in front of the state's name: "
            "mapstate COMMAND URL STATE"
        )
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        file = "a file" if LIKE_A_URL.search(given) else f"the file {given[1:]!r}"
        problem = f"the URL cannot be read out of {file}: {getattr(error, 'strerror', None) or 'it is no text'}"
    raise UsageError(problem)  # outside the except block, because the context would hold the file's text


def split_place(place: list[str]) -> tuple[str, str, list[str]]:
    """The URL, the state, and the texts of the keys. A name of a state never looks like a URL."""
    urls, rest = split_urls(place)
    if not rest:
        raise UsageError("there is no state: mapstate COMMAND URL STATE KEY")
    return store_url(urls), check_state_name(rest[0]), rest[1:]


def split_urls(words: list[str]) -> tuple[list[str], list[str]]:
    """The URL if it comes first, and the other words."""
    return (words[:1], words[1:]) if _is_url(words[0]) else ([], words)


def _is_url(text: str) -> bool:
    return text.startswith("@") or LIKE_A_URL.search(text) is not None


def states_beside(beside: list[str] | None, gone: list[str] | None) -> list[tuple[str | None, str]]:
    """The stores and the names of states beside another one, from ``URL#STATE``; no store where one is gone."""
    places = [text.rpartition("#") for text in beside or ()]
    if not all(url and name for url, _, name in places):
        raise UsageError("a state beside this one is its store and its name, URL#STATE, such as sqlite:///b.db#by_page")
    return [*((store_url([url]), name) for url, _, name in places), *((None, name) for name in gone or ())]


def by_name(option: str, pairs: Sequence[tuple[str, T]]) -> dict[str, T]:
    """Values by their names. Raises UsageError for a name that is given twice, of which one would be left out."""
    names = [name for name, _ in pairs]
    twice = max(names, key=names.count, default="")
    if names.count(twice) > 1:
        raise UsageError(f"{option} has {quoted(twice)} twice. Nothing was written.")
    return dict(pairs)


def seconds(text: str) -> float:
    """The seconds of a replay horizon."""
    parts: Any = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text, re.ASCII)
    if parts is None:
        raise UsageError(f"a replay horizon is a number and a unit, such as 90s, 30m, 12h or 1d, not {quoted(text)}")
    return float(parts[1]) * _UNITS[parts[2]]


def time_of(record: LedgerRecord, text: str | None) -> Any:
    """A time of a state with windows. Raises UsageError."""
    return None if text is None else time_given(text, record.time_type or "timestamp")
