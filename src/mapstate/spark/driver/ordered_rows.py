"""A state to which the order of a key's rows matters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mapstate.spark.driver.apply import Grouping
from mapstate.spark.driver.job import Branch
from mapstate.spark.driver.state import StateDriver

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class OrderedGrouping(Grouping):
    """Sorts the raw rows of each key by some of their columns. ``order`` are places of columns."""

    def __init__(self, *settings: Any, order: Sequence[int]) -> None:
        from pyspark.sql import functions as F

        super().__init__(*settings)
        self._order = [F.col(f"value{at}") for at in order]

    def of(self, batch_df: DataFrame) -> DataFrame:
        """See `Grouping.of`."""
        return super().of(batch_df).sortWithinPartitions(*self.places, *self._order)


class OrderedState(StateDriver):
    """A state whose job has an ``order``."""

    def __init__(self, branch: Branch) -> None:
        super().__init__(branch)
        columns = list(branch.job.columns)
        self.make_grouping = partial(OrderedGrouping, order=[columns.index(name) for name in branch.job.order])
