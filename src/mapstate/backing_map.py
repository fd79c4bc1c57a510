"""What a store author writes: a map with bulk get and bulk put, and what it may offer beside it.

`IBackingMap` alone makes a working store. Each capability below is a small protocol of its own; a
store declares one by having its methods, and mapstate asks once, when it opens the store. The
guarantees that hang on each are listed in docs/guarantees.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from mapstate.errors import UsageError
from mapstate.findings import Finding

__all__ = [
    "Backend",
    "Checkup",
    "Claims",
    "Drops",
    "Fence",
    "FenceToken",
    "FencedWrites",
    "FilteredWrites",
    "IBackingMap",
    "JointLedgers",
    "LedgerReads",
    "LedgerStore",
    "NativeRecords",
    "ReadsAhead",
    "Reports",
    "Rewrites",
    "Scan",
    "SpreadFences",
    "Swap",
    "check_lengths",
    "let_go",
    "writer_of",
]

K = TypeVar("K", contravariant=True)
V = TypeVar("V")


@runtime_checkable
class IBackingMap(Protocol[K, V]):
    """A map that is read and written in bulk.

    The stores under mapstate are ``IBackingMap[str, bytes]``: encoded key text to serialized record; those that
    declare `NativeRecords` are ``IBackingMap[str | int, Any]``.
    The layers above them (serialization, caches, map states) have the same two methods over richer
    keys and values. On Spark the calls come from tasks: once per chunk of one to a few thousand
    keys, from one thread.
    """

    def multi_get(self, keys: Sequence[K]) -> list[V | None]:
        """One entry per key, in the order of ``keys``; None where nothing is stored.

        A repeated key is answered at each of its places. No keys: an empty list.
        """
        ...

    def multi_put(self, keys: Sequence[K], values: Sequence[V]) -> None:
        """Store all of them, or raise. Never silently a part.

        Of a repeated key the last value stays. After an error the caller knows nothing about what
        was written, and the attempt is not committed.
        """
        ...


class FenceToken(NamedTuple):
    """Who may write: the attempt ``txid`` of the driver that opened the state as ``epoch``.

    ``closed`` tokens let nobody write. A store that was put back to an older copy gives out the same epoch and
    txid again; the ``nonce``, a random name of the attempt, tells the tasks of the lost attempt from those of the
    new one. Within an epoch nonces ascend.
    """

    epoch: int
    txid: int
    closed: bool = False
    nonce: str = ""

    @property
    def rank(self) -> tuple[int, int, str, bool]:
        """Where the token stands in the order in which a fence only ever moves up.

        By txid first: no ledger gives one out twice, while the epoch of a ledger that was put back overtakes
        that of a fence which was not. A transactional attempt that is begun again has the same txid.
        """
        return self.txid, self.epoch, self.nonce, self.closed


class Fence(NamedTuple):
    """One of several fences of a state: what it is at, None where there is none.

    ``life`` as in the version of a ledger: of the server that holds this fence and the records behind it.
    """

    token: FenceToken | None
    life: Any = None


@runtime_checkable
class LedgerStore(Protocol):
    """Keeps the state's ledger beside its records, changed by compare-and-set. Driver only."""

    def load(self) -> tuple[bytes, Any] | None:
        """The ledger and its version, None where there is none.

        A version is of one life of the store. Where it may have lost writes that it had acknowledged (a server
        that was started again or gave way to its replica, a file that was put back), the same ledger has
        another version: an attempt that was begun before is not committed after.
        """
        ...

    def swap(self, record: bytes, expected: Any | None, fence: FenceToken) -> Any | None:
        """Replace version ``expected`` (None: no ledger) and move the fence, in one atomic write.

        Returns the new version, or None where another version was found; then nothing was written.
        The ledger never expires. Whatever `Claims` were made under the fence before may go, where there is a fence.
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

    For the states of a topology: they are begun together, and they count together. States of stores that
    cannot do this are committed one after the other, and one that is ahead is rolled back; see `mapstate.ledgers`.
    """

    def ledger_place(self) -> Hashable:
        """Where the ledger lies. Ledgers of equal places, of whatever states, can change in one write. Asks nobody."""
        ...

    def swap_all(self, swaps: Sequence[Swap]) -> list[Any] | None:
        """`LedgerStore.swap` of all of them, atomically: the new versions in their order, or None, and none was done.

        The stores are of this store's place and class, of a state each, and one of them is this one. Once when a
        batch begins and once when it commits.
        """
        ...


