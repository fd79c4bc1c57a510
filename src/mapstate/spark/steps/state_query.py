"""Trident's stateQuery: a task reads the distinct keys of a chunk of rows in bulk; nothing is shuffled."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.of_column import INTEGERS
from mapstate.aggregators.tiles import Answers
from mapstate.errors import ConfigurationError, DuplicateNameError, StateSchemaError, UnknownColumnError, check_range
from mapstate.protocol.rolling import RollingDefinition
from mapstate.reader import Consistency, StateReader
from mapstate.reader.aliased import version_of
from mapstate.reader.rolling import readable_fields
from mapstate.reader.tables import types_of
from mapstate.schema import KeyField
from mapstate.spark.driver.access import access_of
from mapstate.spark.driver.job import Job, Step
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.executor.query_task import NOW, AskedState, QueryTask
from mapstate.spark.executor.task import arrow_schema
from mapstate.spark.interfaces import (
    MapGet,
    QueryFunction,
    SnapshotGet,
    StateFactory,
    TupleCollectionGet,
    ensure_picklable,
)
from mapstate.spark.steps.columns import column_names
from mapstate.spec import StateSpec
from mapstate.values import column_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

When = Literal["before", "after"]


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


@runtime_checkable
class KeptState(Protocol):
    """A state that a stream of this application keeps: what `persistentAggregate` returned."""

    @property
    def job(self) -> Job:
        """What is kept, and where."""
        ...


Queried = KeptState | StaticState | StateSpec


def newStaticState(
    state: StateSpec | StateFactory,
    *,
    aggregators: Mapping[str, Aggregator] | None = None,
    partitions: int | None = None,
) -> StaticState:
    """A state to be queried, which another job keeps: Trident's newStaticState.

    ``state`` is a spec with a name, or a factory of a user's own states. ``aggregators`` as for `open_reader`.
    ``partitions``: of a user's own states, which are asked for the keys that Spark's hash spreads to them.
    Nothing is connected yet. Raises ConfigurationError.
    """
    if isinstance(state, StateSpec):
        _ = state.state  # which has to be named
    elif isinstance(state, type) or not isinstance(state, StateFactory):
        raise ConfigurationError(
            f"newStaticState needs a spec such as opaque(url, name='...'), or an object with make_state(partition, "
            f"partitions), not a {getattr(state, '__name__', type(state).__name__)}"
        )
    ensure_picklable("the state to be queried", state)
    if partitions is not None:
        check_range("partitions", partitions, 1)
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
    asks = QueryPlan.of(df.schema, state, keys, fields=fields, query=query, consistency=consistency)
    if df.isStreaming and not asks.on_executors:
        raise ConfigurationError(
            "the state lives on the driver, where a streaming DataFrame is not computed: take newStream(...).stateQuery"
        )
    return asks.of_frame(df, None)


@dataclass(frozen=True)
class QueryPlan:
    """A query, planned: what is asked, of what, and which columns come of it. Driver."""

    state: KnownState | StaticState
    keys: list[str]
    shown: list[tuple[str, str]]
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
    ) -> QueryPlan:
        """Raises what `Rows.stateQuery` says."""
        if consistency not in ("committed", "latest"):
            raise ConfigurationError(f"consistency is 'committed' or 'latest', not {consistency!r}")
        names = column_names(schema, [keys] if isinstance(keys, str) else keys, "stateQuery")
        query = query or (MapGet() if names else SnapshotGet())
        if isinstance(query, type) or not isinstance(query, QueryFunction):
            raise ConfigurationError(f"query is a QueryFunction, such as MapGet(), not {query!r}")
        ensure_picklable("the query function", query)
        shows = isinstance(query, MapGet | TupleCollectionGet)
        asked = KnownState.of(state, names_of(fields) if shows else ())
        if isinstance(query, MapGet | TupleCollectionGet):
            if isinstance(asked, StaticState):
                raise ConfigurationError(
                    f"{type(query).__name__} asks states of mapstate: write a QueryFunction of your own"
                )
            whole = isinstance(query, TupleCollectionGet)
            shown, added = asked.columns(fields, with_keys=whole)
            if asked.is_rolling and not asked.may_be_absent:  # else all of its aggregators are known
                query, of_key = copy(query), {key.name for key in asked.keys}
                query.columns = [name for name, _ in shown if name not in of_key]
        elif isinstance(fields, str):
            parsed: Any = calls().from_ddl(fields)
            whole, shown, added = False, [], parsed
        else:
            raise ConfigurationError(f"say what {type(query).__name__} emits, as DDL: fields='followers bigint'")
        if isinstance(asked, KnownState) and not whole:
            asked.check_keys(schema, names, type(query).__name__)
        check_new(schema, added)
        return cls(asked, names, shown, query, added, consistency)

    @property
    def type(self) -> str | None:
        return self.state.spec.type if isinstance(self.state, KnownState) else None

    @property
    def spec(self) -> StateSpec | None:
        return self.state.spec if isinstance(self.state, KnownState) else None

    @property
    def partitions(self) -> int | None:
        return None if isinstance(self.state, KnownState) else self.state.partitions

    @property
    def on_executors(self) -> bool:
        return self.spec is None or self.spec.backend.shared_between_processes

    @property
    def _asked(self) -> AskedState:
        state = self.state
        if isinstance(state, StaticState):
            return AskedState(state.state, partitions=state.partitions)
        return AskedState(
            *(state.spec, self.consistency, state.aggregators),
            keys=tuple(state.keys),
            shown=tuple(self.shown),
            may_be_absent=state.may_be_absent,
            version=state.spec.state if state.may_be_absent else None,  # a stream that keeps the state asks its own
            is_rolling=state.is_rolling,
        )

    def _asked_by(self, frame: DataFrame) -> AskedState:
        """The state as one frame asks it: all rows of a batch, or of a DataFrame, read one version."""
        asked, spec = self._asked, self.spec
        if spec is None or asked.version is not None or frame.isStreaming:
            return asked
        return replace(asked, version=version_of(spec.backend, spec.state))

    def step(self, stream: str, *, before: bool) -> Step:
        """The query as a step of a stream; with ``before``, of the state as it was before each batch."""
        return _Query(self, stream, before)

    def of_frame(self, frame: DataFrame, before: tuple[str, int] | None, now: int | None = None) -> DataFrame:
        """The frame with the columns added; ``now`` of rolling windows in microseconds, else when Spark computes it."""
        from pyspark.sql.functions import current_timestamp, lit, unix_micros
        from pyspark.sql.types import StructType

        if self.partitions is not None:
            spread = [column_of(name) for name in self.keys]
            frame = frame.repartition(self.partitions, *spread) if spread else frame.repartition(self.partitions)
        added = arrow_schema(self.added)
        task = QueryTask(
            self._asked_by(frame), self.query, keys=self.keys, shown=self.shown, added=added, before=before
        )
        if not self.on_executors:
            task.ask_now(frame, calls().to_arrow)
        schema = StructType([*frame.schema.fields, *self.added.fields])
        if self._asked.is_rolling and self.on_executors:
            frame = frame.withColumn(NOW, unix_micros(current_timestamp()) if now is None else lit(now).cast("bigint"))
        return frame.mapInArrow(task, schema)


@dataclass(frozen=True, eq=False)
class _Query:
    """See `QueryPlan.step`. ``asks`` is the state's spec, if it has one."""

    plan: QueryPlan
    stream: str
    before: bool

    @property
    def __name__(self) -> str:  # as an error names it
        return "stateQuery"

    @property
    def asks(self) -> StateSpec | None:
        return self.plan.spec

    def __call__(self, frame: DataFrame, batch_id: int | None) -> DataFrame:
        now = None if batch_id is None else time.time_ns() // 1000
        if not self.before or batch_id is None:
            return self.plan.of_frame(frame, None, now)
        return self.plan.of_frame(frame, (access_of(frame).run(self.stream).query_id, batch_id), now)


