"""The removal of a whole state from Redis: its records, page by page, through the fence."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from mapstate.backends.redis.connection import Server
from mapstate.backends.redis.wire import EXEC, MULTI, command
from mapstate.capabilities import FenceToken, close_if_possible
from mapstate.errors import FencedError
from mapstate.findings import Unreadable

_REMOVED = 1000  # records on a page of a state that is dropped


def removed(store: Any, state: str, token: FenceToken) -> Generator[int, None, Unreadable]:
    """Remove all records under an open fence. Yields the number of each page, returns the keys that are no records."""
    writer: Any = store.writer(token)
    foreign = Unreadable(state)
    try:
        for page in foreign.listed(store.scan(_REMOVED)):
            keys, _ = foreign.read(store.multi_get, page)  # which raises for keys of another type
            writer.multi_rewrite(keys, [None] * len(keys))
            yield len(keys)
    finally:
        close_if_possible(writer)
    return foreign


def dropped(
    store: Any, server: Server, state: str, token: FenceToken, *, ledger: bytes, names: Sequence[bytes]
) -> Iterator[int]:
    """See `Drops.drop`: page by page of records, through the fence; then the ``names`` in one transaction.

    The first of them is the Redis key of the ``ledger``.
    """
    foreign = yield from removed(store, state, token)
    conn, replies = server.retrying(lambda: server.watch(server.take(), names[0], b"", 0))
    if replies[0] != ledger:
        server.unwatch(conn)
        raise overtaken(state, token)
    done = server.retrying(lambda: server.finish(conn, MULTI + command(b"DEL", *names) + EXEC, 3), retries=0)[-1]
    if done is None:
        raise overtaken(state, token)
    if foreign.count:
        raise foreign.error()


def overtaken(state: str, token: FenceToken) -> FencedError:
    """The error for a ledger that changed while its state is dropped."""
    return FencedError(
        f"the ledger of state {state!r} has changed: the removal with txid {token.txid} ends here. Run it again.",
        state=state,
        txid=token.txid,
    )
