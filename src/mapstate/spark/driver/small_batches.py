"""Batches of few keys, which the driver applies without being asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mapstate.spark.driver.apply import AttemptResult, Grouping, applied, collected
from mapstate.spark.executor.task import BatchTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def apply_if_small(rows: DataFrame, task: BatchTask, grouping: Grouping, most_keys: int) -> AttemptResult | None:
    """`apply_on_driver`, at once. None, and nothing was written, where a batch has more than ``most_keys``.

    Of such a batch no more than so many keys, and one more, of each partition come to the driver. A key of rolling
    windows counts once per tile. None also where partials are collections or sketches, of which a few may be large.
    """
    if not grouping.is_narrow(rows):
        return None
    place = f"monotonically_increasing_id() & {2**33 - 1}"  # within its partition
    batches = collected(rows.where(f"{place} <= {most_keys}"))  # as text it is one call to the JVM instead of fifteen
    if batches is None or sum(map(len, batches)) > most_keys:
        return None
    return applied(rows, task, iter(batches))