@runtime_checkable
class LedgerReads(Protocol):
    """Reads the ledger together with records, to spare readers a round trip."""

    def multi_get_with_ledger(self, keys: Sequence[str]) -> tuple[bytes | None, list[bytes | None], bytes | None]:
        """The ledger, then the records, then the ledger again, read in this order.

        All of it from one life of the store (see `LedgerStore.load`): a replica that took over in between, or a copy
        that was put back, is asked for everything again.
        """
        ...


@runtime_checkable
class FencedWrites(Protocol):
    """Refuses, in the store itself, what an attempt writes after it was fenced."""

    def writer(self, token: FenceToken) -> IBackingMap[str, bytes]:
        """A map over the same records whose puts raise FencedError unless ``token`` is the fence.

        The check is atomic with the write. One writer serves one task: a get and the put that
        follows it belong together. It may have a ``close()``.
        """
        ...


@runtime_checkable
class SpreadFences(Protocol):
    """Several fences, each in the place where its part of the records lies, apart from the ledger. Driver only.

    For a store that cannot change ledger and fence in one write. Its `LedgerStore.swap` leaves the fences
    alone; `mapstate.fences` reads them before an attempt begins, raises them when the ledger has it, and
    closes them before it is committed. Claims have to outlive a swap to an open token.
    """

    def fences(self) -> list[Fence]:
        """All of them, always in the same order."""
        ...

    def move_fences(self, before: Sequence[FenceToken | None], after: FenceToken) -> list[Fence]:
        """Each that is at its token of ``before`` moves to ``after``, by compare-and-set; what they are at then.

        May be repeated, and come late: a fence never comes back to where it was.
        """
        ...


@runtime_checkable
class FilteredWrites(Protocol):
    """Refuses, record by record, to replace a newer record by an older one: for a store that has no fence.

    Less than `FencedWrites`: a late writer can still create records, and replace those of before its attempt. They
    carry its own txid, which is dead, and the one rule reads them as the value before. So here claims have to outlive
    their attempt, a try looks into the ledger when it has claimed, and a vacuum rewrites every record, removes none
    and lifts the floor.
    """

    def filtered_writer(self, token: FenceToken) -> IBackingMap[Any, Any]:
        """A map over the same records whose puts raise FencedError where a record's txid is above the token's.

        The check is atomic with the write of its record; others of the same put may be written. For records
        that carry a txid only. The writer has the ``multi_rewrite`` of `Rewrites`, and is never asked to remove.
        """
        ...


def writer_of(store: Any, token: FenceToken, *, has_txids: bool = True) -> Any:
    """The map that an attempt writes to: guarded as well as the store can. Once per task, and by a vacuum.

    ``has_txids`` is False for a non-transactional state, whose records a filter could not judge.
    """
    if isinstance(store, FencedWrites):
        return store.writer(token)
    if has_txids and isinstance(store, FilteredWrites):
        return store.filtered_writer(token)
    return store


def let_go(thing: Any) -> None:
    """Closes a store, a writer, or a state of a user's own, if it has a ``close()``."""
    close = getattr(thing, "close", None)
    if close is not None:
        close()


@runtime_checkable
class ReadsAhead(Protocol):
    """What the writer of a store may offer beside it: the store works on chunks while the task works on another.

    The next chunk is read ahead, and a put need not wait until the store has done it.
    """

    def read_ahead(self, keys: Sequence[Any]) -> None:
        """Says which keys a later ``multi_get`` will ask for. Returns before they are there.

        Called for one chunk after the other, at most two of which are not got yet, and for keys that no put comes to
        before their get. A get of other keys, or a put without a get, works as if nothing had been said. Raises
        FencedError like a get, and what `flush` raises; other trouble shows in the get.
        """
        ...

    def flush(self) -> None:
        """Returns when every put is done. Raises what ``multi_put`` raises.

        A ``multi_put`` while keys that were read ahead are not got yet may return before it is done. What it comes to
        shows in a later call, at the latest in this one, with which a task ends. Without it nothing is known of the
        last put.
        """
        ...


