"""The backend for a Redis cluster, and one state there: its records in slot groups, each with a fence, and its ledger.

A state ``visits`` with 64 slot groups has these keys::

    visits:{17}:user-42    a record; {17} is its slot group, and decides the slot
    visits!{17}fence       who may write into the slot group: "epoch:txid:nonce", then ":closed"
    {visits}!ledger        the ledger; {visits}!buckets is their number, {visits}!claims and {visits}!reports
                           are as on one server

Ledger and fences cannot change in one write. docs/protocol.md and `mapstate.protocol.fences` say in which order they
change instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

from redis.connection import ConnectionPool
from redis.crc import key_slot

from mapstate.backends.redis.backend import RedisSettings
from mapstate.backends.redis.cluster_map import ClusterLayout, ClusterMap, Reply, Request
from mapstate.backends.redis.cluster_writer import ClusterWriter, SlotGroup, by_slot_group, in_chunk_order, to_groups
from mapstate.backends.redis.connection import command, token_of, token_text
from mapstate.backends.redis.layout import escaped, texts_of
from mapstate.backends.redis.problems import another_layout
from mapstate.backends.redis.scripts import claim, compare_and_set, remove_equal, swap_ledger
from mapstate.backends.redis.store import Version
from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.capabilities import Fence, FenceToken
from mapstate.errors import ConfigurationError, CorruptRecordError, StoreAuthError, cut
from mapstate.findings import Finding
from mapstate.keys import contains_none
from mapstate.schema import KeyOrder
from mapstate.urls import Address, shown_address


class RedisClusterStore:
    """One state in a cluster. Cheap to make; holds no connection between requests."""

    thread_safe: Literal[True] = True

    def __init__(self, cluster: ClusterMap, state: str, prefix: str, groups: Sequence[SlotGroup]) -> None:
        self._cluster = cluster
        self._state = state
        self._name = (prefix + state).encode()
        self._groups = groups
        self._slot = key_slot(state.encode())
        tagged = b"%b{%b}" % (prefix.encode(), state.encode())
        self._ledger, self._count = tagged + b"!ledger", tagged + b"!buckets"
        self._claims, self._reports = tagged + b"!claims", tagged + b"!reports"

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `IBackingMap.multi_get`: an MGET for each slot group, one round trip to each node, all at once.

        One more with EXISTS where keys are absent: MGET replies nothing for a key of another type. Raises
        CorruptRecordError for such a key.
        """
        records = self._records(keys)
        if contains_none(records):
            self._with_types_checked(keys, records, [])
        return records

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """See `IBackingMap.multi_put`: without a fence, and no retry where a reply is lost."""
        check_lengths(keys, values, "values")
        parts = by_slot_group(keys, len(self._groups))
        puts = to_groups(self._groups, parts, lambda group, part: group.put(part.keys, part.of(values)))
        self._cluster.ask(puts, repeat=False)

    def multi_get_with_ledger(self, keys: Sequence[str]) -> tuple[bytes | None, list[bytes | None], bytes | None]:
        """See `LedgerReads.multi_get_with_ledger`: three round trips, because replies of nodes have no order.

        Two where no key is absent: then the second read of the ledger does not matter. Raises CorruptRecordError as
        `multi_get`.
        """
        ledger = command(b"GET", self._ledger)
        before = self._at_ledger(ledger)[0]
        records = self._records(keys)
        if not contains_none(records):
            return before, records, before
        (after,) = self._with_types_checked(keys, records, [Request(self._slot, (ledger,))])
        return before, records, after.found[0]

    def load(self) -> tuple[bytes, Version] | None:
        """See `LedgerStore.load`. The version is the record, and the incarnation of the ledger's node.

        Raises ConfigurationError where the state has another number of slot groups than the URL says.
        """
        (reply,) = self._cluster.ask([self._both()], incarnations=True)
        record = self._checked(reply)
        return None if record is None else (record, (record, reply.incarnation_before))

    def probe(self) -> None:
        """See `Probes.probe`: removes a key that is not there. Asks the ledger's node alone."""
        self._cluster.ask([Request(self._slot, (remove_equal([self._ledger + b"!probe"], b"-"),))])

    def swap(self, record: bytes, expected: Version | None, fence: FenceToken) -> Version | None:
        """See `LedgerStore.swap`; leaves the fences alone. A closed ``fence`` removes the claims up to its txid.

        Raises StoreUnavailableError where the reply is lost: then ask `load`.
        """
        (reply,) = self._cluster.ask([self._both()], incarnations=True)
        ledger = self._checked(reply)
        if (None if ledger is None else (ledger, reply.incarnation_before)) != expected:
            return None
        count = b"%d" % len(self._groups)
        keys = (self._ledger, self._count, self._claims)
        swap = swap_ledger(keys, ledger, record, count, fence.txid if fence.closed else None)
        (reply,) = self._cluster.ask([Request(self._slot, (swap,))], repeat=False, incarnations=True)
        return (record, reply.incarnation_before) if reply.found[0] else None

    def fences(self) -> list[Fence]:
        """See `SpreadFences.fences`: one round trip to each node."""
        return self._fences_in([command(b"GET", group.fence) for group in self._groups], after=False)

    def move_fences(self, before: Sequence[FenceToken | None], after: FenceToken) -> list[Fence]:
        """See `SpreadFences.move_fences`: one round trip to each node. May be repeated.

        A fence that opens has the incarnation read before the move, a closed one that read after it: whatever was
        acknowledged in between is in that incarnation of the server.
        """
        moves = [
            compare_and_set(group.fence, None if fence is None else token_text(fence), token_text(after))
            for group, fence in zip(self._groups, before, strict=True)
        ]
        return self._fences_in(moves, after=after.closed)

    def writer(self, token: FenceToken) -> IBackingMap[str, bytes]:
        """See `FencedWrites.writer`. It holds no connection."""
        return ClusterWriter(self._cluster, self._groups, token, self._state)

    def claim(self, txid: int, partition: int, holder: str) -> str:
        """See `Claims.claim`: one round trip."""
        held_by: bytes = self._at_ledger(claim(self._claims, b"%d/%d" % (txid, partition), holder.encode()))[0]
        return held_by.decode()

    def scan(self, page_size: int) -> Iterator[list[str]]:
        """See `Scan.scan`: SCAN, one node after the other.

        Raises StoreUnavailableError where a slot moved or a node failed over meanwhile: the scan may have missed keys.
        """
        return self._listed(self._cluster.shape(), page_size)

    def scan_parts(self, most: int) -> list[str]:
        """See `ScansParts.scan_parts`: a master each, or several. No master's scan is divided."""
        shape = self._cluster.shape()
        masters = len(shape.masters)
        count = min(most, masters)
        ends = [number * masters // count for number in range(count + 1)]
        return [f"{first} {end} {_digest(shape)}" for first, end in pairwise(ends)]

    def scan_part(self, part: str, page_size: int) -> Iterator[list[str]]:
        """See `ScansParts.scan_part`. Errors: see `scan`."""
        from mapstate.backends.redis.listing import torn

        first, end, digest = part.split(" ")
        shape = self._cluster.shape()
        if _digest(shape) != digest:
            raise torn(self._cluster, f"slots of the cluster at {self._cluster.settings.address} moved")
        return self._listed(shape, page_size, slice(int(first), int(end)))

    def _listed(self, shape: ClusterLayout, page_size: int, only: slice = slice(None)) -> Iterator[list[str]]:
        from mapstate.backends.redis.listing import key_pages, walked_nodes

        pattern, count = escaped(self._name) + b":{*}:*", b"%d" % page_size
        walk = walked_nodes(
            self._cluster, shape, lambda at: command(b"SCAN", at, b"MATCH", pattern, b"COUNT", count), only
        )
        return (page for page, _ in key_pages(walk, self._keys, self._state, page_size) if page)

    def keep_report(self, report: bytes, most: int) -> None:
        trim = command(b"LTRIM", self._reports, b"0", b"%d" % (most - 1))
        push = Request(self._slot, (command(b"LPUSH", self._reports, report), trim))
        self._cluster.ask([push], repeat=False)

    def reports(self) -> list[bytes]:
        reports: list[bytes] = self._at_ledger(command(b"LRANGE", self._reports, b"0", b"-1"))[0]
        return reports

    def drop(self, expected: Version, token: FenceToken) -> Iterator[int]:
        """See `Drops.drop`: records by pages, through their fences; the fences; and the keys in the ledger's slot."""
        from mapstate.backends.redis.operations import dropped

        def finish() -> bool:
            if self._cluster.ask([self._both()])[0].found[0] != expected[0]:
                return False
            text = token_text(token)
            self._cluster.ask([Request(group.slot, (remove_equal([group.fence], text),)) for group in self._groups])
            names = (self._ledger, self._count, self._claims, self._reports)
            return bool(self._at_ledger(remove_equal(names, expected[0]))[0])

        return dropped(self, self._state, token, finish)

    def scrub(self) -> list[str]:
        """See `Scrubs.scrub`: rewrites the AOF and the RDB of each master."""
        from mapstate.backends.redis.scrub import scrub_node

        def tell(node: Address, asked: bytes) -> Any:
            return self._cluster.ask_node(node, [asked]).found[0]

        masters = self._cluster.shape().masters
        return [f"{shown_address(node)}: {place}" for node in masters for place in scrub_node(partial(tell, node))]

    def checkup(self, replay_horizon: float) -> list[Finding]:
        """See `Checkup.checkup`: of each master. Says what the user may not ask for."""
        from mapstate.backends.redis.operations import allowed, facts_of, judge, sampled

        def tell(node: Address, asked: bytes) -> Any:
            return allowed(lambda: self._cluster.ask_node(node, [asked]).found[0])

        ledger_ttl = allowed(lambda: self._at_ledger(command(b"PTTL", self._ledger))[0])
        parts = by_slot_group(sampled(self), len(self._groups))
        asked = to_groups(self._groups, parts, lambda group, part: tuple(group.layout.ttls(lambda: part.keys)))
        ttls = [ttl for reply in allowed(lambda: self._cluster.ask(asked)) or [] for ttl in reply.found]
        findings = []
        for node in self._cluster.shape().masters:
            facts = facts_of(partial(tell, node), [])._replace(ledger_ttl=ledger_ttl, ttls=ttls)
            judged = judge(facts, replay_horizon)
            findings += [finding._replace(subject=f"{shown_address(node)} {finding.subject}") for finding in judged]
        return findings

    def close(self) -> None:
        """Close this process's idle connections to the nodes. The store stays usable."""
        for node in self._cluster.known():
            self._cluster.pool(node).disconnect(inuse_connections=False)

    def _records(self, keys: Sequence[str]) -> list[bytes | None]:
        parts = by_slot_group(keys, len(self._groups))
        asked = to_groups(self._groups, parts, lambda group, part: (group.layout.get(group.layout.pack(part.keys)),))
        return in_chunk_order(parts, [reply.found[0] for reply in self._cluster.ask(asked)], len(keys))

    def _with_types_checked(
        self, keys: Sequence[str], records: Sequence[bytes | None], more: list[Request]
    ) -> list[Reply]:
        """The replies to ``more``. Raises CorruptRecordError where a key without a record has another type.

        Checks nothing where this user may not run EXISTS.
        """
        groups = self._groups
        parts = by_slot_group([key for key, record in zip(keys, records, strict=True) if record is None], len(groups))
        exist = to_groups(groups, parts, lambda group, part: (group.layout.exist(group.layout.pack(part.keys)),))
        replies: list[Reply] | None = None
        with suppress(StoreAuthError):
            replies = self._cluster.ask([*more, *exist])
        if replies is None:
            return self._cluster.ask(more)
        for part, reply in zip(parts, replies[len(more) :], strict=True):
            if reply.found[0]:
                group = groups[part.group]
                (types,) = self._cluster.ask([Request(group.slot, tuple(group.layout.types(part.keys)))])
                group.layout.check_types(part.keys, types.found)
        return replies[: len(more)]

    def _both(self) -> Request:
        return Request(self._slot, (command(b"GET", self._ledger), command(b"GET", self._count)))

    def _checked(self, reply: Reply) -> bytes | None:
        """The ledger, if it was made with this number of slot groups."""
        record, count = reply.found
        asked = b"%d" % len(self._groups)
        if count != asked and (record is not None or count is not None):
            raise another_layout(self._state, self._count, count, asked, has_ledger=record is not None, groups=True)
        ledger: bytes | None = record
        return ledger

    def _at_ledger(self, *commands: bytes) -> list[Any]:
        return self._cluster.ask([Request(self._slot, commands)])[0].found

    def _fences_in(self, commands: Sequence[bytes], *, after: bool) -> list[Fence]:
        asked = [Request(group.slot, (command,)) for group, command in zip(self._groups, commands, strict=True)]
        replies = self._cluster.ask(asked, incarnations=True)
        try:
            return [
                Fence(token_of(reply.found[0]), reply.incarnation_after if after else reply.incarnation_before)
                for reply in replies
            ]
        except ValueError as error:
            raise CorruptRecordError(
                f"state {self._state!r}: one of its fences, {self._groups[0].fence.decode()!r} and so on, holds "
                f"something else ({cut(error)}): something else writes under this state's name. It is as it was.",
                state=self._state,
            ) from error

    def _keys(self, listed: list[bytes], unlisted: list[str]) -> list[str]:
        start = len(self._name) + 2
        return texts_of([key[key.index(b"}:", start) + 2 :] for key in listed], unlisted)


def _digest(shape: ClusterLayout) -> str:
    """Equal for equal shapes, also in another process."""
    from mapstate.backends.redis.listing import digest_of

    return digest_of(repr((shape.owners, shape.masters, sorted(shape.moving))).encode())


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisClusterBackend(RedisSettings):
    """A Redis cluster: ``redis+cluster://user:password@host:port,host2:port?buckets=64``.

    ``rediss+cluster://`` is the same with TLS. The hosts are asked in turn at first contact; one is enough.

    ``buckets``  the number of slot groups: at least some for each node, and so few that a chunk has many keys of each.
                 Fixed when the state is made, and checked from then on
    ``retries``  is 20 here, because a failover takes a while. One that takes two ``socket_timeout`` is an error
    """

    nodes: tuple[Address, ...] = (("localhost", 6379),)
    buckets: int = 64
    retries: int = 20

    KIND: ClassVar[str] = "cluster"
    RECORDS: ClassVar[dict[str, Any]] = {"prefix": "", "buckets": 1}

    chunk_size: ClassVar[int] = 10_000
    """Each slot group has a share of a chunk. Takes 5/6 of the time of chunks of 2,000 (``bench/chunk_sizes.py``)."""

    @property
    def key_order(self) -> KeyOrder:
        """See `Backend`: slot group after slot group."""
        return self.buckets

    def open_with(self, pool: Callable[..., ConnectionPool], state: str, ttl: float | None) -> RedisClusterStore:
        if "{" in state or "}" in state:
            raise ConfigurationError(f"{state!r} cannot name a state in a cluster: braces choose the slot there")
        name = (self.prefix + state).encode()
        expiry = self.expiry(state, ttl)
        groups = [SlotGroup(name, number, state, self.max_value_bytes, expiry) for number in range(self.buckets)]
        return RedisClusterStore(ClusterMap(self, self.nodes, pool, state), state, self.prefix, groups)

    def states(self) -> Iterator[list[tuple[str, bytes]]]:
        """See `ListsStates.states`: SCAN, one node after the other."""
        from mapstate.backends.redis.operations import states_in_cluster

        return states_in_cluster(ClusterMap(self, self.nodes, self.pool, "*"), self.prefix.encode(), Request)
