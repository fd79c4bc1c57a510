"""The commands for running topologies: list, monitor, activate, deactivate, rebalance, kill."""

from __future__ import annotations

import datetime as dt
import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer

from mapstate.batch_report import BatchReport
from mapstate.cli.arguments import StoreUrl, Topologies, Topology, Url, split_urls, store_url
from mapstate.cli.show import Output, emit, print_row, say
from mapstate.errors import LedgerError, MapStateError, UsageError
from mapstate.operations import control
from mapstate.operations.control import ListedTopology, Obeyed, Watch
from mapstate.protocol.control import ControlRecord
from mapstate.reader import open_reader
from mapstate.schema import time_text

_LIST = ("topology", "status", "driver", "uptime", "last beat", "states")
_FIELDS = (
    *("time", "status", "state", "batch_id", "batches"),
    *("rows_per_second", "keys_per_second", "milliseconds", "watermark", "rows_late"),
)
_MONITOR = ("time", "status", "state", "batch", "batches", "rows/s", "keys/s", "ms/batch", "watermark", "late rows")


def topologies(out: Output, *, url: StoreUrl = None) -> None:
    """Lists the topologies that run under a control record, some DEAD; exit code 1 if one cannot be read."""
    listed = control.list_topologies(store_url(url))
    documents = [
        {
            "topology": topology.name,
            "record": topology.record,
            "problem": topology.problem or None,
            "is_dead": topology.is_dead,
        }
        for topology in listed
    ]
    out.listing("topologies", documents, _LIST, list(map(_listed, listed)))
    for topology in listed:
        if topology.record is None:
            out.fail(f"{topology.name}: {topology.problem}")


def monitor(
    out: Output,
    *,
    url: Url = None,
    name: Topology,
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.1, help="seconds between two reads")] = 4.0,
    count: Annotated[int | None, typer.Option(min=1, help="end after so many", show_default=False)] = None,
) -> None:
    """Shows what the states of a topology take in: per second since the read before. Ctrl-C ends it."""
    place = store_url(url)
    record = control.topology(place, name)
    watch = Watch(record)
    seen = {state: _reports(place, state)[1][:1] for state in record.states}
    began = time.monotonic()
    if not out.as_json:
        print_row(_MONITOR)
    with suppress(KeyboardInterrupt):
        for at in itertools.count(1):
            time.sleep(interval)
            seconds, began = time.monotonic() - began, time.monotonic()
            record = control.topology(place, name)
            status = "DEAD" if watch.dead(record, interval) else record.status
            for line in _measured(place, record, status, seen, seconds):
                if out.as_json:
                    emit(dict(zip(_FIELDS, line, strict=True)))
                else:
                    print_row("-" if part is None else part for part in line)
            if at == count:
                return


def activate(out: Output, *, url: Url = None, name: Topology) -> None:
    """Lets an inactive topology go on; exit code 1 if its driver does not obey within 30 seconds."""
    _say_obeyed(out, name, control.activate(store_url(url), name))


def deactivate(out: Output, *, url: Url = None, name: Topology) -> None:
    """Stops a topology between two batches, and leaves its driver; exit code 1 if it does not obey in 30 seconds."""
    _say_obeyed(out, name, control.deactivate(store_url(url), name))


def rebalance(
    out: Output,
    *,
    url: Url = None,
    name: Topology,
    partitions: Annotated[int, typer.Option("--partitions", "-n", min=1, help="of each batch, from the next one on")],
) -> None:
    """Spreads batches over another number of partitions; exit code 1 if the driver does not obey in 30 seconds."""
    _say_obeyed(out, name, control.rebalance(store_url(url), name, partitions=partitions))


