"""The ledger's record, and the small values that its events take and return.

Nothing here does I/O or decides anything: `mapstate.protocol.transitions` has the rules.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import Any, NamedTuple

import msgspec

from mapstate.capabilities import FenceToken
from mapstate.protocol.records import CommitView
from mapstate.schema import Field, KeyField, OnNewOwner, StateType

__all__ = [
    "DROPPER",
    "FORMAT",
    "AlreadyCommitted",
    "Attempt",
    "Commit",
    "InFlight",
    "LedgerRecord",
    "OpenRequest",
    "PlanDigest",
    "clock_txid",
    "is_time",
    "now",
]

FORMAT = 1

_EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC).timestamp()

DROPPER = "mapstate drop"
"""The owner in the ledger of a state that is being removed. No query has such an id."""


class PlanDigest(msgspec.Struct, frozen=True):
    """What a ledger keeps of a `BatchPlan`: the same digests, the same plan. Each is 16 hexadecimal digits.

    ``fingerprint`` is that of the plan, ``previous`` that of the batch before it; None if only offsets could be read.
    ``upstream_txid`` is as in `BatchPlan`.
    """

    fingerprint: str | None
    previous: str | None
    start: str
    end: str
    upstream_txid: int | None = None


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that counts. ``at`` is ISO 8601 in UTC; ``offsets`` the source's, where known.

    ``run`` names the start of the query that brought it: within one, no batch comes twice. ``plan`` is what Spark had
    planned for it, None where no checkpoint says. ``apart_from`` names the states of the topology whose commit of this
    batch is a write of its own, so that they may lack it.
    ``keys_delta`` is how many keys the attempt added, less those that it removed; None if it cannot tell.
    ``keys_held`` is how many keys the state holds after the batch; None if unknown. `commit` computes it.
    ``last_txid_before`` is the ledger's last txid before the batch: of another commit, a vacuum, or adopted records.
    """

    batch_id: int
    txid: int
    owner: str
    rows: int = 0
    keys: int = 0
    at: str = ""
    offsets: str | None = None
    run: str | None = None
    plan: PlanDigest | None = None
    keys_delta: int | None = None
    keys_held: int | None = None
    apart_from: tuple[str, ...] = ()
    last_txid_before: int | None = None


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that may write, if its epoch is still the ledger's. No batch id: a vacuum.

    ``nonce`` is a random name: a store that was put back gives out the same epoch and txid again. ``at`` is
    when it was begun, ISO 8601 in UTC, for people: nothing is decided by it.
    """

    txid: int
    epoch: int
    batch_id: int | None
    nonce: str = ""
    at: str = ""
    plan: PlanDigest | None = None


_STORED_NAMES = {"last_commit": "committed", "field_counts": "layouts"}


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, rename=_STORED_NAMES):
    """The state's own record: who owns it, what is committed, in flight, dead. `_STORED_NAMES` are the JSON's.

    ``owners``     each query id that ever owned the state, and the batch id it must bring next
    ``session``    a random name of the opening that made this epoch
    ``last_txid``  the highest committed txid, of a batch or a vacuum; None if nothing counts
    ``last_commit``  the last committed batch; ``previous`` the one before it
    ``dead``       txids below ``last_txid`` that do not count, as inclusive ranges
    ``field_counts``    pairs (txid, n): from this txid on, records hold n fields
    ``rewrites``   how many vacuums have begun: since then records may have been purged
    ``initial_keys`` how many keys the state held before its first batch, None if unknown
    ``has_had_ttl``   no commit knows how many keys such a state holds
    """

    format: int = FORMAT
    state: str
    type: StateType
    serializer: str
    keys: tuple[KeyField, ...]
    fields: tuple[Field, ...]
    field_counts: tuple[tuple[int, int], ...]
    owner: str
    owners: dict[str, int]
    epoch: int
    session: str
    first_txid: int
    next_txid: int
    last_txid: int | None = None
    last_commit: Commit | None = None
    previous: Commit | None = None
    in_flight: InFlight | None = None
    dead: tuple[tuple[int, int], ...] = ()
    floor: int = 0
    rewrites: int = 0
    initial_keys: int | None = None
    has_had_ttl: bool = False

    def keys_held(self) -> int | None:
        """The number of keys with a committed value. None if unknown; see docs/operating.md#how-many-keys."""
        if self.has_had_ttl:
            return None
        return self.initial_keys if self.last_commit is None else self.last_commit.keys_held

    def with_keys_held(self, held: int | None) -> LedgerRecord:
        """The same ledger with another number of keys."""
        if self.last_commit is None:
            return msgspec.structs.replace(self, initial_keys=held)
        return msgspec.structs.replace(self, last_commit=msgspec.structs.replace(self.last_commit, keys_held=held))

    def contents(self) -> tuple[Any, ...]:
        """Equal for two ledgers under which an opaque state has the same committed values, and no vacuum between."""
        return self.first_txid, self.floor, self.last_txid, self.dead, self.rewrites

    def view(self) -> CommitView:
        """What counts, as of this ledger."""
        return CommitView(self.last_txid, self.dead, self.floor, self.first_txid)

    def fence(self) -> FenceToken:
        """Who may write under this ledger. Open only for an attempt begun in this epoch."""
        at = self.in_flight
        if at is not None and at.epoch == self.epoch:
            return FenceToken(self.epoch, at.txid, nonce=at.nonce)
        below = self.next_txid if at is None else at.txid  # a transactional txid may be begun again
        return FenceToken(self.epoch, below - 1, closed=True)


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver brings to `open_ledger`. ``clock_txid`` is where a new ledger's txids start.

    ``has_ttl``: the driver's records have a ttl.
    """

    state: str
    type: StateType
    serializer: str
    keys: tuple[KeyField, ...]
    fields: tuple[Field, ...]
    owner: str
    session: str = ""
    clock_txid: int
    on_new_owner: OnNewOwner = "refuse"
    has_ttl: bool = False


class Attempt(NamedTuple):
    """An attempt: its txid and the view under which it judges what it reads."""

    batch_id: int
    txid: int
    view: CommitView
    token: FenceToken


class AlreadyCommitted(NamedTuple):
    """The batch counts already: Spark died before its own commit log said so.

    ``commit`` is None where another owner has committed since, so that the batch's own records can
    no longer be told from later ones.
    """

    batch_id: int
    commit: Commit | None
    view: CommitView


def clock_txid() -> int:
    """Where a new ledger's txids start: deciseconds since 2026.

    Batches are slower than ten a second in the long run, so no earlier incarnation of the same name can have
    given out this txid.
    """
    return max(0, int((time.time() - _EPOCH) * 10))


def now() -> str:
    """The time as the ledger writes it."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def is_time(text: str) -> bool:
    """Whether the text is a time as ledgers and reports have it: ISO 8601 with an offset; empty where none is known."""
    try:
        return not text or dt.datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
