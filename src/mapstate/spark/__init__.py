"""mapstate on Spark Structured Streaming."""

from mapstate.spark.stream import GroupedStream, NewValuesStream, PersistentAggregate, Stream, newStream

__all__ = ["GroupedStream", "NewValuesStream", "PersistentAggregate", "Stream", "newStream"]
