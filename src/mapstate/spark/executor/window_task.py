"""What runs on an executor for a state with windows: its batches, its purge, and the windows that a batch has fired."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from mapstate.aggregators.fields import NO_ROWS, Fields
from mapstate.aggregators.results import joined
from mapstate.backing_map import close_if_possible
from mapstate.capabilities import FencedWrites, FenceToken, Rewrites
from mapstate.errors import (
    AggregatorError,
    FencedError,
    SerializationError,
    StaleBatchError,
    ValueOverflowError,
    cut,
    of_first_key,
    of_key,
)
from mapstate.keys import KeyCodec, StoreKey, contains_none
from mapstate.maps.opaque import CombineAll
from mapstate.maps.pane_index import (
    PaneIndex,
    PaneKeys,
    Slice,
    batched,
    index_codec,
    index_keys,
    index_lost,
    key_pages,
    record_lost,
    slices,
    windows_of_ledger,
)
from mapstate.maps.serialized import SerializedMap, writer_of
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.records import CommitView
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.protocol.windows import NEVER
from mapstate.serializers import RecordCodec, record_codec, serializer
from mapstate.spark.executor.error_text import each_with_errors_as_text
from mapstate.spark.executor.task import BatchTask, TaskReport, arrow_schema
from mapstate.spec import StateSpec

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class WindowReport(msgspec.Struct):
    """What a task of a state with windows says beside.

    ``late`` and ``between`` are rows; ``latest`` has the times of each input that may move the watermark, see
    `mapstate.protocol.windows.latest_without_hole`, and ``has_rows`` whether it had any; ``panes`` are those that the
    task wrote, ``newest`` is the latest time of rows that count in rolling windows, ``beyond`` of those too far
    beyond the clock.
    """

    late: int
    between: int
    latest: list[list[tuple[int, int, int]]]
    has_rows: list[bool]
    panes: list[int]
    newest: int | None = None
    beyond: int | None = None


class TimedTask(BatchTask):
    """A task with columns beside the partials, see `mapstate.spark.driver.window_rows.BESIDE`.

    ``inputs`` and ``beside`` say how many there are, ``hole`` what parts two stretches of times, ``place`` which column
    is null in rows that count in no window.
    """

    def __init__(self, *, inputs: int, beside: int, hole: int, place: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.inputs = inputs
        self.beside = beside
        self.hole = hole
        self.place = place

    def counted(self, batches: Iterator[pa.RecordBatch], report: TaskReport) -> Iterator[pa.RecordBatch]:
        """The groups that lie in windows, without the columns beside."""
        counted = report.windows = WindowReport(0, 0, [[] for _ in range(self.inputs)], [False] * self.inputs, [])
        for batch in super().counted(batches, report):
            columns, names = batch.columns, batch.schema.names
            end = len(columns) - (self.partials is not None)  # the number of rows stays last
            start = end - self.inputs - self.beside
            for i in range(self.inputs):
                marks = columns[start + i].drop_null()
                counted.has_rows[i] |= len(marks) > 0
                counted.latest[i] += _stretches(marks.filter(pc.not_equal(marks, NEVER)), self.hole)
            is_outside = pc.is_null(columns[self.place])
            outside = pc.sum(is_outside if self.partials is None else columns[-1].filter(is_outside)).as_py() or 0
            report.rows_done += outside
            kept = [*range(start), *range(end, len(columns))]
            inside = pa.RecordBatch.from_arrays([columns[at] for at in kept], [names[at] for at in kept])
            if outside:
                inside = inside.filter(pc.invert(is_outside))
            self.note(counted, outside, columns[start + self.inputs : end], columns[self.place])
            if inside.num_rows:
                yield inside

    def note(self, found: WindowReport, outside: int, beside: Sequence[pa.Array], places: pa.Array) -> None:
        """Notes what a batch has ``beside``: ``outside`` rows are in no window, and their ``places`` are null."""
        raise NotImplementedError


def _stretches(times: pa.Array, hole: int) -> list[tuple[int, int, int]]:
    first, last = pc.min_max(times).as_py().values()
    if first is None or last - first <= hole:
        return [] if first is None else [(first, last, len(times))]
    times = times.sort()
    cuts = pc.indices_nonzero(pc.greater(pc.subtract(times[1:], times[:-1]), hole)).to_pylist()
    ends = zip([0, *(at + 1 for at in cuts)], [*cuts, len(times) - 1], strict=True)
    return [(times[start].as_py(), times[end].as_py(), end - start + 1) for start, end in ends]


class WindowTask(TimedTask):
    """A task of a state with windows: its new keys go into the pane index. ``has_gaps`` says what stands beside."""

    def __init__(self, *, has_gaps: bool, **settings: Any) -> None:
        super().__init__(beside=int(has_gaps), **settings)

    def key_index(self, writer: Any, partition: int) -> PaneIndex:
        codec = index_codec(self.spec.serializer, self.spec.state)
        return PaneIndex(writer, codec, self.view, self.txid, partition)

    def note(self, found: WindowReport, outside: int, beside: Sequence[pa.Array], places: pa.Array) -> None:
        late = (pc.sum(beside[0]).as_py() or 0) if beside else outside
        found.late += late
        found.between += outside - late
        found.panes = sorted({*found.panes, *pc.unique(places.drop_null()).cast(pa.int64()).to_pylist()})

    def keeping(self, bases: list[Any]) -> CombineAll:
        """See `BatchTask.keeping`. No batch removes a key of a window, so the index names it once."""
        keeping = super().keeping(bases)

        def combine(old: list[Any], partials: list[Any]) -> list[Any]:
            values = keeping(old, partials)
            pairs = zip(values, partials, strict=True) if contains_none(values) else ()
            if any(value is None and partial is not NO_ROWS for value, partial in pairs):
                raise AggregatorError(
                    f"state {self.spec.state!r}: an aggregator returned None for a key, and a key of a window cannot "
                    "be removed. This batch is not committed. Return a value that stands for nothing."
                )
            return values

        return combine


class Reads:
    """The committed records of one state, as of one ledger. The store is opened by the first read."""

    def __init__(self, spec: StateSpec, record: LedgerRecord, view: CommitView, newest: int) -> None:
        self._spec = spec
        self.keys = PaneKeys(record)
        self.pages, self.records = index_codec(spec.serializer, spec.state), record_codec(record)
        self._view = view
        self._newest = newest

    @cached_property
    def store(self) -> Any:
        return self._spec.open()

    def close(self) -> None:
        close_if_possible(self.__dict__.get("store"))

    def index(self, keys: list[str]) -> list[Any]:
        return self._view.values(self.pages.loads(keys, self.store.multi_get(keys)), self._newest)

    def values(self, keys: list[StoreKey]) -> list[Any]:
        return self._view.values(self.records.loads(keys, self.store.multi_get(keys)), self._newest)

    def values_in(self, pane: int, rests: Sequence[str]) -> list[Any]:
        return self.values(self.keys.of(self.keys.text(pane), rests))


class PurgeTask:
    """Removes the records of gone panes and their index: a row as `Slice` in, the number removed out. Picklable."""

    def __init__(self, spec: StateSpec, record: LedgerRecord, token: FenceToken, view: CommitView, txid: int) -> None:
        self.spec = spec
        self.record = record
        self.token = token
        self.view = view
        self.txid = txid

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return each_with_errors_as_text(self._removed(batches))

    def _removed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            parts = [
                Slice(*(row[name] for name in ("pane", "partition", "full", "rests"))) for row in batch.to_pylist()
            ]
            yield pa.RecordBatch.from_arrays([pa.array([self.work(parts)], pa.int64())], ["keys"])

    def work(self, parts: Sequence[Slice]) -> int:
        """The number of keys that the index had. Raises FencedError."""
        removed = 0
        with closing(self.reads()) as reads, writer_of(reads.store, self.token) as writer:
            for part in parts:
                for rests in key_pages(reads.index, part):
                    self._remove(reads.store, writer, reads.keys.of(part.pane, rests), reads.records)
                    removed += len(rests)
                self._remove(reads.store, writer, list(index_keys(part)), reads.pages)
        return removed

    def write(self, pages: Mapping[str, tuple[Any, Any]]) -> None:
        """Puts pages of panes, see `PanePages.changed`. Raises FencedError."""
        with closing(self.reads()) as reads, writer_of(reads.store, self.token) as writer:
            self._put(writer, [*pages], [(self.txid, *page) for page in pages.values()], reads.pages)

    def reads(self) -> Reads:
        return Reads(self.spec, self.record, self.view, self.txid)

    def _remove(self, store: Any, writer: Any, keys: list[Any], codec: Any) -> None:
        # A store that filters each record keeps a tombstone: a late put would find no newer one.
        if not (isinstance(store, FencedWrites) and isinstance(writer, Rewrites)):
            self._put(writer, keys, [(self.txid, None, None)] * len(keys), codec)
            return
        for some in batched(keys, self.spec.chunk_size):
            writer.multi_rewrite(some, [None] * len(some))

    def _put(self, writer: Any, keys: list[Any], records: Sequence[tuple[int, Any, Any]], codec: Any) -> None:
        state = SerializedMap(writer, codec)
        most = self.spec.chunk_size
        for some, page in zip(batched(keys, most), batched(records, most), strict=True):
            writer.multi_get(some)  # a put belongs to the get before it
            state.multi_put(some, page)


class Page(NamedTuple):
    """Some keys of a pane and their values, and for each window that they are of, where it ends for each key."""

    pane: int
    rests: Sequence[str]
    values: Sequence[Any]
    ends: Sequence[Sequence[int]]


class FiredTask:
    """Reads the panes of fired windows. Picklable. A row is a pane and a partition.

    Gives out, for each key and window, the window's end, the rest of the key, the pane, and the value packed;
    `JoinTask` takes these. Raises FencedError where another driver or an operator has taken over or the windows are
    gone, and StoreLostError where a key that the index names has no record.
    """

    def __init__(self, spec: StateSpec, record: LedgerRecord, ends: range) -> None:
        self.spec = spec
        self.record = record
        self.ends = ends

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return each_with_errors_as_text(self._packed(batches))

    def _packed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        packed = packing(self.record)
        for page in self.pages(batches):
            panes = pa.repeat(pa.scalar(page.pane, pa.int64()), len(page.rests))
            rests, data = pa.array(page.rests, pa.string()), pa.array(packed.dumps(page.values), pa.binary())
            for ends in page.ends:
                yield pa.RecordBatch.from_arrays(
                    [pa.array(ends, pa.int64()), rests, panes, data], [*PACKED_ORDER, "value"]
                )

    def pages(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Page]:
        """The same, not packed. One look at the ledger vouches for as many pages as have the keys of a chunk."""
        with closing(Reads(self.spec, self.record, self.record.view(), self.record.next_txid - 1)) as reads:
            places = (place for batch in batches for place in zip(*batch.to_pydict().values(), strict=True))
            unsure: list[Page] = []
            keys = 0
            try:
                for page in (page for pane, partition in places for page in self._pages(reads, pane, partition)):
                    unsure.append(page)
                    keys += len(page.values)
                    if keys >= self.spec.chunk_size:
                        self.check_ledger(reads.store)
                        yield from unsure
                        unsure, keys = [], 0
            except StaleBatchError:
                self.check_ledger(reads.store, is_overtaken=True)
                raise
            self.check_ledger(reads.store)  # also without one: an index that a purge has removed names no keys
            yield from unsure

    def _pages(self, reads: Reads, pane: int, partition: int) -> Iterator[Page]:
        for part in slices(reads.index, [reads.keys.text(pane)], partition + 1, first=partition):
            for rests in self._rests(reads, part):
                yield self._page(reads, pane, rests)

    def _page(self, reads: Reads, pane: int, rests: Sequence[str]) -> Page:
        panes = windows_of_ledger(self.record).definition.panes
        values = reads.values_in(pane, rests)
        self.check_present(reads, pane, rests, values)
        if reads.records.blocks is not None:  # the rests are of blocks
            rests, values = [text for of in values for text in of.texts()], reads.records.blocks.all_values(values)
        return Page(pane, rests, values, [[end] * len(rests) for end in panes.ends(pane) if end in self.ends])

    def _rests(self, reads: Reads, part: Slice) -> Iterator[list[str]]:
        """The keys of a slice, a chunk at a time. Raises StoreLostError, see the class."""

        def lost(chunk: str) -> None:
            self.check_ledger(reads.store)  # a purge may have removed it
            raise index_lost(self.spec.state, chunk)

        for rests in key_pages(reads.index, part, lost):
            yield from batched(rests, self.spec.chunk_size)

    def check_ledger(self, store: Any, *, is_overtaken: bool = False) -> None:
        """Raises FencedError, see the class; ``is_overtaken`` where a record is newer, also if an attempt has begun."""
        now = read_ledger(store, self.spec.state)
        is_overtaken = is_overtaken and now.next_txid > self.record.next_txid
        is_gone = now.windows is None or now.windows.purged >= self.ends[0]
        if is_gone or is_overtaken or now.epoch != self.record.epoch:
            raise FencedError(
                f"state {self.spec.state!r}: another driver or an operator has taken over, or a later batch has begun, "
                "while the windows of a batch that counts were read. What was read is given out nowhere.",
                state=self.spec.state,
            )

    def check_present(self, reads: Reads, pane: int, rests: Sequence[str], values: Sequence[Any]) -> None:
        """Raises StoreLostError, see the class."""
        if contains_none(values):
            self.check_ledger(reads.store)  # a purge may have removed it
            raise record_lost(self.spec.state, reads.keys.text(pane), rests[list(values).index(None)])


class JoinTask:
    """The values of a window's panes as one row per window and key. Picklable. Takes rows in `PACKED_ORDER`.

    Raises ValueOverflowError and SerializationError for a value that has no room in its type. The batch counts then.
    """

    def __init__(self, record: LedgerRecord, fields: Fields, out: StructType) -> None:
        self.record = record
        self.fields = fields
        self._out = out

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return each_with_errors_as_text(self._joined(batches))

    def _joined(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        codec = packing(self.record)
        open_window: tuple[int, str] | None = None
        value: Any = None
        for batch in batches:
            ends, rests, data = (batch[name].to_pylist() for name in ("window_end", "rest", "value"))
            whole: list[tuple[tuple[int, str], Any]] = []
            rows = zip(zip(ends, rests, strict=True), codec.loads(rests, data), strict=True)
            for window, group in groupby(rows, itemgetter(0)):
                for _, side in group:
                    if window == open_window:
                        value = self._both(value, side, rest=window[1])
                        continue
                    if open_window is not None:
                        whole.append((open_window, value))
                    open_window, value = window, side
            if whole:
                windows, values = zip(*whole, strict=True)
                yield self.rows([end for end, _ in windows], [rest for _, rest in windows], values)
        if open_window is not None:
            yield self.rows([open_window[0]], [open_window[1]], [value])

    def rows(self, ends: Sequence[int], rests: Sequence[str], values: Sequence[Any]) -> pa.RecordBatch:
        record = self.record
        arrow, keys = arrow_schema(self._out), KeyCodec(record.keys[1:])
        until = pa.array(ends, pa.int64())
        columns = [
            self._starts(until, values).cast(arrow.types[0]),
            until.cast(arrow.types[1]),
            *(zip(*keys.decode_all(rests), strict=True) if record.keys[1:] else ()),
            *zip(*self._shown(values), strict=True),
        ]
        try:
            arrays = [
                column if isinstance(column, pa.Array) else pa.array(column, kind)
                for column, kind in zip(columns, arrow.types, strict=True)
            ]
        except (ValueError, TypeError, OverflowError) as error:
            wrong, state = SerializationError(self._not_given_out(error)), record.state
            if len(rests) == 1:
                raise of_key(wrong, state, rests[0]) from error
            raise of_first_key(
                *(wrong, state, rests), lambda at: self.rows([ends[at]], [rests[at]], [values[at]])
            ) from error
        return pa.RecordBatch.from_arrays(arrays, schema=arrow)

    def _both(self, value: Any, other: Any, *, rest: str) -> Any:
        try:
            return joined(self.fields, [value, other])
        except ValueOverflowError as error:
            wrong = ValueOverflowError(self._not_given_out(error), **error.facts)
            raise of_key(wrong, self.record.state, rest) from error

    def _not_given_out(self, error: Exception) -> str:
        return (
            f"state {self.record.state!r}: a window that has fired cannot be given out: {cut(error)}. The batch that "
            "fired it counts, and fails here each time that it comes again. Give the aggregator more room (most=), or "
            "start the job without what follows firedWindowsStream(), and read the windows with window()."
        )

    def _starts(self, ends: pa.Array, values: Sequence[Any]) -> pa.Array:  # noqa: ARG002  sessions have it in the value
        return pc.subtract(ends, windows_of_ledger(self.record).definition.length)

    def _shown(self, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        return self.fields.shown_all(values)


@dataclass(frozen=True)
class ReadAndJoin:
    """Both tasks in one, where each window of a key is one record."""

    read: FiredTask
    join: JoinTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return each_with_errors_as_text(self._rows(batches))

    def _rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for page in self.read.pages(batches):
            for ends in page.ends:
                if ends:
                    yield self.join.rows(ends, page.rests, page.values)


PACKED = "window_end bigint, rest string, pane bigint, value binary"
"""The columns between `FiredTask` and `JoinTask`."""

PACKED_ORDER = ("window_end", "rest", "pane")
"""How `JoinTask` takes them: a sum of doubles depends on the order of its panes, and is the same at each repeat."""


def packing(record: LedgerRecord) -> RecordCodec:
    """Bare values in bytes, whatever the store keeps."""
    return RecordCodec(
        serializer("msgpack"), record.state, "non-transactional", record.fields, ((0, len(record.fields)),)
    )
