"""A batch on its way to the store, and what comes back: how its rows are grouped in front of the tasks, and their run.

Every batch of a job is grouped alike, so the columns for it are made once. Each column is some calls to the JVM: a
batch of a few rows waits for them as long as for its rows.

Writes run once. Where somebody asked for new values, they are materialized together with the reports,
in two replicas: a frame that is only persisted would be computed again, writes and all, when an
executor that holds a part of it dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mapstate.aggregators.aggregator import NativeCombiner
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.fields import Fields
from mapstate.schema import KeyField, KeyOrder
from mapstate.spark.driver.access import access_of, configured
from mapstate.spark.driver.frames import ONE_DRAW, computed_once
from mapstate.spark.executor.task import REPORT_COLUMN, BatchTask, TaskReport, reports_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from mapstate.protocol.windows import PaneChange, WindowCommit

_WIDE = ("binary", "array", "map", "struct")


class Grouping:
    """How the rows of each batch are grouped. Driver; it lives no longer than its JVM, see `fits`.

    Gives one row per key with its partials, and their number of rows last; or, where an aggregator is in plain
    Python, the rows in key order. ``partials`` has the number of columns per field, or None for raw rows;
    ``rows_of`` names their columns. ``is_collected`` says whether all rows of a batch go to the driver at once, where
    it applies them; see `apply_on_driver`. Unless ``is_partial``, rows are aggregated behind the shuffle alone.
    """

    def __init__(self, batch_df: DataFrame, keys: Sequence[KeyField], fields: Fields, rows_of: Sequence[str]) -> None:
        from pyspark.sql import functions as F

        self._origin = access_of(batch_df).origin
        self._fields = fields.fields
        self.keys = [column_of(key.name).alias(f"key{i}") for i, key in enumerate(keys)]
        self.places = [F.col(f"key{i}") for i in range(len(keys))]
        self.values: list[Column] = []
        self.partials: list[int] | None = None
        native = [aggregator for aggregator in fields.aggregators if isinstance(aggregator, NativeCombiner)]
        if len(native) == len(fields.aggregators):  # one that is not sends all of them through Python
            columns = [aggregator.partials(field.type) for aggregator, field in zip(native, fields.fields, strict=True)]
            self.partials = [len(of) for of in columns]
            self.values = [
                column.alias(f"partial{i}_{part}") for i, of in enumerate(columns) for part, column in enumerate(of)
            ]
            self.values.append(F.count(F.lit(1)).alias("rows"))
        else:
            self.values = [column_of(name).alias(f"value{i}") for i, name in enumerate(rows_of)]
        self.is_collected = self.partials is not None
        # Spark hashes 0.0 and -0.0 apart and groups them together, so it would shuffle such rows twice.
        self.may_skip_partial = (
            self.is_collected and bool(keys) and not {key.type for key in keys} & {"float", "double"}
        )
        self.is_partial = True
        self._is_narrow: bool | None = None
        self._key_fields = keys
        self._sorted_by: list[Column] | None = None

    def fits(self, batch_df: DataFrame, fields: Fields) -> bool:
        """Whether this is how such a batch is grouped: columns belong to the JVM that they were made in."""
        return self._origin is access_of(batch_df).origin and self._fields == fields.fields

    def of(self, batch_df: DataFrame) -> DataFrame:
        """A batch's rows as tasks take them."""
        if self.partials is not None:
            if not self.is_partial:
                batch_df = batch_df.repartition(*(column_of(key.name) for key in self._key_fields))
            return batch_df.groupBy(*self.keys).agg(*self.values)
        return self.by_key(batch_df.select(*self.keys, *self.values))

    def by_key(self, rows: DataFrame) -> DataFrame:
        """Rows, each key's in one partition and one after the other; one row per key is left as it is."""
        if self.partials is not None:
            return rows
        if not self.keys:
            return rows.repartition(1)
        return rows.repartition(*self.places).sortWithinPartitions(*self.places)

    def is_narrow(self, rows: DataFrame) -> bool:
        """Whether no row has a collection or a sketch. Asks for the schema once."""
        if self._is_narrow is None:
            self._is_narrow = not any(field.dataType.typeName() in _WIDE for field in rows.schema)
        return self._is_narrow

    def in_order(self, rows: DataFrame, order: KeyOrder | None) -> DataFrame:
        """The rows, partition by partition in the order that a store takes best. Raw rows are in key order already."""
        if order is None or self.partials is None or not self.places or not self.is_narrow(rows):
            return rows
        if self._sorted_by is None:
            self._sorted_by = self.order_of(order)
        return rows.sortWithinPartitions(*self._sorted_by)

    def order_of(self, order: KeyOrder) -> list[Column]:
        """What rows are sorted by, so that a store takes them best."""
        from pyspark.sql import functions as F

        if order == "key":
            return self.places
        if order == "hash":
            return [F.xxhash64(*self.places)]
        return [by_part(order, self._key_fields, self.places)]


