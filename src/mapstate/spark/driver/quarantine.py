"""The rows of batches that failed each time: Parquet, a directory for each batch, in Spark's file system."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mapstate.operations.folders import Folder, folder_of
from mapstate.protocol.ledger_record import Commit
from mapstate.spark.driver.access import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT_BY = ("query_id", "batch_id")
"""Columns that the directories add to the rows that are read from there."""


class Quarantine:
    """A directory. ``spark.read.parquet(path)`` reads all of it, with the columns ``query_id`` and ``batch_id``.

    Of one stream: another one has other columns, and batches of the same ids, which may be those of the same query.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._found: dict[int, list[str]] = {}

    def place(self, query_id: str, batch_id: int) -> str:
        """Where the rows of a batch are kept."""
        return f"{self._path}/query_id={query_id}/batch_id={batch_id}"

    def keep(self, rows: DataFrame, place: str) -> None:
        """Writes the rows of a batch. Doing it again replaces them. Driver, after its last begin, before the commit.

        Raises Spark's own errors; then the batch is not committed.
        """
        rows.write.mode("overwrite").parquet(place)

    def list_kept(self, batch_df: DataFrame, query_id: str, batch_id: int) -> None:
        """Notes which files are kept of a batch and of those after it. Driver, before a run begins its first batch."""
        self._found = {}
        for name, is_directory in _at(batch_df, f"{self._path}/query_id={query_id}").listed().items():
            column, _, number = name.partition("=")
            if is_directory and column == "batch_id" and number.isdecimal() and int(number) >= batch_id:
                self._found[int(number)] = _kept_at(batch_df, self.place(query_id, int(number)))

    def forget(self, batch_df: DataFrame, query_id: str, batch_id: int) -> None:
        """Removes what is kept of a batch and of those after it: none of them counts, so all come again, and may now.

        A driver kept it that died before its commit; or the stores and the checkpoint were put back together. Files
        that were not there at the last `list_kept` are of a driver that has taken over since, and stay. So do
        directories, into which another driver may be writing, and files without rows. Driver, as a run has begun.
        """
        for place, files in self._found.items():
            if place >= batch_id:
                folder = _at(batch_df, self.place(query_id, place))
                for name in files:
                    folder.delete(name)
        self._found = {}

    def kept(self, batch_df: DataFrame, query_id: str, batch_id: int, commits: Iterable[Commit | None]) -> str | None:
        """Where the rows of a batch are that counts already; None where it was none that failed. Driver.

        A batch that failed counts no row. One that counts some was another driver's, if rows are kept of it.
        """
        if any(commit is not None and commit.rows for commit in commits):
            return None
        place = self.place(query_id, batch_id)
        return place if _kept_at(batch_df, place) else None


def _kept_at(batch_df: DataFrame, place: str) -> list[str]:
    """The names of the files with rows. Those that begin with _ or a dot are Spark's own, which it does not read."""
    listed = _at(batch_df, place).listed().items()
    return [name for name, is_directory in listed if not (is_directory or name[0] in "_.")]


def _at(frame: DataFrame, place: str) -> _HadoopFolder | Folder:
    """A directory that Spark has written. Raises UsageError where it cannot be reached."""
    if not is_connect(frame):
        return _HadoopFolder(frame.sparkSession, place)
    from mapstate.spark.driver.connect import qualified

    return folder_of(qualified(frame.sparkSession, place))


class _HadoopFolder:
    """See `Folder`: one in Spark's file system, by the JVM."""

    def __init__(self, session: Any, place: str) -> None:
        self._path_of = session.sparkContext._jvm.org.apache.hadoop.fs.Path
        self._path = self._path_of(place)
        self._system = self._path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())

    def listed(self) -> dict[str, bool]:
        from py4j.protocol import Py4JJavaError

        try:
            statuses = self._system.listStatus(self._path)
        except Py4JJavaError as error:
            if "FileNotFoundException" in str(error.java_exception.getClass()):
                return {}  # another driver may have removed it since it was listed
            raise
        return {str(status.getPath().getName()): bool(status.isDirectory()) for status in statuses}

    def delete(self, name: str) -> None:
        self._system.delete(self._path_of(self._path, name), False)
