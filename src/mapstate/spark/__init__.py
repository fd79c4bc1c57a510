"""mapstate on Spark Structured Streaming."""

from mapstate.spark.offsets import files_not_counted
from mapstate.spark.stream import GroupedStream, NewValuesStream, PersistentAggregate, Stream, newStream
from mapstate.spark.topology import Topology, TopologyState, TopologyStream

__all__ = [
    "GroupedStream",
    "NewValuesStream",
    "PersistentAggregate",
    "Stream",
    "Topology",
    "TopologyState",
    "TopologyStream",
    "files_not_counted",
    "newStream",
]
