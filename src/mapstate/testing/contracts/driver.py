"""A streaming query without Spark, which counts: what begins, applies and commits batches in the contracts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mapstate.backing_map import FencedWrites, IBackingMap
from mapstate.keys import KeyField
from mapstate.ledger import Ledger, now
from mapstate.maps import MapState, OpaqueMap, TransactionalMap
from mapstate.transitions import AlreadyCommitted, Begun, Commit, Field, OnNewOwner, Opening, StateType

__all__ = ["FIELDS", "Attempt", "CountingQuery", "opening"]

FIELDS = (Field("n", "Count", "bigint"),)
_FIRST_TXID = 1000

RecordsOf = Callable[[Any, StateType, tuple[Field, ...]], IBackingMap[str, Any]]


def opening(state: str, kind: StateType, owner: str = "query", on_new_owner: OnNewOwner = "refuse") -> Opening:
    """What a driver brings that counts rows by a text."""
    return Opening(
        state=state,
        type=kind,
        serializer="json",
        keys=(KeyField("k", "string"),),
        fields=FIELDS,
        owner=owner,
        clock_txid=_FIRST_TXID,
        on_new_owner=on_new_owner,
    )


class CountingQuery:
    """A driver of a state, from its start until a newer one starts. ``records_of`` as in the contract."""

    def __init__(
        self,
        store: Any,
        records_of: RecordsOf,
        state: str,
        kind: StateType = "opaque",
        *,
        owner: str = "query",
        on_new_owner: OnNewOwner = "refuse",
    ) -> None:
        self._store = store
        self._records_of = records_of
        self._kind = kind
        self.ledger = Ledger.open(store, opening(state, kind, owner, on_new_owner))

    def begin(self, batch_id: int) -> Attempt | None:
        """An attempt at a batch; None where it counts already."""
        begun = self.ledger.begin(batch_id)
        if isinstance(begun, AlreadyCommitted):
            return None
        store = self._store
        writer = store.writer(begun.token) if isinstance(store, FencedWrites) else store
        return Attempt(self.ledger, begun, writer, self._records_of(writer, self._kind, FIELDS), self._kind)

    def run(self, batch_id: int, counts: Mapping[str, int]) -> None:
        """A whole batch."""
        attempt = self.begin(batch_id)
        if attempt is not None:
            attempt.add(counts)
            attempt.commit()


class Attempt:
    """One try at a batch: one task, which may add several chunks."""

    def __init__(
        self, ledger: Ledger, begun: Begun, writer: Any, records: IBackingMap[str, Any], kind: StateType
    ) -> None:
        self._ledger = ledger
        self.begun = begun
        self._writer = writer
        self._map: MapState[int] = (TransactionalMap if kind == "transactional" else OpaqueMap)(
            records, begun.view, written_once=True
        )
        self._map.begin_commit(begun.txid)

    def add(self, counts: Mapping[str, int]) -> None:
        """Reads, adds and writes one chunk."""
        self._map.multi_combine(list(counts), list(counts.values()), _add_all)

    def commit(self) -> None:
        """What was added counts."""
        self.end()
        self._ledger.commit(
            Commit(batch_id=self.begun.batch_id, txid=self.begun.txid, owner=self._ledger.record.owner, at=now())
        )

    def end(self) -> None:
        """Lets go of what the task's writer holds, as a task does however it ends."""
        getattr(self._writer, "close", lambda: None)()


def _add_all(bases: list[Any], partials: list[Any]) -> list[Any]:
    return [partial if base is None else base + partial for base, partial in zip(bases, partials, strict=True)]
