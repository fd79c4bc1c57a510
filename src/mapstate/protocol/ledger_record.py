"""The ledger's record and its JSON, and the small values that its events take and return, as Spark's plan of a batch.

Nothing here does I/O or decides anything; `mapstate.protocol.transitions` has the rules.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from typing import Any, Literal, NamedTuple

import msgspec

from mapstate.capabilities import FenceToken
from mapstate.protocol.changes import ChangesRecord
from mapstate.protocol.records import CommitView
from mapstate.protocol.rolling import RollingDefinition, RollingRecord
from mapstate.protocol.seeds import SeedRecord
from mapstate.protocol.windows import WindowCommit, WindowDefinition, WindowsRecord
from mapstate.schema import Field, KeyField, OnNewOwner, StateType

FORMAT = 1
FORMAT_WITH_WINDOWS, FORMAT_WITH_CHANGES, FORMAT_WITH_PAGES, FORMAT_WITH_SEED, FORMAT_WITH_ROLLING = 2, 3, 4, 6, 7
"""Of windows, a change log, panes in pages, a seed or a list, rolling windows: an older mapstate refuses them."""
FORMAT_WITHOUT_PACKED = 5
"""Of rolling windows whose tiles were lists only. It becomes the newer one with the next change of the ledger."""

CONTROL_MARK, ALIAS_MARK = NO_LEDGERS = b'{"control":', b'{"alias":'
"""How the control record of a topology and an alias begin, and no ledger; see `protocol.control`, `protocol.alias`."""

OperatorKind = Literal["vacuum", "forget", "correction"]
"""What an operator's attempt does."""

DROPPER = "mapstate drop"
"""The owner in the ledger of a state that is being removed. No query has such an id."""


class PlanDigest(msgspec.Struct, frozen=True):
    """The digests of a `BatchPlan` that a ledger keeps, of 16 hexadecimal digits each. Equal digests mean equal plans.

    ``fingerprint``    of the plan, None if only offsets could be read
    ``previous``       of the plan of the batch before, None likewise
    ``start``          of the start offsets
    ``end``            of the end offsets
    ``upstream_txid``  see `BatchPlan`
    """

    fingerprint: str | None
    previous: str | None
    start: str
    end: str
    upstream_txid: int | None = None


