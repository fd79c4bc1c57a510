"""The streaming query of a stream: what it keeps and feeds, how it is started, and what Spark calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from mapstate.errors import MapStateError, UsageError
from mapstate.spark.driver.batch import BatchDriver
from mapstate.spark.driver.job import AfterCommit, Branch, Downstream, Follower, OnBatch, StreamPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


class Query:
    """All that is declared of one stream. It changes until a started query brings the first batch; then it is closed.

    ``admit`` raises for a state that cannot be one of this query's. ``siblings`` are the queries of the same topology,
    by the names of their streams, and ``owner`` names it for messages. ``around`` is entered for each batch.
    """

    def __init__(
        self,
        name: str,
        df: DataFrame,
        *,
        admit: Callable[[Query, Branch], None] | None = None,
        siblings: dict[str, Query] | None = None,
        owner: str = "",
    ) -> None:
        self.name = name
        self.df = df
        self.plan = StreamPlan(name)
        self.last_error: MapStateError | None = None
        self.merged_into: str | None = None
        self.around: Callable[[DataFrame], AbstractContextManager[None]] = lambda _: nullcontext()
        self._owner = owner
        self._admit = admit
        self.is_of_topology = admit is not None
        self.siblings = {} if siblings is None else siblings
        self._driver: BatchDriver | None = None
        self.served: StreamingQuery | None = None  # by a Spark Connect server
        self.last_call: tuple[int, BaseException | None] | None = None  # its batch, and the error that it raised

    def __getstate__(self) -> dict[str, Any]:
        """What goes to the worker of Spark Connect that will call the query: all but what the client keeps."""
        kept = dict.fromkeys(("df", "served", "last_error", "last_call", "_admit", "_driver"))
        return self.__dict__ | kept | {"siblings": {}}

    def add(self, branch: Branch) -> None:
        """One more state. Raises ConfigurationError."""
        self.reopen()
        if self._admit is not None:
            self._admit(self, branch)
        self.plan.branches.append(branch)

    def add_after_commit(self, consumer: AfterCommit) -> None:
        """One more function that gets each batch's own rows after the commit."""
        self.reopen()
        self.plan.after_commit.append(consumer)

    def add_downstream(self, branch: Branch, function: Downstream | Follower, *, fired: bool = False) -> None:
        """One more function that gets the new values of a state, or the windows that it has ``fired``."""
        self.reopen()
        (branch.fired if fired else branch.downstream).append(function)

    def add_on_batch(self, branch: Branch, function: OnBatch) -> None:
        """One more function that gets the reports of a state."""
        self.reopen()
        branch.on_batch.append(function)

    def merged(self, others: Sequence[Query], df: DataFrame) -> Query:
        """The query of the streams in one. Raises UsageError for a stream of which something is declared already."""
        for query in (self, *others):
            query.reopen()
            if query.plan.branches or query.plan.after_commit:
                raise UsageError(
                    f"the stream {query.name!r}{query._owner} keeps states already: merge streams before anything else"
                )
        both = Query(self.name, df, admit=self._admit, siblings=self.siblings, owner=self._owner)
        both.plan.on_finished, both.plan.quarantine = self.plan.on_finished, self.plan.quarantine
        for query in (self, *others):
            query.merged_into = self.name
            query.siblings.pop(query.name, None)
        self.siblings[self.name] = both
        return both

    def reopen(self) -> None:
        """Open the declaration again. Raises UsageError once a started query has brought a batch, or after a merge."""
        if self._driver is not None and self._driver.serves_query:
            raise UsageError(
                f"the stream {self.name!r}{self._owner} runs already: declare all of its states, and what follows "
                "them, before it is started"
            )
        if self.merged_into is not None:
            raise UsageError(
                f"the stream {self.name!r}{self._owner} was merged into {self.merged_into!r}: declare on that one"
            )
        self._driver = None

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        if not self.plan.branches and not self.plan.after_commit:
            raise UsageError(f"the stream {self.name!r}{self._owner} has no state to keep")
        if self._driver is None:
            self._driver = BatchDriver(self.plan)
        self.last_call = batch_id, None
        with self.around(batch_df):
            try:
                self._driver.run(batch_df, batch_id)
            except BaseException as error:
                self.last_call = batch_id, error
                if isinstance(error, MapStateError):
                    self.last_error, self.served = error, None  # Spark passes on the text alone
                raise

    def __repr__(self) -> str:
        return f"<stream {self.name}: {', '.join(branch.job.spec.state for branch in self.plan.branches)}>"


class Startable(ABC):
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
        """Applies one micro-batch to all that the stream keeps and feeds. What Spark calls, on the driver.

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
