"""mapstate on Spark Structured Streaming."""

from mapstate.spark.aggregate import BatchAggregator, ChainedAggregate, FirstN
from mapstate.spark.new_values import NewValuesStream
from mapstate.spark.offsets import files_not_counted
from mapstate.spark.partition_persist import PartitionPersist, State, StateUpdater
from mapstate.spark.state_query import (
    Collector,
    MapGet,
    QueryFunction,
    SnapshotGet,
    StateFactory,
    StaticState,
    TupleCollectionGet,
    newStaticState,
    stateQuery,
)
from mapstate.spark.stream import GroupedStream, PersistentAggregate, Stream, newStream
from mapstate.spark.topology import Topology, TopologyState, TopologyStream

__all__ = [
    "BatchAggregator",
    "ChainedAggregate",
    "Collector",
    "FirstN",
    "GroupedStream",
    "MapGet",
    "NewValuesStream",
    "PartitionPersist",
    "PersistentAggregate",
    "QueryFunction",
    "SnapshotGet",
    "State",
    "StateFactory",
    "StateUpdater",
    "StaticState",
    "Stream",
    "Topology",
    "TopologyState",
    "TopologyStream",
    "TupleCollectionGet",
    "files_not_counted",
    "newStaticState",
    "newStream",
    "stateQuery",
]
