"""The states of a Redis: their ledgers are found by name, with SCAN, which lets the server answer others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from redis.crc import key_slot

from mapstate.backends.redis.connection import Server
from mapstate.backends.redis.layout import escaped
from mapstate.backends.redis.wire import INFO, command, incarnation_of
from mapstate.errors import StoreUnavailableError

_LEDGER = b"!ledger"
_COUNT = 1000  # keys of the database that one request walks through: about a millisecond of the server's time

Page = list[tuple[str, bytes]]


class _Named(msgspec.Struct):
    """The part of a ledger that names its state."""

    state: str


_decoder = msgspec.json.Decoder(_Named)


def states_on_server(server: Server, prefix: bytes) -> Iterator[Page]:
    """See `ListsStates.states`. Raises StoreUnavailableError where the server restarted or failed over meanwhile."""
    cursor, seen = b"0", set[bytes]()
    began_in: bytes | None = None
    while True:
        first = cursor == b"0"
        scan = command(b"SCAN", cursor, b"MATCH", escaped(prefix) + b"*" + _LEDGER, b"COUNT", b"%d" % _COUNT)
        (cursor, found), *info = server.ask(scan + INFO, 3, optional=2)
        incarnation = incarnation_of(*info)
        began_in = incarnation if first else began_in
        if incarnation != began_in:
            address = server.settings.address
            raise StoreUnavailableError(
                f"Redis at {address} restarted or failed over while its states were listed, so some may be missing: "
                "list them again",
                store=address,
            )
        new = [key for key in dict.fromkeys(found) if key not in seen]
        seen.update(new)
        ledgers = server.ask(command(b"MGET", *new), 1)[0] if new else []
        yield _page([key[len(prefix) : -len(_LEDGER)] for key in new], ledgers)
        if cursor == b"0":
            return


def states_in_cluster(cluster: Any, prefix: bytes) -> Iterator[Page]:
    """See `ListsStates.states`: one node after the other. ``cluster`` is a `ClusterMap`.

    Raises StoreUnavailableError where a slot moved or a node failed over meanwhile.
    """
    from mapstate.backends.redis.cluster_map import Request

    shape, seen = cluster.shape(), set[bytes]()
    start, end = prefix + b"{", b"}" + _LEDGER
    for node in shape.masters:
        cursor = None
        while cursor != b"0":
            scan = command(b"SCAN", cursor or b"0", b"MATCH", escaped(start) + b"*" + end, b"COUNT", b"%d" % _COUNT)
            ((cursor, found),) = cluster.ask_node(node, [scan]).found
            names = [key[len(start) : -len(end)] for key in dict.fromkeys(found)]
            new = [name for name in names if name not in seen and not {*b"{}"} & {*name}]
            seen.update(new)
            # MGET replies nothing for a key of another type, where GET raises.
            asked = [Request(key_slot(name), (command(b"MGET", start + name + end),)) for name in new]
            yield _page(new, [reply.found[0][0] for reply in cluster.ask(asked)])
    if shape.moving or cluster.shape() != shape:
        raise StoreUnavailableError(
            "slots of the cluster moved, or a node failed over, while its states were listed, so some may be missing: "
            "list them again"
        )


def the_one_state(server: Server, records: str) -> Iterator[Page]:
    """The state whose records have a name of their own (``records`` in the URL), which its ledger names."""
    ledger = server.ask(command(b"GET", records.encode() + _LEDGER), 1)[0]
    yield [] if ledger is None else [(_named(ledger) or records, ledger)]


def _page(names: list[bytes], ledgers: list[bytes | None]) -> Page:
    """The states of a page, without those under another prefix that begins with this one."""
    page = []
    for name, ledger in zip(names, ledgers, strict=True):
        text = name.decode(errors="backslashreplace")
        own = None if ledger is None else _named(ledger)
        elsewhere = own is not None and own != text and text.endswith(own)
        if ledger is not None and not elsewhere:
            page.append((text, ledger))
    return page


def _named(ledger: bytes) -> str | None:
    """The state that a ledger names; None where it cannot be read."""
    try:
        return _decoder.decode(ledger).state
    except (msgspec.MsgspecError, ValueError):
        return None
