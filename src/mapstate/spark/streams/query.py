"""The streaming query of a stream: what it keeps and feeds, how it is started, and what Spark calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mapstate.errors import MapStateError, UsageError, shown
from mapstate.spark.driver.batch import BatchDriver
from mapstate.spark.driver.job import Declared
from mapstate.spark.streams.seedable import Seedable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


class Query(Declared):
    """The function that Spark calls for each batch of a stream."""

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        if not self.plan.branches and not self.plan.after_commit:
            raise UsageError(f"the stream {self.name!r}{self.owner} has no state to keep")
        if type(batch_id) is not int:  # a ledger would hold what none can read
            raise UsageError(f"the number of a batch is an int, not {shown(batch_id)}. Nothing was written.")
        if self.driver is None:
            self.driver = BatchDriver(self.plan)
        self.last_call = batch_id, None
        with self.around(batch_df):
            try:
                self.driver.run(batch_df, batch_id)
            except BaseException as error:
                self.last_call = batch_id, error
                if isinstance(error, MapStateError):
                    self.last_error, self.served = error, None  # Spark passes on the text alone
                raise

    def __repr__(self) -> str:
        return f"<stream {self.name}: {', '.join(branch.job.spec.state for branch in self.plan.branches)}>"


class Startable(Seedable):
    """What starts the query of a stream, one at a time; also a foreachBatch function for a job that exists."""

    @abstractmethod
    def _to_start(self) -> Query:
        """The query of the whole stream. Raises UsageError where there is none, or more than one."""

    @property
    def last_error(self) -> MapStateError | None:
        """The error that stopped the query: Spark's own StreamingQueryException has only its text.

        Under Spark Connect the server is asked for it; raises what Spark raises where that has gone.
        """
        query = self._to_start()
        if query.served is not None:
            from mapstate.spark.driver.connect import error_of

            return error_of(query.served)
        return query.last_error

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Apply a micro-batch to all that the stream keeps and feeds. What Spark calls after ``foreachBatch(counts)``.

        Raises LedgerError where the protocol refuses, DataError, StoreError; Spark then stops the query,
        and the batch is not committed, unless a function that follows the commit raised it.
        """
        self._to_start()(batch_df, batch_id)

    def start(
        self,
        checkpointLocation: str | None = "",
        *,
        trigger: str | Mapping[str, Any] | None = None,
        queryName: str | None = None,
        outputMode: str = "append",
        options: Mapping[str, str] | None = None,
    ) -> StreamingQuery:
        """Starts the streaming query of the whole stream. Driver.

        ``checkpointLocation``  where Spark keeps its progress, as long as the state lives; None to start only once
        ``trigger``             an interval, "10 seconds"; or as DataStreamWriter.trigger has it, {"availableNow": True}
        ``queryName``, ``outputMode``, ``options``  as DataStreamWriter has them

        Raises UsageError for a DataFrame that is no stream, for a state without a checkpoint, and for a state if rows
        would be totals: a streaming aggregation with another ``outputMode`` than "append". Raises CheckpointError for a
        local checkpoint that was never begun, because its driver died before that.
        """
        from mapstate.spark.streams.starting import start_query

        return start_query(
            self._to_start(), checkpointLocation, options or {}, trigger=trigger, name=queryName, mode=outputMode
        )


class OfQuery(Startable):
    """A part of the stream whose query is ``query``."""

    def __init__(self, query: Query) -> None:
        self.query = query

    def _to_start(self) -> Query:
        return self.query
