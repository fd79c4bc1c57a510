"""The command that makes states forget keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from mapstate.cli.arguments import Beside, Gone, by_name, seconds, split_urls, states_beside, store_url
from mapstate.cli.show import AskingOutput
from mapstate.errors import MapStateError, UsageError, cut
from mapstate.maps.operator_list import ListEntry
from mapstate.operations.forget import (
    FOLLOWERS_HAVE,
    Forgotten,
    forget_listed,
    forgettable_columns,
    listed,
    new_salt,
)
from mapstate.operations.forget import forget as forget_key
from mapstate.operations.forget import when_caught_up as do_when_caught_up
from mapstate.operations.states import list_states
from mapstate.reader.forms import typed_keys
from mapstate.schema import KeyField
from mapstate.urls import quoted

T = TypeVar("T")


def forget(
    out: AskingOutput,
    *,
    place: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL] [STATE] [KEY]",
            help="the store; the state, with --where all states of the store if none is given; and the values of the "
            "key columns, one argument each, without the time of a window",
            show_default=False,
        ),
    ] = None,
    id: Annotated[  # noqa: A002  the option's name
        str | None, typer.Option("--id", help="your name for it, as of a ticket: again with it, it goes on")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="all keys with this value; once for each column", show_default=False),
    ] = None,
    followers_have: Annotated[
        str, typer.Option(metavar="TIME", help="after it a repeated forget removes the change log up to the first one")
    ] = "1d",
    when_caught_up: Annotated[
        str | None,
        typer.Option(
            metavar="OFFSETS",
            help="wait until the state has come as far in its source: JSON, by topic and partition",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="with --when-caught-up")] = 600.0,
    beside: Beside = None,
    gone: Gone = None,
    export: Annotated[
        Path | None, typer.Option(help="write the list of what the state has forgotten to a file", show_default=False)
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="forget what such a file lists, in a state that was restored", show_default=False),
    ] = None,
) -> None:
    """Removes a key from a state and from its store's files. Stop the query first.

    It says what it does not reach, such as replicas' files. Rows that come later begin the key from nothing.
    """
    urls, words = split_urls(place) if place else ([], [])
    store = store_url(urls)
    options: dict[str, Any] = {
        "followers_have": FOLLOWERS_HAVE if followers_have == "1d" else seconds(followers_have),
        "beside": states_beside(beside, gone),
    }
    ends = None if when_caught_up is None else _ends(when_caught_up)

    def behind(state: str, do: Callable[[], T]) -> T:
        return do() if ends is None else do_when_caught_up(store, state, ends, do, wait=wait)

    if (export or from_) is not None:
        if len(words) != 1 or where or id or (export and from_):
            raise UsageError("--export FILE and --from FILE go with one state, and with nothing else")
        if export is not None:
            entries = listed(store, words[0])
            _written(export, entries)
            out.answer({"entries": len(entries)}, f"{len(entries)} entries written to {str(export)!r}")
        elif from_ is not None:
            entries = _read(from_)
            out.confirm(f"Forget what {len(entries)} entries list in {words[0]}?")
            _report(out, behind(words[0], lambda: forget_listed(store, words[0], entries, **options)))
        return
    if id is None or not (where or len(words) > 1):
        raise UsageError("give a state and a key, or --where COLUMN=VALUE, and --id ID. Nothing was written.")
    if not where:
        state, *texts = words
        columns = forgettable_columns(store, state)
        keys = dict(zip([column.name for column in columns], typed_keys(texts, columns)[0], strict=True))
        out.confirm(f"Forget {', '.join(texts)} in {state}? It cannot be undone.")
        _report(out, [behind(state, partial(forget_key, store, state, keys, id=id, **options))])
        return
    given = by_name("--where", [*map(_pair, where)])
    columns_of: dict[str, dict[str, KeyField]] = {}
    salts = []
    for state in words or [state.name for state in list_states(store) if state.ledger or state.problem]:
        try:
            columns_of[state] = {column.name: column for column in forgettable_columns(store, state)}
            salts += [entry.salt for entry in listed(store, state)]
        except MapStateError as error:
            out.fail(error.message)
    able = [state for state, columns in columns_of.items() if given.keys() <= columns.keys()]
    for state in [state for state in columns_of if state not in able]:
        out.note(f"{state} is not keyed by {', '.join(given)}: it is left as it is")
    salt = salts[0] if salts else new_salt()  # one for all, so that the lists of versions can be compared
    out.confirm(f"Forget {', '.join(where)} in {', '.join(able) or 'no state'}? It cannot be undone.")
    done = []
    for state in able:
        try:
            keys = {name: typed_keys([text], [columns_of[state][name]])[0][0] for name, text in given.items()}
            done.append(behind(state, partial(forget_key, store, state, keys, id=id, salt=salt, **options)))
        except MapStateError as error:
            out.fail(error.message)
    _report(out, done)


def _report(out: AskingOutput, done: list[Forgotten]) -> None:
    documents = [report._asdict() for report in done]

    def shown() -> None:
        for report in done:
            before = "" if report.offsets is None else f", as of {report.offsets}"
            again = " before" if report.was_done else ""
            out.note(f"{report.state}: {report.keys} keys forgotten{again} as txid {report.txid}{before}")
            if report.log_until is not None:
                out.note(
                    f"The change log names them until {report.log_until}: run it again with the same id after that."
                )
        for place in dict.fromkeys(place for report in done for place in report.not_reached):
            out.note(f"Not reached: {place}")
        if not done:
            out.note("There was nothing to do.")

    out.answer(documents, shown)


def _ends(text: str) -> str:
    """Offsets as a ledger has them; an object is of the only source."""
    try:
        ends = msgspec.json.decode(text, type=list[dict[str, dict[str, int]]] | dict[str, dict[str, int]])
    except msgspec.MsgspecError as error:
        raise UsageError(
            f'--when-caught-up takes offsets as JSON, such as {{"visits":{{"0":9120}}}} ({cut(error)}). Nothing was '
            "written."
        ) from error
    return msgspec.json.encode(ends if isinstance(ends, list) else [ends]).decode()


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise UsageError(f"--where takes COLUMN=VALUE, not {quoted(text)}. Nothing was written.")
    return name, value


def _written(path: Path, entries: list[ListEntry]) -> None:
    try:
        path.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    except OSError as error:
        raise UsageError(f"the file {str(path)!r} cannot be written ({cut(error)})") from error


def _read(path: Path) -> list[ListEntry]:
    try:
        return [msgspec.json.decode(line, type=ListEntry) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"the file {str(path)!r} is no list that --export wrote ({cut(error)}). Nothing was written."
        ) from error
