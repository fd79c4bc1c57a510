"""What is stored with each value, and the one rule that says which of it counts.

Storm Trident's idea: keep with each value the transaction that wrote it. mapstate's addition: only
the ledger says whether a transaction was committed, never the record by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from mapstate.errors import LedgerLostError, StaleBatchError

__all__ = [
    "Committed",
    "OpaqueValue",
    "TransactionalValue",
    "any_none",
    "cut",
    "newer_than_ledger",
    "newer_txids",
    "shown",
]

V = TypeVar("V")

_MOST_SHOWN = 100


def any_none(items: Collection[object]) -> bool:
    """Whether None is among them. Nothing is compared where all are true, as records are: a fifth of the time."""
    return not all(items) and None in items


def shown(value: object) -> str:
    """A key, a value or a record as a message shows it: at most a hundred characters of its repr."""
    try:
        return cut(repr(value[: _MOST_SHOWN + 1] if isinstance(value, str | bytes | bytearray) else value))
    except Exception:  # noqa: BLE001  an int of 5,000 digits has no repr, nor may an object of a user's
        return f"a value of type {type(value).__name__}"


def cut(text: object) -> str:
    """At most a hundred characters of a text that may hold a value, such as another library's error."""
    text = str(text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class TransactionalValue(NamedTuple, Generic[V]):
    """A value and the txid that wrote it. JSON: ``[txid, val]``.

    Right when a replay of a batch brings the same rows again: the txid says that they are in.
    """

    txid: int
    val: V | None


class OpaqueValue(NamedTuple, Generic[V]):
    """The current value, the one before it, and the txid that wrote the current one.

    JSON: ``[txid, curr, prev]``. Right whatever a replay brings: an attempt that was never
    committed leaves ``prev`` behind.
    """

    txid: int
    curr: V | None
    prev: V | None

    def get(self, txid: int | None) -> V | None:
        """The value as batch ``txid`` finds it, with plain increasing txids (no ledger).

        ``None`` means "outside any batch" and gives the current value. Raises StaleBatchError when
        ``txid`` is behind the record.
        """
        if txid is None or txid > self.txid:
            return self.curr
        if txid == self.txid:
            return self.prev
        raise stale(self.txid, txid)

    def update(self, txid: int, new: V | None) -> OpaqueValue[V]:
        """The record that batch ``txid`` leaves when it sets ``new``. Raises StaleBatchError."""
        return OpaqueValue(txid, new, self.get(txid))


_TXID: Any = itemgetter(0)
_CURR: Any = itemgetter(1)


class Committed:
    """The one rule: ``t in committed`` is true if txid ``t`` counts.

    A view of the ledger at one moment. It is small, immutable and picklable: it travels with each
    attempt to the executors, and every reader makes one from the ledger that it has just read.

    ``last``        the last committed txid, None if there is none
    ``dead``        inclusive ranges of txids below ``last`` that were begun and never committed,
                    ascending and disjoint
    ``floor``       records below it were reset: they read as absent
    ``first_txid``  where the ledger's txids start; a record between ``floor`` and here is older
                    than its ledger
    """

    __slots__ = ("_starts", "dead", "first_txid", "floor", "last")

    def __init__(
        self,
        last: int | None,
        dead: Iterable[tuple[int, int]] = (),
        floor: int = 0,
        first_txid: int = 0,
    ) -> None:
        self.last = last
        self.dead = tuple((low, high) for low, high in dead)
        self.floor = floor
        self.first_txid = first_txid
        self._starts = [low for low, _ in self.dead]

    @classmethod
    def before(cls, txid: int) -> Committed:
        """The view of batch ``txid`` when there is no ledger: all earlier batches count."""
        return cls(txid - 1)

    def __contains__(self, txid: int) -> bool:
        return self.last is not None and txid <= self.last and not self._is_dead(txid)

    def _is_dead(self, txid: int) -> bool:
        at = bisect_right(self._starts, txid) - 1
        return at >= 0 and txid <= self.dead[at][1]

    def values(
        self, records: Sequence[OpaqueValue[V] | tuple[int, V | None, V | None] | None], newest: int
    ) -> list[V | None]:
        """The committed value of each opaque record: an attempt's base, and what a reader sees.

        ``newest`` is the highest txid that may be met: an attempt's own, or the last one that the
        reader's ledger had given out. Beyond it lies StaleBatchError: the caller was overtaken.
        Raises LedgerLostError for a record that is older than its ledger. One pass, no I/O.
        """
        last = -1 if self.last is None else self.last
        start = max(self.floor, self.first_txid)
        present = [record for record in records if record is not None] if any_none(records) else records
        if not present:
            return [None] * len(records)
        txids = set(map(_TXID, present))
        oldest = min(txids)
        if start <= oldest and max(txids) <= last and not (self.dead and self.dead[-1][1] >= oldest):
            # what nearly every chunk is like: every record counts
            if present is records:
                return list(map(_CURR, records))
            return [None if one is None else one[1] for one in records]
        has_dead = bool(self.dead)
        out: list[V | None] = []
        append = out.append
        for record in records:
            if record is None:
                append(None)
                continue
            txid, curr, prev = record
            if start <= txid <= last and not (has_dead and self._is_dead(txid)):
                append(curr)
            elif txid < start:
                self.check_age(txid)
                append(None)
            elif txid > newest:
                raise stale(txid, newest)
            else:
                append(prev)
        return out

    def check_age(self, txid: int) -> bool:
        """False for a record that was reset, True for one that counts; LedgerLostError if neither."""
        if txid < self.floor:
            return False
        if txid < self.first_txid:
            raise LedgerLostError(
                f"a record carries txid {txid}, but the ledger's txids start at {self.first_txid}: "
                "the ledger is younger than its records, so it was deleted, evicted or expired and "
                "made anew. Restore the ledger with the records from one backup, or start the state "
                "under another name.",
                found=txid,
                first_txid=self.first_txid,
            )
        return True

    def __reduce__(self) -> tuple[type[Committed], tuple[object, ...]]:
        return Committed, (self.last, self.dead, self.floor, self.first_txid)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Committed) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((self.last, self.dead, self.floor, self.first_txid))

    def __repr__(self) -> str:
        return f"Committed({self.last}, dead={self.dead}, floor={self.floor}, first_txid={self.first_txid})"


def stale(found: int, own: int) -> StaleBatchError:
    return StaleBatchError(
        f"the store holds a record of txid {found}, newer than this batch's {own}: another driver "
        "has gone on, or an old checkpoint is being replayed. Nothing was written.",
        found=found,
        own=own,
    )


def newer_txids(keys: Iterable[Any], records: Iterable[Any], newest: int) -> dict[Any, int]:
    """The keys whose records carry a txid above ``newest``, with it. Not for states without txids."""
    pairs = zip(keys, records, strict=True)
    return {key: record[0] for key, record in pairs if record is not None and record[0] > newest}


def newer_than_ledger(state: str, found: Mapping[Any, int], newest: int) -> StaleBatchError:
    """The error for records whose txids a ledger had not given out when it was read after them."""
    key, txid = next(iter(found.items()))
    more = f" ({len(found) - 1} more keys like it)" if len(found) > 1 else ""
    shown = str(key)[:100]
    return StaleBatchError(
        f"state {state!r}, key {shown!r}: the record carries txid {txid}, and the ledger has given out none above "
        f"{newest}{more}. The ledger was put back from an older copy than its records, or something else wrote the "
        "record. Nothing was written. Restore both from one backup, or delete the record.",
        state=state,
        key=str(key),
        keys=[str(one) for one in found],
        found=txid,
        newest=newest,
    )
