"""Aggregates of one batch on an executor: what aggregators emit for each group of its rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

from mapstate.aggregators import Aggregator, CombinerAggregator, Count, Fields, NativeCombiner, Sum
from mapstate.aggregators.folding import Folding
from mapstate.errors import UsageError
from mapstate.schema import Field
from mapstate.spark.executor.task import arrow_to_python, columns_to_python
from mapstate.spark.interfaces import BatchAggregator, Collector
from mapstate.values import in_column

MARK = "__mapstate_mark"
"""A column that is true in a row that is none: with it a task runs where there are no rows."""

_WAITING = 1000


class FinishTask:
    """What is shown of the partials of each key. Picklable; run by `mapInArrow`."""

    def __init__(
        self, native: list[NativeCombiner], fields: list[Field], keys: int, widths: list[int], out: pa.Schema
    ) -> None:
        self._fields = Fields(
            fields, {field.name: aggregator for field, aggregator in zip(fields, native, strict=True)}
        )
        self._keys = keys
        self._widths = widths
        self._out = out

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = [arrow_to_python(column, "a partial aggregate") for column in batch.columns[self._keys :]]
            i, per_field = 0, []
            for width in self._widths:
                per_field.append(columns[i : i + width])
                i += width
            partials = self._fields.from_columns(per_field)
            values = self._fields.combine_all([None] * len(partials), partials)
            shown = [
                self._fields.shown(value) if rows else _of_nothing(self._fields)
                for value, rows in zip(values, columns[-1], strict=True)
            ]
            if None in shown:
                continue  # the one row of an empty batch
            arrays = [column.cast(self._out.field(i).type) for i, column in enumerate(batch.columns[: self._keys])]
            for place, column in enumerate(zip(*shown, strict=True), self._keys):
                arrays.append(pa.array(column, self._out.field(place).type))
            yield pa.RecordBatch.from_arrays(arrays, schema=self._out)


def _of_nothing(fields: Fields) -> list[Any] | None:
    values = [
        _nothing(aggregator, field.type) for aggregator, field in zip(fields.aggregators, fields.fields, strict=True)
    ]
    return None if None in values else values


def _nothing(aggregator: Aggregator, value_type: str) -> Any:
    if isinstance(aggregator, Sum):
        return 0.0 if value_type == "double" else 0 if value_type == "bigint" else Decimal(0)
    if isinstance(aggregator, NativeCombiner) and not isinstance(aggregator, Count):
        return None
    zero: Any = aggregator.zero() if isinstance(aggregator, CombinerAggregator) else getattr(aggregator, "init")()  # noqa: B009
    if zero is None:
        return None
    return in_column(aggregator.result(zero), aggregator.result_type(value_type))


class FoldTask:
    """Takes rows one by one, and gives out what the aggregators emit. Picklable; run by `mapInArrow`."""

    def __init__(
        self,
        links: tuple[tuple[str, Aggregator | BatchAggregator], ...],
        fields: list[Field],
        widths: list[int],
        keys: list[str],
        *,
        out: pa.Schema,
        batch_id: int | None,
    ) -> None:
        self._links = links
        self._widths = widths
        self._types = {field.name: field.type for field in fields}
        self._keys = keys
        self._out = out
        self._batch_id = batch_id

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        group: _Group | None = None if self._keys else self._group(())
        done: list[tuple[Any, ...]] = []
        for batch in batches:
            names = batch.schema.names
            columns = columns_to_python(batch.columns, names)
            places = [names.index(key) for key in self._keys]
            for values in zip(*columns, strict=True):
                key = tuple(values[i] for i in places)
                if group is None or not same_key(group.key, key):
                    if group is not None:
                        done += group.emitted()
                    group = self._group(key)
                row = dict(zip(names, values, strict=True))
                if not row.pop(MARK, False):
                    group.add(row)
            if len(done) >= _WAITING:
                yield self._given(done)
                done = []
        if group is not None:
            done += group.emitted()
        if done:
            yield self._given(done)

    def _group(self, key: tuple[Any, ...]) -> _Group:
        links = zip(self._links, self._widths, strict=True)
        made = [_Link(link, self._types.get(name, ""), width, self._batch_id) for (name, link), width in links]
        # Spark groups by 0.0, though the first row may have -0.0.
        return _Group(tuple(part + 0.0 if type(part) is float else part for part in key), made)

    def _given(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, self._out.field(i).type) for i, column in enumerate(columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._out)


class _Group:
    """The aggregators of one key of one batch."""

    def __init__(self, key: tuple[Any, ...], links: list[_Link]) -> None:
        self.key = key
        self._links = links

    def add(self, row: Mapping[str, Any]) -> None:
        for link in self._links:
            link.add(row)

    def emitted(self) -> Iterator[tuple[Any, ...]]:
        for parts in itertools.product(*(link.emitted() for link in self._links)):
            yield (*self.key, *itertools.chain.from_iterable(parts))


class _Link:
    """One aggregator at work on one group."""

    def __init__(self, one: Aggregator | BatchAggregator, value_type: str, width: int, batch_id: int | None) -> None:
        self._one = one
        self._width = width
        self._type = value_type
        self._rows = 0
        self._collector = Collector()
        if isinstance(one, BatchAggregator):
            self._value = one.init(batch_id, self._collector)
        else:
            self._folding = Folding(one)

    def add(self, row: Mapping[str, Any]) -> None:
        self._rows += 1
        if isinstance(self._one, BatchAggregator):
            self._value = self._one.aggregate(self._value, row, self._collector)
            return
        self._folding.add(row)
        if self._folding.rows_waiting >= _WAITING:
            self._folding.settle(None)

    def emitted(self) -> list[tuple[Any, ...]]:
        aggregator = self._one
        if isinstance(aggregator, BatchAggregator):
            aggregator.complete(self._value, self._collector)
            for values in self._collector.emitted:
                if len(values) != self._width:
                    raise UsageError(
                        f"{type(aggregator).__name__} emitted {len(values)} values, its output is {aggregator.output!r}"
                    )
            return self._collector.emitted
        if not self._rows:
            nothing = _nothing(aggregator, self._type)
            return [] if nothing is None else [(nothing,)]
        value = self._folding.onto(None)
        shown = None if value is None else aggregator.result(value)
        return [(in_column(shown, aggregator.result_type(self._type)),)]


def same_key(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Equal as Spark groups: NaN is NaN."""
    return a == b or all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))  # noqa: PLR0124
