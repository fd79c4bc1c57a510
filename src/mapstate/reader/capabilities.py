"""What a store may declare for the readers of a service, beside `mapstate.capabilities`."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from mapstate.backing_map import Backend

__all__ = ["EventLoops", "ThreadSafe"]


@runtime_checkable
class ThreadSafe(Protocol):
    """Declared by a store whose reads several threads may call at one time.

    Readers call any other store from one thread at a time.
    """

    thread_safe: Literal[True]


@runtime_checkable
class EventLoops(Protocol):
    """What a `Backend` may offer: stores whose requests let an event loop go on, for `mapstate.open_async_reader`."""

    def on_event_loop(self) -> Backend:
        """Return a backend for one reader. Its stores are used inside of `mapstate.event_loop.on_loop` only."""
        ...
