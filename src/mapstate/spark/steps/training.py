"""Training sets: rolling windows as of a time of each row, out of a state, or out of the rows of its history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator, NativeCombiner
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.of_column import INTEGERS
from mapstate.aggregators.results import check_joined, joins_of
from mapstate.aggregators.tiles import Answers
from mapstate.errors import INSIDE, ConfigurationError, UnsupportedTypeError
from mapstate.protocol.ledger_record import encode_ledger
from mapstate.protocol.windows import LATEST, NEVER
from mapstate.reader import StateReader
from mapstate.reader.aliased import version_of
from mapstate.reader.rolling import end_of, no_rolling_windows, readable_fields
from mapstate.reader.tables import types_of
from mapstate.reader.times import clamped
from mapstate.schema import Field, TimeType
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.executor.query_task import QueryTask
from mapstate.spark.executor.task import arrow_schema
from mapstate.spark.executor.training_task import AsOf, HistoryTask, PlannedState
from mapstate.spark.interfaces import ensure_picklable
from mapstate.spark.steps.batch_aggregate import Links
from mapstate.spark.steps.columns import analysed, column_names, expressions_of, nested_in
from mapstate.spark.steps.state_query import KnownState, Queried, StaticState, are_same_keys, check_new, names_of
from mapstate.values import column_type
from mapstate.windows import Duration, RollingWindows

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_TIME, _ASKS = f"{INSIDE}time", f"{INSIDE}asks"


def pointInTime(
    frame: DataFrame,
    state: Queried,
    *,
    keys: Sequence[str] | str,
    at: str,
    columns: Sequence[str] | Mapping[str, str] | str | None = None,
) -> DataFrame:
    """The rows of a batch DataFrame, and beside each what rolling windows held for its key as of its time.

    ``state``    as for `stateQuery`; its store is one that executors reach
    ``keys``     the columns that make up the key, in the order of the state's key columns
    ``at``       the column with the time, rounded down as ``multi_get(keys, at=times)`` does
    ``columns``  which columns of the state: names, or ``{column: new name}``; all by default

    A key that was never seen, and a row without a time, get nulls. All is as of the last batch at this call; a
    StaleBatchError once two more batches wrote a key. Rows are shuffled by key, so a task reads each record once. The
    call runs a Spark job, which looks for the earliest time.

    Raises WindowGoneError for a time that is not kept any more, UsageError for a state without rolling windows,
    StateNotFoundError, StateSchemaError where columns and key differ in type, and ConfigurationError.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    wanted = names_of(columns)
    asked = KnownState.of(state, wanted)
    if isinstance(asked, StaticState):
        raise ConfigurationError("pointInTime asks states of mapstate, and this one is your own")
    spec, aggregators = asked.spec, asked.aggregators
    if not spec.backend.shared_between_processes:
        raise ConfigurationError(
            f"the store of state {spec.state!r} lives in one process, and Spark reads it in others. Nothing was read. "
            "Take open_reader(...).multi_get(keys, at=times) there."
        )
    names = _checked(frame, keys, "pointInTime")
    if not asked.may_be_absent:  # else the stream's own version
        spec = replace(spec, name=version_of(spec.backend, spec.state))
    with StateReader(spec.backend, spec.state, "committed", {}) as reader:
        ledger = reader.ledger()
    record = ledger.rolling
    if record is None:
        raise no_rolling_windows(spec.state)
    fields = readable_fields(ledger, aggregators, wanted)
    known = KnownState(spec, ledger.keys, fields, aggregators, may_be_absent=False, is_rolling=True)
    known.check_keys(frame.schema, names, "pointInTime")
    shown, added = known.columns(columns, with_keys=False)
    check_new(frame.schema, added, option="columns")
    kind = _time_type(frame, at, record.definition.type, caller="pointInTime")
    if record.horizon != NEVER:  # else any time can be asked for
        earliest = F.min(column_of(at))
        (first,) = frame.agg(F.unix_micros(earliest) if kind == "timestamp" else earliest).first() or (None,)
        if first is not None:
            end_of(ledger, clamped(first, kind))
    asks = tuple(name for name, _ in shown)
    planned = PlannedState(spec, aggregators=aggregators, ledger=encode_ledger(ledger), columns=asks)
    task = QueryTask(planned, AsOf(), keys=[*names, at], shown=shown, added=arrow_schema(added), before=None)
    return _by_key(frame, names, at).mapInArrow(task, StructType([*frame.schema.fields, *added.fields]))


