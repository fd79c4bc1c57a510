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
from mapstate.maps.opaque import CombineAll
from mapstate.maps.serialized import Room
from mapstate.serializers.blocks import Block, BlockCodec, block_names, block_numbers
from mapstate.spark.executor.block_columns import BlockColumns, BlockRows, merged
from mapstate.spark.executor.task import BatchTask, Chunk, TaskReport, slices

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

    def codecs(self) -> tuple[Any, KeyCodec]:
        return self._codec, super().codecs()[1]

    @property
    def _codec(self) -> BlockCodec:
        return BlockCodec(self.state, self.fields.fields, self.spec.blocks or 1)

    def room(self) -> Room:
        """See `BatchTask.room`. A record grows with its keys."""
        return Room(None, self.spec.chunk_size, self.spec.chunk_bytes)

    def counted(self, batches: Iterator[pa.RecordBatch], report: TaskReport) -> Iterator[pa.RecordBatch]:
        """See `BatchTask.counted`. The report gets a bit for each block, set where the task has its rows."""
        seen = np.zeros(self.spec.blocks or 1, bool)
        for batch in super().counted(batches, report):
            seen[batch.column(0).to_numpy()] = True
            yield batch
        report.blocks = compress(np.packbits(seen).tobytes(), 1)

    def native_chunks(self, batches: Iterator[pa.RecordBatch], room: Room) -> Iterator[Chunk]:
        """Chunks of whole blocks. In the place of the partials is `_Rows` for each block."""
        blocks = self.spec.blocks or 1
        seen = np.zeros(blocks, bool)
        for columns in whole_blocks(batches, room, self.spec.chunk_bytes):
            rows = BlockRows(columns, self.keys_and_partials)
            is_plain = self._is_checked(rows, blocks)
            if seen[rows.numbers].any() or len({*rows.numbers}) < len(rows.numbers):
                raise IncompleteBatchError(
                    f"state {self.state!r}: the rows of a block did not come one after the other, so the task would "
                    "overwrite what it has written. This attempt is not committed."
                )
            seen[rows.numbers] = True
            names = cast("list[StoreKey]", block_names(rows.numbers, blocks))
            yield names, [_Rows(rows, is_plain)] * len(names), rows.rows, rows

    def _is_checked(self, rows: BlockRows, blocks: int) -> bool:
        """Whether keys are plain texts. Raises KeyEncodingError where a reader would look for one in another block."""
        is_plain = len(self.keys) == 1 and rows.is_plain()
        if is_plain:  # Spark and Python get the checksum of the same bytes
            numbers, computed = rows.numbers[:1], [rows.first_block(blocks)]
        else:
            numbers = np.repeat(rows.numbers, rows.counts).tolist()
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
        codec, columns = self._codec, BlockColumns(self.fields, self.partials or (), len(self.keys))

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
        return super().new_rows(schema, key_columns.columns[1 : 1 + len(self.keys)], now, before)

    def with_key(
        self,
        error: DataError,
        keys: Sequence[StoreKey],  # noqa: ARG002  which are of blocks
        bases: Sequence[Any],
        partials: Sequence[Any],
    ) -> MapStateError:
        """See `BatchTask.with_key`."""
        rows = [
            (base, text, partial)
            for base, of_block in zip(bases, partials[0].rows.of_blocks(), strict=False)
            for text, partial in zip(*of_block, strict=True)
        ]

        def alone(at: int) -> object:
            base, text, partial = rows[at]
            return merged(self._codec, [base], [([text], [partial])], self.fields.combine_all)

        return of_first_key(error, self.spec.state, [text for _, text, _ in rows], alone)


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
