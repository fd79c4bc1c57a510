"""The way past a store: without it, a store that is wrong in both directions would pass its tests."""

from __future__ import annotations

from typing import Any, Protocol


class SideDoor(Protocol):
    """Reads and writes stored records with the driver's own calls, past the store.

    ``key`` is the text that a store gets, ``record`` what it stores: bytes, or what a store of records takes.
    """

    def read(self, state: str, key: str) -> Any | None:
        """Return the record as it is stored, None where there is none."""
        ...

    def write(self, state: str, key: str, record: Any) -> None:
        """Store a record, as another program would."""
        ...