class BatchPlan(NamedTuple):
    """A batch as Spark planned it.

    ``start``, ``end``       offsets: JSON lists with one entry per source, in the order of the sources
    ``planned_at``           the time of planning in milliseconds. The checkpoint has it before the batch runs, so a
                             replay has the same time and a new plan another one. None if it cannot be read
    ``previous_planned_at``  that of the batch before, None likewise
    ``upstream_txid``        for a state that follows another one: the txid of that state's commit of the batch
    ``filters``              the `digest_of_files` of each end behind which the query itself leaves files out
    """

    start: str
    end: str
    planned_at: int | None = None
    previous_planned_at: int | None = None
    upstream_txid: int | None = None
    filters: tuple[str, ...] = ()

    @property
    def offsets(self) -> tuple[str, str]:
        """Where the batch starts, and where it ends."""
        return self.start, self.end

    def digest(self) -> PlanDigest:
        return PlanDigest(
            None if self.planned_at is None else digest_of(f"{self.planned_at} {self.end}"),
            None if self.previous_planned_at is None else digest_of(f"{self.previous_planned_at} {self.start}"),
            digest_of(self.start),
            digest_of(self.end),
            self.upstream_txid,
        )


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A committed batch.

    ``at``                the time of the commit, ISO 8601 in UTC
    ``offsets``           the source's end offsets, where known
    ``run``               the start of the query that brought the batch; within one run no batch comes twice
    ``plan``              Spark's plan of the batch, None without a checkpoint
    ``keys_delta``        the number of keys added less those removed; None if unknown
    ``keys_held``         the number of keys in the state after the batch; None if unknown. `commit` computes it
    ``apart_from``        states of the topology that commit this batch in another write, so that they may lack it
    ``followers``         states that follow this one, and commit the batch later. In the JSON only if there are any
    ``last_txid_before``  the ledger's last txid before the batch: of a commit, a vacuum, or adopted records
    ``windows``           of a state with windows
    ``is_part``           the function gave the batch in parts, and what counts is the first one. In the JSON only if so
    ``seeded``            a seed that has ended: batch 0, loaded part by part. In the JSON only if so
    ``reading``           which reading of the history the owner's batch 0 counts. In the JSON only if it was a seed
    ``forgotten``         of a seed: rows of forgotten keys that were left out. In the JSON only if there are any
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
    followers: tuple[str, ...] = ()
    last_txid_before: int | None = None
    windows: WindowCommit | None = None
    is_part: bool = False
    seeded: bool = False
    reading: str | None = None
    forgotten: int = 0


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that may write while its epoch is the ledger's. An operator's has no batch id.

    ``kind``   what an operator's attempt does. In the JSON unless it is a vacuum
    ``nonce``  a random name, because a store that was put back gives out the same epoch and txid again
    ``at``     the time of its begin, ISO 8601 in UTC; for people only, no rule uses it
    ``is_part``  of a transactional batch that came in parts: it is not begun again. In the JSON only if so
    """

    txid: int
    epoch: int
    batch_id: int | None
    nonce: str = ""
    at: str = ""
    plan: PlanDigest | None = None
    is_part: bool = False
    kind: OperatorKind = "vacuum"

    @property
    def name(self) -> str:
        """What it is, in a sentence."""
        return f"a {self.kind}" if self.batch_id is None else f"batch {self.batch_id}"


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's correction that counts. It can be taken back until a later attempt begins.

    ``txid``              of its attempt
    ``last_txid_before``  the ledger's last txid before it
    ``keys_delta``        the number of keys added less those removed; None if unknown
    """

    txid: int
    last_txid_before: int | None
    keys_delta: int | None


