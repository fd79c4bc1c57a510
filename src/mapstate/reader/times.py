"""Times as readers give and get them, and how far a stream is."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress
from operator import index
from typing import Any, NamedTuple

from mapstate.errors import UsageError
from mapstate.protocol.windows import NEVER, WindowCommit
from mapstate.schema import number_of, time_of

Time = dt.datetime | int
"""A datetime in UTC, or a number where the times of rows are a ``bigint``."""

_EARLIEST = number_of(dt.datetime.min.replace(tzinfo=dt.UTC))
_LATEST = number_of(dt.datetime.max.replace(tzinfo=dt.UTC))


class InputMark(NamedTuple):
    """One input of a stream: its latest time, and when rows last came, by the driver's clock; None before any."""

    latest: Time | None
    at: dt.datetime | None


class Watermark(NamedTuple):
    """The watermark of a state and the times of its inputs, as of the last batch.

    ``time``    no window that ends here or before changes any more; None before the first row
    ``inputs``  by name; a stream with one input has ``""``
    """

    time: Time | None
    inputs: dict[str, InputMark]


def watermark_of(done: WindowCommit, mark: int, kind: str) -> Watermark:
    """The inputs after a batch, and the final mark, of a state whose first key column is of the type ``kind``."""
    inputs = {
        name: InputMark(
            shown_time(known.latest, kind),
            None if known.at == 0 else dt.datetime.fromtimestamp(known.at / 1e6, dt.UTC),
        )
        for name, known in done.inputs.items()
    }
    return Watermark(shown_time(mark, kind), inputs)


def number_of_caller(time: Any, kind: str, state: str) -> int:
    """A time that a caller gives for a state whose first key column is of the type ``kind``. Raises UsageError."""
    if kind == "bigint":
        with suppress(TypeError):  # of numpy's numbers, and its arrays of one, some have an index
            if not isinstance(time, bool) and not hasattr(time, "__len__"):
                return index(time)
        raise UsageError(f"the times of state {state!r} are numbers (bigint), not {time!r}. Nothing was read.")
    if isinstance(time, dt.datetime) and time.tzinfo is not None:
        return number_of(time)
    raise UsageError(
        f"the times of state {state!r} are datetimes with a time zone, such as datetime(2026, 11, 22, 10, tzinfo=UTC), "
        f"not {time!r}. Nothing was read."
    )


def shown_time(number: int, kind: str) -> Time | None:
    """A time of a state whose first key column is of the type ``kind``; None before any."""
    return None if number == NEVER else clamped(number, kind)


def clamped(number: int, kind: str) -> Time:
    """The time, or the nearest that a datetime can hold: a window with rows of the year 9999 may end later."""
    return time_of(number if kind == "bigint" else min(max(number, _EARLIEST), _LATEST), kind)
