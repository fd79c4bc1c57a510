"""The rows of batches that failed each time: Parquet, a directory for each batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mapstate.protocol.ledger_record import Commit
from mapstate.spark.driver.spark_files import files_at

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
        for name in files_at(batch_df, f"{self._path}/query_id={query_id}").directories():
            column, _, number = name.partition("=")
            if column == "batch_id" and number.isdecimal() and int(number) >= batch_id:
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
                    files_at(batch_df, f"{self.place(query_id, found)}/{name}").delete_file()
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
    return [name for name in files_at(batch_df, place).files() if not name.startswith(("_", "."))]
