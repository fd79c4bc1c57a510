"""What a call asks of a state: the columns, and of rolling windows the time at which they end."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal, NamedTuple

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.results import joins_of, results_of
from mapstate.aggregators.tiles import Answers
from mapstate.errors import (
    DataError,
    StaleBatchError,
    UnknownColumnError,
    UsageError,
    WindowGoneError,
    of_first_key,
    shown,
    window_in_range,
)
from mapstate.keys import StoreKey
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.rolling import RollingRecord, columns_of
from mapstate.protocol.windows import NEVER, WindowCommit
from mapstate.reader.times import Time, clamped, number_of_caller


class End(NamedTuple):
    """The unit at which rolling windows end, and the one before which rows count: of now, the one after it."""

    unit: int
    until: int


At = Time | Literal["watermark"] | Sequence[Time] | End | None
"""When rolling windows end: now, at the watermark, at a time, or at a time for each key. An `End` is `end_of`."""

Ends = Sequence[End]
"""For each key where its windows end."""

_END_IN_CURSOR = re.compile(r"(-?\d{1,20})\.([01])~", re.ASCII)
_NO_LIST = (str, bytes, bytearray, memoryview, Mapping, AbstractSet)
_EARLIER_TIMES = "Ask for a later time; a longer retention= keeps earlier ones from then on."
_A_LONG_SCAN = "The scan took longer than lag and retention keep its end: give a retention= as long as a scan takes."


class RollingFields:
    """The fields that readers see of one schema with rolling windows."""

    def __init__(self, ledger: LedgerRecord, record: RollingRecord, aggregators: Mapping[str, Aggregator]) -> None:
        self._fields = ledger.fields
        self._definition = record.definition
        self._places = columns_of([field.name for field in ledger.fields], record.definition.windows)
        self._aggregators = aggregators
        self._chosen: dict[tuple[str, ...], Answers] = {}

    @property
    def names(self) -> list[str]:
        """Of all columns."""
        return [name for name, _, _ in self._places]

    @cached_property
    def all(self) -> Answers:
        """All columns. Raises UsageError for a user's own aggregator that the reader lacks."""
        return self._made(None)

    def of(self, columns: Sequence[str] | None) -> Answers:
        """Some columns; without those that there are not. Raises UsageError as `all`, for one that is asked for."""
        if columns is None:
            return self.all
        fields = self._chosen.get(tuple(columns))
        if fields is None:
            self._chosen.clear()
            fields = self._chosen[tuple(columns)] = self._made(columns)
        return fields

    def is_readable(self, name: str) -> bool:
        """Whether the reader has what a column needs."""
        i = next(i for place, i, _ in self._places if place == name)
        with suppress(UsageError):
            return bool(joins_of([self._fields[i]], self._aggregators).fields)
        return False

    def _made(self, columns: Sequence[str] | None) -> Answers:
        asked = {i for name, i, _ in self._places if columns is None or name in columns}
        joined = [field for i, field in enumerate(self._fields) if i in asked]
        joins = joins_of(joined, self._aggregators, "a rolling window joins the values of its tiles")
        known: dict[str, Aggregator] = {}
        for fields in (results_of(self._fields, self._aggregators), joins):  # the first for those that nobody asks for
            known |= zip((field.name for field in fields.fields), fields.aggregators, strict=True)
        return Answers(Fields(self._fields, known), self._definition, columns)


