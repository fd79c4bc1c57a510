"""What a query keeps and feeds: the states of a stream, and the functions after their commit.

Streams build these when they are declared. The driver of the batches only reads them, except `Branch.taken`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator
from mapstate.batch_report import BatchReport, FinishedBatch
from mapstate.protocol.rolling import RollingDefinition
from mapstate.protocol.windows import LATEST, WindowDefinition
from mapstate.schema import Field, KeyField
from mapstate.spec import StateSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
    lists of each `Branch`. ``quarantine`` is the directory for rows of batches that fail in every attempt; None stops
    the query instead. ``seed`` says how batch 0 is loaded in parts, None if as any other.
    """

    stream: str
    branches: list[Branch] = field(default_factory=list)
    after_commit: list[AfterCommit] = field(default_factory=list)
    on_finished: list[OnFinished] = field(default_factory=list)
    quarantine: str | None = None
    seed: Any = None  # of `mapstate.spark.driver.seeding`
