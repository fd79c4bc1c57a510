"""What is asked of the JVM once in a run, by a tool, or in trouble; `mapstate.spark.driver.access` has the rest."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mapstate.errors import UsageError
from mapstate.spark.driver import query_run
from mapstate.spark.driver.query_run import QueryRun, SourceLog


class StartedQuery(NamedTuple):
    """A start of a streaming query: its own copy of the session, its StreamExecution and thread, in the JVM."""

    session: Any
    execution: Any
    thread: Any
    run: QueryRun

    @classmethod
    def of(cls, execution: Any) -> StartedQuery:
        run = QueryRun(str(execution.id()), str(execution.runId()))
        return cls(execution.sparkSessionForStream(), execution, execution.queryExecutionThread(), run)


class JvmAccess(ABC):
    """The base of `ClassicAccess`. ``frame`` is that of a batch, ``context`` its SparkContext."""

    frame: Any
    context: Any

    @property
    @abstractmethod
    def query(self) -> StartedQuery | None:
        """The query whose batch this is; None where the function is called by hand."""

    @property
    def _execution(self) -> Any:
        """The JVM's StreamExecution; None where the function is called by hand."""
        return None if self.query is None else self.query.execution

    def is_over(self) -> bool:
        """Whether the query has ended, and the call comes from a thread that outlives it."""
        return self.query is not None and not self.query.thread.isAlive()

    def first_batch(self) -> int:
        """The first batch of the present run of which Spark still knows; of a streaming query only."""
        done = self._execution.recentProgress()
        return min((int(event.batchId()) for event in done), default=sys.maxsize)

    def may_go_on(self) -> bool:
        """False once somebody has stopped the query: jobs that failed since were cancelled."""
        if self.context._jvm is None:  # the session was stopped
            return False
        try:
            return self._execution is None or bool(self._execution.isActive())
        except UsageError:  # the query has ended
            return False

    def check_increments(self, output_mode: str) -> None:
        """See `check_plan`, of a query of this frame that is to start in a mode not append."""
        query_run.check_plan(self.frame._jdf.queryExecution().analyzed(), output_mode)

    def check_running_increments(self) -> None:
        """See `check_plan`, of the query that calls. Nothing to check where called by hand."""
        execution = self._execution
        mode = "append" if execution is None else str(execution.outputMode().toString())
        if mode.lower() != "append":
            query_run.check_plan(execution.analyzedPlan(), mode)

    def check_whole(self) -> None:
        """See `check_whole` of `query_run`, of the query that calls. Nothing to check where called by hand."""
        if self._execution is not None:
            query_run.check_whole(self._execution)

    def checkpoint(self) -> str:
        """Where the query that calls keeps its logs; the same in all of a run. Raises whatever Spark raises."""
        return str(self._execution.resolvedCheckpointRoot())

    def file_sources(self) -> list[SourceLog | None]:
        """In the order of the offsets, None for another source; the same in all of a run. Empty if nobody can tell."""
        sources = self._execution.sources()
        return [_source_log(sources.apply(i)) for i in range(sources.size())]

    def filters(self) -> tuple[str, ...]:
        """What `FILTER` finds in the plan of the query that calls; the same in all of a run."""
        return tuple(dict.fromkeys(query_run.FILTER.findall(str(self._execution.analyzedPlan().toString()))))

    def initial(self, count: int) -> list[str | None]:  # noqa: ARG002  Spark knows
        """Where the first batch starts in each of ``count`` sources: what a source has written down, or None."""
        sources, offsets = self._execution.sources(), list[str | None]()
        for source in map(sources.apply, range(sources.size())):
            try:
                offsets.append(str(source.initialOffset().json()))
            except Exception:  # noqa: BLE001  a source of the older kind, which starts with all it has, or at a version
                offsets.append(query_run.first_version(source) if str(source).startswith("DeltaSource[") else None)
        return offsets

    def progress(self) -> tuple[list[str | None], list[str | None]]:
        """Where the present batch starts and ends in each source, where the log cannot be read."""
        query = self._execution
        every = [query.sources().apply(i) for i in range(query.sources().size())]
        known = ([of.get(sources) for sources in every] for of in (query.committedOffsets(), query.availableOffsets()))
        start, end = (
            [str(offset.get().json()) if offset.isDefined() else None for offset in offsets] for offsets in known
        )
        return start, end

    def is_local(self) -> bool:
        """Whether tasks run in the process of the driver, so that no executor can be lost."""
        return bool(self.context._jsc.isLocal())

    def parallelism(self) -> int:
        """How many tasks run at one time, as far as anybody can tell."""
        return int(self.context.defaultParallelism)

    def on_executors(self, ask: Callable[[], str]) -> list[str]:
        """What ``ask`` returns on each executor that is there, some of them more than once."""
        # Spark gives each executor one task before it gives any of them a second one. The driver is in the count.
        executors = max(self.context._jsc.sc().getExecutorMemoryStatus().size() - 1, 1)
        return list(self.context.parallelize(range(executors), executors).map(lambda _: ask()).collect())

    def plan_rows(self) -> None:
        """Plan the frame and begin its job, so that what Spark cannot run raises here."""
        self.frame._jdf.queryExecution().toRdd()

    def release(self) -> None:
        """Release the storage of a frame that `localCheckpoint` has made."""
        self.frame._jdf.queryExecution().logical().rdd().unpersist(False)

    @contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """The jobs that this thread starts inside can be ended with `cancel`."""
        self.context.addJobTag(tag)  # the session's own tags do not reach the jobs that Python starts
        try:
            yield
        finally:
            self.context.removeJobTag(tag)

    def cancel(self, tag: str) -> None:
        """End the jobs of a tag, from any thread. Tasks that run already may go on for a while."""
        self.context.cancelJobsWithTag(tag)


def _source_log(source: Any) -> SourceLog | None:
    if source.getClass().getSimpleName() != "FileStreamSource":
        return None
    field = source.getClass().getDeclaredField("metadataLog")  # private to Spark
    field.setAccessible(True)
    return SourceLog(source.toString(), field.get(source).metadataPath().toString())
