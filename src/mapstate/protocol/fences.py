"""Fences apart from the ledger: verified before an attempt begins, advanced then, and closed before it commits.

For stores of `SpreadFences`, such as a cluster, in which each part of the records has a server that can fail over or be
restored by itself. docs/protocol.md has the reason for each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mapstate.capabilities import Fence, FenceToken, SpreadFences
from mapstate.errors import FencedError, MissingBatchesError, StaleBatchError, StoreRestartedError

_TRIES = 8


class Fences:
    """The fences of one state, for its driver. One attempt at a time."""

    def __init__(self, store: SpreadFences, state: str) -> None:
        self._store = store
        self._state = state
        self._known: list[Fence] = []
        self._open: FenceToken | None = None
        self._incarnations: list[Any] = []

    def verify(self, newest: int, last: int | None) -> None:
        """Check, before the ledger's write that begins an attempt, that no fence is ahead of the ledger or behind it.

        Args:
            newest: The highest txid that the ledger has given out.
            last: The last committed txid; None skips the check of fences that are behind.

        Raises:
            StaleBatchError: A fence is above ``newest``. The ledger is older than the records, or another driver has
                begun since it was read.
            MissingBatchesError: A fence was neither closed at ``last`` nor advanced by a later attempt. Its server
                lost acknowledged writes.

        """
        self._known = self._store.fences()
        for i, fence in enumerate(self._known):
            if fence.token is not None and fence.token.txid > newest:
                raise StaleBatchError(
                    f"state {self._state!r}: fence {i} is at txid {fence.token.txid}, but the ledger has given out "
                    f"none above {newest}: the ledger was restored from an older copy than the records. No record "
                    "was written. Restore all servers from one backup, or start the state under another name.",
                    state=self._state,
                    found=fence.token.txid,
                    expected=newest,
                )
        self._check_closed(self._known, last)

    def advance_to(self, token: FenceToken, last: int | None) -> None:
        """Move each fence up to ``token``, after that write. ``last`` as in `verify`.

        Raises FencedError if a fence is already higher, and MissingBatchesError as `verify` does.
        """
        for _ in range(_TRIES):
            if any(fence.token is not None and fence.token.rank > token.rank for fence in self._known):
                break
            moved = self._store.move_fences([fence.token for fence in self._known], token)
            if all(fence.token == token for fence in moved):
                self._open, self._incarnations = token, [fence.incarnation for fence in moved]
                return
            self._known = moved
            self._check_closed(moved, last)
        raise self._fenced(token)

    def close(self) -> None:
        """Close the fences after the last task and before the commit, so that no server takes further writes.

        A server keeps its acknowledged writes in order: one that holds the closed fence holds the records, too.
        Closing twice is no error. Raises FencedError if a newer attempt has begun. Raises StoreRestartedError if a
        fence or its server's incarnation has changed: records of this attempt may be lost.
        """
        token = self._open
        if token is None:
            return
        closed = token._replace(closed=True)
        moved = self._store.move_fences([token] * len(self._incarnations), closed)
        for fence, incarnation in zip(moved, self._incarnations, strict=True):
            if fence.token is not None and fence.token.rank > closed.rank:
                raise self._fenced(token)
            if fence.token != closed or fence.incarnation != incarnation:
                raise StoreRestartedError(
                    f"a server with records of state {self._state!r} restarted, failed over, or gave its part to "
                    "another server while a batch was written: it may have lost acknowledged records. The attempt is "
                    "not committed, and can be begun anew.",
                    state=self._state,
                )

    def _check_closed(self, fences: Sequence[Fence], last: int | None) -> None:
        for i, (token, _) in enumerate(fences):
            if last is not None and (token is None or (token.txid, token.closed) < (last, True)):
                position = "gone" if token is None else f"at txid {token.txid}{'' if token.closed else ', open'}"
                raise MissingBatchesError(
                    f"state {self._state!r}: txid {last} was committed, but fence {i} is {position}: its server lost "
                    "acknowledged writes, and records with them. No record was written. Restore all servers from "
                    "one backup and rewind the checkpoint, or reset the state and replay the source. on_gap='accept' "
                    "goes on with the present records. See docs/operating.md#after-a-restored-store-mapstate-rewind",
                    state=self._state,
                    found=None if token is None else token.txid,
                    expected=last,
                )

    def _fenced(self, token: FenceToken) -> FencedError:
        return FencedError(
            f"state {self._state!r}: txid {token.txid} of epoch {token.epoch} may not write: a newer attempt or driver "
            "has taken over. This attempt does not count.",
            state=self._state,
            txid=token.txid,
            epoch=token.epoch,
        )
