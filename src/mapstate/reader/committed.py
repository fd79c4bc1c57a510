"""Reads of one state as of a whole batch: the ledger, then the records, then the rule of `CommitView`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from hashlib import blake2b
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.fields import Fields
from mapstate.capabilities import LedgerReads, Scan, close_if_possible
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    KeyEncodingError,
    StaleBatchError,
    StateNotFoundError,
    UsageError,
    check_range,
)
from mapstate.findings import Unreadable
from mapstate.keys import Key, KeyCodec, StoreKey, contains_none
from mapstate.maps.pane_index import without_gone
from mapstate.maps.serialized import Room
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.records import CommitView
from mapstate.protocol.refusals import lost_ledger, newer_than_ledger, newer_txids
from mapstate.protocol.seed_refusals import being_seeded
from mapstate.protocol.stored_ledger import (
    check_page_size,
    decode_ledger,
    has_records,
    ledger_bytes,
    ledger_store,
    record_pages,
    records_in,
)
from mapstate.protocol.windows import WindowCommit
from mapstate.reader.capabilities import ScansFrom, ScansParts, ThreadSafe
from mapstate.reader.rolling import Asked, Ends, RollingFields, shown_fields
from mapstate.reader.scans import BatchReports, check_as_of, purged, read_reports
from mapstate.serializers import RecordCodec, record_codec
from mapstate.waiting import pause

if TYPE_CHECKING:
    from mapstate.serializers.blocks import BlockCodec

T = TypeVar("T")

Consistency = Literal["committed", "latest"]
PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Seconds between the reads of a record that is newer than the ledger."""

FOLLOW = 1.0
"""Seconds after which a reader looks at an alias again."""
_TRIES, _MARK = 1000, 12  # how often a read is tried; the characters of `mark_of`


def checked(consistency: str, max_age: float | dt.timedelta | None, follow: float | None) -> float | None:
    """Return ``max_age`` in seconds. Raise ConfigurationError for arguments of a reader that cannot be."""
    if consistency not in ("committed", "latest"):
        raise ConfigurationError(f"consistency is 'committed' or 'latest', not {consistency!r}")
    if follow not in (None, FOLLOW):
        check_range("follow", follow, 0.0, 86_400.0, " of seconds")
    seconds = max_age.total_seconds() if isinstance(max_age, dt.timedelta) else max_age
    if seconds is not None:
        check_range("max_age", seconds, 0.001, 86_400.0 * 36_525, " of seconds")
    return seconds


class Opened(NamedTuple):
    """A ledger, its bytes, and the codecs of its schema."""

    data: bytes
    ledger: LedgerRecord
    keys: KeyCodec
    codec: RecordCodec | BlockCodec
    shown: Fields | RollingFields

    @property
    def fields(self) -> Fields:
        """The fields that readers see. Raises UsageError for a user's own aggregator that rolling windows need."""
        return self.shown if isinstance(self.shown, Fields) else self.shown.all.fields

    def chosen(self, columns: Sequence[str] | None) -> Fields:
        """The same of a call that asks for some columns. Raises UsageError for those alone."""
        return self.shown if isinstance(self.shown, Fields) else self.shown.of(columns).fields

    @property
    def columns(self) -> list[str]:
        """The names of these fields."""
        return [field.name for field in self.shown.fields] if isinstance(self.shown, Fields) else self.shown.names

    def decoded(self, texts: Sequence[StoreKey], unreadable: Unreadable) -> list[Any]:
        """The keys, None for what is none."""
        try:
            return [*self.keys.decode_all(texts)]
        except KeyEncodingError:
            keys: list[Key | None] = []
        for text in texts:
            try:
                keys.append(self.keys.decode(text))
            except KeyEncodingError as error:
                unreadable.add([str(text)], error)
                keys.append(None)
        return keys


