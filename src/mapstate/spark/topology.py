"""Several states of one stream, fed by one evaluation of each batch, which count its batches together.

topology = Topology("site")
visits = topology.newStream("visits", df)
visits.groupBy("user_id").persistentAggregate(opaque(url, "visits_by_user"), visits=Count())
errors = visits.transform(lambda rows: rows.where("status >= 500"))
errors.groupBy("page").persistentAggregate(opaque(url, "errors_by_page"), errors=Count())
query = topology.start(checkpointLocation=path)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from mapstate.aggregators.aggregator import Aggregator
from mapstate.batch_report import FinishedBatch
from mapstate.errors import ConfigurationError, DuplicateNameError, MapStateError, UsageError
from mapstate.ledgers import places_of
from mapstate.spark.driver import Downstream, Job, OnBatch
from mapstate.spark.quarantine import KEPT_BY
from mapstate.spark.startable import Startable
from mapstate.spark.stream import newStream
from mapstate.spark.topology_driver import Branch, OnFinished, TopologyDriver
from mapstate.spec import StateSpec, check_state_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["OnPoison", "Topology", "TopologyGroups", "TopologyNewValues", "TopologyState", "TopologyStream"]

OnPoison = Literal["stop", "quarantine"]

Transform = Callable[["DataFrame"], "DataFrame"]


class Topology:
    """Streams with several states each. Declared once, then started, or used as a foreachBatch function.

    After any crash and any replay, with the same rows or others, the states of a stream hold the same batches with the
    same contents. See docs/topology.md for what a reader sees, and for states in several stores.

    ``on_poison``   what becomes of a batch that fails in every attempt, as many as the recipe with the highest
                    ``max_attempts`` allows: "stop" the query, or "quarantine": its rows are kept, it is committed as
                    an empty batch, and the query goes on
    ``quarantine``  the directory for such rows, as Spark names directories; they are below ``name/stream`` there
    """

    def __init__(self, name: str, *, on_poison: OnPoison = "stop", quarantine: str | None = None) -> None:
        self.name = check_state_name(name)
        if on_poison not in get_args(OnPoison):
            raise ConfigurationError(f"on_poison is one of {', '.join(get_args(OnPoison))}, not {on_poison!r}")
        if (on_poison == "quarantine") != (quarantine is not None):
            raise ConfigurationError(
                "on_poison='quarantine' and quarantine='...', the directory for the rows, go together; found "
                f"on_poison={on_poison!r} and quarantine={quarantine!r}"
            )
        self.quarantine = None if quarantine is None else str(quarantine)
        self.streams: dict[str, TopologyStream] = {}
        self._finished: list[OnFinished] = []

    def newStream(self, name: str, df: DataFrame) -> TopologyStream:
        """A stream of rows, as `mapstate.newStream`. Each is a query of its own, with a checkpoint of its own.

        Raises ConfigurationError, DuplicateNameError.
        """
        if name in self.streams:
            raise DuplicateNameError(
                f"topology {self.name!r} has a stream {name!r} already: give the other one another name", name=name
            )
        newStream(name, df)
        taken = [column for column in df.columns if column.casefold() in KEPT_BY]
        if taken and self.quarantine is not None:
            raise DuplicateNameError(
                f"the stream {name!r} has a column {taken[0]!r}, and rows in quarantine are told apart by the columns "
                f"{' and '.join(KEPT_BY)}: give it another name with withColumnRenamed",
                name=taken[0],
            )
        self.streams[name] = TopologyStream(_Root(self, name, df), df)
        return self.streams[name]

    def on_finished(self, function: OnFinished) -> Topology:
        """Has ``function`` called with a `FinishedBatch` for each committed batch, also an empty one; returns self.

        On the driver, after the commit and before what lies downstream. Once for each batch, but for a crash before
        Spark's own commit: then once more, by the next run, with ``repeated``. So never twice in one run, and none is
        left out. What it raises is logged: the batch is committed, and goes on.
        """
        self._finished.append(function)
        return self

    def told(self, finished: FinishedBatch) -> None:
        """Passes a batch on to all that asked. Raises what they raise, after the last of them."""
        for function in self._finished:
            function(finished)

    def start(self, checkpointLocation: str | None = None, **how: Any) -> StreamingQuery:
        """Starts the one stream's query; see `PersistentAggregate.start`. Of several, start each: ``stream.start()``.

        Raises UsageError.
        """
        return self._stream().start(checkpointLocation, **how)

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Applies one micro-batch of the one stream to all states. What Spark calls, on the driver.

        Raises LedgerError where the protocol refuses, DataError, StoreError; Spark then stops the query,
        and nothing of the batch counts.
        """
        self._stream()(batch_df, batch_id)

    @property
    def last_error(self) -> MapStateError | None:
        """The error that stopped the one stream's query; of several, see each stream's."""
        return self._stream().last_error

    def _stream(self) -> TopologyStream:
        if len(self.streams) != 1:
            there = ", ".join(self.streams) or "none"
            raise UsageError(
                f"topology {self.name!r} has {len(self.streams)} streams ({there}), and each is a query of its own "
                "with a checkpoint of its own: make one with newStream, or start each of them: stream.start(...)"
            )
        (stream,) = self.streams.values()
        return stream

    def __repr__(self) -> str:
        return f"<topology {self.name}: {', '.join(map(repr, self.streams.values())) or 'no stream'}>"


