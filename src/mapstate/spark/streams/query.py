"""The streaming query of a stream: what it keeps and feeds, and what Spark calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from mapstate.errors import MapStateError, UsageError
from mapstate.spark.driver.batch import BatchDriver
from mapstate.spark.driver.job import Behind, Branch, Downstream, Follower, OnBatch, StreamPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Query"]


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
        self._siblings = {} if siblings is None else siblings
        self._driver: BatchDriver | None = None
        self.started: StreamingQuery | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What goes to the worker of Spark Connect that will call the query: all but what the client keeps."""
        kept = dict.fromkeys(("df", "started", "last_error", "_admit", "_driver"))
        return self.__dict__ | kept | {"_siblings": {}}

    def add(self, branch: Branch) -> None:
        """One more state. Raises ConfigurationError."""
        self.check_open()
        if self._admit is not None:
            self._admit(self, branch)
        self.plan.branches.append(branch)

    def add_behind(self, function: Downstream | Follower, branch: Branch | None = None) -> None:
        """One more function that gets each batch's own rows after the commit, with the txid of a state."""
        self.check_open()
        self.plan.behind.append(Behind(function, branch))

    def add_downstream(self, branch: Branch, function: Downstream | Follower, *, fired: bool = False) -> None:
        """One more function that gets the new values of a state, or the windows that it has ``fired``."""
        self.check_open()
        (branch.fired if fired else branch.downstream).append(function)

    def add_on_batch(self, branch: Branch, function: OnBatch) -> None:
        """One more function that gets the reports of a state."""
        self.check_open()
        branch.on_batch.append(function)

    def merged(self, others: Sequence[Query], df: DataFrame) -> Query:
        """The query of the streams in one, which takes this one's place and those of the others.

        Raises UsageError for a stream of which something is declared already.
        """
        for query in (self, *others):
            query.check_open()
            if query.plan.branches or query.plan.behind:
                raise UsageError(
                    f"the stream {query.name!r}{query._owner} keeps states already: merge streams before anything else"
                )
        both = Query(self.name, df, admit=self._admit, siblings=self._siblings, owner=self._owner)
        both.plan.on_finished, both.plan.quarantine = self.plan.on_finished, self.plan.quarantine
        for query in (self, *others):
            query.merged_into = self.name
            query._siblings.pop(query.name, None)
        self._siblings[self.name] = both
        return both

    def check_open(self) -> None:
        """Raises UsageError once a started query has brought a batch, or the stream was merged into another one.

        After batches that were given by hand the states are opened again, with all that is declared then.
        """
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
        """Applies one micro-batch. What Spark calls, on the driver.

        Raises LedgerError where the protocol refuses, DataError, StoreError; Spark then stops the query,
        and nothing of the batch counts.
        """
        if not self.plan.branches and not self.plan.behind:
            raise UsageError(f"the stream {self.name!r}{self._owner} has no state to keep")
        if self._driver is None:
            self._driver = BatchDriver(self.plan)
        with self.around(batch_df):
            try:
                self._driver.run(batch_df, batch_id)
            except MapStateError as error:
                self.last_error = error  # Spark passes on the text alone
                raise

    def __repr__(self) -> str:
        return f"<stream {self.name}: {', '.join(branch.job.spec.state for branch in self.plan.branches)}>"
