"""The errors of batches that come out of order or with another plan, and of stores that lack what was there.

See `mapstate.protocol.transitions.begin` and `mapstate.protocol.ways_back`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mapstate.errors import (
    FencedError,
    IncompleteBatchError,
    LedgerLostError,
    MissingBatchesError,
    ReplannedBatchError,
    StaleBatchError,
    StateNotFoundError,
    StateOwnershipError,
    StateSchemaError,
    StoreLostError,
    StoreRestartedError,
    UsageError,
    cut,
)
from mapstate.protocol.ledger_record import DROPPER, Commit, InFlight, LedgerRecord, OpenRequest
from mapstate.protocol.rolling import MOST_TILES, RollingDefinition, RollingRecord
from mapstate.protocol.windows import WindowDefinition
from mapstate.schema import KeyField, span_text

Offsets = tuple[str, str]
"""Of a plan: where it starts, and where it ends."""


def stale_batch(ledger: LedgerRecord, batch_id: int, due: int) -> StaleBatchError:
    """The error of a batch that is older than the committed one."""
    return StaleBatchError(
        f"Spark brings batch {batch_id} to state {ledger.state!r}, which waits for batch {due} of this query: the "
        "checkpoint is older than the state. Nothing was written. Put the newer checkpoint back, or restore the "
        "store to the checkpoint's moment. See docs/operating.md#after-a-restored-checkpoint",
        state=ledger.state,
        found=batch_id,
        expected=due,
    )


def missing_batches(ledger: LedgerRecord, batch_id: int, due: int, *, accept: bool = True) -> MissingBatchesError:
    """The error of a batch that comes before the one that is ``due``."""
    way_out = " on_gap='accept' goes on without them." if accept else ""
    if ledger.next_txid == ledger.first_txid and ledger.seed is None:
        return MissingBatchesError(
            f"Spark brings batch {batch_id}, not {due}, but there is no state {ledger.state!r} here yet. Nothing was "
            "written. If the store was emptied: restore a copy and run mapstate rewind, or take a new checkpoint. If "
            "the checkpoint is another state's: take a new one. If "
            "the function made no call for them: with_empty_batches, and a new checkpoint. If "
            "the job is new to the state: run it once with on_gap='accept'. See "
            "docs/operating.md#a-store-that-was-emptied",
            state=ledger.state,
            found=batch_id,
            expected=due,
        )
    return MissingBatchesError(
        f"state {ledger.state!r}: Spark brings batch {batch_id}, but the state has still to get batch {due} of this "
        "query. The store lost batches, another query reset the state, or the function made no call for them, and "
        "needs with_empty_batches. Nothing was written. Rewind the checkpoint (mapstate rewind), or reset the state "
        f"with a new checkpoint, and replay the source.{way_out} See "
        "docs/operating.md#after-a-restored-store-mapstate-rewind",
        state=ledger.state,
        found=batch_id,
        expected=due,
    )


def starts_elsewhere(
    ledger: LedgerRecord, last: Commit, batch_id: int, start: str | None, how: str
) -> ReplannedBatchError:
    """The error of a query that adopts a state and does not start where it ends."""
    return ReplannedBatchError(
        f"state {ledger.state!r} ends at {_cut(last.offsets)}, by query {last.owner}. The query that adopts it starts "
        f"at {_cut(start)}: a source {how}. Nothing was written. Start where the state ends, if that is known; "
        "on_new_owner='adopt_unchecked' compares nothing, 'reset' starts empty. See "
        "docs/operating.md#a-new-checkpoint-where-the-state-ends",
        state=ledger.state,
        batch_id=batch_id,
        found=start,
        expected=last.offsets,
    )


def starts_beyond(plan: Offsets, version: int, last: int) -> ReplannedBatchError:
    """The error of a first batch that has nothing any more of what was planned for it."""
    return ReplannedBatchError(
        f"batch 0 was planned up to version {last} of a Delta table, and in this run it starts at version {version}: "
        "startingVersion='latest' is another one in each run, so the rows of the batch would be lost. Nothing was "
        "written. Start with a new checkpoint, and give startingVersion the number of the first version that counts. "
        "See docs/life.md#delta-and-iceberg",
        batch_id=0,
        found=plan[0],
        expected=plan[1],
    )


def part_of_a_batch(ledger: LedgerRecord, last: Commit) -> IncompleteBatchError:
    """The error of a state whose last batch counts in part."""
    has = f"counts only a part of batch {last.batch_id}, {last.rows} rows as txid {last.txid}"
    return _in_parts(ledger, has, batch_id=last.batch_id, found=last.rows)


def part_in_flight(ledger: LedgerRecord, attempt: InFlight) -> IncompleteBatchError:
    """The error of a transactional state that would skip what a part of the batch has written."""
    has = f"may have written a part of batch {attempt.batch_id}, as txid {attempt.txid}, and would skip its keys"
    return _in_parts(ledger, has, batch_id=attempt.batch_id)


def _in_parts(ledger: LedgerRecord, has: str, **facts: int | None) -> IncompleteBatchError:
    return IncompleteBatchError(
        f"state {ledger.state!r} {has}: the function gave it in parts, or it came again with more rows. Nothing was "
        "written. Union the parts, then reset the state and replay the source, or restore store and checkpoint from "
        "before; on_gap='accept', in one run, goes on without the rest. See "
        "docs/operating.md#each-refusal-and-what-to-do",
        state=ledger.state,
        **facts,
    )


def opened_again(ledger: LedgerRecord) -> FencedError:
    """The error of a driver whose epoch is over."""
    if ledger.owner == DROPPER:
        return FencedError(
            f"state {ledger.state!r} is being removed by mapstate drop. This driver's attempt does not count, and the "
            "driver stops.",
            state=ledger.state,
            epoch=ledger.epoch,
        )
    return FencedError(
        f"state {ledger.state!r} was opened again, as epoch {ledger.epoch} by query {ledger.owner}. A newer driver "
        "has replaced this one, whose attempt does not count. Two running copies of one job are the usual cause: "
        "stop one of them.",
        state=ledger.state,
        epoch=ledger.epoch,
    )


def other_column(state: str, name: str, found: str | None, expected: str) -> StateSchemaError:
    """The error of rows without a column that the job was made for."""
    return StateSchemaError(
        f"state {state!r}: the batch brings the column {name!r} as {found or 'nothing'}, the stream given to newStream "
        f"had it as {expected}. Nothing was written.",
        state=state,
        found=found,
        expected=expected,
    )


def _work(batch_id: int) -> str:
    """What an attempt is at; an operator's has no batch."""
    return f"batch {batch_id}" if batch_id >= 0 else "a correction"


