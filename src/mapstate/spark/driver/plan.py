"""The Spark plan in front of the tasks. It is that of every batch of a job, so its columns are made once.

Each column is some calls to the JVM: a batch of a few rows waits for them as long as for its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import NativeCombiner
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.fields import Fields
from mapstate.schema import KeyField

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Plan"]


class Plan:
    """What the rows of each batch go through. Driver; it lives no longer than its JVM, see `fits`.

    Gives one row per key with its partials, and their number of rows last; or, where an aggregator is in plain
    Python, the rows in key order. ``partials`` has the number of columns per field, or None for raw rows;
    ``rows_of`` names their columns. ``at_once`` says whether all rows of a batch go to the driver at once, where it
    applies them; see `apply_on_driver`.
    """

    def __init__(self, batch_df: DataFrame, keys: Sequence[KeyField], fields: Fields, rows_of: Sequence[str]) -> None:
        from pyspark.sql import functions as F

        self._jvm = _jvm(batch_df)
        self._fields = fields.fields
        self._keys = [column_of(key.name).alias(f"key{at}") for at, key in enumerate(keys)]
        self._places = [F.col(f"key{at}") for at in range(len(keys))]
        self._values: list[Column] = []
        self.partials: list[int] | None = None
        native = [one for one in fields.aggregators if isinstance(one, NativeCombiner)]
        if len(native) == len(fields.aggregators):  # one that is not sends all of them through Python
            columns = [one.partials(field.type) for one, field in zip(native, fields.fields, strict=True)]
            self.partials = [len(of) for of in columns]
            self._values = [
                column.alias(f"partial{at}_{part}") for at, of in enumerate(columns) for part, column in enumerate(of)
            ]
            self._values.append(F.count(F.lit(1)).alias("rows"))
        else:
            self._values = [column_of(name).alias(f"value{at}") for at, name in enumerate(rows_of)]
        self.at_once = self.partials is not None

    def fits(self, batch_df: DataFrame, fields: Fields) -> bool:
        """Whether this is the plan of such a batch: columns belong to the JVM that they were made in."""
        return self._jvm is _jvm(batch_df) and self._fields == fields.fields

    def of(self, batch_df: DataFrame) -> DataFrame:
        """A batch's rows as tasks take them."""
        if self.partials is not None:
            return batch_df.groupBy(*self._keys).agg(*self._values)
        rows = batch_df.select(*self._keys, *self._values)
        if not self._keys:
            return rows.repartition(1)
        return rows.repartition(*self._places).sortWithinPartitions(*self._places)


def _jvm(batch_df: DataFrame) -> Any:
    return batch_df.sparkSession.sparkContext._jvm
