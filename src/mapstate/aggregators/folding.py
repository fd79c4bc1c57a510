"""Fold the rows of one key in plain Python: for a user's own aggregators, and for rows that come one at a time."""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from mapstate.aggregators.aggregator import Aggregator, CombinerAggregator, NativeCombiner, Row
from mapstate.aggregators.sums import MAX_LONG, MIN_LONG, Count, Sum, overflow
from mapstate.errors import AggregatorError, MapStateError, SerializationError, cut, shown
from mapstate.serializers.value_types import item_type, struct_parts


class Folding:
    """Folds the rows of one key in plain Python; a reducer's rows wait for the stored value (`onto`, `settle`)."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._value: Any = None
        self._rows: list[Row] = []
        self.is_settled = False

    def add(self, row: Row) -> None:
        own = self._aggregator
        if isinstance(own, CombinerAggregator):
            with_row = called(own, own.init, row)
            self._value = with_row if self._value is None else called(own, own.combine, self._value, with_row)
        else:
            self._rows.append(row)

    @property
    def rows_waiting(self) -> int:
        return len(self._rows)

    def settle(self, base: Any) -> None:
        """Give a reducer the stored value before the key's last row, so that no row waits."""
        if isinstance(self._aggregator, CombinerAggregator):
            return  # holds no rows
        self._value = self._reduce(self._value if self.is_settled else copy.deepcopy(base))
        self.is_settled = True

    def partial(self) -> Any:
        """The partial for `Fields.combine_all`: a built-in aggregator's bare value, else this object."""
        return self._value if isinstance(self._aggregator, NativeCombiner) else self

    def onto(self, base: Any) -> Any:
        own = self._aggregator
        # A copy, because the record keeps the base as the value before, and an aggregator may change it in place.
        base = copy.deepcopy(base)
        if not isinstance(own, CombinerAggregator):
            return self._reduce(self._value if self.is_settled else base)
        if base is None:
            return self._value
        return base if self._value is None else called(own, own.combine, base, self._value)

    def _reduce(self, acc: Any) -> Any:
        own: Any = self._aggregator
        rows, self._rows = self._rows, []
        for row in rows:
            if acc is None:  # the key is absent, or an earlier row removed it
                acc = called(own, own.init)
            acc = called(own, own.reduce, acc, row)
        return acc


def called(who: Aggregator, method: Any, *args: Any) -> Any:
    """Call a method of a user's aggregator. Raises its errors as an AggregatorError that names it."""
    try:
        return method(*args)
    except MapStateError:
        raise
    except Exception as error:
        raise AggregatorError(
            f"{who}.{method.__name__} raised {type(error).__name__}: {cut(error)}; a read returns nothing, and a "
            "batch is not committed",
            aggregator=who.describe(),
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
    """Return the value if it has the type that a user's aggregator declares. Raises SerializationError."""
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
            and all(item is None or _is_of(item, part) for item, part in zip(value, parts, strict=True))
        )
    if name.startswith("array<"):
        inside = item_type(name)
        return type(value) is list and all(item is None or _is_of(item, inside) for item in value)
    if name.startswith("decimal("):
        return type(value) is Decimal and value.is_finite()
    if name.startswith("timestamp"):
        return type(value) is dt.datetime and (value.tzinfo is None) == (name == "timestamp_ntz")
    if name in _EXACT_TYPES:
        return type(value) is _EXACT_TYPES[name]
    return name == "any" or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def folded(aggregator: Aggregator, kind: str, parts: Sequence[Any]) -> Any:
    """The parts of one field that are not null, combined; null without one.

    Raises ValueOverflowError and AggregatorError.
    """
    there = [part for part in parts if part is not None] if None in parts else parts
    if len(there) < 2:
        return there[0] if there else None
    if adds_up(aggregator, kind):
        return checked_sum(aggregator, sum(there))
    if isinstance(aggregator, NativeCombiner):
        return aggregator.fold(there)
    if not isinstance(aggregator, CombinerAggregator):
        raise TypeError(f"{aggregator} is no combiner")
    value = None  # of rows that have removed each other, too: see `Folding.add`
    for part in there:
        # Copies, because the parts stay in the record, and an aggregator may change them in place.
        both = copy.deepcopy((value, part))
        value = part if value is None else check_type(called(aggregator, aggregator.combine, *both), kind, aggregator)
    return value


def adds_up(aggregator: Aggregator, kind: str) -> bool:
    """Whether its values are integers, and are joined by their sum."""
    return kind == "bigint" and type(aggregator) in (Count, Sum)


def checked_sum(aggregator: Any, total: int) -> int:
    """The sum. Raises ValueOverflowError if it has more than 64 bits."""
    if not MIN_LONG <= total <= MAX_LONG:
        raise overflow(aggregator)
    return total
