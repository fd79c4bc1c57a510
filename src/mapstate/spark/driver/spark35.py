"""What PySpark 3.5 lacks, from the same parts as PySpark 4.0 makes it; `calls` takes PySpark's own where it is. Driver.

A JVM of 3.5 takes and gives Arrow already. What its Python does not pass on is called here by PySpark's private names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from mapstate.errors import UsageError
from mapstate.spark.executor.task import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


class Calls(NamedTuple):
    """What 3.5 lacks. They are no functions of Python where PySpark has it: a batch passes nothing here."""

    to_arrow: Callable[[DataFrame], pa.Table]
    from_arrow: Callable[[Any], Callable[[pa.Table, StructType], DataFrame]]  # of a session
    stored: Callable[[DataFrame], DataFrame]
    from_ddl: Callable[[str], Any]


@cache
def calls() -> Calls:
    """Those of this process. Raises UsageError under Spark Connect of PySpark 3.5."""
    from pyspark import StorageLevel
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType
    from pyspark.sql.utils import is_remote

    level = StorageLevel.MEMORY_AND_DISK_2
    if hasattr(DataFrame, "toArrow"):
        stored = methodcaller("localCheckpoint", True, level)
        return Calls(methodcaller("toArrow"), attrgetter("createDataFrame"), stored, DataType.fromDDL)
    if is_remote():
        raise UsageError(
            "mapstate needs PySpark 4.0 or newer for Spark Connect, and this is 3.5. Nothing was started. Take classic "
            "PySpark 3.5, with SparkSession.builder.master(...). See docs/versions.md#the-oldest-pyspark"
        )
    return Calls(to_arrow, lambda session: partial(from_arrow, session), partial(local_checkpoint, level), from_ddl)


def to_arrow(frame: Any) -> pa.Table:
    """`DataFrame.toArrow`: instants are in UTC, where Spark gives them the zone of the session."""
    schema, batches = arrow_schema(frame.schema), frame._collect_as_arrow()
    return pa.Table.from_batches(batches).cast(schema) if batches else schema.empty_table()


def from_arrow(session: Any, table: pa.Table, schema: StructType) -> DataFrame:
    """`createDataFrame` of a table, by the settings that it has in 4.0. Instants are in UTC."""
    from pyspark.sql import DataFrame
    from pyspark.sql.pandas.serializers import ArrowStreamSerializer

    jvm, most = session._jvm, int(session.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch"))
    batches = table.cast(arrow_schema(schema)).to_batches(max_chunksize=most)
    python = jvm.PythonSQLUtils
    stored = session.sparkContext._serialize_to_jvm(
        batches, ArrowStreamSerializer(), python.readArrowStreamFromFile, jvm.ArrowIteratorServer
    )
    return DataFrame(python.toDataFrame(stored, schema.json(), session._jsparkSession), session)


def local_checkpoint(level: Any, frame: Any) -> DataFrame:
    """`localCheckpoint` at once, with a storage level: the first job that reads the rows stores them so."""
    kept: DataFrame = frame.localCheckpoint(False)
    context = kept.sparkSession.sparkContext
    kept._jdf.queryExecution().logical().rdd().persist(context._getJavaStorageLevel(level))
    kept.count()
    return kept


def from_ddl(text: str) -> Any:
    """`DataType.fromDDL`."""
    from pyspark.sql.types import _parse_datatype_string

    return _parse_datatype_string(text)
