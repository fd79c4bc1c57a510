"""What a batch asks of a Spark Connect server.

Spark runs a foreachBatch function in a worker process beside the server, with a session there and no JVM. Which query
it serves is what the function brought along: `Served`. A worker serves one start of one query. docs/connect.md says
what differs for a user.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pickle import PickleError
from posixpath import normpath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import pyarrow as pa

from mapstate.errors import ConfigurationError, MapStateError, UsageError
from mapstate.operations.folders import has_scheme, local_path
from mapstate.spark.driver.job import Branch
from mapstate.spark.driver.query_run import FILTER, QueryRun, SourceLog
from mapstate.spark.executor.error_text import error_from_text, errors_as_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

# A streaming source in the text of a plan, without the name that Spark 4.2 adds; and the path of one of files. Up to
# Spark 4.1 all options of a source are in front of that, in which there may be ends of lines.
_RELATION = re.compile(r"^[ :+-]*~?StreamingRelation(?:V2)? (.*?\])(?:, name=[^\n]*)?$", re.MULTILINE | re.DOTALL)
_FILES = re.compile(r"(?:^|\), )FileSource\[(.*?)\], \[", re.DOTALL)
_log = logging.getLogger("mapstate")
_URL = "SPARK_CONNECT_LOCAL_URL"  # in the environment of a worker: its server's
_NOTHING = "__mapstate_is_not_here"

is_started = ContextVar("is_started", default=False)
"""Set while `start` has a client of Spark Connect pickle a query for its worker."""


@contextmanager
def starting() -> Iterator[None]:
    """Around that pickling."""
    token = is_started.set(True)
    try:
        yield
    finally:
        is_started.reset(token)


class UnservedError(UsageError, PickleError):
    """A state as a foreachBatch function under Spark Connect. PySpark raises no other than a PickleError as it is."""


def unserved() -> UnservedError:
    """The error of a state whose worker would not know of which query a batch is."""
    return UnservedError(
        "under Spark Connect a foreachBatch function cannot tell which query it serves. Nothing was written. Start the "
        "query with the start(checkpointLocation) of the state, the stream or the topology, in place of writeStream. "
        "See docs/connect.md#how-a-query-is-started"
    )


class Served(NamedTuple):
    """The query that a worker serves: its checkpoint, the session that has started it, and its sources in order.

    A source that is none of files is None. ``filters`` are what `FILTER` finds in the stream's plan. A worker unpickles
    this with the function of its query, once, and knows from then on.
    """

    checkpoint: str
    session_id: str
    sources: tuple[SourceLog | None, ...] = ()
    filters: tuple[str, ...] = ()

    def __reduce__(self) -> Any:
        """See the class."""
        return _serve, tuple(self)


def _serve(*fields: Any) -> Served:
    served = Served(*fields)
    if _URL in os.environ:
        ConnectAccess.served = served
    return served


class ConnectAccess:
    """See `ClassicAccess`."""

    served: ClassVar[Served | None] = None
    _run: ClassVar[QueryRun | None] = None

    def __init__(self, frame: DataFrame) -> None:
        self._frame: Any = frame
        self._session: Any = frame.sparkSession

    @property
    def origin(self) -> object:
        """See `ClassicAccess.origin`: here columns are names of expressions."""
        return ConnectAccess

    def run(self, default: str, batch_id: int | None = None) -> QueryRun:  # noqa: ARG002  `ServedQuery` passes it on
        """See `ClassicAccess.run`. The query's id is in its checkpoint; the run is asked of the server once."""
        if _URL not in os.environ:
            return QueryRun(default, None)
        served = self._served()
        run = self._run
        if run is None:
            query_id = json.loads(self.text(f"{served.checkpoint}/metadata"))["id"]
            query = self._query(query_id)
            if query is None:
                raise UsageError(
                    f"the checkpoint {served.checkpoint} is of query {query_id}, which the session that has started "
                    "this one does not run. Nothing was written. Is it another directory on the server's machine?"
                )
            run = ConnectAccess._run = QueryRun(query_id, str(query.runId))
        return run

    def is_over(self) -> bool:
        """See `ClassicAccess.is_over`: the worker ends with its query."""
        return False

    def first_batch(self) -> int:
        """See `ClassicAccess.first_batch`: each batch is given, so nobody has to ask."""
        return sys.maxsize

    def may_go_on(self) -> bool:
        if self._run is None:
            return True
        try:
            query = self._query(self._run.query_id)
            return query is not None and str(query.runId) == self._run.run_id and bool(query.isActive)
        except Exception:  # noqa: BLE001  the session has gone, and the query with it
            return False

    def check_increments(self, output_mode: str) -> None:
        """See `ClassicAccess.check_increments`. The plan is on the server, so such a mode is refused."""
        raise UsageError(
            f"outputMode={output_mode.lower()!r}: under Spark Connect nobody can tell whether this stream sends "
            "increments or totals, which a state would add up. Nothing was written. Use outputMode='append', which "
            "sends the same rows unless the stream is aggregated in front of the state. See docs/connect.md"
        )

    def check_running_increments(self) -> None:
        """See `ClassicAccess.check_running_increments`: `start_query` has checked it, and nothing else starts one."""

    def check_whole(self) -> None:
        """See `ClassicAccess.check_whole`: a client sees no source, so nothing tells."""

    def checkpoint(self) -> str:
        return self._served().checkpoint

    def file_sources(self) -> list[SourceLog | None]:
        return list(self._served().sources)

    def filters(self) -> tuple[str, ...]:
        """See `ClassicAccess.filters`: of the plan of which the client knew."""
        return self._served().filters

    def text(self, place: str) -> str:
        """See `ClassicAccess.text`. A local file is here: the worker runs beside the server."""
        path = local_path(place)
        if path is not None:
            return path.read_text("utf-8")
        return str(self._session.read.format("text").option("wholetext", True).load(place).collect()[0][0])

    def initial(self, count: int) -> list[str | None]:
        """See `ClassicAccess.initial`: the sources' own files have as many forms as there are sources."""
        return [None] * count

    def progress(self) -> tuple[list[str | None], list[str | None]]:
        raise LookupError("Spark Connect has no other place for them than the checkpoint")

    def is_local(self) -> bool:
        master = str(self._session.conf.get("spark.master", ""))
        return master == "local" or master.startswith("local[")

    def parallelism(self) -> int:
        """See `ClassicAccess.parallelism`: the tasks of a shuffle. The server spreads rows by what it knows itself."""
        return int(self._session.conf.get("spark.sql.shuffle.partitions", "200") or 200)

    def on_executors(self, ask: Callable[[], str]) -> list[str]:
        """See `ClassicAccess.on_executors`: a task for each core."""

        def answer(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield pa.RecordBatch.from_pydict({"answer": [ask()]})

        return [row[0] for row in self._session.range(1 << 16).mapInArrow(answer, "answer string").collect()]

    def plan_rows(self) -> None:
        """See `ClassicAccess.plan_rows`: the server's errors come by themselves."""

    def release(self) -> None:
        """See `ClassicAccess.release`: the server does it when the frame has gone."""

    @contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        self._session.addTag(tag)
        try:
            yield
        finally:
            self._session.removeTag(tag)

    def cancel(self, tag: str) -> None:
        self._session.interruptTag(tag)

    def _served(self) -> Served:
        if self.served is None:
            raise unserved()
        return self.served

    def _query(self, query_id: str) -> Any:
        """The query, by the session that started it: the batch's may be a copy, which knows of none."""
        session, root = self._session, self._served().session_id
        if session.session_id != root:
            from pyspark.sql.connect.session import SparkSession

            session = SparkSession.builder.remote(f"{os.environ[_URL]};session_id={root}").create()
        return session.streams.get(query_id)


class ServedQuery:
    """What the worker of a query calls: the function of its batches, with what the worker has to know of the query.

    Raises MapStateError with a note that the client can read: Spark passes on nothing but its text.
    """

    def __init__(self, function: Callable[[DataFrame, int], None], served: Served) -> None:
        self._function, self._served = function, served

    @classmethod
    def of(
        cls, function: Callable[[DataFrame, int], None], df: Any, branches: Iterable[Branch], checkpoint: str | None
    ) -> Self:
        """Client, before the query starts. Raises UsageError, ConfigurationError."""
        if checkpoint is None:
            raise UsageError(
                "under Spark Connect start needs a checkpointLocation: a batch finds in it which query it is of. "
                "Nothing was started. See docs/connect.md#how-a-query-is-started"
            )
        for spec in (branch.job.spec for branch in branches):
            if not spec.backend.shared_between_processes:
                raise ConfigurationError(
                    f"{spec.backend!r} lives in one process, and under Spark Connect a batch runs in a process of the "
                    "server: nothing could read it. Nothing was started. Give a store that processes share"
                )
        place = qualified(df.sparkSession, str(checkpoint).rstrip("/"))
        plan = _analyzed(df)
        return cls(
            function, Served(place, df.sparkSession.session_id, sources_of(plan, place), tuple(FILTER.findall(plan)))
        )

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Applies one micro-batch. Worker."""
        with errors_as_text():
            self._function(batch_df, batch_id)


def qualified(session: SparkSession, place: str) -> str:
    """A place with the scheme and the root of the server's own file system, which may be none of a disk. Asks it.

    The server names a place in full where nothing is, and reads nothing for that. Raises UsageError, Spark's errors.
    """
    from pyspark.errors import AnalysisException

    if has_scheme(place):
        return place
    try:
        _ = session.read.format("text").load(f"{place}/{_NOTHING}").schema
    except AnalysisException as error:
        full = str((error.getMessageParameters() or {}).get("path"))
        if full.endswith(f"/{_NOTHING}"):
            return full.removesuffix(f"/{_NOTHING}")
        raise
    raise UsageError(f"Spark does not say in which file system {place!r} is. Nothing was started. Name its scheme")


def error_of(query: StreamingQuery) -> MapStateError | None:
    """The error that stopped a query, None while there is none of mapstate's. Client; asks the server."""
    return error_from_text(str(query.exception() or ""))


def _analyzed(df: Any) -> str:
    """The analyzed plan of a stream as text; empty where the server's has another form. Client."""
    try:
        return str(df._explain_string(extended=True).partition("\n== Analyzed")[2].partition("\n== ")[0])
    except Exception as error:  # noqa: BLE001  what is private to PySpark; the stream's own errors come at its start
        _log.debug("the plan of a stream is not known: %s", error)
        return ""


def sources_of(plan: str, checkpoint: str) -> tuple[SourceLog | None, ...]:
    """The sources of a stream's plan in the order of its offsets.

    Spark gives each a log by a number, in the order in which they come first; the same frame is one source wherever it
    is used.
    """
    relations = _RELATION.findall(plan)
    logs = {relation: number for number, relation in enumerate(dict.fromkeys(relations))}
    paths = [_FILES.search(relation) for relation in relations]
    return tuple(
        None
        if path is None
        else SourceLog(f"FileStreamSource[{_normalized(path[1])}]", f"{checkpoint}/sources/{logs[relation]}")
        for relation, path in zip(relations, paths, strict=True)
    )


def _normalized(path: str) -> str:
    """A path as classic PySpark has it in the name of a source, as far as it can be told here."""
    return path.rstrip("/") if ":" in path else normpath(re.sub("//+", "/", path))
