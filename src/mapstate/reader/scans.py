"""What scans, bulk reads and batch reports give out; and whether a scan is whole, and still as of its batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import msgspec

from mapstate.batch_report import BatchReport
from mapstate.capabilities import Reports
from mapstate.errors import CorruptRecordError, MissingKeysError, StaleBatchError, cut
from mapstate.findings import DistinctKeys
from mapstate.keys import Key, StoreKey, contains_none
from mapstate.protocol.ledger_record import LedgerRecord, are_times
from mapstate.reader.times import Time
from mapstate.values import html_table

Page = list[tuple[Key, dict[str, Any]]]
Listed = tuple[list[StoreKey], str | None]
"""A page of keys, and the cursor behind it."""


class Answer(NamedTuple):
    """The result of `StateReader.answer`.

    ``values``  the fields of each key, None for an absent one
    ``ledger``  as of which they are
    ``ends``    of rolling windows: where those of each key end, None before any row; else None
    """

    values: list[dict[str, Any] | None]
    ledger: LedgerRecord
    ends: list[Time | None] | None


class ScanPage(NamedTuple):
    """A page of a scan: its keys and their fields, the ledger as of which they are, and the cursor behind it.

    ``cursor`` is None where the store cannot go on from one: it is not a `mapstate.reader.capabilities.ScansFrom`.
    Where the store's page is read in parts, all but the last part have the cursor in front of it.
    ``problem`` names keys of this scan so far that cannot be read; the scan raises it behind its last page.
    ``end`` is where rolling windows end, None for a state without, and for a page without keys.
    """

    rows: Page
    ledger: LedgerRecord
    cursor: str | None
    problem: CorruptRecordError | None = None
    end: Time | None = None


class CountedKeys(NamedTuple):
    """The result of `StateReader.count_keys`.

    ``found``    the number of keys with a value
    ``held``     the ledger's number; None if unknown, or if the two cannot be compared
    ``ledger``   the ledger before the count
    ``settled``  whether the count is of one moment: no batch was committed, and no vacuum began meanwhile
    """

    found: int
    held: int | None
    ledger: LedgerRecord
    settled: bool


class KeyCount:
    """The ledger with which a scan began; its keys, and whether their number can be compared with the ledger's.

    It ``collects`` keys also where it cannot.
    """

    def __init__(self, ledger: LedgerRecord, *, comparable: bool, collects: bool = False) -> None:
        self.ledger = ledger
        self._collects = collects
        self.keys = DistinctKeys()
        self.settled = comparable
        self._contents = ledger.contents()
        self._held = ledger.keys_held()
        self.verify(ledger)

    @property
    def held(self) -> int | None:
        return self._held if self.settled else None

    def verify(self, ledger: LedgerRecord) -> None:
        """Note a ledger under which a page was read."""
        if ledger is self.ledger and ledger.type == "opaque":
            return
        at_work = ledger.type != "opaque" and ledger.in_flight is not None
        self.settled = self.settled and not at_work and ledger.contents() == self._contents

    def add(self, ledger: LedgerRecord, page: list[StoreKey], values: list[Any]) -> None:
        self.verify(ledger)
        if self._collects or self.held is not None:
            self.keys.update(
                list(compress(page, [value is not None for value in values])) if contains_none(values) else page
            )


def check_missing(state: str, counted: CountedKeys) -> None:
    """Raise MissingKeysError if a scan found fewer keys than the ledger counts."""
    number, held = counted.found, counted.held
    if held is None or number >= held:
        return
    raise MissingKeysError(
        f"state {state!r}: {held - number} of {held} keys are missing. The scan gave out all {number} that are there. "
        "Another program deleted records, or the store evicted or lost them. Restore the store, or accept the loss: "
        "mapstate recount. See docs/operating.md#how-many-keys",
        state=state,
        found=number,
        expected=held,
    )


def check_as_of(was: LedgerRecord, now: LedgerRecord, texts: Sequence[StoreKey], records: Sequence[Any]) -> None:
    """Raise StaleBatchError where records of the ledger ``now`` do not have the values of the last batch of ``was``.

    A record keeps one value before the current one. So a record tells its value as of that batch if it was written
    before the second commit since began; and no vacuum, purge, reset or rollback came in between.
    """
    at_work = now.type != "opaque" and (was.in_flight is not None or now.in_flight is not None)
    if was.contents() == now.contents() and not at_work:
        return
    is_on = was.last_txid is None or was.last_txid in now.view()
    late: list[StoreKey] = []
    if now.type == "opaque" and purged(was) == purged(now) and is_on:
        last = (now.previous, now.last_commit)
        since = [commit.txid for commit in last if commit and commit.last_txid_before == was.last_txid]
        newest = since[0] if since else -1 if was.last_txid is None else was.last_txid
        late = [text for text, record in zip(texts, records, strict=True) if record is not None and record[0] > newest]
        if not late:
            return
    batch = "its start" if was.last_commit is None else f"batch {was.last_commit.batch_id}"
    why = (
        f"key {str(late[0])[:100]!r} was written by two batches since"
        if late
        else "its values of then are gone since: the state is not opaque, or was vacuumed, purged, reset or rolled back"
    )
    raise StaleBatchError(
        f"state {now.state!r} cannot be read as of {batch} any more: {why}. Nothing was given out. Read it anew, in "
        "less time; or page by page, each as of one batch.",
        state=now.state,
    )


def purged(ledger: LedgerRecord) -> tuple[int, ...]:
    """Numbers that differ between two ledgers if records may have been purged between them, or the state dropped."""
    numbers = ledger.first_txid, ledger.floor, ledger.rewrites
    if ledger.windows is None:
        return numbers
    done = ledger.last_windows()
    return *numbers, ledger.windows.purged, 0 if done is None else done.settled


_decoder = msgspec.json.Decoder(BatchReport)


class BatchReports(list[BatchReport]):
    """Reports in a list, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        names = [
            name for name in BatchReport.__struct_fields__ if any(getattr(report, name) is not None for report in self)
        ]
        return html_table("batch reports", [names, *([getattr(report, name) for name in names] for report in self)])


def read_reports(store: Any, state: str) -> BatchReports:
    """The reports of a state, newest first; none if the store keeps none. Raises CorruptRecordError, StoreError."""
    if not isinstance(store, Reports):
        return BatchReports()
    try:
        reports = BatchReports(_decoder.decode(data) for data in store.reports())
        if not are_times([report.at for report in reports]):
            raise ValueError("a time is not ISO 8601 with an offset")  # noqa: TRY301
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise CorruptRecordError(
            f"a batch report of state {state!r} cannot be read ({cut(error)}): another program wrote it. The state "
            "itself is not affected. Delete the reports.",
            state=state,
        ) from error
    return reports
