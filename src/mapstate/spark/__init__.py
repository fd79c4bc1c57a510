"""mapstate on Spark Structured Streaming.

The names below are imported on first use: a worker imports `mapstate.spark.executor.task` and nothing of a driver's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mapstate.spark.driver.offsets import files_not_counted
    from mapstate.spark.steps.batch_aggregate import BatchAggregator, ChainedAggregate, FirstN
    from mapstate.spark.steps.state_query import (
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
    from mapstate.spark.streams.new_values import NewValuesStream
    from mapstate.spark.streams.partition_persist import PartitionPersist, State, StateUpdater
    from mapstate.spark.streams.stream import GroupedStream, PersistentAggregate, Stream, newStream
    from mapstate.spark.streams.topology import Topology, TopologyState, TopologyStream

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
    "steps.batch_aggregate": (
        "BatchAggregator",
        "ChainedAggregate",
        "FirstN",
    ),
    "streams.new_values": ("NewValuesStream",),
    "driver.offsets": ("files_not_counted",),
    "streams.partition_persist": (
        "PartitionPersist",
        "State",
        "StateUpdater",
    ),
    "steps.state_query": (
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
    "streams.stream": (
        "GroupedStream",
        "PersistentAggregate",
        "Stream",
        "newStream",
    ),
    "streams.topology": (
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
