"""Rows by key: the keys, the checks of what is kept of them, and several aggregates of one batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Never, Protocol, Self, TypeVar

from mapstate.aggregators.aggregator import Aggregator, NativeCombiner, column_type
from mapstate.aggregators.columns import column_of
from mapstate.errors import (
    ConfigurationError,
    DuplicateNameError,
    KeyEncodingError,
    UnknownColumnError,
    UnsupportedTypeError,
    check_unique,
)
from mapstate.keys import KeyCodec
from mapstate.schema import Field, KeyField
from mapstate.serializers.value_types import WireForm, wire_type
from mapstate.spark.driver.job import Job, Step
from mapstate.spark.executor.error_text import as_note
from mapstate.spark.interfaces import BatchAggregator, ensure_picklable, kind_of
from mapstate.spark.steps.batch_aggregate import Links
from mapstate.spark.steps.columns import (
    Expressions,
    Select,
    analysed,
    expressions_of,
    has_expressions,
    is_column,
    is_named,
    nested_in,
)
from mapstate.spec import StateSpec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField, StructType

    from mapstate.spark.driver.job import Branch
    from mapstate.spark.driver.window_rows import LateRows
    from mapstate.spark.streams.query import Query

Kept = TypeVar("Kept", covariant=True)
"""What `persistentAggregate` returns: a `PersistentAggregate`, for every kind of rows that there is."""


class Keepable(Protocol[Kept]):
    """Rows of a stream, to which steps can be added, and of which a state can be kept."""

    @property
    @abstractmethod
    def schema(self) -> StructType:
        """The columns of the rows."""

    @abstractmethod
    def with_step(self, step: Step, *, by_row: bool) -> Self:
        """The rows after one more step; ``by_row`` says that each row's results depend on that row alone."""

    def hidden_columns(self) -> dict[str, str]:
        """Columns that a state gets beside those of the rows, with their types."""
        return {}

    def adapted(
        self,
        state: StateSpec,  # noqa: ARG002
        aggregates: Mapping[str, Aggregator],
        *,
        by: Sequence[str],  # noqa: ARG002
    ) -> Mapping[str, Aggregator]:
        """The aggregators that do on these rows what the given ones say. Raises ConfigurationError."""
        return dict(aggregates)

    @abstractmethod
    def keep(self, job: Job) -> Kept:
        """The state of a job that is fed by these rows."""


