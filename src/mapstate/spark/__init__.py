"""mapstate on Spark Structured Streaming.

What is offered here is fetched when it is used: a worker imports `mapstate.spark.task` and needs nothing of a driver's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mapstate.spark.offsets import files_not_counted
    from mapstate.spark.stream import GroupedStream, NewValuesStream, PersistentAggregate, Stream, newStream

__all__ = ["GroupedStream", "NewValuesStream", "PersistentAggregate", "Stream", "files_not_counted", "newStream"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'offsets' if name == 'files_not_counted' else 'stream'}"), name)
