"""Where Spark looks for ``spark.read.format("mapstate")``: it imports every package whose name begins with pyspark_."""

from mapstate.spark.source import MapStateDataSource as DefaultSource

__all__ = ["DefaultSource"]
