"""How the query of a stream is started, and what it ended with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mapstate.errors import ConfigurationError, MapStateError, UsageError
from mapstate.operations.checkpoint import check_first_offsets
from mapstate.spark.driver.access import access_of, is_connect
from mapstate.spark.streams.query import Query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Startable"]


class Startable:
    """A part of a stream from which its query can be started; also a foreachBatch function for a job that exists.

    ``query`` is that of the whole stream. One query is started at a time.
    """

    def __init__(self, query: Query) -> None:
        self.query = query

    @property
    def last_error(self) -> MapStateError | None:
        """The error that stopped the query: Spark's own StreamingQueryException has only its text.

        Under Spark Connect the server is asked for it; raises what Spark raises where that has gone.
        """
        started = self.query.started
        if started is not None and is_connect(self.query.df):
            from mapstate.spark.driver.connect import error_of

            return error_of(started)
        return self.query.last_error

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Applies one micro-batch to all that the stream keeps and feeds. What Spark calls, on the driver.

        Raises LedgerError where the protocol refuses, DataError, StoreError; Spark then stops the query,
        and nothing of the batch counts.
        """
        self.query(batch_df, batch_id)

    def start(
        self,
        checkpointLocation: str | None = None,
        *,
        trigger: str | Mapping[str, Any] | None = None,
        queryName: str | None = None,
        outputMode: str = "append",
        options: Mapping[str, str] | None = None,
    ) -> StreamingQuery:
        """Starts the streaming query of the whole stream. Driver.

        ``checkpointLocation``  where Spark keeps its progress; it belongs to the state like its ledger
        ``trigger``             an interval, "10 seconds"; or as DataStreamWriter.trigger has it, {"availableNow": True}
        ``queryName``, ``outputMode``, ``options``  as DataStreamWriter has them

        Raises UsageError for a DataFrame that is not streaming, and for a state if rows would be totals: a streaming
        aggregation with another ``outputMode`` than "append". Raises CheckpointError for a local checkpoint that was
        never begun, because its driver died before that.
        """
        query = self.query
        if not query.df.isStreaming:
            raise UsageError("this DataFrame is no stream: read it with spark.readStream")
        if query.plan.branches and outputMode.lower() != "append":
            access_of(query.df).check_increments(outputMode)
        function: Any = query
        if is_connect(query.df):  # which pickles it
            from mapstate.spark.driver.connect import ServedQuery

            function = ServedQuery.of(query, checkpointLocation, options)
        writer = query.df.writeStream.foreachBatch(function).outputMode(outputMode)
        if trigger is not None:
            if not isinstance(trigger, (str, Mapping)):
                raise ConfigurationError(
                    f"trigger is an interval such as '10 seconds', or {{'availableNow': True}}, not {trigger!r}"
                )
            writer = writer.trigger(**({"processingTime": trigger} if isinstance(trigger, str) else trigger))
        if queryName is not None:
            writer = writer.queryName(queryName)
        if checkpointLocation is not None:
            check_first_offsets(str(checkpointLocation))
            writer = writer.option("checkpointLocation", str(checkpointLocation))
        query.last_error = None
        query.started = writer.options(**(options or {})).start()
        return query.started
