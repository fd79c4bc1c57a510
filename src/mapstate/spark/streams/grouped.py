"""Rows by key, and the checks of what is kept of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Never, Protocol, Self, TypeVar

from mapstate.aggregators.aggregator import Aggregator, NativeCombiner, column_type
from mapstate.errors import ConfigurationError, DuplicateNameError, UnknownColumnError
from mapstate.keys import KeyCodec
from mapstate.schema import Field, KeyField
from mapstate.serializers.value_types import WireForm, wire_type
from mapstate.spark.driver.job import Job, Step
from mapstate.spark.interfaces import BatchAggregator
from mapstate.spark.pickling import ensure_picklable, kind_of
from mapstate.spark.steps.columns import check_unique, has_expressions
from mapstate.spark.streams.chained_aggregate import ChainedAggregate, SteppedRows, with_expressions
from mapstate.spark.streams.key_columns import with_keys
from mapstate.spec import StateSpec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from mapstate.spark.driver.job import Branch
    from mapstate.spark.driver.window_rows import LateRows
    from mapstate.spark.streams.query import Query

Kept = TypeVar("Kept", covariant=True)
"""What `persistentAggregate` returns: a `PersistentAggregate`, for every kind of rows that there is."""


class Keepable(SteppedRows, Protocol[Kept]):
    """Rows of which a state can be kept, as they say what it is."""

    @abstractmethod
    def hidden_columns(self) -> dict[str, str]:
        """Columns that a state gets beside those of the rows, with their types."""

    @abstractmethod
    def adapted(
        self, state: StateSpec, aggregates: Mapping[str, Aggregator], *, by: Sequence[str]
    ) -> Mapping[str, Aggregator]:
        """The aggregators that do on these rows what the given ones say. Raises ConfigurationError."""

    @abstractmethod
    def keep(self, job: Job) -> Kept:
        """The state of a job that is fed by these rows."""


class Groupable(Keepable[Kept], Protocol[Kept]):
    """Rows as `GroupedStream` needs them."""

    @property
    def name(self) -> str:
        """The stream's, also of new values."""
        ...


R = TypeVar("R", bound=Groupable[Any])


class GroupedStream(Generic[Kept, R]):
    """Rows by key. See `Rows.groupBy`."""

    def __init__(self, rows: R, columns: tuple[str, ...]) -> None:
        self._rows = rows
        self._schema = rows.schema
        self._names = self._schema.names
        self._types = {field.name: field.dataType.simpleString() for field in self._schema.fields}
        for column in columns:
            if column not in self._types:
                raise UnknownColumnError(
                    f"the stream {rows.name!r} has no column {column!r} to group by; it has {', '.join(self._types)}",
                    column=column,
                )
        check_unique(columns)
        self._keys = tuple(KeyField(column, self._types[column]) for column in columns)
        KeyCodec(self._keys)

    def persistentAggregate(self, state: StateSpec, /, *extra: Never, **aggregates: Aggregator) -> Kept:
        """Keeps aggregates per key in the store that ``state`` names: ``visits=Count()``.

        What comes back is started with `PersistentAggregate.start`, or used as a foreachBatch function.
        Nothing is connected yet. Raises ConfigurationError: UnknownColumnError, UnsupportedTypeError,
        DuplicateNameError, NotPicklableError.
        """
        from pyspark.sql import SparkSession

        if not isinstance(state, StateSpec):
            raise ConfigurationError(
                f"persistentAggregate needs a spec such as opaque(url), not a {type(state).__name__}"
            )
        if extra:
            call = "" if "(" in str(extra[0]) else "()"
            raise ConfigurationError(f"each aggregate needs a name, such as visits={extra[0]}{call}")
        if not aggregates:
            raise ConfigurationError("persistentAggregate needs at least one aggregate, such as visits=Count()")
        for name, one in aggregates.items():
            if not isinstance(one, Aggregator):
                raise ConfigurationError(
                    f"{name} is a {kind_of(one)}, not an aggregator: write {name}=Count(), or an instance of a "
                    "CombinerAggregator or ReducerAggregator of your own"
                )
        if has_expressions(aggregates, self._schema):
            rows, named = with_expressions(self._rows, aggregates)
            by = tuple(key.name for key in self._keys)
            return GroupedStream(rows, by).persistentAggregate(state, **named)
        check_unique([key.name for key in self._keys] + list(aggregates))
        adapted = self._rows.adapted(state, aggregates, by=[key.name for key in self._keys])
        types = self._types | self._rows.hidden_columns()
        spec = state.named(self._rows.name)
        fields = tuple(Field(name, one.describe(), one.bind(types)) for name, one in adapted.items())
        for field in fields:
            wire_type(field.type, WireForm())
        ensure_picklable(f"the spec of state {spec.state!r}", spec)
        for name, one in adapted.items():
            ensure_picklable(f"the aggregator {name}={one}", one)
        read = {key.name: key.type for key in self._keys}
        for one in adapted.values():
            names = one.columns() or self._all_unless_native(one)
            read |= {name: column_type(types, name, one) for name in names}
        session = SparkSession.getActiveSession()
        tells_case = session is not None and session.conf.get("spark.sql.caseSensitive") == "true"
        for name in () if tells_case else read:
            same = [other for other in self._names if other.casefold() == name.casefold()]
            if len(same) > 1:
                raise DuplicateNameError(
                    f"the stream {self._rows.name!r} has columns that Spark cannot tell apart: {', '.join(same)}",
                    name=name,
                )
        job = Job(self._rows.name, spec, self._keys, fields, adapted, read)
        kept: Kept = self._rows.keep(job)
        return kept

    def aggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> R:
        """One row per key of each batch: the key columns, and what aggregators come to; nothing is kept.

        See `Rows.aggregate`. Raises ConfigurationError.
        """
        return self.chainedAgg().aggregate(*own, **aggregates).chainEnd()

    def chainedAgg(self) -> ChainedAggregate[R]:
        """Several aggregates over the rows of each key of a batch, until ``chainEnd()``."""
        return ChainedAggregate(self._rows, tuple(key.name for key in self._keys))

    def _all_unless_native(self, one: Aggregator) -> list[str]:
        """What an aggregator reads that names no columns: nothing if Spark computes it, else all."""
        return [] if isinstance(one, NativeCombiner) else list(self._types)


