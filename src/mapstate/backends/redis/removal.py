"""The removal of a whole state from Redis: its records, page by page, through the fence."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mapstate.capabilities import FenceToken, close_if_possible
from mapstate.errors import FencedError
from mapstate.findings import Unreadable

__all__ = ["overtaken", "removed"]

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


def overtaken(state: str, token: FenceToken) -> FencedError:
    """The error for a ledger that changed while its state is dropped."""
    return FencedError(
        f"the ledger of state {state!r} has changed: the removal with txid {token.txid} ends here. Run it again.",
        state=state,
        txid=token.txid,
    )
