"""Several states of one stream, which are fed by one evaluation of each batch and count it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from mapstate.backends import check_state_name
from mapstate.backing_map import Backend
from mapstate.errors import ConfigurationError, DuplicateNameError, UsageError, check_choice, check_range
from mapstate.protocol.ledgers import commit_domains
from mapstate.spark.driver.access import is_connect
from mapstate.spark.driver.job import Branch, OnFinished
from mapstate.spark.driver.quarantine import KEPT_BY
from mapstate.spark.driver.repeats import branches_of
from mapstate.spark.streams.query import OfQuery, Query, Startable
from mapstate.spark.streams.running import Running
from mapstate.spark.streams.stream import Stream, newStream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from mapstate.spark.driver.initial_rows import InitialRows

OnPoison = Literal["stop", "quarantine"]


class Topology(Startable):
    """Streams with several states each. Declared once, then started, or used as a foreachBatch function.

    After any crash and any replay, with the same rows or others, the states of a stream hold the same batches with the
    same contents. See docs/topology.md for what a reader sees, and for states in several stores.

    `start`, `last_error` and the call are of the one stream. Of several, start each, ``stream.start()``, or `run` them.

    ``on_poison``   what becomes of a batch that fails: "stop" the query, or "quarantine": its rows are kept, it is
                    committed as an empty batch, and the query goes on. A batch whose data cannot be applied is tried
                    once more before that; one whose Spark job fails, as often as the highest ``max_attempts`` says
    ``quarantine``  the directory for such rows, as Spark names directories; they are below ``name/stream`` there
    """

    def __init__(self, name: str, *, on_poison: OnPoison = "stop", quarantine: str | None = None) -> None:
        self.name = check_state_name(name)
        check_choice("on_poison", on_poison, OnPoison)
        if (on_poison == "quarantine") != (quarantine is not None):
            raise ConfigurationError(
                "on_poison='quarantine' and quarantine='...', the directory for the rows, go together; found "
                f"on_poison={on_poison!r} and quarantine={quarantine!r}"
            )
        self.quarantine = None if quarantine is None else str(quarantine)
        self.queries: dict[str, Query] = {}
        self._on_finished: list[OnFinished] = []

    def newStream(
        self, name: str, df: DataFrame, *, ticks: bool = False, initialRows: InitialRows | None = None
    ) -> Stream:
        """A stream of rows, as `mapstate.newStream`. Each is a query of its own, with a checkpoint of its own.

        Raises ConfigurationError, DuplicateNameError.
        """
        if name in self.queries:
            raise DuplicateNameError(
                f"topology {self.name!r} has a stream {name!r} already: give the other one another name", name=name
            )
        stream = newStream(name, df, ticks=ticks, initialRows=initialRows)
        df = stream.df
        taken = [column for column in df.columns if column.casefold() in KEPT_BY]
        if taken and self.quarantine is not None:
            raise DuplicateNameError(
                f"the stream {name!r} has a column {taken[0]!r}, and rows in quarantine are told apart by the columns "
                f"{' and '.join(KEPT_BY)}: give it another name with withColumnRenamed",
                name=taken[0],
            )
        owner = f" of topology {self.name!r}"
        query = Query(name, df, admit=self._admit, siblings=self.queries, owner=owner)
        query.plan.on_finished, query.plan.initial = self._on_finished, initialRows
        if self.quarantine is not None:
            query.plan.quarantine = f"{self.quarantine.rstrip('/')}/{self.name}/{name}"
        self.queries[name] = query
        return replace(stream, query=query)

    def on_finished(self, function: OnFinished) -> Topology:
        """Has ``function`` called with a `FinishedBatch` for each committed batch, also an empty one; returns self.

        On the driver, after the commit and before what lies downstream. Once for each batch, but for a crash before
        Spark's own commit: then once more, by the next run, with ``repeated``. So never twice in one run, and none is
        left out. What it raises is logged: the batch is committed, and goes on.
        """
        self._on_finished.append(function)
        return self

    def run(
        self,
        checkpointLocation: str | Mapping[str, str],
        *,
        store: Backend | str,
        trigger: str | Mapping[str, Any] | None = None,
        options: Mapping[str, str] | None = None,
        active: bool = True,
        poll: float = 1.0,
    ) -> None:
        """Starts all streams and stays, obeying ``mapstate activate``, ``deactivate``, ``rebalance`` and ``kill``.

        Instead of `start`, in the driver's main thread. Returns once the topology is killed, or its queries have ended.
        A supervisor starts the program again after a failure, and what a crash has interrupted goes on. It does not
        after an end with exit code 0, or after NotAliveError: a start behind a kill submits the topology anew.

        ``checkpointLocation``  of the one stream; of several, each by the stream's name
        ``store``    where the control record is kept: the URL of any store, mostly that of the states
        ``trigger``, ``options``  as of `start`, for all streams
        ``active``   whether a topology that is not known yet begins at once; one that is known keeps its status
        ``poll``     seconds between two reads of the control record. After ten of them without a beat another driver
                     may take over, so after a crash the next one waits that long

        Raises UsageError and ConfigurationError before anything is written, AlreadyAliveError where another driver runs
        a topology of this name, NotAliveError where it only finished a kill that a crash had interrupted, FencedError
        where another driver has taken over meanwhile, StoreLostError, and the error of a query that fails. Then all of
        them are stopped, and nothing of their open batches counts.
        """
        if not self.queries:
            _ = self.query  # which raises
        if isinstance(checkpointLocation, Mapping):
            places = checkpointLocation
        else:
            places = {self.query.name: checkpointLocation}
        if places.keys() != self.queries.keys():
            raise ConfigurationError(
                f"checkpointLocation names the streams {', '.join(places) or 'none'}, and topology "
                f"{self.name!r} has {', '.join(self.queries)}: give each its own"
            )
        if any(is_connect(query.df) for query in self.queries.values()):
            raise UsageError(
                "run holds and spreads batches in the process that calls it, and under Spark Connect they run in a "
                "process of the server. Nothing was started. Use start, or run with classic PySpark. See "
                "docs/connect.md#what-is-refused"
            )
        check_range("poll", poll, 0.001, 3600, " of seconds")

        def start(name: str) -> StreamingQuery:
            return OfQuery(self.queries[name]).start(places[name], trigger=trigger, options=options)

        Running(self.name, self.queries, start, store, poll=poll).run(active=active)

    def _to_start(self) -> Query:
        return self.query

    @property
    def query(self) -> Query:
        """That of the one stream. Raises UsageError where there are several, or none."""
        if len(self.queries) != 1:
            names = ", ".join(self.queries) or "none"
            raise UsageError(
                f"topology {self.name!r} has {len(self.queries)} streams ({names}), and each is a query of its own "
                "with a checkpoint of its own: make one with newStream, or start each, stream.start(...), or run({...})"
            )
        (query,) = self.queries.values()
        return query

    def _admit(self, query: Query, branch: Branch) -> None:
        spec = branch.job.spec
        states = [known.job.spec.state for each in self.queries.values() for known in branches_of(each.plan)]
        if spec.state in states:
            raise DuplicateNameError(
                f"topology {self.name!r} has a state {spec.state!r} already: give each a name, "
                "opaque(url, name='...'). Without one a state has the name of its stream",
                name=spec.state,
            )
        specs = [*(known.job.spec for known in query.plan.branches), spec]
        others = [each for each in specs if each.type != "opaque"]
        domains = len(commit_domains([each.open() for each in specs]))
        if others and domains > 1:
            raise ConfigurationError(
                f"the states {', '.join(each.state for each in specs)} cannot be committed in one write ({domains} "
                "commit domains), so after a crash one may have to be rolled back, which only opaque states can: "
                f"{others[0].state!r} is {others[0].type}. Make it opaque, or keep all of them in one store."
            )
        if self.quarantine is not None and spec.type == "transactional":
            raise ConfigurationError(
                f"state {spec.state!r} is transactional: what a failed attempt wrote is in it until its replay, so its "
                "batch cannot be left out. With on_poison='quarantine' make it opaque."
            )

    def __repr__(self) -> str:
        return f"<topology {self.name}: {', '.join(map(repr, self.queries.values())) or 'no stream'}>"


def with_empty_batches(
    function: Callable[[DataFrame, int], object], *parts: OfQuery | Topology
) -> Callable[[DataFrame, int], None]:
    """A foreachBatch function that gives each stream an empty batch wherever ``function`` has not called it.

    For a job that calls a state for some batches only. Each batch is then in the state's ledger, and a batch that a
    store has lost is not taken for one that was left out. Driver, once per batch: two small writes for an empty one.

    Args:
        function: The job's own, as ``writeStream.foreachBatch`` takes it. It calls some of ``parts``, or none.
        parts: States or streams, as `persistentAggregate` returns them, or topologies of one stream.

    Returns:
        A function for ``writeStream.foreachBatch``. It also raises the error of a call that ``function`` has swallowed.

    Not guaranteed: rows that ``function`` keeps for a later batch are lost with the driver.

    """
    queries = list(dict.fromkeys(part.query for part in parts))

    def with_all(rows: DataFrame, batch_id: int) -> None:
        for query in queries:
            query.last_call = None
        function(rows, batch_id)
        for query in queries:
            if query.last_call is None:
                query(rows.sparkSession.createDataFrame([], query.df.schema), batch_id)
            elif query.last_call[1] is not None:
                raise query.last_call[1]

    return with_all
