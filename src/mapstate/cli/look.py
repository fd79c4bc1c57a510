"""The commands that look: ls, ledger, doctor, get. They only read."""

from __future__ import annotations

from typing import Annotated

import typer

from mapstate.batch_report import BatchReport
from mapstate.cli.arguments import AsJson, Place, State, StoreUrl, Url, seconds, split_place, store_url
from mapstate.cli.progress import keys_held, progress
from mapstate.cli.show import console, emit, say, show_findings, show_ledger, show_reports, show_rows, show_states
from mapstate.errors import CorruptRecordError, StoreError, cut
from mapstate.operations.doctor import examine
from mapstate.operations.states import ListedState, list_states
from mapstate.reader import StateReader, open_reader
from mapstate.reader.forms import JsonRows, json_state, rows_of, time_asked, typed_keys
from mapstate.urls import LIKE_A_URL
from mapstate.values import text


def ls(*, url: StoreUrl = None, as_json: AsJson = False) -> None:
    """Lists the states of a store; exit code 1 if a ledger cannot be read."""
    place = store_url(url)
    with progress("looking for ledgers"):
        states = list_states(place)
    if as_json:
        emit([_json_listed(state) for state in states])
    else:
        show_states(console(), states)
        say(f"{len(states)} states")
    for state in states:
        if state.ledger is None:
            say(f"mapstate: {state.name}: {state.problem}", err=True)
    if any(state.ledger is None for state in states):
        raise typer.Exit(1)


def _json_listed(state: ListedState) -> dict[str, object]:
    record = state.ledger
    if record is None:
        return {"state": state.name, "problem": state.problem}
    schema = {"type": record.type, "keys": [key._asdict() for key in record.keys], "owner": record.owner}
    fields = [field._asdict() for field in record.fields]
    return {"state": state.name, **schema, "fields": fields, **json_state(record), "problem": None}


def ledger(*, url: Url = None, state: State, as_json: AsJson = False) -> None:
    """Shows the ledger, and the last hundred batches."""
    with open_reader(store_url(url), state) as reader:
        record, reports = reader.ledger(), _reports(reader)
    if as_json:
        emit({"ledger": record, "keys_held": record.keys_held(), "reports": reports})
        return
    to = console()
    show_ledger(to, record)
    if reports is not None:
        to.print()
        show_reports(to, reports)


def _reports(reader: StateReader) -> list[BatchReport] | None:
    """The reports; None if they cannot be read, which does not keep the ledger from being shown."""
    try:
        return reader.reports()
    except (CorruptRecordError, StoreError) as error:
        say(f"mapstate: the batch reports are not shown: {error.message}", err=True)
        return None


def doctor(
    *,
    url: Url = None,
    state: State,
    replay_horizon: Annotated[
        str, typer.Option(help="how long after a batch it may have to be repeated: 90s, 30m, 12h, 1d")
    ] = "1d",
    count_keys: Annotated[
        bool, typer.Option(help="read all records, and compare their number with the ledger's")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Examines the state and its store for trouble; exit code 1 for an error."""
    place, horizon = store_url(url), seconds(replay_horizon)
    with progress("reading records", keys_held(place, state)) as update:
        findings = examine(
            *(place, state),
            replay_horizon=horizon,
            count_keys=count_keys,
            on_page=lambda keys: update(keys, f"{keys} keys read"),
        )
    if as_json:
        emit([finding._asdict() for finding in findings])
    else:
        show_findings(console(), findings)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


def get(
    *,
    place: Place,
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="when rolling windows end, or watermark; by default now", show_default=False),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="the fields to show, with commas between them", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    r"""Shows the value of one key or more, all as of one batch; exit code 1 if a key is absent.

    A key is one argument per key column, and more keys follow in the same way. \N is null.
    """
    url, state, texts = split_place(place)
    with open_reader(url, state) as reader:
        record = reader.ledger()
        keys = typed_keys(texts, record.keys)
        time = None if at is None else time_asked(record, at)
        values, record, ends = reader.answer(keys, columns=None if columns is None else columns.split(","), at=time)
    if as_json:
        for row in rows_of(record).rows(zip(keys, values, strict=True)):
            emit(row)
    else:
        rows = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
        if rows:
            show_rows(console(), record, rows)
        if ends and ends[0] is not None:
            say(f"as of {text(ends[0])}", err=True)
        for key, value in zip(keys, values, strict=True):
            if value is None:
                parts = JsonRows(record.keys, ()).cells(key, None)
                said = "that was given" if any(map(LIKE_A_URL.search, texts)) else cut(" ".join(parts) or "()")
                say(f"mapstate: state {state!r} has no key {said}", err=True)
    if None in values:
        raise typer.Exit(1)
