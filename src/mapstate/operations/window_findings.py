"""What the doctor finds in the ledger of a state with windows: windows of the future, and inputs that are slow."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence

from mapstate.findings import Finding
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.windows import NEVER, Named, WindowCommit
from mapstate.windows import number_of, span_text, time_text

__all__ = ["window_findings"]

_MOST = 10


def window_findings(
    ledger: LedgerRecord, now: dt.datetime | None = None, named: Named | None = None
) -> Iterator[Finding]:
    """The findings; none for a state without windows. ``now`` is the clock's time, for tests."""
    if ledger.windows is None:
        return
    if ledger.keys[0].type != "bigint":  # times that are numbers have no relation to a clock
        windows, time = ledger.windows, number_of(dt.datetime.now(dt.UTC) if now is None else now)
        yield _future(ledger, list((named or windows.named)(time + 1, None)))
    yield _inputs(ledger)


def _future(ledger: LedgerRecord, panes: Sequence[int]) -> Finding:
    expected = "no window that starts after the present time"
    if not panes:
        return Finding("ok", "windows", "none in the future", expected)
    starts = ", ".join(time_text(pane, ledger.keys[0].type) for pane in panes[:_MOST])
    more = f" and {len(panes) - _MOST} more" if len(panes) > _MOST else ""
    return Finding(
        "warning",
        "windows",
        f"{len(panes)} panes start after the present time: {starts}{more}",
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
