"""mapstate on Spark Structured Streaming."""

from mapstate.spark.offsets import files_not_counted
from mapstate.spark.stream import GroupedStream, NewValuesStream, PersistentAggregate, Stream, newStream

__all__ = ["GroupedStream", "NewValuesStream", "PersistentAggregate", "Stream", "files_not_counted", "newStream"]
