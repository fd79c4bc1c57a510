"""The windows of a stream, in Storm's words: by time, and by number of rows; and rolling ones, which readers end."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import Any

from mapstate.errors import ConfigurationError, DuplicateNameError, check_range, shown
from mapstate.protocol.rolling import MOST_TILES, RollingDefinition, RollingWindow
from mapstate.protocol.windows import LATEST, MOST_PANES, Panes
from mapstate.schema import TimeType, span_text

Duration = str | dt.timedelta | int
"""``"10 minutes"``, as Spark writes it; a timedelta; or, for times that are ``bigint``, a number of their own units."""

_MICROSECONDS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_PART = re.compile(r"(\d{1,999})\s*([a-z]+)")  # Python reads no number of more than 4,300 digits
_DURATION = re.compile(rf"(?:interval\s+)?(-?)({_PART.pattern}(?:\s+{_PART.pattern})*)")
_LONGEST = 3_652_500 * 86_400_000_000  # 10,000 years, which is longer than all times of rows
_MICROSECOND = dt.timedelta(microseconds=1)
_RESOLUTIONS = (86_400, 21_600, 3_600, 300, 60, 1)  # seconds

LIFETIME = "lifetime"
"""The window of all rows that a key ever had, see `RollingWindows`."""


@dataclass(frozen=True)
class DurationWindow:
    """Windows of a length by time, one at each slide: ``[start, start + length)``.

    A slide that is longer than the length leaves rows between windows; each `BatchReport` has their number.
    """

    length: Duration
    slide: Duration

    def panes(self, time: TimeType, offset: Duration) -> Panes:
        """The arithmetic of these windows, in the units of a time. Raises ConfigurationError."""
        length, slide = (
            span_of(span, time, f"a window's {name}", least=1)
            for name, span in (("length", self.length), ("slide", self.slide))
        )
        panes = Panes(length, slide, span_of(offset, time, "startTime") % slide)
        count = length // slide * (2 if panes.cut else 1)
        if count > MOST_PANES:
            raise ConfigurationError(
                f"windows of {self.length!r} that slide by {self.slide!r} have {count} panes each, and {MOST_PANES} is "
                "the most: take a longer slide"
            )
        return panes


class TumblingDurationWindow(DurationWindow):
    """Windows side by side: each time is in one."""

    @classmethod
    def of(cls, length: Duration) -> DurationWindow:
        """``TumblingDurationWindow.of("1 hour")``."""
        return cls(length, length)


class SlidingDurationWindow(DurationWindow):
    """Windows that overlap: a row is in ``length // slide`` of them, or in one more."""

    @classmethod
    def of(cls, length: Duration, slide: Duration) -> DurationWindow:
        """``SlidingDurationWindow.of("10 minutes", "1 minute")``."""
        return cls(length, slide)


@dataclass(frozen=True)
class SessionWindow:
    """Sessions of a key: rows of which none is further than ``gap`` from the next one.

    ``[first row, last row + gap)``. A session may be of any length.
    """

    gap: Duration

    @classmethod
    def of(cls, gap: Duration) -> SessionWindow:
        """``SessionWindow.of("30 minutes")``."""
        return cls(gap)

    def panes(self, time: TimeType, offset: Duration) -> Panes:
        """The panes that keep sessions. Raises ConfigurationError."""
        span_of(self.gap, time, "the gap of sessions", least=1)
        return DurationWindow(self.gap, self.gap).panes(time, offset)


