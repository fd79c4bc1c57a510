"""What a batch asks of its Spark beside the DataFrame API: here of the JVM, in connect.py of a Spark Connect server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from mapstate.errors import UsageError
from mapstate.spark.driver import query_run
from mapstate.spark.driver.jvm import JvmAccess, StartedQuery
from mapstate.spark.driver.query_run import FUNCTION_PAGE, QueryRun

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from mapstate.spark.driver.connect import ConnectAccess


Access: TypeAlias = "ClassicAccess | ConnectAccess"


def access_of(frame: DataFrame) -> Access:
    """The access for a DataFrame of either kind."""
    if is_connect(frame):
        from mapstate.spark.driver.connect import ConnectAccess

        return ConnectAccess(frame)
    return ClassicAccess(frame)


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


class ClassicAccess(JvmAccess):
    """Made for each question, from the frame of a batch. Driver."""

    def __init__(self, frame: DataFrame) -> None:
        self.frame: Any = frame
        self.context: Any = frame.sparkSession.sparkContext

    @property
    def origin(self) -> object:
        """What columns belong to: they are of no use in another one."""
        return self.context._jvm

    def run(self, default: str, batch_id: int | None = None) -> QueryRun:
        """The run of which the frame is; ``default`` owns the state where the function is called by hand.

        Raises UsageError where nothing tells, and where ``batch_id`` is not the query's present batch.
        """
        known = self.query
        if known is None:
            return QueryRun(default, None)
        present = int(known.execution.lastExecution().currentBatchId())
        if batch_id not in (None, present):
            raise UsageError(
                f"the state got batch {batch_id}, and its query is at batch {present}. Nothing was written. Pass on "
                f"the batch id that Spark gave, and let no thread outlive the function. {FUNCTION_PAGE}"
            )
        return known.run

    def text(self, place: str) -> str:
        """A file of the checkpoint. Raises whatever Python or Spark raises."""
        if place.startswith("file:"):  # and nothing in it is escaped
            return Path(place.removeprefix("file:")).read_text("utf-8")
        jvm = self.context._jvm
        path = java_class(jvm, "org.apache.hadoop.fs.Path")(place)
        conf = self.frame.sparkSession._jsparkSession.sessionState().newHadoopConf()
        with closing(path.getFileSystem(conf).open(path)) as stream:
            return str(java_class(jvm, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))

    @cached_property
    def query(self) -> StartedQuery | None:
        """The query whose batch this is; None where the function is called by hand.

        Each start of a query has a session of its own, and all frames of its batches have that, in any thread. A frame
        of another session is the batch's if the thread says so: the query's own, or one that has its properties.
        Raises UsageError where nothing tells.
        """
        session = self.frame.sparkSession._jsparkSession
        query_id = self.context.getLocalProperty("sql.streaming.queryId")
        known = next((query for query in tuple(_queries) if query.session.equals(session)), None)  # threads add to it
        if known is None:  # py4j has None for a query that ends while it lists them
            running = list(map(StartedQuery.of, filter(None, session.sharedState().activeStreamingQueries().values())))
            known = next((query for query in running if query.session.equals(session)), None)
            if known is not None:
                _queries.appendleft(known)
            else:
                known = next((query for query in running if query.run.query_id == query_id), None)
                if known is None:
                    query_run.check_by_hand(query_id, self.frame.sparkSession.conf, runs=bool(running))
        if known is not None and query_id not in (None, known.run.query_id):
            raise UsageError(
                f"a DataFrame of query {known.run.query_id} came to a state in the function of query {query_id}. "
                f"Nothing was written. Give a state the frames of one query. {FUNCTION_PAGE}"
            )
        return known


_queries: deque[StartedQuery] = deque(maxlen=8)
"""The last ones that have brought a batch: the JVM is not asked for all of them each time."""


@lru_cache(maxsize=16)
def java_class(jvm: Any, name: str) -> Any:
    """A class of the JVM by its whole name, looked up once: each dot is a call to the JVM."""
    return reduce(getattr, name.split("."), jvm)
