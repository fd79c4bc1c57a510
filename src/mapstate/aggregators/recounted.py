"""The fields of a recount: a key's new value is that of its rows alone, and a key without rows is removed.

The tasks of a recount get each key, where it has no rows by a line of its own, which `PRESENT` tells from rows.
"""

from __future__ import annotations

from typing import Any

from mapstate.aggregators.aggregator import Row
from mapstate.aggregators.fields import NO_ROWS, Fields
from mapstate.aggregators.folding import Folding
from mapstate.errors import INSIDE

PRESENT = f"{INSIDE}present"
"""A column: true in a row, null in the line of a key without rows. Of native partials it is the first one."""


class RecountedFields(Fields):
    """Combines partials with nothing. Made by the driver, used by executors."""

    def from_columns(self, columns: list[list[list[Any]]]) -> list[Any]:
        """See `Fields.from_columns`."""
        (present, *first), *others = columns
        at = [i for i, has_rows in enumerate(present) if has_rows]
        partials: list[Any] = [NO_ROWS] * len(present)
        with_rows = [[[column[i] for i in at] for column in field] for field in [first, *others]]
        for i, partial in zip(at, super().from_columns(with_rows) if at else (), strict=True):
            partials[i] = partial
        return partials

    def combine_all(self, bases: list[Any], partials: list[Any]) -> list[Any]:  # noqa: ARG002
        """See `Fields.combine_all`. No new value depends on the stored one."""
        with_rows = [partial for partial in partials if partial is not NO_ROWS]
        values = iter(super().combine_all([None] * len(with_rows), with_rows))
        return [None if partial is NO_ROWS else next(values) for partial in partials]

    def split(self, value: Any) -> list[Any]:  # noqa: ARG002  rows that wait for the stored value get none
        """See `Fields.split`: one for each of `start`."""
        return [None]

    def start(self) -> list[Any]:
        """See `Fields.start`: all of them in one."""
        return [_Foldings(super().start())]

    def finish(self, foldings: list[Any]) -> Any:
        """See `Fields.finish`."""
        (both,) = foldings
        return super().finish(both.foldings) if both.has_rows else NO_ROWS


class _Foldings:
    """The foldings of all fields of one key, which pass over the line of a key without rows."""

    def __init__(self, foldings: list[Folding]) -> None:
        self.foldings, self.has_rows = foldings, False

    def add(self, row: Row) -> None:
        if row[PRESENT] is None:
            return
        self.has_rows = True
        plain = {name: value for name, value in row.items() if name != PRESENT}
        for folding in self.foldings:
            folding.add(plain)

    @property
    def rows_waiting(self) -> int:
        return sum(folding.rows_waiting for folding in self.foldings)

    def settle(self, base: Any) -> None:
        for folding in self.foldings:
            folding.settle(base)
