"""What a query keeps and feeds: the states of a stream, and the functions after their commit.

Streams build these when they are declared. The driver of the batches only reads them, except `Branch.taken`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from mapstate.aggregators.aggregator import Aggregator
from mapstate.batch_report import BatchReport, FinishedBatch
from mapstate.errors import MapStateError, UsageError
from mapstate.protocol.rolling import RollingDefinition
from mapstate.protocol.windows import LATEST, WindowDefinition
from mapstate.schema import Field, KeyField
from mapstate.spec import StateSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

Step = Callable[["DataFrame", int | None], "DataFrame"]
"""Turns a micro-batch into another frame. Driver. Gets the batch id, which is None outside of a query."""

Downstream = Callable[["DataFrame", int], None]
"""Gets a batch's new values and its batch id."""

OnBatch = Callable[[BatchReport], None]
"""Gets the report of a batch after its commit."""

OnFinished = Callable[[FinishedBatch], None]
"""Gets the reports of a batch of all states after its commit."""


@dataclass(frozen=True)
class Windows:
    """The windows of a state by time.

    ``column``  the first key column of the state, which holds where a row's pane starts
    ``type``    of this column and of a row's time: ``timestamp`` or ``bigint``
    ``time``    the column with a row's time; None: the driver's clock
    ``source``  the column that names a row's input; None: all rows are of one input
    ``inputs``  the names of the inputs
    ``ahead``   how far beyond the driver's clock, or beyond the latest time, a time may be that moves the watermark;
                None: as far as it likes
    """

    definition: WindowDefinition | RollingDefinition
    column: str
    type: str
    time: str | None
    source: str | None = None
    inputs: tuple[str, ...] = ("",)
    ahead: int | None = None

    @property
    def by_pane(self) -> WindowDefinition:
        """The definition of windows that fire."""
        if isinstance(self.definition, RollingDefinition):
            raise TypeError("rolling windows have no panes")
        return self.definition

    @property
    def rolling(self) -> RollingDefinition:
        """The definition of rolling windows."""
        if isinstance(self.definition, WindowDefinition):
            raise TypeError("windows that fire are not rolling")
        return self.definition

    @property
    def hole(self) -> int:
        """Of a ``bigint``: what parts a time that moves no watermark. Tasks know one time per key and pane."""
        return 4 * LATEST if self.type != "bigint" or self.ahead is None else self.ahead + self.definition.reach


@dataclass(frozen=True)
class Job:
    """What is kept and where: all of a state that is the same in every batch.

    ``columns`` are the input columns that are read, by name, with their Spark types. ``order`` names those by which the
    rows of a key come, where the tasks get rows.
    """

    stream: str
    spec: StateSpec
    keys: tuple[KeyField, ...]
    fields: tuple[Field, ...]
    aggregators: Mapping[str, Aggregator]
    columns: Mapping[str, str]
    windows: Windows | None = None
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class Follower:
    """A consumer that also gets the txid under which the state in front of it has committed the batch.

    ``branch`` is the state behind it, which has to hold the same batches; None for a consumer that keeps no state.
    With ``retracts``, it gets the old values beside the new ones, see `new_values_type`. Where they cannot all be read
    back for a batch that counts already, the query stops.
    """

    function: Callable[[DataFrame, int, int | None], None]
    branch: Branch | None = None
    retracts: bool = False

    def __call__(self, rows: DataFrame, batch_id: int, txid: int | None = None) -> None:
        """Passes them on."""
        self.function(rows, batch_id, txid)


def followers_of(functions: Iterable[Downstream | Follower]) -> list[Branch]:
    """The states among them."""
    return [each.branch for each in functions if isinstance(each, Follower) and each.branch is not None]


@dataclass(eq=False)
class Branch:
    """One state, the steps that lead to it, and the functions that follow its commit.

    ``fired`` are those that get the windows that a batch has fired. ``taken`` are the first and the last time with
    which rows of the present batch count, None where nobody can tell any more. ``make_driver`` is for a state whose
    driver is no plain `StateDriver`.
    """

    job: Job
    steps: tuple[Step, ...] = ()
    downstream: list[Downstream | Follower] = field(default_factory=list)
    on_batch: list[OnBatch] = field(default_factory=list)
    fired: list[Downstream | Follower] = field(default_factory=list)
    taken: tuple[int, int] | None = None
    make_driver: Callable[[Branch], Any] | None = None


