"""Keys of a stream: columns, expressions, and the fields of structs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from mapstate.aggregators.columns import column_of
from mapstate.errors import ConfigurationError, DuplicateNameError
from mapstate.spark.steps.expressions import Expressions, Only, analysed, is_column
from mapstate.spark.streams.chained_aggregate import SteppedRows

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["with_keys"]

R = TypeVar("R", bound=SteppedRows)


def with_keys(rows: R, keys: Sequence[str | Column]) -> tuple[R, tuple[str, ...]]:
    """The rows with a column for each key that is none yet, and the names of the key columns.

    An expression has its alias or Spark's name for it. A struct becomes a key column per field: ``window`` becomes
    ``window_start`` and ``window_end``. Raises ConfigurationError and DuplicateNameError.
    """
    names: list[str] = []
    for key in keys:
        if isinstance(key, str):
            rows, own = _with_fields(rows, key)
        elif is_column(key):
            rows, own = _with_expression(rows, key)
        else:
            raise ConfigurationError(f"groupBy takes column names and expressions, not {key!r}")
        names += own
    return rows, tuple(names)


def _with_expression(rows: R, key: Column) -> tuple[R, list[str]]:
    with analysed(f"the key {key}"):
        name = rows.with_step(Only(key), by_row=True).schema.names[0]
    if name.casefold() not in _taken(rows):
        rows = rows.with_step(Expressions({name: key}), by_row=True)
    elif str(key) != f"Column<'{name}'>":
        raise DuplicateNameError(
            f"the key {key} has the name of a column: give it another one with alias(...)", name=name
        )
    return _with_fields(rows, name)


def _with_fields(rows: R, key: str) -> tuple[R, list[str]]:
    """The rows with a column for each field if ``key`` is a struct, or for one if it is ``struct.field``."""
    from pyspark.sql.types import StructType

    structs = {field.name: field.dataType for field in rows.schema.fields if isinstance(field.dataType, StructType)}
    column, _, field = key.partition(".")
    if key in structs:
        fields = structs[key].names
    elif key not in rows.schema.names and column in structs and field in structs[column].names:
        key, fields = column, [field]
    else:
        return rows, [key]
    added = {f"{key}_{name}": column_of(key).getField(name) for name in fields}
    for name in added:
        if name.casefold() in _taken(rows):
            raise DuplicateNameError(
                f"the key {key!r} is a struct, and its field needs the name {name!r}, which a column has: rename one",
                name=name,
            )
    return rows.with_step(Expressions(added), by_row=True), list(added)


def _taken(rows: SteppedRows) -> set[str]:
    """The names of the columns, as Spark compares them: it would replace a column that differs in case."""
    return {name.casefold() for name in rows.schema.names}