class Asked:
    """What one call asks. ``at`` is as `At`; now is when this is made, and stays so in a scan, unless ``now`` says it.

    Raises UsageError for columns that are no list.
    """

    def __init__(
        self, state: str, *, at: At = None, columns: Sequence[str] | None = None, now: int | None = None
    ) -> None:
        self.state = state
        self.columns = columns_given(columns)
        self._at: Any = at_given(at)
        self._now = time.time_ns() // 1000 if now is None else now
        self._scan: End | None = at if isinstance(at, End) else None
        self._grid: tuple[Any, ...] | None = None  # in which the end of a scan is counted

    def check_plain(self) -> None:
        """Raises UsageError where a time is asked of a state without rolling windows."""
        if self._at is not None:
            raise no_rolling_windows(self.state)

    def check_scan(self) -> None:
        """Raises UsageError for times that are of keys, which a scan finds in an order of its own."""
        if isinstance(self._at, list):
            raise UsageError("a scan has one time, at=; a time for each key is for multi_get. Nothing was read.")

    def ends(self, record: RollingRecord, done: WindowCommit, mark: int, keys: int) -> Ends:
        """Where the windows of each key end: after a commit, and with a final mark.

        Raises WindowGoneError, UsageError for no time, and StaleBatchError in a scan whose units are others now.
        """
        definition, at = record.definition, self._at
        grid, before = (definition.type, definition.unit, definition.offset), self._grid
        self._grid = grid
        if self._scan is not None and before not in (None, grid):
            raise StaleBatchError(
                f"state {self.state!r} was made anew with rolling windows of another unit while it was scanned. "
                "Nothing more was given out. Scan it from the start.",
                state=self.state,
            )
        if self._scan is not None:
            ends: Ends = [self._scan] * keys
        elif at is None:
            latest = [] if done.newest is None else [done.newest]
            latest += [self._now] if definition.type == "timestamp" else []
            end = max([record.horizon, *map(definition.units, latest)])
            return [End(end, end + 1)] * keys
        elif at == "watermark":
            end = max(record.horizon, definition.units(mark))  # an operator may have moved the horizon beyond it
            ends = [End(end, end)] * keys
        elif isinstance(at, list):
            check_times(at, keys)
            units = [definition.units(number_of_caller(time, definition.type, self.state)) for time in at]
            ends = [End(end, end) for end in units]
        else:
            end = definition.units(number_of_caller(at, definition.type, self.state))
            ends = [End(end, end)] * keys
        earliest = min((end for end, _ in ends), default=record.horizon)
        if earliest < record.horizon:
            kind = definition.type
            raise WindowGoneError(
                f"state {self.state!r} cannot be read as of {clamped(definition.time(earliest), kind)}: its tiles are "
                f"kept whole from {clamped(definition.time(record.horizon), kind)} on. Nothing was given out. "
                f"{_A_LONG_SCAN if at is None or isinstance(at, End) else _EARLIER_TIMES} See "
                "docs/features.md#which-times-can-be-asked-for",
                state=self.state,
            )
        return ends

    def named(self, fields: Fields, values: Sequence[Any]) -> list[Any]:
        """The values by name. Raises UnknownColumnError."""
        named: list[Any] = fields.named(values)
        if self.columns is None:
            return named
        check_columns(self.state, self.columns, [field.name for field in fields.fields])
        return [row if row is None else {name: row[name] for name in self.columns} for row in named]

    def times(self, ledger: LedgerRecord, ends: Ends | None) -> list[Time | None] | None:
        """Where windows end, as a caller gets it."""
        if ends is None or ledger.rolling is None:
            return None
        times = {end: end_time(ledger, end) for end in set(ends)}
        return [times[end] for end in ends]

    def with_end(self, cursor: str | None) -> str | None:
        """A cursor that has the end of this scan, too."""
        return f"{self._scan.unit}.{self._scan.until - self._scan.unit}~{cursor}" if cursor and self._scan else cursor

    def resumed(self, cursor: str | None) -> str | None:
        """A cursor without its end, where this scan ends unless it has a time of its own."""
        match = _END_IN_CURSOR.match(cursor or "")
        if cursor is None or match is None:
            return cursor
        if self._at in (None, "watermark"):
            unit = int(match[1])
            self._scan = End(unit, unit + int(match[2]))
        return cursor[match.end() :]

    def keep_end(self, ends: Ends | None) -> None:
        """Later pages of this scan end where this one does."""
        self._scan = ends[0] if ends else self._scan

    def answered(self, fields: RollingFields, texts: Sequence[StoreKey], values: Sequence[Any], ends: Ends) -> Any:
        """The fields and plain values of some tiles. Raises the errors of `Answers.values`, with the key."""
        answers = fields.of(self.columns)
        if self.columns is not None and len(answers.fields.fields) < len(set(self.columns)):
            check_columns(self.state, self.columns, fields.names)
        try:
            return answers.fields, answers.values(values, ends)
        except DataError as error:

            def alone(i: int) -> None:
                with window_in_range("tile", "Ask for other columns of this key, columns=[...]."):
                    answers.values([values[i]], [ends[i]])

            raise of_first_key(error, self.state, texts, alone) from error


def keys_given(keys: Any) -> list[Any]:
    """The keys that a call asks for. Raises UsageError for a text, which has keys of one letter."""
    if isinstance(keys, str | bytes):
        raise UsageError("multi_get takes a list of keys; for one key there is get")
    return list(keys)