@runtime_checkable
class Rewrites(Protocol):
    """What the writer of a store may offer beside it: replacing and removing records in one write."""

    def multi_rewrite(self, keys: Sequence[Any], values: Sequence[Any | None]) -> None:
        """Replaces records that are there, and removes those whose value is None: all or an error.

        Raises FencedError like ``multi_put``, atomically with the write. What has gone meanwhile stays gone,
        and a record that expires keeps the time it had left. For a vacuum: once per page, after a get of
        its keys. A batch never removes.
        """
        ...


@runtime_checkable
class Claims(Protocol):
    """Lets one try of a task, out of several, be the writer of its partition."""

    def claim(self, txid: int, partition: int, holder: str) -> str:
        """Create-if-absent; returns the holder that has the claim: ``holder`` itself, or the first."""
        ...


@runtime_checkable
class Scan(Protocol):
    """Lists all records of a state."""

    def scan(self, page_size: int) -> Iterator[list[Any]]:
        """Pages of keys, of about ``page_size``.

        Listing starts at the first ``next``: a key that is there from then to the end comes at least once. What lies
        there and is no key of the state does not end the listing: after the last page CorruptRecordError names it, with
        ``keys``, the first ten, and ``count``.
        """
        ...


@runtime_checkable
class Drops(Protocol):
    """Removes a state whole."""

    def drop(self, expected: Any, token: FenceToken) -> Iterator[int]:
        """Removes all records, then all that lies beside them, and the ledger last. For `mapstate.drop`.

        Gives the number of records of each page. ``expected`` is the ledger's version, and ``token`` the open fence
        that was swapped in with it. Raises FencedError where another driver or operator has changed the ledger
        since; what is removed until then stays removed. May be interrupted, and done again under another token. What
        is no key of the state stays: CorruptRecordError names it (``keys``, ``count``) when all else is removed.
        """
        ...


@runtime_checkable
class NativeRecords(Protocol):
    """What a `Backend` declares whose stores have types of their own: they get values and not bytes.

    Its states have the serializer "native". A key is text, or an int of 64 bits where the state has one key column
    of integers. A record is a list with the txid at its end: ``[val]`` non-transactional, ``[val, txid]``,
    ``[curr, prev, txid]``. In it are None, bool, int of 64 bits, float (also NaN and the infinities), bytes, list, dict
    with str keys, and str without NUL. The ledger stays bytes.
    """

    native_records: Literal[True]


@runtime_checkable
class Reports(Protocol):
    """Keeps the last batch reports of a state beside it, for whoever operates it."""

    def keep_report(self, report: bytes, most: int) -> None:
        """Adds one, and lets all but the newest ``most`` go. Driver, once per batch, after its commit.

        Tried once: an error is logged, and the batch counts all the same.
        """
        ...

    def reports(self) -> list[bytes]:
        """Those that are kept, newest first."""
        ...


@runtime_checkable
class Checkup(Protocol):
    """Looks for what in a store's own settings can lose what it acknowledged."""

    def checkup(self, replay_horizon: float) -> list[Finding]:
        """The findings, those that are well included. For an operator, not on the way of a batch.

        ``replay_horizon`` in seconds: how long after a batch it may have to be repeated. Reads only.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """What a URL names: where a store is and how to reach it. Frozen, comparable, picklable.

    Holds no client: `open` makes one in the process that uses it. Its repr shows no password.
    ``shared_between_processes`` is False where two processes that open it see different data; such
    a store is applied on the driver. One that is best with other chunks than 2,000 keys says so: ``chunk_size``.
    """

    shared_between_processes: bool

    def open(self, state: str, *, ttl: float | None = None) -> IBackingMap[str, bytes]:
        """The store of one named state. ``ttl`` in seconds, from a record's last write.

        Called once per task and once by each driver and reader; must be cheap. Raises
        ConfigurationError where a ``ttl`` is not possible.
        """
        ...


def check_lengths(keys: Sequence[Any], others: Sequence[Any], what: str) -> None:
    """UsageError unless there is one of ``others`` per key."""
    if len(keys) != len(others):
        raise UsageError(f"{len(keys)} keys but {len(others)} {what}: there must be one for each key")
