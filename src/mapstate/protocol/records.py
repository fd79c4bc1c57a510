"""Records, and the one rule that tells which of their values count.

Storm Trident's idea: keep with each value the transaction that wrote it. mapstate's addition: only
the ledger says whether a transaction was committed, never the record by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from mapstate.errors import LedgerLostError, StaleBatchError

V = TypeVar("V")


class TransactionalValue(NamedTuple, Generic[V]):
    """A value and the txid that wrote it. JSON: ``[txid, val]``.

    It is exact if each replay of a batch brings the same rows: an equal txid says that the value holds them.
    """

    txid: int
    val: V | None


class OpaqueValue(NamedTuple, Generic[V]):
    """The current value, the one before it, and the txid that wrote the current one.

    JSON: ``[txid, curr, prev]``. It is exact whatever a replay brings: an orphaned attempt leaves the committed
    value in ``prev``.
    """

    txid: int
    curr: V | None
    prev: V | None


_TXID: Any = itemgetter(0)
_CURR: Any = itemgetter(1)


class CommitView:
    """The one rule: ``txid in view`` is true if the txid is committed and not dead.

    A record of such a txid may still be too old to be read: `values` knows the floor, too. It is the ledger's view of
    one moment: small, immutable and picklable. Each attempt takes one to the executors, and each reader makes one from
    the ledger that it has just read.

    ``last``        the last committed txid, None without one
    ``dead``        inclusive ranges of orphaned txids below ``last``, ascending and disjoint
    ``floor``       records below this txid were reset and read as absent
    ``first_txid``  where the ledger's txids start. A record between ``floor`` and here is older than its ledger
    """

    __slots__ = ("_starts", "dead", "first_txid", "floor", "last")

    def __init__(
        self, last: int | None, dead: Iterable[tuple[int, int]] = (), floor: int = 0, first_txid: int = 0
    ) -> None:
        self.last = last
        self.dead = tuple((low, high) for low, high in dead)
        self.floor = floor
        self.first_txid = first_txid
        self._starts = [low for low, _ in self.dead]

    @classmethod
    def before(cls, txid: int) -> CommitView:
        """The view of batch ``txid`` without a ledger: all earlier batches count."""
        return cls(txid - 1)

    def __contains__(self, txid: int) -> bool:
        return self.last is not None and txid <= self.last and not self._is_dead(txid)

    def _is_dead(self, txid: int) -> bool:
        i = bisect_right(self._starts, txid) - 1
        return i >= 0 and txid <= self.dead[i][1]

    def values(
        self, records: Sequence[OpaqueValue[V] | tuple[int, V | None, V | None] | None], newest: int
    ) -> list[V | None]:
        """Return the committed value of each opaque record, for an attempt's base and for readers. One pass, no I/O.

        Args:
            records: None for an absent record.
            newest: The highest txid that the caller may meet: an attempt's own, or the last one that the reader's
                ledger has given out.

        Raises:
            StaleBatchError: A record is newer, so the caller was overtaken.
            LedgerLostError: A record is older than its ledger.

        """
        last = -1 if self.last is None else self.last
        start = max(self.floor, self.first_txid)
        present = records if all(records) else [record for record in records if record is not None]
        if not present:
            return [None] * len(records)
        txids = set(map(_TXID, present))
        oldest = min(txids)
        if start <= oldest and max(txids) <= last and not (self.dead and self.dead[-1][1] >= oldest):
            # The common chunk: every record counts.
            if present is records:
                return list(map(_CURR, records))
            return [None if record is None else record[1] for record in records]
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
        """False for a record that was reset, else True. Raises LedgerLostError if it is older than its ledger."""
        if txid < self.floor:
            return False
        if txid < self.first_txid:
            raise LedgerLostError(
                f"a record carries txid {txid}, but the ledger's txids start at {self.first_txid}: the ledger was "
                "deleted, evicted or expired, and made anew. No attempt that meets it is committed. Restore the ledger "
                "and the records from one backup, or start the state under another name. See "
                "docs/operating.md#a-lost-ledger",
                found=txid,
                first_txid=self.first_txid,
            )
        return True

    def __reduce__(self) -> tuple[type[CommitView], tuple[object, ...]]:
        return CommitView, (self.last, self.dead, self.floor, self.first_txid)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CommitView) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((self.last, self.dead, self.floor, self.first_txid))

    def __repr__(self) -> str:
        return f"CommitView({self.last}, dead={self.dead}, floor={self.floor}, first_txid={self.first_txid})"


def stale(found: int, own: int) -> StaleBatchError:
    """The error of a batch that meets a record of a later txid."""
    return StaleBatchError(
        f"the store holds a record of txid {found}, newer than this batch's {own}: another driver has taken over, or "
        "an old checkpoint is replayed. This attempt does not count. Stop the older driver.",
        found=found,
        own=own,
    )
