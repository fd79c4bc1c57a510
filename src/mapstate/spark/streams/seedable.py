"""What seeds the states of a stream and corrects them: no batch comes here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mapstate.spark.driver.access import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from mapstate.reader.times import Time
    from mapstate.spark.driver.correcting import Corrected
    from mapstate.spark.driver.initial_rows import InitialRows
    from mapstate.spark.driver.job import Branch
    from mapstate.spark.driver.seeding import SeedReport


class Seedable(ABC):
    """What a history is counted for, as batch 0 of a query, and whose past is corrected."""

    @abstractmethod
    def _to_start(self) -> Any:
        """See `Startable`."""

    def __getstate__(self) -> object:
        """Raises UnservedError for a foreachBatch of a Connect client's own, before its query starts."""
        from mapstate.spark.driver.connect import is_started, unserved

        if not is_started.get() and is_connect(self._to_start().df):
            raise unserved()
        return super().__getstate__()

    def seed(
        self,
        checkpointLocation: str,
        *,
        dry_run: bool = False,
        buckets: int | None = None,
        options: Mapping[str, str] | None = None,
        version_of: str | Mapping[str, str | None] | None = None,
        positions: Sequence[str] | None = None,
    ) -> SeedReport:
        """Counts all that the source has now as batch 0 of the query, in parts that survive a crash. Then `start`.

        For states that hold nothing; all of the stream are seeded together, and ``beside`` of a state's report are the
        others: the report of a stream or a topology is that of its first state. The history is read once, and staged
        below the checkpoint. Until all of it is loaded, readers get a SeedingError. After a crash call it again, with
        the same checkpoint: it goes on. Nothing is passed downstream. Driver; returns when batch 0 counts.

        ``dry_run``  stages in a scratch place beside the checkpoint, says how much it is, and deletes it again
        ``buckets``  how many parts; a crash costs at most one of them. None: about a million keys in each
        ``options``  as of `start`
        ``version_of``  the name for which this version is built: rows of keys that it has forgotten are left out. Of
            several states that of each, or None, by the state's name
        ``positions``  the columns with the topic, the partition and the offset of a row, as Kafka's are named: needed
            for keys that were forgotten before the end of the history

        Raises ConfigurationError for a state that cannot be seeded, UsageError where a batch counts already, and what a
        batch raises.
        """
        from mapstate.spark.streams.seeding import seed_query

        return seed_query(
            self._to_start(),
            checkpointLocation,
            dry_run=dry_run,
            buckets=buckets,
            options=options or {},
            version_of=version_of,
            positions=positions,
            state=None if (asked := self._branch()) is None else asked.job.spec.state,
        )

    def correct(
        self,
        *,
        id: str,  # noqa: A002  as every correction is told by it
        add: DataFrame | None = None,
        retract: DataFrame | None = None,
        recount: InitialRows | None = None,
        keys: DataFrame | None = None,
        since: Time | None = None,
        until: Time | None = None,
        counted: Sequence[str] = (),
        emit: bool | None = None,
        take_over: bool = False,
    ) -> Corrected:
        """Adds rows that never came, takes back counted ones, or computes keys or windows anew, in one attempt. Driver.

        For opaque states that count a batch, with their query stopped: a batch that begins meanwhile fences the
        correction, and nothing of it counts. All states of the stream get the rows, those of one store in one write;
        ``beside`` of a state's report are the others. A recount is of one state. The rows have the columns of the
        DataFrame that `newStream` got, and go through the stream's own steps. Readers see a state before or after it.
        Of windows by the time of a row, rows are added alone: none is late as long as one of its windows is there.

        ``id``         its name: the same call again, after whatever error or crash, writes nothing a second time
        ``add``        rows to count
        ``retract``    rows to take back, of a state that keeps `Count`, `Sum` and `Avg` only. Nothing tells whether
                       each was counted, unless a number falls below 0: that is refused
        ``recount``    a history that has all rows below the end of the last batch. Of the ``keys`` the aggregates of
                       these rows take the place of what is there, whatever the aggregators are; without rows a key goes
        ``keys``       a DataFrame with the key columns of the state, which has no windows
        ``since``, ``until``  of a state with windows in the place of keys: the windows of rows with these times are
                       computed anew, of all keys. A datetime with a time zone, or a number where times are a bigint
        ``counted``    ids of corrections whose rows the history has. A recount is refused where there are others
        ``emit``       of a state whose new values or fired windows go to functions: whether these are called, at least
                       once, with the keys that the correction wrote, and with each final window of which it changed
                       a part. In the place of a batch's number they get -1 less the number of the entry in the ledger
        ``take_over``  leaves an attempt in flight behind, whose driver is gone for good

        Returns a `Corrected`. Raises ConfigurationError for a state that cannot be corrected and for an aggregator that
        cannot take rows back, UsageError while a batch is in flight, where the id stands for other rows, for rows of
        windows that are gone and for a history that does not meet the last batch, FencedError where a batch comes in
        between, and what a batch raises. Where states in several stores count it in part, a note says so: call it
        again. See docs/life.md#correct
        """
        from mapstate.spark.driver.correcting import correct
        from mapstate.spark.driver.recounting import recount_of

        query, rows = self._to_start(), {"add": add, "retract": retract}
        asked = recount_of(query.plan.stream, query.df, recount, counted, keys=keys, since=since, until=until)
        return correct(
            query.plan, query.df, self._branch(), id=id, **rows, recount=asked, emit=emit, take_over=take_over
        )

    def _branch(self) -> Branch | None:
        """The state that has the report of a seed and of a correction; None for the first one."""
        return None
