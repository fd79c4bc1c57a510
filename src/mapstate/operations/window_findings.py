"""What the doctor finds of windows: those of the future, a clock that jumped, late rows, and inputs that are slow."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence

from mapstate.batch_report import BatchReport
from mapstate.findings import Finding
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.windows import NEVER, Named, WindowCommit
from mapstate.windows import number_of, span_text, time_text

_MOST = 10
_BACK = (
    "A wrong time or clock may have moved the watermark. Stop the query, set the clock right or leave such rows out, "
    "and put it back: mapstate advance --back-to TIME."
)


def window_findings(
    ledger: LedgerRecord,
    now: dt.datetime | None = None,
    named: Named | None = None,
    reports: Sequence[BatchReport] = (),
) -> Iterator[Finding]:
    """The findings; none for a state without windows. ``now`` is the clock's time, for tests."""
    if ledger.windows is None:
        return
    kind, done, named = ledger.keys[0].type, ledger.last_windows() or WindowCommit(), named or ledger.windows.named
    if kind != "bigint":
        present = number_of(dt.datetime.now(dt.UTC) if now is None else now)
        yield from (*_clock(done, present), _future("present time", kind, [*named(present + 1, None)]))
    elif done.inputs:  # times that are numbers have no relation to a clock
        latest = max(known.latest for known in done.inputs.values())
        future = _future("latest time that counts", kind, [*named(latest + 1, None)])
        yield from [future] if future.severity != "ok" else []
    if reports:
        yield _late(reports[:_MOST])
    yield _inputs(ledger)


def _clock(done: WindowCommit, now: int) -> Iterator[Finding]:
    if done.jump or done.watermark > now + 60_000_000:
        jump, at = span_text(done.jump, "timestamp"), time_text(done.watermark, "timestamp")
        found = f"the driver's clock had jumped by {jump}, the watermark is {at}, now is {time_text(now, 'timestamp')}"
        yield Finding("warning", "clock", found, "a clock that goes on evenly, and no watermark beyond it", _BACK)


def _late(reports: Sequence[BatchReport]) -> Finding:
    rows, late = sum(report.rows for report in reports), sum(report.rows_late for report in reports)
    is_most = late * 2 > rows
    found = f"{late} of {rows} rows of the last {len(reports)} batches"
    return Finding("warning" if is_most else "ok", "late rows", found, "few of the rows", _BACK if is_most else "")


def _future(point: str, kind: str, panes: Sequence[int]) -> Finding:
    expected = f"no window that starts after the {point}"
    if not panes:
        return Finding("ok", "windows", "none in the future", expected)
    starts = ", ".join(time_text(pane, kind) for pane in panes[:_MOST])
    more = f" and {len(panes) - _MOST} more" if len(panes) > _MOST else ""
    return Finding(
        "warning",
        "windows",
        f"{len(panes)} panes start after the {point}: {starts}{more}",
        expected,
        "Rows came with times that are wrong, or this clock is. They make no other row late; their windows stay open "
        "until then. Leave such rows out in front of window().",
    )


def _inputs(ledger: LedgerRecord) -> Finding:
    expected = "every input brings rows, and none is a window's length behind the others"
    kind, done = ledger.keys[0].type, ledger.last_windows() or WindowCommit()
    at = "none yet" if done.watermark == NEVER else time_text(done.watermark, kind)
    if ledger.windows is not None and ledger.windows.least > done.watermark:
        at += f", and the next batch advances it to {time_text(ledger.windows.least, kind)}"
    inputs = sorted(done.inputs.items(), key=lambda item: item[1].latest)
    silent = [name for name, known in inputs if known.latest == NEVER]
    advice = "Does it still bring rows? With idle=, an input without rows holds the others back no longer."
    if silent and len(inputs) > 1:
        names = ", ".join(map(repr, silent))
        return Finding("warning", "watermark", f"{at}: no rows came yet of the inputs {names}", expected, advice)
    if len(inputs) < 2 or ledger.windows is None:
        return Finding("ok", "watermark", at, expected)
    (slow, least), (fast, most) = inputs[0], inputs[-1]
    behind = most.latest - least.latest
    text = f"{at}: the input {slow!r} is {span_text(behind, kind)} behind {fast!r}"
    is_late = behind > ledger.windows.definition.length
    return Finding("warning" if is_late else "ok", "watermark", text, expected, advice if is_late else "")