def ran_twice(state: str, batch_id: int) -> IncompleteBatchError:
    """The error of an attempt of which a task ran twice."""
    return IncompleteBatchError(
        f"state {state!r}: a task of {_work(batch_id)} ran twice, so this attempt does not count. Is speculation on, "
        "or do executors keep dying? max_attempts in the spec allows more attempts.",
        state=state,
        batch_id=batch_id,
    )


def not_in_flight(ledger: LedgerRecord, txid: int) -> FencedError:
    """The error of an attempt that another one has followed."""
    attempt = ledger.in_flight
    now = "nothing is" if attempt is None else f"txid {attempt.txid} is"
    if attempt is not None and attempt.txid == txid:
        now = "the state was taken over"
    return FencedError(
        f"state {ledger.state!r}: txid {txid} is not in flight ({now}), so it can never count: another driver or "
        "operator has begun since. An operator runs it again, with the same id if it has one.",
        state=ledger.state,
        txid=txid,
    )


def lost_ledger(state: str) -> LedgerLostError:
    """The error of records without a ledger that says which of them count."""
    return LedgerLostError(
        f"state {state!r} has records but no ledger: it was deleted, evicted or expired. Nothing was written. Stop the "
        "query. Restore ledger and records from one backup; or give the records a ledger with mapstate adopt; or "
        "remove them with mapstate drop. See docs/operating.md#a-lost-ledger",
        state=state,
    )


def no_state(state: str) -> StateNotFoundError:
    """The error of a store without a ledger and without a record."""
    return StateNotFoundError(
        f"there is no state {state!r} here: neither a ledger nor a record was found. Either no batch has run yet, "
        "or the store was emptied, or the name, database number, key prefix or layout is another one. See "
        "docs/operating.md#a-store-that-was-emptied",
        state=state,
    )


def unaccounted(
    state: str, batch_id: int, rows: tuple[int, int, int], partitions: Sequence[int]
) -> IncompleteBatchError:
    """The error of an attempt whose tasks do not account for each row once."""
    sent, arrived, done = rows
    return IncompleteBatchError(
        f"state {state!r}: {sent} rows of {_work(batch_id)} were sent, {arrived} arrived, and {done} are accounted for "
        f"by {len(partitions)} tasks of {len(set(partitions))} partitions. Nothing was committed.",
        state=state,
        found=done,
        expected=sent,
    )


