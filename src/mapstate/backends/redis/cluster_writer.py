"""The fenced writer of a task in a cluster: each bucket refuses by its own fence."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress, repeat
from operator import is_
from typing import NamedTuple

from mapstate.backends.redis.buckets import Bucket, Group, in_groups, put_together
from mapstate.backends.redis.topology import Ahead, Cluster, Reply, Request
from mapstate.backends.redis.wire import PackedKeys, token_text
from mapstate.backends.redis.writer import MOST_AHEAD, fenced
from mapstate.backing_map import FenceToken, check_lengths
from mapstate.values import any_none

__all__ = ["ClusterWriter"]


class _Chunk(NamedTuple):
    """The keys of a get, in groups, and packed: for the put that follows it."""

    keys: list[str]
    groups: list[Group]
    packed: list[PackedKeys]

    def of(self, marks: Sequence[bytes]) -> set[str]:
        """The keys that are marked; ``marks`` of each group."""
        return {key for group, one in zip(self.groups, marks, strict=True) for key in compress(group.keys, one)}


class ClusterWriter:
    """The map of one task. See `FencedWrites.writer`. One round trip to each node per call, all at once.

    What goes to one bucket is stored whole or not at all; a put that raises may have been done in other buckets. The
    attempt is not committed then. Where a reply is lost the same is sent again: the fence is looked at again.

    What is read ahead is so on connections of its own, as is a put while something is read ahead. Nothing has to be
    held from a get to its put: a script looks at the fence, which never comes back to a token.
    """

    def __init__(self, cluster: Cluster, buckets: Sequence[Bucket], token: FenceToken, state: str) -> None:
        self._cluster = cluster
        self._buckets = buckets
        self._token = token
        self._text = token_text(token)
        self._state = state
        self._chunk: _Chunk | None = None
        self._absent: list[bytes] = []
        self._asked: deque[tuple[_Chunk, Ahead]] = deque()
        self._sent: Ahead | None = None
        self._groups: list[Group] = []
        self._large = False

    def read_ahead(self, keys: Sequence[str]) -> None:
        """See `ReadsAhead.read_ahead`: sent to all nodes now."""
        if keys and not self._large:
            chunk = self._packed(list(keys))
            self._asked.append((chunk, self._cluster.ask_ahead(self._gets(chunk))))

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """GET fence and MGET for each bucket. Raises FencedError."""
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
        self._absent = [bytes(map(is_, one, repeat(None))) if any_none(one) else b"" for one in found]
        return put_together(chunk.groups, found, len(keys))

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """A script for each bucket. Raises FencedError. With a read under way the replies are left to `flush`."""
        check_lengths(keys, values, "values")
        chunk, self._chunk = self._chunk, None
        absent, self._absent = self._absent, []
        if chunk is None or chunk.keys != keys:
            known = set() if chunk is None else chunk.of(absent)
            chunk = self._packed(keys)
            absent = [bytes(map(known.__contains__, one.keys)) if known else b"" for one in chunk.groups]
        puts = [
            self._buckets[group.bucket].fenced_put(self._text, packed, group.of(values), marks)
            for group, packed, marks in zip(chunk.groups, chunk.packed, absent, strict=True)
        ]
        self._large = sum(map(len, puts)) > MOST_AHEAD
        self._write(chunk.groups, puts, wait=self._large or not self._asked)

    def flush(self) -> None:
        """See `ReadsAhead.flush`: the replies of all nodes to the put that is under way."""
        if self._sent is not None:
            self._check_done(self._groups, self._sent.read())
            self._sent = None

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """See `Rewrites.multi_rewrite`: a script for each bucket, whole or not at all there."""
        check_lengths(keys, values, "values")
        chunk = self._packed(keys)
        rewrites = [
            self._buckets[group.bucket].fenced_rewrite(self._text, packed, group.of(values))
            for group, packed in zip(chunk.groups, chunk.packed, strict=True)
        ]
        self._write(chunk.groups, rewrites)

    def close(self) -> None:
        """Lets go what was read ahead, and a put that is under way to its fate. Closing twice is no error."""
        if self._sent is not None:
            self._sent.drop()
            self._sent = None
        while self._asked:
            self._asked.pop()[1].drop()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _packed(self, keys: Sequence[str]) -> _Chunk:
        groups = in_groups(keys, len(self._buckets))
        return _Chunk(list(keys), groups, [self._buckets[group.bucket].pack(group.keys) for group in groups])

    def _gets(self, chunk: _Chunk) -> list[Request]:
        out = []
        for group, packed in zip(chunk.groups, chunk.packed, strict=True):
            bucket = self._buckets[group.bucket]
            out.append(Request(bucket.slot, bucket.fenced_get(packed)))
        return out

    def _write(self, groups: list[Group], packed: list[bytes], *, wait: bool = True) -> None:
        """Sends to all nodes, when what was sent before is done."""
        self.flush()
        if self._token.closed and groups:
            raise fenced(self._state, self._token, self._text)
        asked = [Request(self._buckets[one.bucket].slot, (put,)) for one, put in zip(groups, packed, strict=True)]
        if wait:
            self._check_done(groups, self._cluster.ask(asked))
        else:
            self._sent, self._groups = self._cluster.ask_ahead(asked), groups

    def _check_done(self, groups: Sequence[Group], replies: Sequence[Reply]) -> None:
        for group, reply in zip(groups, replies, strict=True):
            done, *more = reply.found[0]
            if not done:
                raise fenced(self._state, self._token, more[0] if more else None)
            if more:
                at, kind = more
                raise self._buckets[group.bucket].foreign([group.keys[at - 1]], [kind])
