"""The schema of a state: what its keys, its fields and its ledger have in common."""

from __future__ import annotations

import datetime as dt
from typing import Literal, NamedTuple

StateType = Literal["non-transactional", "transactional", "opaque"]


OnNewOwner = Literal["refuse", "adopt", "adopt_unchecked", "reset"]


OnGap = Literal["refuse", "accept"]


KeyOrder = Literal["hash", "key"] | int


class Field(NamedTuple):
    """One aggregate of the state: its name, its aggregator's name and the type it accumulates."""

    name: str
    aggregator: str
    type: str


class KeyField(NamedTuple):
    """One grouping column: its name, and its Spark type as ``DataType.simpleString()`` writes it."""

    name: str
    type: str


TimeType = str
"""The Spark type of a row's time: ``timestamp`` or ``bigint``."""

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


def number_of(time: dt.datetime | int) -> int:
    """A time as microseconds since 1970, or as it is: the inverse of `time_of`."""
    return time if isinstance(time, int) else (time - _EPOCH) // _MICROSECOND


def time_of(number: int, time: TimeType) -> dt.datetime | int:
    """A time as a key column of its type holds it."""
    return number if time == "bigint" else _EPOCH + number * _MICROSECOND


def time_text(number: int, time: TimeType) -> str:
    """A time for people; also one that a datetime cannot hold."""
    if time == "bigint":
        return str(number)
    try:
        return (_EPOCH + number * _MICROSECOND).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError:
        return f"{number} microseconds after 1970"


def span_text(number: int, time: TimeType) -> str:
    """A duration for people."""
    return str(number) if time == "bigint" else f"{number / 1_000_000:.6f}".rstrip("0").rstrip(".") + " s"
