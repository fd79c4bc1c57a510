"""What runs on an executor for a state with blocks: rows come block by block, and a record has many keys."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast
from zlib import compress, decompress

import numpy as np
import pyarrow as pa

from mapstate.errors import DataError, IncompleteBatchError, KeyEncodingError, MapStateError, of_first_key, shown
from mapstate.keys import KeyCodec, StoreKey
from mapstate.maps.change_log import ChangeLog
from mapstate.maps.opaque import CombineAll
from mapstate.maps.serialized import Room
from mapstate.schema import KeyField
from mapstate.serializers import serializer
from mapstate.serializers.blocks import Block, BlockCodec, block_names, block_numbers
from mapstate.spark.executor.block_columns import BlockColumns, BlockRows, merged
from mapstate.spark.executor.logged_task import LoggedTask
from mapstate.spark.executor.task import BatchTask, Chunk, TaskReport, arrow_to_python, slices
from mapstate.spark.executor.window_task import WindowTask

MOST_ROWS = 10_000
"""Rows of a chunk, unless a block has more."""


class _Rows(NamedTuple):
    """The rows of a chunk, at the place of each of its blocks."""

    rows: BlockRows
    is_plain: bool


class BlockTask(BatchTask):
    """A task whose rows have the number of their block first, and are sorted by it. Picklable.

    All rows of a block are in one chunk: another one would not have what the first one has written.
    """

    in_panes = False

    def codecs(self) -> tuple[Any, KeyCodec]:
        return self._codec, super().codecs()[1]

    @property
    def _codec(self) -> BlockCodec:
        native, blocks = serializer(self.spec.serializer).native, self.spec.blocks or 1
        return BlockCodec(self.state, self.fields.fields, blocks, in_panes=self.in_panes, native=native)

    def names(self, numbers: Sequence[int]) -> list[str]:
        """The names of blocks, by the numbers that rows have of them."""
        return block_names(numbers, self.spec.blocks or 1)

    def room(self) -> Room:
        """See `BatchTask.room`. A record grows with its keys."""
        return Room(None, self.spec.chunk_size, self.spec.chunk_bytes)

    def counted(self, batches: Iterator[pa.RecordBatch], report: TaskReport) -> Iterator[pa.RecordBatch]:
        """See `BatchTask.counted`. The report gets a bit for each block, set where the task has its rows."""
        if self.only_notes:
            yield from super().counted(batches, report)
            return
        seen = np.zeros(self.spec.blocks or 1, bool)
        for batch in super().counted(batches, report):
            seen[batch.column(0).to_numpy()] = True
            yield batch
        report.blocks = compress(np.packbits(seen).tobytes(), 1)

    def native_chunks(self, batches: Iterator[pa.RecordBatch], room: Room) -> Iterator[Chunk]:
        """Chunks of whole blocks. In the place of the partials is `_Rows` for each block."""
        blocks, seen = self.spec.blocks or 1, set[int]()
        for columns in whole_blocks(batches, room, self.spec.chunk_bytes):
            rows = BlockRows(columns, self.keys_and_partials)
            is_plain = self._is_checked(rows, blocks)
            if not seen.isdisjoint(rows.numbers) or len({*rows.numbers}) < len(rows.numbers):
                raise IncompleteBatchError(
                    f"state {self.state!r}: the rows of a block did not come one after the other, so the task would "
                    "overwrite what it has written. This attempt is not committed."
                )
            seen.update(rows.numbers)
            names = cast("list[StoreKey]", self.names(rows.numbers))
            yield names, [_Rows(rows, is_plain)] * len(names), rows.rows, rows

    def _is_checked(self, rows: BlockRows, blocks: int) -> bool:
        """Whether keys are plain texts. Raises KeyEncodingError where a reader would look for one in another block."""
        is_plain = len(self.keys) == 1 and rows.is_plain()
        if is_plain:  # Spark and Python get the checksum of the same bytes
            numbers, computed = [rows.numbers[0] % blocks], [rows.first_block(blocks)]
        else:
            numbers = np.repeat(np.array(rows.numbers) % blocks, rows.counts).tolist()
            computed = block_numbers(rows.python[0], blocks)
        if numbers != computed:
            wrong = next(i for i, number in enumerate(computed) if number != numbers[i])
            text = rows.python[0][wrong]
            raise KeyEncodingError(
                f"state {self.state!r}, key {shown(text)}: Spark finds its block to be {numbers[wrong]}, and readers "
                "would look for it in another one. This batch is not committed. Make the state without blocks.",
                key=text,
            )
        return is_plain

    def keeping(self, bases: list[Any]) -> CombineAll:
        """See `BatchTask.keeping`."""
        codec, columns = (
            self._codec,
            BlockColumns(self.fields, self.partials or (), len(self.keys), in_panes=self.in_panes),
        )

        def combine(old: list[Any], partials: list[Any]) -> list[Any]:
            bases.extend(old)
            rows, is_plain = partials[0]
            values = columns.merged(old, rows, is_plain=is_plain) if columns.fits else None
            return merged(codec, old, rows.of_blocks(), self.fields.combine_all) if values is None else values

        return combine

    def written(self, partials: Sequence[Any], bases: Sequence[Any], values: Sequence[Any]) -> tuple[int, int]:
        """See `BatchTask.written`."""
        return int(partials[0].rows.counts.sum()), _keys(values) - _keys(bases)

    def new_rows(self, schema: Any, key_columns: BlockRows, values: list[Any], bases: list[Any]) -> pa.RecordBatch:
        """See `BatchTask.new_rows`."""
        texts, places = key_columns.python[0], dict(enumerate(key_columns.places()))
        now = self._codec.of_keys(texts, places, values)
        before = self._codec.of_keys(texts, places, bases) if self.old_values else []
        return super().new_rows(schema, self.key_columns(key_columns), now, before)

    def key_columns(self, rows: BlockRows) -> list[pa.Array]:
        """The key columns of some rows."""
        return [*rows.columns[1 : 1 + len(self.keys)]]

    def with_key(
        self,
        error: DataError,
        keys: Sequence[StoreKey],
        bases: Sequence[Any],
        partials: Sequence[Any],
    ) -> MapStateError:
        """See `BatchTask.with_key`."""
        codec, texts, rows = self._codec, list[StoreKey](), []
        for name, base, of_block in zip(keys, bases, partials[0].rows.of_blocks(), strict=False):
            texts += codec.with_pane(name, of_block[0])
            rows += [(base, *row) for row in zip(*of_block, strict=True)]

        def alone(at: int) -> object:
            base, text, partial = rows[at]
            return merged(codec, [base], [([text], [partial])], self.fields.combine_all)

        return of_first_key(error, self.spec.state, texts, alone)


class _LogOfBlocks(ChangeLog):
    """The keys of all rows: those that a block's record gets a new value of."""

    def note(self, keys: Sequence[StoreKey], bases: Sequence[Any] = (), partials: Sequence[Any] = ()) -> None:  # noqa: ARG002
        rows, is_plain = partials[0]
        super().note(rows.texts(is_plain=is_plain))


