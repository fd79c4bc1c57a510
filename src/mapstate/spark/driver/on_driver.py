"""Batches that the driver applies itself: of a store in its process, where a job asks for it, and those of few keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from mapstate.spark.driver.access import access_of, configured
from mapstate.spark.driver.apply import AttemptResult, Grouping
from mapstate.spark.driver.frames import ONE_DRAW, computed_once
from mapstate.spark.driver.new_values import new_values_frame
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.executor.task import REPORT_COLUMN, BatchTask, reports_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def apply_on_driver(rows: DataFrame, task: BatchTask, grouping: Grouping) -> AttemptResult:
    """Aggregates on the executors and applies on the driver: for a store in its process, and where a job asks for it.

    One row per key comes all at once, until those of a batch exceed ``spark.driver.maxResultSize``: that one is
    computed again. From then on, and where each row comes, it is one partition after the other. New values are kept in
    the driver's memory where asked for.
    """
    batches = collected(rows) if grouping.is_collected else None
    grouping.is_collected = batches is not None
    if batches is not None:
        return _applied(rows, task, iter(batches))
    with _by_partition(rows) as later:
        return _applied(rows, task, later)


def _applied(rows: DataFrame, task: BatchTask, batches: Iterator[pa.RecordBatch]) -> AttemptResult:
    """What one task, on the driver, makes of the batches of ``rows``."""
    out = list(task(batches))
    line = out.pop().column(REPORT_COLUMN)[0].as_py()
    new_values = None if task.new_values is None else new_values_frame(rows, task.new_values, out)
    return AttemptResult(reports_of([line]), new_values)


def collected(rows: DataFrame) -> list[pa.RecordBatch] | None:
    """All rows, by one job and with no Python on the executors; None where Spark finds them too many."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        with configured(rows, ONE_DRAW):
            # Planned and begun here: toArrow does it in a thread of its own, for which it waits for ever where an Error
            # ends it, such as NoSuchMethodError of a source that is compiled for another Spark.
            access_of(rows).plan_rows()
            batches: list[pa.RecordBatch] = calls().to_arrow(rows).to_batches()
            return batches
    except (PySparkException, Py4JError) as error:
        if "spark.driver.maxResultSize" not in str(error):
            raise
        return None


def apply_if_small(rows: DataFrame, task: BatchTask, grouping: Grouping, most_keys: int) -> AttemptResult | None:
    """`apply_on_driver`, at once. None, and nothing was written, where a batch has more than ``most_keys``.

    Of such a batch no more than so many keys, and one more, of each partition come to the driver. A key of rolling
    windows counts once per tile. None also where partials are collections or sketches, of which a few may be large.
    """
    if not grouping.is_narrow(rows):
        return None
    place = f"monotonically_increasing_id() & {2**33 - 1}"  # within its partition
    batches = collected(rows.where(f"{place} <= {most_keys}"))  # as text it is one call to the JVM instead of fifteen
    if batches is None or sum(map(len, batches)) > most_keys:
        return None
    return _applied(rows, task, iter(batches))


@contextmanager
def _by_partition(rows: DataFrame) -> Iterator[Iterator[pa.RecordBatch]]:
    """All rows, a job for each partition, so where there are executors to lose all are computed by one job before."""
    packed, release = rows.mapInArrow(_to_ipc, "batch binary"), _nothing
    if not access_of(rows).is_local():
        with configured(rows, ONE_DRAW):
            packed, release = computed_once(packed)
    try:
        lines = packed.toLocalIterator(prefetchPartitions=True)
        yield (batch for row in lines for batch in pa.ipc.open_stream(bytes(row[0])))
    finally:
        release()


def _nothing() -> None:
    """There is nothing to release."""


def _to_ipc(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each Arrow batch as one binary value. Executor."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()], pa.binary())], ["batch"])