class Windowable(SteppedRows, Protocol):
    """A stream as windows need it."""

    @property
    def name(self) -> str:
        """The stream's."""
        ...

    @property
    def df(self) -> DataFrame:
        """The DataFrame in front of the steps."""
        ...

    def branch_of(self, job: Job) -> tuple[Query, Branch]: ...

    def late(self, step: LateRows, query: Query) -> Any: ...


@dataclass(frozen=True)
class InWindows(Keepable[Kept]):
    """The rows of a stream by window, of whatever kind."""

    stream: Windowable

    @property
    def name(self) -> str:
        """The stream's."""
        return self.stream.name

    @property
    def schema(self) -> StructType:
        """The columns of the rows."""
        return self.stream.schema

    def with_step(self, step: Step, *, by_row: bool) -> Self:
        return replace(self, stream=self.stream.with_step(step, by_row=by_row))

    def groupBy(self, *columns: str | Column | list[str | Column]) -> GroupedStream[Kept, Self]:
        """Windows of each combination of values of ``columns`` by itself. See `Rows.groupBy`."""
        keys = [key for column in columns for key in (column if isinstance(column, list) else [column])]
        if not keys:
            raise ConfigurationError(
                "groupBy() needs at least one column; for windows of all rows call persistentAggregate on the windows "
                "themselves"
            )
        rows, names = with_keys(self, keys)
        return GroupedStream(rows, names)

    def persistentAggregate(self, state: StateSpec, /, *extra: Never, **aggregates: Aggregator) -> Kept:
        """Keeps aggregates of all rows of each window. See `GroupedStream.persistentAggregate`."""
        return GroupedStream(self, ()).persistentAggregate(state, *extra, **aggregates)

    def hidden_columns(self) -> dict[str, str]:
        return {}


def check_of_windows(state: StateSpec, taken: Collection[str], names: Sequence[str]) -> None:
    """Check what is kept of windows whose columns are ``taken``. Raises ConfigurationError."""
    if state.changes is not None:
        raise ConfigurationError("a state with windows keeps no change log: follow firedWindowsStream(), or scan")
    if state.type != "opaque":
        raise ConfigurationError(
            f"windows are kept by opaque states only, and this one is {state.type}: a failed attempt has to take back "
            "which windows it has ended. Take opaque(...)"
        )
    for name in names:
        if name.casefold() in taken:
            raise DuplicateNameError(f"{name!r} is a column of windows: give yours another name", name=name)
