"""All rows of a batch on the driver, one partition after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from mapstate.spark.driver.access import access_of, configured
from mapstate.spark.driver.frames import ONE_DRAW, computed_once

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@contextmanager
def by_partition(rows: DataFrame) -> Iterator[Iterator[pa.RecordBatch]]:
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