def other_batch(attempt: InFlight, done: Commit) -> UsageError:
    """The error of a commit of another batch than the attempt's."""
    return UsageError(
        f"txid {done.txid} was begun for batch {attempt.batch_id}, not for batch {done.batch_id}. Nothing was "
        "committed."
    )


def changed_all_the_time(state: str, tries: int) -> FencedError:
    """The error of a ledger that others change in each of some tries."""
    return FencedError(
        f"the ledger of state {state!r} could not be changed in {tries} tries: others change it all the time. This "
        "change was not made."
    )


def overtaken(ledger: LedgerRecord, batch_id: int, upstream_txid: int | None) -> FencedError:
    """The error of a driver that brings an earlier commit of the state that is followed."""
    return FencedError(
        f"state {ledger.state!r} counts batch {batch_id} of the state that it follows as of a later commit than "
        f"txid {upstream_txid}. A newer driver has replaced this one. Nothing was written; this driver stops.",
        state=ledger.state,
        txid=upstream_txid,
    )


def replanned_batch(ledger: LedgerRecord, last: Commit, batch_id: int, plan: Offsets, why: str) -> ReplannedBatchError:
    """The error of the committed batch with another plan, where it cannot be counted anew."""
    return ReplannedBatchError(
        f"state {ledger.state!r} counts batch {batch_id} {_range(ledger.previous, last)}. Spark planned it anew, "
        f"from {_cut(plan[0])} to {_cut(plan[1])}: the checkpoint is older than the batch, which cannot be counted "
        f"anew: {why}. Nothing was written. Put the newer checkpoint back, or restore the store from before the batch. "
        "See docs/operating.md#after-a-restored-checkpoint",
        state=ledger.state,
        batch_id=batch_id,
        found=plan[1],
        expected=last.offsets,
    )


def batch_of_before(ledger: LedgerRecord, last: Commit, batch_id: int, plan: Offsets) -> ReplannedBatchError:
    """The error of a batch that counts, and was planned anew after another query took the state."""
    return ReplannedBatchError(
        f"state {ledger.state!r} counted batch {batch_id} of this query before query {last.owner} took it. Spark has "
        f"planned that batch anew since, from {_cut(plan[0])} to {_cut(plan[1])}: the checkpoint is older than the "
        "batch. Nothing was written. Put the newer checkpoint back. See docs/operating.md#after-a-restored-checkpoint",
        state=ledger.state,
        batch_id=batch_id,
        found=plan[1],
        expected=None,
    )


def other_replay(ledger: LedgerRecord, repeat: InFlight, plan: Offsets) -> ReplannedBatchError:
    """The error of a transactional batch that is repeated with another plan."""
    last = ledger.last_commit
    return ReplannedBatchError(
        f"state {ledger.state!r} is transactional and has batch {repeat.batch_id} in flight, which begins at "
        f"{'the start' if last is None else _cut(last.offsets)}. Spark planned it anew, from {_cut(plan[0])} to "
        f"{_cut(plan[1])}, but a replay has to be identical: it skips keys that are written. Nothing was written. "
        "Put the checkpoint with the first plan back. See docs/operating.md#each-refusal-and-what-to-do",
        state=ledger.state,
        batch_id=repeat.batch_id,
        found=plan[1],
        expected=None,
    )


def batch_elsewhere(ledger: LedgerRecord, last: Commit, batch_id: int, plan: Offsets) -> ReplannedBatchError:
    """The error of a batch that does not start where the last one ended."""
    return ReplannedBatchError(
        f"state {ledger.state!r} counts batch {last.batch_id} {_range(ledger.previous, last)}. Spark's batch "
        f"{batch_id} goes from {_cut(plan[0])} to {_cut(plan[1])}, so rows would count twice or not at all: "
        "two copies of one checkpoint were in use, or it was edited. Nothing was written. Put the checkpoint back that "
        "last wrote this state. See docs/operating.md#each-refusal-and-what-to-do",
        state=ledger.state,
        batch_id=batch_id,
        found=plan[0],
        expected=last.offsets,
    )


def _range(previous: Commit | None, last: Commit) -> str:
    """The offsets of the last batch, for a message."""
    known = previous is not None and (previous.owner, previous.batch_id) == (last.owner, last.batch_id - 1)
    start = previous.offsets if known and previous is not None else None
    return f"up to {_cut(last.offsets)}" if start is None else f"from {_cut(start)} to {_cut(last.offsets)}"