class _Root(Startable):
    """What all branches of a stream share: its states, and the driver of its batches."""

    def __init__(self, topology: Topology, name: str, df: DataFrame) -> None:
        super().__init__(df)
        self.topology = topology
        self.name = name
        self.branches: list[Branch] = []
        self._driver: TopologyDriver | None = None

    def add(self, branch: Branch) -> None:
        """One more state. Raises ConfigurationError, DuplicateNameError."""
        self.check_open()
        spec = branch.job.spec
        taken = [one for stream in self.topology.streams.values() for one in stream.root.branches]
        if any(one.job.spec.state == spec.state for one in taken):
            raise DuplicateNameError(
                f"topology {self.topology.name!r} has a state {spec.state!r} already: give each a name, "
                "opaque(url, name='...'). Without one a state has the name of its stream",
                name=spec.state,
            )
        specs = [*(one.job.spec for one in self.branches), spec]
        others = [one for one in specs if one.type != "opaque"]
        places = len(places_of([one.open() for one in specs]))
        if others and places > 1:
            raise ConfigurationError(
                f"the states {', '.join(one.state for one in specs)} cannot be committed in one write ({places} "
                "places), so after a crash one may have to be rolled back, which only opaque states can: "
                f"{others[0].state!r} is {others[0].type}. Make it opaque, or keep all of them in one store."
            )
        if self.topology.quarantine is not None and spec.type == "transactional":
            raise ConfigurationError(
                f"state {spec.state!r} is transactional: what a failed attempt wrote is in it until its replay, so its "
                "batch cannot be left out. With on_poison='quarantine' make it opaque."
            )
        self.branches.append(branch)

    def change(self, at: int, job: Job) -> None:
        """Another job for a state that is there."""
        self.check_open()
        self.branches[at] = replace(self.branches[at], job=job)

    def check_open(self) -> None:
        """Raises UsageError once a batch has come."""
        if self._driver is not None:
            raise UsageError(
                f"the stream {self.name!r} of topology {self.topology.name!r} runs already: declare all of its states, "
                "and what follows them, before it is started"
            )

    @property
    def _adds_rows(self) -> bool:
        return True

    def _apply(self, batch_df: DataFrame, batch_id: int) -> None:
        """One foreachBatch call."""
        if not self.branches:
            raise UsageError(f"the stream {self.name!r} of topology {self.topology.name!r} has no state to keep")
        if self._driver is None:
            kept = self.topology.quarantine
            if kept is not None:
                kept = f"{kept.rstrip('/')}/{self.topology.name}/{self.name}"
            self._driver = TopologyDriver(self.name, self.branches, self.topology.told, kept)
        self._driver.run(batch_df, batch_id)


