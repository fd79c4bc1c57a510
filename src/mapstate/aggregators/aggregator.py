"""What an aggregator is: the two kinds that users write, and what mapstate asks of both."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mapstate.errors import UnknownColumnError

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["Aggregator", "CombinerAggregator", "NativeCombiner", "ReducerAggregator", "Row"]

Row = Mapping[str, Any]
"""One input row, by column name. Values as PyArrow gives them: int, float, Decimal, str, bytes, ..."""


class Aggregator:
    """What stands behind one field of a state.

    Instances are configuration only: small, immutable and picklable, because they are sent to the
    executors. Two that describe themselves alike are the same aggregator to the ledger.

    ``value_type``   the type it accumulates and stores, as Spark writes types. "any" is whatever the
                     serializer can hold: None, bool, int, float, str, list and dict with str keys
    """

    value_type: ClassVar[str] = "any"

    def columns(self) -> Sequence[str]:
        """The input columns it reads. Empty means all of them. Driver, once per state."""
        return ()

    def bind(self, columns: Mapping[str, str]) -> str:
        """The type it accumulates over input ``columns`` (name to Spark type). Driver, once per state.

        Raises UnknownColumnError or UnsupportedTypeError. By default `value_type`, after a look
        whether all `columns` are there.
        """
        for name in self.columns():
            column_type(columns, name, self)
        return self.value_type

    def result(self, value: Any) -> Any:
        """What readers and new values show for an accumulated value. By default the value itself."""
        return value

    def result_type(self, value_type: str) -> str:
        """The Spark type of `result`; "any" is shown as a JSON string."""
        return value_type

    def describe(self) -> str:
        """Its name in the ledger; another description is another field."""
        inside = ", ".join(self.columns())
        return f"{type(self).__name__}({inside})" if inside else type(self).__name__

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.describe()))

    def __repr__(self) -> str:
        return self.describe()


class CombinerAggregator(Aggregator):
    """Trident's CombinerAggregator: turns a row into a value, and joins two values.

    `combine` must be associative and commutative: rows come in any order. It gets values that the
    serializer has stored and read back. It runs on executors, once per row.
    """

    @abstractmethod
    def init(self, row: Row) -> Any:
        """The value of one row."""

    @abstractmethod
    def combine(self, a: Any, b: Any) -> Any:
        """The value of two. Must not change its arguments. None removes the key."""

    def zero(self) -> Any:
        """The value of no rows."""
        return None


class ReducerAggregator(Aggregator):
    """Trident's ReducerAggregator: takes rows into an accumulator, one after the other.

    Runs on executors, once per row; the rows of a key come in any order.
    """

    @abstractmethod
    def init(self) -> Any:
        """The accumulator before any row."""

    @abstractmethod
    def reduce(self, acc: Any, row: Row) -> Any:
        """The accumulator with one more row. May change ``acc``, which is its own. None removes the key."""


class NativeCombiner(CombinerAggregator):
    """A combiner that Spark can compute by itself, down to one row per key and batch.

    Its partials come as columns, and are joined to what is stored a chunk at a time.
    """

    @abstractmethod
    def partials(self, value_type: str) -> list[Column]:
        """The Spark aggregate expressions, one per column that `assemble` takes. Driver, per batch."""

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        """One partial value per key, from the columns of a chunk. Executor."""
        return columns[0]

    @abstractmethod
    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        """`combine` for a chunk; None in either list is absent or null. Executor."""

    def combine(self, a: Any, b: Any) -> Any:
        """See `CombinerAggregator.combine`."""
        return self.combine_all([a], [b])[0]


def column_type(columns: Mapping[str, str], name: str, who: Aggregator) -> str:
    """The type of an input column. Raises UnknownColumnError."""
    try:
        return columns[name]
    except KeyError:
        raise UnknownColumnError(
            f"{who} reads the column {name!r}, which the stream does not have; it has {', '.join(columns)}",
            column=name,
        ) from None
