"""Checks of column names, before any batch has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mapstate.errors import DuplicateNameError, UnknownColumnError
from mapstate.spark.driver.new_values import INSIDE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


def empty_frame(like: DataFrame, schema: StructType | None = None) -> DataFrame:
    """No rows, of the schema of ``like`` or of another one; not streaming."""
    return like.sparkSession.createDataFrame([], like.schema if schema is None else schema)


def column_names(frame_schema: StructType, columns: Iterable[str], caller: str) -> list[str]:
    """The columns, if all are there, and each once. Raises UnknownColumnError, DuplicateNameError."""
    names = list(columns)
    for name in names:
        if name not in frame_schema.names:
            raise UnknownColumnError(
                f"{caller} names the column {name!r}, which the rows do not have; they have "
                f"{', '.join(frame_schema.names)}",
                column=name,
            )
        if frame_schema.names.count(name) > 1:
            raise DuplicateNameError(
                f"{caller} names the column {name!r}, which the rows have more than once: give each a name of its own",
                name=name,
            )
    return names


def check_unique(names: Sequence[str]) -> None:
    """Raises DuplicateNameError for a name that comes twice, or that is one of mapstate's own."""
    folded = [name.casefold() for name in names]  # as Spark compares them
    for name in names:
        if folded.count(name.casefold()) > 1 or name.casefold().startswith(INSIDE):
            raise DuplicateNameError(
                f"the name {name!r} is taken: key columns, aggregates and what an updater emits each need a name of "
                f"their own, and those that begin with {INSIDE} are mapstate's",
                name=name,
            )
