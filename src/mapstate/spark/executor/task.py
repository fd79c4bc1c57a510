"""One partition of one attempt, from Arrow batches to the store and back: on an executor, or on the driver.

It ends with one line that says what it did, errors too: Spark would try the task again for an error that is raised.
"""

from __future__ import annotations

import gc
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from mapstate.aggregators.fields import Fields
from mapstate.capabilities import Claims, FencedWrites, FenceToken, ReadsAhead
from mapstate.errors import DataError, ExecutorEnvironmentError, MapStateError, SerializationError, cut, of_first_key
from mapstate.keys import KeyCodec, StoreKey
from mapstate.maps import MapState, NonTransactionalMap, OpaqueMap, TransactionalMap
from mapstate.maps.opaque import CombineAll
from mapstate.maps.serialized import Room, SerializedMap, writer_of
from mapstate.protocol.records import CommitView
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.schema import Field, KeyField, StateType
from mapstate.serializers import NativeSerializer, RecordCodec, serializer
from mapstate.spark.executor.error_text import SentError
from mapstate.spark.executor.row_fold import ROWS_WAITING, RowFold, rows_that_fit
from mapstate.spec import StateSpec
from mapstate.version import VERSION

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from mapstate.maps.pane_index import PaneIndex
    from mapstate.protocol.ledger_record import Attempt


REPORT_COLUMN = "__mapstate_report"


class TaskReport(msgspec.Struct):
    """The one line of a task.

    ``rows_in`` were counted as they came, ``rows_done`` as their keys were written; ``lost_claim`` says
    that another try of this task is the writer, so this one wrote nothing. ``skipped`` keys were in already, of
    an earlier attempt at a transactional batch. ``keys_delta`` is how many keys the task added, less those that it
    removed; None if it cannot tell.
    """

    partition: int
    holder: str
    rows_in: int = 0
    rows_done: int = 0
    keys: int = 0
    skipped: int = 0
    keys_delta: int | None = 0
    milliseconds: int = 0
    lost_claim: bool = False
    error: SentError | None = None
    windows: Any = None  # see mapstate.spark.executor.window_task
    blocks: bytes | None = None  # see mapstate.spark.executor.block_task


