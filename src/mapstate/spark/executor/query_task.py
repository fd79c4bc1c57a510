"""One partition of rows with the answers of a state beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.columns import column_of
from mapstate.backing_map import close_if_possible
from mapstate.errors import StateNotFoundError, StateSchemaError, UsageError
from mapstate.maps.serialized import CHUNK_BYTES
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader import Consistency, StateReader
from mapstate.reader.aliased import version_of
from mapstate.reader.rolling import readable_fields
from mapstate.reader.tables import types_of
from mapstate.schema import KeyField
from mapstate.spark.executor.error_text import each_with_errors_as_text
from mapstate.spark.executor.task import columns_to_python, partition_id, slices
from mapstate.spark.interfaces import Collector, MapGet, QueryFunction, StateFactory, TupleCollectionGet
from mapstate.spec import CHUNK_SIZE, StateSpec
from mapstate.values import in_column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


NOW = "__mapstate_now"
"""The column with the time of a query, in microseconds: the same in all rows that Spark computes at once."""


@dataclass(frozen=True)
class AskedState:
    """The state that a query asks, as a task opens it. Picklable.

    ``source`` is the spec of a state with its ``keys`` and the fields that are ``shown``, each with its type, or a
    user's factory of so many ``partitions``. One that ``may_be_absent`` has no values before its stream's first batch.
    ``version`` is what its alias leads to; None for what each task finds. The windows of one that ``is_rolling`` end at
    the time in the column `NOW`.
    """

    source: StateSpec | StateFactory
    consistency: Consistency = "committed"
    aggregators: Mapping[str, Aggregator] | None = None
    keys: tuple[KeyField, ...] = ()
    shown: tuple[tuple[str, str], ...] = ()
    partitions: int | None = None
    may_be_absent: bool = False
    version: str | None = None
    is_rolling: bool = False

    @property
    def chunk_size(self) -> int:
        return self.source.chunk_size if isinstance(self.source, StateSpec) else CHUNK_SIZE

    def open(self, before: tuple[str, int] | None, now: int | None = None) -> Any:
        """A `StateReader`, as of before a batch where one is given; or the user's own state. Once per task."""
        if isinstance(self.source, StateSpec):
            backend = self.source.backend
            state = self.version or version_of(backend, self.source.state)
            given = self.consistency, self.aggregators or {}
            return StateReader(backend, state, *given, before=before, now=now, check=self._check)
        if self.partitions is None:
            return self.source.make_state(0, 1)
        return self.source.make_state(partition_id(), self.partitions)

    def _check(self, ledger: LedgerRecord) -> None:
        """Raises StateSchemaError where the state has other columns than when the query was planned."""
        names = [name for name, _ in self.shown]
        types = types_of(ledger.keys, readable_fields(ledger, self.aggregators or {}, names))
        gone = [f"{name} {kind}" for name, kind in self.shown if types.get(name, kind) != kind]
        if not self.may_be_absent:  # else its stream may be about to add a field
            gone += [f"{name} {kind}" for name, kind in self.shown if name not in types]
        if gone or ledger.keys != self.keys:
            keys = ", ".join(f"{key.name} {key.type}" for key in self.keys)
            now = ", ".join(f"{name} {kind}" for name, kind in types.items())
            asked = f"has no {', '.join(gone)}" if gone else f"is not keyed by ({keys})"
            raise StateSchemaError(
                f"state {ledger.state!r} {asked} any more, as when this query was planned: it was made anew or swapped,"
                f" and has ({now}). Nothing was given out. Call stateQuery once more, or start the stream anew.",
                state=ledger.state,
                found=now,
                expected=", ".join(gone) or keys,
            )


