"""What a batch asks of its Spark beside the DataFrame API: of the JVM itself, or through Spark Connect.

Nothing else in this package touches what only one of the two has. `ClassicAccess` and `ConnectAccess` are the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mapstate.spark.driver.access_interface import Access

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["access_of", "are_same", "configured", "is_connect"]


def access_of(frame: DataFrame) -> Access:
    """The access for a DataFrame of either kind."""
    if is_connect(frame):
        from mapstate.spark.driver.connect import ConnectAccess

        return ConnectAccess(frame)
    from mapstate.spark.driver.classic import ClassicAccess

    return ClassicAccess(frame)


def are_same(one: Column, other: Column) -> bool:
    """Whether two columns are the same expression."""
    if is_connect(one):
        from mapstate.spark.driver.connect import are_same
    else:
        from mapstate.spark.driver.classic import are_same
    return are_same(one, other)


def is_connect(frame: Any) -> bool:
    """Whether a DataFrame or a Column is one of Spark Connect."""
    return type(frame).__module__.startswith("pyspark.sql.connect.")


@contextmanager
def configured(batch_df: DataFrame, settings: Mapping[str, str]) -> Iterator[None]:
    """Spark's SQL settings for the plans that run inside, in the query's own copy of the session. Driver."""
    conf = batch_df.sparkSession.conf
    before = {name: conf.get(name, None) for name in settings}
    for name, value in settings.items():
        conf.set(name, value)
    try:
        yield
    finally:
        for name, was in before.items():
            if was is None:
                conf.unset(name)
            else:
                conf.set(name, was)