class CommittedReads:
    """The reads of one state, for a reader. Any thread may call.

    A call reads from a ledger to its result with its own variables. What calls share is the last ledger with its
    codecs, which is replaced as a whole. A store that is not `ThreadSafe` is called from one thread at a time.

    ``before``, ``as_of`` and ``check`` are those of `StateReader`. ``max_age`` is in seconds; see `open_reader`.
    """

    def __init__(
        self,
        store: Any,
        state: str,
        consistency: Consistency,
        aggregators: Mapping[str, Aggregator],
        *,
        before: tuple[str, int] | None = None,
        as_of: LedgerRecord | None = None,
        max_age: float | None = None,
        check: Callable[[LedgerRecord], None] | None = None,
    ) -> None:
        self.state = state
        self.store = store
        self._check = check
        self._as_of = as_of
        self.compares = consistency == "committed" and before is None and as_of is None
        """Whether the number of keys can be compared with the ledger's."""
        self._in_one_call = isinstance(store, LedgerReads)  # once: an isinstance of a protocol is slow
        self._turn: AbstractContextManager[Any] | None = nullcontext() if isinstance(store, ThreadSafe) else RLock()
        self.latest = consistency == "latest"
        self.aggregators = aggregators
        self._before = before
        self._max_age = max_age
        self._last: Opened | None = None
        self._first: tuple[bytes, LedgerRecord] | None = None  # what `ledger` read, as `open_reader` does
        self.seen: LedgerRecord | None = None  # what was read last, to be shown

    def frozen(self) -> CommittedReads:
        """Return these reads as of the last batch of the newest ledger, see `StateReader`, or of their own one."""
        if self._as_of is not None or self._before is not None:
            return self
        frozen = copy(self)
        frozen._as_of, frozen.compares, frozen.latest = self.ledger(), False, False
        return frozen

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """What each call of the store is in. Raises UsageError after `close`."""
        if self._turn is None:
            raise not_open(self.state)
        return self._turn

    def ledger(self) -> LedgerRecord:
        """Read the current ledger, however old its last commit is. Errors: see `ledger_bytes`."""
        with self.turn:
            data = ledger_bytes(self.store, self.state)
        ledger = decode_ledger(data, self.state)
        self.seen, self._first = ledger, (data, ledger)
        return ledger

    def reports(self) -> BatchReports:
        """Read the batch reports. Errors: see `read_reports`."""
        with self.turn:
            return read_reports(self.store, self.state)

    def pages(
        self, ledger: LedgerRecord, page_size: int, cursor: str | None = None
    ) -> Iterator[tuple[list[StoreKey], str | None]]:
        """List the store's keys from ``cursor`` on, each page with the cursor behind it, None where there is none.

        ``ledger`` is that of the scan's begin. Without a ``cursor``, which may be empty, no page has one.
        Raises UsageError where the store cannot list its keys, or cannot go on from a cursor, and for a cursor of
        another state or of another incarnation of this one.
        """
        store, page_size = self.store, self._names_on(page_size)
        if cursor is not None and isinstance(store, ScansFrom):
            place = cursor[_MARK:]
            if cursor and cursor != mark_of(ledger, place) + place:
                raise UsageError(
                    f"this is no cursor of state {self.state!r}, not a whole one, or of before it was reset, made anew "
                    "or given to another query: scan from the start. Nothing was read."
                )
            listed = store.scan_from(place, page_size)
            return self._in_turn((records_in(page), mark_of(ledger, behind) + behind) for page, behind in listed)
        if cursor:
            raise UsageError(
                f"the store of state {self.state!r} cannot go on with a scan: take one from the start. Nothing "
                "was read."
            )
        if not isinstance(store, Scan):
            raise UsageError(f"the store of state {self.state!r} cannot list its keys, so it cannot be scanned")
        return self._in_turn((page, None) for page in record_pages(store, page_size))

    def check_same_state(self, first: LedgerRecord, ledger: LedgerRecord) -> None:
        """Raise StaleBatchError if the state was reset, removed or made anew since a scan began with ``first``."""
        if ledger is first:
            return
        if (first.first_txid, first.reset_txid) != (ledger.first_txid, ledger.reset_txid):
            raise StaleBatchError(
                f"state {self.state!r} was reset, dropped or made anew while it was scanned. Nothing more was given "
                "out. Scan it from the start.",
                state=self.state,
            )

    def parts(self, most: int) -> list[str]:
        """Divide a listing of the store's keys; see `ScansParts.scan_parts`. One part where the store cannot."""
        with self.turn:
            return self.store.scan_parts(most) if isinstance(self.store, ScansParts) else [""]

    def part(self, part: str, page_size: int) -> Iterator[tuple[list[StoreKey], None]]:
        """List the store's keys of one of `parts`. Errors: see `pages`."""
        if not isinstance(self.store, ScansParts):
            return ((page, None) for page, _ in self.pages(self.opened().ledger, page_size))
        return self._in_turn((records_in(page), None) for page in self.store.scan_part(part, self._names_on(page_size)))

    def _names_on(self, page_size: int) -> int:
        """How many of the store's keys a page of so many keys has. Raises UsageError for no number."""
        check_page_size(page_size)
        blocks, ledger = (opened := self.opened()).codec.blocks, opened.ledger
        return page_size if blocks is None else blocks.on_page(page_size, ledger.keys_held())

    def check_scanned(self) -> None:
        """Call this after the last page: raises StaleBatchError if keys may have gone that were there `as_of`."""
        if self._as_of is not None:
            check_as_of(self._as_of, self.ledger(), [], [])

    def close(self) -> None:
        """Close the store. Later calls raise UsageError."""
        turn, self._turn = self._turn, None
        with turn or nullcontext():
            close_if_possible(self.store)

    def opened(self, *, newest: bool = False) -> Opened:
        """The last ledger that was read, or the ``newest``, with its codecs."""
        if self._last is not None and not newest:
            return self._last
        return self._with(self.load()) if self._first is None or newest else self._opened(*self._first)

    def read_keys(self, known: Opened, texts: list[StoreKey]) -> tuple[Opened, list[Any]]:
        """The values of some of the state's keys, as `read`; of no use where the codec of keys is not the known one."""
        if (blocks := known.codec.blocks) is None:
            return self.read(texts)
        opened, values = self.read([*(places := blocks.places_of(texts))])
        return opened, blocks.of_keys(blocks.rests(texts), places, values) if opened.keys is known.keys else values

    def read(
        self,
        texts: list[StoreKey],
        pauses: Iterator[float] | None = None,
        room: Room | None = None,
        codec: RecordCodec | None = None,
    ) -> tuple[Opened, list[Any]]:
        """The values of some keys as of one ledger. ``codec`` is that of other records than the state's own.

        A read is repeated if a record is newer than the ledger. It is also repeated if a key is absent, and meanwhile a
        vacuum may have purged it or the state has another incarnation.

        If even a ledger that was read after the record does not know its txid, no attempt gave it out. A failover can
        cause that, so the read is repeated after each of ``pauses``, and then it is an error.
        """
        pauses = iter(PAUSES) if pauses is None else pauses
        for _ in range(_TRIES):
            before, data, after = self._fetch(texts)
            if room is not None:
                room.learn(data)
            opened = self._with(before)
            records: list[Any] = []
            try:
                records = (decoder := codec or opened.codec).loads(texts, data)
                values = self._values(opened.ledger, records)
                if decoder.blocks is not None:
                    values = decoder.blocks.made(values)
            except StaleBatchError:
                newest = self.ledger().next_txid - 1
                unknown = newer_txids(texts, records, newest)
                seconds = next(pauses, None) if unknown else 0.0
                if seconds is None:
                    raise newer_than_ledger(self.state, unknown, newest) from None
                pause(seconds)
                continue
            except CorruptRecordError:
                if self.load() != opened.data:
                    continue  # the record may have a field that was added meanwhile
                raise
            if self._as_of is not None:
                check_as_of(self._as_of, opened.ledger, texts, records)
            if not contains_none(data) or before == after or purged(self._with(after).ledger) == purged(opened.ledger):
                return opened, values
        raise StaleBatchError(
            f"state {self.state!r}: a batch began within each of {_TRIES} reads in a row, because batches come faster "
            f"than {len(texts)} keys can be read. Read fewer at a time.",
            state=self.state,
        )

    def _values(self, ledger: LedgerRecord, records: list[Any]) -> list[Any]:
        """The values of the records by the one rule. Raises StaleBatchError for a record newer than the ledger."""
        if ledger.type == "non-transactional":
            return records
        view, newest = self._view(ledger), ledger.next_txid - 1
        if not self.latest and ledger.type == "opaque":
            return view.values(records, newest)
        if any(record is not None and record[0] > newest for record in records):
            raise StaleBatchError(f"a record is newer than txid {newest}")
        return [None if record is None or not view.check_age(record[0]) else record[1] for record in records]

    def _view(self, ledger: LedgerRecord) -> CommitView:
        """The ledger's view, without the last batch if the state is to be read as it was before that batch."""
        return CommitView(self._last_txid(ledger), ledger.dead, ledger.floor, ledger.first_txid)

    def _last_txid(self, ledger: LedgerRecord) -> int | None:
        last = ledger.last_commit
        if self._as_of is not None:
            return self._as_of.last_txid
        if self._before is None or ledger.type != "opaque" or last is None:
            return ledger.last_txid
        query_id, batch_id = self._before
        if ledger.owner != query_id or last.owner != query_id or last.batch_id < batch_id:
            return ledger.last_txid
        if last.batch_id > batch_id or ledger.next_txid != last.txid + 1:
            # An orphaned attempt matters, too: its records keep the values of this batch, and not those before it.
            other = last.batch_id > batch_id
            later = f"batch {last.batch_id} is committed" if other else "an attempt or a vacuum began"
            raise UsageError(
                f"state {self.state!r} cannot be read as it was before batch {batch_id}: {later} since, and records "
                "keep one value before the current one. Restore the store as it was before that; or ask this once with "
                "consistency='latest', which answers with what is there now."
            )
        return last.txid - 1

    def last_windows(self, ledger: LedgerRecord) -> WindowCommit:
        """What the last batch of the view did to the windows."""
        done = (self._as_of or ledger).last_windows() or WindowCommit()
        if self._as_of is not None or self._last_txid(ledger) == ledger.last_txid:
            return done
        previous = None if ledger.previous is None else ledger.previous.windows
        return previous or WindowCommit(watermark=done.safe)

    def final_mark(self, ledger: LedgerRecord) -> int:
        """See `LedgerRecord.final_mark`, for the view."""
        was, done = self._as_of or ledger, self.last_windows(ledger)
        return was.final_mark() if done is was.last_windows() else done.watermark

    def without_gone(self, ledger: LedgerRecord, texts: list[StoreKey], values: list[Any]) -> list[Any]:
        """The values that were read, None for keys of windows that are gone."""
        return values if ledger.windows is None else without_gone(ledger, self.last_windows(ledger), texts, values)

    def ends(self, ledger: LedgerRecord, asked: Asked, keys: int) -> Ends | None:
        """Where the rolling windows of some keys end; None for a state without. Errors: see `Asked.ends`."""
        was = self._as_of or ledger
        if was.rolling is None:
            asked.check_plain()
            return None
        return asked.ends(was.rolling, self.last_windows(ledger), self.final_mark(ledger), keys)

    def answered(
        self, opened: Opened, asked: Asked, texts: list[StoreKey], values: list[Any], ends: Ends | None
    ) -> tuple[Fields, list[Any]]:
        """The fields that the call asked for, and the values of these as `Fields` takes them."""
        if ends is None or isinstance(opened.shown, Fields):
            return opened.fields, values
        fields: tuple[Fields, list[Any]] = asked.answered(opened.shown, texts, values, ends)
        return fields

    def load(self) -> bytes | None:
        """Read the ledger as it is stored; None where there is none. Raises the errors of the store."""
        with self.turn:
            stored = ledger_store(self.store).load()
        return None if stored is None else stored[0]

    def _fetch(self, texts: list[Any]) -> tuple[bytes | None, list[Any], bytes | None]:
        with self.turn:
            if self._in_one_call:
                read: tuple[bytes | None, list[Any], bytes | None] = self.store.multi_get_with_ledger(texts)
                return read
            before = self.load()
            data = self.store.multi_get(texts)
            return before, data, self.load() if contains_none(data) else before

    def _with(self, data: bytes | None) -> Opened:
        """Decode the ledger, and make the codecs of its schema, unless it is the last one.

        Raises ConfigurationError where the state has been made again in another layout, and records are not found.
        """
        last = self._last
        if last is not None and last.data == data:
            self._check_answers(last.ledger)
            return last
        if data is None:
            with self.turn:
                is_left = isinstance(self.store, Scan) and has_records(self.store)
            if is_left and self.load() is None:  # else the state is made anew meanwhile
                raise lost_ledger(self.state)
            raise StateNotFoundError(
                f"state {self.state!r} has no ledger any more, and no record: the store was flushed or replaced, or "
                "the state was dropped",
                state=self.state,
            )
        opened = self._opened(data, decode_ledger(data, self.state))
        self._check_answers(opened.ledger)
        return opened

    def _opened(self, data: bytes, ledger: LedgerRecord) -> Opened:
        last = self._last
        if last is not None and last.ledger.first_txid != ledger.first_txid:
            self.load()  # which compares layouts; a bulk read does not
        if last is not None and _schema(last.ledger) == _schema(ledger):
            opened = last._replace(data=data, ledger=ledger)
        else:
            if self._check is not None:
                self._check(ledger)
            opened = Opened(
                data,
                ledger,
                KeyCodec(ledger.keys, native=ledger.serializer == "native"),
                record_codec(ledger),
                shown_fields(ledger, self.aggregators)
                if ledger.rolling is None
                else RollingFields(ledger, ledger.rolling, self.aggregators),
            )
        self._last, self.seen = opened, ledger
        return opened

    def _check_answers(self, ledger: LedgerRecord) -> None:
        """Raise StaleBatchError unless the last commit is within ``max_age``. The ledger of each answer comes here.

        Raises SeedingError while the state is being seeded.
        """
        if ledger.seed is not None and not self.latest:
            raise being_seeded(ledger)
        if self._max_age is None:
            return
        last, said = ledger.last_commit, "no batch is committed, or its time is not known"
        if last is not None and last.at:
            age = (dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(last.at)).total_seconds()
            if abs(age) <= self._max_age:
                return
            said = f"batch {last.batch_id} was committed {age:.1f} s ago" if age > 0 else "the commit is in the future"
        raise StaleBatchError(
            f"state {self.state!r}: {said}, by the clock here; max_age is {self._max_age:g} s. Nothing was given out. "
            "See that the job runs, that this is the store it writes to, and that the clocks agree.",
            state=self.state,
        )

    def _in_turn(self, pages: Iterator[T]) -> Iterator[T]:
        """The pages, with one thread at a time in the store."""
        while True:
            with self.turn:
                page = next(pages, None)
            if page is None:
                return
            yield page


def _schema(ledger: LedgerRecord) -> tuple[object, ...]:
    rolling = None if ledger.rolling is None else ledger.rolling.definition
    has_panes = ledger.windows is not None
    return ledger.field_counts, ledger.fields, ledger.keys, ledger.type, ledger.serializer, has_panes, rolling


def not_open(state: str) -> UsageError:
    """The error of each call of a reader that is closed, or open on another event loop."""
    why = "it was closed, or belongs to another event loop, or waits for async with"
    return UsageError(f"this reader of state {state!r} is not open here: {why}. Nothing was read. Open one here.")


def mark_of(ledger: LedgerRecord, place: str = "") -> str:
    """What names of commits begin with, and cursors: another for another state, owner, incarnation, or place."""
    named = f"{ledger.state} {ledger.owner} {ledger.first_txid} {ledger.reset_txid}{place and f' {place}'}"
    return blake2b(named.encode(), digest_size=_MARK // 2).hexdigest()
