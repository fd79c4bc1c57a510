"""A streaming query without Spark, which counts: what begins, applies and commits batches in the contracts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from mapstate.backing_map import FenceToken, IBackingMap
from mapstate.keys import KeyField
from mapstate.ledger import Ledger, now
from mapstate.maps import MapState, OpaqueMap, TransactionalMap
from mapstate.transitions import AlreadyCommitted, Begun, Commit, Field, OnNewOwner, Opening, StateType

__all__ = ["FIELDS", "Attempt", "CountingQuery", "HowToWrite", "opening"]

FIELDS = (Field("n", "Count", "bigint"),)
_FIRST_TXID = 1000


class HowToWrite(Protocol):
    """What a query asks of the contract: see `BackendContract`."""

    state: ClassVar[str]
    serializer: ClassVar[str]

    def records_of(self, store: Any, kind: StateType, fields: tuple[Field, ...]) -> IBackingMap[str, Any]:
        """A map of records over a store or its writer."""
        ...

    def writer_of(self, store: Any, token: FenceToken) -> Any:
        """What an attempt writes through."""
        ...


def opening(
    state: str, kind: StateType, serializer: str, owner: str = "query", on_new_owner: OnNewOwner = "refuse"
) -> Opening:
    """What a driver brings that counts rows by a text."""
    return Opening(
        state=state,
        type=kind,
        serializer=serializer,
        keys=(KeyField("k", "string"),),
        fields=FIELDS,
        owner=owner,
        clock_txid=_FIRST_TXID,
        on_new_owner=on_new_owner,
    )


class CountingQuery:
    """A driver of a state, from its start until a newer one starts."""

    def __init__(
        self,
        store: Any,
        how: HowToWrite,
        kind: StateType = "opaque",
        *,
        owner: str = "query",
        on_new_owner: OnNewOwner = "refuse",
    ) -> None:
        self._store = store
        self._how = how
        self._kind = kind
        self.ledger = Ledger.open(store, opening(how.state, kind, how.serializer, owner, on_new_owner))

    def begin(self, batch_id: int) -> Attempt | None:
        """An attempt at a batch; None where it counts already."""
        begun = self.ledger.begin(batch_id)
        if isinstance(begun, AlreadyCommitted):
            return None
        writer = self._how.writer_of(self._store, begun.token)
        return Attempt(self.ledger, begun, writer, self._how.records_of(writer, self._kind, FIELDS), self._kind)

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
        self._new_keys = 0

    def add(self, counts: Mapping[str, int]) -> None:
        """Reads, adds and writes one chunk."""

        def add_all(bases: list[Any], partials: list[Any]) -> list[Any]:
            self._new_keys += bases.count(None)
            return _add_all(bases, partials)

        self._map.multi_combine(list(counts), list(counts.values()), add_all)

    def commit(self) -> None:
        """What was added counts."""
        self.end()
        owner, skipped = self._ledger.record.owner, isinstance(self._map, TransactionalMap) and self._map.skipped
        self._ledger.commit(
            Commit(
                batch_id=self.begun.batch_id,
                txid=self.begun.txid,
                owner=owner,
                at=now(),
                keys_delta=None if skipped else self._new_keys,
            )
        )

    def end(self) -> None:
        """Lets go of what the task's writer holds, as a task does however it ends."""
        getattr(self._writer, "close", lambda: None)()


def _add_all(bases: list[Any], partials: list[Any]) -> list[Any]:
    return [partial if base is None else base + partial for base, partial in zip(bases, partials, strict=True)]