class LoggedBlockTask(LoggedTask, BlockTask):
    """The same of a state with a change log."""

    make_log = _LogOfBlocks


class PaneBlockTask(BlockTask, WindowTask):
    """The same of a state with windows, whose rows have their pane behind the number of their block."""

    in_panes = True

    def __init__(self, *, keys: Sequence[KeyField], **settings: Any) -> None:
        super().__init__(keys=keys[1:], place=1, **settings)
        self._pane = KeyCodec(keys[:1])
        self._panes: dict[Any, int] = {}

    def native_chunks(self, batches: Iterator[pa.RecordBatch], room: Room) -> Iterator[Chunk]:
        """See `BlockTask.native_chunks`. A block's number is its own, and so many blocks more for each pane before."""
        self._panes = {}
        return super().native_chunks(map(self._numbered, batches), room)

    def names(self, numbers: Sequence[int]) -> list[str]:
        blocks, panes = self.spec.blocks or 1, [*map(self._pane.encode_first, self._panes)]
        names = block_names([number % blocks for number in numbers], blocks)
        return [f"{panes[number // blocks]}|{name}" for number, name in zip(numbers, names, strict=True)]

    def key_columns(self, rows: BlockRows) -> list[pa.Array]:
        places = rows.columns[0].to_numpy() // (self.spec.blocks or 1)
        return [pa.array([*self._panes]).take(pa.array(places)), *super().key_columns(rows)]

    def _numbered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch whose blocks have such numbers, without the panes."""
        number, pane, *columns = batch.columns
        distinct = pane.dictionary_encode()
        places = [self._panes.setdefault(of, len(self._panes)) for of in arrow_to_python(distinct.dictionary, "pane")]
        before = np.array(places, np.int64)[distinct.indices.to_numpy()] * (self.spec.blocks or 1)
        numbers = pa.array(number.to_numpy() + before)
        return pa.RecordBatch.from_arrays([numbers, *columns], [batch.schema.names[0], *batch.schema.names[2:]])


def shared_block(reports: Sequence[TaskReport]) -> int | None:
    """A block of which two tasks have rows, by their reports. Driver."""
    seen: Any = 0
    for report in reports:
        blocks = np.frombuffer(decompress(report.blocks or compress(b"")), np.uint8)
        if len(blocks):
            if np.any(both := seen & blocks):
                return int(np.unpackbits(both).argmax())
            seen = seen | blocks
    return None


def whole_blocks(batches: Iterator[pa.RecordBatch], room: Room, most_bytes: int) -> Iterator[Sequence[pa.Array]]:
    """The columns of chunks that end between two blocks."""
    parts, starts, rows, size, last = list[pa.RecordBatch](), list[int](), 0, 0, -1
    for batch in batches:
        for part in slices(batch, lambda: MOST_ROWS, most_bytes):
            numbers = part.column(0).to_numpy()
            starts += (np.flatnonzero(np.diff(numbers, prepend=last)) + rows).tolist()
            parts.append(part)
            rows, size, last = rows + part.num_rows, size + part.nbytes, numbers[-1]
            if len(starts) < 2 or (starts[-1] < MOST_ROWS and len(starts) <= room.keys and size < most_bytes):
                continue
            table, done = pa.Table.from_batches(parts), 0
            while len(starts) > 1:  # the last block may go on
                end = starts[min(room.keys, len(starts) - 1)]
                yield _columns(table.slice(done, end - done))
                starts, done = starts[bisect_left(starts, end) :], end
            parts = table.slice(done).to_batches()
            starts, rows, size = [start - done for start in starts], rows - done, sum(left.nbytes for left in parts)
    if parts:
        yield _columns(pa.Table.from_batches(parts))


def _columns(table: pa.Table) -> list[pa.Array]:
    return [pa.concat_arrays(column.chunks) for column in table.columns]


def _keys(blocks: Sequence[Block | None]) -> int:
    return sum(block.count for block in blocks if block is not None)
