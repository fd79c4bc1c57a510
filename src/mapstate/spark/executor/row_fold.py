"""Rows folded key by key in Python, for aggregators that Catalyst cannot compute."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from mapstate.aggregators.aggregator import Row
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.folding import Folding
from mapstate.keys import StoreKey
from mapstate.maps import MapState
from mapstate.maps.serialized import Room

ROWS_WAITING = 10_000


class RowFold:
    """Folds sorted rows key by key; complete keys wait to be taken. At most ``most_waiting`` rows wait."""

    def __init__(self, fields: Fields, state: MapState[Any], room: Room) -> None:
        self._fields = fields
        self._state = state
        self._room = room
        self.most_waiting = ROWS_WAITING
        self.open: StoreKey | None = None
        self._foldings: list[Folding] = []
        self._waiting = 0
        self._clear()

    def _clear(self) -> None:
        self.keys: list[StoreKey] = []
        self._partials: list[Any] = []
        self._rows = 0
        self._open_rows = 0

    @property
    def full(self) -> bool:
        return len(self.keys) >= self._room.keys or (bool(self.keys) and self._waiting >= self.most_waiting)

    def add(self, text: StoreKey, row: Row) -> None:
        if text != self.open:
            if self.open is not None:
                self.close_key()
            self.open, self._foldings = text, self._fields.start()
        for folding in self._foldings:
            folding.add(row)
        self._open_rows += 1
        self._waiting += 1
        if self._open_rows % self.most_waiting == 0:
            self._settle(text)

    def _settle(self, text: StoreKey) -> None:
        """Bounds the rows that a hot key's reducers hold back: fetches what they wait for."""
        if not any(folding.rows_waiting for folding in self._foldings):
            return
        base = self._state.multi_get([text])[0]
        for folding, stored in zip(self._foldings, self._fields.split(base), strict=True):
            folding.settle(stored)

    def close_key(self) -> None:
        """The open key has had its last row."""
        if self.open is None:
            return
        self.keys.append(self.open)
        self._partials.append(self._fields.finish(self._foldings))
        self._rows += self._open_rows
        self._open_rows = 0
        self.open = None

    def take(self) -> tuple[list[StoreKey], list[Any], int]:
        taken = self.keys, self._partials, self._rows
        open_rows = self._open_rows
        self._clear()
        self._open_rows = open_rows
        self._waiting = 0
        return taken


def rows_that_fit(part: pa.RecordBatch, most_bytes: int) -> int:
    """How many rows like these may wait, from 1 up."""
    fit: int = most_bytes * part.num_rows // max(1, part.nbytes)
    return max(1, min(ROWS_WAITING, fit))
