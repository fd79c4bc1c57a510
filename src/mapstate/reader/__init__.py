"""Read a state without Spark, as of a whole batch: from threads, or on an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mapstate.reader.aliased import open_reader
from mapstate.reader.committed import Consistency
from mapstate.reader.scans import CountedKeys
from mapstate.reader.state_reader import StateReader

if TYPE_CHECKING:
    from mapstate.reader.async_reader import AsyncStateReader, open_async_reader

__all__ = [
    "AsyncStateReader",
    "Consistency",
    "CountedKeys",
    "StateReader",
    "open_async_reader",
    "open_reader",
]


def __getattr__(name: str) -> Any:
    if name not in ("AsyncStateReader", "open_async_reader"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mapstate.reader import async_reader  # asyncio takes long to import

    return getattr(async_reader, name)
