"""The interfaces of a store: a map with bulk get and bulk put, and the backend that opens it.

`IBackingMap` alone makes a working store. `mapstate.capabilities` has what a store may offer beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from mapstate.errors import UsageError

__all__ = ["Backend", "IBackingMap", "check_lengths"]

K = TypeVar("K", contravariant=True)
V = TypeVar("V")


@runtime_checkable
class IBackingMap(Protocol[K, V]):
    """A map that is read and written in bulk.

    A store is an ``IBackingMap[str, bytes]``: encoded key text to serialized record. A store that declares
    `NativeRecords` is an ``IBackingMap[str | int, Any]``. The layers above (serialization, caches, map states) have the
    same two methods over richer keys and values.

    On Spark, tasks on executors call both once per chunk, of one to a few thousand keys, from one thread.
    """

    def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        """Return one entry per key, in the order of ``keys``; None where nothing is stored.

        A repeated key has its entry at each of its places. Without keys, the list is empty.
        """
        ...

    def multi_put(self, keys: Sequence[K], values: Sequence[V]) -> None:
        """Store all of them, or raise. Never silently a part.

        Of a repeated key the last value stays. After an error the caller knows nothing about what was written, and the
        attempt is not committed.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """Where a store is and how to reach it: what a URL names. Frozen, comparable, picklable.

    Holds no client: `open` makes one in the process that uses it. Its repr shows no password.
    ``shared_between_processes`` is False where two processes that open it see different data; such a store is applied
    on the driver.

    Two attributes are optional. ``chunk_size`` is the number of keys per chunk at which the store is best, by default
    2,000. ``key_order`` is the order in which a task brings its keys, by default any: "key" suits a B-tree, "hash" a
    hash table in memory, and a number below 32,768 parts by the CRC-32 of a key's text modulo that number. Not
    guaranteed: for small batches, and with aggregators in plain Python, tasks have an order of their own.
    """

    @property
    def shared_between_processes(self) -> bool:
        """Whether executors can reach the store. Asks nobody."""
        ...

    def open(self, state: str, *, ttl: float | None = None) -> IBackingMap[str, bytes]:
        """Return the store of one named state. ``ttl`` in seconds, from a record's last write.

        Called once by each task, driver and reader, so it must be cheap. Raises ConfigurationError where the store has
        no ``ttl``.
        """
        ...


def close_if_possible(thing: Any) -> None:
    """Close a store, a writer, or a state of a user's own, if it has a ``close()``."""
    close = getattr(thing, "close", None)
    if close is not None:
        close()


def check_lengths(keys: Sequence[Any], others: Sequence[Any], name: str) -> None:
    """Raises UsageError unless there is one of ``others`` per key. ``name`` is theirs, in the message."""
    if len(keys) != len(others):
        raise UsageError(f"{len(keys)} keys but {len(others)} {name}: there must be one for each key")
