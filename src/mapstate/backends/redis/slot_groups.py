"""Slot groups: the records of a state in a cluster that share a slot and a fence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar
from zlib import crc32

from redis.crc import key_slot

from mapstate.backends.redis.layout import StringLayout
from mapstate.backends.redis.scripts import guarded_put, guarded_rewrite
from mapstate.backends.redis.wire import PackedKeys, command

T = TypeVar("T")


class SlotGroup:
    """Some of a state's records, in one slot with their fence. ``layout`` packs the commands about them."""

    def __init__(self, name: bytes, number: int, state: str, max_value_bytes: int, expiry: bytes | None) -> None:
        tag = b"%d" % number
        self.slot = key_slot(tag)
        self.fence = b"%b!{%b}fence" % (name, tag)
        self._expiry = expiry
        self.layout = StringLayout(state, max_value_bytes, b"%b:{%b}:" % (name, tag), expiry)

    def put(self, keys: Sequence[str], values: Sequence[bytes]) -> tuple[bytes, ...]:
        """The commands that store all of them: one, but where they expire."""
        layout = self.layout
        if self._expiry is None:
            return (layout.put(layout.pack(keys), values)[0],)
        return tuple(layout.put(layout.pack([key]), [value])[0] for key, value in zip(keys, values, strict=True))

    def fenced_get(self, keys: PackedKeys) -> tuple[bytes, bytes]:
        """The fence, and the records."""
        return command(b"GET", self.fence), self.layout.get(keys)

    def fenced_put(self, token: bytes, keys: PackedKeys, values: Sequence[bytes], absent: bytes) -> bytes:
        """One script; see `guarded_put`."""
        self.layout.check_sizes("the record of key", keys.keys, values)
        put = guarded_put(self.fence, token, keys, values, self._expiry, absent=absent)
        self.layout.check_whole(f"the {len(keys)} records of one put", put, keys.keys[0])
        return put

    def fenced_rewrite(self, token: bytes, keys: PackedKeys, values: Sequence[bytes | None]) -> bytes:
        """One script; see `guarded_rewrite`."""
        rewrite = guarded_rewrite(self.fence, token, keys, values)
        self.layout.check_whole(f"the {len(keys)} records of one page", rewrite, keys.keys[0])
        return rewrite


class GroupKeys(NamedTuple):
    """The keys of a chunk that belong to one slot group, and their places in the chunk."""

    group: int
    places: list[int]
    keys: list[str]

    def of(self, values: Sequence[T]) -> list[T]:
        """The values of these keys, out of those of the chunk."""
        return list(map(values.__getitem__, self.places))


def by_slot_group(keys: Sequence[str], groups: int) -> list[GroupKeys]:
    """Divide a chunk by slot group: the CRC-32 of a key's UTF-8 text modulo the number of groups."""
    try:
        numbers = list(map(crc32, map(str.encode, keys)))
    except UnicodeEncodeError:  # a half pair is refused when it is packed
        numbers = [crc32(key.encode("utf-8", "surrogatepass")) for key in keys]
    places: list[list[int]] = [[] for _ in range(groups)]
    for at, number in enumerate(numbers):
        places[number % groups].append(at)
    return [GroupKeys(group, own, list(map(keys.__getitem__, own))) for group, own in enumerate(places) if own]


def in_chunk_order(parts: Iterable[GroupKeys], answers: Iterable[Sequence[T]], count: int) -> list[T | None]:
    """The answers for each part's keys, in the order of the chunk."""
    out: list[T | None] = [None] * count
    for part, own in zip(parts, answers, strict=True):
        for at, one in zip(part.places, own, strict=True):
            out[at] = one
    return out
