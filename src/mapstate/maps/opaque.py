"""The map state that counts a batch once, even if a replay brings other rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, TypeVar

from mapstate.backing_map import IBackingMap
from mapstate.maps.map_state import CombineAll, MapState, last_of_each, replace_all
from mapstate.protocol.records import CommitView, OpaqueValue

V = TypeVar("V")


class OpaqueMap(MapState[V]):
    """Keep `OpaqueValue` records: a key's value, and its value before the batch that wrote it.

    ``committed`` is the ledger's view, by which the map applies the one rule. Without it, txids are increasing numbers
    of batches, as Trident's are.

    A second update of a key in one attempt builds on the first, which the instance remembers until the next
    `begin_commit`. ``written_once`` promises that no key comes twice in an attempt, and nothing is remembered. Spark's
    shuffle guarantees that to a task.
    """

    def __init__(
        self,
        backing: IBackingMap[Any, OpaqueValue[V]],
        committed: CommitView | None = None,
        *,
        written_once: bool = False,
    ) -> None:
        self._backing = backing
        self._committed = committed
        self._written: dict[Any, tuple[V | None, V | None]] | None = None if written_once else {}

    def begin_commit(self, txid: int) -> None:
        """See `MapState.begin_commit`. Forgets the writes of an earlier attempt."""
        super().begin_commit(txid)
        if self._written is not None:
            self._written = {}

    def multi_get(self, keys: Sequence[Any]) -> list[V | None]:
        """The current values; inside a batch, as it finds them. Raises StaleBatchError."""
        records = self._backing.multi_get(keys)
        if self._txid is None:
            if self._committed is None:
                return [None if record is None else record[1] for record in records]
            return self._committed.values(records, _NO_LIMIT)
        values = self._view(self._txid).values(records, self._txid)
        if self._written:
            values = [
                self._written[key][0] if key in self._written else value
                for key, value in zip(keys, values, strict=True)
            ]
        return values

    def multi_combine(self, keys: Sequence[Any], partials: Sequence[Any], combine_all: CombineAll) -> list[V | None]:
        """See `MapState.multi_combine`. Raises StaleBatchError before anything is written."""
        txid = self._attempt()
        bases = self._view(txid).values(self._backing.multi_get(keys), txid)
        if self._written is None:
            values = combine_all(bases, list(partials))
            before = bases
        else:
            again = [self._written.get(key, (base, base)) for key, base in zip(keys, bases, strict=True)]
            values = combine_all([value for value, _ in again], list(partials))
            before = [base for _, base in again]
        records: list[Any] = list(zip(repeat(txid), values, before, strict=False))
        if self._written is not None:  # tasks write plain tuples: an object per record is too slow
            records = [OpaqueValue._make(record) for record in records]
        self._backing.multi_put(keys, records)
        if self._written is not None:
            self._written.update(zip(keys, zip(values, before, strict=True), strict=True))
        return values

    def multi_put(self, keys: Sequence[Any], values: Sequence[V | None]) -> None:
        """See `MapState.multi_put`. Reads first, because a record keeps the value before."""
        self.multi_combine(*last_of_each(keys, values), replace_all)

    def _view(self, txid: int) -> CommitView:
        return CommitView.before(txid) if self._committed is None else self._committed


_NO_LIMIT = 1 << 63
