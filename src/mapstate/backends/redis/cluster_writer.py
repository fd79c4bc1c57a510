"""The fenced writer of a task in a cluster: each bucket refuses by its own fence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mapstate.backends.redis.buckets import Bucket, Group, in_groups, put_together
from mapstate.backends.redis.topology import Cluster, Request
from mapstate.backends.redis.wire import token_text
from mapstate.backends.redis.writer import fenced
from mapstate.backing_map import FenceToken, check_lengths

__all__ = ["ClusterWriter"]


class ClusterWriter:
    """The map of one task. See `FencedWrites.writer`. One round trip to each node per call, all at once.

    What goes to one bucket is stored whole or not at all; a put that raises may have been done in other buckets. The
    attempt is not committed then. Where a reply is lost the same is sent again: the fence is looked at again.
    """

    def __init__(self, cluster: Cluster, buckets: Sequence[Bucket], token: FenceToken, state: str) -> None:
        self._cluster = cluster
        self._buckets = buckets
        self._token = token
        self._text = token_text(token)
        self._state = state

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """GET fence and MGET for each bucket. Raises FencedError."""
        groups = in_groups(keys, len(self._buckets))
        replies = self._ask(groups, lambda bucket, group: bucket.fenced_get(group.keys))
        for fence, _ in replies:
            if fence != self._text or self._token.closed:
                raise fenced(self._state, self._token, fence)
        return put_together(groups, [records for _, records in replies], len(keys))

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """A script for each bucket. Raises FencedError."""
        check_lengths(keys, values, "values")
        self._write(
            in_groups(keys, len(self._buckets)),
            lambda bucket, group: (bucket.fenced_put(self._text, group.keys, group.of(values)),),
        )

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """See `Rewrites.multi_rewrite`: a script for each bucket, whole or not at all there."""
        check_lengths(keys, values, "values")
        self._write(
            in_groups(keys, len(self._buckets)),
            lambda bucket, group: (bucket.fenced_rewrite(self._text, group.keys, group.of(values)),),
        )

    def _write(self, groups: list[Group], packed: Any) -> None:
        if self._token.closed and groups:
            raise fenced(self._state, self._token, self._text)
        for ((done, *fence),) in self._ask(groups, packed):
            if not done:
                raise fenced(self._state, self._token, fence[0] if fence else None)

    def _ask(self, groups: list[Group], packed: Any) -> list[list[Any]]:
        asked = []
        for group in groups:
            bucket = self._buckets[group.bucket]
            asked.append(Request(bucket.slot, packed(bucket, group)))
        return [reply.found for reply in self._cluster.ask(asked)]
