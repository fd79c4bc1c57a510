"""What a ledger keeps of the change log: which transactions it has. Pure, as `mapstate.protocol.windows`.

`mapstate.maps.change_log` has its records, and docs/protocol.md says why a reader that follows misses nothing.
"""

from __future__ import annotations

import msgspec

from mapstate.errors import StateSchemaError
from mapstate.protocol.windows import PaneChange


class ChangesRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The transactions of which the state keeps the keys that they wrote.

    ``kept``     how many; 0 for a change log that was ended
    ``since``    the first of them. A begin moves it, and never back
    ``removed``  those below have no records any more; between it and ``since`` there may be some
    ``width``    the highest partition that has written any, and one
    ``undone``   those that have counted and were rolled back; also the last one before ``since``, where somebody may be
    """

    kept: int
    since: int
    removed: int
    width: int = 0
    undone: tuple[int, ...] = ()

    def begun(self, last_txid: int | None) -> ChangesRecord:
        """After a begin, above the last transaction that counts."""
        return self.kept_from(self.since if last_txid is None else last_txid + 1 - self.kept)

    def kept_from(self, since: int) -> ChangesRecord:
        """Without the transactions below ``since``, of which an attempt may then remove the records."""
        since = max(self.since, since)
        undone = tuple(txid for txid in self.undone if txid >= since - 1)
        return msgspec.structs.replace(self, since=since, undone=undone)

    def rolled_back(self, txid: int) -> ChangesRecord:
        """After the rollback of a transaction that somebody may have read. A vacuum forgets that it is dead."""
        return msgspec.structs.replace(self, undone=(*self.undone, txid))

    def committed(self, change: PaneChange) -> ChangesRecord:
        """After a commit. ``change.purged`` are transactions, of which the records are removed up to the last one."""
        removed = max((txid + 1 for txid in change.purged), default=self.removed)
        return msgspec.structs.replace(self, removed=removed, width=max(self.width, change.width))

    def emptied(self, next_txid: int) -> ChangesRecord:
        """After a reset, across which nobody can follow."""
        return msgspec.structs.replace(self, since=next_txid, undone=())

    def has_flaw(self, next_txid: int) -> bool:
        """Whether this is damaged: no event leaves it in a ledger with that next txid."""
        return min(self.kept, self.removed, self.width) < 0 or not self.removed <= self.since <= next_txid


def changes_asked_for(
    state: str, changes: ChangesRecord | None, asked: int | None, next_txid: int
) -> ChangesRecord | None:
    """The change log of a state that a job opens. Raises StateSchemaError where the job would leave it with a gap."""
    if asked is None:
        if changes is None or not changes.kept:
            return changes
        raise StateSchemaError(
            f"state {state!r}: it keeps the changes of its last {changes.kept} transactions, and the job does not ask "
            "for them, so those who follow it would miss keys. Nothing was written. Open it with "
            f"changes={changes.kept}, or with changes=0 to end that.",
            state=state,
            found=changes.kept,
        )
    if changes is None:
        return ChangesRecord(kept=asked, since=next_txid, removed=next_txid) if asked else None
    since = changes.since if changes.kept or not asked else next_txid  # an ended one has a gap
    return msgspec.structs.replace(changes, kept=asked, since=since)
