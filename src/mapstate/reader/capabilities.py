"""What a store may declare for readers, beside `mapstate.capabilities`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol, runtime_checkable

from mapstate.backing_map import Backend


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


@runtime_checkable
class ScansFrom(Protocol):
    """Lists all records of a state like `mapstate.capabilities.Scan`, and goes on where another listing ended."""

    def scan_from(self, cursor: str, page_size: int) -> Iterator[tuple[list[Any], str]]:
        """Yield the pages behind ``cursor``, each with the cursor behind it. An empty text stands before the first.

        Any process may go on from a cursor, at any time. All listings together list what one `Scan.scan` does: a page
        may be empty, and a name that is no key of the state is reported after the last page of the listing that met
        it. Raises UsageError for a text that is no cursor of this store, and StoreUnavailableError where the store has
        another incarnation than the one that the cursor is of, and cursors end with it.
        """
        ...


@runtime_checkable
class ScansParts(Protocol):
    """Lists all records of a state like `mapstate.capabilities.Scan`, in parts that several processes list at one time.

    For ``spark.read.format("mapstate")``.
    """

    def scan_parts(self, most: int) -> list[str]:
        """Divide the listing into at most ``most`` parts of about equal size. On the driver, once per query.

        Each part is a text for `scan_part`. There is one at least.
        """
        ...

    def scan_part(self, part: str, page_size: int) -> Iterator[list[Any]]:
        """Yield the pages of one part. On executors.

        All parts together list what one `Scan.scan` does, which starts when the first of them does and ends with the
        last one; no key comes twice. Raises what `Scan.scan` raises, each part of its own names; and
        StoreUnavailableError where the parts do not fit the store any more: then divide it anew.
        """
        ...
