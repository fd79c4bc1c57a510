"""Fences apart from the ledger: looked at before an attempt begins, raised then, and closed before it commits.

For stores of `SpreadFences`, such as a cluster, where each part of the records has a server of its own that
can fail over or be put back by itself. What each step rests on is in docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mapstate.backing_map import Fence, FenceToken, SpreadFences
from mapstate.errors import FencedError, MissingBatchesError, StaleBatchError, StoreRestartedError

__all__ = ["Fences"]

_TRIES = 8


class Fences:
    """The fences of one state, for its driver. One attempt at a time."""

    def __init__(self, store: SpreadFences, state: str) -> None:
        self._store = store
        self._state = state
        self._found: list[Fence] = []
        self._open: FenceToken | None = None
        self._lives: list[Any] = []

    def look(self, newest: int, last: int | None) -> None:
        """Before the ledger's write that begins an attempt: no fence is ahead of the ledger, and none behind.

        Raises StaleBatchError where one is above ``newest``, the highest txid that the ledger has given out: the ledger
        is older than the records, or another driver has begun since it was read. MissingBatchesError where one was not
        closed at ``last``, the last committed txid, or raised by a later attempt: its server lost what it had
        acknowledged. None: do not mind.
        """
        self._found = self._store.fences()
        for at, one in enumerate(self._found):
            if one.token is not None and one.token.txid > newest:
                raise StaleBatchError(
                    f"state {self._state!r}: fence {at} is at txid {one.token.txid}, but the ledger has given out none "
                    f"above {newest}: the ledger was put back from an older copy than the records. Nothing was "
                    "written. Restore all servers from one backup, or start the state under another name.",
                    state=self._state,
                    found=one.token.txid,
                    expected=newest,
                )
        self._check_closed(self._found, last)

    def raise_to(self, token: FenceToken, last: int | None) -> None:
        """After that write: each fence moves up to ``token``. ``last`` as in `look`.

        Raises FencedError where a fence is higher already, and MissingBatchesError as `look` does.
        """
        for _ in range(_TRIES):
            if any(one.token is not None and one.token.rank > token.rank for one in self._found):
                break
            found = self._store.move_fences([one.token for one in self._found], token)
            if all(one.token == token for one in found):
                self._open, self._lives = token, [one.life for one in found]
                return
            self._found = found
            self._check_closed(found, last)
        raise self._fenced(token)

    def close(self) -> None:
        """Before the commit, when all tasks are done: nobody writes any more, and each server shows that it has all.

        A server keeps what it acknowledged in order, so one that has its fence closed has the records too.
        Raises FencedError where a newer attempt has begun, and StoreRestartedError where a fence, or the life of
        the server that holds it, is not what it was: records of this attempt may be lost. Closing twice is no error.
        """
        token = self._open
        if token is None:
            return
        closed = token._replace(closed=True)
        found = self._store.move_fences([token] * len(self._lives), closed)
        for fence, life in zip(found, self._lives, strict=True):
            if fence.token is not None and fence.token.rank > closed.rank:
                raise self._fenced(token)
            if fence.token != closed or fence.life != life:
                raise StoreRestartedError(
                    f"a server with records of state {self._state!r} was started again, replaced by its replica, or "
                    "gave its part to another one while a batch was written: it may have lost records that it had "
                    "acknowledged. The attempt is not committed, and can be begun anew.",
                    state=self._state,
                )

    def _check_closed(self, found: Sequence[Fence], last: int | None) -> None:
        for at, (token, _) in enumerate(found):
            if last is not None and (token is None or (token.txid, token.closed) < (last, True)):
                there = "gone" if token is None else f"at txid {token.txid}{'' if token.closed else ', open'}"
                raise MissingBatchesError(
                    f"state {self._state!r}: txid {last} was committed, but fence {at} is {there}: the server that "
                    "holds it lost what it had acknowledged (failed over, restarted or put back), and records with it."
                    " Nothing was written. Restore all servers from one backup and rewind the checkpoint, or reset the "
                    "state and replay the source. on_gap='accept' goes on with what is there.",
                    state=self._state,
                    found=None if token is None else token.txid,
                    expected=last,
                )

    def _fenced(self, token: FenceToken) -> FencedError:
        return FencedError(
            f"state {self._state!r}: txid {token.txid} of epoch {token.epoch} may not write: a newer attempt or driver "
            "has taken over.",
            state=self._state,
            txid=token.txid,
            epoch=token.epoch,
        )
