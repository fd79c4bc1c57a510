"""The stores of worlds with windows: in memory, of three kinds, each access a step of the actor that makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from mapstate.capabilities import Fence, FenceToken, Swap
from mapstate.errors import FencedError
from model.actors import Actor

__all__ = ["Stored", "opened"]

_PARTS = 2


class Stored:
    """What a store holds of one state. ``kind`` is as in `model.world.World`; ``changed`` is called after each swap."""

    def __init__(self, kind: str, changed: Callable[[Stored], None]) -> None:
        self.kind = kind
        self.records: dict[str, bytes] = {}
        self.ledger: tuple[bytes, int] | None = None
        self.fence: FenceToken | None = None
        self.parts: list[FenceToken | None] = [None] * _PARTS
        self.claims: dict[tuple[int, int], str] = {}
        self.checks_fence = True
        self.keeps_claims = True
        self._changed = changed

    def set_ledger(self, record: bytes, fence: FenceToken) -> int:
        """Ledger and fence in one write, where the store has one fence."""
        version = 1 if self.ledger is None else self.ledger[1] + 1
        self.ledger, self.fence = (record, version), fence
        if self.kind == "fenced":
            self.claims.clear()
        self._changed(self)
        return version

    def put(self, token: FenceToken, key: str, value: bytes | None) -> None:
        """One record, refused as the kind of store refuses it; None removes."""
        fence = self.parts[part_of(key)] if self.kind == "cluster" else self.fence
        if self.kind != "filtered" and self.checks_fence and (fence != token or token.closed):
            raise FencedError(f"the fence is at {fence}", txid=token.txid)
        there = self.records.get(key)
        if self.kind == "filtered" and there is not None and msgspec.json.decode(there)[0] > token.txid:
            raise FencedError("there is a newer record", txid=token.txid)
        if value is None:
            self.records.pop(key, None)
        else:
            self.records[key] = value


def part_of(key: str) -> int:
    """The part of a cluster that has a key."""
    return sum(key.encode()) % _PARTS


def opened(stored: Stored, actor: Actor) -> Any:
    """The store as an actor has it open."""
    return {"fenced": _Fenced, "filtered": _Filtered, "cluster": _Cluster}[stored.kind](stored, actor)


class _Opened:
    def __init__(self, stored: Stored, actor: Actor) -> None:
        self.stored = stored
        self.actor = actor

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        self.actor.pause()
        return [self.stored.records.get(key) for key in keys]

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:  # noqa: ARG002
        raise AssertionError("a task writes through its writer")

    def load(self) -> tuple[bytes, int] | None:
        self.actor.pause()
        return self.stored.ledger

    def swap(self, record: bytes, expected: int | None, fence: FenceToken) -> int | None:
        self.actor.pause()
        there = None if self.stored.ledger is None else self.stored.ledger[1]
        return self.stored.set_ledger(record, fence) if there == expected else None

    def claim(self, txid: int, partition: int, holder: str) -> str:
        self.actor.pause()
        return self.stored.claims.setdefault((txid, partition), holder) if self.stored.keeps_claims else holder

    def scan(self, page_size: int) -> Iterator[list[str]]:  # noqa: ARG002
        self.actor.pause()
        yield list(self.stored.records)


class _Fenced(_Opened):
    def commit_domain(self) -> str:
        return "one"

    def swap_all(self, swaps: Sequence[Swap]) -> list[int] | None:
        self.actor.pause()
        for one in swaps:
            there = one.store.stored.ledger
            if (None if there is None else there[1]) != one.expected:
                return None
        return [one.store.stored.set_ledger(one.record, one.fence) for one in swaps]

    def writer(self, token: FenceToken) -> _Writer:
        return _Writer(self, token)


class _Filtered(_Opened):
    def filtered_writer(self, token: FenceToken) -> _Writer:
        return _Writer(self, token)


class _Cluster(_Opened):
    def writer(self, token: FenceToken) -> _Writer:
        return _Writer(self, token)

    def fences(self) -> list[Fence]:
        self.actor.pause()
        return [Fence(token, 1) for token in self.stored.parts]

    def move_fences(self, before: Sequence[FenceToken | None], after: FenceToken) -> list[Fence]:
        for at, known in enumerate(before):
            self.actor.pause()  # one server after the other
            if self.stored.parts[at] == known and (known is None or after.rank > known.rank):
                self.stored.parts[at] = after
        return self.fences()


class _Writer:
    """Puts record after record, so that an attempt may end between any two."""

    def __init__(self, opened: _Opened, token: FenceToken) -> None:
        self._opened = opened
        self._token = token
        self.multi_get = opened.multi_get

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._opened.actor.pause()
            self._opened.stored.put(self._token, key, value)

    multi_rewrite = multi_put