class Groupable(Keepable[Kept], Protocol[Kept]):
    """Rows as `GroupedStream` needs them. ``name`` is the stream's, also of new values."""

    @property
    def name(self) -> str: ...


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
        for name, aggregator in aggregates.items():
            if not isinstance(aggregator, Aggregator):
                raise ConfigurationError(
                    f"{name} is a {kind_of(aggregator)}, not an aggregator: write {name}=Count(), or an instance of a "
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
        fields = tuple(
            Field(name, aggregator.describe(), aggregator.bind(types)) for name, aggregator in adapted.items()
        )
        for field in fields:
            wire_type(field.type, WireForm())
        if spec.blocks is not None:
            from mapstate.spark.driver.blocks import check_blocks

            check_blocks(spec, self._keys, fields, adapted.values())
        ensure_picklable(f"the spec of state {spec.state!r}", spec)
        for name, aggregator in adapted.items():
            ensure_picklable(f"the aggregator {name}={aggregator}", aggregator)
        read = {key.name: key.type for key in self._keys}
        for aggregator in adapted.values():
            names = aggregator.columns() or ([] if isinstance(aggregator, NativeCombiner) else list(self._types))
            read |= {name: column_type(types, name, aggregator) for name in names}
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


class Windowable(Groupable[Any], Protocol):
    """A stream as windows need it."""

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
        return grouped(self, columns, "for windows of all rows call persistentAggregate on the windows themselves")

    def persistentAggregate(self, state: StateSpec, /, *extra: Never, **aggregates: Aggregator) -> Kept:
        """Keeps aggregates of all rows of each window. See `GroupedStream.persistentAggregate`."""
        return GroupedStream(self, ()).persistentAggregate(state, *extra, **aggregates)


def grouped(rows: R, columns: Sequence[str | Column | list[str | Column]], instead: str) -> GroupedStream[Any, R]:
    """The rows by keys. Raises ConfigurationError for none, which says what to do ``instead``."""
    keys = [key for column in columns for key in (column if isinstance(column, list) else [column])]
    if not keys:
        raise ConfigurationError(f"groupBy() needs at least one column; {instead}")
    return GroupedStream(*with_keys(rows, keys))


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


class ChainedAggregate(Generic[R]):
    """Aggregators over the same rows of a batch, one after the other: Trident's ChainedAggregatorDeclarer.

    `chainEnd` gives one row for every combination of what they emit. Is one of them a ``partitionAggregate`` and none
    an ``aggregate``, each partition by itself.
    """

    def __init__(self, rows: R, keys: tuple[str, ...] = (), links: Links | None = None) -> None:
        self._rows = rows
        self._keys = keys
        self._links = links or Links()

    def aggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> ChainedAggregate[R]:
        """One more over the whole batch, or over each key. Raises ConfigurationError."""
        return self._with(self._links.with_links(own, aggregates, per_partition=False))

    def partitionAggregate(self, *own: BatchAggregator, **aggregates: Aggregator) -> ChainedAggregate[R]:
        """One more over each partition. Raises ConfigurationError."""
        return self._with(self._links.with_links(own, aggregates, per_partition=True))

    def _with(self, links: Links) -> ChainedAggregate[R]:
        return ChainedAggregate(self._rows, self._keys, links)

    def chainEnd(self) -> R:
        """The rows that they emit."""
        rows, links = self._rows, self._links
        if has_expressions(links.aggregators, rows.schema):
            rows, named = with_expressions(rows, links.aggregators)
            links = links.over_columns(named)
        return rows.with_step(links.over(rows.schema, self._keys), by_row=False)


def with_expressions(rows: R, aggregates: Mapping[str, Aggregator]) -> tuple[R, dict[str, Aggregator]]:
    """The rows with a column per expression, and the aggregators over these. Raises ConfigurationError."""

    def spark_name(column: Column) -> str:
        with analysed(str(column)):
            name: str = rows.with_step(Select(column), by_row=True).schema.names[0]
            return name

    expressions, named = expressions_of(aggregates, rows.schema.names, spark_name)
    columns = nested_in(aggregates, rows.schema) | {**expressions.columns}
    return (with_columns(rows, f"one of {', '.join(columns)}", columns) if columns else rows), named


def with_columns(rows: R, called: str, columns: Mapping[str, Column]) -> R:
    """The rows with more columns. Raises ConfigurationError, which says how they are ``called``."""
    more = rows.with_step(Expressions(columns), by_row=True)
    with analysed(called):
        _ = more.schema
    return more


def with_keys(rows: R, keys: Sequence[str | Column]) -> tuple[R, tuple[str, ...]]:
    """The rows with a column per key, also of each field of a struct, and their names. Raises ConfigurationError."""
    names: list[str] = []
    for key in keys:
        if isinstance(key, str):
            rows, fields = _with_fields(rows, key)
        elif is_column(key):
            rows, fields = _with_expression(rows, key)
        else:
            raise ConfigurationError(f"groupBy takes column names and expressions, not {key!r}")
        names += fields
    return rows, tuple(names)


def _with_expression(rows: R, key: Column) -> tuple[R, list[str]]:
    with analysed(f"the key {key}"):
        field = rows.with_step(Select(key), by_row=True).schema.fields[0]
    _check_sessions(field)  # here, because Spark Connect's withColumns leaves the metadata out
    name = field.name
    if name.casefold() not in _taken(rows):
        rows = with_columns(rows, f"the key {key}", {name: key})
    elif not is_named(key, name):
        raise DuplicateNameError(
            f"the key {key} has the name of a column: give it another one with alias(...)", name=name
        )
    return _with_fields(rows, name)


def _with_fields(rows: R, key: str) -> tuple[R, list[str]]:
    """The rows with a column for each field if ``key`` is a struct, or for one if it is ``struct.field``."""
    from pyspark.sql.types import StructType

    fields: list[Any] = rows.schema.fields
    structs = {field.name: field for field in fields if isinstance(field.dataType, StructType)}
    column, _, name = key.partition(".")
    if key in structs:
        added = _fields_of(structs[key])
    elif key not in rows.schema.names and column in structs and name in structs[column].dataType.names:
        key, added = column, {f"{column}_{name}": column_of(column).getField(name)}
    else:
        return rows, [key]
    for name in added:
        if name.casefold() in _taken(rows):
            raise DuplicateNameError(
                f"the key {key!r} is a struct, and its field needs the name {name!r}, which a column has: rename one",
                name=name,
            )
    return with_columns(rows, f"the key {key!r}", added), list(added)


def _fields_of(struct: Any) -> dict[str, Column]:
    """A key column per field. Spark raises the error of a row whose struct is null: no field would tell."""
    from pyspark.sql import functions as F

    key, names = struct.name, struct.dataType.names
    if not names:
        raise UnsupportedTypeError(f"the key {key!r} is a struct without fields. Nothing was written.", column=key)
    _check_sessions(struct)
    is_null = KeyEncodingError(
        f"the struct {key!r} is null in a row, and its key columns cannot tell it from a struct of nulls. Nothing of "
        f"this batch counts. Filter such rows out, or group by its fields, {key}.{names[0]} and so on.",
        column=key,
    )
    whole = column_of(key)
    first, *others = (whole.getField(name) for name in names)
    checked = F.when(whole.isNull(), F.raise_error(f"{is_null.message}\n{as_note(is_null)}\n")).otherwise(first)
    return dict(zip((f"{key}_{name}" for name in names), (checked, *others), strict=True))


def _check_sessions(field: StructField) -> None:
    if "spark.sessionWindow" in field.metadata:
        raise ConfigurationError(
            f"the key {field.name!r} has sessions of Spark's, which only Spark's own groupBy joins. Nothing was "
            "written. Take stream.window(SessionWindow.of('10 minutes'), timestampField='at')."
        )


def _taken(rows: Keepable[Any]) -> set[str]:
    """The names of the columns, as Spark compares them: it would replace a column that differs in case."""
    return {name.casefold() for name in rows.schema.names}
