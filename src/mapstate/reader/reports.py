"""The batch reports of a state, as a store has kept them."""

from __future__ import annotations

from typing import Any

import msgspec

from mapstate.batch_report import BatchReport
from mapstate.capabilities import Reports
from mapstate.errors import CorruptRecordError, cut
from mapstate.protocol.ledger_record import are_times
from mapstate.values import html_table

_decoder = msgspec.json.Decoder(BatchReport)


class BatchReports(list[BatchReport]):
    """Reports in a list, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        names = [name for name in BatchReport.__struct_fields__ if any(getattr(one, name) is not None for one in self)]
        return html_table("batch reports", [names, *([getattr(one, name) for name in names] for one in self)])


def read_reports(store: Any, state: str) -> BatchReports:
    """Read the reports of a state, newest first, for readers and tools. Empty if the store keeps none.

    Raises CorruptRecordError for a report that another program wrote, and StoreError.
    """
    if not isinstance(store, Reports):
        return BatchReports()
    try:
        reports = BatchReports(_decoder.decode(data) for data in store.reports())
        _check_times(reports)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise CorruptRecordError(
            f"a batch report of state {state!r} cannot be read ({cut(error)}): another program wrote it. The state "
            "itself is not affected. Delete the reports.",
            state=state,
        ) from error
    return reports


def _check_times(reports: list[BatchReport]) -> None:
    if not are_times([report.at for report in reports]):
        raise ValueError("a time is not ISO 8601 with an offset")
