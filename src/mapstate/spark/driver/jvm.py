"""What is asked of the JVM once in a run, by a tool, or in trouble; `mapstate.spark.driver.access` has the rest."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mapstate.errors import UsageError
from mapstate.spark.driver import access_interface
from mapstate.spark.driver.access_interface import QueryRun, SourceLog


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
    """See `Access` for its methods. ``frame`` is that of a batch, ``context`` its SparkContext."""

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
        return self.query is not None and not self.query.thread.isAlive()

    def first_batch(self) -> int:
        done = self._execution.recentProgress()
        return min((int(one.batchId()) for one in done), default=sys.maxsize)

    def may_go_on(self) -> bool:
        if self.context._jvm is None:  # the session was stopped
            return False
        try:
            return self._execution is None or bool(self._execution.isActive())
        except UsageError:  # the query has ended
            return False

    def check_increments(self, output_mode: str) -> None:
        access_interface.check_plan(self.frame._jdf.queryExecution().analyzed(), output_mode)

    def check_running_increments(self) -> None:
        execution = self._execution
        mode = "append" if execution is None else str(execution.outputMode().toString())
        if mode.lower() != "append":
            access_interface.check_plan(execution.analyzedPlan(), mode)

    def checkpoint(self) -> str:
        return str(self._execution.resolvedCheckpointRoot())

    def file_sources(self) -> list[SourceLog | None]:
        sources = self._execution.sources()
        return [_source_log(sources.apply(at)) for at in range(sources.size())]

    def filters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(access_interface.FILTER.findall(str(self._execution.analyzedPlan().toString()))))

    def initial(self, count: int) -> list[str | None]:  # noqa: ARG002  Spark knows
        sources, found = self._execution.sources(), list[str | None]()
        for at in range(sources.size()):
            try:
                found.append(str(sources.apply(at).initialOffset().json()))
            except Exception:  # noqa: BLE001  a source of the older kind, which starts with all that it has
                found.append(None)
        return found

    def progress(self) -> tuple[list[str | None], list[str | None]]:
        query = self._execution
        every = [query.sources().apply(at) for at in range(query.sources().size())]
        known = ([of.get(one) for one in every] for of in (query.committedOffsets(), query.availableOffsets()))
        start, end = ([str(one.get().json()) if one.isDefined() else None for one in offsets] for offsets in known)
        return start, end

    def is_local(self) -> bool:
        return bool(self.context._jsc.isLocal())

    def parallelism(self) -> int:
        return int(self.context.defaultParallelism)

    def on_executors(self, ask: Callable[[], str]) -> list[str]:
        # Spark gives each executor one task before it gives any of them a second one. The driver is in the count.
        executors = max(self.context._jsc.sc().getExecutorMemoryStatus().size() - 1, 1)
        return list(self.context.parallelize(range(executors), executors).map(lambda _: ask()).collect())

    def plan_rows(self) -> None:
        self.frame._jdf.queryExecution().toRdd()

    def release(self) -> None:
        self.frame._jdf.queryExecution().logical().rdd().unpersist(False)

    @contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        self.context.addJobTag(tag)  # the session's own tags do not reach the jobs that Python starts
        try:
            yield
        finally:
            self.context.removeJobTag(tag)

    def cancel(self, tag: str) -> None:
        self.context.cancelJobsWithTag(tag)


def _source_log(source: Any) -> SourceLog | None:
    if source.getClass().getSimpleName() != "FileStreamSource":
        return None
    field = source.getClass().getDeclaredField("metadataLog")  # private to Spark
    field.setAccessible(True)
    return SourceLog(source.toString(), field.get(source).metadataPath().toString())
