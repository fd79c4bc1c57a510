"""A batch on its way to the store, and what comes back.

Writes run once. Where somebody asked for new values, they are materialized together with the reports,
in two replicas: a frame that is only persisted would be computed again, writes and all, when an
executor that holds a part of it dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from mapstate.aggregators.fields import Fields
from mapstate.backing_map import Scan
from mapstate.errors import UsageError
from mapstate.keys import KeyCodec, KeyField, StoreKey
from mapstate.ledger import record_pages
from mapstate.maps.serialized import Room
from mapstate.serializers import RecordCodec, serializer
from mapstate.spark.cache_lease import fixed_partitions, spread_of
from mapstate.spark.plan import Plan
from mapstate.spark.query import configured
from mapstate.spark.task import REPORT_COLUMN, BatchTask, TaskReport, arrow_schema
from mapstate.spec import StateSpec
from mapstate.transitions import Commit, LedgerRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = [
    "INSIDE",
    "IS_THERE",
    "OLD_COLUMN",
    "ONE_DRAW",
    "WAS_THERE",
    "Applied",
    "apply_on_driver",
    "apply_on_executors",
    "computed_once",
    "new_values_type",
    "read_back",
]

INSIDE = "__mapstate_"
OLD_COLUMN = f"{INSIDE}old_"
WAS_THERE = f"{INSIDE}was_there"
IS_THERE = f"{INSIDE}is_there"
_PAGE = 5000
# Where an executor dies, Spark computes again what it held of the shuffle; of an input that is not deterministic that
# is another draw. Tasks that have ended took the first: with these (Spark 4.1) the job fails and is not mixed.
ONE_DRAW = {
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
}


# How PySpark takes a table: 0 records a batch is no bound for Spark, and an error here; instants are in UTC already.
_AS_ARROW = {"spark.sql.execution.arrow.maxRecordsPerBatch": "10000", "spark.sql.session.timeZone": "UTC"}


class Applied:
    """What an attempt came to: the tasks' reports and, where asked for, the new values.

    ``missing`` of the new values could not be read back, of a batch that was committed already.
    """

    def __init__(
        self,
        reports: list[TaskReport],
        new_values: DataFrame | None,
        release: Callable[[], None] | None = None,
        *,
        missing: int = 0,
    ) -> None:
        self.reports = reports
        self.new_values = new_values
        self.missing = missing
        self._release = release

    def release(self) -> None:
        """Lets the storage of the new values go."""
        if self._release is not None:
            self._release()
            self._release = None


def apply_on_executors(rows: DataFrame, task: BatchTask) -> Applied:
    """Runs the attempt's one job; the tasks read and write the store. Raises Spark's own errors.

    ``rows`` are as `Plan.of` gives them.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    with configured(rows, ONE_DRAW), fixed_partitions(rows, task.spec):
        task.spread = spread_of(rows) if task.spec.cache_size else None
        if task.new_values is None:
            line_type = StructType([StructField(REPORT_COLUMN, StringType())])  # as text it would be asked of the JVM
            lines = rows.mapInArrow(task, line_type).collect()
            return Applied(_reports(line[0] for line in lines), None)
        out, release = computed_once(rows.mapInArrow(task, task.new_values))
    report = F.col(REPORT_COLUMN)
    lines = out.where(report.isNotNull()).select(report).collect()
    return Applied(
        _reports(line[0] for line in lines),
        out.where(report.isNull()).drop(REPORT_COLUMN),
        release,
    )


def apply_on_driver(rows: DataFrame, task: BatchTask, plan: Plan) -> Applied:
    """Aggregates on the executors and applies on the driver: for a store in its process, and for small batches.

    One row per key comes all at once, until a batch has more than ``spark.driver.maxResultSize`` of them: that one is
    computed again. From then on, and where each row comes, it is one partition after the other. New values are kept in
    the driver's memory where asked for.
    """
    batches = _at_once(rows) if plan.at_once else None
    plan.at_once = batches is not None
    if batches is not None:
        out = list(task(iter(batches)))
    else:
        with _by_partition(rows) as later:
            out = list(task(later))
    line = out.pop().column(REPORT_COLUMN)[0].as_py()
    new_values = None
    if task.new_values is not None:
        new_values = _frame(rows, task.new_values, out)
    return Applied(_reports([line]), new_values)


