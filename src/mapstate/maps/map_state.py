"""The calls of the three map states, and the guard on their order."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from mapstate.backing_map import check_lengths
from mapstate.errors import UsageError

V = TypeVar("V")

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
        for at, key in enumerate(keys):
            by_key.setdefault(key, []).append(at)
        out: list[Any] = [_UNTOUCHED] * len(keys)

        def fold(bases: list[Any], positions: list[list[int]]) -> list[Any]:
            after = []
            for base, ats in zip(bases, positions, strict=True):
                value = base
                for at in ats:
                    out[at] = value = updaters[at](value)
                after.append(value)
            return after

        values = self.multi_combine(list(by_key), list(by_key.values()), fold)
        for ats, value in zip(by_key.values(), values, strict=True):
            for at in ats:
                if out[at] is _UNTOUCHED:  # a transactional key that an earlier attempt has written
                    out[at] = value
        return out


_UNTOUCHED: Any = object()


def last_of_each(keys: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The different keys, each with its last value."""
    check_lengths(keys, values, "values")
    by_key = dict(zip(keys, values, strict=True))
    return list(by_key), list(by_key.values())


def replace_all(_bases: list[Any], partials: list[Any]) -> list[Any]:
    """The `CombineAll` of a put."""
    return partials
