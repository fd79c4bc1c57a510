"""Places in Spark's file system: what a quarantine looks into."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mapstate.errors import UsageError
from mapstate.operations.checkpoint import local_path
from mapstate.spark.driver.access import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def files_at(frame: DataFrame, place: str) -> SparkFiles:
    """A file or directory that Spark has written. Raises UsageError where it cannot be reached."""
    if is_connect(frame):
        return _LocalFiles(place)
    return _HadoopFiles(frame.sparkSession, place)


class SparkFiles(Protocol):
    """A place in Spark's file system."""

    def files(self) -> list[str]:
        """The names of the files in a directory; none where nothing is."""

    def directories(self) -> list[str]:
        """The names of the directories in a directory; none where nothing is."""

    def delete_file(self) -> None:
        """Remove a file. Nothing where nothing is."""


class _HadoopFiles:
    """By the JVM."""

    def __init__(self, session: Any, place: str) -> None:
        self._path = session.sparkContext._jvm.org.apache.hadoop.fs.Path(place)
        self._system = self._path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())

    def files(self) -> list[str]:
        return [str(found.getPath().getName()) for found in self._listed() if not found.isDirectory()]

    def directories(self) -> list[str]:
        return [str(found.getPath().getName()) for found in self._listed() if found.isDirectory()]

    def delete_file(self) -> None:
        self._system.delete(self._path, False)

    def _listed(self) -> Any:
        from py4j.protocol import Py4JJavaError

        try:
            return self._system.listStatus(self._path)
        except Py4JJavaError as error:
            if "FileNotFoundException" in str(error.java_exception.getClass()):
                return ()  # another driver may have removed it since it was listed
            raise


class _LocalFiles:
    """Of the server's machine, beside which the workers of Spark Connect run."""

    def __init__(self, place: str) -> None:
        path = local_path(place)
        if path is None:
            raise UsageError(
                "under Spark Connect a quarantine has to be a local directory of the server: nothing else can be "
                "looked into from there. Nothing was written. See docs/connect.md"
            )
        self._path = path

    def files(self) -> list[str]:
        return [found.name for found in self._listed() if not found.is_dir()]

    def directories(self) -> list[str]:
        return [found.name for found in self._listed() if found.is_dir()]

    def delete_file(self) -> None:
        self._path.unlink(missing_ok=True)

    def _listed(self) -> list[Path]:
        try:
            return list(self._path.iterdir())
        except FileNotFoundError:
            return []