class QueryTask:
    """The function that `mapInArrow` runs, once per partition. Picklable."""

    def __init__(
        self,
        asked: AskedState,
        query: QueryFunction,
        *,
        keys: Sequence[str],
        shown: Sequence[tuple[str, str]],
        added: pa.Schema,
        before: tuple[str, int] | None,
    ) -> None:
        self._asked = asked
        self._query = query
        self._keys = keys
        self._shown = shown
        self._added = added
        self._before = before
        self._known: dict[tuple[Any, ...], Any] | None = None

    def ask_now(self, frame: DataFrame, to_arrow: Callable[[DataFrame], pa.Table]) -> None:
        """Asks for all keys of the frame, on the driver, and keeps the answers. ``to_arrow`` collects rows."""
        columns = [column_of(name).alias(f"key{i}") for i, name in enumerate(self._keys)]
        known: dict[tuple[Any, ...], Any] = {}
        if columns:
            table = to_arrow(frame.select(*columns).distinct())
            keys = _rows_of(table.columns, self._keys, table.num_rows)
        else:
            keys = [()]
        state = self._asked.open(self._before, time.time_ns() // 1000)
        try:
            for start in range(0, len(keys), self._asked.chunk_size):
                chunk = keys[start : start + self._asked.chunk_size]
                known.update(zip(map(_hashable, chunk), self._retrieve(state, chunk), strict=True))
        finally:
            close_if_possible(state)
        self._known = known

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return each_with_errors_as_text(self._answered(batches))

    def _answered(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        opened: Any = None
        try:
            for batch in batches:
                rows, now = batch, None
                if self._asked.is_rolling and self._known is None:
                    now = batch.column(NOW)[0].as_py() if batch.num_rows else None
                    rows = batch.select(range(batch.num_columns - 1))
                for part in slices(rows, lambda: self._asked.chunk_size, CHUNK_BYTES):
                    if opened is None and self._known is None:
                        opened = self._asked.open(self._before, now)
                    yield self._with_answers(opened, part)
        finally:
            close_if_possible(opened)

    def _with_answers(self, state: Any, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = self._keys
        places = [batch.schema.get_field_index(name) for name in names]
        keys = _rows_of([batch.column(i) for i in places], names, batch.num_rows)
        texts = [_hashable(key) for key in keys]
        distinct = dict(zip(texts, keys, strict=True))
        answers = self._known
        if answers is None:
            answers = dict(zip(distinct, self._retrieve(state, list(distinct.values())), strict=True))
        emitted = {text: self._emitted(key, answers[text]) for text, key in distinct.items()}
        rows = [emitted[text] for text in texts]
        if any(len(answer) != 1 for answer in rows):
            batch = batch.take(pa.array([i for i, answer in enumerate(rows) for _ in answer], pa.int64()))
        flat = [values for answer in rows for values in answer]
        columns = list(zip(*flat, strict=True)) if flat else [()] * len(self._added)
        added = [pa.array(column, self._added.field(i).type) for i, column in enumerate(columns)]
        return pa.RecordBatch.from_arrays(
            [*batch.columns, *added], names=[*batch.schema.names, *(column.name for column in self._added)]
        )

    def _retrieve(self, state: Any, keys: list[tuple[Any, ...]]) -> Sequence[Any]:
        """One answer per key, in the form that the query function's ``execute`` takes."""
        query, shown = self._query, self._shown
        try:
            answers = query.batch_retrieve(state, keys)
        except StateNotFoundError:
            if not self._asked.may_be_absent:
                raise
            if isinstance(query, TupleCollectionGet):
                return [[] for _ in keys]
            answers = [None] * len(keys)
        if len(answers) != len(keys):
            raise UsageError(
                f"{type(query).__name__}.batch_retrieve was asked for {len(keys)} keys and gave {len(answers)} results"
                ": it has to give one for each, in order"
            )
        if isinstance(query, MapGet):
            return [[None] * len(shown) if answer is None else self._parts(answer) for answer in answers]
        if isinstance(query, TupleCollectionGet):
            made = {id(answer): self._entries(answer) for answer in {id(answer): answer for answer in answers}.values()}
            return [made[id(answer)] for answer in answers]  # mostly one and the same for all keys
        return answers

    def _entries(self, entries: Any) -> list[list[Any]]:
        names = [key.name for key in self._asked.keys]
        return [self._parts(dict(zip(names, key, strict=True)) | fields) for key, fields in entries]

    def _parts(self, entry: Mapping[str, Any]) -> list[Any]:
        return [in_column(entry.get(name), kind) for name, kind in self._shown]

    def _emitted(self, key: tuple[Any, ...], answer: Any) -> list[tuple[Any, ...]]:
        collector = Collector()
        self._query.execute(key, answer, collector)
        for values in collector.emitted:
            if len(values) != len(self._added):
                raise UsageError(
                    f"{type(self._query).__name__} emitted {len(values)} values where {len(self._added)} columns "
                    f"were announced: {', '.join(column.name for column in self._added)}"
                )
        return collector.emitted


def _rows_of(columns: Sequence[pa.Array], names: Sequence[str], rows: int) -> list[tuple[Any, ...]]:
    if not columns:
        return [()] * rows
    return list(zip(*columns_to_python(columns, names), strict=True))


def _hashable(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key as it can stand in a dict, NaN being equal to NaN; 1 and 1.0 do not meet, as a column has one type."""
    try:
        hash(key)
    except TypeError:
        return (repr(key),)
    return tuple("NaN" if value != value else value for value in key) if any(value != value for value in key) else key  # noqa: PLR0124
