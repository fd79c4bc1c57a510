"""The optional capabilities of a store: small protocols that a store declares by having their methods.

mapstate checks once, when it opens the store. docs/guarantees.md lists the guarantees that depend on each.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from mapstate.backing_map import IBackingMap, close_if_possible
from mapstate.findings import Finding

__all__ = [
    "Checkup",
    "Claims",
    "Drops",
    "Fence",
    "FenceToken",
    "FencedWrites",
    "FilteredWrites",
    "JointLedgers",
    "LedgerReads",
    "LedgerStore",
    "ListsStates",
    "NativeRecords",
    "Probes",
    "ReadsAhead",
    "Reports",
    "Rewrites",
    "Scan",
    "Scrubs",
    "Snapshots",
    "SpreadFences",
    "Swap",
    "close_if_possible",
]


class FenceToken(NamedTuple):
    """Who may write: the attempt ``txid`` of the driver that opened the state as ``epoch``.

    With a ``closed`` token nobody may write. A store that is restored from an older copy gives out the same epoch and
    txid again. The ``nonce``, a random name of the attempt, tells the tasks of the lost attempt from those of the new
    one. Within an epoch nonces ascend.
    """

    epoch: int
    txid: int
    closed: bool = False
    nonce: str = ""

    @property
    def rank(self) -> tuple[int, int, str, bool]:
        """The token's rank: a fence only ever moves to a higher one.

        By txid first: no ledger gives one out twice. The epoch of a ledger that was restored from a copy overtakes that
        of a fence that was not. A transactional attempt that is begun anew has the same txid.
        """
        return self.txid, self.epoch, self.nonce, self.closed


class Fence(NamedTuple):
    """One of several fences of a state: its token, or None where it has never been set.

    ``incarnation`` names that of the server that holds this fence and the records behind it; see `LedgerStore.load`.
    """

    token: FenceToken | None
    incarnation: Any = None


@runtime_checkable
class LedgerStore(Protocol):
    """Keeps the state's ledger beside its records, changed by compare-and-set. Driver only."""

    def load(self) -> tuple[bytes, Any] | None:
        """Return the ledger and its version, None where there is none.

        A version belongs to one incarnation of the store, which ends where acknowledged writes may be lost: with a
        restart, a failover, or a file that is restored from a copy. The same ledger then has another version, so an
        attempt that began before is not committed after.
        """
        ...

    def swap(self, record: bytes, expected: Any | None, fence: FenceToken) -> Any | None:
        """Replace version ``expected`` (None: no ledger) and move the fence, in one atomic write.

        Returns the new version, or None where the store has another version; then nothing was written. The ledger
        never expires. A store with a fence may remove the `Claims` that were made under the fence before.
        """
        ...


class Swap(NamedTuple):
    """One of several ledgers that change in one write: ``store.swap(record, expected, fence)``."""

    store: Any
    record: bytes
    expected: Any | None
    fence: FenceToken


@runtime_checkable
class JointLedgers(Protocol):
    """Changes the ledgers of several states in one write, with their fences. Driver only.

    For the states of a topology, whose attempts begin together and count together. States of other stores are
    committed one after the other, and a state that is ahead is rolled back; see `mapstate.protocol.ledgers`.
    """

    def commit_domain(self) -> Hashable:
        """Name the ledgers that one write can change together: those of equal commit domains. Makes no request."""
        ...

    def swap_all(self, swaps: Sequence[Swap]) -> list[Any] | None:
        """Do all of these `LedgerStore.swap`, atomically. Returns the new versions in order, or None: none was done.

        The stores have this store's commit domain and class, hold a state each, and include this one. Called once when
        a batch begins and once when it commits; and when an alias is swapped, beside ledgers that stay: of several,
        those whose record is the one that is there are compared, and their fences and claims are left alone.
        """
        ...


@runtime_checkable
class LedgerReads(Protocol):
    """Reads the ledger together with records, which saves readers a round trip."""

    def multi_get_with_ledger(self, keys: Sequence[str]) -> tuple[bytes | None, list[bytes | None], bytes | None]:
        """Return the ledger, the records, and the ledger once more, read in this order.

        All of it comes from one incarnation of the store (see `LedgerStore.load`): after a failover in between,
        everything is read again.
        """
        ...


