"""The interface of aggregators: combiners, reducers, and the native combiners that Spark computes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mapstate.errors import UnknownColumnError

if TYPE_CHECKING:
    from pyspark.sql import Column

Row = Mapping[str, Any]
"""One input row by column name, with PyArrow's values: int, float, Decimal, str, bytes, ..."""


class Aggregator:
    """The computation of one field of a state.

    Instances are configuration only: small, immutable and picklable, because Spark sends them to executors. Two
    aggregators with one description are the same to the ledger.

    ``value_type``   the type of its stored values, as Spark writes types. "any" stands for None, bool, int, float, str,
                     list, and dict with str keys
    """

    value_type: ClassVar[str] = "any"

    def columns(self) -> Sequence[str]:
        """The input columns that it reads; empty means all columns. Driver, once per state."""
        return ()

    def bind(self, columns: Mapping[str, str]) -> str:
        """The type that it accumulates over input ``columns`` (name to Spark type). Driver, once per state.

        By default `value_type`, if all of its `columns` exist. Raises UnknownColumnError or UnsupportedTypeError.
        """
        for name in self.columns():
            column_type(columns, name, self)
        return self.value_type

    def result(self, value: Any) -> Any:
        """The value that readers and new values show. By default the accumulated value itself."""
        return value

    def result_type(self, value_type: str) -> str:
        """The Spark type of `result`; "any" is shown as a JSON string."""
        return value_type

    def describe(self) -> str:
        """Its name in the ledger. A field with another description is another field."""
        inside = ", ".join(map(str, self.columns()))  # an expression has no name yet
        return f"{type(self).__name__}({inside})" if inside else type(self).__name__

    @classmethod
    def of_ledger(cls, description: str) -> Self:
        """An aggregator that only shows the `result` of a field, from the text in its ledger. Readers."""
        shows = cls.__new__(cls)
        vars(shows)["describe"] = partial(str, description)  # for errors: it has no column of its own
        return shows

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.describe()))

    def __repr__(self) -> str:
        return self.describe()


class CombinerAggregator(Aggregator):
    """Trident's CombinerAggregator: turns a row into a value, and joins two values.

    `combine` must be associative and commutative, because rows come in any order. It also gets values that were
    stored and read back. It runs on executors, once per row.
    """

    @abstractmethod
    def init(self, row: Row) -> Any:
        """The value of one row."""

    @abstractmethod
    def combine(self, a: Any, b: Any) -> Any:
        """The value of two values. It must not change its arguments. None removes the key."""

    def zero(self) -> Any:
        """The value of no rows."""
        return None


class ReducerAggregator(Aggregator):
    """Trident's ReducerAggregator: adds rows to an accumulator, one at a time.

    It runs on executors, once per row. The rows of a key come in any order.
    """

    @abstractmethod
    def init(self) -> Any:
        """The accumulator before any row."""

    @abstractmethod
    def reduce(self, acc: Any, row: Row) -> Any:
        """The accumulator with one more row. It may change ``acc``. None removes the key."""


class NativeCombiner(CombinerAggregator):
    """A combiner that Spark computes by itself, down to one row per key and batch.

    Its partials come as columns, and are combined with the stored values a chunk at a time.
    """

    @abstractmethod
    def partials(self, value_type: str) -> list[Column]:
        """The Spark aggregate expressions, one per column that `assemble` takes. Driver, per batch."""

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        """One partial value per key, from the columns of a chunk. Executor."""
        return columns[0]

    @abstractmethod
    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        """`combine` for a chunk. None in a list stands for absent or null. Executor."""

    def combine(self, a: Any, b: Any) -> Any:
        return self.combine_all([a], [b])[0]

    def fold(self, values: Sequence[Any]) -> Any:
        """`combine` of several values of one key, from the first to the last; none is null. Executors and readers."""
        return reduce(self.combine, values)


def column_type(columns: Mapping[str, str], name: str, who: Aggregator) -> str:
    """The type of an input column. Raises UnknownColumnError."""
    try:
        return columns[name]
    except KeyError:
        raise UnknownColumnError(
            f"{who} reads the column {name!r}, which the stream does not have; it has {', '.join(columns)}",
            column=name,
        ) from None
