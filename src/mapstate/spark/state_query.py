"""Queries of a state: reads in bulk that add columns to rows, Trident's stateQuery.

The rows go through the executors once. A task asks the state for the distinct keys of a chunk of rows and puts the
answers beside them; nothing is shuffled, and no more than a chunk is held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import pyarrow as pa

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.fields import Fields, results_of, shown_as
from mapstate.backing_map import let_go
from mapstate.errors import (
    ConfigurationError,
    DuplicateNameError,
    StateNotFoundError,
    StateSchemaError,
    UnknownColumnError,
    UsageError,
)
from mapstate.keys import KeyField
from mapstate.maps.serialized import CHUNK_BYTES
from mapstate.reader import Consistency, StateReader
from mapstate.spark.plan import column_of
from mapstate.spark.query import QueryRun
from mapstate.spark.rows import Rows, column_names
from mapstate.spark.stream import PersistentAggregate, Stream, check_travels
from mapstate.spark.task import arrow_schema, arrow_to_python, partition_id, slices
from mapstate.spec import CHUNK_SIZE, StateSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = [
    "Collector",
    "MapGet",
    "Queried",
    "QueryFunction",
    "SnapshotGet",
    "StateFactory",
    "StaticState",
    "TupleCollectionGet",
    "When",
    "asked",
    "newStaticState",
    "stateQuery",
]

When = Literal["before", "after"]
_INTEGERS = ("tinyint", "smallint", "int", "bigint")


class Collector:
    """Takes what a function emits: Trident's TridentCollector."""

    def __init__(self) -> None:
        self.emitted: list[tuple[Any, ...]] = []

    def emit(self, *values: Any) -> None:
        """One row, of as many values as the function has output columns."""
        self.emitted.append(values)


