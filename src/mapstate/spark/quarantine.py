"""The rows of batches that failed each time: Parquet, a directory for each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Quarantine"]


class Quarantine:
    """A directory. ``spark.read.parquet(path)`` reads all of it, with the columns ``query_id`` and ``batch_id``."""

    def __init__(self, path: str) -> None:
        self._path = path.rstrip("/")

    def keep(self, rows: DataFrame, query_id: str, batch_id: int) -> str:
        """Writes the rows of a batch, and returns where. Doing it again replaces them. Driver, before the commit.

        Raises Spark's own errors; then the batch is not committed.
        """
        place = self._place(query_id, batch_id)
        rows.write.mode("overwrite").parquet(place)
        return place

    def forget(self, batch_df: DataFrame, query_id: str, batch_id: int) -> None:
        """Removes what a driver kept that died before its commit: the batch comes again, and may count now.

        Driver, with the first batch of a run, which alone can be one that was begun before.
        """
        files, place = self._files(batch_df, query_id, batch_id)
        files.delete(place, True)

    def kept(self, batch_df: DataFrame, query_id: str, batch_id: int) -> str | None:
        """Where the rows of a batch are that counts already; None where it was none that failed. Driver."""
        files, place = self._files(batch_df, query_id, batch_id)
        return self._place(query_id, batch_id) if files.exists(place) else None

    def _files(self, batch_df: DataFrame, query_id: str, batch_id: int) -> tuple[Any, Any]:
        session: Any = batch_df.sparkSession
        place = session.sparkContext._jvm.org.apache.hadoop.fs.Path(self._place(query_id, batch_id))
        return place.getFileSystem(session._jsparkSession.sessionState().newHadoopConf()), place

    def _place(self, query_id: str, batch_id: int) -> str:
        return f"{self._path}/query_id={query_id}/batch_id={batch_id}"
