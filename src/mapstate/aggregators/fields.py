"""The fields of one state: several aggregators worked as one.

A state's *value*, as maps and serializers see it: with one field, what that field's aggregator
accumulates, bare, so that a count is stored as ``3``; with several, a tuple of those. A bare value
that is null is ``(None,)``, because None means that the key is absent.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mapstate.aggregators.aggregator import Aggregator, CombinerAggregator, NativeCombiner, Row
from mapstate.aggregators.extremes import First, Last
from mapstate.aggregators.retraction import BY_STORED_NAME, RetractableRows
from mapstate.aggregators.sums import Avg
from mapstate.errors import AggregatorError, MapStateError, cut
from mapstate.schema import Field
from mapstate.serializers.value_types import check_type

__all__ = ["NULL", "Fields", "Folding", "results_of", "shown_as"]

NULL = (None,)
"""A single field's value where it is there and null."""


class Fields:
    """Aggregators in the order of the ledger's fields. Made on the driver, works on executors."""

    def __init__(self, fields: Sequence[Field], aggregators: Mapping[str, Aggregator]) -> None:
        self.fields = tuple(fields)
        self.aggregators = [aggregators[field.name] for field in fields]
        self.native = all(isinstance(one, NativeCombiner) for one in self.aggregators)
        self._single = len(self.fields) == 1
        self._rows_at = next((at for at, one in enumerate(self.aggregators) if isinstance(one, RetractableRows)), None)

    def from_columns(self, columns: list[list[list[Any]]]) -> list[Any]:
        """Partials of a chunk, one per key, from each field's native columns."""
        assembled = [
            one.assemble(own)
            for one, own in zip(self.aggregators, columns, strict=True)
            if isinstance(one, NativeCombiner)
        ]
        return assembled[0] if self._single else list(zip(*assembled, strict=True))

    def combine_all(self, bases: list[Any], partials: list[Any]) -> list[Any]:
        """New values of a chunk from what was stored and what the batch brings.

        A key whose `RetractableRows` reach 0 is removed. Raises ValueOverflowError, and AggregatorError where a user's
        aggregator raised.
        """
        values = self._combined(bases, partials)
        at = self._rows_at
        if at is None:
            return values
        return [None if (value if self._single else value[at]) == 0 else value for value in values]

    def _combined(self, bases: list[Any], partials: list[Any]) -> list[Any]:
        if self._single:
            one = self.aggregators[0]
            if not isinstance(one, NativeCombiner):
                return [self._join(0, _bare(base), new) for base, new in zip(bases, partials, strict=True)]
            if NULL in bases:
                bases = [_bare(base) for base in bases]
            values = one.combine_all(bases, partials)
            return [NULL if value is None else value for value in values] if None in values else values
        columns = []
        for at, one in enumerate(self.aggregators):
            old = [None if base is None else base[at] for base in bases]
            new = [partial[at] for partial in partials]
            if isinstance(one, NativeCombiner):
                columns.append(one.combine_all(old, new))
            else:
                columns.append([self._join(at, a, b) for a, b in zip(old, new, strict=True)])
        return list(zip(*columns, strict=True))

    def _join(self, at: int, base: Any, partial: Any) -> Any:
        one = self.aggregators[at]
        if isinstance(partial, Folding):
            return check_type(partial.onto(base), self.fields[at].type, one)
        raise TypeError(f"{one} is not native: its partials are Foldings")

    def result(self, value: Any) -> list[Any] | None:
        """What a reader sees of a value, field by field; None for an absent key."""
        if value is None:
            return None
        if self._single:
            return [_call(self.aggregators[0], self.aggregators[0].result, _bare(value))]
        return [_call(one, one.result, own) for one, own in zip(self.aggregators, value, strict=True)]

    def named(self, values: Sequence[Any]) -> list[dict[str, Any] | None]:
        """What a reader sees of each value: `result` by the fields' names, None for an absent key. One pass."""
        shows = [None if type(one).result is Aggregator.result else one for one in self.aggregators]
        names = [field.name for field in self.fields]
        if any(shows):
            return [
                None if value is None else dict(zip(names, self.result(value) or (), strict=True)) for value in values
            ]
        if not self._single:
            return [None if value is None else dict(zip(names, value, strict=True)) for value in values]
        name = names[0]
        named: list[dict[str, Any] | None] = [None if value is None else {name: value} for value in values]
        return [one and {name: _bare(one[name])} for one in named] if NULL in values else named

    def shown(self, value: Any) -> list[Any]:
        """`result` as new values show it: nulls for a removed key, JSON for what has no Spark type."""
        results = self.result(value) or [None] * len(self.fields)
        return [shown_as(one, is_json=field.type == "any") for field, one in zip(self.fields, results, strict=True)]

    def with_presence(self, value: Any, before: Any) -> list[Any]:
        """The value before as `shown` has it, then whether there was one, and whether there is one now."""
        return [*self.shown(before), before is not None, value is not None]

    def split(self, value: Any) -> list[Any]:
        """A value field by field, as the aggregators take it."""
        if value is None:
            return [None] * len(self.fields)
        return [_bare(value)] if self._single else list(value)

    def start(self) -> list[Folding]:
        """Empty partials of one key, to take rows one by one."""
        return [Folding(one) for one in self.aggregators]

    def finish(self, foldings: list[Folding]) -> Any:
        """The partial of one key, from what `start` gave."""
        done = [one.partial() for one in foldings]
        return done[0] if self._single else tuple(done)


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
            with_row = _call(one, one.init, row)
            self._value = with_row if self._value is None else _call(one, one.combine, self._value, with_row)
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
        return base if self._value is None else _call(one, one.combine, base, self._value)

    def _reduce(self, acc: Any) -> Any:
        one: Any = self._aggregator
        rows, self._rows = self._rows, []
        for row in rows:
            if acc is None:  # nothing stored, or removed by a row before
                acc = _call(one, one.init)
            acc = _call(one, one.reduce, acc, row)
        return acc


def shown_as(result: Any, *, is_json: bool) -> Any:
    """A result as a column holds it: text where its type is no Spark type."""
    return msgspec.json.encode(result).decode() if is_json and result is not None else result


def _bare(value: Any) -> Any:
    return None if value == NULL else value


def _call(one: Aggregator, method: Any, *args: Any) -> Any:
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


class _AsStored(Aggregator):
    """Stands for a user's aggregator where only the ledger is at hand: shows what is stored."""


_SHOWN_APART: dict[str, type[Aggregator]] = {"Avg": Avg, "First": First, "Last": Last, **BY_STORED_NAME}
"""The aggregators that show something else than they store, by the names that ledgers hold."""


def results_of(fields: Sequence[Field], aggregators: Mapping[str, Aggregator]) -> Fields:
    """Fields for a reader, who has the ledger but not the job.

    Those built-in aggregators that show something else than they store are known by name and type; a
    user's own show what they accumulated, unless ``aggregators`` brings them.
    """
    known: dict[str, Aggregator] = {}
    for field in fields:
        name = field.aggregator.partition("(")[0]
        kind: Any = _SHOWN_APART.get(name)
        if field.name in aggregators:
            known[field.name] = aggregators[field.name]
        elif kind is not None and field.type.startswith(("struct<sum:", "struct<by:")):
            known[field.name] = kind.__new__(kind)
        else:
            known[field.name] = _AsStored()
    return Fields(fields, known)