class QueryFunction(ABC):
    """Trident's QueryFunction: asks a state for many keys at once, then emits for each row. Picklable.

    Runs on executors. ``state`` is a `StateReader` where the state is one of mapstate's, and else what the
    state factory made.
    """

    @abstractmethod
    def batch_retrieve(self, state: Any, keys: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """One result per key, in order. The keys of a chunk are distinct; called once per chunk."""

    @abstractmethod
    def execute(self, key: tuple[Any, ...], result: Any, collector: Collector) -> None:
        """Emits the values to add to one row: once for one row, several times for several rows, or not at all."""


class MapGet(QueryFunction):
    """The fields of a key; nulls where it is absent. One row in, one row out."""

    def batch_retrieve(self, state: Any, keys: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """See `QueryFunction.batch_retrieve`."""
        answers: Sequence[Any] = state.multi_get(keys)
        return answers

    def execute(self, key: tuple[Any, ...], result: Any, collector: Collector) -> None:  # noqa: ARG002
        """See `QueryFunction.execute`; ``result`` is the values of the fields, or None for each."""
        collector.emit(*result)


class SnapshotGet(MapGet):
    """The fields of an ungrouped aggregate, added to every row."""


class TupleCollectionGet(QueryFunction):
    """Every row with every key of the state and its fields: a scan per chunk of rows, so for small states."""

    def batch_retrieve(self, state: Any, keys: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """See `QueryFunction.batch_retrieve`."""
        return [dict(state.scan()).items()] * len(keys)

    def execute(self, key: tuple[Any, ...], result: Any, collector: Collector) -> None:  # noqa: ARG002
        """See `QueryFunction.execute`; ``result`` is pairs of a key's and its fields' values."""
        for values in result:
            collector.emit(*values)


@runtime_checkable
class StateFactory(Protocol):
    """Makes a user's own state on an executor, once per task. Picklable."""

    def make_state(self, partition: int, partitions: int) -> Any:
        """The state of one partition out of so many."""
        ...


@dataclass(frozen=True)
class StaticState:
    """A state that something else keeps. See `newStaticState`."""

    state: StateSpec | StateFactory
    aggregators: Mapping[str, Aggregator] = field(default_factory=dict)
    partitions: int | None = None

    def stateQuery(
        self, df: DataFrame, keys: Sequence[str] | str = (), fields: Any = None, **options: Any
    ) -> DataFrame:
        """`stateQuery` of this state."""
        return stateQuery(df, self, keys, fields, **options)


Queried = PersistentAggregate | StaticState | StateSpec


def newStaticState(
    state: StateSpec | StateFactory,
    *,
    aggregators: Mapping[str, Aggregator] | None = None,
    partitions: int | None = None,
) -> StaticState:
    """A state to be queried, which another job keeps: Trident's newStaticState.

    ``state`` is a recipe with a name, or a factory of a user's own states. ``aggregators`` as for `open_reader`.
    ``partitions``: of a user's own states, which are asked for the keys that Spark's hash spreads to them.
    Nothing is connected yet. Raises ConfigurationError.
    """
    if isinstance(state, StateSpec):
        _ = state.state  # which has to be named
    elif isinstance(state, type) or not isinstance(state, StateFactory):
        raise ConfigurationError(
            f"newStaticState needs a recipe such as opaque(url, name='...'), or an object with make_state(partition, "
            f"partitions), not a {getattr(state, '__name__', type(state).__name__)}"
        )
    check_travels("the state to be queried", state)
    return StaticState(state, aggregators or {}, partitions)


def stateQuery(
    df: DataFrame,
    state: Queried,
    keys: Sequence[str] | str = (),
    fields: Sequence[str] | Mapping[str, str] | str | None = None,
    *,
    query: QueryFunction | None = None,
    consistency: Consistency = "committed",
) -> DataFrame:
    """A DataFrame, streaming or not, with what a state holds for each row. See `Rows.stateQuery`.

    Each time the DataFrame is computed the state is asked anew. Raises ConfigurationError for a streaming DataFrame
    and a state that lives on the driver.
    """
    asks = _Asks.of(df.schema, state, keys, fields=fields, query=query, consistency=consistency)
    if df.isStreaming and not asks.on_executors:
        raise ConfigurationError(
            "the state lives on the driver, where a streaming DataFrame is not computed: take newStream(...).stateQuery"
        )
    return asks.of_frame(df, None)


def asked(
    rows: Rows,
    state: Queried,
    keys: Sequence[str] | str,
    fields: Sequence[str] | Mapping[str, str] | str | None,
    *,
    query: QueryFunction | None,
    consistency: Consistency,
    when: When | None,
) -> Rows:
    """See `Rows.stateQuery`."""
    if when not in (None, "before", "after"):
        raise ConfigurationError(f"when is 'before' or 'after', not {when!r}")
    if when is not None and consistency == "latest":
        raise ConfigurationError("a query for the latest is of no batch: leave out consistency='latest', or when")
    asks = _Asks.of(rows.schema, state, keys, fields=fields, query=query, consistency=consistency)
    if when == "after" and isinstance(rows, Stream):
        rows = _after(rows, state)
    before = when == "before" or (when is None and consistency == "committed" and isinstance(rows, Stream))
    if when == "before" and asks.type not in (None, "opaque"):
        raise ConfigurationError(
            f"a {asks.type} state keeps no value before the current one, so it cannot be read as it was before a batch"
        )
    name = rows.name

    def step(frame: DataFrame, batch_id: int | None) -> DataFrame:
        if not before or batch_id is None:
            return asks.of_frame(frame, None)
        return asks.of_frame(frame, (QueryRun.of(frame, default=name).query_id, batch_id))

    return rows._then(step, by_row=False)


def _after(rows: Stream, state: Queried) -> Rows:
    """The rows of a stream, behind the commit of a state that follows the same stream."""
    from mapstate.spark.new_values import NewValuesStream

    if not isinstance(state, PersistentAggregate) or state.source is not None or state._df is not rows.df:
        raise ConfigurationError(
            "'after' is after the commit of a state that follows this stream: give what persistentAggregate returned "
            "on this very stream"
        )
    return NewValuesStream.behind(state, rows)


@dataclass(frozen=True)
class _Asks:
    """A query, planned: what is asked, of what, and which columns come of it. Driver."""

    state: _Known | StaticState
    keys: list[str]
    shown: list[tuple[str, bool]]
    query: QueryFunction
    added: StructType
    consistency: Consistency

    @classmethod
    def of(
        cls,
        schema: StructType,
        state: Queried,
        keys: Sequence[str] | str,
        *,
        fields: Sequence[str] | Mapping[str, str] | str | None,
        query: QueryFunction | None,
        consistency: Consistency,
    ) -> _Asks:
        """Raises what `Rows.stateQuery` says."""
        from pyspark.sql.types import StructType

        if consistency not in ("committed", "latest"):
            raise ConfigurationError(f"consistency is 'committed' or 'latest', not {consistency!r}")
        names = column_names(schema, [keys] if isinstance(keys, str) else keys, "stateQuery")
        query = query or (MapGet() if names else SnapshotGet())
        if isinstance(query, type) or not isinstance(query, QueryFunction):
            raise ConfigurationError(f"query is a QueryFunction, such as MapGet(), not {query!r}")
        check_travels("the query function", query)
        asked = _Known.of(state)
        if isinstance(query, MapGet | TupleCollectionGet):
            if isinstance(asked, StaticState):
                raise ConfigurationError(
                    f"{type(query).__name__} asks states of mapstate: write a QueryFunction of your own"
                )
            whole = isinstance(query, TupleCollectionGet)
            shown, added = asked.columns(fields, with_keys=whole)
        elif isinstance(fields, str):
            whole, shown, added = False, [], StructType([*_parsed(fields)])
        else:
            raise ConfigurationError(f"say what {type(query).__name__} emits, as DDL: fields='followers bigint'")
        if isinstance(asked, _Known) and not whole:
            asked.check_keys(schema, names, query)
        _check_new(schema, added)
        return cls(asked, names, shown, query, added, consistency)

    @property
    def type(self) -> str | None:
        """The type of a state of mapstate."""
        return self.state.spec.type if isinstance(self.state, _Known) else None

    @property
    def spec(self) -> StateSpec | None:
        """The recipe of a state of mapstate."""
        return self.state.spec if isinstance(self.state, _Known) else None

    @property
    def partitions(self) -> int | None:
        """How many partitions a user's own states have, where that is said."""
        return None if isinstance(self.state, _Known) else self.state.partitions

    @property
    def on_executors(self) -> bool:
        """Whether executors can reach the state."""
        return self.spec is None or self.spec.backend.shared_between_processes

    def of_frame(self, frame: DataFrame, before: tuple[str, int] | None) -> DataFrame:
        """The frame with the columns added. Reads the state here only where executors cannot."""
        from pyspark.sql.types import StructType

        if self.partitions is not None:
            spread = [column_of(name) for name in self.keys]
            frame = frame.repartition(self.partitions, *spread) if spread else frame.repartition(self.partitions)
        task = _QueryTask(self, arrow_schema(self.added), before)
        if not self.on_executors:
            task.ask_now(frame)
        schema = StructType([*frame.schema.fields, *self.added.fields])
        return frame.mapInArrow(task, schema)


class _Known:
    """What is known of a state of mapstate: key columns, fields, and the types in which they are shown. Picklable.

    ``may_be_absent``: a stream that keeps the state itself asks it before its first batch.
    """

    def __init__(
        self,
        spec: StateSpec,
        keys: Sequence[KeyField],
        fields: Fields,
        aggregators: Mapping[str, Aggregator],
        *,
        may_be_absent: bool,
    ) -> None:
        self.may_be_absent = may_be_absent
        self.spec = spec
        self.keys = keys
        self.aggregators = aggregators
        self._json = {one.name for one in fields.fields if one.type == "any"}
        self._fields = {
            one.name: "string" if one.type == "any" else aggregator.result_type(one.type)
            for one, aggregator in zip(fields.fields, fields.aggregators, strict=True)
        }

    @classmethod
    def of(cls, state: Queried) -> _Known | StaticState:
        """Of a state that a stream keeps what the job says; of another what its ledger says: one read."""
        if isinstance(state, PersistentAggregate):
            job = state._job
            fields = Fields(job.fields, job.aggregators)
            return cls(job.spec, job.keys, fields, job.aggregators, may_be_absent=True)
        static = newStaticState(state) if isinstance(state, StateSpec) else state
        if not isinstance(static, StaticState):
            raise ConfigurationError(
                "stateQuery asks what persistentAggregate or newStaticState returned, or a recipe with a name, not a "
                f"{type(static).__name__}"
            )
        spec = static.state
        if not isinstance(spec, StateSpec):
            return static
        with StateReader(spec.backend, spec.state, "committed", {}) as reader:
            ledger = reader.ledger()
        fields = results_of(ledger.fields, static.aggregators)
        return cls(spec, ledger.keys, fields, static.aggregators, may_be_absent=False)

    def check_keys(self, schema: StructType, names: Sequence[str], query: QueryFunction) -> None:
        """Raises StateSchemaError unless the columns are a key of the state."""
        found = [schema[name].dataType.simpleString() for name in names]
        same = len(found) == len(self.keys) and all(
            kind == key.type or (kind in _INTEGERS and key.type in _INTEGERS)
            for kind, key in zip(found, self.keys, strict=True)
        )
        if not same:
            asked = ", ".join(f"{name} {kind}" for name, kind in zip(names, found, strict=True))
            own = ", ".join(f"{key.name} {key.type}" for key in self.keys)
            raise StateSchemaError(
                f"{type(query).__name__} asks state {self.spec.state!r} by ({asked}), but it is keyed by ({own}). Name "
                "a column for each, in this order, and cast what differs.",
                state=self.spec.state,
                found=asked,
                expected=own,
            )

    def columns(
        self, fields: Sequence[str] | Mapping[str, str] | str | None, *, with_keys: bool
    ) -> tuple[list[tuple[str, bool]], StructType]:
        """Which parts of a state's entries are shown, whether as JSON, and the columns in which."""
        from pyspark.sql.types import DataType, StructField, StructType

        types = ({key.name: key.type for key in self.keys} if with_keys else {}) | self._fields
        if fields is None:
            fields = list(types)
        elif isinstance(fields, str):
            fields = [fields]
        named = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
        for name in named:
            if name not in types:
                raise UnknownColumnError(
                    f"state {self.spec.state!r} has no {name!r} to show; it has {', '.join(types)}", column=name
                )
        columns = [StructField(column, DataType.fromDDL(types[name])) for name, column in named.items()]
        return [(name, name in self._json) for name in named], StructType(columns)


class _QueryTask:
    """The function that `mapInArrow` runs, once per partition. Picklable."""

    def __init__(self, asks: _Asks, added: pa.Schema, before: tuple[str, int] | None) -> None:
        self._asks = asks
        self._added = added
        self._before = before
        self._known: dict[tuple[Any, ...], Any] | None = None

    def ask_now(self, frame: DataFrame) -> None:
        """Asks for all keys of the frame, on the driver, and keeps the answers."""
        columns = [column_of(name).alias(f"key{at}") for at, name in enumerate(self._asks.keys)]
        known: dict[tuple[Any, ...], Any] = {}
        if columns:
            table = frame.select(*columns).distinct().toArrow()
            keys = _rows_of(table.columns, self._asks.keys, table.num_rows)
        else:
            keys = [()]
        state = self._opened()
        try:
            for start in range(0, len(keys), self._chunk_size):
                chunk = keys[start : start + self._chunk_size]
                known.update(zip(map(_hashable, chunk), self._retrieve(state, chunk), strict=True))
        finally:
            let_go(state)
        self._known = known

    @property
    def _chunk_size(self) -> int:
        return CHUNK_SIZE if self._asks.spec is None else self._asks.spec.chunk_size

    def _opened(self) -> Any:
        state = self._asks.state
        if isinstance(state, _Known):
            spec, consistency = state.spec, self._asks.consistency
            return StateReader(spec.backend, spec.state, consistency, state.aggregators, before=self._before)
        factory: Any = state.state
        if state.partitions is None:
            return factory.make_state(0, 1)
        return factory.make_state(partition_id(), state.partitions)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows with the answers beside them."""
        opened: Any = None
        try:
            for batch in batches:
                for part in slices(batch, lambda: self._chunk_size, CHUNK_BYTES):
                    if opened is None and self._known is None:
                        opened = self._opened()
                    yield self._with_answers(opened, part)
        finally:
            let_go(opened)

    def _with_answers(self, state: Any, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = self._asks.keys
        places = [batch.schema.get_field_index(name) for name in names]
        keys = _rows_of([batch.column(at) for at in places], names, batch.num_rows)
        texts = [_hashable(key) for key in keys]
        distinct = dict(zip(texts, keys, strict=True))
        answers = self._known
        if answers is None:
            answers = dict(zip(distinct, self._retrieve(state, list(distinct.values())), strict=True))
        emitted = {text: self._emitted(key, answers[text]) for text, key in distinct.items()}
        rows = [emitted[text] for text in texts]
        if any(len(one) != 1 for one in rows):
            batch = batch.take(pa.array([at for at, one in enumerate(rows) for _ in one], pa.int64()))
        flat = [values for one in rows for values in one]
        columns = list(zip(*flat, strict=True)) if flat else [()] * len(self._added)
        added = [pa.array(column, self._added.field(at).type) for at, column in enumerate(columns)]
        return pa.RecordBatch.from_arrays(
            [*batch.columns, *added], names=[*batch.schema.names, *(one.name for one in self._added)]
        )

    def _retrieve(self, state: Any, keys: list[tuple[Any, ...]]) -> Sequence[Any]:
        """One answer per key, in the form that the query function's ``execute`` takes."""
        query, shown = self._asks.query, self._asks.shown
        try:
            found = query.batch_retrieve(state, keys)
        except StateNotFoundError:
            if not (isinstance(self._asks.state, _Known) and self._asks.state.may_be_absent):
                raise
            if isinstance(query, TupleCollectionGet):
                return [[] for _ in keys]
            found = [None] * len(keys)
        if len(found) != len(keys):
            raise UsageError(
                f"{type(query).__name__}.batch_retrieve was asked for {len(keys)} keys and gave {len(found)} results: "
                "it has to give one for each, in order"
            )
        if isinstance(query, MapGet):
            return [[None] * len(shown) if one is None else self._parts(one) for one in found]
        if isinstance(query, TupleCollectionGet):
            made = {id(one): self._entries(one) for one in {id(one): one for one in found}.values()}
            return [made[id(one)] for one in found]  # mostly one and the same for all keys
        return found

    def _entries(self, entries: Any) -> list[list[Any]]:
        state = self._asks.state
        names = [key.name for key in state.keys] if isinstance(state, _Known) else []
        return [self._parts(dict(zip(names, key, strict=True)) | fields) for key, fields in entries]

    def _parts(self, entry: Mapping[str, Any]) -> list[Any]:
        return [shown_as(entry.get(name), is_json=is_json) for name, is_json in self._asks.shown]

    def _emitted(self, key: tuple[Any, ...], answer: Any) -> list[tuple[Any, ...]]:
        collector = Collector()
        self._asks.query.execute(key, answer, collector)
        for values in collector.emitted:
            if len(values) != len(self._added):
                raise UsageError(
                    f"{type(self._asks.query).__name__} emitted {len(values)} values where {len(self._added)} columns "
                    f"were announced: {', '.join(one.name for one in self._added)}"
                )
        return collector.emitted


def _rows_of(columns: Sequence[pa.Array], names: Sequence[str], rows: int) -> list[tuple[Any, ...]]:
    if not columns:
        return [()] * rows
    return list(zip(*(arrow_to_python(column, name) for column, name in zip(columns, names, strict=True)), strict=True))


def _hashable(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key as it can stand in a dict, NaN being equal to NaN; 1 and 1.0 do not meet, as a column has one type."""
    try:
        hash(key)
    except TypeError:
        return (repr(key),)
    return tuple("NaN" if value != value else value for value in key) if any(value != value for value in key) else key  # noqa: PLR0124


def _parsed(ddl: str) -> Any:
    """The columns of a DDL string."""
    from pyspark.sql.types import StructType

    parsed: Any = StructType.fromDDL(ddl)
    return parsed.fields


def _check_new(schema: StructType, added: StructType) -> None:
    taken = {name.casefold() for name in schema.names}
    for name in added.names:
        if name.casefold() in taken:
            raise DuplicateNameError(
                f"the rows have a column {name!r} already: name the new one, fields={{{name!r}: 'state_{name}'}}",
                name=name,
            )
        taken.add(name.casefold())
