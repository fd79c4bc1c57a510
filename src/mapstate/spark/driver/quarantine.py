"""The rows of batches that failed each time: Parquet, a directory for each batch, in Spark's file system."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mapstate.errors import UsageError
from mapstate.operations.checkpoint import local_path
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
        for name, is_directory in _at(batch_df, f"{self._path}/query_id={query_id}").listed():
            column, _, number = name.partition("=")
            if is_directory and column == "batch_id" and number.isdecimal() and int(number) >= batch_id:
                self._found[int(number)] = _kept_at(batch_df, self.place(query_id, int(number)))

    def forget(self, batch_df: DataFrame, query_id: str, batch_id: int) -> None:
        """Removes what is kept of a batch and of those after it: none of them counts, so all come again, and may now.

        A driver kept it that died before its commit; or the stores and the checkpoint were put back together. Files
        that were not there at the last `list_kept` are of a driver that has taken over since, and stay. So do
        directories, into which another driver may be writing, and files without rows. Driver, as a run has begun.
        """
        for found, files in self._found.items():
            if found >= batch_id:
                for name in files:
                    _at(batch_df, f"{self.place(query_id, found)}/{name}").delete_file()
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
    return [name for name, is_directory in _at(batch_df, place).listed() if not (is_directory or name[0] in "_.")]


def _at(frame: DataFrame, place: str) -> _HadoopFiles | _LocalFiles:
    """A file or directory that Spark has written. Raises UsageError where it cannot be reached."""
    return _LocalFiles(place) if is_connect(frame) else _HadoopFiles(frame.sparkSession, place)


class _HadoopFiles:
    """A place in Spark's file system, by the JVM."""

    def __init__(self, session: Any, place: str) -> None:
        self._path = session.sparkContext._jvm.org.apache.hadoop.fs.Path(place)
        self._system = self._path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())

    def listed(self) -> list[tuple[str, bool]]:
        """The names in a directory, and whether each is a directory; none where nothing is."""
        from py4j.protocol import Py4JJavaError

        try:
            found = self._system.listStatus(self._path)
        except Py4JJavaError as error:
            if "FileNotFoundException" in str(error.java_exception.getClass()):
                return []  # another driver may have removed it since it was listed
            raise
        return [(str(one.getPath().getName()), bool(one.isDirectory())) for one in found]

    def delete_file(self) -> None:
        """Remove a file. Nothing where nothing is."""
        self._system.delete(self._path, False)


class _LocalFiles:
    """The same on the server's machine, beside which the workers of Spark Connect run."""

    def __init__(self, place: str) -> None:
        path = local_path(place)
        if path is None:
            raise UsageError(
                "under Spark Connect a quarantine has to be a local directory of the server: nothing else can be "
                "looked into from there. Nothing was written. See docs/connect.md"
            )
        self._path = path

    def listed(self) -> list[tuple[str, bool]]:
        try:
            return [(found.name, found.is_dir()) for found in self._path.iterdir()]
        except FileNotFoundError:
            return []

    def delete_file(self) -> None:
        self._path.unlink(missing_ok=True)
