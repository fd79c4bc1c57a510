"""What a store author writes: a map with bulk get and bulk put, and the backend that opens it.

`IBackingMap` alone makes a working store. What a store may offer beside it is in `mapstate.capabilities`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from mapstate.errors import UsageError

__all__ = [
    "Backend",
    "IBackingMap",
    "check_lengths",
]

K = TypeVar("K", contravariant=True)
V = TypeVar("V")


@runtime_checkable
class IBackingMap(Protocol[K, V]):
    """A map that is read and written in bulk.

    The stores under mapstate are ``IBackingMap[str, bytes]``: encoded key text to serialized record; those that
    declare `NativeRecords` are ``IBackingMap[str | int, Any]``.
    The layers above them (serialization, caches, map states) have the same two methods over richer
    keys and values. On Spark the calls come from tasks: once per chunk of one to a few thousand
    keys, from one thread.
    """

    def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        """One entry per key, in the order of ``keys``; None where nothing is stored.

        A repeated key is answered at each of its places. No keys: an empty list.
        """
        ...

    def multi_put(self, keys: Sequence[K], values: Sequence[V]) -> None:
        """Store all of them, or raise. Never silently a part.

        Of a repeated key the last value stays. After an error the caller knows nothing about what
        was written, and the attempt is not committed.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """What a URL names: where a store is and how to reach it. Frozen, comparable, picklable.

    Holds no client: `open` makes one in the process that uses it. Its repr shows no password.
    ``shared_between_processes`` is False where two processes that open it see different data; such
    a store is applied on the driver. One that is best with other chunks than 2,000 keys says so: ``chunk_size``.
    """

    shared_between_processes: bool

    def open(self, state: str, *, ttl: float | None = None) -> IBackingMap[str, bytes]:
        """The store of one named state. ``ttl`` in seconds, from a record's last write.

        Called once per task and once by each driver and reader; must be cheap. Raises
        ConfigurationError where a ``ttl`` is not possible.
        """
        ...


def check_lengths(keys: Sequence[Any], others: Sequence[Any], what: str) -> None:
    """UsageError unless there is one of ``others`` per key."""
    if len(keys) != len(others):
        raise UsageError(f"{len(keys)} keys but {len(others)} {what}: there must be one for each key")
