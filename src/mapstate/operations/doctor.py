"""Examine a state and its store for trouble ahead: for an operator, without Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from mapstate import errors
from mapstate.backends import opened
from mapstate.backing_map import Backend
from mapstate.batch_report import BatchReport
from mapstate.capabilities import Checkup, Claims, FencedWrites, FilteredWrites, LedgerStore, Scan
from mapstate.errors import CorruptRecordError, StoreError
from mapstate.findings import Finding, Severity, Unreadable
from mapstate.keys import StoreKey, is_index_key
from mapstate.maps.record_pass import CodecWithIndex, all_records, check_known, measured_fields
from mapstate.protocol import upkeep
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.rolling import RollingRecord
from mapstate.protocol.seed_refusals import being_seeded
from mapstate.protocol.stored_ledger import read_ledger, record_pages
from mapstate.protocol.windows import NEVER, Named, WindowCommit
from mapstate.reader import CountedKeys, open_reader
from mapstate.reader.committed import CommittedReads
from mapstate.reader.scans import read_reports
from mapstate.reader.windows import WindowReads
from mapstate.schema import number_of, span_text, time_text
from mapstate.serializers import key_codec, record_codec
from mapstate.serializers.tiles import tiles_of

_MOST_DEAD = 1000
_PAGE = 1000
_PATIENCE = 600.0
_COUNTS = 3
_MOST = 10  # panes and reports
_BACK = (
    "A wrong time or clock may have moved the watermark. Stop the query, set the clock right or leave such rows out, "
    "and put it back: mapstate advance --back-to TIME."
)

OnPage = Callable[[int], None]
"""Called after each page of a reading, with the number of keys so far."""


def examine(
    backend_or_url: Backend | str,
    state: str,
    *,
    replay_horizon: float = 86_400.0,
    count_keys: bool = True,
    on_page: OnPage | None = None,
) -> list[Finding]:
    """Examine the ledger, the last batch reports, every record, and the store. It only reads.

    It reads all records page by page, with a few small requests. SQLite's own check reads the whole file.

    Args:
        backend_or_url: The store of the state.
        state: The state's name.
        replay_horizon: Seconds after a batch for which it may have to be repeated.
        count_keys: Read all records once more to count them, at most three times if batches are committed meanwhile.
        on_page: Called after each page with the number of keys so far; each reading begins anew.

    Returns:
        The findings, also those that need no action. Reports and records that cannot be read are findings.

    Raises:
        StateNotFoundError: There is no such state.
        SeedingError: The state is being seeded.
        CorruptRecordError: The ledger cannot be read.
        StoreError: The store failed.

    """
    with opened(backend_or_url, state) as store:
        ledger = read_ledger(store, state)
        if ledger.seed is not None:
            raise being_seeded(ledger)
        reports: list[BatchReport] = []
        findings = [*_capabilities(store), *_reports(store, ledger, reports), _dead(ledger), _last_batch(ledger)]
        windows = WindowReads(CommittedReads(store, state, "committed", {}))
        findings += window_findings(ledger, named=lambda *times: windows.named(None, *times)[1], reports=reports)
        if isinstance(store, Scan):
            records = list(_records(store, ledger, on_page))
            findings += records
            if count_keys and all(finding.severity == "ok" for finding in records):
                findings.append(_keys(backend_or_url, state, on_page))
        if isinstance(store, Checkup):
            findings += store.checkup(replay_horizon)
        return findings


def _capabilities(store: Any) -> Iterator[Finding]:
    for capability, missing in (
        (LedgerStore, "of two drivers that open the state at the same moment, both may go on"),
        (FencedWrites, "writes of an orphaned attempt's tasks are not refused"),
        (Claims, "two tries of one task can mix their writes in one attempt"),
        (Scan, "the state cannot be scanned or vacuumed"),
    ):
        filters = capability is FencedWrites and isinstance(store, FilteredWrites)
        if not isinstance(store, capability) and not filters:
            yield Finding(
                "warning",
                "store",
                f"the store offers no {capability.__name__}: {missing}",
                "all that mapstate help guarantees lists per store",
                "Run one driver at a time, without speculation; or use another store.",
            )


def _reports(store: Any, ledger: LedgerRecord, reports: list[BatchReport]) -> Iterator[Finding]:
    """Fills in the reports, too."""
    try:
        reports += read_reports(store, ledger.state)
    except (CorruptRecordError, StoreError) as error:
        advice = "Delete reports that another program wrote, or let this user read them (on Redis: LRANGE)."
        yield Finding("warning", "batch reports", error.message, "reports of this state", advice)
    yield _in_flight(ledger, reports)


def _in_flight(ledger: LedgerRecord, reports: list[BatchReport]) -> Finding:
    """Whether an attempt is in flight for longer than the last batches explain."""
    attempt = ledger.in_flight
    expected = "nothing in flight, or a driver at work"
    if attempt is None or attempt.epoch != ledger.epoch:
        return Finding("ok", "in flight", "nothing", expected)
    name = f"txid {attempt.txid} ({attempt.name})"
    since = attempt.at or (ledger.last_commit.at if ledger.last_commit is not None else "")
    if not since:
        return Finding("ok", "in flight", f"{name}; the time of its begin is unknown", expected)
    age = (dt.datetime.now(dt.UTC) - _time(since)).total_seconds()
    times = [_time(report.at) for report in reports if report.at]
    gaps = [(after - before).total_seconds() for after, before in pairwise(times)]
    longest = max([*gaps, *(report.milliseconds / 1000 for report in reports)], default=0.0)
    began = f"begun {age:.0f} s ago" if attempt.at else f"the last commit was {age:.0f} s ago"
    observed = f"{name}; {began}. The longest recent pause between two commits was {longest:.0f} s"
    if age <= max(_PATIENCE, 3 * longest):
        return Finding("ok", "in flight", observed, expected)
    advice = "Is the job running? If its driver is gone, start it again: it goes on by itself."
    if attempt.batch_id is None:
        advice = f"Was {attempt.name} killed? The next batch leaves it behind, and so does mapstate vacuum --take-over."
    return Finding("warning", "in flight", f"{observed}: the attempt seems orphaned", expected, advice)


def _dead(ledger: LedgerRecord) -> Finding:
    observed = f"{sum(high - low + 1 for low, high in ledger.dead)} dead txids in {len(ledger.dead)} ranges"
    advice = "Run mapstate vacuum between two batches." if len(ledger.dead) > _MOST_DEAD else ""
    expected = f"at most {_MOST_DEAD} ranges: every reader reads them"
    return Finding("warning" if advice else "ok", "dead", observed, expected, advice)


def _last_batch(ledger: LedgerRecord) -> Finding:
    """Whether the last batch counts whole, and whether another plan of it would be noticed."""
    last, expected = ledger.last_commit, "a whole batch, with Spark's plan of it"
    if last is None:
        return Finding("ok", "last batch", "none", expected)
    name = f"batch {last.batch_id} of query {last.owner}"
    if last.is_part:
        advice = "See mapstate help IncompleteBatchError."
        return Finding("error", "last batch", f"only a part of {name} counts", expected, advice)
    if last.run is not None and (last.plan is None or last.plan.fingerprint is None):
        advice = "Keep no older copy of the checkpoint: a batch that it plans anew would be taken for a replay."
        return Finding("warning", "last batch", f"{name}; its offset log could not be read", expected, advice)
    return Finding("ok", "last batch", f"{name}{'' if last.run else ', by hand'}", expected)


def recount(
    backend_or_url: Backend | str, state: str, *, dry_run: bool = False, on_page: OnPage | None = None
) -> CountedKeys:
    """Count all keys and write the number into the ledger: missing keys are accepted as lost.

    An operator runs it from any process, between two batches of the stream. ``dry_run`` writes nothing. ``on_page`` is
    called after each page with the number of keys so far.

    Raises:
        UsageError: A batch or a vacuum was at work, the state has a ttl or windows, or the store cannot list its keys.
        StateNotFoundError: There is no such state.
        CorruptRecordError: A record or the ledger cannot be read.
        LedgerLostError: There are records without a ledger.
        StoreError: The store failed.

    """
    with opened(backend_or_url, state) as store:
        record = read_ledger(store, state)  # raises the better error if there is no ledger
        upkeep.check_recount(record)
        ledger = Ledger(store, state)
        ledger.remember()
        counted = _count(backend_or_url, state, on_page)
        upkeep.recount(counted.ledger, counted.ledger, counted.found)  # refuses before it writes
        if not dry_run:
            ledger.recount(counted.ledger, counted.found)
    return counted


def _count(backend_or_url: Backend | str, state: str, on_page: OnPage | None) -> CountedKeys:
    with open_reader(backend_or_url, state, follow=None) as reader:
        return reader.count_keys(on_page=on_page)


def _keys(backend_or_url: Backend | str, state: str, on_page: OnPage | None) -> Finding:
    """Whether the state has as many keys as its ledger says."""
    expected = "as many keys as the ledger says"
    try:
        counted = _count(backend_or_url, state, on_page)
        for _ in range(_COUNTS - 1):
            if not counted.settled:
                counted = _count(backend_or_url, state, on_page)
    except errors.MapStateError as error:
        advice = "Repair the cause, and run this again; --no-count-keys skips the count."
        return Finding("warning" if isinstance(error, StoreError) else "error", "keys", error.message, expected, advice)
    severity, compared, advice = _compared(counted)
    return Finding(severity, "keys", f"{counted.found} keys{compared}", expected, advice)


def _compared(counted: CountedKeys) -> tuple[Severity, str, str]:
    """The severity, what is to be said behind the number of keys, and the advice."""
    if counted.ledger.has_had_ttl:
        return "ok", "; a state with a ttl cannot tell how many it should hold", ""
    if counted.ledger.windows is not None:
        return "ok", ", each with a pane; a state with windows does not count them", ""
    if not counted.settled:
        why = f", not compared: batches were at work during each of {_COUNTS} counts"
        return "warning", why, "Run this again between two batches."
    if counted.held is None:
        advice = "Run mapstate recount, or mapstate vacuum, between two batches."
        return "warning", "; the ledger does not know how many", advice
    more, both = counted.found - counted.held, f", and the ledger says {counted.held}"
    if more > 0:
        advice = "Did another program write records? If they are right, run mapstate recount."
        return "warning", f"{both}: {more} too many", advice
    advice = (
        "Another program deleted records, or the store evicted or lost them. Restore the store from a copy and rewind "
        "the checkpoint; or accept the loss: mapstate recount."
    )
    return ("error", f"{both}: {-more} missing", advice) if more else ("ok", "", "")


def _records(store: Any, ledger: LedgerRecord, on_page: OnPage | None) -> Iterator[Finding]:
    """One pass over all records: those that cannot be read, and those with impossible txids."""
    key_form, blocks = key_codec(ledger), record_codec(ledger).blocks
    unreadable, newer, older = (Unreadable(ledger.state) for _ in range(3))
    expected = "records of this state, with txids that its ledger has given out"
    count, refused = 0, list[errors.StoreAuthError]()

    def pages() -> Iterator[list[StoreKey]]:
        try:
            yield from record_pages(store, _PAGE, index=True)
        except errors.StoreAuthError as error:
            refused.append(error)

    def loads(keys: list[StoreKey], data: Sequence[Any]) -> list[Any]:
        try:
            return CodecWithIndex(ledger).loads(keys, data)
        except CorruptRecordError:  # a field may have been added meanwhile
            return CodecWithIndex(read_ledger(store, ledger.state)).loads(keys, data)

    for keys, records, _ in all_records(pages(), store.multi_get, measured_fields(ledger), loads, unreadable):
        present = {key: record for key, record in zip(keys, records, strict=True) if record is not None}
        of_values = [key for key in present if not is_index_key(key)]
        count += len(of_values)
        if on_page is not None:
            on_page(count)
        for key in of_values:
            try:
                for text in _texts(blocks, key, present[key]):
                    key_form.decode(text)
                if ledger.rolling is not None:
                    _ = [*map(tiles_of, present[key][1:])]
            except (CorruptRecordError, errors.KeyEncodingError) as error:
                unreadable.add([str(key)], error)
        if ledger.type != "non-transactional":
            _check_txids(store, ledger, present, newer, older)
    if refused:
        advice = "Let this user list the keys (on Redis: SCAN)."
        yield Finding("warning", "records", f"they were not examined: {refused[0].message}", expected, advice)
        return
    yield Finding("ok", "records", f"{count} records were read", expected)
    for fault, keys_of_fault, advice in (
        ("cannot be read", unreadable, "Delete them, or restore the records."),
        ("are newer than the ledger", newer, "Restore ledger and records from one backup, or delete these records."),
        ("are older than the ledger", older, "Restore ledger and records from one backup, or delete these records."),
    ):
        if keys_of_fault.count:
            text = f"{keys_of_fault.count} keys {fault}: {keys_of_fault.names()}. The first: {keys_of_fault.first}"
            yield Finding("error", "records", text, expected, advice)


def _texts(blocks: Any, key: StoreKey, record: Any) -> list[StoreKey]:
    """The key texts of a record. Raises KeyEncodingError for one in a block that is not its own."""
    if blocks is None:
        return [key]
    texts: list[StoreKey] = []
    for block in (block for block in record[1:] if block is not None):
        keys = blocks.with_pane(key, block.texts())
        if not {*blocks.places_of(keys)} <= {key} or len({*keys}) < len(keys):
            raise errors.KeyEncodingError(f"block {key} has a key of another block, or one twice", key=str(key))
        texts += keys
    return texts


def _check_txids(
    store: Any, ledger: LedgerRecord, records: dict[Any, Any], newer: Unreadable, older: Unreadable
) -> None:
    try:
        check_known(store, ledger.state, records, records.values(), ledger.next_txid - 1)
    except errors.StaleBatchError as error:
        newer.note(error)
    view = ledger.view()
    for key, record in records.items():
        try:
            view.check_age(record[0])
        except errors.LedgerLostError as error:
            older.add([str(key)], error)


def _time(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


def window_findings(
    ledger: LedgerRecord,
    now: dt.datetime | None = None,
    named: Named | None = None,
    reports: Sequence[BatchReport] = (),
) -> Iterator[Finding]:
    """The findings; none for a state without windows. ``now`` is the clock's time, for tests."""
    kind, done = ledger.time_type, ledger.last_windows() or WindowCommit()
    if kind is None:
        return
    present = number_of(dt.datetime.now(dt.UTC) if now is None else now)
    advice = _BACK
    if ledger.rolling is not None:
        advice = (
            "A row further beyond the driver's clock than ahead= counts in no window: are that clock and those of the "
            "sources right? lateStream() has such rows."
        )
    if kind != "bigint":
        yield from _clock(done, present, advice)
    if ledger.windows is not None:
        named = named or ledger.windows.named
        if kind != "bigint":
            yield _future("present time", kind, [*named(present + 1, None)])
        elif done.inputs:  # times that are numbers have no relation to a clock
            latest = max(known.latest for known in done.inputs.values())
            future = _future("latest time that counts", kind, [*named(latest + 1, None)])
            yield from [future] if future.severity != "ok" else []
    if reports:
        yield _late(reports[:_MOST], advice)
    yield _inputs(ledger)


