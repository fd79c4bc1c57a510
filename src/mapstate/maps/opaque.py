"""What a map state is, and the one that counts a batch once, even if a replay brings other rows."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Generic, TypeVar

from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.errors import UsageError
from mapstate.protocol.records import CommitView, OpaqueValue

V = TypeVar("V")

_NO_LIMIT = 1 << 63
_UNTOUCHED: Any = object()

Updater = Callable[[V | None], V | None]
"""``stored | None -> new``. Called once per update, with the stored value; None removes the key."""

CombineAll = Callable[[list[Any], list[Any]], list[Any]]
"""``(bases, partials) -> new values``: one call per chunk, with lists of one length."""


class TransactionStatus(enum.Enum):
    """Whether a map state is between `MapState.begin_commit` and `MapState.commit`."""

    IDLE = "idle"
    BEGUN = "begun"


class MapState(ABC, Generic[V]):
    """A map whose updates belong to batches: Trident's MapState.

    A batch is ``begin_commit(txid)``, any number of updates, and ``commit(txid)``. A second begin without a commit is
    allowed, as after a crash: it starts another attempt. Not thread-safe.
    """

    _status = TransactionStatus.IDLE
    _txid: int | None = None

    @property
    def status(self) -> TransactionStatus:
        """Whether a batch has begun and is not committed."""
        return self._status

    def begin_commit(self, txid: int) -> None:
        """Start an attempt at the batch ``txid``. Nothing is read or written. Raises UsageError for no txid."""
        if type(txid) is not int or txid < 0:
            raise UsageError(f"a txid is an int from 0 up, not {txid!r}")
        self._txid = txid
        self._status = TransactionStatus.BEGUN

    def commit(self, txid: int) -> None:
        """End the batch. Raises UsageError if another ``txid`` was begun, or none."""
        if self._attempt() != txid:
            raise UsageError(f"commit({txid}) after begin_commit({self._txid})")
        self._txid = None
        self._status = TransactionStatus.IDLE

    def _attempt(self) -> int:
        if self._txid is None:
            raise UsageError("an update needs a batch: call begin_commit(txid) first")
        return self._txid

    @abstractmethod
    def multi_get(self, keys: Sequence[Any]) -> list[V | None]:
        """The values as the current batch finds them, with its own writes."""

    @abstractmethod
    def multi_combine(self, keys: Sequence[Any], partials: Sequence[Any], combine_all: CombineAll) -> list[V | None]:
        """Combine one partial into each key, and return the new values. Tasks call this once per chunk.

        ``keys`` must not repeat. ``combine_all`` gets None as the base of an absent key.
        """

    @abstractmethod
    def multi_put(self, keys: Sequence[Any], values: Sequence[V | None]) -> None:
        """Set the values. The last value of a repeated key stays."""

    def multi_update(self, keys: Sequence[Any], updaters: Sequence[Updater[V]]) -> list[V | None]:
        """Apply one updater per key, and return the new values, one per entry.

        Updaters of a repeated key apply in order, and the key is written once.
        """
        check_lengths(keys, updaters, "updaters")
        by_key: dict[Any, list[int]] = {}
        for i, key in enumerate(keys):
            by_key.setdefault(key, []).append(i)
        out: list[Any] = [_UNTOUCHED] * len(keys)

        def fold(bases: list[Any], positions: list[list[int]]) -> list[Any]:
            after = []
            for base, ats in zip(bases, positions, strict=True):
                value = base
                for i in ats:
                    out[i] = value = updaters[i](value)
                after.append(value)
            return after

        values = self.multi_combine(list(by_key), list(by_key.values()), fold)
        for ats, value in zip(by_key.values(), values, strict=True):
            for i in ats:
                if out[i] is _UNTOUCHED:  # a transactional key that an earlier attempt has written
                    out[i] = value
        return out


def last_of_each(keys: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The different keys, each with its last value."""
    check_lengths(keys, values, "values")
    by_key = dict(zip(keys, values, strict=True))
    return list(by_key), list(by_key.values())


def replace_all(_bases: list[Any], partials: list[Any]) -> list[Any]:
    """The `CombineAll` of a put."""
    return partials


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
