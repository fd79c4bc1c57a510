"""The command that copies a state out of its store: export."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mapstate.cli.arguments import AsJson, State, Url, store_url
from mapstate.cli.files import FORMATS, format_of
from mapstate.cli.progress import keys_held, progress
from mapstate.cli.show import answer, say
from mapstate.errors import StoreError, UsageError, shown
from mapstate.operations.export import Exported
from mapstate.operations.export import export as export_state
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.urls import LIKE_A_URL
from mapstate.values import plain


def export(
    *,
    url: Url = None,
    state: State,
    to: Annotated[str, typer.Option(metavar="FILE", help="the file; one that is there is replaced at the end")],
    format: Annotated[  # noqa: A002  the option's name
        str | None, typer.Option(help="csv, jsonl or parquet; by default, by the end of FILE", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Writes all keys and values to a file; exit code 1 if keys are missing or cannot be read.

    Run it again after an interruption: it goes on from FILE.part.
    """
    if LIKE_A_URL.search(to):
        raise UsageError("FILE is a local file; what was given looks like a URL, and is not shown")
    place, form, began = store_url(url), format_of(to, format), time.monotonic()
    try:
        with progress("reading keys", keys_held(place, state)) as update:
            done = export_state(
                *(place, state, to, FORMATS[form]), on_page=lambda keys: update(keys, f"{keys} keys read")
            )
    except (KeyboardInterrupt, StoreError):
        if Path(f"{to}.part").exists():
            say(f"mapstate: what was read is in {to}.part. Export again to go on, or delete it.", err=True)
        raise
    took = time.monotonic() - began
    rate = f"{took:.1f} s, {(done.rows - done.resumed) / max(took, 0.001):.0f} keys/s"
    before = f", {done.resumed} of them from {to}.part" if done.resumed else ""
    text = f"{done.rows} keys exported to {to}{before}, in {rate}. {_as_of(done)}"
    answer(_json_exported(done, to, form, took), text, as_json=as_json)
    if done.missing:
        say(
            f"mapstate: {done.missing} keys are missing: the ledger counts {done.rows + done.missing}. See mapstate "
            "doctor.",
            err=True,
        )
    if done.unreadable:
        named = ", ".join(map(shown, done.unreadable_keys))
        say(f"mapstate: {done.unreadable} keys cannot be read, and were left out: {named}", err=True)
    if done.missing or done.unreadable:
        raise typer.Exit(1)


def _as_of(done: Exported) -> str:
    if done.is_one_batch:
        ends = "" if done.end is None else f" Its windows end at {plain(done.end)}."
        return f"It is as of {_batch(done.last)}.{ends}"
    span = f"from {_batch(done.first)} to {_batch(done.last)}"
    return f"It is not as of one batch: batches were at work, {span}. Each key is as of one of them."


def _batch(ledger: LedgerRecord) -> str:
    last = ledger.last_commit
    return "no batch" if last is None else f"batch {last.batch_id} (txid {last.txid})"


def _json_exported(done: Exported, to: str, form: str, took: float) -> dict[str, Any]:
    first, last = (
        None if one.last_commit is None else {"batch_id": one.last_commit.batch_id, "txid": one.last_commit.txid}
        for one in (done.first, done.last)
    )
    return {
        "file": to,
        "format": form,
        "seconds": round(took, 3),
        "rows": done.rows,
        "resumed": done.resumed,
        "missing": done.missing,
        "unreadable": done.unreadable,
        "unreadable_keys": done.unreadable_keys,
        "is_one_batch": done.is_one_batch,
        "first": first,
        "last": last,
        **({} if done.end is None else {"end": plain(done.end)}),
    }