class BatchTask:
    """The function that `mapInArrow` runs, once per partition and try. Picklable.

    Its input has the key columns first. Then come each field's native partials and a count of rows (``partials`` has
    the number of columns per field), or the columns ``rows_of`` of raw rows, sorted by key (``partials`` is None).
    ``new_values`` is the schema of the new-values rows, or None if nobody asked for them. With ``old_values`` it also
    has the values before the batch.
    """

    def __init__(
        self,
        *,
        spec: StateSpec,
        fields: Fields,
        field_counts: Sequence[tuple[int, int]],
        keys: Sequence[KeyField],
        partials: list[int] | None,
        attempt: Attempt,
        new_values: StructType | None,
        rows_of: Sequence[str] = (),
        old_values: bool = False,
    ) -> None:
        self.spec = spec
        self.state = spec.name or spec.state  # which raises without a name
        self.fields = fields
        self.field_counts = field_counts
        self.keys = keys
        self.partials = partials
        self.batch_id = attempt.batch_id
        self.txid = attempt.txid
        self.view: CommitView = attempt.view
        self.token: FenceToken = attempt.token
        self.new_values = new_values
        self.old_values = old_values
        self.rows_of = rows_of
        self.version = VERSION
        self.in_tiles = False
        self.only_notes = False  # what rows say of times, for a seed; it writes nothing

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Applies the partition; yields new values, where asked for, and at the end the report."""
        started = time.monotonic()
        report = TaskReport(partition=partition_id(), holder=uuid.uuid4().hex)
        try:
            if self.version != VERSION:
                raise ExecutorEnvironmentError(
                    f"an executor has mapstate {VERSION}, and the driver has {self.version}. Its task wrote "
                    "nothing, and the batch is not committed. See docs/cluster.md#an-executor-lacks-the-package"
                )
            if self.only_notes:
                deque(self.counted(batches, report), maxlen=0)
                report.rows_done = report.rows_in
            else:
                yield from self._apply(batches, report)
        except MapStateError as error:
            report.error = SentError.of(error)
        for _ in batches:
            pass  # what is left unread would block the sender
        report.milliseconds = int((time.monotonic() - started) * 1000)
        yield report_line(report, self.new_values)
        if os.environ.get("SPARK_REUSE_WORKER") and gc.get_freeze_count() < 1_000:  # Python 3.12 begins with some
            gc.collect()  # PySpark's worker does so after each task; from now on without what is imported
            gc.freeze()

    def _apply(self, batches: Iterator[pa.RecordBatch], report: TaskReport) -> Iterator[pa.RecordBatch]:
        store = self.spec.backend.open(self.state, ttl=self.spec.ttl or None)
        if self.spec.type == "opaque" and isinstance(store, Claims):
            # Also a task without rows claims: another try of it may have rows.
            report.lost_claim = not self._claimed(store, report)
            if report.lost_claim:
                return
        with writer_of(store, self.token, has_txids=self.spec.type != "non-transactional") as writer:
            room = self.room()
            state = self._map_state(SerializedMap(writer, self.codecs()[0], room))
            state.begin_commit(self.txid)  # without a commit of the map: the ledger commits, on the driver
            counted = self.counted(batches, report)
            native = self.partials is not None
            chunks = self.native_chunks(counted, room) if native else self.folded_chunks(counted, room, state)
            if native and isinstance(writer, ReadsAhead):
                chunks = _read_ahead(chunks, writer)
            index = self.key_index(writer, report.partition)
            delta = 0
            for keys, partials, rows, columns in chunks:
                bases: list[Any] = []
                with _without_gc():
                    try:
                        values = state.multi_combine(keys, partials, self.keeping(bases))
                    except DataError as error:
                        raise self.with_key(error, keys, bases, partials) from error
                count, added = self.written(partials, bases, values)
                delta += added
                if index is not None:
                    index.note(keys, bases, partials)
                report.rows_done += rows
                report.keys += count
                if self.new_values is not None:
                    yield self.new_rows(self.new_values, columns, values, bases)
            if index is not None:
                index.write()
            if isinstance(writer, ReadsAhead):
                writer.flush()
            if isinstance(state, TransactionalMap):
                report.skipped = state.skipped
            # Only an opaque record tells whether a key existed before an earlier try wrote it.
            wrote_before = self.spec.type == "non-transactional" and _is_later_try()
            report.keys_delta = None if report.skipped or wrote_before else delta

    def _claimed(self, store: Any, report: TaskReport) -> bool:
        if store.claim(self.txid, report.partition, report.holder) != report.holder:
            return False
        if isinstance(store, FencedWrites):
            return True
        # Nothing refuses a try that comes after its attempt was committed, when the claim of the first has expired.
        at = read_ledger(store, self.state).in_flight
        return at is not None and (at.txid, at.nonce) == (self.txid, self.token.nonce)

    def room(self) -> Room:
        """How much a task reads and writes at a time."""
        return Room(None if self.in_tiles else self.fields.fields, self.spec.chunk_size, self.spec.chunk_bytes)

    def codecs(self) -> tuple[Any, KeyCodec]:
        """Those of records and keys. Asked once or twice in a task."""
        return _codecs(
            form=self.spec.serializer,
            state=self.state,
            state_type=self.spec.type,
            fields=self.fields.fields,
            field_counts=tuple(self.field_counts),
            keys=tuple(self.keys),
            in_tiles=self.in_tiles,
        )

    def key_index(self, writer: Any, partition: int) -> PaneIndex | None:  # noqa: ARG002
        """What notes the keys that this task writes: the panes' index of new keys, or the log of changes."""
        return None

    def counted(self, batches: Iterator[pa.RecordBatch], report: TaskReport) -> Iterator[pa.RecordBatch]:
        """Counts rows as they come in, apart from those who work on them."""
        for batch in batches:
            report.rows_in += batch.num_rows if self.partials is None else pc.sum(batch.columns[-1]).as_py() or 0
            yield batch

    def _map_state(self, records: Any) -> MapState[Any]:
        if self.spec.type == "opaque":
            return OpaqueMap(records, self.view, written_once=True)
        if self.spec.type == "transactional":
            return TransactionalMap(records, self.view, written_once=True)
        return NonTransactionalMap(records)

    def key_codec(self) -> KeyCodec:
        return self.codecs()[1]

    def native_chunks(self, batches: Iterator[pa.RecordBatch], room: Room) -> Iterator[Chunk]:
        """Chunks of an aggregated batch: one row per key, partials from Catalyst."""
        width = len(self.keys)
        for batch in batches:
            for part in slices(batch, lambda: room.keys, self.spec.chunk_bytes):
                rows = pc.sum(part.columns[-1]).as_py()
                if not rows:
                    continue  # an ungrouped aggregate has one row even where there is nothing to count
                yield *self.keys_and_partials(part.columns[:-1], part.num_rows), rows, part.columns[:width]

    def keys_and_partials(self, columns: Sequence[pa.Array], rows: int) -> tuple[list[StoreKey], list[Any]]:
        """The key texts and partials in the columns of an aggregated batch."""
        width = len(self.keys)
        names = [key.name for key in self.keys]
        for field, size in zip(self.fields.fields, self.partials or (), strict=True):
            names += [field.name] * size
        values = columns_to_python(columns, names)
        at, per_field = width, []
        for size in self.partials or ():
            per_field.append(values[at : at + size])
            at += size
        return self.key_codec().encode_columns(values[:width], rows), self.fields.from_columns(per_field)

    def folded_chunks(self, batches: Iterator[pa.RecordBatch], room: Room, state: MapState[Any]) -> Iterator[Chunk]:
        """Chunks of raw rows sorted by key, folded in Python: for aggregators that are not native."""
        fold = RowFold(self.fields, state, room)
        codec = self.key_codec()
        width = len(self.keys)
        names = [*(key.name for key in self.keys), *self.rows_of]
        for part in (part for batch in batches for part in slices(batch, lambda: ROWS_WAITING, self.spec.chunk_bytes)):
            fold.most_waiting = rows_that_fit(part, self.spec.chunk_bytes)
            columns = columns_to_python(part.columns, names)
            texts = codec.encode_columns(columns[:width], part.num_rows)
            for text, *values in zip(texts, *columns[width:], strict=True):
                fold.add(text, dict(zip(names[width:], values, strict=True)))
                if fold.full:
                    yield self._folded(fold, codec)
        if fold.open is not None:
            fold.close_key()
        if fold.keys:
            yield self._folded(fold, codec)

    def _folded(self, fold: RowFold, codec: KeyCodec) -> Chunk:
        keys, partials, rows = fold.take()
        if self.new_values is None:
            return keys, partials, rows, ()
        arrow = arrow_schema(self.new_values)
        values = zip(*codec.decode_all(keys), strict=True)  # as Spark groups: the first row of a key may have -0.0
        return keys, partials, rows, [pa.array(column, arrow.field(i).type) for i, column in enumerate(values)]

    def keeping(self, bases: list[Any]) -> CombineAll:
        """The fields' combine, which also leaves the values before in ``bases``."""

        def combine(old: list[Any], partials: list[Any]) -> list[Any]:
            bases.extend(old)
            return self.fields.combine_all(old, partials)

        return combine

    def written(self, partials: Sequence[Any], bases: Sequence[Any], values: Sequence[Any]) -> tuple[int, int]:
        """How many keys a chunk has, and how many of them it added, less those that it removed."""
        return len(partials), _nones(bases) - _nones(values)

    def with_key(
        self, error: DataError, keys: Sequence[StoreKey], bases: Sequence[Any], partials: Sequence[Any]
    ) -> MapStateError:
        """The error of a chunk with the key that it is of, where a key alone raises it, too."""
        return of_first_key(
            *(error, self.spec.state, keys[: len(bases)]), lambda at: self.keeping([])([bases[at]], [partials[at]])
        )

    def new_rows(self, schema: StructType, key_columns: Any, values: list[Any], bases: list[Any]) -> pa.RecordBatch:
        """The new values of a chunk."""
        arrow = arrow_schema(schema)
        shown = [self.fields.shown(value) for value in values]
        arrays = [column.cast(arrow.field(i).type) for i, column in enumerate(key_columns)]
        for i, field in enumerate(self.fields.fields):
            try:
                arrays.append(pa.array([report[i] for report in shown], arrow.field(len(arrays)).type))
            except (ValueError, TypeError, OverflowError) as error:
                raise SerializationError(
                    f"the new values of {field.name}={field.aggregator} do not fit their type "
                    f"{schema[field.name].dataType.simpleString()}: {cut(error)}. This batch is not committed.",
                    field=field.name,
                ) from error
        if self.old_values:
            before = [self.fields.with_presence(value, base) for value, base in zip(values, bases, strict=True)]
            columns = zip(*before, strict=True)
            arrays += [pa.array(column, arrow.field(i).type) for i, column in enumerate(columns, len(arrays))]
        return pa.RecordBatch.from_arrays([*arrays, pa.nulls(len(values), pa.string())], schema=arrow)


