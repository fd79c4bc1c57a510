"""One partition of a batch, given to a user's own state."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mapstate.backing_map import close_if_possible
from mapstate.errors import MapStateError, UpdaterError, cut
from mapstate.maps.serialized import CHUNK_BYTES
from mapstate.spark.executor.error_text import SentError
from mapstate.spark.executor.task import (
    REPORT_COLUMN,
    TaskReport,
    arrow_schema,
    columns_to_python,
    partition_id,
    report_line,
    slices,
)
from mapstate.spark.interfaces import Collector, StateFactory, StateUpdater

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class UpdateTask:
    """The function that `mapInArrow` runs, once per partition and try. Picklable."""

    def __init__(
        self,
        factory: StateFactory,
        updater: StateUpdater,
        *,
        by: Sequence[str],
        emitted: StructType,
        partitions: int,
        chunk_size: int,
    ) -> None:
        from pyspark.sql.types import StringType, StructField, StructType

        self.factory = factory
        self.updater = updater
        self.by = by
        self.emitted = emitted
        self.partitions = partitions
        self._chunk_size = chunk_size
        self.schema = StructType([*emitted.fields, StructField(REPORT_COLUMN, StringType())])
        self._txid = -1

    def of_batch(self, batch_id: int) -> UpdateTask:
        task = copy.copy(self)
        task._txid = batch_id
        return task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Updates the partition's state; yields what is emitted, and at the end the report."""
        report = TaskReport(partition=partition_id(), holder=uuid.uuid4().hex)
        try:
            yield from self._update(batches, report)
        except MapStateError as error:
            report.error = SentError.of(error)
        except Exception as error:  # noqa: BLE001  anybody's code
            names = f"{type(self.updater).__name__} or its state"
            report.error = SentError.of(
                UpdaterError(
                    f"{names} raised {type(error).__name__} in partition {report.partition} of batch {self._txid}: "
                    f"{cut(error)}",
                    updater=type(self.updater).__name__,
                )
            )
        for _ in batches:
            pass  # what is left unread would block the sender
        yield report_line(report, self.schema)

    def _update(self, batches: Iterator[pa.RecordBatch], report: TaskReport) -> Iterator[pa.RecordBatch]:
        state = self.factory.make_state(report.partition, self.partitions)
        try:
            state.begin_commit(self._txid)
            for rows in self._chunks(batches):
                collector = Collector()
                report.rows_in += len(rows)
                self.updater.update_state(state, rows, collector)
                report.rows_done += len(rows)
                if collector.emitted:
                    yield self._emitted(collector.emitted)
            state.commit(self._txid)
        finally:
            close_if_possible(state)

    def _chunks(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[dict[str, Any]]]:
        empty = True
        for batch in batches:
            for part in slices(batch, lambda: self._chunk_size, CHUNK_BYTES):
                names = part.schema.names
                columns = columns_to_python(part.columns, names)
                empty = False
                yield [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        if empty:
            yield []

    def _emitted(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        arrow = arrow_schema(self.schema)
        width = len(self.emitted.fields)
        for values in rows:
            if len(values) != width:
                raise UpdaterError(
                    f"{type(self.updater).__name__} emitted {len(values)} values, its output is "
                    f"{self.updater.output!r}",
                    updater=type(self.updater).__name__,
                )
        arrays = [pa.array(column, arrow.field(i).type) for i, column in enumerate(zip(*rows, strict=True))]
        return pa.RecordBatch.from_arrays([*arrays, pa.nulls(len(rows), pa.string())], schema=arrow)
