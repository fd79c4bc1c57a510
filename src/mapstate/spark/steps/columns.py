"""Columns by name, checked before any batch has come; and aggregates and keys that are expressions.

An expression becomes a column that a step adds, named by its text; or, where that differs in each run, by Spark.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.columns import column_of
from mapstate.errors import ConfigurationError, DuplicateNameError, UnknownColumnError
from mapstate.spark.driver.access import is_connect

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

_CHANGES = re.compile(r"@[0-9a-f]+\b|_\d+\)? -> ")
"""In the text of an expression: an address in the JVM, or the number of a lambda's variable. No run has them again."""


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


@dataclass(frozen=True, eq=False)  # Columns have no truth value, and two of one text may differ
class Expressions:
    """A step that adds a column for each expression, by its name."""

    columns: Mapping[str, Column]

    def __call__(self, frame: DataFrame, _: int | None) -> DataFrame:
        return frame.withColumns(dict(self.columns))


@dataclass(frozen=True, eq=False)
class Select:
    """A step that leaves one expression."""

    column: Any

    def __call__(self, frame: DataFrame, _: int | None) -> DataFrame:
        return frame.select(self.column)


def has_expressions(aggregates: Mapping[str, Aggregator], schema: StructType) -> bool:
    """Whether an aggregator has an expression, or a field of a struct, in place of a column name."""
    values = (value for aggregator in aggregates.values() for value in vars(aggregator).values())
    return any(map(is_column, values)) or bool(nested_in(aggregates, schema))


def nested_in(aggregates: Mapping[str, Aggregator], schema: StructType) -> dict[str, Column]:
    """The fields of structs that aggregators name as ``struct.field``, by that name."""
    names: list[Any] = [name for aggregator in aggregates.values() for name in aggregator.columns()]  # or expressions
    parts = {name: name.partition(".") for name in names if isinstance(name, str) and name not in schema.names}
    structs = {field.name: getattr(field.dataType, "names", ()) for field in schema.fields}
    return {name: column_of(a).getField(b) for name, (a, _, b) in parts.items() if b in structs.get(a, ())}


def expressions_of(
    aggregates: Mapping[str, Aggregator], names: Sequence[str], spark_name: Callable[[Column], str]
) -> tuple[Expressions, dict[str, Aggregator]]:
    """The expressions in place of column names, and the same aggregators over them. Raises DuplicateNameError."""
    columns: dict[str, Any] = {}

    def name_of(column: Any) -> str:
        text = str(column).removeprefix("Column<'").removesuffix("'>")
        if _CHANGES.search(text):
            text = spark_name(column)
        taken = [name for name in names if name.casefold() == text.casefold()]  # as Spark compares them
        if taken and is_named(column, text):
            return text if text in taken else taken[0]
        same = columns.setdefault(text, column)
        if taken or not (same is column or _are_same(same, column)):
            raise DuplicateNameError(
                f"an expression has the name {text!r}, which another expression or a column has, too. Nothing was "
                "written. Give it another one with alias(...), or use one Column object twice.",
                name=text,
            )
        return text

    named = {name: copy.copy(aggregator) for name, aggregator in aggregates.items()}
    for aggregator in named.values():
        for attribute, value in list(vars(aggregator).items()):
            if is_column(value):
                setattr(aggregator, attribute, name_of(value))
    return Expressions(columns), named


@contextmanager
def analysed(expression: str) -> Iterator[None]:
    """Raise what Spark says against an expression as a ConfigurationError."""
    from pyspark.errors import AnalysisException

    try:
        yield
    except AnalysisException as error:
        reason = next(line for line in str(error).splitlines() if line.strip())
        raise ConfigurationError(f"{expression} cannot be computed. Spark says: {reason}") from error


def is_column(value: Any) -> bool:
    """Whether a value is an expression of Spark's."""
    from pyspark.sql import Column

    return isinstance(value, Column)


def is_named(column: Any, name: str) -> bool:
    """Whether an expression is the column of this name, and not, say, a literal of the same text."""
    from pyspark.sql import functions as F

    # Spark Connect parses names on its server, so there "k" and "`k`" differ here.
    return _are_same(column, column_of(name)) or (is_connect(column) and _are_same(column, F.col(name)))


def _are_same(value: Any, other: Any) -> bool:
    """Whether two columns are the same expression, wherever in the program they were written."""
    return _are_equal(value._expr, other._expr) if is_connect(value) else bool(value._jc.equals(other._jc))


def _are_equal(expression: Any, other: Any) -> bool:
    if type(expression) is not type(other):
        return False
    if isinstance(expression, (list, tuple)):
        return len(expression) == len(other) and all(map(_are_equal, expression, other))
    if type(expression).__module__ == "pyspark.sql.connect.expressions":
        mine, others = (
            {name: value for name, value in vars(of).items() if name != "origin"} for of in (expression, other)
        )
        return mine.keys() == others.keys() and all(_are_equal(value, others[name]) for name, value in mine.items())
    return bool(expression == other)
