"""Read a state from threads, as of a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.fields import Fields
from mapstate.backends import check_state_name
from mapstate.backing_map import Backend
from mapstate.errors import KeyEncodingError, UnknownColumnError, UsageError, WindowGoneError
from mapstate.findings import Unreadable
from mapstate.keys import Key, StoreKey, contains_none
from mapstate.maps.record_pass import measured_fields
from mapstate.maps.serialized import Room
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.stored_ledger import check_page_size
from mapstate.reader.capabilities import ThreadSafe
from mapstate.reader.committed import PAUSES, CommittedReads, Consistency, Opened
from mapstate.reader.forms import reader_html
from mapstate.reader.rolling import Asked, At, Ends, check_columns, keys_given
from mapstate.reader.scans import Answer, BatchReports, CountedKeys, KeyCount, Listed, Page, ScanPage, check_missing
from mapstate.reader.tables import Columns, driver

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

    from mapstate.reader.changes import Position
    from mapstate.reader.times import Time, Watermark
    from mapstate.reader.windows import Window

_PAGE_BYTES = 512 << 10  # of stored records, in a page of a scan


class StateReader:
    """Committed reads of one state; see `open_reader`. A context manager.

    Any number of threads may use one reader at one time, and each call reads one whole batch. Threads share its
    connections, which Redis and SQLite keep in a pool: it grows to the number of calls that run at one time. A store of
    another package is called from one thread at a time, unless it is `mapstate.reader.capabilities.ThreadSafe`.

    After a fork the child may use the reader, too, on Redis, SQLite and Aerospike: it makes connections of its own.

    ``before`` is a query id and a batch of that query, its last or its next. An opaque state is then read as it was
    before that batch, even if the batch is committed.

    ``as_of`` is a ledger of the state. All is then read as of its last batch, by whatever process and however long that
    takes; or StaleBatchError says that the values of then are gone. An opaque state keeps them until the second batch
    after it writes the same keys; a state of another type, until the next batch begins.

    For the tasks of one query: ``now``, in microseconds, is the clock of its rolling windows, and ``check`` gets each
    ledger whose columns are others than those of the ledger before.
    """

    def __init__(
        self,
        backend: Backend,
        state: str,
        consistency: Consistency,
        aggregators: Mapping[str, Aggregator],
        *,
        before: tuple[str, int] | None = None,
        as_of: LedgerRecord | None = None,
        max_age: float | None = None,
        now: int | None = None,
        check: Callable[[LedgerRecord], None] | None = None,
    ) -> None:
        self._state = check_state_name(state)
        self._ask = partial(Asked, state, now=now)
        self._reads = CommittedReads(
            *(backend.open(state), state, consistency, aggregators),
            before=before,
            as_of=as_of,
            max_age=max_age,
            check=check,
        )

    def ledger(self) -> LedgerRecord:
        """The current ledger: owner, last and previous commit, the attempt in flight."""
        return self._reads.ledger()

    def reports(self) -> BatchReports:
        """The reports of the last hundred batches, newest first; empty if the store keeps none. One read."""
        return self._reads.reports()

    def key_count(self) -> int | None:
        """The number of keys in the state, from its ledger: one small read. None if unknown.

        Removed keys do not count. The number is unknown for a state with a ttl. See docs/operating.md#how-many-keys.
        """
        return self._reads.opened(newest=True).ledger.keys_held()

    def count_keys(self, page_size: int = 1000, *, on_page: Callable[[int], None] | None = None) -> CountedKeys:
        """Read all keys, and count those with a value. It needs 8 bytes of memory per key.

        ``on_page`` is called after each page with the number of keys that were read so far.

        Raises:
            UsageError: The store cannot list its keys.
            CorruptRecordError: A record cannot be read.
            LedgerLostError: There are records without a ledger.
            StoreError: The store failed.

        """
        count, unreadable, done = self._start_count(collects=True), Unreadable(self._state), 0
        pages = self._reads.pages(count.ledger, page_size)
        for _, texts, _, _ in self._read_pages(pages, count, unreadable):
            done += len(texts)
            if on_page is not None:
                on_page(done)
        if unreadable.count:
            raise unreadable.error()
        return self._counted(count)

    def get(self, key: Any, *, columns: Sequence[str] | None = None, at: At = None) -> dict[str, Any] | None:
        """The fields of one key, None if the key is absent.

        ``key`` is a tuple or a list of the grouping values. The key of a single grouping column may be its bare value.
        ``columns`` are the fields to give, in their order; None gives all. ``at`` is for rolling windows, see
        docs/features.md: where they end, a datetime with a time zone, a number where times are a ``bigint``, or
        "watermark"; None is now.

        Raises:
            KeyEncodingError: The values do not fit the grouping columns.
            CorruptRecordError: The record cannot be read.
            LedgerLostError: There are records without a ledger.
            StaleBatchError: Batches come too fast, a record is newer than the ledger, or the commit beyond ``max_age``.
            StoreError: The store failed.
            UnknownColumnError: The state has no such field.
            WindowGoneError: The tiles of a time before ``at`` are not kept whole any more.
            UsageError: ``at`` is no time, or the state has no rolling windows.
            ValueOverflowError: The values of a rolling window together leave their range.

        """
        return self.multi_get([key], columns=columns, at=at)[0]

    def multi_get(
        self, keys: Sequence[Any], *, columns: Sequence[str] | None = None, at: At = None
    ) -> list[dict[str, Any] | None]:
        """The fields of each key, in the order of ``keys``, all as of the same batch.

        ``columns`` and ``at``: see `get`; ``at`` may have a time for each key. Redis needs one round trip, or two if
        some of more than 128 keys are absent; with ``follow`` one more, at most once a second. Raises the errors of
        `get`, and UsageError for a str or bytes instead of a list.
        """
        return self.answer(keys, columns=columns, at=at).values

    def multi_get_as_of(
        self, keys: Sequence[Any], *, columns: Sequence[str] | None = None, at: At = None
    ) -> tuple[list[dict[str, Any] | None], LedgerRecord]:
        """`multi_get`, and the ledger as of which the values are: its ``last_commit`` is the batch.

        Without keys it reads the ledger alone. A state that is not opaque may also have a part of the batch after it.
        """
        return self.answer(keys, columns=columns, at=at)[:2]

    def answer(self, keys: Sequence[Any], *, columns: Sequence[str] | None = None, at: At = None) -> Answer:
        """`multi_get` with all that there is to say of it: the ledger, and where rolling windows end."""
        keys, asked = keys_given(keys), self._ask(at=at, columns=columns)
        if not keys:
            ledger = self.ledger()
            return Answer([], ledger, None if self._reads.ends(ledger, asked, 0) is None else [])
        opened, fields, values, ends = self._values(keys, asked)
        return Answer(asked.named(fields, values), opened.ledger, asked.times(opened.ledger, ends))

    def found(
        self, keys: Sequence[Any], *, columns: Sequence[str] | None = None, at: At = None
    ) -> tuple[Fields, list[Key], list[Any]]:
        """What `part` yields, of those of the keys that are there. Errors: see `multi_get`."""
        _, fields, values, _ = self._values(keys, self._ask(at=at, columns=columns))
        there = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
        return fields, [key for key, _ in there], [value for _, value in there]

    def _values(self, keys: Sequence[Any], asked: Asked) -> tuple[Opened, Fields, list[Any], Ends | None]:
        known = self._reads.opened()
        while True:
            try:
                texts = known.keys.encode_all(keys)
            except KeyEncodingError:
                newest = self._reads.opened(newest=True)
                if newest.keys is known.keys:
                    raise
                known = newest  # the state was dropped, and made again with other keys
                continue
            opened, values = self._reads.read_keys(known, texts)
            if opened.keys is known.keys:
                values = self._reads.without_gone(opened.ledger, texts, values)
                ends = self._reads.ends(opened.ledger, asked, len(texts))
                return opened, *self._reads.answered(opened, asked, texts, values, ends), ends
            known = opened

    def scan(
        self, page_size: int = 1000, *, columns: Sequence[str] | None = None, at: At = None
    ) -> Iterator[tuple[Key, dict[str, Any]]]:
        """All keys and their fields, with one page of about ``page_size`` keys in memory, or of fewer large records.

        ``columns`` and ``at``: see `get`; now is when the scan begins. The records are read as a whole.

        The number of keys is compared with the ledger's, if the ledger knows it. The comparison needs a scan without a
        commit and without the begin of a vacuum. States that are not opaque need a scan without a batch at work.

        Raises:
            CorruptRecordError: Some keys cannot be read, after all others have come. ``keys`` has the first ten,
                ``count`` their number.
            MissingKeysError: The ledger counts more keys, after the last key has come.
            StaleBatchError: The state was reset or made anew meanwhile. Dropped, it is a StateNotFoundError.
            UnknownColumnError: The state has no such field.
            WindowGoneError: Rolling windows cannot be read as of ``at`` any more.
            UsageError: The store cannot list its keys.
            StoreError: The store failed.

        Not guaranteed: a page is of one batch, but two pages may be of two batches. Keys that are new during the scan
        may be missed. On Redis a key can come twice, as with SCAN. One thread at a time takes from a scan. Of a state
        with windows a key begins with a pane, and keys of windows that are gone are left out.

        """
        return chain.from_iterable(self.pages(page_size, columns=columns, at=at))

    def pages(self, page_size: int = 1000, *, columns: Sequence[str] | None = None, at: At = None) -> Iterator[Page]:
        """`scan`, with a list for each page: all of its keys are as of one batch. Errors: see `scan`."""
        return (page.rows for page in self._pages(page_size, self._asked(columns, at), None) if page.rows)

    def pages_as_of(
        self, page_size: int = 1000, *, columns: Sequence[str] | None = None, at: At = None, cursor: str = ""
    ) -> Iterator[ScanPage]:
        """`pages`, each with the ledger as of which it is, and a cursor from which another scan goes on.

        A cursor is a ``cursor`` of another page of this state, from any process; the scan has what is behind that page.
        Rolling windows end where those of that page do, unless ``at`` is a time. Such a scan does not compare the
        number of keys with the ledger's. A page may be empty.

        Raises the errors of `scan`; UsageError for a text that is no cursor of this state, or one from before the state
        was reset or made anew; and StoreUnavailableError where the store has been restarted since, if its cursors end
        with that. Then scan from the start.
        """
        return self._pages(page_size, self._asked(columns, at), cursor)

    def _pages(self, page_size: int, asked: Asked, cursor: str | None) -> Iterator[ScanPage]:
        cursor = asked.resumed(cursor)
        count = self._start_count(is_whole=not cursor)
        return self._scanned(self._reads.pages(count.ledger, page_size, cursor), count, asked, cursor)

    def watermark(self) -> Watermark:
        """How far the windows of the state are, as of its last batch. One small read.

        Raises UsageError for a state without windows, and the errors of `get`.
        """
        from mapstate.reader.windows import WindowReads

        return WindowReads(self._reads).watermark()

    def windows(self, key: Any = (), *, since: Time | None = None, until: Time | None = None) -> list[Window]:
        """The windows of one key with ``since < end <= until``, in order, as of one batch. Those that still fill, too.

        ``key`` has the grouping columns, without the window; for windows of the whole stream leave it out. ``since``
        and ``until`` are datetimes with a time zone, or numbers where the times of rows are a ``bigint``. Windows that
        are past their retention, or in which the key had no row, are left out. One bulk read.

        Raises the errors of `get`, and UsageError for a state without windows; also for sliding windows with a user's
        own aggregators, which `open_reader` then needs.
        """
        return self.windows_as_of(key, since=since, until=until)[0]

    def windows_as_of(
        self, key: Any = (), *, since: Time | None = None, until: Time | None = None
    ) -> tuple[list[Window], LedgerRecord]:
        """`windows`, and the ledger as of which they are: its ``last_commit`` is the batch."""
        from mapstate.reader.windows import WindowReads

        return WindowReads(self._reads).of_key(key, since, until)

    def window(self, end: Time) -> Iterator[tuple[Key, dict[str, Any]]]:
        """All keys of the window that ends at ``end``, page by page.

        A final window is whole, whatever goes on meanwhile. Of one that still fills each page is as of one batch.

        Raises:
            WindowGoneError: The window is past its retention, or came to be so meanwhile.
            StoreLostError: A key of a final window has no record any more.
            StaleBatchError: A batch was rolled back or planned anew, or the state corrected or reset. Read it again.
            UsageError: The state has no windows, or none that ends there.
            StoreError: The store failed.

        """
        from mapstate.reader.windows import WindowReads

        return chain.from_iterable(WindowReads(self._reads).of_window(end))

    def to_arrow(self, page_size: int = 10_000, *, columns: Sequence[str] | None = None, at: At = None) -> pa.Table:
        """All keys and their fields as a pyarrow Table: a column for each key column, then one for each field.

        Types are those of the ledger's schema; the result of an aggregator without a Spark type is JSON text. The
        table is made page by page: beside it, one page of Python objects is in memory. Arguments, errors and what is
        not guaranteed are those of `scan`.

        Raises:
            MissingDriverError: pyarrow is not installed: ``pip install 'mapstate[tables]'``.
            UnsupportedTypeError: Arrow has no such type, or a mean of decimals has more digits than its type.

        """
        asked = self._asked(columns, at)
        opened = self._reads.opened(newest=True)
        names = None if asked.columns is None else [*(key.name for key in opened.keys.fields), *asked.columns]
        made = Columns(opened.keys.fields, opened.chosen(asked.columns), names)
        count = self._start_count(opened)
        pages = self._found(self._reads.pages(count.ledger, page_size), count, asked, made=made)
        return made.table(made.batches(page[1:4] for page in pages))

    def parts(self, most: int) -> list[str]:
        """Divide a scan into at most ``most`` parts of about equal size, for `part` of any process. One at least.

        Raises UsageError for less than one.
        """
        check_page_size(most, "most is the number of parts")
        return self._reads.parts(most)

    def part(
        self,
        part: str,
        page_size: int = 10_000,
        *,
        columns: Sequence[str] | None = None,
        at: At = None,
        made: Columns | None = None,
    ) -> Iterator[tuple[Fields, Any, Any]]:
        """The pages of one of `parts`: the fields of the values, the keys, and a value for each. All of one batch.

        Raises the errors of `scan`, and StoreUnavailableError where the store has moved its keys about: then divide
        anew. The number of keys is not compared with the ledger's. ``made`` is for `Columns.batches`.
        """
        asked = self._ask(at=at, columns=columns)
        count = self._start_count(is_whole=False)
        return (page[1:4] for page in self._found(self._reads.part(part, page_size), count, asked, made=made))

    def position(self) -> Position:
        """How far the state is, for `changed_keys`. One small read. Raises the errors of `changed_keys`."""
        from mapstate.reader.changes import position_of

        return position_of(self._reads.opened(newest=True).ledger)

    def changed_keys(self, start: Position, end: Position) -> list[Key]:
        """Each key that may have another value at ``end`` than at ``start``, once, without a scan.

        For those who follow a state that keeps its changes: `position`, then the keys since the one before, then their
        values by `multi_get`, of that batch or a later one. A key that is gone is among them. Some have changed back.
        Before the first `position`, scan. A few reads, and a hundred keys a record; all keys come at once.

        Raises:
            ChangesGoneError: The changes since ``start`` are not kept any more, or the state is another one.
            UsageError: The state keeps no changes.
            StoreLostError: Records of the log were evicted or deleted.
            StoreError: The store failed.

        """
        from mapstate.reader.changes import changed_keys

        return changed_keys(self._reads, start, end)

    def to_pandas(
        self, page_size: int = 10_000, *, columns: Sequence[str] | None = None, at: At = None
    ) -> pd.DataFrame:
        """`to_arrow` as a pandas DataFrame. Needs pandas, too. Integers beside nulls are Python's objects."""
        table = self.to_arrow(page_size, columns=columns, at=at)
        driver("pandas", "to_pandas")
        return table.to_pandas(integer_object_nulls=True)  # doubles would round integers above 2**53

    def to_polars(
        self, page_size: int = 10_000, *, columns: Sequence[str] | None = None, at: At = None
    ) -> pl.DataFrame:
        """`to_arrow` as a polars DataFrame: ``pip install 'mapstate[polars]'``."""
        table = self.to_arrow(page_size, columns=columns, at=at)
        return driver("polars", "to_polars").from_arrow(table)  # type: ignore[no-any-return]

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """`to_arrow` as of one batch, as ``as_of`` above: ``pyarrow.table(reader)``, ``polars.DataFrame(reader)``."""
        frozen = copy(self)
        frozen._reads = self._reads.frozen()
        return frozen.to_arrow().__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        return reader_html(self._state, self._reads.seen)

    def _asked(self, columns: Sequence[str] | None, at: At) -> Asked:
        """What a scan asks. Raises UnknownColumnError for columns that the newest ledger lacks, and errors of `At`."""
        asked = self._ask(at=at, columns=columns)
        asked.check_scan()
        try:
            self._check_scan(asked, self._reads.opened())
        except (UnknownColumnError, UsageError, WindowGoneError):  # of the ledger that was read last
            self._check_scan(asked, self._reads.opened(newest=True))
        return asked

    def _check_scan(self, asked: Asked, opened: Opened) -> None:
        self._reads.ends(opened.ledger, asked, 1)
        if asked.columns is not None:
            check_columns(self._state, asked.columns, opened.columns)

    def _scanned(
        self, pages: Iterator[Listed], count: KeyCount, asked: Asked, cursor: str | None
    ) -> Iterator[ScanPage]:
        unreadable = Unreadable(self._state)
        for opened, fields, keys, values, ends, behind in self._found(pages, count, asked, cursor, unreadable):
            problem = unreadable.error() if unreadable.count else None
            times = asked.times(opened.ledger, ends and ends[:1])
            rows = list(zip(keys, asked.named(fields, values), strict=True))
            yield ScanPage(rows, opened.ledger, asked.with_end(behind), problem, times[0] if times else None)

    def _found(
        self,
        pages: Iterator[Listed],
        count: KeyCount,
        asked: Asked,
        cursor: str | None = None,
        unreadable: Unreadable | None = None,
        *,
        made: Columns | None = None,
    ) -> Iterator[tuple[Opened, Fields, Any, Any, Ends | None, str | None]]:
        """The keys of each page that are there, and their values; or None and a batch as ``made``. Errors: `scan`."""
        unreadable = unreadable or Unreadable(self._state)
        for opened, texts, values, behind in self._read_pages(pages, count, unreadable, cursor):
            ends = self._reads.ends(opened.ledger, asked, len(texts))
            asked.keep_end(ends)
            blocks = opened.codec.blocks
            if blocks is not None:
                batch = made and made.of_blocks(opened, texts, values)
                if batch is not None:
                    yield opened, opened.fields, None, batch, ends, behind
                    continue
                values = blocks.all_values(values)  # noqa: PLW2901
            fields, values = self._reads.answered(opened, asked, texts, values, ends)  # noqa: PLW2901
            keys = opened.decoded(texts, unreadable)
            if contains_none(values) or contains_none(keys):
                pairs = zip(keys, values, strict=True)
                there = [(key, value) for key, value in pairs if key is not None and value is not None]
                keys, values = [key for key, _ in there], [value for _, value in there]  # noqa: PLW2901
            yield opened, fields, keys, values, ends, behind
        self._reads.check_scanned()
        if unreadable.count:
            raise unreadable.error()
        check_missing(self._state, self._counted(count))

    def _read_pages(
        self, pages: Iterator[Listed], count: KeyCount, unreadable: Unreadable, cursor: str | None = None
    ) -> Iterator[tuple[Opened, list[StoreKey], list[Any], str | None]]:
        """The values of each page, or its blocks, which ``count`` and ``unreadable`` note, and the cursor behind it."""
        pauses, room = iter(PAUSES), Room(measured_fields(count.ledger), most_bytes=_PAGE_BYTES)
        for page, behind in unreadable.listed(pages):
            left = len(page)
            for part in room.parts(page):
                left -= len(part)
                cursor = cursor if left else behind
                texts, read = unreadable.read(lambda some: self._reads.read(some, pauses, room), part)
                if read is None:
                    continue
                opened, values = read
                self._reads.check_same_state(count.ledger, opened.ledger)
                values = self._reads.without_gone(opened.ledger, texts, values)
                if opened.codec.blocks is not None:
                    there = [(name, block) for name, block in zip(texts, values, strict=True) if block is not None]
                    texts = [
                        text for name, block in there for text in opened.codec.blocks.with_pane(name, block.texts())
                    ]
                    values = [block for _, block in there]
                count.add(opened.ledger, texts, values)
                yield opened, texts, values, None if behind is None else cursor
        self._reads.check_same_state(count.ledger, self._reads.opened(newest=True).ledger)

    def _start_count(self, opened: Opened | None = None, *, is_whole: bool = True, collects: bool = False) -> KeyCount:
        """Begin a scan before the store lists its keys: the ledger is that of what is read, and counts its keys."""
        ledger = (opened or self._reads.opened(newest=True)).ledger
        return KeyCount(ledger, comparable=is_whole and self._reads.compares, collects=collects)

    def _counted(self, count: KeyCount) -> CountedKeys:
        number = len(count.keys)
        if count.held is not None and count.held != number:
            count.verify(self.ledger())  # a latest read may see a batch that has begun after the last page
        return CountedKeys(number, count.held, count.ledger, settled=count.settled)

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads read at one time, instead of one after the other."""
        return isinstance(self._reads.store, ThreadSafe)

    def close(self) -> None:
        """Close the store's connection: each later call raises UsageError. Closing twice is no error."""
        self._reads.close()

    def __enter__(self) -> Self:
        with self._reads.turn:
            return self

    def __exit__(self, *_: object) -> None:
        self.close()
