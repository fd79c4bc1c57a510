"""The rows of a batch with their panes, and the rows that are late: expressions for Catalyst.

The arithmetic is that of `mapstate.protocol.windows.Panes`, on the same integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mapstate.aggregators.columns import column_of
from mapstate.errors import INSIDE
from mapstate.protocol.rolling import RollingDefinition, RollingRecord
from mapstate.protocol.windows import LATEST, NEVER, Panes
from mapstate.serializers.tiles import BASE
from mapstate.spark.driver.job import Branch, Windows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BESIDE = f"{INSIDE}beside"
"""Columns beside the partials: of each input the time by which a row moves the watermark, `NEVER` where it moves none;
last, where windows leave gaps, whether a row is late, and of rolling windows the time of a row, null for one too old.
"""

_TIME = f"{INSIDE}time"
_PLACE = f"{INSIDE}place"
TILE = f"{INSIDE}tile"
"""The column with the tile of a row, in units."""

ANY_TIME = 1 << 62
"""Later than every time of a row."""

_FIRST_MICROSECOND = -62_135_596_800_000_000  # the years 1 to 9999: Python has no others
_LAST_MICROSECOND = 253_402_300_799_999_999


@dataclass(frozen=True, eq=False)
class LateRows:
    """A step that leaves the rows that the windows of the batch did not take."""

    windows: Windows
    branch: Branch

    def __call__(self, frame: DataFrame, batch_id: int | None) -> DataFrame:
        if batch_id is None:
            return frame
        if self.branch.taken is None:
            return frame.where("false")
        first, last = self.branch.taken
        time = f"({_time(self.windows, 0)})"
        return frame.where(f"{time} is null or {time} not between {first}L and {last}L")


def beside_of(windows: Windows) -> dict[str, bool]:
    """The names of the columns beside the partials, and whether one is summed: else its greatest value counts."""
    panes, count = _panes(windows), len(windows.inputs)
    names = [f"{BESIDE}{i}" for i in range(count + (panes is None or panes.has_gaps))]
    return {name: panes is not None and i == count for i, name in enumerate(names)}


def _panes(windows: Windows) -> Panes | None:
    """The arithmetic of windows that fire; None for rolling ones."""
    return None if isinstance(windows.definition, RollingDefinition) else windows.definition.panes


def with_panes(frame: DataFrame, windows: Windows, read: Sequence[str], before: int, now: int) -> DataFrame:
    """The rows with their pane as the first key column, null for a row of no window, and the columns beside.

    ``before`` is where the last window that has fired ends. ``read`` are the columns that the state reads, its keys
    among them: null in the rows of no window, so that these are one group, and no aggregate keeps or checks what is in
    them.
    """
    fired, panes = _varying(before), _panes(windows)
    if panes is None:
        raise TypeError("rolling windows have tiles")
    late = [f"cast({_TIME} is null or {_TIME} < {fired} as int)"] if panes.has_gaps else []
    place = f"case when {_TIME} >= {fired} then {_pane(panes)} end"
    shown = _PLACE if windows.type == "bigint" else f"timestamp_micros({_PLACE})"
    time = _time(windows, max(now, before))
    return _placed(frame, windows, read, now, time=time, place=place, shown={windows.column: shown}, beside=late)


def with_tiles(
    frame: DataFrame, windows: Windows, read: Sequence[str], now: int, *, record: RollingRecord, taken: tuple[int, int]
) -> DataFrame:
    """The rows with their tile in the column `TILE`, null for a row that is set aside, and the columns beside.

    ``record`` is the ledger's, whose horizon says which tiles there are; ``taken`` the times of rows that count.
    ``read``: see `with_panes`.
    """
    kept = record.definition
    unit = f"(({_TIME} - {kept.offset}L - pmod({_TIME} - {kept.offset}L, {kept.unit}L)) div {kept.unit}L)"
    cuts = []
    for step, least in kept.levels(record.horizon):
        cut = f"({unit} - pmod({unit}, {step}L))"
        cuts.append(f"case when {cut} >= {_varying(least)} then {cut} end")
    cuts += [f"{BASE}L" if kept.has_lifetime else "null"] * (2 if len(cuts) < 2 else 1)
    first, last = map(_varying, taken)
    place = f"case when {_TIME} between {first} and {last} then greatest({', '.join(cuts)}) end"
    newest = [f"case when {_PLACE} is not null or {_TIME} > {last} then {_TIME} end"]
    shown = {TILE: _PLACE}
    return _placed(frame, windows, read, now, time=_time(windows, now), place=place, shown=shown, beside=newest)


def _placed(
    frame: DataFrame,
    windows: Windows,
    read: Sequence[str],
    now: int,
    *,
    time: str,
    place: str,
    shown: Mapping[str, str],
    beside: Sequence[str],
) -> DataFrame:
    """The rows with their ``time`` and ``place``, and the columns ``shown`` that are made of it."""
    from pyspark.sql import functions as F

    mark = _TIME
    if windows.type == "timestamp" and windows.ahead is not None:
        near, limit = _varying(now), _varying(now + windows.ahead)
        mark = f"case when {_TIME} <= {limit} then least({_TIME}, {near}) when {_TIME} is not null then {NEVER}L end"
    marks = [F.expr(mark)]
    if windows.source is not None:
        marks = [F.when(column_of(windows.source) == F.lit(name), F.expr(mark)) for name in windows.inputs]
    timed = frame.select(  # one call of many columns: Spark goes over the plan at each
        "*",
        F.expr(time).alias(_TIME),
        F.expr(place).alias(_PLACE),
        *(column.alias(name) for column, name in zip([*marks, *map(F.expr, beside)], beside_of(windows), strict=True)),
    )
    columns = {name: F.expr(text) for name, text in shown.items()}
    columns |= {name: F.expr(f"case when {_PLACE} is not null then {_quoted(name)} end") for name in read}
    return timed.withColumns(columns)


def _varying(number: int) -> str:
    """A number that differs from batch to batch, beside the time column.

    A literal would stand in the code that Spark generates, and the JVM would compile that anew for each batch. An array
    does not stand there, and Spark does not fold one whose index a row decides.
    """
    return f"array({number}L, {number}L)[cast({_TIME} is null as int)]"


def _time(windows: Windows, now: int) -> str:
    """A row's time as an integer; null where it has none, or one whose windows Python cannot hold."""
    if windows.time is None:
        return f"array({now}L, null)[cast(spark_partition_id() < 0 as int)]"  # never null, which Spark cannot know
    column = _quoted(windows.time)
    if windows.type == "bigint":
        return f"case when {column} between {-LATEST} and {LATEST} then {column} end"
    reach = windows.definition.reach
    micros = f"unix_micros({column})"
    return f"case when {micros} between {_FIRST_MICROSECOND + reach} and {_LAST_MICROSECOND - reach} then {micros} end"


def _pane(panes: Panes) -> str:
    """`Panes.pane` of the time column."""
    inside = f"pmod({_TIME} - {panes.offset}L, {panes.slide}L)"
    start = f"{_TIME} - {inside}"
    if panes.has_gaps:
        return f"case when {inside} < {panes.length} then {start} end"
    return f"{start} + case when {inside} >= {panes.cut} then {panes.cut}L else 0L end" if panes.cut else start


def _quoted(column: str) -> str:
    return "`" + column.replace("`", "``") + "`"
