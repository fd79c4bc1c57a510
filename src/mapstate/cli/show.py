"""Print the results of the commands, in color on a terminal and else plain."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mapstate.batch_report import BatchReport
from mapstate.errors import UsageError
from mapstate.findings import Finding
from mapstate.keys import Key
from mapstate.operations.states import ListedState
from mapstate.protocol.ledger_record import Commit, InFlight, LedgerRecord
from mapstate.protocol.windows import NEVER, every_pane
from mapstate.reader.forms import JsonRows, rows_of
from mapstate.reader.rolling import earliest_end
from mapstate.schema import span_text, time_text
from mapstate.values import text as text_of

_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}
_COLUMNS = ("batch", "txid", "attempt", "rows", "offsets", "read", "written", "skipped", "ms", "committed at")
_MOST_RANGES = 10


def say(text: str, *, err: bool = False) -> None:
    """Print one line, with control characters escaped: who can write to the store cannot control the terminal."""
    typer.echo(_shown(text), err=err)


def emit(document: Any) -> None:
    """Print one JSON document on one line, in ASCII: no character of it controls a terminal."""
    typer.echo(json.dumps(msgspec.to_builtins(document)))


def answer(document: Any, text: str, *, as_json: bool) -> None:
    """Print what a command has done: one JSON document, or one line."""
    if as_json:
        emit(document)
    else:
        say(text)


def confirm(question: str, *, yes: bool, as_json: bool) -> None:
    """Ask before something is written, unless ``yes``. Ends the command with 1 for a no. Raises UsageError for JSON."""
    if yes:
        return
    if as_json:
        raise UsageError(
            f"with --json nobody is asked. Nothing was written. The question is: {question} --yes says yes."
        )
    typer.confirm(question, abort=True)


def console() -> Console:
    """Standard output. Where it is no terminal, no line is broken for the width of one."""
    to = Console()
    return to if to.is_terminal else Console(width=200)


def _shown(text: str) -> str:
    """The text with control characters escaped, as in Python's own literals."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def show_ledger(console: Console, ledger: LedgerRecord) -> None:
    """Print the ledger, one line per subject."""
    keys = ", ".join(f"{key.name} {key.type}" for key in ledger.keys)
    fields = ", ".join(f"{field.name}={field.aggregator}" for field in ledger.fields)
    lines = [
        ("state", f"{ledger.state}, {ledger.type}, {ledger.serializer}"),
        ("keys", f"({keys})"),
        ("fields", fields),
        ("widths", "; ".join(f"{count} fields from txid {txid} on" for txid, count in ledger.field_counts)),
        ("owner", f"{ledger.owner}, next batch {ledger.owners[ledger.owner]}"),
        *(("", f"before: {owner}, next batch {due}") for owner, due in ledger.owners.items() if owner != ledger.owner),
        ("epoch", str(ledger.epoch)),
        ("next txid", str(ledger.next_txid)),
        ("committed", _commit(ledger.last_commit)),
        ("previous", _commit(ledger.previous)),
        ("keys held", _keys_held(ledger)),
        ("in flight", _in_flight(ledger.in_flight, ledger.epoch)),
        ("dead", _dead(ledger.dead)),
        ("floor", f"{ledger.floor}: records below it were reset" if ledger.floor else "0"),
        ("rewrites", str(ledger.rewrites)),
        *_windows(ledger),
        *_rolling(ledger),
        ("offsets", (ledger.last_commit.offsets if ledger.last_commit is not None else None) or "not known"),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(name, style="bold"), Text(_shown(value), overflow="fold"))
    console.print(grid)


def show_reports(console: Console, reports: list[BatchReport]) -> None:
    """Print a table, newest first."""
    if not reports:
        console.print("no batch reports are kept")
        return
    table = Table(*_COLUMNS)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for report in reports:
        keys = (report.keys_read, report.keys_written, report.keys_skipped)
        passed = "" if report.offsets_passed is None else report.offsets_passed
        numbers = (report.batch_id, report.txid, report.attempt, report.rows, passed, *keys, report.milliseconds)
        table.add_row(*map(str, numbers), Text(_shown(report.at)))
    console.print(table)


def show_states(to: Console, states: Sequence[ListedState]) -> None:
    """Print a table of states."""
    columns = ["state", "type", "keys", "fields", "last commit", "committed at", "keys held"]
    show_table(to, columns, [_listed(state) for state in states])


