"""The rows of one key, folded in plain Python, by aggregators of a user's own or where rows come one by one."""

from __future__ import annotations

import copy
import datetime as dt
from decimal import Decimal
from typing import Any

from mapstate.aggregators.aggregator import Aggregator, CombinerAggregator, NativeCombiner, Row
from mapstate.errors import AggregatorError, MapStateError, SerializationError, cut, shown
from mapstate.serializers.value_types import struct_parts

__all__ = ["Folding", "called", "check_type"]


class Folding:
    """One aggregator taking the rows of one key in plain Python.

    A combiner folds as it goes. A reducer needs what is stored first: its rows wait, at most as many as
    `rows_waiting` tells, until `onto` or `settle` brings it.
    """

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._value: Any = None
        self._rows: list[Row] = []
        self._settled = False

    def add(self, row: Row) -> None:
        """Takes one row."""
        one = self._aggregator
        if isinstance(one, CombinerAggregator):
            with_row = called(one, one.init, row)
            self._value = with_row if self._value is None else called(one, one.combine, self._value, with_row)
        else:
            self._rows.append(row)

    @property
    def rows_waiting(self) -> int:
        """Rows held back until the stored value is known."""
        return len(self._rows)

    def settle(self, base: Any) -> None:
        """Tells a reducer what is stored, before the key's last row: the rows so far need not wait."""
        if isinstance(self._aggregator, CombinerAggregator):
            return  # holds no rows
        self._value = self._reduce(self._value if self._settled else copy.deepcopy(base))
        self._settled = True

    def partial(self) -> Any:
        """What `Fields.combine_all` takes: for a built-in aggregator the bare value, else this."""
        return self._value if isinstance(self._aggregator, NativeCombiner) else self

    def onto(self, base: Any) -> Any:
        """The new value, from the stored one."""
        one = self._aggregator
        # A copy: who changes it in place must not change what the record keeps as the value before.
        base = copy.deepcopy(base)
        if not isinstance(one, CombinerAggregator):
            return self._reduce(self._value if self._settled else base)
        if base is None:
            return self._value
        return base if self._value is None else called(one, one.combine, base, self._value)

    def _reduce(self, acc: Any) -> Any:
        one: Any = self._aggregator
        rows, self._rows = self._rows, []
        for row in rows:
            if acc is None:  # nothing stored, or removed by a row before
                acc = called(one, one.init)
            acc = called(one, one.reduce, acc, row)
        return acc


def called(one: Aggregator, method: Any, *args: Any) -> Any:
    """Calls a user's aggregator; what it raises becomes an AggregatorError that names it."""
    try:
        return method(*args)
    except MapStateError:
        raise
    except Exception as error:
        raise AggregatorError(
            f"{one}.{method.__name__} raised {type(error).__name__}: {cut(error)}; nothing of this batch counts",
            aggregator=one.describe(),
        ) from error


_EXACT_TYPES: dict[str, type] = {
    "double": float,
    "float": float,
    "string": str,
    "boolean": bool,
    "date": dt.date,
    "binary": bytes,
}


def check_type(value: Any, name: str, who: Any) -> Any:
    """The value, if it is one of the type that a user's aggregator says. Raises SerializationError."""
    if value is None or name == "any" or _is_of(value, name):
        return value
    raise SerializationError(
        f"{who} says that it accumulates {name}, and came to {shown(value)} ({type(value).__name__}): stored so, it "
        "could not be read again",
        type=name,
    )


def _is_of(value: Any, name: str) -> bool:
    if name.startswith("struct<"):
        parts = struct_parts(name)
        return (
            type(value) is tuple
            and len(value) == len(parts)
            and all(one is None or _is_of(one, part) for one, part in zip(value, parts, strict=True))
        )
    if name.startswith("decimal("):
        return type(value) is Decimal and value.is_finite()
    if name.startswith("timestamp"):
        return type(value) is dt.datetime and (value.tzinfo is None) == (name == "timestamp_ntz")
    if name in _EXACT_TYPES:
        return type(value) is _EXACT_TYPES[name]
    return type(value) is int and -(1 << 63) <= value < 1 << 63
