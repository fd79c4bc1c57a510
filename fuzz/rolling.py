"""Rolling windows of a state, and what plain Python makes of its rows, one by one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fuzz.rows import BASE, Row, equal_key, plain
from mapstate import LIFETIME, RollingWindows, open_reader
from mapstate.errors import StateNotFoundError
from mapstate.protocol.windows import NEVER
from mapstate.schema import number_of, time_of

__all__ = ["Rolling", "differences"]

_ENDS = 6


@dataclass(frozen=True)
class Rolling:
    """Rolling windows, in the units of the column ``t``; of ``moment``, a timestamp, these are seconds.

    ``windows``  the length and the resolution of each; a lifetime has the length 0
    ``start``    the option ``startTime``; ``retention`` and ``ahead`` are those of these names
    """

    windows: tuple[tuple[int, int], ...]
    time: Literal["t", "moment"] = "t"
    start: int = 0
    retention: int = 0
    ahead: int | None = None

    def __str__(self) -> str:
        windows = ", ".join(f"({length}, {step})" if length else "LIFETIME" for length, step in self.windows)
        options = f"startTime={self.start}, retention={self.retention}, ahead={self.ahead}"
        return f"RollingWindows.of({windows}) of {self.time}, {options}"

    @property
    def unit(self) -> int:
        """The finest resolution."""
        return min(step for length, step in self.windows if length)

    @property
    def scale(self) -> int:
        """How many units of the ledger there are in one of these."""
        return 1 if self.time == "t" else 1_000_000

    @property
    def has_lifetime(self) -> bool:
        """Whether rows of any age count."""
        return any(not length for length, _ in self.windows)

    def of(self, stream: Any, lag: int) -> Any:
        """The stream with these windows."""
        options = {"startTime": self.start, "retention": self.retention, "ahead": self.ahead, "lag": lag}
        given = {name: self._span(value) for name, value in options.items() if value is not None}
        windows = [(self._span(length), self._span(step)) if length else LIFETIME for length, step in self.windows]
        return stream.window(RollingWindows.of(*windows), timestampField=self.time, **given)

    def _span(self, number: int) -> Any:
        return number if self.time == "t" else f"{number} seconds"

    def with_windows_of(self, definition: Any) -> Rolling:
        """With the windows that a ledger has."""
        windows = ((one.length // self.scale, one.resolution // self.scale) for one in definition.windows)
        return replace(self, windows=tuple(windows))

    # What is right

    def clock(self, row: Row) -> int | None:
        """The time with which a row counts; None for one that is in no window: without a time, or of the future."""
        if row.t is None or (self.time == "moment" and row.t > 10**9):
            return None
        return row.t if self.time == "t" else BASE + row.t

    def floor(self, moment: int, step: int) -> int:
        """The last multiple of a step at or before a time."""
        return moment - (moment - self.start) % step

    def right(self, rows: Iterable[Row], keys: Sequence[str], end: int, until: int, *, by_fields: bool) -> _Values:
        """The columns of each key: of the windows that end at ``end``, with the rows before ``until``."""
        lows = [(length, self.floor(end - length, step) if length else None) for length, step in self.windows]
        names = {length: self._name(length) for length, _ in lows}
        none = {f"rows_{name}": 0 for name in names.values()} | {f"total_{name}": None for name in names.values()}
        found: dict[Any, dict[str, int | None]] = {}
        for row in rows:
            moment = self.clock(row)
            if moment is None:
                continue
            value = found.setdefault(equal_key(row, keys, by_fields=by_fields), dict(none))
            for length, low in lows:
                if moment < until and (low is None or moment >= low):
                    for column, more in (("rows", 1), ("total", row.v)):
                        name = f"{column}_{names[length]}"
                        value[name] = (value[name] or 0) + more
        return found

    def _name(self, length: int) -> str:
        if not length:
            return LIFETIME
        return str(length) if self.time == "t" else f"{length}_seconds"


_Values = dict[Any, dict[str, int | None]]


class _End(NamedTuple):
    """What a reader is asked for, and what that means: where windows end, and before which time rows count."""

    at: Any
    end: int
    until: int


def differences(
    url: str,
    name: str,
    keys: Sequence[str],
    declared: Sequence[tuple[Rolling, int]],
    rows: Sequence[Row],
    chance: random.Random,
    *,
    by_fields: bool,
) -> Iterator[str]:
    """What readers get of a state that is not what the rows come to.

    ``declared`` are the windows that it ever had, each with its lag, the present ones last; ``rows`` those that count.
    """
    rolling, _ = declared[-1]
    times = sorted(moment for row in rows if (moment := rolling.clock(row)) is not None)
    try:
        reader = open_reader(url, name)
    except StateNotFoundError:
        if times:
            yield "there is no state"
        return
    with reader:
        record = reader.ledger().rolling
        if record is None:
            yield "its ledger has no rolling windows"
            return
        kept = record.definition
        unit, scale = kept.unit // rolling.scale, rolling.scale
        if unit not in {one.unit for one, _ in declared}:
            yield f"its unit is {unit}"
        horizon = None if record.horizon == NEVER else kept.time(record.horizon) // scale
        shown = reader.watermark().time
        mark = None if shown is None else _number(shown) // scale
        yield from _limits(declared, times, mark, horizon)
        ends = list(_ends(rolling, unit, times, mark, horizon, chance))
        for at, end, until in ends:
            right = rolling.right(rows, keys, end, until, by_fields=by_fields)
            found = list(reader.scan(at=at))
            asked = "now" if at is None else f"at {at}"
            yield from _compared(asked, keys, found, right, exact=rolling.has_lifetime)
        if "u" in keys or not ends:
            return
        timed = [one for one in ends if one.at not in (None, "watermark")]
        for key, _ in list(reader.scan(at=timed[-1].at))[:3] if timed else ():
            asked_key = tuple(map(plain, key))
            answers = reader.multi_get([key] * len(timed), at=[one.at for one in timed])
            for (at, end, until), answer in zip(timed, answers, strict=True):
                right = rolling.right(rows, keys, end, until, by_fields=by_fields)
                if answer != right.get(asked_key):
                    yield f"at {at}, asked for with other times, {key} has {answer}, right is {right.get(asked_key)}"


def _number(shown: Any) -> int:
    return shown if isinstance(shown, int) else number_of(shown)


def _limits(
    declared: Sequence[tuple[Rolling, int]], times: Sequence[int], mark: int | None, horizon: int | None
) -> Iterator[str]:
    """The watermark and the horizon are those of the rows; lag and retention may have changed in between."""
    if not times:
        if mark is not None:
            yield f"its watermark is {mark}, and no row has a time"
        return
    lags, retentions = [lag for _, lag in declared], [one.retention for one, _ in declared]
    least, most = times[-1] - max(lags), times[-1] - min(lags)
    can_be_less = any(one.ahead is not None for one, _ in declared)
    if mark is None or mark > most or (mark < least and not can_be_less):
        yield f"its watermark is {mark}, right is {least} to {most}"
    elif horizon is not None and horizon > mark - min(retentions):
        yield f"its horizon is {horizon}, and at most {mark - min(retentions)} is promised"


def _ends(
    rolling: Rolling,
    unit: int,
    times: Sequence[int],
    mark: int | None,
    horizon: int | None,
    chance: random.Random,
) -> Iterator[_End]:
    """What is asked: the watermark, now, and times from the horizon on."""
    if not times:
        return
    newest = times[-1]
    now = newest if rolling.time == "t" else int(time.time())
    end = max(rolling.floor(now, unit), now if horizon is None else horizon) if rolling.time == "t" else now
    end = rolling.floor(end, unit)
    yield _End(None, end, end + unit)
    if mark is not None:
        end = rolling.floor(mark, unit)
        yield _End("watermark", end, end)
    first = times[0] - 5 if horizon is None else horizon
    near = times[max(0, len(times) - 4)]  # one row may be far ahead
    drawn = [chance.randint(first, max(first, near + 20)) for _ in range(_ENDS - 3)]
    for asked in (first, first + 2 * unit - 1, max(first, newest + unit), *drawn):
        end = rolling.floor(asked, unit)
        yield _End(time_of(asked * rolling.scale, "bigint" if rolling.time == "t" else "timestamp"), end, end)


def _compared(asked: str, keys: Sequence[str], found: Sequence[Any], right: _Values, *, exact: bool) -> Iterator[str]:
    """``exact``: each row counts. Else a key may be there or not whose rows are all too old for the windows."""

    def counts(value: dict[str, int | None]) -> bool:
        return exact or any(value.values())

    if "u" in keys:  # how a struct is shown is not asked here
        both = [
            sorted([*map(str, sorted(value.items()))] for value in values if counts(value))
            for values in ((value for _, value in found), right.values())
        ]
        if both[0] != both[1]:
            yield f"{asked} its values are {both[0]}, right is {both[1]}"
        return
    shown = {tuple(map(plain, key)): value for key, value in found}
    if len(shown) < len(found):
        yield f"{asked} a key came twice"
    wrong = [
        key
        for key in {**right, **shown}
        if shown.get(key) != right.get(key) and any(counts(side[key]) for side in (shown, right) if key in side)
    ]
    names = {name for value in right.values() for name in value}
    if any(set(value) != names for value in shown.values()):
        wrong = wrong or [next(iter(shown))]
    if wrong:
        key = wrong[0]
        yield (
            f"{asked} it has {shown.get(key)} for the key {key}, right is {right.get(key)}; "
            f"{len(wrong)} of {len(right)} keys are wrong"
        )