def _cut(offsets: str | None) -> str:
    return "unknown offsets" if offsets is None else cut(offsets)


def newer_than_ledger(state: str, unknown: Mapping[Any, int], newest: int) -> StaleBatchError:
    """The error of records with txids that their ledger, read after them, has not given out."""
    key, txid = next(iter(unknown.items()))
    more = f" ({len(unknown) - 1} more keys like it)" if len(unknown) > 1 else ""
    shown = str(key)[:100]
    return StaleBatchError(
        f"state {state!r}, key {shown!r}: the record carries txid {txid}, and the ledger has given out none above "
        f"{newest}{more}. The ledger was restored from an older copy than its records, or another program wrote the "
        "record. Nothing was written. Restore both from one backup, or delete the record.",
        state=state,
        key=str(key),
        keys=[str(other) for other in unknown],
        found=txid,
        newest=newest,
    )


def newer_txids(keys: Iterable[Any], records: Iterable[Any], newest: int) -> dict[Any, int]:
    """The keys whose records carry a txid above ``newest``, with that txid. Not for states without txids."""
    pairs = zip(keys, records, strict=True)
    return {key: record[0] for key, record in pairs if record is not None and record[0] > newest}


def owned_by_another(ledger: LedgerRecord, opening: OpenRequest) -> StateOwnershipError:
    """The error of a query that finds the state of another one."""
    last, attempt = ledger.last_commit, ledger.in_flight
    facts = {"state": ledger.state, "owner": ledger.owner, "asked_by": opening.owner}
    if ledger.last_txid is None and not any(ledger.owners.values()):
        began = "its batches were rolled back"
        if attempt is not None:
            began = f"txid {attempt.txid} is in flight since {attempt.at or '?'}"
        way_out = "start once with on_new_owner='reset'; nothing counts, so nothing is lost"
        if ledger.type == "non-transactional":
            way_out = "remove the state (mapstate drop --force), because its records count"
        return StateOwnershipError(
            f"state {ledger.state!r} belongs to streaming query {ledger.owner}, which has not committed a batch "
            f"({began}); this is query {opening.owner}. Nothing was written. If that query runs, give this job a state "
            f"of its own. If its driver is gone, {way_out}.",
            **facts,
        )
    held = "nothing committed yet" if last is None else f"batch {last.batch_id} committed {last.at}, {last.keys} keys"
    return StateOwnershipError(
        f"state {ledger.state!r} belongs to streaming query {ledger.owner} ({held}); this is query {opening.owner}. "
        "Its checkpoint is new or another one, or a second job uses the state. Nothing was written. Restore the old "
        "checkpoint, or name another state, or choose: on_new_owner='adopt' counts on above the present values, "
        "from where they end; 'reset' starts empty.",
        **facts,
    )


def without_ttl(ledger: LedgerRecord) -> StateSchemaError:
    """The error of a job that asks for no ttl, of records that have one."""
    same = f"ttl={ledger.ttl:g}, or with " if ledger.ttl else ""
    return StateSchemaError(
        f"state {ledger.state!r}: its records were written with a ttl, and the job asks for none, so they would go on "
        f"expiring unseen. Nothing was written. Open it with {same}ttl=0, which ends the ttl of later writes. See "
        "docs/operating.md#options-that-change",
        state=ledger.state,
        found=ledger.ttl,
    )


def lost_store(state: str, *, has_records: bool) -> StoreLostError:
    """The error of a ledger that was there, with the advice that fits."""
    if has_records:
        return StoreLostError(
            f"the ledger of state {state!r} is gone, and its records are there: the key was deleted, evicted or "
            "expired. No ledger was made in its place, and nothing more is committed. Give the records a ledger with "
            "mapstate adopt, or restore both from one backup. See docs/operating.md#a-lost-ledger",
            state=state,
        )
    return StoreLostError(
        f"the ledger of state {state!r} is gone, and so are its records: the store was flushed, restarted empty or "
        "replaced, or the state was dropped. No ledger was made in its place, and nothing more is committed. Restore "
        "the store from a copy and rewind the checkpoint to it (mapstate rewind); without a copy, start over with a "
        "new checkpoint. See docs/operating.md#a-store-that-was-emptied",
        state=state,
    )


def store_restarted(state: str) -> StoreRestartedError:
    """The error of an attempt that began in another incarnation of the store."""
    return StoreRestartedError(
        f"the store of state {state!r} was started again, replaced by its replica or put back while a batch "
        "was written to it (or its keys were recounted meanwhile, which looks the same): it has the ledger, but "
        "may have lost records that it had acknowledged. The attempt is not committed, and can be begun anew.",
        state=state,
    )