@dataclass(frozen=True)
class RollingWindows:
    """Windows that end when a reader asks: the last hour, the last week. See docs/features.md.

    A window is a length, `LIFETIME`, or a pair of a length and a resolution: to a multiple of that its beginning is
    rounded down, so it is never shorter than its length. Without one, the resolution is the coarsest of 1 second, 1 and
    5 minutes, 1 and 6 hours and 1 day that is at most a twelfth of the length.
    """

    windows: tuple[Duration | tuple[Duration, Duration], ...]

    @classmethod
    def of(cls, *windows: Duration | tuple[Duration, Duration]) -> RollingWindows:
        """``RollingWindows.of("1 hour", "24 hours", ("30 days", "1 hour"), LIFETIME)``."""
        return cls(windows)

    def definition(
        self, time: TimeType, *, startTime: Duration, lag: Duration, retention: Duration, idle: Duration | None
    ) -> RollingDefinition:
        """The arithmetic of these windows, in the units of a time. Raises ConfigurationError."""
        windows = [_rolling_window(window, time) for window in self.windows]
        resolutions = [window.resolution for window in windows if window.length]
        if not resolutions:
            raise ConfigurationError(
                "rolling windows need at least one with a length, such as RollingWindows.of('1 hour', LIFETIME); what "
                "is kept of all rows alone is a state without windows"
            )
        unit = min(resolutions)
        for window in windows:
            same = [other for other in windows if other.name == window.name]
            if len(same) > 1:
                raise DuplicateNameError(f"the rolling window {window.name!r} stands twice", name=window.name)
            if window.resolution % unit:
                raise ConfigurationError(
                    f"the resolution of {window.name!r} is no multiple of {span_text(unit, time)}, the finest one of "
                    "these rolling windows: tiles begin at multiples of both. Nothing was written. Take a multiple, or "
                    "keep a window by a finer one of which both are multiples"
                )
        definition = RollingDefinition(
            windows=tuple(windows),
            type=time,
            unit=unit,
            offset=span_of(startTime, time, "startTime"),
            lag=span_of(lag, time, "lag"),
            retention=span_of(retention, time, "retention"),
            idle=None if idle is None else span_of(idle, time, "idle"),
        )
        if max(definition.offset, *(window.length for window in windows)) > LATEST >> 1:
            raise ConfigurationError(f"startTime and rolling windows are at most {LATEST >> 1:,}")
        count = definition.most_tiles()
        if count > MOST_TILES:
            finest = max(windows, key=lambda window: window.length // max(1, window.resolution))
            needs = f"{finest.name!r} by {span_text(finest.resolution, time)}"
            if (definition.lag + definition.retention) // unit > finest.length // finest.resolution:
                needs = f"lag and retention by {span_text(unit, time)}"
            raise ConfigurationError(
                f"these rolling windows need {count:,} tiles a key, and {MOST_TILES:,} is the most. {needs} needs most "
                "of them: take a coarser resolution, or a shorter lag or retention"
            )
        return definition


def _rolling_window(given: Any, time: TimeType) -> RollingWindow:
    if given == LIFETIME:
        return RollingWindow(LIFETIME, 0, 0)
    length, resolution = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    span = span_of(length, time, "the length of a rolling window", least=1)
    name = _name_of(length, span, time)
    if resolution is not None:
        step = span_of(resolution, time, f"the resolution of {name!r}", least=1)
        if step > span:
            raise ConfigurationError(f"the resolution of {name!r} is longer than the window: {shown(resolution)}")
        return RollingWindow(name, span, step)
    steps = (seconds * 1_000_000 for seconds in _RESOLUTIONS if seconds * 12_000_000 <= span)
    found = None if time == "bigint" else next(steps, None)
    if found is None:
        why = "its times are a bigint" if time == "bigint" else "it is shorter than 12 seconds"
        raise ConfigurationError(f"the rolling window {name!r} needs a resolution, ({given!r}, ...), because {why}")
    return RollingWindow(name, span, found)


def _name_of(length: Duration, span: int, time: TimeType) -> str:
    if isinstance(length, str):
        return "_".join(part for number, unit in _PART.findall(length.lower()) for part in (number, unit))
    if time == "bigint":
        return str(span)
    unit = next(unit for unit in ("day", "hour", "minute", "second", "microsecond") if span % _MICROSECONDS[unit] == 0)
    count = span // _MICROSECONDS[unit]
    return f"{count}_{unit}{'s' * (count != 1)}"


@dataclass(frozen=True)
class CountWindow:
    """Windows of the last ``length`` rows of a key, one at each ``slide`` rows; the first ones hold fewer.

    Raises ConfigurationError if they are not numbers above 0, or a window has more than 1,000 panes. A pane is a slide,
    or a half of one if the length is no multiple of the slide.
    """

    length: int
    slide: int

    def __post_init__(self) -> None:
        for name, rows in (("length", self.length), ("slide", self.slide)):
            check_range(f"the {name} of a window by count", rows, 1, LATEST)
        DurationWindow(self.length, self.slide).panes("bigint", 0)


class TumblingCountWindow(CountWindow):
    """Windows of rows side by side: each row is in one."""

    @classmethod
    def of(cls, length: int) -> CountWindow:
        """``TumblingCountWindow.of(100)``."""
        return cls(length, length)


class SlidingCountWindow(CountWindow):
    """Windows of rows that overlap: after each ``slide`` rows, the last ``length`` of them."""

    @classmethod
    def of(cls, length: int, slide: int) -> CountWindow:
        """``SlidingCountWindow.of(100, 10)``."""
        return cls(length, slide)


def span_of(duration: Duration, time: TimeType, name: str, *, least: int = 0) -> int:
    """A duration in microseconds or the column's own units. Raises ConfigurationError with the end of the range."""
    is_bigint = time == "bigint"
    match = _DURATION.fullmatch(duration.strip().lower()) if isinstance(duration, str) else None
    parts = [] if match is None else _PART.findall(match[2])
    units = [_MICROSECONDS.get(unit.removesuffix("s")) for _, unit in parts]
    if type(duration) is int and (is_bigint or duration == 0):
        span = duration
    elif isinstance(duration, dt.timedelta) and not is_bigint:
        span = duration // _MICROSECOND
    elif match is not None and None not in units and not is_bigint:
        span = int(match[1] + "1") * sum(
            int(number) * (unit or 0) for (number, _), unit in zip(parts, units, strict=True)
        )
    else:
        units_of_column = "a number of the time column's own units, which is a bigint"
        expected = units_of_column if is_bigint else "a duration such as '10 minutes' or a timedelta"
        raise ConfigurationError(f"{name} is {expected}, not {shown(duration)}")
    most, longest = (LATEST, f"{LATEST:,}") if is_bigint else (_LONGEST, "3,652,500 days")
    if not least <= span <= most:
        passed = f"at most {longest}" if span > most else "above 0" if least else "at least 0"
        raise ConfigurationError(f"{name} is {passed}, not {shown(duration)}")
    return span
