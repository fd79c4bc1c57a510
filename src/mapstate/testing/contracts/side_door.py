"""The way past a store: without it, a store that is wrong in both directions would pass."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["SideDoor"]


class SideDoor(Protocol):
    """Reads and writes what is really stored, with the driver's own calls and not through the store.

    ``key`` is the text that a store gets, ``record`` what it stores: bytes, or what a store of records takes.
    """

    def read(self, state: str, key: str) -> Any | None:
        """The record as it is stored; None where there is none."""
        ...

    def write(self, state: str, key: str, record: Any) -> None:
        """Stores a record, as another program would."""
        ...