def store_put_back(ledger: LedgerRecord, known: LedgerRecord) -> StoreRestartedError:
    """The error of a ledger from a copy that is older than what a running driver has ``known``."""
    return StoreRestartedError(
        f"the store of state {ledger.state!r} was put back to an older copy under a running driver: its ledger is "
        f"of epoch {ledger.epoch} with next txid {ledger.next_txid}, and this driver had epoch {known.epoch} and "
        f"{known.next_txid}. Nothing of this attempt counts. Start the query again: it goes on, or says what the "
        "copy lacks.",
        state=ledger.state,
    )


def counted_in_part(has: str, lacks: str, batch_id: int) -> MissingBatchesError:
    """The error of a batch that one state of a topology counts and another one does not."""
    return MissingBatchesError(
        f"Spark brings batch {batch_id}, which state {has!r} counts and state {lacks!r} of the same topology "
        "does not: another program wrote one of them, or it was restored alone. Nothing was written. Restore "
        "all of them from one moment and rewind the checkpoint, or reset them all.",
        state=lacks,
        expected=batch_id,
    )


def other_windows(ledger: LedgerRecord, opening: OpenRequest) -> StateSchemaError:
    """The error of a job whose windows are not those of the state."""
    definition = None if ledger.windows is None else ledger.windows.definition
    kept, expected = _windows(definition, ledger.keys), _windows(opening.windows, opening.keys)
    return StateSchemaError(
        f"state {ledger.state!r}: its ledger has the windows {kept}, the job asks for {expected}. Nothing was "
        "written. Open the state as it was made, or name another state, with a new checkpoint.",
        state=ledger.state,
        found=kept,
        expected=expected,
    )


def _windows(windows: WindowDefinition | None, keys: Sequence[KeyField]) -> str:
    if windows is None:
        return "(none)"
    spans = (windows.length, windows.slide, windows.offset)
    length, slide, offset = (span_text(span, keys[0].type) for span in spans)
    if windows.sessions:
        return f"(sessions, gap {length})"
    clock = ", by the clock" if windows.by_clock else ""
    return f"(length {length}, slide {slide}, startTime {offset}{clock})"


def rolling_windows_asked_for(
    ledger: LedgerRecord, opening: OpenRequest, *, starts_empty: bool
) -> RollingRecord | None:
    """The rolling windows of a state that a job opens. Raises StateSchemaError if its tiles cannot serve them."""
    kept, asked = ledger.rolling, opening.rolling
    if kept is None and asked is None:
        return None
    after = None
    if kept is not None and asked is not None:
        after = RollingRecord(definition=asked) if starts_empty else kept.adapted(asked)
    if after is None:
        raise _other_rolling_windows(ledger, opening)
    return after


def _other_rolling_windows(ledger: LedgerRecord, opening: OpenRequest) -> StateSchemaError:
    record, asked = ledger.rolling, opening.rolling
    kept = None if record is None else record.definition
    stored, expected = _rolling(kept), _rolling(asked)
    why = "They stay as the state was made"
    if record is not None and kept is not None and asked is not None and record.missing(asked):
        names = ", ".join(window.name for window in record.missing(asked))
        why = (
            f"The state does not keep where {names} begins. A window can be added whose resolution is a multiple of "
            f"{span_text(kept.unit, kept.type)} and of that of a kept window which is not shorter; a lifetime cannot"
        )
    elif kept is not None and asked is not None and (asked.type, asked.offset) == (kept.type, kept.offset):
        why = (
            f"The state's unit stays {span_text(kept.unit, kept.type)}, so these windows, lag and retention need more "
            f"than {MOST_TILES:,} tiles a key: take shorter ones"
        )
    return StateSchemaError(
        f"state {ledger.state!r}: its ledger has the rolling windows {stored}, the job asks for {expected}. Nothing "
        f"was written. {why}. Windows may be left out. Or name another state, with a new checkpoint. See "
        "docs/features.md#changes-at-a-restart",
        state=ledger.state,
        found=stored,
        expected=expected,
    )


def _rolling(rolling: RollingDefinition | None) -> str:
    if rolling is None:
        return "(none)"
    windows = [
        f"{window.name} by {span_text(window.resolution, rolling.type)}" if window.length else window.name
        for window in rolling.windows
    ]
    return f"({', '.join(windows)}, startTime {span_text(rolling.offset, rolling.type)})"