def _at_once(rows: DataFrame) -> list[pa.RecordBatch] | None:
    """All rows, by one job and with no Python on the executors; None where Spark finds them too many."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        with configured(rows, ONE_DRAW):
            # Planned and begun here: toArrow does it in a thread of its own, for which it waits for ever where an Error
            # ends it, such as NoSuchMethodError of a source that is compiled for another Spark.
            rows._jdf.queryExecution().toRdd()
            batches: list[pa.RecordBatch] = rows.toArrow().to_batches()
            return batches
    except (PySparkException, Py4JError) as error:
        if "spark.driver.maxResultSize" not in str(error):
            raise
        return None


@contextmanager
def _by_partition(rows: DataFrame) -> Iterator[Iterator[pa.RecordBatch]]:
    """All rows, a job for each partition, so where there are executors to lose all are computed by one job before."""
    packed, release = rows.mapInArrow(_to_ipc, "batch binary"), _nothing
    if not rows.sparkSession.sparkContext._jsc.isLocal():
        with configured(rows, ONE_DRAW):
            packed, release = computed_once(packed)
    try:
        lines = packed.toLocalIterator(prefetchPartitions=True)
        yield (batch for row in lines for batch in pa.ipc.open_stream(bytes(row[0])))
    finally:
        release()


def computed_once(frame: DataFrame) -> tuple[DataFrame, Callable[[], None]]:
    """The frame, computed, in two replicas and never again, and what lets it go."""
    from pyspark import StorageLevel

    kept = frame.localCheckpoint(True, StorageLevel.MEMORY_AND_DISK_2)
    return kept, lambda: kept._jdf.queryExecution().logical().rdd().unpersist(False)


def _nothing() -> None:
    """There is nothing to let go."""


def read_back(
    batch_df: DataFrame, spec: StateSpec, fields: Fields, ledger: LedgerRecord, commit: Commit | None, *, old: bool
) -> Applied:
    """The new values of a batch that is committed already: the records that carry its txid.

    Scans the state, a page at a time. None where the batch's records cannot be told any more. ``old`` values are
    those that the records keep: right for every record that carries the txid, because the attempt that was
    committed wrote it once, on what was committed before. A record that is gone (expired, evicted, or removed by the
    batch and then dropped by a vacuum), or that a later attempt has written, is counted as missing.
    """
    schema = new_values_type(batch_df, ledger.keys, fields, old=old)
    batches: list[pa.RecordBatch] = []
    found = 0
    if commit is not None and spec.type != "non-transactional":
        store: Any = spec.open()
        if not isinstance(store, Scan):
            raise UsageError(
                f"the store of state {spec.state!r} cannot list its keys, so the new values of batch "
                f"{commit.batch_id} cannot be read back for what lies downstream"
            )
        backing: Any = store
        form = serializer(spec.serializer)
        codec = RecordCodec(form, spec.state, spec.type, ledger.fields, ledger.layouts)
        keys = KeyCodec(ledger.keys, native=form.native)
        seen: set[StoreKey] = set()  # a scan may give a key twice
        room = Room(ledger.fields)
        for part in (part for page in record_pages(store, _PAGE) for part in room.parts(page)):
            stored = backing.multi_get(part)
            room.learn(stored)
            records = zip(part, codec.loads(part, stored), strict=True)
            own = {text: one for text, one in records if one is not None and one[0] == commit.txid}
            fresh = {text: one for text, one in own.items() if text not in seen}
            seen.update(fresh)
            if fresh:
                batches.append(_page(schema, keys, fields, fresh, old=old))
        found = len(seen)
    missing = 0 if commit is None else commit.keys - found
    return Applied([], _frame(batch_df, schema, batches), missing=missing)


def _page(
    schema: StructType, keys: KeyCodec, fields: Fields, records: dict[StoreKey, Any], *, old: bool
) -> pa.RecordBatch:
    """New values by key text, as tasks give them out."""
    arrow = arrow_schema(schema)
    rows = [
        [*keys.decode(text), *fields.shown(one[1]), *(fields.with_presence(one[1], one[2]) if old else ())]
        for text, one in records.items()
    ]
    columns = list(zip(*rows, strict=True))
    arrays = [pa.array(column, arrow.field(at).type) for at, column in enumerate(columns)]
    return pa.RecordBatch.from_arrays([*arrays, pa.nulls(len(rows), pa.string())], schema=arrow)


def new_values_type(batch_df: DataFrame, keys: Sequence[KeyField], fields: Fields, *, old: bool = False) -> StructType:
    """The schema of new values: the key columns, one column per aggregate, and the tasks' own last.

    With ``old``, the aggregates before the batch stand behind them, and whether the key was there and is there.
    """
    from pyspark.sql.types import BooleanType, StringType, StructField, StructType

    columns = [StructField(key.name, batch_df.schema[key.name].dataType) for key in keys]
    shown = [
        _data_type("string" if field.type == "any" else one.result_type(field.type))
        for field, one in zip(fields.fields, fields.aggregators, strict=True)
    ]
    columns += [StructField(field.name, kind) for field, kind in zip(fields.fields, shown, strict=True)]
    if old:
        columns += [StructField(f"{OLD_COLUMN}{at}", kind) for at, kind in enumerate(shown)]
        columns += [StructField(WAS_THERE, BooleanType()), StructField(IS_THERE, BooleanType())]
    return StructType([*columns, StructField(REPORT_COLUMN, StringType())])


def _to_ipc(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each Arrow batch as one binary value. Executor."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()], pa.binary())], ["batch"])


def _reports(lines: Any) -> list[TaskReport]:
    decoder = msgspec.json.Decoder(TaskReport)
    return [decoder.decode(line) for line in lines]


def _frame(batch_df: DataFrame, schema: StructType, batches: list[pa.RecordBatch]) -> DataFrame:
    table = pa.Table.from_batches(batches, schema=arrow_schema(schema))
    with configured(batch_df, _AS_ARROW):
        return batch_df.sparkSession.createDataFrame(table, schema=schema).drop(REPORT_COLUMN)


def _data_type(name: str) -> Any:
    from pyspark.sql.types import DataType

    return DataType.fromDDL(name)
