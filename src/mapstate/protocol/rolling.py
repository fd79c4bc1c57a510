"""Rolling windows: which tile a time is in, which times can be asked for, and what a ledger keeps of that.

Pure arithmetic on integers. Times are counted in units from ``startTime`` on: a unit is the finest resolution of the
state, and every end is a multiple of it. A key's value is a list of tiles (`mapstate.serializers.tiles`): each row is
in one, and a tile begins at the latest cut that a window may still need. Folding may be put off, because a tile that is
finer than needed is never wrong; a tile that is coarser always is. So one thing has to hold: each record that counts
was folded at a horizon that is not later than the ledger's. docs/protocol.md lists the simplifications that break it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from mapstate.protocol.windows import NEVER, WindowCommit
from mapstate.schema import TimeType
from mapstate.serializers.tiles import BASE

MOST_TILES = 1_000
"""The most tiles of a key that the windows of a declaration may need."""

MOST_STORED = 10_000
"""The most tiles of a key that a batch may come to, with rows of many times."""

MOST_REMEMBERED = 100_000
"""The most times whose tiles a task remembers."""

Level = tuple[int, int]
"""A step in units, and the earliest multiple of it that a window needs as a cut."""


class RollingWindow(msgspec.Struct, frozen=True):
    """A window that ends at the time that a reader asks for, in the units of the time column.

    ``name``        what its columns end with
    ``length``      0: a lifetime, which has no beginning
    ``resolution``  its beginning is rounded down to a multiple of it; of a lifetime 0
    """

    name: str
    length: int
    resolution: int


class RollingDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """The rolling windows of a state, in the units of the time column.

    ``type``       of the times
    ``unit``       the finest resolution that the state ever had
    ``offset``     where days and other units begin
    ``lag``        how far behind the latest row the watermark is: until then tiles stay fine
    ``retention``  how far before the watermark an end may be that is asked for
    ``idle``       an input without rows for longer is taken to go on by the clock; None: never
    """

    windows: tuple[RollingWindow, ...]
    type: TimeType
    unit: int
    offset: int = 0
    lag: int = 0
    retention: int = 0
    idle: int | None = None

    by_clock = False

    @property
    def behind(self) -> int:
        """How far the watermark is behind the latest row."""
        return self.lag

    @property
    def reach(self) -> int:
        """How far an end that is asked for may be behind the latest row."""
        return self.unit

    @property
    def has_lifetime(self) -> bool:
        """Whether rows of any age count."""
        return any(not window.length for window in self.windows)

    def units(self, time: int) -> int:
        """A time in units, rounded down."""
        return (time - self.offset) // self.unit

    def time(self, units: int) -> int:
        """The time at which a unit begins."""
        return units * self.unit + self.offset

    def low(self, window: RollingWindow, end: int) -> int:
        """The first unit of a window that ends at ``end``: never later than its length before."""
        if not window.length:
            return BASE
        return (end * self.unit - window.length) // window.resolution * (window.resolution // self.unit)

    def levels(self, horizon: int) -> list[Level]:
        """The steps of tiles with ends from ``horizon`` on, each once, from the finest on."""
        horizons = {1: horizon}
        for window in self.windows if horizon != NEVER else ():
            if window.length:
                step, least = window.resolution // self.unit, self.low(window, horizon)
                horizons[step] = min(least, horizons.get(step, least))
        return sorted(horizons.items())

    def has_cuts_of(self, window: RollingWindow, horizon: int) -> bool:
        """Whether tiles that were folded at ``horizon`` or before begin wherever one more window may begin."""
        if window.resolution % self.unit:
            return False
        if horizon == NEVER:
            return True  # nothing was folded, and no row was too old
        if not window.length:
            return self.has_lifetime
        least = self.low(window, horizon)
        return any(
            known.length and window.resolution % known.resolution == 0 and least >= self.low(known, horizon)
            for known in self.windows
        )

    def most_tiles(self) -> int:
        """How many tiles a key may have that gets a row in each unit, up to the watermark's lag behind the latest."""
        horizon = -(-(self.lag + self.retention) // self.unit)
        levels = self.levels(-horizon)
        count = 1 + self.has_lifetime
        for step, least in levels:
            finer = [other for other_step, other in levels if other_step < step and step % other_step == 0]
            count += max(0, min(finer, default=0) - least) // step + 1
        return count


class Tiling:
    """The tile of each time under one horizon. It remembers those that it was asked for, but not years of history."""

    def __init__(self, definition: RollingDefinition, horizon: int) -> None:
        self._levels = definition.levels(horizon)
        self._oldest = BASE if definition.has_lifetime else None
        self._known: dict[int, int | None] = {BASE: self._oldest}

    def tiles(self, units: Sequence[int]) -> list[int | None]:
        """The first unit of the tile of each; None for one that is older than each window."""
        try:
            return [*map(self._known.__getitem__, units)]
        except KeyError:
            return [self._tile(unit) for unit in units]

    def _tile(self, unit: int) -> int | None:
        if unit not in self._known:
            cuts = [cut for step, least in self._levels if (cut := unit // step * step) >= least]
            if not cuts:
                return self._oldest
            if len(self._known) > MOST_REMEMBERED:
                self._known = {BASE: self._oldest}
            self._known[unit] = max(cuts)
        return self._known[unit]


class RollingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger of a state with rolling windows keeps beside its commits.

    ``horizon``  the earliest end, in units, that can be asked for. A begin moves it, and it never moves back
    ``least``    the watermark of each later batch, at least: an operator's word, see `WindowsRecord`
    """

    definition: RollingDefinition
    horizon: int = NEVER
    least: int = NEVER

    def begun(self, committed: WindowCommit | None) -> RollingRecord:
        """After a begin. The committed watermark moves the horizon, never the attempt's own rows."""
        mark = max(self.least, NEVER if committed is None else committed.watermark)
        if mark == NEVER:
            return self
        due = self.definition.units(mark - self.definition.retention)
        return self if due <= self.horizon else msgspec.structs.replace(self, horizon=due)

    def advanced(self, to: int) -> RollingRecord:
        """After an operator's word that the watermark is there at least."""
        return msgspec.structs.replace(self, least=to)

    def seeded(self, staged: WindowCommit | None) -> RollingRecord:
        """In a seed: with the horizon that the begin after it would set. None: before its rows are staged."""
        before = msgspec.structs.replace(self, horizon=NEVER)
        return before if staged is None else before.begun(staged)

    def adapted(self, asked: RollingDefinition) -> RollingRecord | None:
        """With the windows of a job that opens the state; None if its tiles lack a cut that one of them needs."""
        kept = self.definition
        if asked == kept:
            return self
        if (asked.type, asked.offset) != (kept.type, kept.offset) or self.missing(asked):
            return None
        after = msgspec.structs.replace(asked, unit=kept.unit)
        return None if after.most_tiles() > MOST_TILES else msgspec.structs.replace(self, definition=after)

    def has_longer_retention(self, before: RollingRecord | None) -> bool:
        """Whether earlier times are wanted than before, which are not kept yet."""
        return before is not None and self.definition.retention > before.definition.retention

    def missing(self, asked: RollingDefinition) -> list[RollingWindow]:
        """The windows that the state cannot have, because its tiles lack their cuts."""
        kept = {(window.length, window.resolution) for window in self.definition.windows}
        return [
            window
            for window in asked.windows
            if (window.length, window.resolution) not in kept and not self.definition.has_cuts_of(window, self.horizon)
        ]

    def first_time(self) -> int:
        """The earliest time with which a row counts in a window that can still be asked for."""
        definition = self.definition
        if definition.has_lifetime or self.horizon == NEVER:
            return NEVER
        return definition.time(min(definition.low(window, self.horizon) for window in definition.windows))

    @property
    def tiling(self) -> Tiling:
        """The tiles of an attempt that begins now."""
        return Tiling(self.definition, self.horizon)

    def emptied(self) -> RollingRecord:
        """After a reset: without anything that was counted."""
        return RollingRecord(definition=self.definition)

    def has_flaw(self, commits: Iterable[Any]) -> bool:
        """Whether this is damaged: no event leaves it in a ledger with these commits."""
        kept = self.definition
        return (
            not kept.windows
            or kept.type not in ("timestamp", "bigint")
            or min(kept.unit, *(window.length + 1 for window in kept.windows)) < 1
            or min(kept.lag, kept.retention, kept.offset) < 0
            or any(window.resolution % kept.unit or window.resolution < bool(window.length) for window in kept.windows)
            or len({window.name for window in kept.windows}) < len(kept.windows)
            or any(commit.windows is None for commit in commits)
        )


def columns_of(fields: Sequence[str], windows: Sequence[RollingWindow]) -> list[tuple[str, int, int]]:
    """The columns that readers see: each one's name, the place of its field, and the place of its window."""
    return [
        (f"{field}_{window.name}", i, place) for i, field in enumerate(fields) for place, window in enumerate(windows)
    ]