_STORED_NAMES = {"last_commit": "committed", "field_counts": "layouts"}


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, rename=_STORED_NAMES):
    """The record of one state: its schema, its owner, its last commits, and its attempts.

    ``field_counts``  pairs (txid, n): from this txid on, records hold n fields. In the JSON: ``layouts``
    ``owners``        each query id that owned the state since a reset, and the batch id that it must bring next
    ``epoch``         rises with each opening; a driver of an older epoch is fenced
    ``session``       a random name of the opening that made this epoch
    ``first_txid``    where the ledger's txids start
    ``next_txid``     the txid of the next attempt
    ``last_txid``     the highest committed txid, of a batch or a vacuum; None if nothing counts
    ``last_commit``   the last committed batch. In the JSON: ``committed``
    ``previous``      the committed batch before it
    ``in_flight``     the attempt that has begun last and is not committed
    ``dead``          txids below ``last_txid`` that do not count, as inclusive ranges
    ``floor``         records below this txid were reset and read as absent
    ``rewrites``      the number of vacuums begun; each may have purged records
    ``reset_txid``    where the txids of the last reset, or of a seed, start. In the JSON only if there was one
    ``undone``        how many rollbacks and put back watermarks there were. In the JSON only if any
    ``initial_keys``  the number of keys before the first batch, None if unknown
    ``has_had_ttl``   records may expire, so the number of keys is unknown
    ``ttl``           of the records that the last driver wrote, in seconds; 0 once it was ended; None if unknown
    ``windows``       of a state with windows, whose number of keys is unknown
    ``changes``       of a state with a change log
    ``rolling``       of a state with rolling windows
    ``seed``          of a state that is being seeded
    ``operations``    how many entries its list of what operators did has; None without one
    ``correction``    the last commit of any kind, if that is a correction. In the JSON only if so
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
    reset_txid: int = 0
    undone: int = 0
    initial_keys: int | None = None
    has_had_ttl: bool = False
    ttl: float | None = None
    windows: WindowsRecord | None = None
    changes: ChangesRecord | None = None
    rolling: RollingRecord | None = None
    seed: SeedRecord | None = None
    operations: int | None = None
    correction: Correction | None = None

    def keys_held(self) -> int | None:
        """The number of keys with a committed value, None if unknown. See docs/operating.md#how-many-keys."""
        if self.has_had_ttl or self.windows is not None or self.seed is not None:
            return None
        return self.initial_keys if self.last_commit is None else self.last_commit.keys_held

    @property
    def is_adopted(self) -> bool:
        """Whether another query than the present owner made the last commit."""
        return self.last_commit is not None and self.last_commit.owner != self.owner

    def with_keys_held(self, held: int | None) -> LedgerRecord:
        """Copy the ledger with another number of keys."""
        if self.last_commit is None:
            return msgspec.structs.replace(self, initial_keys=held)
        return msgspec.structs.replace(self, last_commit=msgspec.structs.replace(self.last_commit, keys_held=held))

    @property
    def time_type(self) -> str | None:
        """The type of the times of its windows; None for a state without."""
        if self.windows is not None:
            return self.keys[0].type
        return None if self.rolling is None else self.rolling.definition.type

    def last_windows(self) -> WindowCommit | None:
        """What the last commit did to the windows; None before one."""
        return None if self.last_commit is None else self.last_commit.windows

    def may_lose_last_batch(self) -> bool:
        """Whether the next start may roll the last batch back: a state in another store may lack it."""
        last = self.last_commit
        return last is not None and bool(last.apart_from) and self.next_txid == last.txid + 1

    def final_mark(self) -> int:
        """The watermark by which windows are final: no batch that made it can be taken back, unless by an operator."""
        done = self.last_windows() or WindowCommit()
        return done.safe if self.may_lose_last_batch() else done.watermark

    def contents(self) -> tuple[Any, ...]:
        """Equal for two ledgers under which an opaque state has equal committed values, with no vacuum between."""
        purged, last = None if self.windows is None else self.windows.purged, self.last_commit
        return self.first_txid, self.floor, self.last_txid, last and last.at, self.dead, self.rewrites, purged

    def first_fields(self) -> set[str]:
        """The names of the fields that the state had when it began to count, or when it was reset."""
        start = max(self.first_txid, self.reset_txid)
        count = max((n for txid, n in self.field_counts if txid <= start), default=0)
        return {field.name for field in self.fields[:count]}

    def view(self) -> CommitView:
        """The txids that count under this ledger."""
        return CommitView(self.last_txid, self.dead, self.floor, self.first_txid)

    def fence(self) -> FenceToken:
        """The fence under this ledger. It is open only for an attempt of this epoch."""
        attempt = self.in_flight
        if attempt is not None and attempt.epoch == self.epoch:
            return FenceToken(self.epoch, attempt.txid, nonce=attempt.nonce)
        below = self.next_txid if attempt is None else attempt.txid  # a transactional txid may be begun again
        return FenceToken(self.epoch, below - 1, closed=True)


_encoder = msgspec.json.Encoder()
_NULLS = b"ttl windows changes rolling seed operations correction taken newest reading".split()
_ZEROS = b"height forgotten expired reset_txid undone".split()
_FLAGS = (b',"followers":[]', b',"is_part":false', b',"seeded":false', b',"kind":"vacuum"')
_DEFAULTS = (*(b',"%s":null' % name for name in _NULLS), *(b',"%s":0' % name for name in _ZEROS), *_FLAGS)


