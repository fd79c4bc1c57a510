"""What a batch asks of the JVM of classic PySpark."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from mapstate.errors import UsageError
from mapstate.spark.driver.access_interface import LoggedBatch, QueryRun, logged_batch, parsed
from mapstate.spark.driver.uncounted_files import NO_HOST

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["ClassicAccess", "are_same"]

_MOST_PATHS = 200  # every reader reads the ledger, so it stays small
_SENDS_TOTALS = ("Aggregate", "Distinct")

_log = logging.getLogger("mapstate")
_classes: dict[str, tuple[Any, Any]] = {}


class ClassicAccess:
    """See `Access`."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame: Any = frame
        self._session: Any = frame.sparkSession
        self._context: Any = self._session.sparkContext

    @property
    def origin(self) -> object:
        """See `Access.origin`."""
        return self._context._jvm

    def run(self, default: str) -> QueryRun:
        """See `Access.run`."""
        query_id = self._query_id()
        # A streaming query runs its jobs in a group of its own, named after the run.
        run_id = self._context.getLocalProperty("spark.jobGroup.id") if query_id else None
        return QueryRun(query_id or default, run_id)

    def may_go_on(self) -> bool:
        """See `Access.may_go_on`."""
        if self._query_id() is None:
            return True
        if self._context._jvm is None:
            return False  # the whole session was stopped
        execution = self._found()
        return execution is not None and bool(execution.isActive())

    def check_increments(self, output_mode: str) -> None:
        """See `Access.check_increments`."""
        if output_mode.lower() != "append":
            _check_plan(self._frame._jdf.queryExecution().analyzed(), output_mode)

    def check_running_increments(self) -> None:
        """See `Access.check_running_increments`."""
        execution = self._execution
        if execution is not None:
            mode = str(execution.outputMode().toString())
            if mode.lower() != "append":
                _check_plan(execution.analyzedPlan(), mode)

    def serves(self, batch_id: int) -> bool:
        """See `Access.serves`."""
        if self._execution is None:
            return False
        return self._context.getLocalProperty("streaming.sql.batchId") in (str(batch_id), None)

    def logged(self, batch_id: int) -> LoggedBatch:
        """See `Access.logged`."""
        log, out = self._execution.offsetLog(), _java_class(self._context._jvm, "java.io.ByteArrayOutputStream")()
        log.serialize(log.get(batch_id).get(), out)  # the whole entry in one call to the JVM
        return logged_batch(out.toString("UTF-8"))

    def initial(self, count: int) -> list[Any]:  # noqa: ARG002  Spark knows
        """See `Access.initial`."""
        sources, found = self._execution.sources(), list[Any]()
        for at in range(sources.size()):
            try:
                found.append(parsed(sources.apply(at).initialOffset().json()))
            except Exception:  # noqa: BLE001  a source of the older kind, which starts with all that it has
                found.append(None)
        return found

    def progress(self) -> tuple[list[Any], list[Any]]:
        """See `Access.progress`."""
        query = self._execution
        return _progress(query, query.committedOffsets()), _progress(query, query.availableOffsets())

    def with_files(self, entries: list[Any], before: list[Any], *, same_log: bool) -> list[Any]:
        """See `Access.with_files`."""
        query, jvm = self._execution, self._context._jvm
        sources = None if query is None else query.sources()
        if sources is None or sources.size() != len(entries):
            return entries
        found = list(entries)
        for at, entry in enumerate(entries):
            if sources.apply(at).getClass().getSimpleName() == "FileStreamSource":
                known = before[at] if at < len(before) else None
                found[at] = _with_files(jvm, sources.apply(at), entry, known, same_log=same_log)
        return found

    def is_local(self) -> bool:
        """See `Access.is_local`."""
        return bool(self._context._jsc.isLocal())

    def on_executors(self, ask: Callable[[], str]) -> list[str]:
        """See `Access.on_executors`."""
        # Spark gives each executor one task before it gives any of them a second one. The driver is in the count.
        executors = max(self._context._jsc.sc().getExecutorMemoryStatus().size() - 1, 1)
        tasks = self._context.parallelize(range(executors), executors)
        return list(tasks.mapPartitions(lambda _: [ask()]).collect())

    def plan_rows(self) -> None:
        """See `Access.plan_rows`."""
        self._frame._jdf.queryExecution().toRdd()

    def partitioning(self) -> str | None:
        """See `Access.partitioning`."""
        return str(self._frame._jdf.queryExecution().executedPlan().outputPartitioning().toString())

    def release(self) -> None:
        """See `Access.release`."""
        self._frame._jdf.queryExecution().logical().rdd().unpersist(False)

    def files(self, place: str) -> _HadoopFiles:
        """See `Access.files`."""
        path = self._context._jvm.org.apache.hadoop.fs.Path(place)
        return _HadoopFiles(path.getFileSystem(self._session._jsparkSession.sessionState().newHadoopConf()), path)

    def _query_id(self) -> str | None:
        return cast("str | None", self._context.getLocalProperty("sql.streaming.queryId"))

    @cached_property
    def _execution(self) -> Any:
        """The JVM's StreamExecution that calls; None where the function is called by hand."""
        return self._found()

    def _found(self) -> Any:
        """The same, as it is now: None too once it has ended."""
        query_id = self._query_id()
        if query_id is None:
            return None
        uuid = _java_class(self._context._jvm, "java.util.UUID").fromString(query_id)
        return self._session._jsparkSession.sharedState().activeStreamingQueries().get(uuid)


