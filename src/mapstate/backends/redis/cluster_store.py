"""One state in a Redis cluster: its records in buckets, each with a fence, and its ledger beside them.

A state ``visits`` of 64 buckets lives under these keys::

    visits:{17}:user-42    a record; {17} is its bucket, and puts it into the slot of all of that bucket
    visits!{17}fence       who may write into the bucket: "epoch:txid:nonce", then ":closed"
    {visits}!ledger        the ledger; {visits}!buckets is their number, {visits}!claims and {visits}!reports
                           are as on one server

Ledger and fences cannot change in one write. What takes its place is in docs/protocol.md and in `mapstate.fences`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mapstate.backends.redis.buckets import Bucket, in_groups, put_together
from mapstate.backends.redis.checkup import judge
from mapstate.backends.redis.cluster_writer import ClusterWriter
from mapstate.backends.redis.layout import escaped, not_listed, texts_of
from mapstate.backends.redis.scripts import claim, compare_and_set, remove_equal, swap_ledger
from mapstate.backends.redis.settings import shown_address
from mapstate.backends.redis.store import Version, allowed, facts_of, overtaken, removed, sampled
from mapstate.backends.redis.topology import Cluster, Reply, Request, slot_of
from mapstate.backends.redis.wire import command, token_of, token_text
from mapstate.backing_map import Fence, FenceToken, IBackingMap, check_lengths
from mapstate.errors import ConfigurationError, CorruptRecordError, StoreAuthError, StoreUnavailableError
from mapstate.findings import Finding
from mapstate.values import any_none, cut

if TYPE_CHECKING:
    from mapstate.backends.redis.cluster_backend import RedisClusterBackend

__all__ = ["RedisClusterStore"]


class RedisClusterStore:
    """One state in a cluster. Cheap to make; holds no connection while nothing is asked of it."""

    def __init__(self, backend: RedisClusterBackend, state: str, expiry: bytes | None) -> None:
        self._backend = backend
        self._state = state
        self._cluster = Cluster(backend, state)
        self._name = (backend.prefix + state).encode()
        tagged = b"%b{%b}" % (backend.prefix.encode(), state.encode())
        self._slot = slot_of(state.encode())
        self._ledger, self._count = tagged + b"!ledger", tagged + b"!buckets"
        self._claims, self._reports = tagged + b"!claims", tagged + b"!reports"
        self._buckets = [
            Bucket(self._name, number, state, backend.max_value_bytes, expiry) for number in range(backend.buckets)
        ]

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `IBackingMap.multi_get`: an MGET for each bucket, one round trip to each node, all at once.

        One more where keys are absent: EXISTS, because MGET gives nothing for a key of another type. Raises
        CorruptRecordError for such a key.
        """
        records = self._records(keys)
        if any_none(records):
            self._with_types_checked(keys, records, [])
        return records

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """See `IBackingMap.multi_put`: without a fence, not repeated if a reply is lost."""
        check_lengths(keys, values, "values")
        asked = []
        for group in in_groups(keys, len(self._buckets)):
            bucket = self._buckets[group.bucket]
            asked.append(Request(bucket.slot, bucket.put(group.keys, group.of(values))))
        self._cluster.ask(asked, repeat=False)

    def multi_get_with_ledger(self, keys: Sequence[str]) -> tuple[bytes | None, list[bytes | None], bytes | None]:
        """See `LedgerReads.multi_get_with_ledger`: three round trips, since nodes are not read in an order.

        Two where all keys are there: then nobody minds the ledger after. Raises CorruptRecordError as `multi_get`.
        """
        ledger = command(b"GET", self._ledger)
        before = self._at_ledger(ledger)[0]
        records = self._records(keys)
        if not any_none(records):
            return before, records, before
        (after,) = self._with_types_checked(keys, records, [Request(self._slot, (ledger,))])
        return before, records, after.found[0]

    def load(self) -> tuple[bytes, Version] | None:
        """See `LedgerStore.load`. The version is the record, and the life of the ledger's node.

        Raises ConfigurationError where the state has another number of buckets than the URL says.
        """
        (reply,) = self._cluster.ask([self._both()], lives=True)
        record = self._checked(reply)
        return None if record is None else (record, (record, reply.life_before))

    def swap(self, record: bytes, expected: Version | None, fence: FenceToken) -> Version | None:
        """See `LedgerStore.swap`; leaves the fences alone. A closed ``fence`` lets the claims up to it go.

        Raises StoreUnavailableError where the reply is lost: then ask `load`.
        """
        (reply,) = self._cluster.ask([self._both()], lives=True)
        found = self._checked(reply)
        if (None if found is None else (found, reply.life_before)) != expected:
            return None
        count = b"%d" % len(self._buckets)
        keys = (self._ledger, self._count, self._claims)
        swap = swap_ledger(keys, found, record, count, fence.txid if fence.closed else None)
        (reply,) = self._cluster.ask([Request(self._slot, (swap,))], repeat=False, lives=True)
        return (record, reply.life_before) if reply.found[0] else None

    def fences(self) -> list[Fence]:
        """See `SpreadFences.fences`: one round trip to each node."""
        return self._fences_in([command(b"GET", bucket.fence) for bucket in self._buckets], after=False)

    def move_fences(self, before: Sequence[FenceToken | None], after: FenceToken) -> list[Fence]:
        """See `SpreadFences.move_fences`: one round trip to each node. May be sent twice.

        The life of a fence that opens is that of before, and of one that is closed that of after: in between, all
        that was acknowledged is in the server of that life.
        """
        moves = [
            compare_and_set(bucket.fence, None if one is None else token_text(one), token_text(after))
            for bucket, one in zip(self._buckets, before, strict=True)
        ]
        return self._fences_in(moves, after=after.closed)

    def writer(self, token: FenceToken) -> IBackingMap[str, bytes]:
        """See `FencedWrites.writer`. It holds no connection."""
        return ClusterWriter(self._cluster, self._buckets, token, self._state)

    def claim(self, txid: int, partition: int, holder: str) -> str:
        """See `Claims.claim`: one round trip."""
        found: bytes = self._at_ledger(claim(self._claims, b"%d/%d" % (txid, partition), holder.encode()))[0]
        return found.decode()

    def scan(self, page_size: int) -> Iterator[list[str]]:
        """See `Scan.scan`: SCAN, one node after the other.

        Raises StoreUnavailableError where a slot has moved or a node has failed over meanwhile, because then keys may
        have been passed over.
        """
        shape = self._cluster.shape()
        pattern = escaped(self._name) + b":{*}:*"
        unlisted = list[str]()
        for node in shape.masters:
            cursor, page = b"0", list[str]()
            while True:
                scan = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % page_size)
                ((cursor, found),) = self._cluster.ask_node(node, [scan]).found
                page += self._keys(found, unlisted)
                if page and (cursor == b"0" or len(page) >= page_size):
                    yield page
                    page = []
                if cursor == b"0":
                    break
        if shape.moving or self._cluster.shape() != shape:
            raise StoreUnavailableError(
                f"state {self._state!r}: slots of the cluster at {self._backend.address} moved, or a node failed over, "
                "while it was scanned, so that keys may have been passed over: scan again",
                state=self._state,
                store=self._backend.address,
            )
        if unlisted:
            raise not_listed(self._state, unlisted)

    def keep_report(self, report: bytes, most: int) -> None:
        """See `Reports.keep_report`."""
        trim = command(b"LTRIM", self._reports, b"0", b"%d" % (most - 1))
        push = Request(self._slot, (command(b"LPUSH", self._reports, report), trim))
        self._cluster.ask([push], repeat=False)

    def reports(self) -> list[bytes]:
        """See `Reports.reports`."""
        found: list[bytes] = self._at_ledger(command(b"LRANGE", self._reports, b"0", b"-1"))[0]
        return found

    def drop(self, expected: Version, token: FenceToken) -> Iterator[int]:
        """See `Drops.drop`: records by pages, each through its fence; the fences; and what is in the ledger's slot."""
        foreign = yield from removed(self, self._state, token)
        (reply,) = self._cluster.ask([self._both()])
        if reply.found[0] != expected[0]:
            raise overtaken(self._state, token)
        text = token_text(token)
        self._cluster.ask([Request(one.slot, (remove_equal([one.fence], text),)) for one in self._buckets])
        names = (self._ledger, self._count, self._claims, self._reports)
        if not self._at_ledger(remove_equal(names, expected[0]))[0]:
            raise overtaken(self._state, token)
        if foreign.count:
            raise foreign.error()

    def checkup(self, replay_horizon: float) -> list[Finding]:
        """See `Checkup.checkup`: of each master. What the user may not ask is left out, and said."""
        found = []
        ledger_ttl = allowed(lambda: self._at_ledger(command(b"PTTL", self._ledger))[0])
        groups = in_groups(sampled(self), len(self._buckets))
        asked = [
            Request(self._buckets[one.bucket].slot, tuple(self._buckets[one.bucket].ttl_of(key) for key in one.keys))
            for one in groups
        ]
        ttls = [ttl for reply in allowed(lambda: self._cluster.ask(asked)) or [] for ttl in reply.found]
        for node in self._cluster.shape().masters:
            facts = facts_of(lambda asked, node=node: self._allowed(node, asked), [])  # type: ignore[misc]
            facts = facts._replace(ledger_ttl=ledger_ttl, ttls=ttls)
            found += [
                one._replace(subject=f"{shown_address(node)} {one.subject}") for one in judge(facts, replay_horizon)
            ]
        return found

    def close(self) -> None:
        """Closes this process's idle connections to the nodes. The store stays usable."""
        for node in self._cluster.known():
            self._backend.pool_to(node).disconnect(inuse_connections=False)

    def _records(self, keys: Sequence[str]) -> list[bytes | None]:
        groups = in_groups(keys, len(self._buckets))
        buckets = self._buckets
        asked = [Request(buckets[one.bucket].slot, (buckets[one.bucket].get(one.keys),)) for one in groups]
        return put_together(groups, [reply.found[0] for reply in self._cluster.ask(asked)], len(keys))

    def _with_types_checked(
        self, keys: Sequence[str], records: Sequence[bytes | None], more: list[Request]
    ) -> list[Reply]:
        """The replies to ``more``. Raises CorruptRecordError where what is absent is there and no string.

        Nothing is looked at where this user may not ask.
        """
        buckets = self._buckets
        groups = in_groups([key for key, one in zip(keys, records, strict=True) if one is None], len(buckets))
        exist = [Request(buckets[one.bucket].slot, (buckets[one.bucket].exist(one.keys),)) for one in groups]
        replies = self._asked_if_allowed([*more, *exist])
        if replies is None:
            return self._cluster.ask(more) if more else []
        for group, reply in zip(groups, replies[len(more) :], strict=True):
            if reply.found[0]:
                bucket = buckets[group.bucket]
                (types,) = self._cluster.ask([Request(bucket.slot, tuple(bucket.types(group.keys)))])
                pairs = zip(group.keys, types.found, strict=True)
                other = {key: kind for key, kind in pairs if kind not in (b"none", b"string")}
                if other:
                    raise bucket.foreign(list(other), list(other.values()))
        return replies[: len(more)]

    def _asked_if_allowed(self, requests: Sequence[Request]) -> list[Reply] | None:
        try:
            return self._cluster.ask(requests)
        except StoreAuthError:
            return None

    def _both(self) -> Request:
        return Request(self._slot, (command(b"GET", self._ledger), command(b"GET", self._count)))

    def _checked(self, reply: Reply) -> bytes | None:
        """The ledger, if it was made with this number of buckets."""
        record, count = reply.found
        if record is not None and count != b"%d" % len(self._buckets):
            if count is None:
                name = self._count.decode(errors="backslashreplace")
                raise ConfigurationError(
                    f"state {self._state!r}: the key {name!r} is gone (deleted or evicted), which says in how many "
                    "buckets its records lie. Nothing was written. Where the URL says what the state was made with, "
                    f"set it again: redis-cli -c SET {name!r} {len(self._buckets)}. Then look with mapstate doctor "
                    "whether other keys are gone too."
                )
            there = count.decode(errors="replace")
            raise ConfigurationError(
                f"state {self._state!r} was made with {there} buckets, and the URL says {len(self._buckets)}: its "
                "records would not be found. Nothing was written. Put the number into the URL: buckets=..."
            )
        found: bytes | None = record
        return found

    def _at_ledger(self, *commands: bytes) -> list[Any]:
        return self._cluster.ask([Request(self._slot, commands)])[0].found

    def _fences_in(self, commands: Sequence[bytes], *, after: bool) -> list[Fence]:
        asked = [Request(bucket.slot, (one,)) for bucket, one in zip(self._buckets, commands, strict=True)]
        replies = self._cluster.ask(asked, lives=True)
        try:
            return [Fence(token_of(one.found[0]), one.life_after if after else one.life_before) for one in replies]
        except ValueError as error:
            raise CorruptRecordError(
                f"state {self._state!r}: one of its fences, {self._buckets[0].fence.decode()!r} and so on, holds "
                f"something else ({cut(error)}): something else writes under this state's name. Nothing was written.",
                state=self._state,
            ) from error

    def _keys(self, found: list[bytes], unlisted: list[str]) -> list[str]:
        start = len(self._name) + 2
        return texts_of([key[key.index(b"}:", start) + 2 :] for key in found], unlisted)

    def _allowed(self, node: tuple[str, int], asked: bytes) -> Any:
        return allowed(lambda: self._cluster.ask_node(node, [asked]).found[0])
