"""Windows of rows: what a key keeps of its windows by count, as one field of a plain state.

The value is ``(rows, panes, fired)``: the number of the key's rows, its open panes with their starts, and the windows
that its last batch has fired. Panes are those of `mapstate.protocol.windows`, with a row's number for its time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from mapstate.aggregators.aggregator import Aggregator, CombinerAggregator, ReducerAggregator, Row
from mapstate.aggregators.folding import Folding, called, check_type, folded
from mapstate.protocol.windows import Panes
from mapstate.schema import Field
from mapstate.values import item_type, struct_fields, struct_type


class CountWindows(ReducerAggregator):
    """The aggregates of windows of rows. ``read`` names the columns that come with each row."""

    def __init__(
        self,
        length: int,
        slide: int,
        fields: Sequence[Field],
        aggregators: Mapping[str, Aggregator],
        read: Sequence[str],
    ) -> None:
        self._panes = Panes(length, slide, -length)
        self._fields = tuple(fields)
        self._aggregators: tuple[Any, ...] = tuple(aggregators[field.name] for field in fields)
        self._read = tuple(read)

    @classmethod
    def stored(cls, field: Field, aggregators: Mapping[str, Aggregator], fields: Sequence[Field]) -> Self:
        length, slide, _ = _described(field.aggregator)
        return cls(length, slide, fields, aggregators, ())

    @staticmethod
    def fields_of(field: Field) -> list[Field] | None:
        """The aggregates of a ledger's field; None if it has no windows by count."""
        if not field.aggregator.startswith("CountWindows(") or not field.type.startswith("struct<rows:bigint,panes:"):
            return None
        types = item_type(dict(struct_fields(field.type))["panes"])
        described = _described(field.aggregator)[2]
        kinds = [kind for _, kind in struct_fields(types)][1:]
        return [Field(name, described, kind) for (name, described), kind in zip(described.items(), kinds, strict=True)]

    def columns(self) -> Sequence[str]:
        return self._read

    def bind(self, columns: Mapping[str, str]) -> str:  # noqa: ARG002  the fields are bound
        held = "".join(f",v{i}:{field.type}" for i, field in enumerate(self._fields))
        return f"struct<rows:bigint,panes:array<struct<start:bigint{held}>>,fired:array<struct<end:bigint{held}>>>"

    def describe(self) -> str:
        """See `Aggregator.describe`. Windows of another length are another field."""
        described = json.dumps({field.name: field.aggregator for field in self._fields})
        return f"CountWindows({self._panes.length}, {self._panes.slide}, {described})"

    def folding(self) -> Folding:
        return _BatchFolding(self)

    def init(self) -> Any:
        return 0, [], []

    def reduce(self, acc: Any, row: Row) -> Any:
        number, panes, fired = acc
        start = self._panes.pane(number)
        if start is not None:
            if not panes or panes[-1][0] != start:
                panes.append((start, *(None for _ in self._fields)))
            _, *held = panes[-1]
            panes[-1] = (start, *map(self._with_row, self._fields, self._aggregators, held, [row] * len(held)))
        number += 1
        if number % self._panes.slide == 0:
            first = number - self._panes.length
            held = [pane for pane in panes if pane[0] >= first]
            fired.append((number, *self._joined([values for _, *values in held])))
            panes = [pane for pane in panes if self._panes.last_end(pane[0]) > number]
        return number, panes, fired

    @staticmethod
    def _with_row(field: Field, aggregator: Any, held: Any, row: Row) -> Any:
        if isinstance(aggregator, CombinerAggregator):
            value = called(aggregator, aggregator.init, row)
            value = value if held is None else called(aggregator, aggregator.combine, held, value)
        else:
            value = called(
                aggregator, aggregator.reduce, called(aggregator, aggregator.init) if held is None else held, row
            )
        return check_type(value, field.type, aggregator)

    def _joined(self, panes: Sequence[Sequence[Any]]) -> list[Any]:
        return [
            folded(aggregator, field.type, values)
            for aggregator, field, *values in zip(self._aggregators, self._fields, *panes, strict=True)
        ]

    def result(self, value: Any) -> Any:
        """``rows``, the windows that the last batch has ``fired``, and those that are ``open``, by end.

        A window has ``window_start``, ``window_end`` and the aggregates. ``open`` is None where windows slide and the
        reader lacks an aggregator of the user's own.
        """
        if value is None:
            return None
        number, panes, fired = value
        ended = [self._window(end, held) for end, *held in fired]
        return {"rows": number, "fired": ended, "open": self._open(number, panes)}

    def _open(self, number: int, panes: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]] | None:
        if self._panes.length > self._panes.slide and not all(
            isinstance(aggregator, CombinerAggregator) for aggregator in self._aggregators
        ):
            return None
        ends = sorted({end for start, *_ in panes for end in self._panes.ends(start) if end > number})
        windows, joined, at = [], [None for _ in self._fields], len(panes)
        for end in reversed(ends):  # the last one has the fewest panes, and each other one those and more
            while at and panes[at - 1][0] >= end - self._panes.length:
                at -= 1
                joined = self._joined([panes[at][1:], joined])
            windows.append(self._window(end, joined))
        return windows[::-1]

    def _window(self, end: int, held: Sequence[Any]) -> dict[str, Any]:
        shown: dict[str, Any] = {"window_start": max(0, end - self._panes.length), "window_end": end}
        for field, aggregator, value in zip(self._fields, self._aggregators, held, strict=True):
            shown[field.name] = called(aggregator, aggregator.result, value)
        return shown

    def result_type(self, value_type: str) -> str:  # noqa: ARG002  the fields are bound
        held = [
            (field.name, aggregator.result_type(field.type))
            for field, aggregator in zip(self._fields, self._aggregators, strict=True)
        ]
        window = f"array<{struct_type([('window_start', 'bigint'), ('window_end', 'bigint'), *held])}>"
        return struct_type([("rows", "bigint"), ("fired", window), ("open", window)])


class _BatchFolding(Folding):
    """The windows that the batch before has fired are not this batch's."""

    def _reduce(self, acc: Any) -> Any:
        return super()._reduce(acc if acc is None or self.is_settled else (*acc[:2], []))


def _described(description: str) -> tuple[int, int, dict[str, str]]:
    length, slide, fields = description.removeprefix("CountWindows(").removesuffix(")").split(", ", 2)
    return int(length), int(slide), json.loads(fields)
