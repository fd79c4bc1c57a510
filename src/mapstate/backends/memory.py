"""A store in this process's memory, for tests and notebooks; an example of how small a store is."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.capabilities import FenceToken, Swap
from mapstate.errors import ConfigurationError, FencedError
from mapstate.findings import Finding


@dataclass(frozen=True)
class MemoryBackend:
    """``memory://`` or ``memory://name``: backends of one name see the same data, in this process."""

    name: str = ""

    shared_between_processes = False

    @classmethod
    def from_url(cls, url: str) -> MemoryBackend:
        name = url.partition("://")[2]
        if set("/?#@:") & set(name):
            raise ConfigurationError("a memory:// URL has no login, port, path or parameter: memory://name")
        return cls(name)

    def open(self, state: str, *, ttl: float | None = None) -> MemoryStore:
        if ttl is not None:
            raise ConfigurationError("memory:// keeps no time, so it has no ttl")
        with _lock:
            return _stores.setdefault((self.name, state), MemoryStore())

    def states(self) -> Iterator[list[tuple[str, bytes]]]:
        with _lock:
            stores = {state: store for (name, state), store in _stores.items() if name == self.name}
        ledgers = {state: store.load() for state, store in stores.items()}
        yield [(state, stored[0]) for state, stored in ledgers.items() if stored is not None]


class MemoryStore:
    """The records, the ledger and the fence of one state, under one lock."""

    thread_safe: Literal[True] = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, bytes] = {}
        self._ledger: tuple[bytes, int] | None = None
        self._swaps = 0
        self._fence: FenceToken | None = None
        self._claims: dict[tuple[int, int], str] = {}
        self._reports: list[bytes] = []

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._lock:
            return [self._records.get(key) for key in keys]

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        check_lengths(keys, values, "values")
        with self._lock:
            self._records.update(zip(keys, values, strict=True))

    def load(self) -> tuple[bytes, int] | None:
        with self._lock:
            return self._ledger

    def swap(self, record: bytes, expected: int | None, fence: FenceToken) -> int | None:
        with self._lock:
            return self._set(record, fence) if self._version() == expected else None

    def commit_domain(self) -> str:
        return "memory"

    def swap_all(self, swaps: Sequence[Swap]) -> list[int] | None:
        with ExitStack() as locks:
            # In one order, so that two callers do not deadlock.
            for swap in sorted(swaps, key=lambda swap: id(swap.store)):
                locks.enter_context(swap.store._lock)
            if any(swap.store._version() != swap.expected for swap in swaps):
                return None
            # Where the record stays, it was compared alone.
            stay = [len(swaps) > 1 and swap.expected and swap.store._ledger[0] == swap.record for swap in swaps]
            return [
                swap.store._version() if stays else swap.store._set(swap.record, swap.fence)
                for swap, stays in zip(swaps, stay, strict=True)
            ]

    def writer(self, token: FenceToken) -> IBackingMap[str, bytes]:
        return _Writer(self, token)

    def claim(self, txid: int, partition: int, holder: str) -> str:
        with self._lock:
            return self._claims.setdefault((txid, partition), holder)

    def scan(self, page_size: int) -> Iterator[list[str]]:
        with self._lock:
            keys = list(self._records)
        for i in range(0, len(keys), page_size):
            yield keys[i : i + page_size]

    def keep_report(self, report: bytes, most: int) -> None:
        with self._lock:
            self._reports = [report, *self._reports][:most]

    def reports(self) -> list[bytes]:
        with self._lock:
            return list(self._reports)

    def drop(self, expected: int, token: FenceToken) -> Iterator[int]:
        with self._lock:
            if self._version() != expected:
                raise FencedError(f"the ledger has changed: the removal with txid {token.txid} ends", txid=token.txid)
            count = len(self._records)
            self._records.clear()
            self._claims.clear()
            self._reports, self._ledger, self._fence = [], None, None
        yield count

    def scrub(self) -> list[str]:
        return []

    def checkup(self, replay_horizon: float) -> list[Finding]:  # noqa: ARG002
        setting, expected = "the state lives in this process alone, and dies with it", "a store that outlives the job"
        return [Finding("warning", "persistence", setting, expected, "Take sqlite:// or redis:// to keep it.")]

    def put_fenced(self, token: FenceToken, keys: Sequence[str], values: Sequence[bytes]) -> None:
        check_lengths(keys, values, "values")
        with self._lock:
            self._check_fence(token)
            self._records.update(zip(keys, values, strict=True))

    def rewrite_fenced(self, token: FenceToken, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        check_lengths(keys, values, "values")
        with self._lock:
            self._check_fence(token)
            for key, value in zip(keys, values, strict=True):
                if value is None:
                    self._records.pop(key, None)
                elif key in self._records:
                    self._records[key] = value

    def _version(self) -> int | None:
        return None if self._ledger is None else self._ledger[1]

    def _set(self, record: bytes, fence: FenceToken) -> int:
        self._swaps += 1  # no version comes twice, not even after a drop
        self._ledger = (record, self._swaps)
        self._fence = fence
        self._claims.clear()
        return self._swaps

    def _check_fence(self, token: FenceToken) -> None:
        if token.closed or self._fence != token:
            raise FencedError(
                f"the attempt with txid {token.txid} of epoch {token.epoch} may no longer write: the fence is at "
                f"{self._fence}",
                txid=token.txid,
            )


class _Writer:
    def __init__(self, store: MemoryStore, token: FenceToken) -> None:
        self._store = store
        self._token = token
        self.multi_get = store.multi_get

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._store.put_fenced(self._token, keys, values)

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        self._store.rewrite_fenced(self._token, keys, values)


_lock = threading.Lock()
_stores: dict[tuple[str, str], MemoryStore] = {}