def _clock(done: WindowCommit, now: int, advice: str) -> Iterator[Finding]:
    if done.jump or done.watermark > now + 60_000_000:
        jump, at = span_text(done.jump, "timestamp"), time_text(done.watermark, "timestamp")
        said = f"the driver's clock had jumped by {jump}, the watermark is {at}, now is {time_text(now, 'timestamp')}"
        yield Finding("warning", "clock", said, "a clock that goes on evenly, and no watermark beyond it", advice)


def _late(reports: Sequence[BatchReport], advice: str) -> Finding:
    rows, late = sum(report.rows for report in reports), sum(report.rows_late for report in reports)
    is_most = late * 2 > rows
    said = f"{late} of {rows} rows of the last {len(reports)} batches"
    return Finding("warning" if is_most else "ok", "late rows", said, "few of the rows", advice if is_most else "")


def _future(point: str, kind: str, panes: Sequence[int]) -> Finding:
    expected = f"no window that starts after the {point}"
    if not panes:
        return Finding("ok", "windows", "none in the future", expected)
    starts = ", ".join(time_text(pane, kind) for pane in panes[:_MOST])
    more = f" and {len(panes) - _MOST} more" if len(panes) > _MOST else ""
    return Finding(
        "warning",
        "windows",
        f"{len(panes)} panes start after the {point}: {starts}{more}",
        expected,
        "Rows came with times that are wrong, or this clock is. They make no other row late; their windows stay open "
        "until then. Leave such rows out in front of window().",
    )