class _HadoopFiles:
    """See `Files`."""

    def __init__(self, system: Any, path: Any) -> None:
        self._system = system
        self._path = path

    def exists(self) -> bool:
        """See `Files.exists`."""
        return bool(self._system.exists(self._path))

    def names(self) -> list[str]:
        """See `Files.names`."""
        return [str(found.getPath().getName()) for found in self._system.listStatus(self._path)]

    def delete(self) -> None:
        """See `Files.delete`."""
        self._system.delete(self._path, True)


def are_same(one: Column, other: Column) -> bool:
    """Whether two columns are the same expression."""
    left: Any = one
    right: Any = other
    return bool(left._jc.equals(right._jc))


def _check_plan(plan: Any, output_mode: str) -> None:
    if plan.getClass().getSimpleName() in _SENDS_TOTALS and plan.isStreaming():
        raise UsageError(
            f"the stream is aggregated before it comes here, and outputMode={output_mode.lower()!r} sends totals, not "
            "increments: a state would add totals up. Nothing was written. Aggregate here instead, by "
            "newStream(...).groupBy(...).persistentAggregate(...); or use a watermark and outputMode='append'. See "
            "docs/guarantees.md#rows-are-increments"
        )
    children = plan.children()
    for at in range(children.size()):
        _check_plan(children.apply(at), output_mode)


def _java_class(jvm: Any, name: str) -> Any:
    """A class of the JVM by its whole name, looked up once: each dot is a call to the JVM."""
    known = _classes.get(name)
    if known is None or known[0] is not jvm:
        found = jvm
        for part in name.split("."):
            found = getattr(found, part)
        known = _classes[name] = jvm, found
    return known[1]


def _progress(query: Any, progress: Any) -> list[Any]:
    sources = query.sources()
    offsets = [progress.get(sources.apply(at)) for at in range(sources.size())]
    return [parsed(one.get().json()) if one.isDefined() else None for one in offsets]


def _with_files(jvm: Any, source: Any, entry: Any, old: Any, *, same_log: bool) -> Any:
    """A file source's entry with what can start another checkpoint.

    Builds on the entry of the last commit that knew: ``newest`` never goes down, also where a new owner's
    log begins with files that the state has counted long ago.
    """
    name = source.toString()
    known = old.get("before", old) if isinstance(old, dict) and old.get("source") == name else None
    try:
        start = known["logOffset"] + 1 if known is not None and same_log else None
        files = [] if start == entry["logOffset"] + 1 else _files(jvm, source, start, entry["logOffset"])
    except Exception as error:  # noqa: BLE001  reads what is private to Spark
        _log.debug("the files of %s are not known: %s", name, error)
        return {**entry, "source": name} | ({} if known is None else {"before": known})
    times = [time for _, time in files] + ([] if known is None else [known["newest"]])
    if not times:
        return {**entry, "source": name}
    newest = max(times)
    paths = {path for path, time in files if time == newest}
    if known is not None and known["newest"] == newest:
        paths.update(known["paths"])
    if len(paths) > _MOST_PATHS:
        return {**entry, "source": name} | ({} if known is None else {"before": known})
    return {**entry, "source": name, "newest": newest, "paths": sorted(paths)}


def _files(jvm: Any, source: Any, start: int | None, end: int) -> list[tuple[str, int]]:
    """Path and modification time of the files from log entry ``start`` to ``end``, from the source's own log."""
    field = source.getClass().getDeclaredField("metadataLog")
    field.setAccessible(True)
    log = field.get(source)
    found = []
    last = _option(jvm, end)
    for pair in log.get(last if start == end else _option(jvm, start), last):
        out = _java_class(jvm, "java.io.ByteArrayOutputStream")()
        log.serialize(pair._2(), out)  # all of them in one call to the JVM
        entries = map(json.loads, out.toString("UTF-8").splitlines()[1:])
        found += [(NO_HOST.sub(r"\1/", entry["path"]), entry["timestamp"]) for entry in entries]
    return found


def _option(jvm: Any, number: int | None) -> Any:
    """A Scala Option of a Long; a Long by itself would come back as a Python int."""
    longs = _java_class(jvm, "java.util.stream.LongStream")
    boxed = (longs.empty() if number is None else longs.of(number)).boxed().findFirst()
    return _java_class(jvm, "scala.jdk.javaapi.OptionConverters").toScala(boxed)
