"""mapstate on Spark Structured Streaming.

The names below are imported on first use: a worker imports `mapstate.spark.executor.task` and nothing of a driver's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mapstate.spark.driver.initial_rows import Coordinates, InitialRows, StartsAt
    from mapstate.spark.driver.uncounted_files import files_not_counted
    from mapstate.spark.drpc_server import DRPCServer
    from mapstate.spark.interfaces import (
        BatchAggregator,
        Collector,
        MapGet,
        QueryFunction,
        SnapshotGet,
        State,
        StateFactory,
        StateUpdater,
    )
    from mapstate.spark.source import MapStateDataSource
    from mapstate.spark.steps.state_query import StaticState, newStaticState, stateQuery
    from mapstate.spark.steps.training import pointInTime, rollingFeatures
    from mapstate.spark.streams.commands import job_main
    from mapstate.spark.streams.counted import CountedAggregate, CountedStream
    from mapstate.spark.streams.grouped import ChainedAggregate, GroupedStream
    from mapstate.spark.streams.partition_persist import PartitionPersist
    from mapstate.spark.streams.persistent_aggregate import NewValuesStream, PersistentAggregate
    from mapstate.spark.streams.rolling import RollingAggregate, RollingStream
    from mapstate.spark.streams.stream import Stream, newStream
    from mapstate.spark.streams.topology import Topology, with_empty_batches
    from mapstate.spark.streams.windows import WindowedAggregate, WindowedStream

__all__ = [
    "BatchAggregator",
    "ChainedAggregate",
    "Collector",
    "Coordinates",
    "CountedAggregate",
    "CountedStream",
    "DRPCServer",
    "GroupedStream",
    "InitialRows",
    "MapGet",
    "MapStateDataSource",
    "NewValuesStream",
    "PartitionPersist",
    "PersistentAggregate",
    "QueryFunction",
    "RollingAggregate",
    "RollingStream",
    "SnapshotGet",
    "StartsAt",
    "State",
    "StateFactory",
    "StateUpdater",
    "StaticState",
    "Stream",
    "Topology",
    "WindowedAggregate",
    "WindowedStream",
    "files_not_counted",
    "job_main",
    "newStaticState",
    "newStream",
    "pointInTime",
    "rollingFeatures",
    "stateQuery",
    "with_empty_batches",
]

_HOMES = {
    name: module
    for module, names in {
        "driver.initial_rows": "Coordinates InitialRows StartsAt",
        "driver.uncounted_files": "files_not_counted",
        "drpc_server": "DRPCServer",
        "interfaces": "BatchAggregator Collector MapGet QueryFunction SnapshotGet State StateFactory StateUpdater",
        "source": "MapStateDataSource",
        "steps.state_query": "StaticState newStaticState stateQuery",
        "steps.training": "pointInTime rollingFeatures",
        "streams.commands": "job_main",
        "streams.counted": "CountedAggregate CountedStream",
        "streams.grouped": "ChainedAggregate GroupedStream",
        "streams.partition_persist": "PartitionPersist",
        "streams.persistent_aggregate": "NewValuesStream PersistentAggregate",
        "streams.rolling": "RollingAggregate RollingStream",
        "streams.stream": "Stream newStream",
        "streams.topology": "Topology with_empty_batches",
        "streams.windows": "WindowedAggregate WindowedStream",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
