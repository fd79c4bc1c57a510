"""The calls of one run for the same states: batches in parts, batches that were left out, calls that failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

from mapstate.errors import MissingBatchesError, UsageError
from mapstate.protocol.ledgers import Ledgers
from mapstate.spark.driver import repeats
from mapstate.spark.driver.access import Access
from mapstate.spark.driver.job import StreamPlan
from mapstate.spark.driver.query_run import FUNCTION_PAGE, QueryRun

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(eq=False)
class Calls:
    """They come one at a time, under ``lock``, whichever thread and whichever object makes them.

    ``last``      the batch of the last call
    ``failed``    the first call that failed since one has ended: its batch, and the name of its error
    ``frame``     of the last call, if it failed
    ``in_parts``  the batch for which two calls came, and the first was not made again: the run's calls are refused
    ``ledgers``   those that a call has opened last, of the states in ``plan``; None where it has none of its own
    """

    is_of_run: bool = False
    last: int | None = None
    failed: tuple[int | None, str] | None = None
    frame: DataFrame | None = None
    in_parts: int | None = None
    ledgers: Ledgers | None = None
    plan: StreamPlan = field(default_factory=lambda: StreamPlan(""))
    lock: Any = field(default_factory=RLock)

    def note_second(self, frame: DataFrame) -> None:
        """A call for the batch of the last one: another part of it, unless the last one failed with these rows."""
        if self.frame is None or not (self.frame is frame or self.frame.sameSemantics(frame)):
            self.in_parts = self.last

    def note_failed(self, error: BaseException, frame: DataFrame, before: int | None, access: Access) -> None:
        """The present call failed; ``before`` is the batch of the one before it.

        Raises MissingBatchesError where the function has left out batches, or swallowed an error.
        """
        failed, self.frame = self.failed, frame
        self.failed = failed or (self.last, type(error).__name__)
        if isinstance(error, MissingBatchesError) and error.facts.get("found") == self.last:
            due = error.facts["expected"]
            if failed is not None and failed[0] == due:
                raise _swallowed(error, failed[1]) from error
            was_there = before == due - 1 if before is not None else self.is_of_run and access.first_batch() <= due
            if failed is None and was_there:
                raise _left_out(error) from error

    def take_back(self, batch_id: int, ask: Callable[..., bool], *, may_roll_back: bool = True) -> bool:
        """Undo or mark what counts of a batch that came in parts; returns whether nothing is left of it."""
        return ask(partial(repeats.take_back, self.ledgers, self.plan, batch_id, may_roll_back=may_roll_back))

    def had_parts(self, batch_id: int, ask: Callable[..., bool]) -> None:
        """Another state of this run was given the batch in parts, so these may have been, too: the run is refused."""
        with self.lock:
            if self.last == batch_id and self.in_parts is None:
                self.in_parts = batch_id
                self.take_back(batch_id, ask)


Stores = tuple[tuple[str, str], ...]  # of a driver's states, with their names

_calls_of: dict[str, dict[tuple[str | None, Stores], Calls]] = {}
"""By the query; of its last run alone, because what has failed keeps a DataFrame."""


def calls_of_run(run: QueryRun, stores: Stores) -> Calls:
    """Those of a run for states in these stores."""
    known, key = _calls_of.setdefault(run.query_id, {}), (run.run_id, stores)
    if key not in known:
        for other in [each for each in list(known) if each[0] != run.run_id]:
            known.pop(other, None)
    return known.setdefault(key, Calls(is_of_run=True))


def others_had_parts(run: QueryRun, calls: Calls, ask: Callable[..., bool]) -> None:
    """The run's calls for other states may have had one part each, and no second one will tell."""
    assert calls.in_parts is not None  # noqa: S101  the caller has asked
    with ExitStack() as every:  # also where a store fails for one of them
        for (run_id, _), other in list(_calls_of.get(run.query_id, {}).items()):
            if run_id == run.run_id and other is not calls:
                every.callback(other.had_parts, calls.in_parts, ask)


def in_parts(stream: str, of: int, *, is_taken_back: bool) -> UsageError:
    """The error of a run that has given batch ``of`` in parts."""
    counts = "was taken back: nothing of the batch counts" if is_taken_back else "counts, and the next start says so"
    return UsageError(
        f"batch {of} was given to the stream {stream!r} twice in one run. What came first {counts}. Union the parts, "
        "or make each a stream of its own, and start again; this run's batches are refused. "
        f"{FUNCTION_PAGE}"
    )


def _left_out(error: MissingBatchesError) -> MissingBatchesError:
    """The error of a run whose function has made no call for batches."""
    due, found = error.facts["expected"], error.facts["found"]
    return MissingBatchesError(
        f"the foreachBatch function did not call state {error.facts['state']!r} for batches {due} to {found - 1}, and "
        f"calls it for batch {found}. Nothing was written. Call it for every batch, as with_empty_batches does, and "
        f"rewind the checkpoint, or start once with on_gap='accept'. {FUNCTION_PAGE}",
        **error.facts,
    )


def _swallowed(error: MissingBatchesError, name: str) -> MissingBatchesError:
    """The error of a run whose function went on after a call that raised the error ``name``."""
    due, found = error.facts["expected"], error.facts["found"]
    return MissingBatchesError(
        f"the call of state {error.facts['state']!r} for batch {due} failed ({name}), the foreachBatch function went "
        f"on, and Spark brings batch {found}. Nothing was written. Let the function raise the error, and rewind the "
        f"checkpoint (mapstate rewind). {FUNCTION_PAGE}",
        **error.facts,
    )
