"""Spark columns by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column


def column_of(name: str) -> Column:
    """The column of exactly this name, with any characters. Driver."""
    from pyspark.sql import functions as F

    return F.col("`" + name.replace("`", "``") + "`")
