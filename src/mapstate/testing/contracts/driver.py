"""A streaming query without Spark, and work in another process, which gets the pickled backend: for the contracts."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from mapstate.backing_map import IBackingMap, close_if_possible
from mapstate.capabilities import FenceToken
from mapstate.errors import FencedError
from mapstate.maps import MapState, OpaqueMap, TransactionalMap
from mapstate.protocol.ledger_record import Attempt, Commit, LedgerRecord, OpenRequest, now
from mapstate.protocol.ledgers import Ledgers
from mapstate.schema import Field, KeyField, OnNewOwner, StateType

FIELDS = (Field("n", "Count", "bigint"),)
_FIRST_TXID = 1000


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
    """A driver of a state, from its first batch until a newer driver begins one; ``how`` is a `BackendContract`."""

    def __init__(
        self,
        store: Any,
        how: Any,
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


_SECONDS = 60


def elsewhere(work: Callable[..., Any], backend: Any, state: str, *arguments: Any) -> Any:
    """Run ``work`` in a spawned process, which opens the state itself. Returns or raises what it does."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_opened, work, pickle.dumps(backend), state, arguments).result(_SECONDS)


def _opened(work: Callable[..., Any], pickled: bytes, state: str, arguments: tuple[Any, ...]) -> Any:
    store = pickle.loads(pickled).open(state)
    try:
        return work(store, *arguments)
    finally:
        close_if_possible(store)


def put_and_get(store: Any, keys: list[str], records: list[Any], asked: list[str]) -> list[Any]:
    """Put, and return the result of a get after it."""
    store.multi_put(keys, records)
    return list(store.multi_get(asked))


def swap_once(store: Any, record: bytes, fence: FenceToken) -> tuple[bytes | None, bool]:
    """Return the ledger before the swap, and whether the swap was done."""
    ledger = store.load()
    version = None if ledger is None else ledger[1]
    return ledger and ledger[0], store.swap(record, version, fence) is not None


def put_fenced(store: Any, writes_through: str, token: FenceToken, keys: list[str], records: list[Any]) -> bool:
    """Return whether a writer with this token may put."""
    try:
        getattr(store, writes_through)(token).multi_put(keys, records)
    except FencedError:
        return False
    return True


def forked_after_use(store: Any, records: dict[str, list[Any]]) -> dict[str, list[int]]:
    """Put and get in a parent and its children at one time. Returns the wrong records of each process.

    The store is used before the fork, so its open connections are shared unless it prevents that.
    """
    store.multi_put(["before"], [records["parent"][0]])
    ends = {}
    for name in [name for name in records if name != "parent"]:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(store, name, records[name], writing)
        os.close(writing)
        ends[name] = pid, reading
    wrong = {"parent": _read_wrong(store, "parent", records["parent"])}
    for name, (pid, reading) in ends.items():
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        wrong[name] = pickle.loads(said) if said else [-1]  # it died, or raised
    wrong["afterwards"] = [
        i for name, part in records.items() for i, record in enumerate(part) if not _has(store, f"{name}-{i}", record)
    ]
    return wrong


def _child(store: Any, name: str, records: list[Any], writing: int) -> None:
    """Does not return."""
    try:
        signal.alarm(_SECONDS // 2)
        said = pickle.dumps(_read_wrong(store, name, records))
        close_if_possible(store)
        os.write(writing, said)
    finally:
        os._exit(0)


def _read_wrong(store: Any, name: str, records: list[Any]) -> list[int]:
    wrong = []
    for i, record in enumerate(records):
        store.multi_put([f"{name}-{i}"], [record])
        if not _has(store, f"{name}-{i}", record):
            wrong.append(i)
    return wrong


def _has(store: Any, key: str, record: Any) -> bool:
    return bool(store.multi_get([key]) == [record])
