r"""The change log: which keys each transaction wrote, for those who follow a state without a scan.

It is made as the pane index is, of records under the state's own fence, where the txid stands for a pane::

    \P|#txid|partition       head: [number of full chunks, keys of the open chunk ...]
    \P|#txid|partition|n     a full chunk: [keys ...]

A record is written once, by the attempt with that txid, and tells nothing of values. That of an attempt that does not
count stays for as long: a batch may be rolled back after somebody has seen it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mapstate.capabilities import Rewrites
from mapstate.keys import INDEX, StoreKey
from mapstate.maps.pane_index import PaneIndex, Slice, index_codec, index_keys, key_pages, slices
from mapstate.maps.serialized import SerializedMap, writer_of
from mapstate.protocol.ledger_record import Attempt, LedgerRecord

_MARK = "#"


class ChangeLog(PaneIndex):
    """The keys that one task writes: collects them, and writes them at its end."""

    def note(self, keys: Sequence[StoreKey], bases: Sequence[Any] = (), partials: Sequence[Any] = ()) -> None:  # noqa: ARG002
        """The keys of a chunk, all of which are written."""
        self.new.setdefault(f"{_MARK}{self.txid}", []).extend(map(str, keys))


def is_of_log(key: StoreKey) -> bool:
    """Whether a key is of the change log, and not of a pane index."""
    return str(key).startswith(INDEX + _MARK)


def is_removable(ledger: LedgerRecord, key: StoreKey) -> bool:
    """Whether a record of the change log is of a transaction that is not kept any more, as attempts leave it behind."""
    changes = ledger.changes
    return changes is None or logged_txid(key) < changes.since


def logged_txid(key: StoreKey) -> float:
    """The transaction of a record of the change log; infinite for a key that is none."""
    txid = str(key).removeprefix(INDEX + _MARK).partition("|")[0]
    return int(txid) if txid.isdigit() else math.inf


def logged_keys(store: Any, ledger: LedgerRecord, txids: Iterable[int]) -> Iterator[tuple[int, list[str] | None]]:
    """The keys of some transactions as text, page by page, each with its txid. None for a chunk that is gone."""
    read = _reading(store, ledger)
    for part in _slices(store, ledger, txids):
        txid = int(part.pane.removeprefix(_MARK))
        gone: list[str] = []
        for page in key_pages(read, part, gone.append):
            yield txid, None if gone else page


def remove_logs(store: Any, ledger: LedgerRecord, attempt: Attempt, most: int) -> range:
    """Remove the records of at most ``most`` transactions that are not kept. Returns which. Raises FencedError."""
    changes = ledger.changes
    if changes is None:
        raise AssertionError("a state with a change log says so in its ledger")
    gone = range(changes.removed, min(changes.since, changes.removed + most))
    with writer_of(store, attempt.token) as writer:
        codec = index_codec(ledger.serializer, ledger.state)
        for part in _slices(store, ledger, gone):
            keys = index_keys(part)
            if isinstance(writer, Rewrites):
                writer.multi_rewrite(keys, [None] * len(keys))
                continue
            writer.multi_get(keys)  # a put belongs to the get before it
            SerializedMap(writer, codec).multi_put(keys, [(attempt.txid, None, None)] * len(keys))
    return gone


def _slices(store: Any, ledger: LedgerRecord, txids: Iterable[int]) -> Iterator[Slice]:
    width = 0 if ledger.changes is None else ledger.changes.width
    return slices(_reading(store, ledger), (f"{_MARK}{txid}" for txid in txids), width)


def _reading(store: Any, ledger: LedgerRecord) -> Callable[[list[str]], list[Any]]:
    """Reads records of the log. Each was written once, so no view is needed, and it is there also if it is dead."""
    codec = index_codec(ledger.serializer, ledger.state)

    def read(keys: list[str]) -> list[Any]:
        return [None if record is None else record[1] for record in codec.loads(keys, store.multi_get(keys))]

    return read
