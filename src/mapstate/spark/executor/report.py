"""The one line with which a task ends, on its way to the driver."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from mapstate import errors
from mapstate.spark.executor.arrow import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

REPORT_COLUMN = "__mapstate_report"


class SentError(msgspec.Struct, frozen=True):
    """An error of the tree on its way to another process."""

    kind: str
    message: str
    facts: dict[str, Any]

    @classmethod
    def of(cls, error: errors.MapStateError) -> SentError:
        """What is left of an error in a text. One of a user's own class is sent as the nearest one of the tree."""
        kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in errors.__all__)
        # what is no text, such as half a surrogate pair out of a user's own message, has no JSON
        message = error.message.encode("utf-8", "backslashreplace").decode()
        return cls(kind, message, error.facts)

    def rebuild(self) -> errors.MapStateError:
        """The error again, of its own class."""
        kind = getattr(errors, self.kind) if self.kind in errors.__all__ else errors.MapStateError
        rebuilt: errors.MapStateError = kind(self.message, **self.facts)
        return rebuilt


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
