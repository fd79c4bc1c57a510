"""The fields of one state: several aggregators worked as one.

A state's *value*, as maps and serializers see it: with one field, what that field's aggregator
accumulates, bare, so that a count is stored as ``3``; with several, a tuple of those. A bare value
that is null is ``(None,)``, because None means that the key is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mapstate.aggregators.aggregator import Aggregator, NativeCombiner
from mapstate.aggregators.folding import Folding, called, check_type
from mapstate.aggregators.retraction import RetractableRows
from mapstate.schema import Field

__all__ = ["NULL", "Fields", "shown_as"]

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
            return [called(self.aggregators[0], self.aggregators[0].result, _bare(value))]
        return [called(one, one.result, own) for one, own in zip(self.aggregators, value, strict=True)]

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


def shown_as(result: Any, *, is_json: bool) -> Any:
    """A result as a column holds it: text where its type is no Spark type."""
    return msgspec.json.encode(result).decode() if is_json and result is not None else result


def _bare(value: Any) -> Any:
    return None if value == NULL else value