class KnownState:
    """What is known of a state of mapstate: key columns, fields, and the types in which they are shown. Picklable.

    ``may_be_absent``: a stream that keeps the state itself asks it before its first batch. ``is_rolling``: it has
    rolling windows, which end at one time for all rows of a batch.
    """

    def __init__(
        self,
        spec: StateSpec,
        keys: Sequence[KeyField],
        fields: Fields,
        aggregators: Mapping[str, Aggregator],
        *,
        may_be_absent: bool,
        is_rolling: bool,
    ) -> None:
        self.may_be_absent = may_be_absent
        self.is_rolling = is_rolling
        self.spec = spec
        self.keys = keys
        self.aggregators = aggregators
        self._types = types_of(keys, fields)

    @classmethod
    def of(cls, state: Queried, columns: Collection[str] | None) -> KnownState | StaticState:
        """Of a state that a stream keeps what the job says; of another what its ledger says: one read.

        ``columns``, and UsageError, as of `readable_fields`.
        """
        if isinstance(state, KeptState):
            job = state.job
            fields = Fields(job.fields, job.aggregators)
            definition = None if job.windows is None else job.windows.definition
            is_rolling = isinstance(definition, RollingDefinition)
            if isinstance(definition, RollingDefinition):
                fields = Answers(fields, definition).fields
            return cls(job.spec, job.keys, fields, job.aggregators, may_be_absent=True, is_rolling=is_rolling)
        static = newStaticState(state) if isinstance(state, StateSpec) else state
        if not isinstance(static, StaticState):
            raise ConfigurationError(
                "stateQuery asks what persistentAggregate or newStaticState returned, or a spec with a name, not a "
                f"{type(static).__name__}"
            )
        spec = static.state
        if not isinstance(spec, StateSpec):
            return static
        with StateReader(spec.backend, version_of(spec.backend, spec.state), "committed", {}) as reader:
            ledger = reader.ledger()
        fields = readable_fields(ledger, static.aggregators, columns)
        is_rolling = ledger.rolling is not None
        return cls(spec, ledger.keys, fields, static.aggregators, may_be_absent=False, is_rolling=is_rolling)

    def check_keys(self, schema: StructType, names: Sequence[str], caller: str) -> None:
        """Raises StateSchemaError unless the columns are a key of the state."""
        types = [schema[name].dataType.simpleString() for name in names]
        if not are_same_keys(types, [key.type for key in self.keys]):
            asked = ", ".join(f"{name} {kind}" for name, kind in zip(names, types, strict=True))
            expected = ", ".join(f"{key.name} {key.type}" for key in self.keys)
            raise StateSchemaError(
                f"{caller} asks state {self.spec.state!r} by ({asked}), but it is keyed by ({expected}). Name "
                "a column for each, in this order, and cast what differs.",
                state=self.spec.state,
                found=asked,
                expected=expected,
            )

    def columns(
        self, fields: Sequence[str] | Mapping[str, str] | str | None, *, with_keys: bool
    ) -> tuple[list[tuple[str, str]], StructType]:
        """Which parts of a state's entries are shown, of which types, and the columns in which."""
        from pyspark.sql.types import StructField, StructType

        hidden = () if with_keys else {key.name for key in self.keys}
        types = {name: kind for name, kind in self._types.items() if name not in hidden}
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
        columns = [StructField(column, calls().from_ddl(column_type(types[name]))) for name, column in named.items()]
        return [(name, types[name]) for name in named], StructType(columns)


def names_of(fields: Collection[str] | str | None) -> Collection[str] | None:
    """The names of the columns that shall be shown; None for all."""
    return [fields] if isinstance(fields, str) else fields


def are_same_keys(found: Sequence[str], own: Sequence[str]) -> bool:
    """Whether columns of the types ``found`` are keys of the types ``own``. Integers of any width are."""
    pairs = zip(found, own, strict=False)
    return len(found) == len(own) and all(a == b or (a in INTEGERS and b in INTEGERS) for a, b in pairs)


def check_new(schema: StructType, added: StructType, *, option: str | None = "fields") -> None:
    """Raise DuplicateNameError for a new column that the rows have. ``option`` is what renames it, None for nothing."""
    taken = {name.casefold() for name in schema.names}
    for name in added.names:
        if name.casefold() in taken:
            named = f"name the new one, {option}={{{name!r}: 'state_{name}'}}"
            raise DuplicateNameError(
                f"the rows have a column {name!r} already: {named if option else 'rename it'}", name=name
            )
        taken.add(name.casefold())
