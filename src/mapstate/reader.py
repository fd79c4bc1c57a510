"""Reading a state without Spark, as of a whole batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
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
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)  # seconds, before a record that no ledger knows is an error


def open_reader(
    backend_or_url: Backend | str,
    state: str,
    *,
    consistency: Consistency = "committed",
    aggregators: Mapping[str, Aggregator] | None = None,
) -> StateReader:
    """A reader of one state. Any process, any number of them, while the stream runs.

    ``consistency``  "committed": whole batches only. "latest": whatever is there, which may be of a
                     batch that has not ended and may yet be taken back. Transactional and
                     non-transactional states are read latest in any case: they keep nothing older
    ``aggregators``  a user's own, by field name, where their `result` shall be shown

    Raises StateNotFoundError where there is no such state, LedgerLostError where there are records without a ledger
    (to tell, all keys may be listed), and ConfigurationError, StoreError.
    """
    if consistency not in ("committed", "latest"):
        raise ConfigurationError(f"consistency is 'committed' or 'latest', not {consistency!r}")
    reader = StateReader(resolve(backend_or_url), state, consistency, aggregators or {})
    reader.ledger()
    return reader


class StateReader:
    """Committed reads of one state; see `open_reader`. A context manager; not thread-safe.

    ``before`` is a query id and one of that query's batches, the last one or the one that comes next: an opaque
    state is read as it was before that batch, also where it is committed by now.
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
        self._in_one_call = isinstance(self._store, LedgerReads)  # asking a protocol takes as long as ten keys
        self._latest = consistency == "latest"
        self._aggregators = aggregators
        self._before = before
        self._opened: _Opened | None = None

    def ledger(self) -> LedgerRecord:
        """The state's ledger as it is now: owner, committed and previous batch, what is in flight."""
        return read_ledger(self._store, self._state)

    def reports(self) -> list[BatchReport]:
        """The last hundred batches, newest first; empty where the store keeps no reports. One read."""
        return read_reports(self._store, self._state)

    def key_count(self) -> int | None:
        """The number of keys that the state holds, from its ledger: one small read. None if unknown.

        Removed keys do not count. Unknown is the number of a state with a ttl, and see docs/operating.md#how-many-keys.
        """
        return self.ledger().keys_held()

    def count_keys(self, page_size: int = 1000) -> CountedKeys:
        """Read all keys, and count those that are there. 8 bytes of memory per key.

        Raises UsageError for a store that cannot list its keys; CorruptRecordError, LedgerLostError, StoreError.
        """
        pages, count, unreadable = self._pages(page_size), self._start_count(), Unreadable(self._state)
        for _ in self._read_pages(pages, unreadable, count):
            pass
        if unreadable.count:
            raise unreadable.error()
        return self._counted(count)

    def get(self, key: Any) -> dict[str, Any] | None:
        """The fields of one key, or None where it is absent.

        ``key`` is a tuple or a list of the grouping values, or bare where there is one grouping column. Raises
        KeyEncodingError, CorruptRecordError, LedgerLostError, StaleBatchError, StoreError.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[Any]) -> list[dict[str, Any] | None]:
        """One entry per key, in order, all of them as of the same batch.

        One round trip on Redis; two where of more than 128 keys some are absent. Raises what `get` raises.
        """
        if isinstance(keys, str | bytes):
            raise UsageError("multi_get takes a list of keys; for one key there is get")
        if not keys:
            return []
        opened = self._open()
        opened, values = self._read(opened.keys.encode_all(keys))
        return opened.fields.named(values)

    def scan(self, page_size: int = 1000) -> Iterator[tuple[Key, dict[str, Any]]]:
        """All keys and their fields, a page of about ``page_size`` keys at a time in memory, or of fewer large records.

        Each page is whole as of a batch; two pages may be of two batches. Keys that come while the scan
        runs may be missed. On Redis a key can come twice, as with SCAN itself.

        What cannot be read does not end the scan: when all other keys have come, CorruptRecordError names the first ten
        such keys (``keys``) and says how many there are (``count``). Raises MissingKeysError behind the last key, if
        the ledger says that the state holds more keys. It compares only if no batch was committed and no vacuum began
        during the scan, and if the ledger knows; for states that are not opaque, only if no batch was at work.
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
        """What is there of each page; ``count`` and ``unreadable`` learn of it."""
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
        """Before the store lists its keys: all that the ledger counts are there then."""
        found = ledger_store(self._store).load()
        self._opened = self._with(None if found is None else found[0])
        return _KeyCount(self._opened.ledger, comparable=not self._latest and self._before is None)

    def _counted(self, count: _KeyCount) -> CountedKeys:
        found = len(count.keys)
        if count.held is not None and count.held != found:
            count.verify(self.ledger())  # what is read latest may be of a batch that has begun behind the last page
        return CountedKeys(found, count.held, count.ledger, settled=count.settled)

    def close(self) -> None:
        """Lets the store's connection go. Closing twice is no error."""
        close_if_possible(self._store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> _Opened:
        if self._opened is None:
            found = ledger_store(self._store).load()
            self._opened = self._with(None if found is None else found[0])
        return self._opened

    def _with(self, data: bytes | None) -> _Opened:
        """The ledger decoded, and what is made from its schema: anew only where it has changed."""
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
        """Values of some keys as of one ledger.

        Read once more where the ledger was overtaken: a record newer than all it has given out; or
        where a key is absent and a vacuum came between, which may have purged it, or another incarnation of the state.

        A record that is newer than the ledger read after it was written by no attempt: it is read again after each of
        ``pauses``, in case a failover is under way, and then it is an error.
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
                    continue  # of a field that was added meanwhile
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
        """What counts of the records. Raises StaleBatchError where the ledger was overtaken."""
        if ledger.type == "non-transactional":
            return records
        view, newest = self._view(ledger), ledger.next_txid - 1
        if not self._latest and ledger.type == "opaque":
            return view.values(records, newest)
        if any(one is not None and one[0] > newest for one in records):
            raise StaleBatchError(f"a record is newer than txid {newest}")
        return [None if one is None or not view.check_age(one[0]) else one[1] for one in records]

    def _view(self, ledger: LedgerRecord) -> CommitView:
        """What counts; without the last batch where the state is to be read as it was before it."""
        done = ledger.last_commit
        if self._before is None or ledger.type != "opaque" or done is None:
            return ledger.view()
        query_id, batch_id = self._before
        if ledger.owner != query_id or done.owner != query_id or done.batch_id < batch_id:
            return ledger.view()
        if done.batch_id > batch_id or ledger.next_txid != done.txid + 1:
            # Also one that did not end: what it has written keeps the values of this batch, and not those before it.
            other = done.batch_id > batch_id
            later = f"batch {done.batch_id} is committed" if other else "an attempt or a vacuum began"
            raise UsageError(
                f"state {self._state!r} cannot be read as it was before batch {batch_id}: {later} since, and records "
                "keep one value before the current one. Restore the store as it was before that; or ask this once with "
                "consistency='latest', which answers with what is there now."
            )
        return CommitView(done.txid - 1, ledger.dead, ledger.floor, ledger.first_txid)

    def _changed(self, opened: _Opened) -> bool:
        found = ledger_store(self._store).load()
        return found is None or found[0] != opened.data

    def _fetch(self, texts: list[Any]) -> tuple[bytes | None, list[Any], bytes | None]:
        store = self._store
        if self._in_one_call:
            found: tuple[bytes | None, list[Any], bytes | None] = store.multi_get_with_ledger(texts)
            return found
        ledger = ledger_store(store)
        before = ledger.load()
        data = store.multi_get(texts)
        after = ledger.load() if contains_none(data) else before
        return (before and before[0], data, after and after[0])


class CountedKeys(NamedTuple):
    """What `StateReader.count_keys` found.

    ``found``    keys that are there
    ``held``     keys that the ledger says; None if it does not know, or if the two cannot be compared
    ``ledger``   as it was before the count
    ``settled``  no batch was committed and no vacuum began meanwhile, so the count is of one moment
    """

    found: int
    held: int | None
    ledger: LedgerRecord
    settled: bool


class _KeyCount:
    """The keys that a scan finds, and whether they can be compared with the ledger's number."""

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
        """One more ledger under which was read."""
        if ledger is self.ledger and ledger.type == "opaque":
            return
        at_work = ledger.type != "opaque" and ledger.in_flight is not None
        self.settled = self.settled and not at_work and ledger.contents() == self._contents

    def add(self, ledger: LedgerRecord, page: list[StoreKey], values: list[Any]) -> None:
        """One more page."""
        self.verify(ledger)
        self.keys.update(
            list(compress(page, [value is not None for value in values])) if contains_none(values) else page
        )


def _check_missing(state: str, counted: CountedKeys) -> None:
    found, held = counted.found, counted.held
    if held is None or found >= held:
        return
    raise MissingKeysError(
        f"state {state!r}: {held - found} of {held} keys are missing. The scan gave out all {found} that are there. "
        "Something else deleted records, or the store evicted or lost them. Restore the store, or accept the loss: "
        "mapstate recount. See docs/operating.md#how-many-keys",
        state=state,
        found=found,
        expected=held,
    )


class _Opened:
    """A ledger, and what is made from its schema, which is taken from ``last`` where it has not changed."""

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
    """What differs between two ledgers if records may have gone from one to the other."""
    return ledger.first_txid, ledger.rewrites
