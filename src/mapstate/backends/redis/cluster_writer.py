"""The slot groups of a state in a cluster, which share a slot and a fence each; and the fenced writer of a task."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import compress, repeat
from operator import is_
from typing import NamedTuple, TypeVar
from zlib import crc32

from redis.crc import key_slot

from mapstate.backends.redis.cluster_map import ClusterMap, PendingReply, Reply, Request
from mapstate.backends.redis.connection import command, token_text
from mapstate.backends.redis.layout import PackedKeys, StringLayout
from mapstate.backends.redis.problems import fenced
from mapstate.backends.redis.scripts import guarded_put, guarded_rewrite
from mapstate.backends.redis.writer import MOST_AHEAD
from mapstate.backing_map import check_lengths
from mapstate.capabilities import FenceToken
from mapstate.keys import contains_none

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
    for i, number in enumerate(numbers):
        places[number % groups].append(i)
    return [
        GroupKeys(group, at_places, list(map(keys.__getitem__, at_places)))
        for group, at_places in enumerate(places)
        if at_places
    ]


def to_groups(
    groups: Sequence[SlotGroup], parts: Iterable[GroupKeys], pack: Callable[[SlotGroup, GroupKeys], tuple[bytes, ...]]
) -> list[Request]:
    """The requests of a chunk: the commands that ``pack`` returns for each part."""
    return [Request(groups[part.group].slot, pack(groups[part.group], part)) for part in parts]


def in_chunk_order(parts: Iterable[GroupKeys], answers: Iterable[Sequence[T]], count: int) -> list[T | None]:
    """The answers for each part's keys, in the order of the chunk."""
    out: list[T | None] = [None] * count
    for part, values in zip(parts, answers, strict=True):
        for i, value in zip(part.places, values, strict=True):
            out[i] = value
    return out


class _Chunk(NamedTuple):
    """The keys of a get, by slot group and packed, for the put that follows it."""

    keys: list[str]
    parts: list[GroupKeys]
    packed: list[PackedKeys]

    def of(self, marks: Sequence[bytes]) -> set[str]:
        """The keys that are marked; one of ``marks`` for each part."""
        return {key for part, mark in zip(self.parts, marks, strict=True) for key in compress(part.keys, mark)}


class ClusterWriter:
    """The map of one task. See `FencedWrites.writer`. One round trip to each node per call, all at once.

    A slot group stores its share of a put whole or not at all. A put that raises may be done in other slot groups; the
    attempt is not committed then. A put whose reply is lost is repeated: its script checks the fence each time.

    Reads ahead have connections of their own, and so has a put while a read ahead is under way. No connection is held
    from a get to its put: the script checks the fence, which never comes back to a token.
    """

    def __init__(self, cluster: ClusterMap, groups: Sequence[SlotGroup], token: FenceToken, state: str) -> None:
        self._cluster = cluster
        self._groups = groups
        self._token = token
        self._text = token_text(token)
        self._state = state
        self._chunk: _Chunk | None = None
        self._absent: list[bytes] = []
        self._asked: deque[tuple[_Chunk, PendingReply]] = deque()
        self._sent: PendingReply | None = None
        self._parts: list[GroupKeys] = []
        self._large = False

    def read_ahead(self, keys: Sequence[str]) -> None:
        """See `ReadsAhead.read_ahead`: sent to all nodes at once."""
        if keys and not self._large:
            chunk = self._packed(list(keys))
            self._asked.append((chunk, self._cluster.ask_ahead(self._gets(chunk))))

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """GET of the fence and MGET, for each slot group. Raises FencedError."""
        if self._asked and self._asked[0][0].keys == keys:
            chunk, ahead = self._asked.popleft()
            replies = ahead.read()
        else:
            self.flush()
            self.close()
            chunk = self._packed(list(keys))
            replies = self._cluster.ask(self._gets(chunk))
        for reply in replies:
            fence = reply.found[0]
            if fence != self._text or self._token.closed:
                raise fenced(self._state, self._token, fence)
        records = [reply.found[1] for reply in replies]
        self._chunk = chunk
        self._absent = [bytes(map(is_, record, repeat(None))) if contains_none(record) else b"" for record in records]
        return in_chunk_order(chunk.parts, records, len(keys))

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """A script for each slot group. Raises FencedError. With a read under way, `flush` reads the replies."""
        check_lengths(keys, values, "values")
        chunk, self._chunk = self._chunk, None
        absent, self._absent = self._absent, []
        if chunk is None or chunk.keys != keys:
            known = set() if chunk is None else chunk.of(absent)
            chunk = self._packed(keys)
            absent = [bytes(map(known.__contains__, part.keys)) if known else b"" for part in chunk.parts]
        puts = [
            self._groups[part.group].fenced_put(self._text, packed, part.of(values), marks)
            for part, packed, marks in zip(chunk.parts, chunk.packed, absent, strict=True)
        ]
        self._large = sum(map(len, puts)) > MOST_AHEAD
        self._write(chunk.parts, puts, wait=self._large or not self._asked)

    def flush(self) -> None:
        """See `ReadsAhead.flush`: the replies of all nodes to the put that is under way."""
        if self._sent is not None:
            self._check_done(self._parts, self._sent.read())
            self._sent = None

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """See `Rewrites.multi_rewrite`: a script for each slot group, whole or not at all in each."""
        check_lengths(keys, values, "values")
        chunk = self._packed(keys)
        rewrites = [
            self._groups[part.group].fenced_rewrite(self._text, packed, part.of(values))
            for part, packed in zip(chunk.parts, chunk.packed, strict=True)
        ]
        self._write(chunk.parts, rewrites)

    def close(self) -> None:
        """Drop reads ahead, and the replies to a put under way, which may be done. Closing twice is no error."""
        if self._sent is not None:
            self._sent.drop()
            self._sent = None
        while self._asked:
            self._asked.pop()[1].drop()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _packed(self, keys: Sequence[str]) -> _Chunk:
        parts = by_slot_group(keys, len(self._groups))
        return _Chunk(list(keys), parts, [self._groups[part.group].layout.pack(part.keys) for part in parts])

    def _gets(self, chunk: _Chunk) -> list[Request]:
        packed = iter(chunk.packed)
        return to_groups(self._groups, chunk.parts, lambda group, _: group.fenced_get(next(packed)))

    def _write(self, parts: list[GroupKeys], packed: list[bytes], *, wait: bool = True) -> None:
        """Send to all nodes, after the put before is done."""
        self.flush()
        if self._token.closed and parts:
            raise fenced(self._state, self._token, self._text)
        asked = [Request(self._groups[part.group].slot, (put,)) for part, put in zip(parts, packed, strict=True)]
        if wait:
            self._check_done(parts, self._cluster.ask(asked))
        else:
            self._sent, self._parts = self._cluster.ask_ahead(asked), parts

    def _check_done(self, parts: Sequence[GroupKeys], replies: Sequence[Reply]) -> None:
        for part, reply in zip(parts, replies, strict=True):
            done, *more = reply.found[0]
            if not done:
                raise fenced(self._state, self._token, more[0] if more else None)
            if more:
                at, kind = more
                raise self._groups[part.group].layout.foreign([part.keys[at - 1]], [kind])