def show_table(to: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, or lines with tabs where there is no terminal."""
    if not to.is_terminal:
        for row in [columns, *rows]:
            print_row(row)
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(_shown(text_of(part))) for part in row))
    to.print(table)


def _listed(state: ListedState) -> list[str]:
    ledger = state.ledger
    if ledger is None:
        return [state.name, "cannot be read", *[""] * 5]
    last, held = ledger.last_commit, ledger.keys_held()
    keys = ", ".join(f"{key.name} {key.type}" for key in ledger.keys)
    fields = ", ".join(f"{field.name}={field.aggregator}" for field in ledger.fields)
    batch = ["no batch", ""] if last is None else [f"batch {last.batch_id}", last.at]
    return [state.name, ledger.type, f"({keys})", fields, *batch, "unknown" if held is None else str(held)]


def show_rows(to: Console, ledger: LedgerRecord, rows: Sequence[tuple[Key, Mapping[str, Any] | None]]) -> None:
    """Print keys and their values as a table, or as lines with tabs where there is no terminal."""
    if to.is_terminal:
        to.print(table_of(ledger, rows))
        return
    shown = rows_of(ledger)
    print_row([*(key.name for key in ledger.keys), *_names(shown, rows)])
    for key, value in rows:
        print_row(shown.cells(key, value))


def title_of(text: str) -> Text:
    """A line above a table."""
    return Text(_shown(text), style="bold")


def table_of(ledger: LedgerRecord, rows: Sequence[tuple[Key, Mapping[str, Any] | None]]) -> Table:
    """A table of keys and their values. An absent key has no values."""
    table = Table()
    for name in (key.name for key in ledger.keys):
        table.add_column(Text(_shown(name)), overflow="fold")
    shown = rows_of(ledger)
    for name in _names(shown, rows):
        table.add_column(Text(_shown(name)), justify="right", overflow="fold")
    for key, value in rows:
        table.add_row(*(Text(_shown(part)) for part in shown.cells(key, value)))
    return table


def _names(shown: JsonRows, rows: Sequence[tuple[Key, Mapping[str, Any] | None]]) -> list[str]:
    """The columns of the values, which may be a part of the state's."""
    return next((list(value) for _, value in rows if value is not None), shown.columns)


def print_row(parts: Iterable[Any]) -> None:
    """Print one line of cells with tabs between them."""
    typer.echo("\t".join(_shown(text_of(part)) for part in parts))


def show_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Print one paragraph per finding."""
    for finding in findings:
        line = Text(f"{finding.severity:8}", style=_COLORS[finding.severity])
        line.append(f"{_shown(finding.subject)}: ", style="bold").append(_shown(finding.found), style="default")
        if finding.severity != "ok":
            advice = f"\n        expected: {_shown(finding.expected)}\n        {_shown(finding.advice)}"
            line.append(advice, style="default")
        console.print(line, soft_wrap=True)


def _commit(done: Commit | None) -> str:
    if done is None:
        return "nothing"
    return f"batch {done.batch_id} as txid {done.txid}, {done.rows} rows, {done.keys} keys, at {done.at or 'unknown'}"


def _keys_held(ledger: LedgerRecord) -> str:
    if ledger.has_had_ttl:
        return "not known: the state has or had a ttl"
    if ledger.windows is not None:
        return "not known: the state has windows"
    held = ledger.keys_held()
    return "not known: mapstate recount counts them" if held is None else str(held)


def _windows(ledger: LedgerRecord) -> list[tuple[str, str]]:
    """The lines of a state with windows."""
    windows, done = ledger.windows, ledger.last_windows()
    if windows is None:
        return []
    own, kind = windows.definition, ledger.keys[0].type
    spans = [("session gap", own.length)] if own.sessions else [("length", own.length), ("slide", own.slide)]
    spans += [("lag", own.lag), ("retention", own.retention)]
    if own.idle is not None:
        spans.append(("idle", own.idle))
    inputs = {} if done is None else done.inputs
    panes, grid = "none", own.panes.pages(windows.height)
    if windows.panes:
        low, high = time_text(windows.panes[0][0], kind), time_text(windows.panes[-1][1], kind)
        count = sum(1 for _ in every_pane(grid, windows.panes))
        noun = "pages of panes" if windows.height else "panes"
        panes = f"{count} {noun} in {len(windows.panes)} runs, from {low} to {high}"
    return [
        ("windows", ", ".join(f"{name} {span_text(span, kind)}" for name, span in spans)),
        ("watermark", "none yet" if done is None else _time(done.watermark, kind)),
        *([("", "not final before the next batch begins")] if done and ledger.may_lose_last_batch() else []),
        *([] if windows.least == NEVER else [("", f"advanced to {_time(windows.least, kind)}")]),
        *(("", f"input {name or 'of all rows'}: latest {_time(known.latest, kind)}") for name, known in inputs.items()),
        ("panes", panes),
        ("purged", "nothing" if windows.purged == NEVER else f"what ends at {_time(windows.purged, kind)} or before"),
    ]


def _rolling(ledger: LedgerRecord) -> list[tuple[str, str]]:
    """The lines of a state with rolling windows."""
    if ledger.rolling is None:
        return []
    own, done = ledger.rolling.definition, ledger.last_windows()
    windows = (
        f"{one.name} by {span_text(one.resolution, own.type)}" if one.length else one.name for one in own.windows
    )
    spans = [("unit", own.unit), ("lag", own.lag), ("retention", own.retention)]
    spans += [] if own.idle is None else [("idle", own.idle)]
    inputs = {} if done is None else done.inputs
    earliest = earliest_end(ledger.rolling)
    return [
        ("rolling windows", ", ".join(windows)),
        ("", ", ".join(f"{name} {span_text(span, own.type)}" for name, span in spans)),
        ("watermark", "none yet" if done is None else _time(ledger.final_mark(), own.type)),
        *(
            ("", f"input {name or 'of all rows'}: latest {_time(known.latest, own.type)}")
            for name, known in inputs.items()
        ),
        ("can be read as of", "any time" if earliest is None else f"{text_of(earliest)} or later"),
    ]


def _time(number: int, kind: str) -> str:
    return "none yet" if number == NEVER else time_text(number, kind)


def _in_flight(attempt: InFlight | None, epoch: int) -> str:
    if attempt is None:
        return "nothing"
    name = "a vacuum" if attempt.batch_id is None else f"batch {attempt.batch_id}"
    since = f", begun at {attempt.at}" if attempt.at else ""
    orphaned = "" if attempt.epoch == epoch else ", of an earlier epoch: left behind"
    return f"{name} as txid {attempt.txid}{since}{orphaned}"


def _dead(dead: tuple[tuple[int, int], ...]) -> str:
    if not dead:
        return "0 txids"
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in dead[-_MOST_RANGES:])
    count = sum(high - low + 1 for low, high in dead)
    more = f"the last {_MOST_RANGES} of " if len(dead) > _MOST_RANGES else ""
    return f"{count} txids, {more}{len(dead)} ranges: {shown}"
