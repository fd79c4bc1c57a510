"""Print the progress and the results of the commands, in color on a terminal and else plain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mapstate.batch_report import BatchReport
from mapstate.errors import MapStateError, UsageError
from mapstate.findings import Finding
from mapstate.keys import Key
from mapstate.maps.operator_list import ListEntry
from mapstate.protocol.ledger_record import Commit, InFlight, LedgerRecord
from mapstate.protocol.windows import NEVER, every_pane
from mapstate.reader import open_reader
from mapstate.reader.forms import JsonRows, rows_of
from mapstate.reader.rolling import earliest_end
from mapstate.schema import span_text, time_text
from mapstate.values import text as text_of

_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}
_COLUMNS = ("batch", "txid", "attempt", "rows", "offsets", "read", "written", "skipped", "ms", "committed at")
_MOST_RANGES = 10

Rows = Sequence[tuple[Key, Mapping[str, Any] | None]]
Update = Callable[[int, str], None]
"""Takes the number of keys that are done, and what to say of them."""


def say(text: str, *, err: bool = False) -> None:
    """Print one line, with control characters escaped: who can write to the store cannot control the terminal."""
    typer.echo(_shown(text), err=err)


def emit(document: Any) -> None:
    """Print one JSON document on one line, in ASCII: no character of it controls a terminal."""
    typer.echo(json.dumps(msgspec.to_builtins(document)))


class Output:
    """What a command prints: for a person, or with --json for a program, which nobody asks."""

    def __init__(self, *, as_json: bool, yes: bool) -> None:
        self.as_json = as_json
        self._yes = yes
        self.has_failed = False

    def answer(self, document: Any, shown: str | Callable[[], None] | None) -> None:
        """Print what a command has found or done: one JSON document; or one line, or what ``shown`` prints."""
        if self.as_json:
            emit(document)
        elif isinstance(shown, str):
            say(shown)
        elif shown is not None:
            shown()

    def listing(self, noun: str, documents: Any, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.answer(documents, lambda: _print_table(columns, rows))
        if not self.as_json:
            say(f"{len(rows)} {noun}")

    def rows(self, ledger: LedgerRecord, rows: Rows, columns: Sequence[str] | None = None) -> None:
        if self.as_json:
            for row in rows_of(ledger, columns=columns).rows(rows):
                emit(row)
        elif present := [(key, value) for key, value in rows if value is not None]:
            _print_rows(ledger, present, columns)

    def note(self, text: str) -> None:
        say(text, err=self.as_json)

    def fail(self, text: str) -> None:
        """Print one line of trouble. The exit code is 1."""
        say(f"mapstate: {text}", err=True)
        self.has_failed = True


class AskingOutput(Output):
    """That of a command with --yes, which asks before it writes."""

    def confirm(self, question: str) -> None:
        """Ask before something is written, unless --yes. Ends the command with 1 for a no. Raises UsageError."""
        if self._yes:
            return
        if self.as_json:
            raise UsageError(
                f"with --json nobody is asked. Nothing was written. The question is: {question} --yes says yes."
            )
        typer.confirm(question, abort=True)


def console() -> Console:
    """Standard output. Where it is no terminal, no line is broken for the width of one."""
    to = Console()
    return to if to.is_terminal else Console(width=200)


def _shown(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class _Rate(ProgressColumn):
    """Keys per second, and the time so far."""

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        rate = task.completed / elapsed if elapsed > 0 else 0.0
        return Text(f"{rate:,.0f}/s, {elapsed:.0f} s")


@contextmanager
def progress(doing: str, total: Callable[[], int | None] = lambda: None) -> Iterator[Update]:
    """Show progress on standard error while the block runs, if that is a terminal; ``total`` may return None."""
    to = Console(stderr=True)
    if not to.is_terminal:
        yield lambda done, text: None  # noqa: ARG005
        return
    known = total()
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    columns += (
        [_Rate()] if known is None else [BarColumn(bar_width=20), _Rate(), TextColumn("ETA"), TimeRemainingColumn()]
    )
    with Progress(*columns, console=to, transient=True) as shown:
        task = shown.add_task(doing, total=known)
        last = 0

        def update(done: int, text: str) -> None:
            nonlocal last
            if done < last:  # another pass begins
                shown.reset(task, total=known)
            last = done
            shown.update(task, completed=done, description=text)

        yield update


def keys_held(url: str, state: str) -> Callable[[], int | None]:
    """A function that returns how many keys the ledger says the state holds; None if unknown, or on an error."""

    def held() -> int | None:
        try:
            with open_reader(url, state, follow=None) as reader:
                return reader.key_count()
        except MapStateError:
            return None

    return held


def print_ledger(ledger: LedgerRecord) -> None:
    """Print the ledger, one line per subject."""
    keys, fields = schema_of(ledger)
    lines = [
        ("state", f"{ledger.state}, {ledger.type}, {ledger.serializer}"),
        ("keys", keys),
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
        *([("seed", f"not complete: {ledger.seed.progress}, nobody can read it yet")] if ledger.seed else []),
        ("dead", _dead(ledger.dead)),
        ("floor", f"{ledger.floor}: records below it were reset" if ledger.floor else "0"),
        ("rewrites", str(ledger.rewrites)),
        *(
            []
            if ledger.operations is None
            else [("operations", f"{ledger.operations}: keys forgotten (mapstate forget --export), and corrections")]
        ),
        *_windows(ledger),
        *_rolling(ledger),
        ("offsets", (ledger.last_commit.offsets if ledger.last_commit is not None else None) or "not known"),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(name, style="bold"), Text(_shown(value), overflow="fold"))
    console().print(grid)


def schema_of(ledger: LedgerRecord) -> tuple[str, str]:
    """The key columns and the fields, as text."""
    keys = ", ".join(f"{key.name} {key.type}" for key in ledger.keys)
    return f"({keys})", ", ".join(f"{field.name}={field.aggregator}" for field in ledger.fields)


def print_reports(reports: list[BatchReport]) -> None:
    """Print a table, newest first."""
    if not reports:
        console().print("no batch reports are kept")
        return
    table = Table(*_COLUMNS)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for report in reports:
        keys = (report.keys_read, report.keys_written, report.keys_skipped)
        passed = "" if report.offsets_passed is None else report.offsets_passed
        numbers = (report.batch_id, report.txid, report.attempt, report.rows, passed, *keys, report.milliseconds)
        table.add_row(*map(str, numbers), Text(_shown(report.at)))
    console().print(table)


def print_corrections(entries: Sequence[ListEntry]) -> None:
    """Print a table, oldest first."""
    columns = ("correction", "txid", "rows", "keys", "after batch", "at")
    rows = [(entry.id, entry.txid, entry.rows, entry.keys, entry.batch_id, entry.at) for entry in entries]
    _print_table(columns, rows)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    to = console()
    if not to.is_terminal:
        for row in [columns, *rows]:
            print_row(row)
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(_shown(text_of(part))) for part in row))
    to.print(table)


def _print_rows(ledger: LedgerRecord, rows: Rows, columns: Sequence[str] | None) -> None:
    to = console()
    if to.is_terminal:
        to.print(table_of(ledger, rows, columns))
        return
    shown = rows_of(ledger, columns=columns)
    print_row([*(key.name for key in ledger.keys), *_names(shown, rows)])
    for key, value in rows:
        print_row(shown.cells(key, value))


def title_of(text: str) -> Text:
    """A line above a table."""
    return Text(_shown(text), style="bold")


def table_of(ledger: LedgerRecord, rows: Rows, columns: Sequence[str] | None = None) -> Table:
    """A table of keys and their values. An absent key has no values."""
    table = Table()
    for name in (key.name for key in ledger.keys):
        table.add_column(Text(_shown(name)), overflow="fold")
    shown = rows_of(ledger, columns=columns)
    for name in _names(shown, rows):
        table.add_column(Text(_shown(name)), justify="right", overflow="fold")
    for key, value in rows:
        table.add_row(*(Text(_shown(part)) for part in shown.cells(key, value)))
    return table


def _names(shown: JsonRows, rows: Sequence[tuple[Key, Mapping[str, Any] | None]]) -> list[str]:
    return next((list(value) for _, value in rows if value is not None), shown.columns)


def print_row(parts: Iterable[Any]) -> None:
    """Print one line of cells with tabs between them."""
    typer.echo("\t".join(_shown(text_of(part)) for part in parts))


def print_findings(findings: Iterable[Finding]) -> None:
    """Print one paragraph per finding."""
    to = console()
    for finding in findings:
        line = Text(f"{finding.severity:8}", style=_COLORS[finding.severity])
        line.append(f"{_shown(finding.subject)}: ", style="bold").append(_shown(finding.found), style="default")
        if finding.severity != "ok":
            advice = f"\n        expected: {_shown(finding.expected)}\n        {_shown(finding.advice)}"
            line.append(advice, style="default")
        to.print(line, soft_wrap=True)


def _commit(done: Commit | None) -> str:
    if done is None:
        return "nothing"
    left_out = {"forgotten": done.forgotten, "expired": 0 if done.windows is None else done.windows.expired}
    rows = ", ".join([f"{done.rows} rows", *(f"{count} rows {why}" for why, count in left_out.items() if count)])
    return f"batch {done.batch_id} as txid {done.txid}, {rows}, {done.keys} keys, at {done.at or 'unknown'}"


def _keys_held(ledger: LedgerRecord) -> str:
    if ledger.has_had_ttl:
        return "not known: the state has or had a ttl"
    if ledger.windows is not None:
        return "not known: the state has windows"
    held = ledger.keys_held()
    return "not known: mapstate recount counts them" if held is None else str(held)


def _windows(ledger: LedgerRecord) -> list[tuple[str, str]]:
    windows, done = ledger.windows, ledger.last_windows()
    if windows is None:
        return []
    definition, kind = windows.definition, ledger.keys[0].type
    spans = (
        [("session gap", definition.length)]
        if definition.sessions
        else [("length", definition.length), ("slide", definition.slide)]
    )
    spans += [("lag", definition.lag), ("retention", definition.retention)]
    if definition.idle is not None:
        spans.append(("idle", definition.idle))
    inputs = {} if done is None else done.inputs
    panes, grid = "none", definition.panes.pages(windows.height)
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
    if ledger.rolling is None:
        return []
    definition, done = ledger.rolling.definition, ledger.last_windows()
    windows = (
        f"{window.name} by {span_text(window.resolution, definition.type)}" if window.length else window.name
        for window in definition.windows
    )
    spans = [("unit", definition.unit), ("lag", definition.lag), ("retention", definition.retention)]
    spans += [] if definition.idle is None else [("idle", definition.idle)]
    inputs = {} if done is None else done.inputs
    earliest = earliest_end(ledger.rolling)
    return [
        ("rolling windows", ", ".join(windows)),
        ("", ", ".join(f"{name} {span_text(span, definition.type)}" for name, span in spans)),
        ("watermark", "none yet" if done is None else _time(ledger.final_mark(), definition.type)),
        *(
            ("", f"input {name or 'of all rows'}: latest {_time(known.latest, definition.type)}")
            for name, known in inputs.items()
        ),
        ("can be read as of", "any time" if earliest is None else f"{text_of(earliest)} or later"),
    ]


def _time(number: int, kind: str) -> str:
    return "none yet" if number == NEVER else time_text(number, kind)


def _in_flight(attempt: InFlight | None, epoch: int) -> str:
    if attempt is None:
        return "nothing"
    since = f", begun at {attempt.at}" if attempt.at else ""
    orphaned = "" if attempt.epoch == epoch else ", of an earlier epoch: left behind"
    return f"{attempt.name} as txid {attempt.txid}{since}{orphaned}"


def _dead(dead: tuple[tuple[int, int], ...]) -> str:
    if not dead:
        return "0 txids"
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in dead[-_MOST_RANGES:])
    count = sum(high - low + 1 for low, high in dead)
    more = f"the last {_MOST_RANGES} of " if len(dead) > _MOST_RANGES else ""
    return f"{count} txids, {more}{len(dead)} ranges: {shown}"
