"""What a batch asks of its Spark beside the DataFrame API: here of the JVM, in connect.py of a Spark Connect server."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from mapstate.errors import UsageError
from mapstate.spark.driver import access_interface
from mapstate.spark.driver.access_interface import FUNCTION_PAGE, Access, QueryRun, SourceLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def access_of(frame: DataFrame) -> Access:
    """The access for a DataFrame of either kind."""
    if is_connect(frame):
        from mapstate.spark.driver.connect import ConnectAccess

        return ConnectAccess(frame)
    return _ClassicAccess(frame)


def is_connect(frame: Any) -> bool:
    """Whether a DataFrame or a Column is one of Spark Connect."""
    return type(frame).__module__.startswith("pyspark.sql.connect.")


_settings_lock = Lock()
_settings: dict[tuple[int, str], tuple[int, str | None]] = {}
"""How many blocks of `configured` hold a setting of a session of Python's, and what it was before the first of them."""


@contextmanager
def configured(batch_df: DataFrame, settings: Mapping[str, str]) -> Iterator[None]:
    """Spark's SQL settings for the plans that run inside, in the query's own copy of the session. Driver.

    Threads may be inside at the same time: the last one puts back what was set before the first.
    """
    session = batch_df.sparkSession
    conf = session.conf
    with _settings_lock:
        for name, value in settings.items():
            holders, before = _settings.get((id(session), name)) or (0, conf.get(name, None))
            _settings[id(session), name] = holders + 1, before
            conf.set(name, value)
    try:
        yield
    finally:
        with _settings_lock:
            for name in settings:
                holders, before = _settings.pop((id(session), name))
                if holders > 1:
                    _settings[id(session), name] = holders - 1, before
                else:
                    conf.unset(name) if before is None else conf.set(name, before)


class _ClassicAccess:
    """See `Access` for its methods."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame: Any = frame
        self._context: Any = frame.sparkSession.sparkContext

    @property
    def origin(self) -> object:
        return self._context._jvm

    def run(self, default: str, batch_id: int | None = None) -> QueryRun:
        known = self._query
        if known is None:
            return QueryRun(default, None)
        present = int(known.execution.lastExecution().currentBatchId())
        if batch_id not in (None, present):
            raise UsageError(
                f"the state got batch {batch_id}, and its query is at batch {present}. Nothing was written. Pass on "
                f"the batch id that Spark gave, and let no thread outlive the function. {FUNCTION_PAGE}"
            )
        return known.run

    def is_over(self) -> bool:
        return self._query is not None and not self._query.thread.isAlive()

    def first_batch(self) -> int:
        done = self._execution.recentProgress()
        return min((int(one.batchId()) for one in done), default=sys.maxsize)

    def may_go_on(self) -> bool:
        if self._context._jvm is None:  # the session was stopped
            return False
        try:
            return self._execution is None or bool(self._execution.isActive())
        except UsageError:  # the query has ended
            return False

    def check_increments(self, output_mode: str) -> None:
        access_interface.check_plan(self._frame._jdf.queryExecution().analyzed(), output_mode)

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

    def text(self, place: str) -> str:
        if place.startswith("file:"):  # and nothing in it is escaped
            return Path(place.removeprefix("file:")).read_text("utf-8")
        jvm = self._context._jvm
        path = java_class(jvm, "org.apache.hadoop.fs.Path")(place)
        conf = self._frame.sparkSession._jsparkSession.sessionState().newHadoopConf()
        with closing(path.getFileSystem(conf).open(path)) as stream:
            return str(java_class(jvm, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))

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
    def _query(self) -> _Query | None:
        """The query whose batch this is; None where the function is called by hand.

        Each start of a query has a session of its own, and all frames of its batches have that, in any thread. A frame
        of another session is the batch's if the thread says so: the query's own, or one that has its properties.
        Raises UsageError where nothing tells.
        """
        session = self._frame.sparkSession._jsparkSession
        query_id = self._context.getLocalProperty("sql.streaming.queryId")
        known = next((one for one in _queries if one.session.equals(session)), None)
        if known is None:  # py4j has None for a query that ends while it lists them
            running = list(map(_Query.of, filter(None, session.sharedState().activeStreamingQueries().values())))
            known = next((one for one in running if one.session.equals(session)), None)
            if known is not None:
                _queries.appendleft(known)
            else:
                known = next((one for one in running if one.run.query_id == query_id), None)
                if known is None:
                    access_interface.check_by_hand(query_id, self._frame.sparkSession.conf, runs=bool(running))
        if known is not None and query_id not in (None, known.run.query_id):
            raise UsageError(
                f"a DataFrame of query {known.run.query_id} came to a state in the function of query {query_id}. "
                f"Nothing was written. Give a state the frames of one query. {FUNCTION_PAGE}"
            )
        return known

    @property
    def _execution(self) -> Any:
        """The JVM's StreamExecution; None where the function is called by hand."""
        return None if self._query is None else self._query.execution


class _Query(NamedTuple):
    """A start of a streaming query: its own copy of the session, its StreamExecution and thread, in the JVM."""

    session: Any
    execution: Any
    thread: Any
    run: QueryRun

    @classmethod
    def of(cls, execution: Any) -> _Query:
        run = QueryRun(str(execution.id()), str(execution.runId()))
        return cls(execution.sparkSessionForStream(), execution, execution.queryExecutionThread(), run)


_queries: deque[_Query] = deque(maxlen=8)
"""The last ones that have brought a batch: the JVM is not asked for all of them each time."""


@lru_cache(maxsize=16)
def java_class(jvm: Any, name: str) -> Any:
    """A class of the JVM by its whole name, looked up once: each dot is a call to the JVM."""
    return reduce(getattr, name.split("."), jvm)


def _source_log(source: Any) -> SourceLog | None:
    if source.getClass().getSimpleName() != "FileStreamSource":
        return None
    field = source.getClass().getDeclaredField("metadataLog")  # private to Spark
    field.setAccessible(True)
    return SourceLog(source.toString(), field.get(source).metadataPath().toString())
