"""The commands that only read: ls, ledger, doctor, get, windows, watch, and serve, which answers over HTTP."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.live import Live

from mapstate.backends import missing_file
from mapstate.batch_report import BatchReport
from mapstate.cli import show
from mapstate.cli.arguments import Exact, Place, State, StoreUrl, Url, seconds, split_place, store_url, time_of
from mapstate.cli.show import Output, progress, say
from mapstate.errors import CorruptRecordError, MissingKeysError, StoreError, UsageError, cut
from mapstate.keys import Key
from mapstate.operations.doctor import examine
from mapstate.operations.forget import listed
from mapstate.operations.states import ListedState, list_states
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader import StateReader, open_reader
from mapstate.reader.aliased import alias_of, version_of
from mapstate.reader.committed import FOLLOW
from mapstate.reader.forms import JsonRows, json_state, rows_of, time_asked, typed_keys
from mapstate.schema import KeyField
from mapstate.urls import LIKE_A_URL
from mapstate.values import plain, text

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_STATES = ("state", "type", "keys", "fields", "last commit", "committed at", "keys held")
_TRIES = 20
_Show = Callable[[LedgerRecord, list[tuple[Key, dict[str, Any] | None]]], None]
"""Takes the values of one look, and the ledger as of which they are."""


def ls(out: Output, *, url: StoreUrl = None) -> None:
    """Lists the states of a store; exit code 1 if a ledger cannot be read."""
    place = store_url(url)
    with progress("looking for ledgers"):
        states = list_states(place)
    out.listing("states", list(map(_json_listed, states)), _STATES, list(map(_listed, states)))
    for state in states:
        if state.problem:
            out.fail(f"{state.name}: {state.problem}")


def _listed(state: ListedState) -> list[str]:
    ledger, name = state.ledger, state.name
    if state.alias is not None:
        name = f"{name} -> {state.alias.to}"
    if ledger is None:
        return [name, "cannot be read" if state.problem else "alias", *[""] * 5]
    last, held = ledger.last_commit, ledger.keys_held()
    batch = ["no batch", ""] if last is None else [f"batch {last.batch_id}", last.at]
    return [name, ledger.type, *show.schema_of(ledger), *batch, "unknown" if held is None else str(held)]


def _json_listed(state: ListedState) -> dict[str, object]:
    record = state.ledger
    alias = {} if state.alias is None else {"alias": state.alias}
    if record is None:
        return {"state": state.name, "problem": state.problem or None, **alias}
    schema = {"type": record.type, "keys": [key._asdict() for key in record.keys], "owner": record.owner}
    fields = [field._asdict() for field in record.fields]
    return {"state": state.name, **schema, "fields": fields, **json_state(record), "problem": None, **alias}


def ledger(out: Output, *, url: Url = None, state: State, exact: Exact = False) -> None:
    """Shows the ledger, and the last hundred batches."""
    place = store_url(url)
    with _opened_once(place, state, exact=exact) as version:
        record, reports, alias = version.ledger(), _reports(version), alias_of(place, state)
    corrections = [] if record.operations is None else listed(place, record.state, "correction")

    def print_both() -> None:
        if alias is not None:
            keeps = ", ".join(alias.keeps)
            say(f"{state} -> {alias.to}, swap {alias.number}; kept are {keeps}")
        show.print_ledger(record)
        if corrections:
            show.console().print()
            show.print_corrections(corrections)
        if reports is not None:
            show.console().print()
            show.print_reports(reports)

    document: dict[str, Any] = {"ledger": record, "keys_held": record.keys_held(), "reports": reports}
    if corrections:
        document["corrections"] = corrections
    out.answer(document if alias is None else {**document, "alias": alias}, print_both)


def _opened_once(url: str, state: str, *, exact: bool) -> StateReader:
    """A reader of the version of now, for all that a command reads."""
    return open_reader(url, state if exact else version_of(url, state), follow=None)


def _reports(reader: StateReader) -> list[BatchReport] | None:
    """The reports; None if they cannot be read, which does not keep the ledger from being shown."""
    try:
        return reader.reports()
    except (CorruptRecordError, StoreError) as error:
        say(f"mapstate: the batch reports are not shown: {error.message}", err=True)
        return None


def doctor(
    out: Output,
    *,
    url: Url = None,
    state: State,
    replay_horizon: Annotated[
        str, typer.Option(help="how long after a batch it may have to be repeated: 90s, 30m, 12h, 1d")
    ] = "1d",
    count_keys: Annotated[
        bool, typer.Option(help="read all records, and compare their number with the ledger's")
    ] = True,
) -> None:
    """Examines the state and its store for trouble; exit code 1 for an error."""
    place, horizon = store_url(url), seconds(replay_horizon)
    with progress("reading records", show.keys_held(place, state)) as update:
        findings = examine(
            *(place, state),
            replay_horizon=horizon,
            count_keys=count_keys,
            on_page=lambda keys: update(keys, f"{keys} keys read"),
        )
    out.answer([finding._asdict() for finding in findings], lambda: show.print_findings(findings))
    out.has_failed = any(finding.severity == "error" for finding in findings)


def get(
    out: Output,
    *,
    place: Place,
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="when rolling windows end, or watermark; by default now", show_default=False),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="the fields to show, with commas between them", show_default=False)
    ] = None,
    exact: Exact = False,
) -> None:
    r"""Shows the value of one key or more, all as of one batch; exit code 1 if a key is absent.

    A key is one argument per key column, and more keys follow in the same way. \N is null.
    """
    url, state, texts = split_place(place)
    chosen = None if columns is None else columns.split(",")
    with _opened_once(url, state, exact=exact) as reader:
        record = reader.ledger()
        keys = typed_keys(texts, record.keys)
        time = None if at is None else time_asked(record, at)
        values, record, ends = reader.answer(keys, columns=chosen, at=time)
        rows = list(zip(keys, values, strict=True))
    out.rows(record, rows, chosen)
    if ends and ends[0] is not None and not out.as_json:
        say(f"as of {text(ends[0])}", err=True)
    out.has_failed = any(value is None for _, value in rows)
    for key in [key for key, value in rows if value is None and not out.as_json]:
        parts = JsonRows(record.keys, ()).cells(key, None)
        said = "that was given" if any(map(LIKE_A_URL.search, texts)) else cut(" ".join(parts) or "()")
        out.fail(f"state {state!r} has no key {said}")


def windows(
    out: Output,
    *,
    place: Place,
    since: Annotated[str | None, typer.Option(help="only windows that end later", show_default=False)] = None,
    until: Annotated[str | None, typer.Option(help="only windows that end then or before", show_default=False)] = None,
    exact: Exact = False,
) -> None:
    r"""Shows the windows of one key, also those that still fill; exit code 1 if there is none.

    The key is one argument per grouping column, without the window. \N is null.
    """
    url, state, texts = split_place(place)
    with _opened_once(url, state, exact=exact) as reader:
        record = reader.ledger()
        if record.windows is None:
            raise UsageError(f"state {state!r} has no windows by time: mapstate get shows its keys")
        keys = typed_keys(texts, record.keys[1:])
        if len(keys) > 1:
            raise UsageError("give one key: its windows are what is shown")
        panes = reader.windows(keys[0], since=time_of(record, since), until=time_of(record, until))
        mark = reader.watermark().time
    kind = record.keys[0].type
    columns = (KeyField("window_start", kind), KeyField("window_end", kind), KeyField("final", "boolean"))
    rows = [((window.start, window.end, window.final), window.value) for window in panes]
    out.rows(msgspec.structs.replace(record, keys=columns), rows)
    say(f"{len(rows)} windows; the watermark is {'not there yet' if mark is None else plain(mark)}", err=True)
    out.has_failed = not rows


def watch(
    out: Output,
    *,
    place: Place,
    interval: Annotated[float, typer.Option(min=0.05, help="seconds between two looks")] = 2.0,
    count: Annotated[int | None, typer.Option(min=1, help="end after so many looks", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, help="keys that are shown if none is named")] = 20,
    exact: Exact = False,
) -> None:
    """Shows values as they change: a table that is refreshed on a terminal, else lines. Ctrl-C ends it.

    All values of one look are of one batch. Without a KEY, it takes the first keys that the store lists.
    """
    url, state, texts = split_place(place)
    with (
        suppress(KeyboardInterrupt),
        open_reader(url, state, follow=None if exact else FOLLOW) as reader,
        _shown(state, as_json=out.as_json) as print_it,
    ):
        named = typed_keys(texts, reader.ledger().keys) if texts else None
        keys, listed_at, version = named or [], None, ""
        for look in itertools.count(1):
            began = time.monotonic()
            values, ledger = reader.multi_get_as_of(keys)
            if named is None and ledger.state != version:  # swapped: other keys may come first
                version, listed_at = ledger.state, None
            for _ in range(_TRIES):
                if (
                    named is not None
                    or (listed_at is not None and len(keys) >= limit)
                    or ledger.contents() == listed_at
                ):
                    break
                keys, listed_at = _first_keys(reader, limit), ledger.contents()
                values, ledger = reader.multi_get_as_of(keys)
            print_it(ledger, list(zip(keys, values, strict=True)))
            if look == count:
                return
            time.sleep(max(0.0, began + interval - time.monotonic()))


def _first_keys(reader: StateReader, limit: int) -> list[Key]:
    keys: dict[Key, None] = {}
    with suppress(CorruptRecordError, MissingKeysError):  # at the end of the scan; doctor reports them
        for key, _ in reader.scan():
            keys[key] = None
            if len(keys) == limit:
                break
    return list(keys)


@contextmanager
def _shown(state: str, *, as_json: bool) -> Iterator[_Show]:
    to = show.console()
    if as_json:
        yield lambda ledger, rows: show.emit(
            {"state": state, **({} if ledger.state == state else {"version": ledger.state})}
            | {**json_state(ledger), "is_exact": True}
            | {"rows": rows_of(ledger).rows(rows)}
        )
    elif to.is_terminal:
        with Live(console=to, auto_refresh=False) as live:
            yield lambda ledger, rows: live.update(
                Group(show.title_of(_title(state, ledger)), show.table_of(ledger, rows)), refresh=True
            )
    else:
        yield lambda ledger, rows: _print_lines(_title(state, ledger), rows_of(ledger), rows)


def _print_lines(title: str, shown: JsonRows, rows: list[tuple[Key, dict[str, Any] | None]]) -> None:
    show.print_row([f"# {title}"])
    for key, value in rows:
        show.print_row(shown.cells(key, value, absent="null"))


def _title(state: str, ledger: LedgerRecord) -> str:
    last, held = ledger.last_commit, ledger.keys_held()
    batch = "no batch" if last is None else f"batch {last.batch_id}, committed {last.at or 'at an unknown time'}"
    state = state if state == ledger.state else f"{state} -> {ledger.state}"
    return f"{state}: {batch}" + ("" if held is None else f", {held} keys")


def serve(
    *,
    url: StoreUrl = None,
    host: Annotated[str, typer.Option(help="the address to listen on; by default this machine alone")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one")] = 8080,
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="the environment variable with the token that callers send", show_default=False
        ),
    ] = None,
    functions: Annotated[
        str | None,
        typer.Option(metavar="MODULE", help="functions over states that POST /drpc/NAME calls", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="within which a request is answered")] = 10.0,
) -> None:
    """Answers reads over HTTP, with a live page, until Ctrl-C. It only reads the store.

    Another --host than this machine needs a token.
    """
    place = store_url(url)
    token = None if token_env is None else os.environ.get(token_env, "")
    if token == "":
        raise UsageError(f"the environment variable {token_env} has no token. Nothing was started.")
    is_local = host in _LOOPBACK
    if token is None and not is_local:
        raise UsageError(
            f"on {host} other machines can read all states: give a token with --token-env NAME. Nothing was started."
        )
    if missing := missing_file(place):
        say(f"mapstate: {missing} Its states are served once it is there.", err=True)
    from mapstate.serve import make_app  # takes long to import
    from mapstate.serve.server import run

    if functions is not None:
        sys.path.insert(0, "")  # as python -m has it, and a console script has not
    app = make_app(place, token=token, local_only=is_local and token is None, functions=functions, timeout=timeout)
    run(app, host, port, on_start=lambda address: say(f"Serving on {address} (Ctrl-C ends it)", err=True))