@runtime_checkable
class FencedWrites(Protocol):
    """Refuses late writers in the store itself: what an attempt writes after it was fenced."""

    def writer(self, token: FenceToken) -> IBackingMap[str, bytes]:
        """Return a map over the same records whose puts raise FencedError unless ``token`` is the fence.

        The check is atomic with the write. One writer serves one task: a get and the put after it belong together. It
        may have a ``close()``.
        """
        ...


@runtime_checkable
class SpreadFences(Protocol):
    """Several fences, each beside its part of the records and apart from the ledger. Driver only.

    For a store that cannot change ledger and fence in one write. Its `LedgerStore.swap` leaves the fences alone.
    `mapstate.protocol.fences` reads them before an attempt begins, advances them when the ledger has the attempt, and
    closes them before its commit. Claims must outlive a swap to an open token.
    """

    def fences(self) -> list[Fence]:
        """Return all of them, always in the same order."""
        ...

    def move_fences(self, before: Sequence[FenceToken | None], after: FenceToken) -> list[Fence]:
        """Move each fence from its token of ``before`` to ``after``, by compare-and-set. Returns all fences after it.

        The call may be repeated, and may arrive late: a fence never comes back to an earlier token.
        """
        ...


@runtime_checkable
class FilteredWrites(Protocol):
    """Refuses, record by record, to replace a newer record by an older one: for a store without a fence.

    Weaker than `FencedWrites`: a late writer can still create records, and replace those from before its attempt. They
    carry its own, orphaned txid, and the one rule reads the value before. So claims must outlive their attempt, a try
    reads the ledger after its claim, and a vacuum rewrites every record, removes none and lifts the floor.
    """

    def filtered_writer(self, token: FenceToken) -> IBackingMap[Any, Any]:
        """Return a map over the same records whose puts raise FencedError for a record with a txid above the token's.

        The check is atomic with the write of its record; other records of the same put may be written. For records
        with a txid only. The writer has the ``multi_rewrite`` of `Rewrites`, and mapstate never removes with it.
        """
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """What a writer may offer: the store works on some chunks while the task works on another.

    The next chunk is read ahead, and a put need not wait for its reply.
    """

    def read_ahead(self, keys: Sequence[Any]) -> None:
        """Announce the keys of a later ``multi_get``. Returns before their records have arrived.

        Called for chunk after chunk, at most two ahead of their gets, and for keys that no put writes before their
        get. A get of other keys, or a put without a get, works as without an announcement. Raises FencedError like a
        get, and what `flush` raises; the get raises other errors.
        """
        ...

    def flush(self) -> None:
        """Return when every put is done. Raises what ``multi_put`` raises.

        While a read ahead is under way, ``multi_put`` may return before it is done. A later call raises its error, at
        the latest this one, with which a task ends. Without it, nothing is known of the last put.
        """
        ...


@runtime_checkable
class Rewrites(Protocol):
    """What a writer may offer: replacing and removing records in one write."""

    def multi_rewrite(self, keys: Sequence[Any], values: Sequence[Any | None]) -> None:
        """Replace records that exist, and remove those whose value is None: all of them, or raise.

        Raises FencedError like ``multi_put``, atomically with the write. A record that is gone meanwhile stays gone,
        and one that expires keeps the time it has left. For a vacuum, once per page, after a get of its keys; and for
        the windows that a batch removes, once per chunk, without a get. A batch removes records in no other way.
        """
        ...


@runtime_checkable
class Claims(Protocol):
    """Lets one try of a task, out of several, be the writer of its partition."""

    def claim(self, txid: int, partition: int, holder: str) -> str:
        """Create a claim if absent. Returns its holder: ``holder`` itself, or the first one."""
        ...


@runtime_checkable
class Scan(Protocol):
    """Lists all records of a state."""

    def scan(self, page_size: int) -> Iterator[list[Any]]:
        """Yield pages of about ``page_size`` keys.

        The scan starts at the first ``next``: a key that exists from then to the end is listed at least once. A name
        that is no key of the state does not end the scan: after the last page it raises CorruptRecordError, with the
        first ten as ``keys``, and their ``count``.
        """
        ...


