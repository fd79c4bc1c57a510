"""mapstate on Spark Structured Streaming.

What is offered here is fetched when it is used: a worker imports `mapstate.spark.task` and needs nothing of a driver's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_NAMES = {
    "aggregate": (
        "BatchAggregator",
        "ChainedAggregate",
        "FirstN",
    ),
    "new_values": ("NewValuesStream",),
    "offsets": ("files_not_counted",),
    "partition_persist": (
        "PartitionPersist",
        "State",
        "StateUpdater",
    ),
    "state_query": (
        "Collector",
        "MapGet",
        "QueryFunction",
        "SnapshotGet",
        "StateFactory",
        "StaticState",
        "TupleCollectionGet",
        "newStaticState",
        "stateQuery",
    ),
    "stream": (
        "GroupedStream",
        "PersistentAggregate",
        "Stream",
        "newStream",
    ),
    "topology": (
        "Topology",
        "TopologyState",
        "TopologyStream",
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
