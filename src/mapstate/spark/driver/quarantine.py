"""The rows of batches that failed each time: Parquet, a directory for each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mapstate.spark.driver.spark_files import files_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["KEPT_BY", "Quarantine"]

KEPT_BY = ("query_id", "batch_id")
"""Columns that the directories add to the rows that are read from there."""


class Quarantine:
    """A directory. ``spark.read.parquet(path)`` reads all of it, with the columns ``query_id`` and ``batch_id``.

    Of one stream: another one has other columns, and batches of the same ids, which may be those of the same query.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def keep(self, rows: DataFrame, query_id: str, batch_id: int) -> str:
        """Writes the rows of a batch, and returns where. Doing it again replaces them. Driver, before the commit.

        Raises Spark's own errors; then the batch is not committed.
        """
        place = self._place(query_id, batch_id)
        rows.write.mode("overwrite").parquet(place)
        return place

    def forget(self, batch_df: DataFrame, query_id: str, batch_id: int) -> None:
        """Removes what is kept of a batch and of those after it: none of them counts, so all come again, and may now.

        A driver kept it that died before its commit; or the stores and the checkpoint were put back together. Driver,
        as a run begins.
        """
        kept = files_at(batch_df, f"{self._path}/query_id={query_id}")
        if not kept.exists():
            return
        for found in kept.names():
            name, _, number = found.partition("=")
            if name == "batch_id" and number.isdecimal() and int(number) >= batch_id:
                files_at(batch_df, self._place(query_id, int(number))).delete()

    def kept(self, batch_df: DataFrame, query_id: str, batch_id: int) -> str | None:
        """Where the rows of a batch are that counts already; None where it was none that failed. Driver."""
        place = self._place(query_id, batch_id)
        return place if files_at(batch_df, place).exists() else None

    def _place(self, query_id: str, batch_id: int) -> str:
        return f"{self._path}/query_id={query_id}/batch_id={batch_id}"
