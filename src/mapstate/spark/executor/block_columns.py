"""The rows of some blocks in columns, and their merge into the blocks of the store with no Python code for a key.

For sums of integers and doubles, and the least and greatest of integers, where no value is null. Everything else goes
key by key, through `mapstate.serializers.blocks.merged`, with the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mapstate.aggregators.extremes import Max, Min
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.folding import adds_up
from mapstate.aggregators.sums import Sum
from mapstate.serializers.blocks import Block, Rows
from mapstate.serializers.packed import packed_all, unpacked_all
from mapstate.serializers.value_types import INTEGERS

Combine = Callable[[Any, Any], Any]

_PLAIN = np.ones(256, bool)
_PLAIN[[*range(32), 127, 0xC2, ord("|"), ord("\\")]] = False  # 0xC2: what a control character above 127 begins with
_DOUBLE = b"d"


class _LeftToPythonError(Exception):
    """Something is null, or would not fit."""


class BlockRows:
    """All rows of some blocks, block by block: the blocks, how many rows each has, and the columns of the rows.

    ``in_python`` gives key texts and partials as lists, of the columns.
    """

    def __init__(
        self, columns: Sequence[pa.Array], in_python: Callable[[Sequence[pa.Array], int], tuple[list[Any], list[Any]]]
    ) -> None:
        self._columns, self._in_python = columns, in_python
        of_row = columns[0].to_numpy()
        starts = np.flatnonzero(np.diff(of_row, prepend=of_row[0] - 1))
        self.numbers: list[int] = of_row[starts].tolist()
        self.counts = np.diff(np.append(starts, len(of_row)))
        self.rows = pc.sum(columns[-1]).as_py()

    @cached_property
    def python(self) -> tuple[list[Any], list[Any]]:
        """Key texts and partials, as lists."""
        return self._in_python(self._columns[1:-1], len(self._columns[0]))

    def of_blocks(self) -> list[Rows]:
        """The rows of each block."""
        texts, partials = self.python
        ends = np.cumsum(self.counts)
        spans = zip((ends - self.counts).tolist(), ends.tolist(), strict=True)
        return [(texts[start:end], partials[start:end]) for start, end in spans]

    def is_plain(self) -> bool:
        """Whether the keys are one column of texts as they stand in the store."""
        texts = self._columns[1]
        if not pa.types.is_string(texts.type) or texts.null_count:
            return False
        offsets, data = _text(texts)
        return bool(np.diff(offsets).all() and _PLAIN[np.frombuffer(data, np.uint8)].all())

    def lines(self, *, is_plain: bool) -> pa.StringArray:
        """The key texts, with a line feed behind each."""
        texts = self._columns[1] if is_plain else pa.array(self.python[0], pa.string())
        return pc.binary_join_element_wise(texts, "\n", "")

    def partial(self, at: int) -> Any:
        """A column of partials, by its place behind the key columns."""
        column = self._columns[at]
        if column.null_count:
            raise _LeftToPythonError
        return column.to_numpy(zero_copy_only=False)

    def first_block(self, blocks: int) -> int:
        """The block of the first key, if all are plain."""
        return crc32(self._columns[1][0].as_py().encode()) % blocks


class BlockColumns:
    """The merge for a state's fields. Executor, made once per task.

    ``fits`` is False where a field needs Python. ``sizes`` has the number of columns of each field's partials.
    """

    def __init__(self, fields: Fields, sizes: Sequence[int], keys: int) -> None:
        self._combines = [_combine(*pair) for pair in zip(fields.aggregators, fields.fields, strict=True)]
        self.fits = all(self._combines)
        places = np.cumsum([1 + keys, *sizes])
        self._places: list[int] = places[:-1].tolist()
        self._is_double = [field.type == "double" for field in fields.fields]

    def merged(self, bases: Sequence[Block | None], rows: BlockRows, *, is_plain: bool) -> list[Block | None] | None:
        """The new values of the blocks; None where Python has to do it."""
        try:
            return self._merged(bases, rows, rows.lines(is_plain=is_plain))
        except _LeftToPythonError:
            return None

    def _merged(self, bases: Sequence[Block | None], rows: BlockRows, lines: pa.StringArray) -> list[Block | None]:
        keys = [b"" if base is None else base.keys for base in bases]
        counts = np.array([0 if base is None else base.count for base in bases], np.int64)
        of_stored = pc.index_in(_lines(b"".join(keys)), value_set=lines)  # the row of each stored key
        places = np.flatnonzero(of_stored.is_valid().to_numpy(zero_copy_only=False))
        row_of = of_stored.drop_null().to_numpy().astype(np.int64)
        new = order = None
        if len(row_of) < len(lines):
            new = np.ones(len(lines), bool)
            new[row_of] = False
            of_row = np.repeat(np.arange(len(keys)), rows.counts)[new]
            order = np.argsort(np.concatenate([np.repeat(np.arange(len(keys)), counts), of_row]), kind="stable")
            fresh = np.bincount(of_row, minlength=len(keys))
            offsets, data = _text(lines.filter(pa.array(new)))
            ends = np.cumsum(fresh)
            spans = zip(offsets[ends - fresh].tolist(), offsets[ends].tolist(), strict=True)
            keys = [key + data[start:end] for key, (start, end) in zip(keys, spans, strict=True)]
            counts_now = counts + fresh
        else:
            counts_now = counts
        columns: list[list[Any]] = []
        for i, (combine, is_double, place) in enumerate(
            zip(self._combines, self._is_double, self._places, strict=True)
        ):
            stored, partials = _stored(bases, 2 * i, counts, is_double=is_double), rows.partial(place)
            partials = partials.astype(stored.dtype, copy=False)
            values = stored.copy()
            values[places] = combine(stored[places], partials[row_of])  # type: ignore[misc]
            if new is not None:
                values = np.concatenate([values, partials[new]])[order]
            columns += [_packed(values, counts_now, is_double=is_double), [b""] * len(keys)]
        parts = zip(keys, zip(*columns, strict=True), counts_now.tolist(), strict=True)
        return [Block(key, of, count) for key, of, count in parts]


def _combine(aggregator: Any, field: Any) -> Combine | None:
    if adds_up(aggregator, field.type):
        return _added
    if type(aggregator) is Sum and field.type == "double":
        return np.add
    if type(aggregator) in (Min, Max) and field.type in INTEGERS:
        return np.minimum if type(aggregator) is Min else np.maximum
    return None


def _added(old: Any, more: Any) -> Any:
    out = old + more
    if (((old ^ out) & (more ^ out)) < 0).any():
        raise _LeftToPythonError  # which names the key
    return out


def _stored(bases: Sequence[Block | None], at: int, counts: Any, *, is_double: bool) -> Any:
    """The values of a field in all blocks."""
    nothing = _DOUBLE if is_double else b"b"
    columns = [
        nothing if base is None else base.columns[at] for base in bases if base is None or len(base.columns) > at
    ]
    nulls = [base.columns[at + 1] for base in bases if base is not None and len(base.columns) > at]
    if len(columns) < len(bases) or any(nulls) or not {bytes}.issuperset(map(type, columns)):
        raise _LeftToPythonError
    if is_double:
        return np.frombuffer(b"".join([column[1:] for column in columns]), "<f8")
    return unpacked_all(np, columns, counts)


def _packed(values: Any, counts: Any, *, is_double: bool) -> list[bytes]:
    if not is_double:
        return packed_all(np, values, counts)
    data, ends = values.astype("<f8").tobytes(), 8 * np.cumsum(counts)
    spans = zip((ends - 8 * counts).tolist(), ends.tolist(), strict=True)
    return [_DOUBLE + data[start:end] for start, end in spans]


def _lines(data: bytes) -> pa.StringArray:
    """Texts with a line feed behind each, as Arrow has them: nothing is copied."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.StringArray.from_buffers(len(ends), pa.py_buffer(offsets), pa.py_buffer(data))


def _text(strings: pa.StringArray) -> tuple[Any, bytes]:
    """The offsets of some texts from 0 on, and their bytes."""
    if not len(strings):
        return np.zeros(1, np.int32), b""
    offsets = np.frombuffer(strings.buffers()[1], np.int32)[strings.offset : strings.offset + len(strings) + 1]
    return offsets - offsets[0], memoryview(strings.buffers()[2])[offsets[0] : offsets[-1]].tobytes()
