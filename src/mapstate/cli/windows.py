"""The command that shows the windows of a key."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from mapstate.cli.arguments import AsJson, Place, split_place
from mapstate.cli.forms import emit, json_row
from mapstate.cli.show import console, say, show_rows
from mapstate.cli.typed_keys import typed_keys
from mapstate.errors import UsageError
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader import open_reader
from mapstate.schema import KeyField

__all__ = ["windows"]


def windows(
    *,
    place: Place,
    since: Annotated[str | None, typer.Option(help="only windows that end later", show_default=False)] = None,
    until: Annotated[str | None, typer.Option(help="only windows that end then or before", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    r"""Shows the windows of one key, also those that still fill; exit code 1 if there is none.

    The key is one argument per grouping column, without the window. \N is null.
    """
    url, state, texts = split_place(place)
    with open_reader(url, state) as reader:
        record = reader.ledger()
        if record.windows is None:
            raise UsageError(f"state {state!r} has no windows: mapstate get shows its keys")
        keys = typed_keys(texts, record.keys[1:])
        if len(keys) > 1:
            raise UsageError("give one key: its windows are what is shown")
        found = reader.windows(keys[0], since=_time(record, since), until=_time(record, until))
        mark = reader.watermark().time
    kind = record.keys[0].type
    columns = (KeyField("window_start", kind), KeyField("window_end", kind), KeyField("final", "boolean"))
    rows = [((window.start, window.end, window.final), window.value) for window in found]
    if as_json:
        for key, value in rows:
            emit(json_row(columns, key, value))
    elif rows:
        show_rows(console(), msgspec.structs.replace(record, keys=columns), rows)
    say(f"{len(rows)} windows; the watermark is {'not there yet' if mark is None else mark}", err=True)
    if not rows:
        raise typer.Exit(1)


def _time(record: LedgerRecord, text: str | None) -> Any:
    return None if text is None else typed_keys([text], record.keys[:1])[0][0]