@lru_cache(maxsize=64)
def _codecs(
    *,
    form: str,
    state: str,
    state_type: StateType,
    fields: tuple[Field, ...],
    field_counts: tuple[tuple[int, int], ...],
    keys: tuple[KeyField, ...],
    in_tiles: bool,
) -> tuple[Any, KeyCodec]:
    """Those of records and keys, made once in each worker: they are the same in all batches of a job."""
    chosen = serializer(form)
    records = RecordCodec(chosen, state, state_type, fields, field_counts, in_tiles=in_tiles)
    return records, KeyCodec(keys, native=form == NativeSerializer.name)


Chunk = tuple[list[StoreKey], list[Any], int, Any]
"""Key texts, partials, the number of rows behind them, and the key columns for `BatchTask.new_rows`."""


def _read_ahead(chunks: Iterator[Chunk], writer: ReadsAhead) -> Iterator[Chunk]:
    """The chunks, each given out when the next one's records are asked for. A single one is not."""
    chunk = next(chunks, None)
    for i, following in enumerate(chunks):
        if chunk is not None:
            if i == 0:
                writer.read_ahead(chunk[0])
            writer.read_ahead(following[0])
            yield chunk
        chunk = following
    if chunk is not None:
        yield chunk


@contextmanager
def _without_gc() -> Iterator[None]:
    """No search for garbage while a chunk is in hand: its thousands of new objects would set it off again and again."""
    pauses = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


