"""The fenced writer of a task in a cluster: each slot group has its own fence."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress, repeat
from operator import is_
from typing import NamedTuple

from mapstate.backends.redis.cluster_map import ClusterMap, PendingReply, Reply, Request
from mapstate.backends.redis.problems import fenced
from mapstate.backends.redis.slot_groups import GroupKeys, SlotGroup, by_slot_group, in_chunk_order
from mapstate.backends.redis.wire import PackedKeys, token_text
from mapstate.backends.redis.writer import MOST_AHEAD
from mapstate.backing_map import check_lengths
from mapstate.capabilities import FenceToken
from mapstate.keys import contains_none


class _Chunk(NamedTuple):
    """The keys of a get, by slot group and packed, for the put that follows it."""

    keys: list[str]
    parts: list[GroupKeys]
    packed: list[PackedKeys]

    def of(self, marks: Sequence[bytes]) -> set[str]:
        """The keys that are marked; one of ``marks`` for each part."""
        return {key for part, one in zip(self.parts, marks, strict=True) for key in compress(part.keys, one)}


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
        found = [reply.found[1] for reply in replies]
        self._chunk = chunk
        self._absent = [bytes(map(is_, one, repeat(None))) if contains_none(one) else b"" for one in found]
        return in_chunk_order(chunk.parts, found, len(keys))

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """A script for each slot group. Raises FencedError. With a read under way, `flush` reads the replies."""
        check_lengths(keys, values, "values")
        chunk, self._chunk = self._chunk, None
        absent, self._absent = self._absent, []
        if chunk is None or chunk.keys != keys:
            known = set() if chunk is None else chunk.of(absent)
            chunk = self._packed(keys)
            absent = [bytes(map(known.__contains__, one.keys)) if known else b"" for one in chunk.parts]
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
        out = []
        for part, packed in zip(chunk.parts, chunk.packed, strict=True):
            group = self._groups[part.group]
            out.append(Request(group.slot, group.fenced_get(packed)))
        return out

    def _write(self, parts: list[GroupKeys], packed: list[bytes], *, wait: bool = True) -> None:
        """Send to all nodes, after the put before is done."""
        self.flush()
        if self._token.closed and parts:
            raise fenced(self._state, self._token, self._text)
        asked = [Request(self._groups[one.group].slot, (put,)) for one, put in zip(parts, packed, strict=True)]
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
