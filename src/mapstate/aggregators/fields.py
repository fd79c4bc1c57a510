"""The fields of one state: its aggregators, applied together.

Maps and serializers see a state's *value*. With one field it is the aggregator's bare value, so a count is stored as
``3``. With several fields it is a tuple of them. A bare null is ``(None,)``, because None means an absent key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import Any

from mapstate.aggregators.aggregator import Aggregator, NativeCombiner
from mapstate.aggregators.folding import Folding, called, check_type
from mapstate.aggregators.retraction import RetractableRows
from mapstate.schema import Field
from mapstate.values import column_type, in_column

NULL = (None,)
"""The value of a key that exists, if its single field is null."""


NO_ROWS: Any = object()
"""The partial of a key that goes, see `mapstate.aggregators.recounted`. Made and compared in one task."""


class Fields:
    """The aggregators in the order of the ledger's fields. The driver makes it, executors use it."""

    def __init__(self, fields: Sequence[Field], aggregators: Mapping[str, Aggregator]) -> None:
        self.fields = tuple(fields)
        self.aggregators = [aggregators[field.name] for field in fields]
        self.native = all(isinstance(aggregator, NativeCombiner) for aggregator in self.aggregators)
        self._single = len(self.fields) == 1
        of_rows = (i for i, aggregator in enumerate(self.aggregators) if isinstance(aggregator, RetractableRows))
        self._rows_at = next(of_rows, None)

    @cached_property
    def types(self) -> list[str]:
        """The Spark type of each `result`, "any" for one without."""
        pairs = zip(self.aggregators, self.fields, strict=True)
        return [aggregator.result_type(field.type) for aggregator, field in pairs]

    def from_columns(self, columns: list[list[list[Any]]]) -> list[Any]:
        """One partial per key of a chunk, from each field's native columns."""
        assembled = [
            aggregator.assemble(column)
            for aggregator, column in zip(self.aggregators, columns, strict=True)
            if isinstance(aggregator, NativeCombiner)
        ]
        return assembled[0] if self._single else list(zip(*assembled, strict=True))

    def combine_all(self, bases: list[Any], partials: list[Any]) -> list[Any]:
        """The new values of a chunk, from the stored values and the batch's partials.

        A key whose `RetractableRows` reach 0 is removed. Raises ValueOverflowError, and AggregatorError if a user's
        aggregator raised.
        """
        values = self._combined(bases, partials)
        i = self._rows_at
        if i is None:
            return values
        return [None if (value if self._single else value[i]) == 0 else value for value in values]

    def _combined(self, bases: list[Any], partials: list[Any]) -> list[Any]:
        if self._single:
            single = self.aggregators[0]
            if not isinstance(single, NativeCombiner):
                return [self._join(0, _bare(base), new) for base, new in zip(bases, partials, strict=True)]
            if NULL in bases:
                bases = [_bare(base) for base in bases]
            values = single.combine_all(bases, partials)
            return [NULL if value is None else value for value in values] if None in values else values
        columns = []
        for i, aggregator in enumerate(self.aggregators):
            old = [None if base is None else base[i] for base in bases]
            new = [partial[i] for partial in partials]
            if isinstance(aggregator, NativeCombiner):
                columns.append(aggregator.combine_all(old, new))
            else:
                columns.append([self._join(i, a, b) for a, b in zip(old, new, strict=True)])
        return list(zip(*columns, strict=True))

    def _join(self, at: int, base: Any, partial: Any) -> Any:
        aggregator = self.aggregators[at]
        if isinstance(partial, Folding):
            return check_type(partial.onto(base), self.fields[at].type, aggregator)
        raise TypeError(f"{aggregator} is not native: its partials are Foldings")

    def result(self, value: Any) -> list[Any] | None:
        """The results of a value, field by field; None for an absent key."""
        if value is None:
            return None
        if self._single:
            return [called(self.aggregators[0], self.aggregators[0].result, _bare(value))]
        return [
            called(aggregator, aggregator.result, acc) for aggregator, acc in zip(self.aggregators, value, strict=True)
        ]

    def named(self, values: Sequence[Any]) -> list[dict[str, Any] | None]:
        """The `result` of each value by the fields' names, None for an absent key. One pass."""
        names = [field.name for field in self.fields]
        if self._converts():
            return [
                None if value is None else dict(zip(names, self.result(value) or (), strict=True)) for value in values
            ]
        if not self._single:
            each = map(dict, map(zip, repeat(names), [value for value in values if value is not None]))
            return [None if value is None else next(each) for value in values]
        name = names[0]
        named: list[dict[str, Any] | None] = [None if value is None else {name: value} for value in values]
        return [result and {name: _bare(result[name])} for result in named] if NULL in values else named

    def shown(self, value: Any) -> list[Any]:
        """The `result` as new values show it: nulls for a removed key, JSON for a value without a Spark type."""
        results = self.result(value) or [None] * len(self.fields)
        return [in_column(part, kind) for kind, part in zip(self.types, results, strict=True)]

    def shown_all(self, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Each value as `shown` gives it; none of them is an absent key's. One pass."""
        if any(column_type(kind) != kind for kind in self.types):
            return [self.shown(value) for value in values]
        return self.results(values)

    def results(self, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """The `result` of each value; none of them is an absent key's. One pass."""
        if self._converts():
            return [self.result(value) or () for value in values]
        return [(_bare(value),) for value in values] if self._single else values

    def columns(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """`results`, as a column for each field."""
        if self._single and not self._converts():
            return [[_bare(value) for value in values] if NULL in values else values]
        return [*zip(*self.results(values), strict=True)] or [()] * len(self.fields)

    def _converts(self) -> bool:
        return any(type(aggregator).result is not Aggregator.result for aggregator in self.aggregators)

    def with_presence(self, value: Any, before: Any) -> list[Any]:
        """The value before as `shown` gives it, then whether the key existed before, and whether it exists now."""
        return [*self.shown(before), before is not None, value is not None]

    def split(self, value: Any) -> list[Any]:
        """The parts of a value, one per aggregator."""
        if value is None:
            return [None] * len(self.fields)
        return [_bare(value)] if self._single else list(value)

    def start(self) -> list[Folding]:
        """Empty partials of one key, which take its rows one at a time."""
        return [getattr(aggregator, "folding", partial(Folding, aggregator))() for aggregator in self.aggregators]

    def finish(self, foldings: list[Folding]) -> Any:
        """The partial of one key, from the foldings of `start`."""
        partials = [folding.partial() for folding in foldings]
        return partials[0] if self._single else tuple(partials)


def _bare(value: Any) -> Any:
    return None if value == NULL else value
