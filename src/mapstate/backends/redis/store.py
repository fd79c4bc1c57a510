"""One state on one Redis server: records, ledger, fence, claims and batch reports."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal

from mapstate.backends.redis.connection import (
    DISCARD,
    EXEC,
    INFO,
    MULTI,
    Server,
    command,
    commands,
    get_and_watch,
    incarnation_of,
    token_text,
)
from mapstate.backends.redis.layout import Layout
from mapstate.backends.redis.problems import another_layout, warn_of_packed
from mapstate.backends.redis.writer import Writer
from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.capabilities import FenceToken, Swap
from mapstate.errors import ConfigurationError
from mapstate.findings import Finding
from mapstate.keys import contains_none

Version = tuple[bytes, bytes | None]
"""The ledger, and the incarnation of the server that it was read from."""

_FEW = 128  # keys of a read up to which EXISTS is sent along: it costs less than another round trip for an absent key
_log = logging.getLogger("mapstate")
KEY_ENDS = ("!ledger", "!fence", "!claims", "!reports", "!layout")
"""What the Redis keys beside the records end with."""


class RedisStore:
    """One state in Redis. Cheap to make; holds no connection between requests.

    ``name``           the common start of the state's Redis keys
    ``layout``         of the records; ``layout_text`` is the state's note of it
    ``commit_domain``  see `JointLedgers.commit_domain`
    """

    thread_safe: Literal[True] = True

    def __init__(
        self, server: Server, state: str, name: bytes, layout: Layout, *, layout_text: bytes, commit_domain: Hashable
    ) -> None:
        self._server = server
        self._state = state
        self._layout = layout
        self._layout_text = layout_text
        self._commit_domain = commit_domain
        self._ledger, self._fence, self._claims, self._reports, self._kept_layout = (
            name + end.encode() for end in KEY_ENDS
        )
        self._get_ledger, self._watch_ledger = get_and_watch(self._ledger)
        self._get_layout = command(b"GET", self._kept_layout)
        if layout_text.startswith(b"string, ") and not name.endswith(b":"):  # keys of others may begin like its own
            self.drop = None  # type: ignore[assignment,method-assign]

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `IBackingMap.multi_get`: MGET, HMGET or a script. Raises CorruptRecordError for a key of another type."""
        return self._checked(keys, b"")[0] if keys else []

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """See `IBackingMap.multi_put`: one transaction without a fence, and no retry where its reply is lost."""
        check_lengths(keys, values, "values")
        if keys:
            put, replies = self._layout.put(self._layout.pack(keys), values)
            self._server.tell(MULTI + put + EXEC, replies + 2)

    def multi_get_with_ledger(self, keys: Sequence[str]) -> tuple[bytes | None, list[bytes | None], bytes | None]:
        """See `LedgerReads.multi_get_with_ledger`: one round trip."""
        ledger = self._get_ledger
        if not keys:
            before, after = self._server.ask(ledger + ledger, 2)
            return before, [], after
        records, (before, after) = self._checked(keys, ledger)
        return before, records, after

    def load(self) -> tuple[bytes, Version] | None:
        """See `LedgerStore.load`. The version is the record, and the incarnation of the server, where INFO is allowed.

        Raises ConfigurationError where the state has another layout than the URL says.
        """
        record, layout, *info = self._server.ask(self._get_ledger + self._get_layout + INFO, 4, optional=2)
        if layout != self._layout_text and (record is not None or layout is not None):
            raise self._elsewhere(layout, record)
        return None if record is None else (record, (record, incarnation_of(*info)))

    def probe(self) -> None:
        """See `Probes.probe`. A server checks commands as it queues them; a cluster's node finds two slots in WATCH."""
        put, replies = self._layout.put(self._layout.pack(["-"]), [b""])
        changes = self._changes(b"", FenceToken(0, 0), is_new=True)
        both, asked = command(b"WATCH", self._ledger, self._fence), MULTI + commands(*changes) + put + DISCARD
        server, count = self._server, len(changes) + replies + 2
        server.retrying(lambda: server.finish(server.watch(self._watch_ledger, both, 1)[0], asked, count))

    def swap(self, record: bytes, expected: Version | None, fence: FenceToken) -> Version | None:
        """See `LedgerStore.swap`. Raises StoreUnavailableError where the reply is lost: then ask `load`."""
        done = self.swap_all([Swap(self, record, expected, fence)])
        return None if done is None else done[0]

    def commit_domain(self) -> Hashable:
        """See `JointLedgers.commit_domain`: the server, its database and the user."""
        return self._commit_domain

    def swap_all(self, swaps: Sequence[Swap]) -> list[Version] | None:
        """See `JointLedgers.swap_all`: all ledgers under WATCH, one transaction. Errors: see `swap`."""
        for swap in swaps:
            if swap.expected is None and swap.store._layout_text.startswith(b"packed"):
                warn_of_packed(swap.store._state)
        server, count = self._server, len(swaps)
        watch, layout = [swap.store._watch_ledger for swap in swaps], [swap.store._get_layout for swap in swaps]
        conn, replies = server.watched(watch[0], b"".join([*watch[1:], *layout, INFO]), 3 * count, optional=2)
        ledgers, layouts = [replies[0], *replies[2 : 2 * count : 2]], replies[-2 - count : -2]
        incarnation = incarnation_of(*replies[-2:])
        if any(
            (None if ledger is None else (ledger, incarnation)) != swap.expected
            for ledger, swap in zip(ledgers, swaps, strict=True)
        ):
            server.unwatch(conn)
            return None
        for ledger, layout, swap in zip(ledgers, layouts, swaps, strict=True):
            if layout != swap.store._layout_text and (ledger is not None or layout is not None):
                server.unwatch(conn)
                raise swap.store._elsewhere(layout, ledger)
        if incarnation is None and any(not swap.fence.closed for swap in swaps):  # an attempt begins
            _log.warning(
                "state %s: this user of Redis may not run INFO, so a restart or failover of the server within a batch "
                "goes unnoticed, and a part of the batch may be lost: allow it INFO",
                self._state,
            )
        changes = [
            change
            for ledger, swap in zip(ledgers, swaps, strict=True)
            if count == 1 or ledger != swap.record
            for change in swap.store._changes(swap.record, swap.fence, is_new=ledger is None)
        ]
        return None if server.transact(changes, conn) is None else [(swap.record, incarnation) for swap in swaps]

    def _changes(self, record: bytes, fence: FenceToken, *, is_new: bool) -> list[tuple[bytes, ...]]:
        """Commands for a transaction."""
        ledger = (b"SET", self._ledger, record), (b"SET", self._fence, token_text(fence)), (b"DEL", self._claims)
        return [*ledger, (b"SET", self._kept_layout, self._layout_text)] if is_new else [*ledger]

    def writer(self, token: FenceToken) -> IBackingMap[str, bytes]:
        """See `FencedWrites.writer`. It holds a connection from a get to its put, or to ``close()``."""
        return Writer(self._server, self._layout, self._fence, token, self._state)

    def claim(self, txid: int, partition: int, holder: str) -> str:
        """See `Claims.claim`: one round trip."""
        name = b"%d/%d" % (txid, partition)
        claim = commands((b"HSETNX", self._claims, name, holder.encode()), (b"HGET", self._claims, name))
        held_by: bytes = self._server.ask(MULTI + claim + EXEC, 4)[-1][-1]
        return held_by.decode()

    def scan(self, page_size: int) -> Iterator[list[str]]:
        """See `Scan.scan`. SCAN walks through the whole database, other states included, but for the packed layout.

        Raises StoreUnavailableError at the end where the server restarted or failed over meanwhile: a cursor means
        nothing to another process, so the scan may have missed keys.
        """
        from mapstate.backends.redis.listing import key_pages_from

        return (page for page, _ in key_pages_from(self._server, self._layout, "", page_size) if page)

    def scan_from(self, cursor: str, page_size: int) -> Iterator[tuple[list[str], str]]:
        """See `ScansFrom.scan_from`. Errors: see `scan`."""
        from mapstate.backends.redis.listing import cursor_of, key_pages_from

        pages = key_pages_from(self._server, self._layout, cursor, page_size)
        return ((page, cursor_of(after)) for page, after in pages)

    def scan_parts(self, most: int) -> list[str]:
        """See `ScansParts.scan_parts`: ranges of SCAN, or of hash shards. One part for a hash, or without INFO."""
        from mapstate.backends.redis.operations import parts_of

        return parts_of(self._server, self._layout, most)

    def scan_part(self, part: str, page_size: int) -> Iterator[list[str]]:
        """See `ScansParts.scan_part`. Keeps 8 bytes per key. Errors: see `scan`."""
        from mapstate.backends.redis.listing import key_pages
        from mapstate.backends.redis.operations import once_each, walked_part

        walk = walked_part(self._server, self._layout, part, page_size)
        pages = key_pages(walk, self._layout.scanned, self._state, page_size)
        return once_each(self._server, (page for page, _ in pages if page))

    def keep_report(self, report: bytes, most: int) -> None:
        """See `Reports.keep_report`: one transaction."""
        kept = b"%d" % (most - 1)
        self._server.transact([(b"LPUSH", self._reports, report), (b"LTRIM", self._reports, b"0", kept)])

    def reports(self) -> list[bytes]:
        return list(self._server.ask(command(b"LRANGE", self._reports, b"0", b"-1"), 1)[0])

    def drop(self, expected: Version, token: FenceToken) -> Iterator[int]:
        from mapstate.backends.redis.operations import dropped, removed_if

        names = (self._ledger, self._fence, self._claims, self._reports, self._kept_layout)
        return dropped(self, self._state, token, lambda: removed_if(self._server, names, expected[0]))

    def scrub(self) -> list[str]:
        """See `Scrubs.scrub`: rewrites the AOF and the RDB of the server."""
        from mapstate.backends.redis.scrub import scrub_node

        return scrub_node(lambda asked: self._server.ask(asked, 1)[0])

    def checkup(self, replay_horizon: float) -> list[Finding]:
        """See `Checkup.checkup`. Says what the user may not ask for."""
        from mapstate.backends.redis.operations import check_server

        return check_server(self, self._server, self._layout, self._ledger, replay_horizon)

    def _checked(self, keys: Sequence[str], around: bytes) -> tuple[list[bytes | None], list[Any]]:
        """The records, and the replies to ``around``, which is sent before and after.

        MGET replies nothing for a key of another type; raises CorruptRecordError for one. EXISTS finds it: for a few
        keys in the same round trip, for many only where records are absent. No check where the user may not run it.
        """
        layout = self._layout
        packed = layout.pack(keys)
        exist = layout.exist(packed) if len(keys) <= _FEW else b""
        asked = around + layout.get(packed) + around + exist
        replies = self._server.ask(asked, 1 + 2 * bool(around) + bool(exist), optional=bool(exist))
        there = replies.pop() if exist else None
        records: list[bytes | None] = replies.pop(1 if around else 0)
        if layout.reads_types_as_absent and contains_none(records):
            absent = [key for key, record in zip(keys, records, strict=True) if record is None]
            if not exist:
                there = self._server.ask(layout.exist(packed), 1, optional=1)[0]
            if there is not None and there != len(keys) - len(absent):
                self._check_types(absent)
        return records, replies

    def _check_types(self, keys: Sequence[str]) -> None:
        """Raises CorruptRecordError where one of these keys has another type than string."""
        types = self._server.ask(b"".join(self._layout.types(keys)), len(keys), optional=len(keys))
        self._layout.check_types(keys, types)

    def _elsewhere(self, layout: bytes | None, ledger: bytes | None) -> ConfigurationError:
        return another_layout(self._state, self._kept_layout, layout, self._layout_text, has_ledger=ledger is not None)

    def close(self) -> None:
        """Close this process's idle connections to the server. The store stays usable."""
        self._server.pool().disconnect(inuse_connections=False)
