"""Keys of a stream: columns, expressions, and the fields of structs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mapstate.aggregators.columns import column_of
from mapstate.errors import ConfigurationError, DuplicateNameError, KeyEncodingError, UnsupportedTypeError
from mapstate.spark.executor.error_text import as_note
from mapstate.spark.steps.columns import Select, analysed, is_column, is_named
from mapstate.spark.streams.chained_aggregate import SteppedRows, with_columns

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructField

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
        field = rows.with_step(Select(key), by_row=True).schema.fields[0]
    _check_sessions(field)  # here, because Spark Connect's withColumns leaves the metadata out
    name = field.name
    if name.casefold() not in _taken(rows):
        rows = with_columns(rows, f"the key {key}", {name: key})
    elif not is_named(key, name):
        raise DuplicateNameError(
            f"the key {key} has the name of a column: give it another one with alias(...)", name=name
        )
    return _with_fields(rows, name)


def _with_fields(rows: R, key: str) -> tuple[R, list[str]]:
    """The rows with a column for each field if ``key`` is a struct, or for one if it is ``struct.field``."""
    from pyspark.sql.types import StructType

    fields: list[Any] = rows.schema.fields
    structs = {field.name: field for field in fields if isinstance(field.dataType, StructType)}
    column, _, name = key.partition(".")
    if key in structs:
        added = _fields_of(structs[key])
    elif key not in rows.schema.names and column in structs and name in structs[column].dataType.names:
        key, added = column, {f"{column}_{name}": column_of(column).getField(name)}
    else:
        return rows, [key]
    for name in added:
        if name.casefold() in _taken(rows):
            raise DuplicateNameError(
                f"the key {key!r} is a struct, and its field needs the name {name!r}, which a column has: rename one",
                name=name,
            )
    return with_columns(rows, f"the key {key!r}", added), list(added)


def _fields_of(struct: Any) -> dict[str, Column]:
    """A key column per field. Spark raises the error of a row whose struct is null: no field would tell."""
    from pyspark.sql import functions as F

    key, names = struct.name, struct.dataType.names
    if not names:
        raise UnsupportedTypeError(f"the key {key!r} is a struct without fields. Nothing was written.", column=key)
    _check_sessions(struct)
    is_null = KeyEncodingError(
        f"the struct {key!r} is null in a row, and its key columns cannot tell it from a struct of nulls. Nothing of "
        f"this batch counts. Filter such rows out, or group by its fields, {key}.{names[0]} and so on.",
        column=key,
    )
    whole = column_of(key)
    first, *others = (whole.getField(name) for name in names)
    checked = F.when(whole.isNull(), F.raise_error(f"{is_null.message}\n{as_note(is_null)}\n")).otherwise(first)
    return dict(zip((f"{key}_{name}" for name in names), (checked, *others), strict=True))


def _check_sessions(field: StructField) -> None:
    if "spark.sessionWindow" in field.metadata:
        raise ConfigurationError(
            f"the key {field.name!r} has sessions of Spark's, which only Spark's own groupBy joins. Nothing was "
            "written. Take stream.window(SessionWindow.of('10 minutes'), timestampField='at')."
        )


def _taken(rows: SteppedRows) -> set[str]:
    """The names of the columns, as Spark compares them: it would replace a column that differs in case."""
    return {name.casefold() for name in rows.schema.names}