def _is_later_try() -> bool:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def _nones(values: Sequence[Any]) -> int:
    return 0 if all(values) else values.count(None)  # counting compares each with None


def arrow_schema(schema: StructType) -> pa.Schema:
    """A Spark schema as PySpark sends it through Arrow; timestamps in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # an older PySpark, which knows no other time zone
        return to_arrow_schema(schema)


def slices(batch: pa.RecordBatch, most_rows: Callable[[], int], most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batch in pieces of at most ``most_rows()`` rows, and bytes of Arrow, but for a single row; not copied."""
    start, fits = 0, batch.nbytes <= most_bytes
    while start < batch.num_rows:
        part = batch.slice(start, most_rows())
        while not fits and part.num_rows > 1 and part.nbytes > most_bytes:
            part = part.slice(0, part.num_rows // 2)
        yield part
        start += part.num_rows


def arrow_to_python(column: pa.Array, name: str) -> list[Any]:
    """The values of a column; timestamps in UTC. Raises SerializationError for what Python cannot hold."""
    try:
        item = column.type.value_type if pa.types.is_list(column.type) else column.type
        if pa.types.is_timestamp(item) and item.tz is not None:
            in_utc = pa.timestamp(item.unit, "UTC")
            column = column.cast(in_utc if item is column.type else pa.list_(in_utc))
        if pa.types.is_timestamp(column.type):  # made once each: all keys of a window have one time
            distinct = column.dictionary_encode()
            times = [*distinct.dictionary.to_pylist(), None]
            return [times[at] for at in distinct.indices.fill_null(len(times) - 1).to_pylist()]
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError) as error:
        raise SerializationError(
            f"the column {name!r} holds a value that Python cannot: {cut(error)}. Clean it in front of the aggregate, "
            "text with make_valid_utf8. This batch is not committed.",
            column=name,
        ) from error
    return values


def columns_to_python(columns: Sequence[pa.Array], names: Sequence[str]) -> list[list[Any]]:
    """The values of columns with these names, see `arrow_to_python`."""
    return [arrow_to_python(column, name) for column, name in zip(columns, names, strict=True)]


def partition_id() -> int:
    """The number of the partition this process works on; 0 where no task runs, on the driver."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def report_line(report: TaskReport, schema: StructType | None) -> pa.RecordBatch:
    """The one row that a task ends with: alone, or as the last column of the rows that it gives out."""
    line = pa.array([msgspec.json.encode(report).decode()], pa.string())
    if schema is None:
        return pa.RecordBatch.from_arrays([line], [REPORT_COLUMN])
    arrow = arrow_schema(schema)
    nulls = [pa.nulls(1, field.type) for field in list(arrow)[:-1]]
    return pa.RecordBatch.from_arrays([*nulls, line], schema=arrow)


def reports_of(lines: Iterable[str]) -> list[TaskReport]:
    """The reports of the lines that tasks have ended with. Driver."""
    return [msgspec.json.decode(line, type=TaskReport) for line in lines]
