"""The commands for windows: those of a key, and a word for the watermark."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from mapstate.cli.arguments import AsJson, Place, State, Url, Yes, split_place, store_url
from mapstate.cli.show import confirm, console, emit, say, show_rows
from mapstate.errors import UsageError
from mapstate.operations.advance import advance as advance_watermark
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.upkeep import check_advance
from mapstate.reader import open_reader
from mapstate.reader.forms import JsonRows, typed_keys
from mapstate.schema import KeyField
from mapstate.values import plain


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
            raise UsageError(f"state {state!r} has no windows by time: mapstate get shows its keys")
        keys = typed_keys(texts, record.keys[1:])
        if len(keys) > 1:
            raise UsageError("give one key: its windows are what is shown")
        found = reader.windows(keys[0], since=_time(record, since), until=_time(record, until))
        mark = reader.watermark().time
    kind = record.keys[0].type
    columns = (KeyField("window_start", kind), KeyField("window_end", kind), KeyField("final", "boolean"))
    rows = [((window.start, window.end, window.final), window.value) for window in found]
    if as_json:
        for row in JsonRows(columns, record.fields).rows(rows):
            emit(row)
    elif rows:
        show_rows(console(), msgspec.structs.replace(record, keys=columns), rows)
    say(f"{len(rows)} windows; the watermark is {'not there yet' if mark is None else plain(mark)}", err=True)
    if not rows:
        raise typer.Exit(1)


def advance(
    *,
    url: Url = None,
    state: State,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="the watermark that the next batch has at least")
    ] = None,
    back_to: Annotated[
        str | None,
        typer.Option("--back-to", metavar="TIME", help="put the watermark back: what ends later fires again"),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="leave an attempt in flight behind; fences its driver")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Lets the next batch move the watermark, for a source that has ended: its windows fire, later rows are late.

    Or puts it back, where a wrong time or clock has moved it. Stop the query first.
    """
    if (to is None) == (back_to is None):
        raise UsageError("give --to TIME or --back-to TIME. Nothing was written.")
    place = store_url(url)
    with open_reader(place, state) as reader:
        record = reader.ledger()
    check_advance(record)
    time, back = _time(record, to or back_to), to is None
    planned = advance_watermark(place, state, time, back=back, take_over=take_over, dry_run=True)
    before = "nowhere yet" if planned.watermark is None else plain(planned.watermark)
    effect = (
        "windows that end later and are not gone open and fire again" if back else "rows for windows before are late"
    )
    question = "Put it back" if back else "Let the next batch move it"
    done = "what has fired later is open again" if back else "the next batch takes it, also one without rows"
    say(f"The watermark of {state} is {before}. At {plain(time)}, {effect}.", err=as_json)
    confirm(f"{question} to {plain(time)}?", yes=yes, as_json=as_json)
    advance_watermark(place, state, time, back=back, take_over=take_over)
    say(f"Done: {done}.", err=as_json)
    if as_json:
        emit({"watermark": plain(planned.watermark), "to": plain(time)})


def _time(record: LedgerRecord, text: str | None) -> Any:
    return None if text is None else typed_keys([text], record.keys[:1])[0][0]
