"""Which keys were written since a commit, for those who follow a state that keeps its changes."""

from __future__ import annotations

from collections import Counter

import msgspec

from mapstate.errors import ChangesGoneError, StoreLostError, UsageError
from mapstate.keys import Key
from mapstate.maps.change_log import logged_keys
from mapstate.maps.pane_index import is_native_integer
from mapstate.protocol.changes import ChangesRecord
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader.committed import CommittedReads, mark_of


class Position(msgspec.Struct, frozen=True):
    """How far somebody has followed a state: ``txid`` is its last commit, ``origin`` where the state's txids begin.

    ``mark`` is that of cursors, and ``version`` the state's own name, to which an alias led. They are empty in what was
    stored before there were any.
    """

    txid: int
    origin: int
    mark: str = ""
    version: str = ""


def position_of(ledger: LedgerRecord) -> Position:
    """The position of somebody who has all that counts in the ledger."""
    _check_keeps(ledger)
    origin = _origin(ledger)
    return Position(origin - 1 if ledger.last_txid is None else ledger.last_txid, origin, mark_of(ledger), ledger.state)


def asked_for(ledger: LedgerRecord, start: Position, end: Position) -> range:
    """The transactions whose keys take a follower from ``start`` to ``end``.

    That is each between, whether it counts or not: its values may have been seen before it was rolled back. If that of
    ``start`` was rolled back, it too. Raises ChangesGoneError.
    """
    undone = () if ledger.changes is None else ledger.changes.undone
    first = start.txid + (start.txid not in undone)
    check_kept(ledger, start, first)
    check_is_of(ledger, end)
    return range(first, max(start.txid, end.txid) + 1)


def changed_keys(reads: CommittedReads, start: Position, end: Position) -> list[Key]:
    """See `StateReader.changed_keys`. The keys of the transactions that are `asked_for`."""
    opened = reads.opened(newest=True)
    ledger = opened.ledger
    txids = asked_for(ledger, start, end)
    counts: Counter[int] = Counter()
    texts: dict[str, None] = {}
    lost: int | None = None
    for txid, keys in logged_keys(reads.store, ledger, txids):
        if keys is None:
            lost = txid
            continue
        counts[txid] += len(keys)
        texts.update(dict.fromkeys(keys))
    check_kept(reads.ledger(), start, txids.start)  # what was removed meanwhile was not kept any more
    for commit in (ledger.previous, ledger.last_commit):
        if commit is not None and txids.start <= commit.txid <= end.txid and counts[commit.txid] != commit.keys:
            lost = commit.txid
    if lost is not None:
        raise StoreLostError(
            f"state {ledger.state!r}: the log of the keys that txid {lost} wrote is not whole: records were evicted, "
            "expired or deleted. Nothing was given out. Restore the store, or read the whole state anew, with a new "
            "checkpoint.",
            state=ledger.state,
            txid=lost,
        )
    read = [int(text) for text in texts] if is_native_integer(ledger) else list(texts)
    return list(opened.keys.decode_all(read))


def _origin(ledger: LedgerRecord) -> int:
    return max(ledger.first_txid, ledger.floor)


def _check_keeps(ledger: LedgerRecord) -> ChangesRecord:
    changes = ledger.changes
    if changes is None or not changes.kept:
        raise UsageError(
            f"state {ledger.state!r} keeps no changes, so it cannot be followed. Nothing was read. Its job has to open "
            "it with changes=1000, say: opaque(url, changes=1000)."
        )
    return changes


def check_is_of(ledger: LedgerRecord, position: Position) -> None:
    """Raise ChangesGoneError for a position of another state, owner or incarnation."""
    if position.origin != _origin(ledger) or position.mark not in ("", mark_of(ledger)):
        raise _gone(ledger, position, "the position is of another state, or of before a drop, a reset or another owner")


def check_kept(ledger: LedgerRecord, start: Position, first: int) -> None:
    """Raise ChangesGoneError unless the keys from txid ``first`` on are kept, for somebody at ``start``."""
    changes = _check_keeps(ledger)
    check_is_of(ledger, start)
    if start.txid >= ledger.next_txid:
        raise _gone(ledger, start, f"txid {start.txid} is not there, so the store was put back")
    if first < changes.since:
        why = f"the changes since txid {start.txid} are not kept any more, only those from {changes.since} on"
        raise _gone(ledger, start, why)


def _gone(ledger: LedgerRecord, position: Position, why: str) -> ChangesGoneError:
    return ChangesGoneError(
        f"state {ledger.state!r}: {why}. Nothing was given out. Read the whole state anew, with a new checkpoint; "
        "and let the state keep the changes of more transactions, if readers fall so far behind.",
        state=ledger.state,
        txid=position.txid,
    )