class TopologyStream:
    """Rows of a topology's stream, or of a branch of it. See `Topology.newStream`."""

    def __init__(self, root: Any, df: DataFrame, functions: tuple[Transform, ...] = ()) -> None:
        self.root: _Root = root
        self._df = df
        self._functions = functions

    @property
    def last_error(self) -> MapStateError | None:
        """The error that stopped the query: Spark's own StreamingQueryException has only its text."""
        return self.root.last_error

    def transform(self, function: Transform) -> TopologyStream:
        """A branch: ``function`` takes a DataFrame and returns one, as that of `DataFrame.transform`.

        Called now with the stream, for its columns, and with each batch, once for each attempt; on the driver. What
        feeds several states is computed once for all of them.
        """
        return TopologyStream(self.root, self._df.transform(function), (*self._functions, function))

    def groupBy(self, *columns: str) -> TopologyGroups:
        """See `Stream.groupBy`."""
        newStream(self.root.name, self._df).groupBy(*columns)
        return TopologyGroups(self, columns)

    def persistentAggregate(self, state: StateSpec, /, **aggregates: Aggregator) -> TopologyState:
        """See `Stream.persistentAggregate`; raises DuplicateNameError for a state that the topology has already."""
        return self._keep((), state, aggregates)

    def _keep(self, columns: tuple[str, ...], state: StateSpec, aggregates: Mapping[str, Aggregator]) -> TopologyState:
        stream: Any = newStream(self.root.name, self._df)
        rows = stream.groupBy(*columns) if columns else stream
        self.root.add(Branch(rows.persistentAggregate(state, **aggregates).job, self._functions))
        return TopologyState(self.root, len(self.root.branches) - 1)

    def start(self, checkpointLocation: str | None = None, **how: Any) -> StreamingQuery:
        """Starts the query of the whole stream, with all of its branches. See `PersistentAggregate.start`."""
        return self.root.start(checkpointLocation, **how)

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Applies one micro-batch to all states of the stream. See `Topology.__call__`."""
        self.root(batch_df, batch_id)

    def __repr__(self) -> str:
        return f"<stream {self.root.name}: {', '.join(one.job.spec.state for one in self.root.branches)}>"


class TopologyGroups:
    """Rows by key. See `Stream.groupBy`."""

    def __init__(self, stream: TopologyStream, columns: tuple[str, ...]) -> None:
        self._stream = stream
        self._columns = columns

    def persistentAggregate(self, state: StateSpec, /, **aggregates: Aggregator) -> TopologyState:
        """See `GroupedStream.persistentAggregate`; raises DuplicateNameError for a state that is there already."""
        return self._stream._keep(self._columns, state, aggregates)


class TopologyState:
    """A state of a topology. Started with all others: `Topology.start`."""

    def __init__(self, root: Any, at: int) -> None:
        self._root: _Root = root
        self._at = at

    @property
    def name(self) -> str:
        """Its name in its store, and in a `FinishedBatch`."""
        return self._job.spec.state

    @property
    def _job(self) -> Job:
        return self._root.branches[self._at].job

    def newValuesStream(self) -> TopologyNewValues:
        """The keys that each batch touched, with their new totals, after the batch is committed in all states."""
        return TopologyNewValues(self)

    def with_downstream(self, function: Downstream) -> TopologyState:
        """Has ``function`` called with each batch's new values; returns self."""
        self._root.change(self._at, replace(self._job, downstream=(*self._job.downstream, function)))
        return self

    def on_batch(self, function: OnBatch) -> TopologyState:
        """As `PersistentAggregate.on_batch`; returns self."""
        self._root.change(self._at, replace(self._job, on_batch=(*self._job.on_batch, function)))
        return self


class TopologyNewValues:
    """New values of a state: key columns and one column per aggregate."""

    def __init__(self, state: TopologyState) -> None:
        self._state = state

    def foreachBatch(self, function: Downstream) -> TopologyState:
        """Calls ``function(new_values, batch_id)`` after the commit of all states; returns the state.

        At least once per batch: again, with the same rows, after a crash that came before Spark's own commit. Not for
        a batch that went into quarantine. Using the DataFrame twice does not write twice.
        """
        return self._state.with_downstream(function)