def by_part(parts: int, keys: Sequence[KeyField], places: Sequence[Column]) -> Column:
    """A number by which rows with the key columns ``places`` are sorted, by part and then by a hash. Driver."""
    from pyspark.sql import functions as F

    text = F.concat_ws("|", *(_key_text(place, key.type) for place, key in zip(places, keys, strict=True)))
    part = F.pmod(F.crc32(text), F.lit(parts))
    return F.shiftleft(part, 48).bitwiseOR(F.shiftrightunsigned(F.xxhash64(*places), 16))


def _key_text(place: Column, kind: str) -> Column:
    """A key column as `KeyCodec` writes it; not for nulls and what it escapes, whose parts come out of order."""
    from pyspark.sql import functions as F

    if kind == "timestamp":
        utc = F.to_utc_timestamp(place, F.current_timezone())
        return F.date_format(utc, "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'")
    return place.cast("string")


class AttemptResult:
    """What an attempt came to in one state: the tasks' reports and, where asked for, the new values.

    ``rows`` are in, ``keys`` were written or found written, and ``keys_delta`` keys added less those removed, None if
    a task cannot tell. ``rows_sent`` were counted in front of the shuffle, None where nobody counted. ``window_commit``
    is what the commit of a state with windows says, ``panes`` what the attempt wrote and purged of panes, or of the log
    of changes.
    """

    def __init__(
        self, reports: list[TaskReport], new_values: DataFrame | None, release: Callable[[], None] | None = None
    ) -> None:
        deltas = [report.keys_delta for report in reports]
        self.reports = reports
        self.rows = sum(report.rows_done for report in reports)
        self.keys = sum(report.keys for report in reports)
        self.keys_delta = None if None in deltas else sum(delta for delta in deltas if delta is not None)
        self.new_values = new_values
        self.rows_sent: int | None = None
        self.window_commit: WindowCommit | None = None
        self.panes: PaneChange | None = None
        self._release = release

    def release(self) -> None:
        """Releases the storage of the new values."""
        if self._release is not None:
            self._release()
            self._release = None


def apply_on_executors(rows: DataFrame, task: BatchTask) -> AttemptResult:
    """Runs the attempt's one job; the tasks read and write the store. Raises Spark's own errors.

    ``rows`` are as `Grouping.of` gives them.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    with configured(rows, ONE_DRAW):
        if task.new_values is None:
            line_type = StructType([StructField(REPORT_COLUMN, StringType())])  # as text it would be asked of the JVM
            lines = rows.mapInArrow(task, line_type).collect()
            return AttemptResult(reports_of([line[0] for line in lines]), None)
        out, release = computed_once(rows.mapInArrow(task, task.new_values))
    report = F.col(REPORT_COLUMN)
    lines = out.where(report.isNotNull()).select(report).collect()
    new_values = out.where(report.isNull()).drop(REPORT_COLUMN)
    return AttemptResult(reports_of([line[0] for line in lines]), new_values, release)