def rollingFeatures(
    history: DataFrame,
    queries: DataFrame,
    windows: RollingWindows,
    *,
    keys: Sequence[str] | str,
    timestampField: str,
    at: str,
    startTime: Duration = 0,
    **aggregates: Aggregator,
) -> DataFrame:
    """The rows of ``queries``, and beside each what rolling windows over ``history`` are as of its time.

    The columns and the rounding are those of a state that has all rows of ``history``; the times are of any age.

    ``keys``            columns of both DataFrames
    ``timestampField``  the column of ``history`` with a row's time, a timestamp or a bigint; rows without do not count
    ``at``              the column of ``queries`` with the time, of the same type
    ``aggregates``      as for a stream, ``spend=Sum("amount")``; and so are ``windows`` and ``startTime``

    A key without a row in ``history``, and a query without a time, get nulls. A task has one value per unit of time of
    one key in memory. Raises ConfigurationError.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructField, StructType

    if not isinstance(windows, RollingWindows):
        raise ConfigurationError(f"rollingFeatures takes windows such as RollingWindows.of('1 hour'), not {windows!r}")
    names, _ = (_checked(frame, keys, "rollingFeatures") for frame in (history, queries))
    history_types, query_types = (
        [frame.schema[name].dataType.simpleString() for name in names] for frame in (history, queries)
    )
    if not are_same_keys(query_types, history_types):
        raise ConfigurationError(
            f"rollingFeatures compares the keys of history ({', '.join(history_types)}) with those of queries "
            f"({', '.join(query_types)}): cast what differs"
        )
    kind = _time_type(history, timestampField, "timestamp", "bigint", caller="rollingFeatures")
    _time_type(queries, at, kind, caller="rollingFeatures")
    definition = windows.definition(kind, startTime=startTime, lag=0, retention=0, idle=None)
    links = Links().with_links((), aggregates, per_partition=False)
    check_joined(links.aggregators, "a rolling window")
    history, named = _with_expressions(history, links.aggregators)
    types = {field.name: field.dataType.simpleString() for field in history.schema.fields}
    for name, aggregator in named.items():
        ensure_picklable(f"the aggregator {name}={aggregator}", aggregator)
    fields = Fields(
        [Field(name, aggregator.describe(), aggregator.bind(types)) for name, aggregator in named.items()], named
    )
    answers = Answers(joins_of(fields.fields, named), definition)
    shown = types_of((), answers.fields).items()
    added = StructType([StructField(name, calls().from_ddl(column_type(of))) for name, of in shown])
    check_new(queries.schema, added, option=None)

    read, widths = [], []
    if fields.native:
        pairs = zip(named.values(), fields.fields, strict=True)
        partials = [
            aggregator.partials(field.type) for aggregator, field in pairs if isinstance(aggregator, NativeCombiner)
        ]
        widths = list(map(len, partials))
        values = [column.alias(f"{INSIDE}value{i}") for i, column in enumerate(chain.from_iterable(partials))]
    else:
        of_each = (
            aggregator.columns() or ([] if isinstance(aggregator, NativeCombiner) else types)
            for aggregator in named.values()
        )
        read = list(dict.fromkeys(chain.from_iterable(of_each)))
        values = list(map(column_of, read))
    places = [f"{INSIDE}key{i}" for i in range(len(names))]
    given = queries.toDF(*(f"{INSIDE}row{i}" for i in range(len(queries.columns))))

    def placed(frame: DataFrame, columns: Sequence[str], *, asks: bool) -> DataFrame:
        """The rows behind their key and their time, in full units from ``startTime`` on."""
        *of_key, time = map(column_of, columns)
        number = F.unix_micros(time) if kind == "timestamp" else time.cast("bigint")
        since = F.when(number.between(-LATEST, LATEST), number - F.lit(definition.offset))
        units = since - F.pmod(since, F.lit(definition.unit))
        parts = [  # 0.0 and -0.0 are one key
            (column + F.lit(0.0).cast(of) if of in ("float", "double") else column).alias(place)
            for column, of, place in zip(of_key, history_types, places, strict=True)
        ]
        return frame.select(*parts, units.alias(_TIME), F.lit(asks).alias(_ASKS), "*")

    in_front = [*places, _TIME, _ASKS]
    rows = placed(history, [*names, timestampField], asks=False).where(column_of(_TIME).isNotNull())
    rows = rows.groupBy(*in_front).agg(*values) if fields.native else rows.select(*in_front, *values)
    asked_by = [given.columns[queries.columns.index(name)] for name in (*names, at)]
    both = rows.unionByName(placed(given, asked_by, asks=True), allowMissingColumns=True)
    task = HistoryTask(
        *(fields, answers), unit=definition.unit, keys=len(names), read=read, widths=widths, added=arrow_schema(added)
    )
    return _by_key(both, places, _ASKS, _TIME).mapInArrow(task, StructType([*queries.schema.fields, *added.fields]))


def _by_key(frame: DataFrame, keys: Sequence[str], *order: str) -> DataFrame:
    spread = frame.repartition(*map(column_of, keys)) if keys else frame.repartition(1)
    return spread.sortWithinPartitions(*map(column_of, [*keys, *order]))


def _checked(frame: DataFrame, keys: Sequence[str] | str, caller: str) -> list[str]:
    if frame.isStreaming:
        raise ConfigurationError(f"{caller} takes batch DataFrames, and this one is a stream: {caller} in foreachBatch")
    return column_names(frame.schema, [keys] if isinstance(keys, str) else keys, caller)


def _time_type(frame: DataFrame, column: str, *kinds: TimeType, caller: str) -> TimeType:
    """The type of the times in a column, one of ``kinds``. Raises UnknownColumnError and UnsupportedTypeError."""
    column_names(frame.schema, [column], caller)
    type_name = frame.schema[column].dataType.simpleString()
    kind = "bigint" if type_name in INTEGERS else type_name
    if kind not in kinds:
        said = f"{caller} takes times that are a {' or a '.join(kinds)}, and {column!r} is a {type_name}: cast it"
        raise UnsupportedTypeError(said, column=column, type=type_name)
    return kind


def _with_expressions(history: DataFrame, aggregates: Mapping[str, Any]) -> tuple[DataFrame, dict[str, Aggregator]]:
    def spark_name(column: Column) -> str:
        with analysed(str(column)):
            name: str = history.select(column).columns[0]
            return name

    expressions, named = expressions_of(aggregates, history.columns, spark_name)
    columns = nested_in(aggregates, history.schema) | {**expressions.columns}
    with analysed(f"one of {', '.join(columns)}"):
        return (history.withColumns(columns) if columns else history), named
