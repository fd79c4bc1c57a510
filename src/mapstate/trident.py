"""Names that only serve a port from Trident; docs/coming-from-trident.md has the whole table.

``rows.applyAssembly(FirstN(3, "bytes"))``, ``rows.applyAssembly(global_)``, ``query=TupleCollectionGet()``.
"""

from __future__ import annotations

from typing import TypeVar

from mapstate.errors import check_range
from mapstate.spark.interfaces import TupleCollectionGet
from mapstate.spark.steps.batch_aggregate import first_rows
from mapstate.spark.steps.columns import column_names
from mapstate.spark.streams.rows import Rows

__all__ = ["FirstN", "TupleCollectionGet", "batchGlobal", "global_"]

AnyRows = TypeVar("AnyRows", bound=Rows[object])


def global_(rows: AnyRows) -> AnyRows:
    """All rows in one partition. ``global`` is a word of Python's own."""
    return rows.shuffle(1)


def batchGlobal(rows: AnyRows) -> AnyRows:
    """All rows of a batch in one partition: the same as `global_`, as no partition of Spark's outlives a batch."""
    return rows.shuffle(1)


class FirstN:
    """Trident's FirstN: the first ``n`` rows of each batch, ordered by a column; without one any ``n``.

    Of rows that are equal there the order of the other columns decides, as far as they have one. Given to
    `Rows.applyAssembly`.
    """

    def __init__(self, n: int, sortField: str | None = None, *, reverse: bool = False) -> None:
        check_range("the number of rows of FirstN", n, 1)
        self._n = n
        self._column = sortField
        self._reverse = reverse

    def __call__(self, rows: Rows[object]) -> Rows[object]:
        """The rows that are left. Raises UnknownColumnError."""
        if self._column is not None:
            column_names(rows.schema, [self._column], "FirstN")
        return rows.with_step(first_rows(self._n, self._column, reverse=self._reverse), by_row=False)