@runtime_checkable
class Drops(Protocol):
    """Removes a whole state."""

    def drop(self, expected: Any, token: FenceToken) -> Iterator[int]:
        """Remove all records, then all that is beside them, and the ledger last. For `mapstate.operations.drop`.

        Yields the number of records of each page. ``expected`` is the ledger's version, and ``token`` the open fence
        that was swapped in with it. Raises FencedError where another driver or operator has changed the ledger since;
        removed records stay removed. An interrupted removal can be repeated under another token. A name that is no key
        of the state stays, and raises CorruptRecordError (``keys``, ``count``) after all else is removed.
        """
        ...


@runtime_checkable
class Scrubs(Protocol):
    """Removes what a store keeps underneath: bytes of records that were replaced or removed."""

    def scrub(self) -> list[str]:
        """Rewrite the store's files, and return where such bytes may still be, in words; nothing if nowhere.

        For an operator, after a forget. It may take as long as a copy of the whole store, other states included, and
        as much room. No value changes. It may be repeated.
        """
        ...


@runtime_checkable
class ListsStates(Protocol):
    """What a `Backend` may offer: the states of its store."""

    def states(self) -> Iterator[list[tuple[str, bytes]]]:
        """Yield pages of states: of each, its name and its ledger as it is stored. Reads only.

        For an operator: `mapstate ls`, and the completion of names. The pages come in any order, and a page may be
        empty. No state comes twice; one that is made or removed meanwhile may be missing. A long listing works in small
        requests, between which a server answers others. Neither names nor ledgers are checked: another program may
        have written them.
        """
        ...


def state_in(ledger: bytes) -> str | None:
    """The state that a stored ledger names; None where it cannot be read."""
    try:
        state = json.loads(ledger)["state"]
    except (ValueError, TypeError, KeyError):
        return None
    return state if isinstance(state, str) else None


@runtime_checkable
class Snapshots(Protocol):
    """What a `Backend` may offer: a state as of one moment."""

    def open_snapshot(self, state: str) -> IBackingMap[str, bytes]:
        """Return the store of a state as of one moment, between this call and the end of its first read.

        It has the same capabilities as what `Backend.open` returns, and a ``close()``. Every read is of that moment,
        whatever others write meanwhile. A write raises UsageError, and so does a call after ``close()``. For an
        operator's long reads: `mapstate export`.
        """
        ...


@runtime_checkable
class NativeRecords(Protocol):
    """Declared by a `Backend` whose stores have types of their own: they get values, not bytes.

    Its states have the serializer "native". A key is text, or an int of 64 bits where the state has one key column of
    integers. A record is a list with the txid at its end: ``[val]`` non-transactional, ``[val, txid]`` transactional,
    ``[curr, prev, txid]`` opaque. It holds None, bool, int of 64 bits, float (also NaN and the infinities), bytes,
    list, dict with str keys, and str without NUL. With blocks a key is text, and a record ``[bytes, txid]``. The ledger
    stays bytes.
    """

    native_records: Literal[True]


@runtime_checkable
class Probes(Protocol):
    """Says, before a query starts, whether a job can work with this store."""

    def probe(self) -> None:
        """Raise what the first write would: no answer, a right that the user lacks, a server of another kind.

        Changes nothing of a state. Driver, once per state and start.
        """
        ...


@runtime_checkable
class Reports(Protocol):
    """Keeps the last batch reports of a state beside it, for its operator."""

    def keep_report(self, report: bytes, most: int) -> None:
        """Add a report, and remove all but the newest ``most``. Driver, once per batch, after its commit.

        Tried once: the driver logs an error, and the batch counts all the same.
        """
        ...

    def reports(self) -> list[bytes]:
        """Return the kept reports, newest first."""
        ...


@runtime_checkable
class Checkup(Protocol):
    """Looks for settings of a store with which it can lose acknowledged writes."""

    def checkup(self, replay_horizon: float) -> list[Finding]:
        """Return the findings, also those that need no action. For an operator, never called by a batch. Reads only.

        ``replay_horizon`` in seconds: how long after a batch it may have to be replayed.
        """
        ...
