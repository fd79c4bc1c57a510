"""The removal of a whole state from Redis: its records, page by page, through the fence; then all that is beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mapstate.backends.redis.connection import Server
from mapstate.backends.redis.wire import EXEC, MULTI, command
from mapstate.capabilities import FenceToken, close_if_possible
from mapstate.errors import FencedError
from mapstate.findings import Unreadable

_REMOVED = 1000  # records on a page of a state that is dropped


def dropped(store: Any, state: str, token: FenceToken, finish: Callable[[], bool]) -> Iterator[int]:
    """See `Drops.drop`: page by page of records under an open fence.

    Then ``finish`` removes the other keys, and returns False where the ledger has changed.
    """
    writer: Any = store.writer(token)
    foreign = Unreadable(state)
    try:
        for page in foreign.listed(store.scan(_REMOVED)):
            keys, _ = foreign.read(store.multi_get, page)  # which raises for keys of another type
            writer.multi_rewrite(keys, [None] * len(keys))
            yield len(keys)
    finally:
        close_if_possible(writer)
    if not finish():
        raise FencedError(
            f"the ledger of state {state!r} has changed: the removal with txid {token.txid} ends here. Run it again.",
            state=state,
            txid=token.txid,
        )
    if foreign.count:
        raise foreign.error()


def removed_if(server: Server, names: Sequence[bytes], ledger: bytes) -> bool:
    """Remove the ``names`` in one transaction, if the first of them, the ledger's, is at ``ledger``."""
    conn, replies = server.watched(names[0])
    if replies[0] != ledger:
        server.unwatch(conn)
        return False
    return server.tell(MULTI + command(b"DEL", *names) + EXEC, 3, conn)[-1] is not None