def columns_given(columns: Any) -> list[str] | None:
    """The columns that a call asks for. Raises UsageError unless they are names in some order."""
    if columns is None:
        return None
    try:
        names: list[Any] = [None] if isinstance(columns, str | bytes) else [*columns]
    except TypeError:
        names = [None]
    if all(isinstance(name, str) for name in names):
        return names
    raise UsageError("columns is a list of field names, also for one field: columns=['visits']")


def at_given(at: Any) -> Any:
    """``at`` of a call, what has a time for each key as a list. Raises UsageError for what is neither.

    A list, a column of pandas, and an array of one dimension have an order; a set, a mapping and bytes are no times.
    """
    if at is None or isinstance(at, End) or (isinstance(at, str) and at == "watermark"):
        return at
    has_many = hasattr(at, "__len__") and hasattr(at, "__iter__")
    if has_many and (isinstance(at, _NO_LIST) or len(getattr(at, "shape", (0,))) != 1):
        raise _no_times(shown(at) if isinstance(at, str | bytes) else f"a {type(at).__name__}")
    return list(at) if has_many else at


def check_times(at: Any, keys: int) -> None:
    """Raise UsageError for a list of times unless it has one for each of so many keys."""
    if isinstance(at, list) and len(at) != keys:
        raise _no_times(f"{len(at)} times for {keys} keys")


def _no_times(given: str) -> UsageError:
    return UsageError(f"at= is a time, 'watermark', or a time for each key, not {given}. Nothing was read.")


def no_rolling_windows(state: str) -> UsageError:
    """The error where a time is asked of a state without rolling windows."""
    return UsageError(
        f"state {state!r} has no rolling windows, so at= has no meaning for it: its values are those of its last "
        "batch. Nothing was read."
    )


def end_of(ledger: LedgerRecord, at: At, *, now: int | None = None) -> End | None:
    """Where the rolling windows of all keys end, for reads of several processes; None for a state without.

    Raises WindowGoneError, and UsageError for no time.
    """
    asked = Asked(ledger.state, at=at, now=now)
    if ledger.rolling is None:
        asked.check_plain()
        return None
    return asked.ends(ledger.rolling, ledger.last_windows() or WindowCommit(), ledger.final_mark(), 1)[0]


def end_time(ledger: LedgerRecord, end: End) -> Time | None:
    """An end as a caller gets it; None for one before any row."""
    if ledger.rolling is None:
        raise no_rolling_windows(ledger.state)
    definition = ledger.rolling.definition
    time = definition.time(end.unit)
    return clamped(time, definition.type) if time > NEVER else None


def now_of(ledger: LedgerRecord, time: Time | None) -> End | None:
    """The end of an answer as of now, for later answers that shall end there; None for one before any row."""
    if ledger.rolling is None or time is None:
        return None
    definition = ledger.rolling.definition
    unit = definition.units(number_of_caller(time, definition.type, ledger.state))
    return End(unit, unit + 1)


def earliest_end(record: RollingRecord) -> Time | None:
    """The earliest time that can be asked for; None for any."""
    definition = record.definition
    return None if record.horizon == NEVER else clamped(definition.time(record.horizon), definition.type)


def shown_fields(
    ledger: LedgerRecord, aggregators: Mapping[str, Aggregator], columns: Sequence[str] | None = None
) -> Fields:
    """The fields that readers see of a state; of one with rolling windows, ``columns``. Raises UsageError as `all`."""
    if ledger.rolling is None:
        return results_of(ledger.fields, aggregators)
    return RollingFields(ledger, ledger.rolling, aggregators).of(columns).fields


def readable_fields(
    ledger: LedgerRecord, aggregators: Mapping[str, Aggregator], columns: Collection[str] | None = ()
) -> Fields:
    """`shown_fields`, without columns that need an aggregator of a user's which is lacking, but with ``columns``.

    None asks for all. Raises UsageError for a column that is asked for.
    """
    if ledger.rolling is None or columns is None:
        return shown_fields(ledger, aggregators)
    shown = RollingFields(ledger, ledger.rolling, aggregators)
    return shown.of([name for name in shown.names if name in columns or shown.is_readable(name)]).fields


def check_columns(state: str, columns: Sequence[str], known: Sequence[str]) -> None:
    """Raise UnknownColumnError for a column that is not ``known``."""
    for name in columns:
        if name not in known:
            raise UnknownColumnError(
                f"state {state!r} has no field {name!r}; it has {', '.join(known)}. Nothing was read.", column=name
            )
