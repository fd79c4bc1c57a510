"""What the commands print: for a person on a terminal, and plain where there is none."""

from __future__ import annotations

from collections.abc import Iterable

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mapstate.batch_report import BatchReport
from mapstate.findings import Finding
from mapstate.protocol.ledger_record import Commit, LedgerRecord

__all__ = ["say", "show_findings", "show_ledger", "show_reports"]

_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}
_COLUMNS = ("batch", "txid", "attempt", "rows", "read", "cached", "written", "skipped", "ms", "committed at")
_MOST_RANGES = 10


def say(text: str, *, err: bool = False) -> None:
    """One line. Whoever can write to the store does not write to the terminal: see `_shown`."""
    typer.echo(_shown(text), err=err)


def _shown(text: str) -> str:
    """The text without work a terminal would obey: control characters are escaped, as in Python's own literals."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def show_ledger(console: Console, ledger: LedgerRecord) -> None:
    """The ledger, one line per thing."""
    keys = ", ".join(f"{key.name} {key.type}" for key in ledger.keys)
    fields = ", ".join(f"{field.name}={field.aggregator}" for field in ledger.fields)
    at = ledger.in_flight
    lines = [
        ("state", f"{ledger.state}, {ledger.type}, {ledger.serializer}"),
        ("keys", f"({keys})"),
        ("fields", fields),
        ("widths", "; ".join(f"{count} fields from txid {txid} on" for txid, count in ledger.field_counts)),
        ("owner", f"{ledger.owner}, next batch {ledger.owners[ledger.owner]}"),
        *(("", f"before: {one}, next batch {due}") for one, due in ledger.owners.items() if one != ledger.owner),
        ("epoch", str(ledger.epoch)),
        ("next txid", str(ledger.next_txid)),
        ("committed", _commit(ledger.last_commit)),
        ("previous", _commit(ledger.previous)),
        ("keys held", _keys_held(ledger)),
        ("in flight", _in_flight(ledger) if at is not None else "nothing"),
        ("dead", _dead(ledger.dead)),
        ("floor", f"{ledger.floor}: records below it were reset" if ledger.floor else "0"),
        ("rewrites", str(ledger.rewrites)),
        ("offsets", (ledger.last_commit.offsets if ledger.last_commit is not None else None) or "not known"),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(name, style="bold"), Text(_shown(value), overflow="fold"))
    console.print(grid)


def show_reports(console: Console, reports: list[BatchReport]) -> None:
    """A table, newest first."""
    if not reports:
        console.print("no batch reports are kept")
        return
    table = Table(*_COLUMNS)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for one in reports:
        keys = (one.keys_read, one.keys_cached, one.keys_written, one.keys_skipped)
        numbers = (one.batch_id, one.txid, one.attempt, one.rows, *keys, one.milliseconds)
        table.add_row(*map(str, numbers), Text(_shown(one.at)))
    console.print(table)


def show_findings(console: Console, findings: Iterable[Finding]) -> None:
    """One paragraph per finding."""
    for one in findings:
        line = Text(f"{one.severity:8}", style=_COLORS[one.severity]).append(f"{_shown(one.subject)}: ", style="bold")
        line.append(_shown(one.found), style="default")
        if one.severity != "ok":
            line.append(f"\n        expected: {_shown(one.expected)}\n        {_shown(one.advice)}", style="default")
        console.print(line, soft_wrap=True)


def _commit(done: Commit | None) -> str:
    if done is None:
        return "nothing"
    return f"batch {done.batch_id} as txid {done.txid}, {done.rows} rows, {done.keys} keys, at {done.at or 'unknown'}"


def _keys_held(ledger: LedgerRecord) -> str:
    if ledger.has_had_ttl:
        return "not known: the state has or had a ttl"
    held = ledger.keys_held()
    return "not known: mapstate recount counts them" if held is None else str(held)


def _in_flight(ledger: LedgerRecord) -> str:
    at = ledger.in_flight
    assert at is not None  # noqa: S101  asked by the caller
    work = "a vacuum" if at.batch_id is None else f"batch {at.batch_id}"
    since = f", begun at {at.at}" if at.at else ""
    left = "" if at.epoch == ledger.epoch else ", of an earlier epoch: left behind"
    return f"{work} as txid {at.txid}{since}{left}"


def _dead(dead: tuple[tuple[int, int], ...]) -> str:
    if not dead:
        return "0 txids"
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in dead[-_MOST_RANGES:])
    count = sum(high - low + 1 for low, high in dead)
    more = f"the last {_MOST_RANGES} of " if len(dead) > _MOST_RANGES else ""
    return f"{count} txids, {more}{len(dead)} ranges: {shown}"
