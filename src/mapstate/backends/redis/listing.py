"""Walks through the keys of a Redis, of one server or a cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

from mapstate.backends.redis.connection import INFO, Server, incarnation_of
from mapstate.backends.redis.layout import Layout
from mapstate.errors import StoreUnavailableError, UsageError
from mapstate.findings import not_listed

_CURSOR = re.compile(r"(end|\d{1,20})-([0-9a-f]*)", re.ASCII)


class ScanPosition(NamedTuple):
    """Redis' own cursor, None at the end, and the server that gave it; None at the start, empty if unknown."""

    at: bytes | None = b"0"
    server: str | None = None


Walk = Iterator[tuple[list[Any], ScanPosition]]
"""The replies of SCAN or the like, without their cursors, each with the position after it."""


def _passed(_: bytes, after: bytes, listed: list[bytes]) -> tuple[bytes | None, list[bytes]]:
    return (None if after == b"0" else after), listed


def walked(
    server: Server,
    scan: Callable[[bytes], bytes],
    position: ScanPosition,
    step: Callable[[bytes, bytes, list[bytes]], tuple[bytes | None, list[bytes]]] = _passed,
) -> Walk:
    """Walk through one server. ``scan`` packs the command for a cursor.

    ``step`` gets this cursor, the next one and what was found; it returns the cursor to go on with, None at the end,
    and what of it counts.

    Raises StoreUnavailableError where the server restarted or failed over meanwhile: a cursor means nothing to another
    process.
    """
    at, began_in = position
    asks_info = True
    while at is not None:
        asked = scan(at) + (INFO if asks_info else b"")
        (after, page, *foreign), *info = server.ask(asked, 1 + 2 * asks_info, optional=2 * asks_info)
        at, page = step(at, after, page)
        if asks_info or at is None:
            name = digest_of(incarnation_of(*(info or server.ask(INFO, 2, optional=2))))
            if began_in not in (None, name):
                raise torn(server, f"Redis at {server.settings.address} restarted or failed over")
            began_in, asks_info = name, False
        yield [page, *foreign], ScanPosition(at, began_in)


def walked_nodes(cluster: Any, shape: Any, scan: Callable[[bytes], bytes], only: slice = slice(None)) -> Walk:
    """Walk through one node of a cluster after the other, ``only`` some of them. ``cluster`` is a `ClusterMap`.

    Raises StoreUnavailableError at the end where a slot moved or a node failed over meanwhile.
    """
    for node in [*shape.masters][only]:
        at: bytes | None = b"0"
        while at is not None:
            ((after, *page),) = cluster.ask_node(node, [scan(at)]).found
            at = None if after == b"0" else after
            yield page, ScanPosition(at)
    if shape.moving or cluster.shape() != shape:
        raise torn(cluster, f"slots of the cluster at {cluster.settings.address} moved, or a node failed over,")


def torn(where: Any, reason: str) -> StoreUnavailableError:
    """The error for a listing that may be incomplete. ``where`` is the `Server` or `ClusterMap`."""
    message = f"state {where.state!r}: {reason} during the scan, which may have missed keys: scan again"
    if where.state == "*":
        message = f"{reason} while its states were listed, so some may be missing: list them again"
    return StoreUnavailableError(
        message,
        state=where.state,
        store=where.settings.address,
    )


def key_pages(
    walk: Walk, scanned: Callable[[list[bytes], list[str]], list[str]], state: str, page_size: int
) -> Iterator[tuple[list[str], ScanPosition]]:
    """Yield pages of the keys of a state, each with the position after it. The last one may be empty.

    ``scanned`` is `Layout.scanned`. Raises CorruptRecordError at the end for names that are no keys.
    """
    page, unlisted = list[str](), list[str]()
    for (some, *foreign), position in walk:
        page += scanned(some, unlisted)
        unlisted += [repr(name.decode()) for names in foreign for name in names]
        if position.at is None or len(page) >= page_size:
            yield page, position
            page = []
    if unlisted:
        problem = f"the Redis key {unlisted[0]} is no key of this state: not UTF-8, or of another type. Something else"
        more = "writes under this state's name. It was left as it is. Delete it, or restore what was there."
        raise not_listed(state, unlisted, f"{problem} {more}")


def key_pages_from(
    server: Server, layout: Layout, cursor: str, page_size: int
) -> Iterator[tuple[list[str], ScanPosition]]:
    """`key_pages` of one server, after a `cursor_of` them; empty for the start. Raises UsageError for no cursor."""
    match = _CURSOR.fullmatch(cursor or "0-")
    if match is None or (match[1] != "end" and int(match[1]) >= 1 << 64):
        raise UsageError(f"this is no cursor of a scan of state {server.state!r}. Nothing was read.")
    position = ScanPosition(None if match[1] == "end" else match[1].encode(), match[2]) if cursor else ScanPosition()
    walk = walked(server, lambda at: layout.scan(at, page_size), position)
    return key_pages(walk, layout.scanned, server.state, page_size)


def cursor_of(position: ScanPosition) -> str:
    """The cursor that a reader gets for a position."""
    return f"{'end' if position.at is None else position.at.decode()}-{position.server}"


def digest_of(text: bytes | None) -> str:
    """A short name for an incarnation of a server, or for the shape of a cluster; empty where that is unknown."""
    return "" if text is None else blake2b(text, digest_size=8).hexdigest()
