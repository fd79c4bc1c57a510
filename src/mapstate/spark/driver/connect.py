"""What a batch asks of a Spark Connect server.

Spark runs a foreachBatch function in a worker process beside the server, with a session there and no JVM. Which query
it serves is what the function brought along: `Served`. A worker serves one start of one query. docs/connect.md says
what differs for a user.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from mapstate.errors import UsageError
from mapstate.spark.driver.access_interface import LoggedBatch, QueryRun, logged_batch

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["ConnectAccess", "Served", "are_same"]

_URL = "SPARK_CONNECT_LOCAL_URL"  # in the environment of a worker: its server's
_UNKNOWN = (
    "under Spark Connect a foreachBatch function cannot tell which query it serves. Nothing was written. Start the "
    "query with the start(checkpointLocation) of the state, the stream or the topology, in place of writeStream. See "
    "docs/connect.md#how-a-query-is-started"
)


class Served(NamedTuple):
    """The query that a worker serves: its checkpoint, and the session that has started it."""

    checkpoint: str
    session_id: str


class ConnectAccess:
    """See `Access`."""

    served: ClassVar[Served | None] = None
    _run: ClassVar[QueryRun | None] = None

    def __init__(self, frame: DataFrame) -> None:
        self._frame: Any = frame
        self._session: Any = frame.sparkSession

    @classmethod
    def serve(cls, served: Served | None) -> None:
        """A worker has unpickled the function of the query that it serves."""
        if _URL in os.environ:
            cls.served, cls._run = served, None

    @property
    def origin(self) -> object:
        """See `Access.origin`: here columns are names of expressions."""
        return ConnectAccess

    def run(self, default: str) -> QueryRun:
        """See `Access.run`. The query's id is in its checkpoint; the run is asked of the server once."""
        if _URL not in os.environ:
            return QueryRun(default, None)
        served = self._served()
        run = self._run
        if run is None:
            query_id = json.loads(self._text(f"{served.checkpoint}/metadata"))["id"]
            query = self._query(query_id)
            if query is None:
                raise UsageError(
                    f"the checkpoint {served.checkpoint} is of query {query_id}, which the session that has started "
                    "this one does not run. Nothing was written. Is it another directory on the server's machine?"
                )
            run = ConnectAccess._run = QueryRun(query_id, str(query.runId))
        return run

    def may_go_on(self) -> bool:
        """See `Access.may_go_on`."""
        if self._run is None:
            return True
        try:
            query = self._query(self._run.query_id)
            return query is not None and str(query.runId) == self._run.run_id and bool(query.isActive)
        except Exception:  # noqa: BLE001  the session has gone, and the query with it
            return False

    def check_increments(self, output_mode: str) -> None:
        """See `Access.check_increments`. The plan is on the server, so any other mode than append is refused."""
        if output_mode.lower() != "append":
            raise UsageError(
                f"outputMode={output_mode.lower()!r}: under Spark Connect nobody can tell whether this stream sends "
                "increments or totals, which a state would add up. Nothing was written. Use outputMode='append', which "
                "sends the same rows unless the stream is aggregated in front of the state. See docs/connect.md"
            )

    def check_running_increments(self) -> None:
        """See `Access.check_running_increments`: `Query.start` has checked it, and nothing else starts a query."""

    def serves(self, batch_id: int) -> bool:  # noqa: ARG002  nobody can tell
        """See `Access.serves`."""
        return _URL in os.environ

    def logged(self, batch_id: int) -> LoggedBatch:
        """See `Access.logged`: the file in the checkpoint."""
        return logged_batch(self._text(f"{self._served().checkpoint}/offsets/{batch_id}"))

    def initial(self, count: int) -> list[Any]:
        """See `Access.initial`: the sources' own files have as many forms as there are sources."""
        return [None] * count

    def progress(self) -> tuple[list[Any], list[Any]]:
        """See `Access.progress`."""
        raise LookupError("Spark Connect has no other place for them than the checkpoint")

    def with_files(self, entries: list[Any], before: list[Any], *, same_log: bool) -> list[Any]:  # noqa: ARG002
        """See `Access.with_files`: nobody knows which source is one of files."""
        return entries

    def is_local(self) -> bool:
        """See `Access.is_local`."""
        master = str(self._session.conf.get("spark.master", ""))
        return master == "local" or master.startswith("local[")

    def on_executors(self, ask: Callable[[], str]) -> list[str]:
        """See `Access.on_executors`: a task for each core."""

        def answer(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield pa.RecordBatch.from_pydict({"answer": [ask()]})

        return [row[0] for row in self._session.range(1 << 16).mapInArrow(answer, "answer string").collect()]

    def plan_rows(self) -> None:
        """See `Access.plan_rows`: the server's errors come by themselves."""

    def partitioning(self) -> str | None:
        """See `Access.partitioning`."""
        return None

    def release(self) -> None:
        """See `Access.release`: the server does it when the frame has gone."""

    def files(self, place: str) -> _LocalFiles:
        """See `Access.files`."""
        return _LocalFiles(_local(place))

    def _served(self) -> Served:
        if self.served is None:
            raise UsageError(_UNKNOWN)
        return self.served

    def _query(self, query_id: str) -> Any:
        """The query, by the session that started it: the batch's may be a copy, which knows of none."""
        session, root = self._session, self._served().session_id
        if session.session_id != root:
            from pyspark.sql.connect.session import SparkSession

            session = SparkSession.builder.remote(f"{os.environ[_URL]};session_id={root}").create()
        return session.streams.get(query_id)

    def _text(self, place: str) -> str:
        """A file of the checkpoint. A local one is here: the worker runs beside the server."""
        path = _local(place)
        if path is not None:
            return path.read_text("utf-8")
        return str(self._session.read.format("text").option("wholetext", True).load(place).collect()[0][0])


class _LocalFiles:
    """See `Files`."""

    def __init__(self, path: Path | None) -> None:
        if path is None:
            raise UsageError(
                "under Spark Connect a quarantine has to be a local directory of the server: nothing else can be "
                "looked into from there. Nothing was written. See docs/connect.md"
            )
        self._path = path

    def exists(self) -> bool:
        """See `Files.exists`."""
        return self._path.exists()

    def names(self) -> list[str]:
        """See `Files.names`."""
        return [found.name for found in self._path.iterdir()]

    def delete(self) -> None:
        """See `Files.delete`."""
        rmtree(self._path)


def are_same(one: Column, other: Column) -> bool:
    """Whether two columns are the same expression, wherever in the program they were written."""
    left: Any = one
    right: Any = other
    return _are_equal(left._expr, right._expr)


def _are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if type(one).__module__ == "pyspark.sql.connect.expressions":
        mine, others = ({name: value for name, value in vars(of).items() if name != "origin"} for of in (one, other))
        return mine.keys() == others.keys() and all(_are_equal(value, others[name]) for name, value in mine.items())
    return bool(one == other)


def _local(place: str) -> Path | None:
    """The path, None where it is none of this machine."""
    parts = urlsplit(place)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    return Path(place) if not parts.scheme else None