def kill(
    out: Output,
    *,
    place: Topologies,
    wait: Annotated[float, typer.Option("--wait", "-w", min=0, help="seconds for the batch under way to end")] = 30.0,
    ignore: Annotated[bool, typer.Option("--ignore-errors", "-i", help="go on with the next name")] = False,
) -> None:
    """Ends topologies; exit code 1 if a driver does not obey within 30 seconds more. States and checkpoints stay."""
    urls, names = split_urls(place)
    if not names:
        raise UsageError("there is no name: mapstate kill URL NAME")
    url, has_error = store_url(urls), False
    for name in names:
        try:
            _say_obeyed(out, name, control.kill(url, name, wait=wait))
        except MapStateError as error:
            if not ignore:
                raise
            has_error = True
            say(f"mapstate: {type(error).__name__}: {error.message}", err=True)
        if out.has_failed and not ignore:
            return
    if has_error:
        raise typer.Exit(2)


def _say_obeyed(out: Output, name: str, done: Obeyed) -> None:
    """Print what became of a command. It has failed if a driver that runs has not obeyed it."""
    record, dead = done.record, done.dead
    partitions = "" if record.partitions is None else f", {record.partitions} partitions"
    if dead is not None:
        say(f"mapstate: {name}'s driver on {dead.host}, process {dead.pid}, is dead: no beat since {dead.at}", err=True)
    said = None
    if done.is_obeyed:
        said = f"{name} is {record.status}{partitions}"
    elif record.driver is None and not done.is_superseded:
        said = f"{name} is {record.status}, and no driver runs it: the next one that starts obeys."
    fields = {"status": record.status, "partitions": record.partitions, "is_obeyed": done.is_obeyed}
    out.answer({"topology": name, **fields, "is_superseded": done.is_superseded}, said)
    if done.is_superseded:
        out.fail(f"superseded by a later command: {name} is {record.status}{partitions}")
    elif not done.is_obeyed and record.driver is not None:
        out.fail(
            f"not obeyed. {name} is {record.status} in the record, and its driver on {record.driver.host}, process "
            f"{record.driver.pid}, has not answered; it beat last at {record.driver.at}. The command stays: that "
            "driver obeys it as soon as it can, or the next one that starts."
        )


def _measured(
    place: str, record: ControlRecord, status: str, seen: dict[str, list[BatchReport]], seconds: float
) -> Iterator[list[Any]]:
    at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    for state in record.states:
        kind, reports = _reports(place, state)
        last = seen.get(state) or []
        new = [report for report in reports if not last or report.txid > last[0].txid]
        newest = (reports or last)[:1]
        seen[state] = newest
        if not newest:  # not known, rather than none
            yield [at, status, state, *[None] * (len(_FIELDS) - 3)]
            continue
        mark = newest[0].watermark
        yield [
            *(at, status, state, newest[0].batch_id, len(new)),
            round(sum(report.rows for report in new) / seconds),
            round(sum(report.keys_written for report in new) / seconds),
            round(sum(report.milliseconds for report in new) / len(new)) if new else None,
            None if mark is None else time_text(mark, kind),
            sum(report.rows_late for report in new),
        ]


def _reports(place: str, state: str) -> tuple[str, list[BatchReport]]:
    """The type of a state's watermark, and its reports, newest first; none of a state in another store."""
    try:
        with open_reader(place, state, follow=None) as reader:
            return reader.ledger().time_type or "", reader.reports()
    except LedgerError:
        return "", []


def _listed(topology: ListedTopology) -> list[Any]:
    record = topology.record
    if record is None:
        return [topology.name, "cannot be read", "", "", "", ""]
    driver = record.driver
    if driver is None:
        return [topology.name, record.status, "none", "", "", ", ".join(record.states)]
    place = f"{driver.host}, process {driver.pid}"
    status = "DEAD" if topology.is_dead else record.status
    return [topology.name, status, place, _ago(driver.started), f"{_ago(driver.at)} ago", ", ".join(record.states)]


def _ago(at: str) -> str:
    passed = dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(at)
    return str(dt.timedelta(seconds=max(0, round(passed.total_seconds()))))