def _inputs(ledger: LedgerRecord) -> Finding:
    expected = "every input brings rows, and none is a window's length behind the others"
    kind, done = ledger.time_type or "timestamp", ledger.last_windows() or WindowCommit()
    kept = ledger.windows or ledger.rolling
    at = "none yet" if done.watermark == NEVER else time_text(done.watermark, kind)
    if kept is not None and kept.least > done.watermark:
        at += f", and the next batch advances it to {time_text(kept.least, kind)}"
    inputs = sorted(done.inputs.items(), key=lambda item: item[1].latest)
    silent = [name for name, known in inputs if known.latest == NEVER]
    advice = "Does it still bring rows? With idle=, an input without rows holds the others back no longer."
    if silent and len(inputs) > 1:
        names = ", ".join(map(repr, silent))
        return Finding("warning", "watermark", f"{at}: no rows came yet of the inputs {names}", expected, advice)
    if ledger.rolling is not None:
        return _rolling_behind(ledger.rolling, done, at) or Finding("ok", "watermark", at, expected)
    if len(inputs) < 2 or ledger.windows is None:
        return Finding("ok", "watermark", at, expected)
    (slow, least), (fast, most) = inputs[0], inputs[-1]
    behind = most.latest - least.latest
    text = f"{at}: the input {slow!r} is {span_text(behind, kind)} behind {fast!r}"
    is_late = behind > ledger.windows.definition.length
    return Finding("warning" if is_late else "ok", "watermark", text, expected, advice if is_late else "")


def _rolling_behind(record: RollingRecord, done: WindowCommit, at: str) -> Finding | None:
    """A watermark that stands while rows come, so that tiles are not joined, or one beyond all rows."""
    definition = record.definition
    shortest = min(window.length for window in definition.windows if window.length)
    if definition.type == "bigint" and done.newest is not None and max(done.watermark, record.least) > done.newest:
        return Finding(
            "warning",
            "watermark",
            f"{at}, and the latest row is of {done.newest}",
            "no watermark beyond the rows: numbers have no clock",
            "An operator has advanced it too far, and it cannot be put back. Rows until then count in a lifetime, "
            "and in windows that can still be asked for. Start the windows under another name, or reset the state.",
        )
    if done.newest is None or done.newest - done.watermark <= definition.lag + shortest:
        return None
    newest = time_text(done.newest, definition.type)
    return Finding(
        "warning",
        "watermark",
        f"{at}, and the latest row is of {newest}",
        "a watermark that follows the rows, as far behind as lag says",
        "Tiles before the watermark are not joined, and a key has room for 10,000. Do all inputs bring rows, and is "
        "ahead= long enough? mapstate advance --to moves the watermark.",
    )
