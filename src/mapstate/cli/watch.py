"""The command that shows values as they change: watch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live

from mapstate.cli.arguments import AsJson, Place, split_place
from mapstate.cli.show import console, emit, print_row, table_of, title_of
from mapstate.errors import CorruptRecordError, MissingKeysError
from mapstate.keys import Key
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader import StateReader, open_reader
from mapstate.reader.forms import JsonRows, json_state, rows_of, typed_keys

_TRIES = 20
_Show = Callable[[LedgerRecord, list[tuple[Key, dict[str, Any] | None]]], None]
"""Takes the values of one look, and the ledger as of which they are."""


def watch(
    *,
    place: Place,
    interval: Annotated[float, typer.Option(min=0.05, help="seconds between two looks")] = 2.0,
    count: Annotated[int | None, typer.Option(min=1, help="end after so many looks", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, help="keys that are shown if none is named")] = 20,
    as_json: AsJson = False,
) -> None:
    """Shows values as they change: a table that is refreshed on a terminal, else lines. Ctrl-C ends it.

    All values of one look are of one batch. Without a KEY, it takes the first keys that the store lists.
    """
    url, state, texts = split_place(place)
    with suppress(KeyboardInterrupt), open_reader(url, state) as reader, _shown(state, as_json=as_json) as show:
        named = typed_keys(texts, reader.ledger().keys) if texts else None
        keys, listed_at = named or [], None
        for look in itertools.count(1):
            began = time.monotonic()
            values, ledger = reader.multi_get_as_of(keys)
            for _ in range(_TRIES):
                if named is not None or len(keys) >= limit or ledger.contents() == listed_at:
                    break
                keys, listed_at = _first_keys(reader, limit), ledger.contents()
                values, ledger = reader.multi_get_as_of(keys)
            show(ledger, list(zip(keys, values, strict=True)))
            if look == count:
                return
            time.sleep(max(0.0, began + interval - time.monotonic()))


def _first_keys(reader: StateReader, limit: int) -> list[Key]:
    found: dict[Key, None] = {}
    with suppress(CorruptRecordError, MissingKeysError):  # at the end of the scan; doctor reports them
        for key, _ in reader.scan():
            found[key] = None
            if len(found) == limit:
                break
    return list(found)


@contextmanager
def _shown(state: str, *, as_json: bool) -> Iterator[_Show]:
    """A function that shows a look: as JSON, as a live table, or as lines of text."""
    to = console()
    if as_json:
        yield lambda ledger, rows: emit(
            {"state": state, **json_state(ledger), "is_exact": True} | {"rows": rows_of(ledger).rows(rows)}
        )
    elif to.is_terminal:
        with Live(console=to, auto_refresh=False) as live:
            yield lambda ledger, rows: live.update(
                Group(title_of(_title(state, ledger)), table_of(ledger, rows)), refresh=True
            )
    else:
        yield lambda ledger, rows: _print_lines(_title(state, ledger), rows_of(ledger), rows)


def _print_lines(title: str, shown: JsonRows, rows: list[tuple[Key, dict[str, Any] | None]]) -> None:
    print_row([f"# {title}"])
    for key, value in rows:
        print_row(shown.cells(key, value, absent="null"))


def _title(state: str, ledger: LedgerRecord) -> str:
    last, held = ledger.last_commit, ledger.keys_held()
    batch = "no batch" if last is None else f"batch {last.batch_id}, committed {last.at or 'at an unknown time'}"
    return f"{state}: {batch}" + ("" if held is None else f", {held} keys")
