"""The rows of a batch with their panes, and the rows that are late: expressions for Catalyst.

The arithmetic is that of `mapstate.protocol.windows.Panes`, on the same integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mapstate.aggregators.columns import column_of
from mapstate.protocol.windows import NEVER, Panes
from mapstate.spark.driver.job import Branch, Windows
from mapstate.spark.driver.new_values import INSIDE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["BESIDE", "LateRows", "beside_of", "with_panes"]

BESIDE = f"{INSIDE}beside"
"""Columns beside the partials: of each input the latest time and whether it has rows; last, whether a row is late."""

_TIME = f"{INSIDE}time"
_FIRST_MICROSECOND = -62_135_596_800_000_000  # the years 1 to 9999: Python has no others
_LAST_MICROSECOND = 253_402_300_799_999_999


@dataclass(frozen=True, eq=False)
class LateRows:
    """A step that leaves the rows that the windows of the batch did not take."""

    windows: Windows
    branch: Branch

    def __call__(self, frame: DataFrame, batch_id: int | None) -> DataFrame:
        """See `Step`."""
        if batch_id is None:
            return frame
        before = self.branch.late_before
        if before is None:
            return frame.where("false")
        time = f"({_time(self.windows, 0)})"
        return frame.where(f"{time} is null or {time} < {before}")


def beside_of(windows: Windows) -> list[str]:
    """The names of the columns beside the partials."""
    return [f"{BESIDE}{at}" for at in range(2 * len(windows.inputs) + 1)]


def with_panes(frame: DataFrame, windows: Windows, keys: Sequence[str], before: int, now: int) -> DataFrame:
    """The rows with their pane as the first key column, null for a row of no window, and the columns beside.

    ``before`` is where the last window that has fired ends. Rows of no window have null keys, so they are one group.
    """
    from pyspark.sql import functions as F

    timed = frame.withColumn(_TIME, F.expr(_time(windows, max(now, before))))
    pane = _pane(windows.definition.panes)
    taken = f"{_TIME} >= {before} and ({pane}) is not null"
    shown = f"({pane})" if windows.type == "bigint" else f"timestamp_micros({pane})"
    columns = {windows.column: F.expr(f"case when {taken} then {shown} end")}
    columns |= {key: F.expr(f"case when {taken} then {_quoted(key)} end") for key in keys}
    beside = []
    near, least = f"{_TIME} is not null", _TIME
    if windows.ahead is not None:
        near, least = f"{_TIME} <= {now + windows.ahead}", f"least({_TIME}, {now}L)"
    for name in windows.inputs:
        own = F.lit(True) if windows.source is None else column_of(windows.source) == F.lit(name)
        beside.append(F.when(F.expr(near) & own, F.expr(least)))
        beside.append((F.expr(f"{_TIME} is not null") & own).cast("int"))
    beside.append(F.expr(f"cast({_TIME} is null or {_TIME} < {before} as int)"))
    columns |= dict(zip(beside_of(windows), beside, strict=True))
    return timed.withColumns(columns).drop(_TIME)


def _time(windows: Windows, now: int) -> str:
    """A row's time as an integer; null where it has none that Python can hold."""
    if windows.time is None:
        return f"{now}L"
    column = _quoted(windows.time)
    if windows.type == "bigint":
        return f"case when {column} between {NEVER // 2} and {-NEVER // 2} then {column} end"
    micros = f"unix_micros({column})"
    return f"case when {micros} between {_FIRST_MICROSECOND} and {_LAST_MICROSECOND} then {micros} end"


def _pane(panes: Panes) -> str:
    """`Panes.pane` of the time column."""
    inside = f"pmod({_TIME} - {panes.offset}L, {panes.slide}L)"
    start = f"{_TIME} - {inside}"
    if panes.length < panes.slide:
        return f"case when {inside} < {panes.length} then {start} end"
    return f"{start} + case when {inside} >= {panes.cut} then {panes.cut}L else 0L end" if panes.cut else start


def _quoted(column: str) -> str:
    return "`" + column.replace("`", "``") + "`"
