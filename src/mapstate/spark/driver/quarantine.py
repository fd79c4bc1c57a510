"""The rows of batches that failed each time: Parquet, a directory for each batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mapstate.protocol.ledger_record import Commit
from mapstate.spark.driver.spark_files import files_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["KEPT_BY", "Quarantine"]

KEPT_BY = ("query_id", "batch_id")
"""Columns that the directories add to the rows that are read from there."""
_HIDDEN = ("_", ".")
"""How names begin that Spark does not read."""


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
                self._found[int(number)] = files_at(batch_df, self.place(query_id, int(number))).files()

    def forget(self, batch_df: DataFrame, query_id: str, batch_id: int) -> None:
        """Removes what is kept of a batch and of those after it: none of them counts, so all come again, and may now.

        A driver kept it that died before its commit; or the stores and the checkpoint were put back together. Rows
        that were not there at the last `list_kept` are of a driver that has taken over since, and stay. So do
        directories: another driver may be writing into them. Driver, as a run has begun.
        """
        for found, files in self._found.items():
            if found >= batch_id:
                for name in sorted(files, key=lambda name: name.startswith(_HIDDEN)):  # rows first
                    files_at(batch_df, f"{self.place(query_id, found)}/{name}").delete_file()
        self._found = {}

    def kept(self, batch_df: DataFrame, query_id: str, batch_id: int, commits: Iterable[Commit | None]) -> str | None:
        """Where the rows of a batch are that counts already; None where it was none that failed. Driver.

        A batch that failed counts no row. One that counts some was another driver's, if rows are kept of it.
        """
        if any(commit is not None and commit.rows for commit in commits):
            return None
        place = self.place(query_id, batch_id)
        return place if any(not name.startswith(_HIDDEN) for name in files_at(batch_df, place).files()) else None