@dataclass(frozen=True)
class AfterCommit:
    """A consumer of a batch's own rows, called after the commit; ``branch`` is the state whose txid it gets.

    A state of the user's own has ``set_aside``, called instead for a batch in quarantine, with no rows, and
    ``downstream``, what gets its new values.
    """

    function: Downstream | Follower
    branch: Branch | None = None
    set_aside: Downstream | None = None
    downstream: Sequence[Downstream | Follower] = ()


@dataclass(eq=False)
class StreamPlan:
    """All that one query does with each batch.

    ``after_commit`` are called after the commit with the batch's own rows; with new values, and with fired windows, the
    lists of each `Branch`. ``quarantine`` is the directory for rows of batches that fail in every attempt; without one
    the query stops. ``seed`` says how batch 0 is loaded in parts, and ``initial`` has rows in front of it.
    """

    stream: str
    branches: list[Branch] = field(default_factory=list)
    after_commit: list[AfterCommit] = field(default_factory=list)
    on_finished: list[OnFinished] = field(default_factory=list)
    quarantine: str | None = None
    seed: Any = None  # of `mapstate.spark.driver.seeding`
    initial: Any = None  # of `mapstate.spark.driver.initial_rows`
    root: StreamPlan | None = None  # that of the query, in a plan for a state behind another one


class Declared:
    """All that is declared of one stream. It changes until a started query brings the first batch; then it is closed.

    ``admit`` gets it and a state, and raises for one that cannot be its own. ``siblings`` are the queries of the same
    topology, by the names of their streams, and ``owner`` names it for messages. ``around`` is entered for each batch.
    """

    def __init__(
        self,
        name: str,
        df: DataFrame,
        *,
        admit: Callable[[Any, Branch], None] | None = None,
        siblings: dict[str, Any] | None = None,
        owner: str = "",
    ) -> None:
        self.name = name
        self.df = df
        self.plan = StreamPlan(name)
        self.last_error: MapStateError | None = None
        self.merged_into: str | None = None
        self.around: Callable[[DataFrame], AbstractContextManager[Any]] = nullcontext
        self.owner = owner
        self._admit = admit
        self.is_of_topology = admit is not None
        self.siblings = {} if siblings is None else siblings
        self.driver: Any = None  # a `BatchDriver`
        self.served: StreamingQuery | None = None  # by a Spark Connect server
        self.last_call: tuple[int, BaseException | None] | None = None  # its batch, and the error that it raised

    def __getstate__(self) -> dict[str, Any]:
        """What goes to the worker of Spark Connect that will call the query: all but what the client keeps."""
        kept = dict.fromkeys(("df", "served", "last_error", "last_call", "_admit", "driver"))
        return self.__dict__ | kept | {"siblings": {}}

    def add(self, branch: Branch) -> None:
        """One more state. Raises ConfigurationError."""
        self.reopen()
        if self._admit is not None:
            self._admit(self, branch)
        self.plan.branches.append(branch)

    def add_after_commit(self, consumer: AfterCommit) -> None:
        self.reopen()
        self.plan.after_commit.append(consumer)

    def add_downstream(self, branch: Branch, function: Downstream | Follower, *, fired: bool = False) -> None:
        self.reopen()
        (branch.fired if fired else branch.downstream).append(function)

    def merged(self, others: Sequence[Self], df: DataFrame) -> Self:
        """The query of the streams in one. Raises UsageError for a stream of which something is declared already."""
        for query in (self, *others):
            query.reopen()
            if query.plan.branches or query.plan.after_commit:
                raise UsageError(
                    f"the stream {query.name!r}{query.owner} keeps states already: merge streams before anything else"
                )
        both = type(self)(self.name, df, admit=self._admit, siblings=self.siblings, owner=self.owner)
        both.plan.on_finished, both.plan.quarantine = self.plan.on_finished, self.plan.quarantine
        for query in (self, *others):
            query.merged_into = self.name
            query.siblings.pop(query.name, None)
        self.siblings[self.name] = both
        return both

    def reopen(self) -> None:
        """Open the declaration again. Raises UsageError once a started query has brought a batch, or after a merge."""
        if self.driver is not None and self.driver.serves_query:
            raise UsageError(
                f"the stream {self.name!r}{self.owner} runs already: declare all of its states, and what follows "
                "them, before it is started"
            )
        if self.merged_into is not None:
            raise UsageError(
                f"the stream {self.name!r}{self.owner} was merged into {self.merged_into!r}: declare on that one"
            )
        self.driver = None
