"""What can be started as a streaming query, or used as a foreachBatch function in a job that exists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mapstate.checkpoint import check_first_offsets
from mapstate.errors import MapStateError, UsageError
from mapstate.spark.query import check_increments

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Startable"]


class Startable(ABC):
    """A function of micro-batches, with the stream that brings them.

    One instance serves one query at a time. Called on the driver, once per micro-batch. ``last_error`` is
    the error that stopped the query: Spark's own StreamingQueryException has only its text.
    """

    def __init__(self, df: DataFrame) -> None:
        self._df = df
        self.last_error: MapStateError | None = None

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Applies one micro-batch. What Spark calls.

        Raises LedgerError where the protocol refuses, DataError, StoreError; Spark then stops the query,
        and nothing of the batch counts.
        """
        try:
            self._apply(batch_df, batch_id)
        except MapStateError as error:
            self.last_error = error  # Spark passes on the text alone
            raise

    @property
    def _adds_rows(self) -> bool:
        """Whether a state of mapstate's adds up the stream's own rows."""
        return False

    @abstractmethod
    def _apply(self, batch_df: DataFrame, batch_id: int) -> None: ...

    def start(
        self,
        checkpointLocation: str | None = None,
        *,
        trigger: Mapping[str, Any] | None = None,
        queryName: str | None = None,
        outputMode: str = "append",
        options: Mapping[str, str] | None = None,
    ) -> StreamingQuery:
        """Starts the streaming query.

        ``checkpointLocation`` is where Spark keeps its progress; it belongs to the state like its
        ledger. ``trigger`` as DataStreamWriter.trigger takes it, e.g. {"processingTime": "10 seconds"}.
        Raises UsageError for a DataFrame that is no stream, and for a state if rows would be totals: a streaming
        aggregation with another ``outputMode`` than "append". Raises CheckpointError for a local checkpoint that was
        never begun, because its driver died before that.
        """
        if not self._df.isStreaming:
            raise UsageError("this DataFrame is no stream: read it with spark.readStream")
        if self._adds_rows:
            check_increments(self._df, outputMode)
        writer = self._df.writeStream.foreachBatch(self).outputMode(outputMode)
        if trigger is not None:
            writer = writer.trigger(**trigger)
        if queryName is not None:
            writer = writer.queryName(queryName)
        if checkpointLocation is not None:
            check_first_offsets(str(checkpointLocation))
            writer = writer.option("checkpointLocation", str(checkpointLocation))
        return writer.options(**(options or {})).start()