def encode_ledger(record: LedgerRecord) -> bytes:
    """Encode a ledger as JSON, which can be read in the store's own shell. What it lacks it does not name."""
    data = _encoder.encode(record)  # in a string, quotes are escaped
    for default in _DEFAULTS:
        data = data.replace(default, b"")
    return data


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A driver's arguments to `open_ledger`.

    ``clock_txid``  where a new ledger's txids start
    ``ttl``         of the driver's records, in seconds; 0 ends that of the state, None asks for none
    ``windows``     of a state with windows
    ``rolling``     of a state with rolling windows
    ``changes``     the transactions whose changed keys are kept; 0 ends the change log, None asks for none
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
    ttl: float | None = None
    windows: WindowDefinition | None = None
    rolling: RollingDefinition | None = None
    changes: int | None = None


class Attempt(NamedTuple):
    """One try of a driver at a batch: its txid, and the view under which it reads records."""

    batch_id: int
    txid: int
    view: CommitView
    token: FenceToken


def format_of(
    windows: object, changes: object, rolling: object = None, seed: object = None, operations: object = None
) -> int:
    """The format of a ledger that has these, or None."""
    if seed is not None or operations is not None:
        return FORMAT_WITH_SEED
    if rolling is not None:
        return FORMAT_WITH_ROLLING
    if isinstance(windows, WindowsRecord) and windows.height:
        return FORMAT_WITH_PAGES
    if changes is not None:
        return FORMAT_WITH_CHANGES
    return FORMAT if windows is None else FORMAT_WITH_WINDOWS


def by_partition(offset: Any) -> dict[tuple[str, str], int] | None:
    """The numbers of an offset by topic and partition, as Kafka has them; None for an offset of another form."""
    topics = offset.values() if isinstance(offset, dict) else [None]
    if not all(isinstance(ends, dict) and all(type(end) is int for end in ends.values()) for ends in topics):
        return None
    return {(topic, partition): end for topic, ends in offset.items() for partition, end in ends.items()}


def may_be_equal(left: str | None, right: str | None) -> bool:
    """Whether two fingerprints are the same, as far as both are known."""
    return left == right or left is None or right is None


def last_own(ledger: LedgerRecord) -> Commit | None:
    """The last commit, if it is the present owner's. Another query's batch ids and offsets cannot be compared."""
    last = ledger.last_commit
    return None if last is None or last.owner != ledger.owner else last


def plan_of(commit: Commit, previous: Commit | None) -> PlanDigest | None:
    """The plan of a commit; without one, as much of it as the offsets tell. ``start`` is "" if unknown."""
    if commit.plan is not None or commit.offsets is None:
        return commit.plan
    start = ""
    try:
        if previous is not None and (previous.owner, previous.batch_id) == (commit.owner, commit.batch_id - 1):
            start = "" if previous.offsets is None else digest_of(_source_offsets(previous.offsets))
        return PlanDigest(None, None, start, digest_of(_source_offsets(commit.offsets)))
    except (ValueError, TypeError):  # a source may have offsets that are no JSON
        return None


def _source_offsets(offsets: str) -> str:
    """The offsets of a `Commit` in the form of a `BatchPlan`."""
    return json.dumps([_own_offset(entry) for entry in json.loads(offsets)], sort_keys=True, separators=(",", ":"))


def _own_offset(entry: Any) -> Any:
    """The offset alone: a file source's entry also has the source's name and the files read."""
    is_file = isinstance(entry, dict) and isinstance(entry.get("source"), str) and "logOffset" in entry
    return {"logOffset": entry["logOffset"]} if is_file else entry


def digest_of(text: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class AlreadyCommitted(NamedTuple):
    """The batch is committed: Spark brings it again because its own commit log lacks it.

    ``commit`` is None if another owner has committed since: later records hide those of the batch.
    """

    batch_id: int
    commit: Commit | None
    view: CommitView


def now() -> str:
    """The present time as ledgers have it: ISO 8601 in UTC, to the millisecond."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def are_times(texts: list[str]) -> bool:
    """Whether the texts are times of a ledger or a report: ISO 8601 with an offset, or empty if unknown."""
    try:
        return all(not text or dt.datetime.fromisoformat(text).tzinfo is not None for text in texts)
    except ValueError:
        return False
