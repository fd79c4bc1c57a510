"""What tasks take and give: Arrow batches, their columns as Python values, and the report with which a task ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from mapstate.errors import SerializationError, cut
from mapstate.spark.executor.error_text import SentError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

REPORT_COLUMN = "__mapstate_report"


def arrow_schema(schema: StructType) -> pa.Schema:
    """A Spark schema as PySpark sends it through Arrow; timestamps in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # an older PySpark, which knows no other time zone
        return to_arrow_schema(schema)


def slices(batch: pa.RecordBatch, most_rows: Callable[[], int], most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batch in pieces of at most ``most_rows()`` rows, and bytes of Arrow, but for a single row; not copied."""
    start, fits = 0, batch.nbytes <= most_bytes
    while start < batch.num_rows:
        part = batch.slice(start, most_rows())
        while not fits and part.num_rows > 1 and part.nbytes > most_bytes:
            part = part.slice(0, part.num_rows // 2)
        yield part
        start += part.num_rows


def arrow_to_python(column: pa.Array, name: str) -> list[Any]:
    """The values of a column; timestamps in UTC. Raises SerializationError for what Python cannot hold."""
    try:
        item = column.type.value_type if pa.types.is_list(column.type) else column.type
        if pa.types.is_timestamp(item) and item.tz is not None:
            in_utc = pa.timestamp(item.unit, "UTC")
            column = column.cast(in_utc if item is column.type else pa.list_(in_utc))
        if pa.types.is_timestamp(column.type):  # made once each: all keys of a window have one time
            distinct = column.dictionary_encode()
            times = [*distinct.dictionary.to_pylist(), None]
            return [times[at] for at in distinct.indices.fill_null(len(times) - 1).to_pylist()]
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError) as error:
        raise SerializationError(
            f"the column {name!r} holds a value that Python cannot: {cut(error)}. Clean it in front of the aggregate, "
            "text with make_valid_utf8. Nothing of this batch counts.",
            column=name,
        ) from error
    return values


def columns_to_python(columns: Sequence[pa.Array], names: Sequence[str]) -> list[list[Any]]:
    """The values of columns with these names, see `arrow_to_python`."""
    return [arrow_to_python(column, name) for column, name in zip(columns, names, strict=True)]


def partition_id() -> int:
    """The number of the partition this process works on; 0 where no task runs, on the driver."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


class TaskReport(msgspec.Struct):
    """The one line of a task.

    ``rows_in`` were counted as they came, ``rows_done`` as their keys were written; ``lost_claim`` says
    that another try of this task is the writer, so this one wrote nothing. ``skipped`` keys were in already, of
    an earlier attempt at a transactional batch. ``keys_delta`` is how many keys the task added, less those that it
    removed; None if it cannot tell.
    """

    partition: int
    holder: str
    rows_in: int = 0
    rows_done: int = 0
    keys: int = 0
    skipped: int = 0
    keys_delta: int | None = 0
    milliseconds: int = 0
    lost_claim: bool = False
    error: SentError | None = None
    windows: Any = None  # see mapstate.spark.executor.window_task


def report_line(report: TaskReport, schema: StructType | None) -> pa.RecordBatch:
    """The one row that a task ends with: alone, or as the last column of the rows that it gives out."""
    line = pa.array([msgspec.json.encode(report).decode()], pa.string())
    if schema is None:
        return pa.RecordBatch.from_arrays([line], [REPORT_COLUMN])
    arrow = arrow_schema(schema)
    nulls = [pa.nulls(1, field.type) for field in list(arrow)[:-1]]
    return pa.RecordBatch.from_arrays([*nulls, line], schema=arrow)


def reports_of(lines: Iterable[str]) -> list[TaskReport]:
    """The reports of the lines that tasks have ended with. Driver."""
    decoder = msgspec.json.Decoder(TaskReport)
    return [decoder.decode(line) for line in lines]
