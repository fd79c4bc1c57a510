"""A streaming query without Spark: it begins, applies and commits batches of counts in the contracts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from mapstate.backing_map import IBackingMap
from mapstate.capabilities import FenceToken, close_if_possible
from mapstate.maps import MapState, OpaqueMap, TransactionalMap
from mapstate.protocol.ledger_record import Attempt, Commit, LedgerRecord, OpenRequest, now
from mapstate.protocol.ledgers import Ledgers
from mapstate.schema import Field, KeyField, OnNewOwner, StateType

FIELDS = (Field("n", "Count", "bigint"),)
_FIRST_TXID = 1000


class HowToWrite(Protocol):
    """What a query needs of the contract: see `BackendContract`."""

    state: ClassVar[str]
    serializer: ClassVar[str]

    def records_of(self, store: Any, kind: StateType, fields: tuple[Field, ...]) -> IBackingMap[str, Any]:
        """A map of records over a store or its writer."""
        ...

    def writer_of(self, store: Any, token: FenceToken) -> Any:
        """The map that an attempt writes to."""
        ...


def opening(
    state: str, kind: StateType, serializer: str, owner: str = "query", on_new_owner: OnNewOwner = "refuse"
) -> OpenRequest:
    """The request of a driver that counts rows by a text."""
    return OpenRequest(
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
    """A driver of a state, from its first batch until a newer driver begins one."""

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
        self._opening = opening(how.state, kind, how.serializer, owner, on_new_owner)
        self._ledgers: Ledgers | None = None

    @property
    def record(self) -> LedgerRecord:
        """The ledger as this driver last read or wrote it, after its first batch began."""
        assert self._ledgers is not None, "no batch has begun"
        return self._ledgers.records[0]

    def begin(self, batch_id: int) -> RunningAttempt | None:
        """Begin an attempt at a batch. Returns None where the batch counts already. The first one opens the state."""
        if self._ledgers is None:
            self._ledgers, answers = Ledgers.open_and_begin([self._store], [self._opening], batch_id, ["refuse"])
        else:
            answers = self._ledgers.begin(batch_id)
        if not isinstance(answers[0], Attempt):
            return None
        writer = self._how.writer_of(self._store, answers[0].token)
        records = self._how.records_of(writer, self._kind, FIELDS)
        return RunningAttempt(self._ledgers, answers[0], writer, records, self._kind)

    def attempt(self, batch_id: int) -> RunningAttempt:
        attempt = self.begin(batch_id)
        assert attempt is not None, f"batch {batch_id} counts already"
        return attempt

    def orphan(self, batch_id: int, counts: Mapping[str, int]) -> None:
        """Write a batch that is not committed, as a driver that dies leaves it behind."""
        attempt = self.attempt(batch_id)
        attempt.add(counts)
        attempt.end()

    def run(self, batch_id: int, counts: Mapping[str, int]) -> None:
        attempt = self.begin(batch_id)
        if attempt is not None:
            attempt.add(counts)
            attempt.commit()


class RunningAttempt:
    """An attempt with one task, which may add several chunks."""

    def __init__(
        self, ledgers: Ledgers, attempt: Attempt, writer: Any, records: IBackingMap[str, Any], kind: StateType
    ) -> None:
        self._ledgers = ledgers
        self.attempt = attempt
        self._writer = writer
        self._map: MapState[int] = (TransactionalMap if kind == "transactional" else OpaqueMap)(
            records, attempt.view, written_once=True
        )
        self._map.begin_commit(attempt.txid)
        self._new_keys = 0

    def add(self, counts: Mapping[str, int]) -> None:
        def add_all(bases: list[Any], partials: list[Any]) -> list[Any]:
            self._new_keys += bases.count(None)
            return [partial if base is None else base + partial for base, partial in zip(bases, partials, strict=True)]

        self._map.multi_combine(list(counts), list(counts.values()), add_all)

    def commit(self) -> None:
        self.end()
        skipped = isinstance(self._map, TransactionalMap) and self._map.skipped
        done = Commit(
            batch_id=self.attempt.batch_id,
            txid=self.attempt.txid,
            owner=self._ledgers.records[0].owner,
            at=now(),
            keys_delta=None if skipped else self._new_keys,
        )
        self._ledgers.commit([done])

    def end(self) -> None:
        """Close the task's writer, as a task does however it ends."""
        close_if_possible(self._writer)
