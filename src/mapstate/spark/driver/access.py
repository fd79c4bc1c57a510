"""What a batch asks of its Spark beside the DataFrame API: here of the JVM, in connect.py of a Spark Connect server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mapstate.spark.driver.access_interface import Access, QueryRun, SourceLog
from mapstate.spark.driver.increments import check_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["access_of", "configured", "is_connect"]


def access_of(frame: DataFrame) -> Access:
    """The access for a DataFrame of either kind."""
    if is_connect(frame):
        from mapstate.spark.driver.connect import ConnectAccess

        return ConnectAccess(frame)
    return _ClassicAccess(frame)


def is_connect(frame: Any) -> bool:
    """Whether a DataFrame or a Column is one of Spark Connect."""
    return type(frame).__module__.startswith("pyspark.sql.connect.")


@contextmanager
def configured(batch_df: DataFrame, settings: Mapping[str, str]) -> Iterator[None]:
    """Spark's SQL settings for the plans that run inside, in the query's own copy of the session. Driver."""
    conf = batch_df.sparkSession.conf
    before = {name: conf.get(name, None) for name in settings}
    for name, value in settings.items():
        conf.set(name, value)
    try:
        yield
    finally:
        for name, was in before.items():
            conf.unset(name) if was is None else conf.set(name, was)


class _ClassicAccess:
    """See `Access` for its methods."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame: Any = frame
        self._context: Any = frame.sparkSession.sparkContext

    @property
    def origin(self) -> object:
        return self._context._jvm

    def run(self, default: str) -> QueryRun:
        query_id = self._query_id
        # A streaming query runs its jobs in a group named after the run, unless a function of the user's names another.
        run_id = self._context.getLocalProperty("spark.jobGroup.id") if query_id else None
        if query_id and not re.fullmatch("[0-9a-f-]{36}", run_id or ""):
            run_id = str(self._execution.runId())
        return QueryRun(query_id or default, run_id)

    def may_go_on(self) -> bool:
        if self._query_id is None:
            return True
        execution = None if self._context._jvm is None else self._execution  # without one the session was stopped
        return execution is not None and bool(execution.isActive())

    def check_increments(self, output_mode: str) -> None:
        check_plan(self._frame._jdf.queryExecution().analyzed(), output_mode)

    def check_running_increments(self) -> None:
        execution = self._execution
        mode = "append" if execution is None else str(execution.outputMode().toString())
        if mode.lower() != "append":
            check_plan(execution.analyzedPlan(), mode)

    def serves(self, batch_id: int) -> bool:
        if self._query_id is None:
            return False
        return self._context.getLocalProperty("streaming.sql.batchId") in (str(batch_id), None)

    def checkpoint(self) -> str:
        return str(self._execution.resolvedCheckpointRoot())

    def file_sources(self) -> list[SourceLog | None]:
        sources = self._execution.sources()
        return [_source_log(sources.apply(at)) for at in range(sources.size())]

    def text(self, place: str) -> str:
        if place.startswith("file:"):  # and nothing in it is escaped
            return Path(place.removeprefix("file:")).read_text("utf-8")
        jvm = self._context._jvm
        path = _java_class(jvm, "org.apache.hadoop.fs.Path")(place)
        conf = self._frame.sparkSession._jsparkSession.sessionState().newHadoopConf()
        with closing(path.getFileSystem(conf).open(path)) as stream:
            return str(_java_class(jvm, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))

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
        return bool(self._context._jsc.isLocal())

    def parallelism(self) -> int:
        return int(self._context.defaultParallelism)

    def on_executors(self, ask: Callable[[], str]) -> list[str]:
        # Spark gives each executor one task before it gives any of them a second one. The driver is in the count.
        executors = max(self._context._jsc.sc().getExecutorMemoryStatus().size() - 1, 1)
        return list(self._context.parallelize(range(executors), executors).map(lambda _: ask()).collect())

    def plan_rows(self) -> None:
        self._frame._jdf.queryExecution().toRdd()

    def partitioning(self) -> str | None:
        return str(self._frame._jdf.queryExecution().executedPlan().outputPartitioning().toString())

    def release(self) -> None:
        self._frame._jdf.queryExecution().logical().rdd().unpersist(False)

    @contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        self._context.addJobTag(tag)  # the session's own tags do not reach the jobs that Python starts
        try:
            yield
        finally:
            self._context.removeJobTag(tag)

    def cancel(self, tag: str) -> None:
        self._context.cancelJobsWithTag(tag)

    @cached_property
    def _query_id(self) -> str | None:
        return cast("str | None", self._context.getLocalProperty("sql.streaming.queryId"))

    @property
    def _execution(self) -> Any:
        """The JVM's StreamExecution that calls; None once it has ended, or where the function is called by hand."""
        query_id = self._query_id
        if query_id is None:
            return None
        uuid = _java_class(self._context._jvm, "java.util.UUID").fromString(query_id)
        return self._frame.sparkSession._jsparkSession.sharedState().activeStreamingQueries().get(uuid)


@lru_cache(maxsize=16)
def _java_class(jvm: Any, name: str) -> Any:
    """A class of the JVM by its whole name, looked up once: each dot is a call to the JVM."""
    return reduce(getattr, name.split("."), jvm)


def _source_log(source: Any) -> SourceLog | None:
    if source.getClass().getSimpleName() != "FileStreamSource":
        return None
    field = source.getClass().getDeclaredField("metadataLog")  # private to Spark
    field.setAccessible(True)
    return SourceLog(source.toString(), field.get(source).metadataPath().toString())
