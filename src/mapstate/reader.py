"""Read a state without Spark, as of a whole batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, Literal, NamedTuple, Self

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.results import results_of
from mapstate.backends import resolve
from mapstate.backing_map import Backend
from mapstate.batch_report import BatchReport, read_reports
from mapstate.capabilities import LedgerReads, Scan, close_if_possible
from mapstate.distinct_keys import DistinctKeys
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    KeyEncodingError,
    MissingKeysError,
    StaleBatchError,
    StateNotFoundError,
    UsageError,
)
from mapstate.findings import Unreadable
from mapstate.keys import Key, KeyCodec, StoreKey
from mapstate.maps.serialized import Room
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.records import CommitView, contains_none, newer_than_ledger, newer_txids
from mapstate.protocol.stored_ledger import (
    decode_ledger,
    has_records,
    ledger_store,
    lost_ledger,
    read_ledger,
    record_pages,
)
from mapstate.serializers import RecordCodec, serializer
from mapstate.spec import check_state_name

__all__ = ["Consistency", "CountedKeys", "StateReader", "open_reader"]

Consistency = Literal["committed", "latest"]
_TRIES = 1000
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)  # seconds between reads of a record that is newer than the ledger


def open_reader(
    backend_or_url: Backend | str,
    state: str,
    *,
    consistency: Consistency = "committed",
    aggregators: Mapping[str, Aggregator] | None = None,
) -> StateReader:
    """Open a reader of one state, in any process, while the stream runs.

    Args:
        backend_or_url: The store of the state.
        state: The state's name.
        consistency: "committed" reads whole batches only. "latest" also reads a batch that is not committed, and may
            be rolled back. Transactional and non-transactional states are always read latest, because they keep no
            older value.
        aggregators: A user's own aggregators by field name, if readers shall show their `result`.

    Raises:
        StateNotFoundError: There is no such state.
        LedgerLostError: There are records without a ledger. To find them, all keys may be listed.
        ConfigurationError: An argument cannot be used.
        StoreError: The store failed.

    """
    if consistency not in ("committed", "latest"):
        raise ConfigurationError(f"consistency is 'committed' or 'latest', not {consistency!r}")
    reader = StateReader(resolve(backend_or_url), state, consistency, aggregators or {})
    reader.ledger()
    return reader


class StateReader:
    """Committed reads of one state; see `open_reader`. A context manager; not thread-safe.

    ``before`` is a query id and a batch of that query, its last or its next. An opaque state is then read as it was
    before that batch, even if the batch is committed.
    """

    def __init__(
        self,
        backend: Backend,
        state: str,
        consistency: Consistency,
        aggregators: Mapping[str, Aggregator],
        *,
        before: tuple[str, int] | None = None,
    ) -> None:
        self._state = check_state_name(state)
        self._store: Any = backend.open(state)
        self._in_one_call = isinstance(self._store, LedgerReads)  # once: an isinstance of a protocol is slow
        self._latest = consistency == "latest"
        self._aggregators = aggregators
        self._before = before
        self._opened: _Opened | None = None

    def ledger(self) -> LedgerRecord:
        """The current ledger: owner, last and previous commit, the attempt in flight."""
        return read_ledger(self._store, self._state)

    def reports(self) -> list[BatchReport]:
        """The reports of the last hundred batches, newest first; empty if the store keeps none. One read."""
        return read_reports(self._store, self._state)

    def key_count(self) -> int | None:
        """The number of keys in the state, from its ledger: one small read. None if unknown.

        Removed keys do not count. The number is unknown for a state with a ttl. See docs/operating.md#how-many-keys.
        """
        return self.ledger().keys_held()

    def count_keys(self, page_size: int = 1000, *, on_page: Callable[[int], None] | None = None) -> CountedKeys:
        """Read all keys, and count those with a value. It needs 8 bytes of memory per key.

        ``on_page`` is called after each page with the number of keys that were read so far.

        Raises:
            UsageError: The store cannot list its keys.
            CorruptRecordError: A record cannot be read.
            LedgerLostError: There are records without a ledger.
            StoreError: The store failed.

        """
        pages, count, unreadable = self._pages(page_size), self._start_count(), Unreadable(self._state)
        done = 0
        for _, texts, _ in self._read_pages(pages, unreadable, count):
            done += len(texts)
            if on_page is not None:
                on_page(done)
        if unreadable.count:
            raise unreadable.error()
        return self._counted(count)

    def get(self, key: Any) -> dict[str, Any] | None:
        """The fields of one key, None if the key is absent.

        ``key`` is a tuple or a list of the grouping values. The key of a single grouping column may be its bare value.

        Raises:
            KeyEncodingError: The values do not fit the grouping columns.
            CorruptRecordError: The record cannot be read.
            LedgerLostError: There are records without a ledger.
            StaleBatchError: Batches come faster than the keys can be read, or a record is newer than the ledger.
            StoreError: The store failed.

        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[Any]) -> list[dict[str, Any] | None]:
        """The fields of each key, in the order of ``keys``, all as of the same batch.

        Redis needs one round trip, or two if some of more than 128 keys are absent. Raises the errors of `get`, and
        UsageError for a str or bytes instead of a list.
        """
        if isinstance(keys, str | bytes):
            raise UsageError("multi_get takes a list of keys; for one key there is get")
        if not keys:
            return []
        opened = self._open()
        opened, values = self._read(opened.keys.encode_all(keys))
        return opened.fields.named(values)

    def scan(self, page_size: int = 1000) -> Iterator[tuple[Key, dict[str, Any]]]:
        """All keys and their fields, with one page of about ``page_size`` keys in memory, or of fewer large records.

        The number of keys is compared with the ledger's, if the ledger knows it. The comparison needs a scan without a
        commit and without the begin of a vacuum. States that are not opaque need a scan without a batch at work.

        Raises:
            CorruptRecordError: Some keys cannot be read, after all others have come. ``keys`` has the first ten,
                ``count`` their number.
            MissingKeysError: The ledger counts more keys, after the last key has come.
            UsageError: The store cannot list its keys.
            StoreError: The store failed.

        Not guaranteed: a page is of one batch, but two pages may be of two batches. Keys that are new during the scan
        may be missed. On Redis a key can come twice, as with SCAN.

        """
        count = self._start_count()
        return self._scanned(self._pages(page_size), count if count.held is not None else None)

    def _scanned(
        self, pages: Iterator[list[StoreKey]], count: _KeyCount | None
    ) -> Iterator[tuple[Key, dict[str, Any]]]:
        unreadable = Unreadable(self._state)
        for opened, texts, values in self._read_pages(pages, unreadable, count):
            for text, fields in zip(texts, opened.fields.named(values), strict=True):
                if fields is not None:
                    try:
                        key = opened.keys.decode(text)
                    except KeyEncodingError as error:
                        unreadable.add([str(text)], error)
                        continue
                    yield key, fields
        if unreadable.count:
            raise unreadable.error()
        if count is not None:
            _check_missing(self._state, self._counted(count))

    def _read_pages(
        self, pages: Iterator[list[StoreKey]], unreadable: Unreadable, count: _KeyCount | None
    ) -> Iterator[tuple[_Opened, list[StoreKey], list[Any]]]:
        """The values of each page, which ``count`` and ``unreadable`` note."""
        pauses, room = iter(_PAUSES), Room(self._open().ledger.fields)
        for part in (part for page in unreadable.listed(pages) for part in room.parts(page)):
            texts, read = unreadable.read(lambda some: self._read(some, pauses, room), part)
            if read is None:
                continue
            opened, values = read
            if count is not None:
                count.add(opened.ledger, texts, values)
            yield opened, texts, values

    def _pages(self, page_size: int) -> Iterator[list[StoreKey]]:
        if not isinstance(self._store, Scan):
            raise UsageError(f"the store of state {self._state!r} cannot list its keys, so it cannot be scanned")
        return record_pages(self._store, page_size)

    def _start_count(self) -> _KeyCount:
        """Start before the store lists its keys, because the ledger counts keys of that moment."""
        stored = ledger_store(self._store).load()
        self._opened = self._with(None if stored is None else stored[0])
        return _KeyCount(self._opened.ledger, comparable=not self._latest and self._before is None)

    def _counted(self, count: _KeyCount) -> CountedKeys:
        number = len(count.keys)
        if count.held is not None and count.held != number:
            count.verify(self.ledger())  # a latest read may see a batch that has begun after the last page
        return CountedKeys(number, count.held, count.ledger, settled=count.settled)

    def close(self) -> None:
        """Close the store's connection. Closing twice is no error."""
        close_if_possible(self._store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> _Opened:
        if self._opened is None:
            stored = ledger_store(self._store).load()
            self._opened = self._with(None if stored is None else stored[0])
        return self._opened

    def _with(self, data: bytes | None) -> _Opened:
        """Decode the ledger, and make the codecs of its schema, unless it is the last one."""
        if data is None:
            if isinstance(self._store, Scan) and has_records(self._store):
                raise lost_ledger(self._state)
            raise StateNotFoundError(
                f"state {self._state!r} has no ledger any more, and no record: the store was flushed or replaced, or "
                "the state was dropped",
                state=self._state,
            )
        if self._opened is None or self._opened.data != data:
            self._opened = _Opened(data, decode_ledger(data, self._state), self._aggregators, self._opened)
        return self._opened

    def _read(
        self, texts: list[StoreKey], pauses: Iterator[float] | None = None, room: Room | None = None
    ) -> tuple[_Opened, list[Any]]:
        """The values of some keys as of one ledger.

        A read is repeated if a record is newer than the ledger. It is also repeated if a key is absent, and meanwhile a
        vacuum may have purged it or the state has another incarnation.

        No attempt wrote a record that is newer than a ledger read after it. A failover may explain it, so it is read
        again after each of ``pauses``, and then it is an error.
        """
        pauses = iter(_PAUSES) if pauses is None else pauses
        for _ in range(_TRIES):
            before, data, after = self._fetch(texts)
            if room is not None:
                room.learn(data)
            opened = self._with(before)
            records: list[Any] = []
            try:
                records = opened.codec.loads(texts, data)
                values = self._values(opened.ledger, records)
            except StaleBatchError:
                newest = self.ledger().next_txid - 1
                unknown = newer_txids(texts, records, newest)
                pause = next(pauses, None) if unknown else 0.0
                if pause is None:
                    raise newer_than_ledger(self._state, unknown, newest) from None
                time.sleep(pause)
                continue
            except CorruptRecordError:
                if self._changed(opened):
                    continue  # the record may have a field that was added meanwhile
                raise
            if (
                not contains_none(data)
                or before == after
                or _purged(self._with(after).ledger) == _purged(opened.ledger)
            ):
                return opened, values
        raise StaleBatchError(
            f"state {self._state!r}: a batch began within each of {_TRIES} reads in a row, because batches come faster "
            f"than {len(texts)} keys can be read. Read fewer at a time.",
            state=self._state,
        )

    def _values(self, ledger: LedgerRecord, records: list[Any]) -> list[Any]:
        """The values of the records by the one rule. Raises StaleBatchError for a record newer than the ledger."""
        if ledger.type == "non-transactional":
            return records
        view, newest = self._view(ledger), ledger.next_txid - 1
        if not self._latest and ledger.type == "opaque":
            return view.values(records, newest)
        if any(record is not None and record[0] > newest for record in records):
            raise StaleBatchError(f"a record is newer than txid {newest}")
        return [None if record is None or not view.check_age(record[0]) else record[1] for record in records]

    def _view(self, ledger: LedgerRecord) -> CommitView:
        """The ledger's view, without the last batch if the state is to be read as it was before that batch."""
        last = ledger.last_commit
        if self._before is None or ledger.type != "opaque" or last is None:
            return ledger.view()
        query_id, batch_id = self._before
        if ledger.owner != query_id or last.owner != query_id or last.batch_id < batch_id:
            return ledger.view()
        if last.batch_id > batch_id or ledger.next_txid != last.txid + 1:
            # An orphaned attempt matters, too: its records keep the values of this batch, and not those before it.
            other = last.batch_id > batch_id
            later = f"batch {last.batch_id} is committed" if other else "an attempt or a vacuum began"
            raise UsageError(
                f"state {self._state!r} cannot be read as it was before batch {batch_id}: {later} since, and records "
                "keep one value before the current one. Restore the store as it was before that; or ask this once with "
                "consistency='latest', which answers with what is there now."
            )
        return CommitView(last.txid - 1, ledger.dead, ledger.floor, ledger.first_txid)

    def _changed(self, opened: _Opened) -> bool:
        stored = ledger_store(self._store).load()
        return stored is None or stored[0] != opened.data

    def _fetch(self, texts: list[Any]) -> tuple[bytes | None, list[Any], bytes | None]:
        store = self._store
        if self._in_one_call:
            read: tuple[bytes | None, list[Any], bytes | None] = store.multi_get_with_ledger(texts)
            return read
        ledger = ledger_store(store)
        before = ledger.load()
        data = store.multi_get(texts)
        after = ledger.load() if contains_none(data) else before
        return (before and before[0], data, after and after[0])


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


class _KeyCount:
    """The keys of a scan, and whether their number can be compared with the ledger's."""

    def __init__(self, ledger: LedgerRecord, *, comparable: bool) -> None:
        self.ledger = ledger
        self.keys = DistinctKeys()
        self.settled = comparable
        self._contents = ledger.contents()
        self._held = ledger.keys_held()
        self.verify(ledger)

    @property
    def held(self) -> int | None:
        """The ledger's number, as long as it can be compared."""
        return self._held if self.settled else None

    def verify(self, ledger: LedgerRecord) -> None:
        """Note a ledger under which a page was read."""
        if ledger is self.ledger and ledger.type == "opaque":
            return
        at_work = ledger.type != "opaque" and ledger.in_flight is not None
        self.settled = self.settled and not at_work and ledger.contents() == self._contents

    def add(self, ledger: LedgerRecord, page: list[StoreKey], values: list[Any]) -> None:
        """Note the keys of a page."""
        self.verify(ledger)
        self.keys.update(
            list(compress(page, [value is not None for value in values])) if contains_none(values) else page
        )


def _check_missing(state: str, counted: CountedKeys) -> None:
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


class _Opened:
    """A ledger and the codecs of its schema. Those of ``last`` are kept if the schema is the same."""

    def __init__(
        self, data: bytes, ledger: LedgerRecord, aggregators: Mapping[str, Aggregator], last: _Opened | None
    ) -> None:
        self.data = data
        self.ledger = ledger
        same = last if last is not None and last.ledger.field_counts == ledger.field_counts else None
        form = serializer(ledger.serializer)
        self.keys: KeyCodec = same.keys if same else KeyCodec(ledger.keys, native=form.native)
        self.codec: RecordCodec = (
            same.codec if same else RecordCodec(form, ledger.state, ledger.type, ledger.fields, ledger.field_counts)
        )
        self.fields: Fields = same.fields if same else results_of(ledger.fields, aggregators)


def _purged(ledger: LedgerRecord) -> tuple[int, int]:
    """A pair that differs between two ledgers if records may have been purged between them."""
    return ledger.first_txid, ledger.rewrites
