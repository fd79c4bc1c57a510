"""Arrow batches on an executor: schemas, slices, and columns as Python values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mapstate.errors import SerializationError, cut

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def arrow_schema(schema: StructType) -> pa.Schema:
    """A Spark schema as PySpark sends it through Arrow; timestamps in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # an older PySpark, which knows no other time zone
        return to_arrow_schema(schema)


def slices(batch: pa.RecordBatch, most_rows: Callable[[], int], most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batch in pieces of at most so many rows, and bytes of Arrow, but for a single row; not copied.

    ``most_rows`` is asked before each.
    """
    start, fits = 0, batch.nbytes <= most_bytes
    while start < batch.num_rows:
        part = batch.slice(start, most_rows())
        while not fits and part.num_rows > 1 and part.nbytes > most_bytes:
            part = part.slice(0, part.num_rows // 2)
        yield part
        start += part.num_rows


def arrow_to_python(column: pa.Array, name: str) -> list[Any]:
    """The values of a column as Python objects; timestamps in UTC.

    Raises SerializationError for what Spark can hold and Python cannot: text that is not UTF-8, times
    beyond the year 9999.
    """
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


def partition_id() -> int:
    """The number of the partition this process works on; 0 where no task runs, on the driver."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else context.partitionId()
