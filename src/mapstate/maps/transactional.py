"""The map states that keep one value of a key: once if a replay brings the same rows, or at least once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from mapstate.backing_map import IBackingMap
from mapstate.maps.opaque import CombineAll, MapState, last_of_each, replace_all
from mapstate.protocol.records import CommitView, TransactionalValue, stale

V = TypeVar("V")


class TransactionalMap(MapState[V]):
    """Keep `TransactionalValue` records: the record of a key with the batch's txid already has the batch's rows.

    ``committed`` and ``written_once`` as for `OpaqueMap`; only the view's floor and first txid are used. ``skipped``
    counts the keys that an earlier attempt had written, over the map's life.
    """

    def __init__(
        self,
        backing: IBackingMap[Any, TransactionalValue[V]],
        committed: CommitView | None = None,
        *,
        written_once: bool = False,
    ) -> None:
        self._backing = backing
        self._committed = committed
        self.skipped = 0
        self._written: set[Any] | None = None if written_once else set()

    def begin_commit(self, txid: int) -> None:
        """See `MapState.begin_commit`. Forgets the writes of an earlier attempt."""
        super().begin_commit(txid)
        if self._written is not None:
            self._written = set()

    def multi_get(self, keys: Sequence[Any]) -> list[V | None]:
        """The latest values, because this type keeps no older ones."""
        return [None if record is None else record[1] for record in self._records(keys)]

    def multi_combine(self, keys: Sequence[Any], partials: Sequence[Any], combine_all: CombineAll) -> list[V | None]:
        """See `MapState.multi_combine`. Keeps what an earlier attempt wrote. Raises StaleBatchError before a write."""
        txid = self._attempt()
        values: list[Any] = []
        due: list[int] = []
        for i, record in enumerate(self._records(keys)):
            values.append(None if record is None else record[1])
            written_by = -1 if record is None else record[0]
            if written_by > txid:
                raise stale(written_by, txid)
            if written_by < txid or (self._written and keys[i] in self._written):
                due.append(i)
        self.skipped += len(values) - len(due)
        fresh = combine_all([values[i] for i in due], [partials[i] for i in due])
        due_keys = [keys[i] for i in due]
        if due:
            self._backing.multi_put(due_keys, [TransactionalValue(txid, value) for value in fresh])
        if self._written is not None:
            self._written.update(due_keys)
        for i, value in zip(due, fresh, strict=True):
            values[i] = value
        return values

    def multi_put(self, keys: Sequence[Any], values: Sequence[V | None]) -> None:
        """See `MapState.multi_put`. A key that an earlier attempt has written keeps its value."""
        self.multi_combine(*last_of_each(keys, values), replace_all)

    def _records(self, keys: Sequence[Any]) -> list[TransactionalValue[V] | None]:
        records = self._backing.multi_get(keys)
        view = self._committed
        if view is None:
            return records
        return [None if record is None or not view.check_age(record[0]) else record for record in records]


class NonTransactionalMap(MapState[V]):
    """Keep bare values: the smallest and fastest. A repeated batch counts again for all keys that it had written."""

    def __init__(self, backing: IBackingMap[Any, V]) -> None:
        self._backing = backing

    def multi_get(self, keys: Sequence[Any]) -> list[V | None]:
        """The latest values."""
        return self._backing.multi_get(keys)

    def multi_combine(self, keys: Sequence[Any], partials: Sequence[Any], combine_all: CombineAll) -> list[V | None]:
        self._attempt()
        values = combine_all(self._backing.multi_get(keys), list(partials))
        self._backing.multi_put(keys, values)
        return values

    def multi_put(self, keys: Sequence[Any], values: Sequence[V | None]) -> None:
        self._attempt()
        self._backing.multi_put(*last_of_each(keys, values))
