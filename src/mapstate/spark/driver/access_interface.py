"""What a batch asks of its Spark beside the DataFrame API, and what the answers are made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from mapstate.errors import UsageError

FUNCTION_PAGE = "See docs/guides/foreach-batch.md"

FILTER_NAME = "files_not_counted "
"""Before the digest in the text of a plan that leaves files out, see `files_not_counted`."""


def has_ended() -> UsageError:
    """The error of a DataFrame whose query has ended."""
    return UsageError(
        "this DataFrame is of a streaming query that has ended. Nothing was written. Let no thread outlive the "
        f"function that Spark calls. {FUNCTION_PAGE}"
    )


_SET_BY_STREAMS = "spark.sql.requireAllClusterKeysForDistribution"
"""A setting internal to Spark, which a query sets in its own copy of the session and nobody else does."""


def check_by_hand(query_id: str | None, conf: Any, *, runs: bool) -> None:
    """Raises UsageError unless no batch of any query can have brought a frame that no query is known to have.

    ``query_id``  what its thread says; ``conf``  of its session; ``runs``  some query runs
    """
    if query_id is not None or conf.get(_SET_BY_STREAMS, None) is not None:
        raise has_ended()
    if runs:
        raise UsageError(
            "a streaming query runs, and nothing tells whether this DataFrame is of one of its batches. Nothing "
            "was written. Make it with the rows.sparkSession of the batch, or call by hand while no query runs. "
            f"{FUNCTION_PAGE}"
        )


_SENDS_TOTALS = ("Aggregate", "Distinct")


def check_plan(plan: Any, output_mode: str) -> None:
    """Before rows of a query are added to a state, in a mode that is not append. Driver.

    ``plan`` is the JVM's. Raises UsageError if a streaming aggregation would send each key's total again and again.
    Other stateful operators send a row once also in update mode, and what a user's own sends is the user's.
    """
    if plan.getClass().getSimpleName() in _SENDS_TOTALS and plan.isStreaming():
        raise UsageError(
            f"the stream is aggregated before it comes here, and outputMode={output_mode.lower()!r} sends totals, not "
            "increments: a state would add totals up. Nothing was written. Aggregate here instead, by "
            "newStream(...).groupBy(...).persistentAggregate(...); or use a watermark and outputMode='append'. See "
            "docs/guarantees.md#rows-are-increments"
        )
    children = plan.children()
    for at in range(children.size()):
        check_plan(children.apply(at), output_mode)


FILTER = re.compile(f"{FILTER_NAME}([0-9a-f]{{16}})")


class QueryRun(NamedTuple):
    """The query of a checkpoint, and one start of it; None where the function is called by hand."""

    query_id: str
    run_id: str | None


class SourceLog(NamedTuple):
    """What a file source calls itself, and where it keeps the log of its files."""

    name: str
    place: str


class Access(Protocol):
    """Driver; made for each question, from the frame of a batch."""

    @property
    def origin(self) -> object:
        """What columns belong to: they are of no use in another one."""

    def run(self, default: str, batch_id: int | None = None) -> QueryRun:
        """The run of which the frame is; ``default`` owns the state where the function is called by hand.

        Raises UsageError where nothing tells, and where ``batch_id`` is not the query's present batch.
        """

    def is_over(self) -> bool:
        """Whether the query has ended, and the call comes from a thread that outlives it."""

    def first_batch(self) -> int:
        """The first batch of the present run of which Spark still knows; of a streaming query only."""

    def may_go_on(self) -> bool:
        """False once somebody has stopped the query: jobs that failed since were cancelled."""

    def check_increments(self, output_mode: str) -> None:
        """See `check_plan`, of a query of this frame that is to start in a mode not append."""

    def check_running_increments(self) -> None:
        """See `check_plan`, of the query that calls. Nothing to check where called by hand."""

    def checkpoint(self) -> str:
        """Where the query that calls keeps its logs; the same in all of a run. Raises whatever Spark raises."""

    def file_sources(self) -> list[SourceLog | None]:
        """In the order of the offsets, None for another source; the same in all of a run. Empty if nobody can tell."""

    def filters(self) -> tuple[str, ...]:
        """What `FILTER` finds in the plan of the query that calls; the same in all of a run."""

    def text(self, place: str) -> str:
        """A file of the checkpoint. Raises whatever Python or Spark raises."""

    def initial(self, count: int) -> list[str | None]:
        """Where the first batch starts in each of ``count`` sources: what a source has written down, or None."""

    def progress(self) -> tuple[list[str | None], list[str | None]]:
        """Where the present batch starts and ends in each source, where the log cannot be read."""

    def is_local(self) -> bool:
        """Whether tasks run in the process of the driver, so that no executor can be lost."""

    def parallelism(self) -> int:
        """How many tasks run at one time, as far as anybody can tell."""

    def on_executors(self, ask: Callable[[], str]) -> list[str]:
        """What ``ask`` returns on each executor that is there, some of them more than once."""

    def plan_rows(self) -> None:
        """Plan the frame and begin its job, so that what Spark cannot run raises here."""

    def release(self) -> None:
        """Release the storage of a frame that `localCheckpoint` has made."""

    def tagged(self, tag: str) -> AbstractContextManager[None]:
        """The jobs that this thread starts inside can be ended with `cancel`."""

    def cancel(self, tag: str) -> None:
        """End the jobs of a tag, from any thread. Tasks that run already may go on for a while."""
