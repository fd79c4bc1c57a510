"""Fold the rows of one key in plain Python: for a user's own aggregators, and for rows that come one at a time."""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Callable, Sequence
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import cache, partial
from typing import Any

from mapstate.aggregators.aggregator import Aggregator, CombinerAggregator, NativeCombiner, Row
from mapstate.aggregators.sums import MAX_LONG, MIN_LONG, Count, Sum, overflow
from mapstate.errors import AggregatorError, MapStateError, SerializationError, cut, shown
from mapstate.key_types import exactly, instant, local_time, single
from mapstate.values import item_type, struct_parts


class Folding:
    """Folds the rows of one key in plain Python; a reducer's rows wait for the stored value (`onto`, `settle`)."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._value: Any = None
        self._rows: list[Row] = []
        self.is_settled = False

    def add(self, row: Row) -> None:
        aggregator = self._aggregator
        if isinstance(aggregator, CombinerAggregator):
            value = called(aggregator, aggregator.init, row)
            self._value = value if self._value is None else called(aggregator, aggregator.combine, self._value, value)
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
        aggregator = self._aggregator
        # A copy, because the record keeps the base as the value before, and an aggregator may change it in place.
        base = copy.deepcopy(base)
        if not isinstance(aggregator, CombinerAggregator):
            return self._reduce(self._value if self.is_settled else base)
        if base is None:
            return self._value
        return base if self._value is None else called(aggregator, aggregator.combine, base, self._value)

    def _reduce(self, acc: Any) -> Any:
        aggregator: Any = self._aggregator
        rows, self._rows = self._rows, []
        for row in rows:
            if acc is None:  # the key is absent, or an earlier row removed it
                acc = called(aggregator, aggregator.init)
            acc = called(aggregator, aggregator.reduce, acc, row)
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


_FORMS: dict[str, Callable[[Any], Any]] = {
    "double": partial(exactly, float),
    "string": partial(exactly, str),
    "boolean": partial(exactly, bool),
    "date": partial(exactly, dt.date),
    "binary": partial(exactly, bytes),
    "float": single,
    "timestamp": instant,
    "timestamp_ntz": local_time,
    "any": lambda value: value,
}
_BITS = {"bigint": 64, "int": 32, "smallint": 16, "tinyint": 8}


def check_type(value: Any, name: str, who: Any) -> Any:
    """The value of a user's aggregator as its type holds it, the same wherever it leaves. Raises SerializationError.

    A float of 32 bits is rounded, a decimal gets its scale, and a timestamp is in UTC.
    """
    try:
        return None if value is None else _form(name)(value)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SerializationError(
            f"{who} says that it accumulates {name}, and came to {shown(value)} ({type(value).__name__}): stored so, "
            "it could not be read again as it was",
            type=name,
        ) from error


@cache
def _form(name: str) -> Callable[[Any], Any]:
    """What makes a value the one that its type holds. It raises for a value that the type does not hold."""
    if name.startswith("struct<"):
        parts = [_form(part) for part in struct_parts(name)]
        return lambda value: _struct(parts, value)
    if name.startswith("array<"):
        inside = _form(item_type(name))
        return lambda value: [None if item is None else inside(item) for item in exactly(list, value)]
    if name.startswith("decimal("):
        digits, scale = map(int, name[len("decimal(") : -1].split(","))
        context, unit = Context(prec=digits, traps=[InvalidOperation, Inexact]), Decimal(1).scaleb(-scale)
        return lambda value: _decimal(context, unit, value)
    if name in _BITS:
        most = 1 << _BITS[name] - 1
        return lambda value: _integer(most, value)
    return _FORMS[name]


def _struct(forms: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    if exactly(tuple, value) == (None,):
        raise ValueError("where it is the only field, nothing tells it from null")
    return tuple([None if item is None else form(item) for item, form in zip(value, forms, strict=True)])


def _decimal(context: Context, unit: Decimal, value: Any) -> Decimal:
    """With the scale of its type. The context raises for more digits, and for a value that would be rounded."""
    if not exactly(Decimal, value).is_finite():
        raise ValueError("no number")
    return context.add(context.quantize(value, unit), 0)  # 0 instead of -0


def _integer(most: int, value: Any) -> int:
    if not -most <= exactly(int, value) < most:
        raise ValueError("more bits than its type has")
    return value  # type: ignore[no-any-return]


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
