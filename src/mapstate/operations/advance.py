"""Advance: an operator's word for the time up to which a stream is complete, where its rows do not say so."""

from __future__ import annotations

import datetime as dt
from typing import NamedTuple

from mapstate.backends import opened
from mapstate.backing_map import Backend
from mapstate.errors import UsageError
from mapstate.protocol import upkeep
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.protocol.windows import WindowCommit
from mapstate.reader.times import Time, number_of_caller, shown_time
from mapstate.schema import number_of


class Advanced(NamedTuple):
    """``watermark`` was as of the last batch, None before a row; the next batch moves it to ``to`` at least."""

    watermark: Time | None
    to: Time


def advance(
    backend_or_url: Backend | str,
    state: str,
    to: Time,
    *,
    back: bool = False,
    take_over: bool = False,
    dry_run: bool = False,
) -> Advanced:
    """Let the next batch move the watermark of a state with windows to ``to`` at least.

    For a source that has ended or fallen silent, so that its last windows fire. An operator runs it from any process,
    between two batches of the stream. Nothing fires at once: the next batch does it, also one without rows. Rows that
    come later for windows that have fired are late. A reset of the state forgets it, a rollback does not.

    With ``back`` the watermark is put back at once, where a wrong time or clock has moved it. Stop the query first.
    Windows that end later and are not gone are open again: they take rows, are not final, and fire once more. Rolling
    windows never fire: there the watermark says which tiles may be joined, and it cannot be put back.

    Args:
        backend_or_url: The store of the state.
        state: The state's name.
        to: A datetime with a time zone, or a number where the times of rows are a ``bigint``. Not in the future.
        back: Put the watermark back to ``to``.
        take_over: Leave an attempt in flight behind, whose driver is gone for good. A living driver is fenced.
        dry_run: Write nothing.

    Raises:
        UsageError: The state has no windows by time; the watermark is there already; the time is in the future;
            windows that end after it are gone; or an attempt is in flight.
        StateNotFoundError: There is no such state.
        StoreError: The store failed.

    """
    with opened(backend_or_url, state) as store:
        record = read_ledger(store, state)  # raises the better error if there is no ledger
        upkeep.check_advance(record, back=back)
        kind = record.time_type or "timestamp"
        number = number_of_caller(to, kind, state)
        now = number_of(dt.datetime.now(dt.UTC))
        if kind != "bigint" and number > now:
            raise UsageError(
                f"state {state!r} cannot be advanced to {to}, which is in the future: all rows until then would be "
                "late. Nothing was written."
            )
        back_at = now if back else None
        upkeep.advance(record, number, "", take_over=take_over, back_at=back_at)  # refuses before it writes
        if not dry_run:
            Ledger(store, state).advance(number, take_over=take_over, back_at=back_at)
    return Advanced(shown_time((record.last_windows() or WindowCommit()).watermark, kind), to)
