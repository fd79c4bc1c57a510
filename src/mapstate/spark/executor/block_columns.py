"""The rows of some blocks in columns, and their merge into the blocks of the store with no Python code for a key.

For sums of integers and doubles, and the least and greatest of integers, where no value is null. Everything else goes
key by key, through `merged`, with the same answers.
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
from mapstate.maps.opaque import CombineAll
from mapstate.serializers.blocks import FEW, Block, BlockCodec
from mapstate.serializers.packed import packed_all, unpacked_all
from mapstate.serializers.value_types import INTEGERS

Combine = Callable[[Any, Any], Any]
Rows = tuple[list[str], list[Any]]
"""The rows of a block: key texts, each once, and a partial for each."""

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
        self.columns, self._in_python = columns, in_python
        of_row = columns[0].to_numpy()
        starts = np.flatnonzero(np.diff(of_row, prepend=of_row[0] - 1))
        self.numbers: list[int] = of_row[starts].tolist()
        self.counts = np.diff(np.append(starts, len(of_row)))
        self.rows = pc.sum(columns[-1]).as_py()

    @cached_property
    def python(self) -> tuple[list[Any], list[Any]]:
        """Key texts and partials, as lists."""
        return self._in_python(self.columns[1:-1], len(self.columns[0]))

    def of_blocks(self) -> list[Rows]:
        """The rows of each block."""
        texts, partials = self.python
        return [(texts[rows.start : rows.stop], partials[rows.start : rows.stop]) for rows in self.places()]

    def places(self) -> list[range]:
        """Where the rows of each block are."""
        ends = np.cumsum(self.counts)
        return [*map(range, (ends - self.counts).tolist(), ends.tolist())]

    def is_plain(self) -> bool:
        """Whether the keys are one column of texts as they stand in the store."""
        texts = self.columns[1]
        if not pa.types.is_string(texts.type) or texts.null_count:
            return False
        offsets, data = _text(texts)
        if not np.diff(offsets).all() or not _PLAIN[np.frombuffer(data, np.uint8)].all():
            return False
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:  # no UTF-8, which Python refuses by the name of its column
            return False
        return True

    def texts(self, *, is_plain: bool) -> list[str]:
        """The key of each row."""
        return self.columns[1].to_pylist() if is_plain else self.python[0]

    def lines(self, *, is_plain: bool) -> pa.StringArray:
        """The key texts, with a line feed behind each."""
        texts = self.columns[1] if is_plain else pa.array(self.python[0], pa.string())
        return pc.binary_join_element_wise(texts, "\n", "")

    def partial(self, at: int) -> Any:
        """A column of partials, by its place behind the key columns."""
        column = self.columns[at]
        if column.null_count:
            raise _LeftToPythonError
        return column.to_numpy(zero_copy_only=False)

    def first_block(self, blocks: int) -> int:
        """The block of the first key, if all are plain."""
        return crc32(self.columns[1][0].as_py().encode()) % blocks


class BlockColumns:
    """The merge for a state's fields. Executor, made once per task.

    ``fits`` is False where a field needs Python. ``sizes`` has the number of columns of each field's partials. With
    ``in_panes`` several blocks may have a key of the same text.
    """

    def __init__(self, fields: Fields, sizes: Sequence[int], keys: int, *, in_panes: bool = False) -> None:
        self._in_panes = in_panes
        self._combines = [_combine(*pair) for pair in zip(fields.aggregators, fields.fields, strict=True)]
        self.fits = all(self._combines) and type(fields) is Fields  # others combine in another way
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
        counts = _counts(bases)
        stored_lines, wanted = _lines(b"".join(keys)), lines
        if self._in_panes:
            stored_lines, wanted = _with_place(stored_lines, counts), _with_place(lines, rows.counts)
        of_stored = pc.index_in(stored_lines, value_set=wanted)  # the row of each stored key
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
        parts = zip(keys, zip(*columns, strict=True), counts_now.tolist(), _bits(places, counts), strict=True)
        return [Block(key, of, count, touched) for key, of, count, touched in parts]


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


def _counts(bases: Sequence[Block | None]) -> Any:
    return np.array([0 if base is None else base.count for base in bases], np.int64)


def _bits(places: Any, counts: Any) -> list[bytes | None]:
    """``touched`` of each block, from places among the keys of all."""
    sizes = (counts + 7) // 8
    ends, of_place = np.cumsum(sizes), np.repeat(np.arange(len(counts)), counts)[places]
    flags = np.zeros(8 * int(sizes.sum()), np.uint8)
    flags[places + (8 * (ends - sizes) - np.cumsum(counts) + counts)[of_place]] = 1
    data = np.packbits(flags, bitorder="little").tobytes()
    is_whole = np.bincount(of_place, minlength=len(counts)) == counts
    spans = zip((ends - sizes).tolist(), ends.tolist(), is_whole.tolist(), strict=True)
    return [None if whole else data[start:end] for start, end, whole in spans]


def _lines(data: bytes) -> pa.StringArray:
    """Texts with a line feed behind each, as Arrow has them: nothing is copied."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.StringArray.from_buffers(len(ends), pa.py_buffer(offsets), pa.py_buffer(data))


def _with_place(lines: pa.StringArray, counts: Any) -> pa.StringArray:
    """The keys of some blocks, each with the place of its block, of which ``counts`` has the numbers of keys."""
    places = pa.array(np.repeat(np.arange(len(counts)), counts)).cast(pa.string())
    return pc.binary_join_element_wise(places, lines, " ")


def _text(strings: pa.StringArray) -> tuple[Any, bytes]:
    """The offsets of some texts from 0 on, and their bytes."""
    if not len(strings):
        return np.zeros(1, np.int32), b""
    offsets = np.frombuffer(strings.buffers()[1], np.int32)[strings.offset : strings.offset + len(strings) + 1]
    return offsets - offsets[0], memoryview(strings.buffers()[2])[offsets[0] : offsets[-1]].tobytes()


def merged(
    codec: BlockCodec, bases: Sequence[Block | None], rows: Sequence[Rows], combine: CombineAll
) -> list[Block | None]:
    """The new values of blocks, from those in the store and each block's rows.

    ``combine`` is called once for all of them, as `Fields.combine_all`.
    """
    places_of = [_places(codec, base, texts) for base, (texts, _) in zip(bases, rows, strict=True)]
    olds = [old for _, _, of in places_of for old in of]
    values = combine(olds, [partial for _, partials in rows for partial in partials])
    counts, out = _counts(bases), list[Block | None]()
    firsts = (np.cumsum(counts) - counts).tolist()
    places = [first + i for first, (of, _, _) in zip(firsts, places_of, strict=True) for i in of if i is not None]
    bits, start = _bits(np.array(places, np.int64), counts), 0
    for base, (texts, _), (of, stored, _), touched in zip(bases, rows, places_of, bits, strict=True):
        end = start + len(texts)
        block = _changed(codec, base, (texts, values[start:end]), of, stored)
        out.append(block and Block(block.keys, block.columns, block.count, touched))
        start = end
    return out


def _places(
    codec: BlockCodec, base: Block | None, texts: list[str]
) -> tuple[Sequence[int | None], list[Any] | None, list[Any]]:
    """The place of each key, all values of the block unless few are asked for, and the value of each key."""
    if base is None:
        return [None] * len(texts), None, [None] * len(texts)
    if len(texts) <= FEW and len(texts) * 8 <= base.count:
        places = list(map(base.place, texts))
        return places, None, [None if i is None else codec.value(base, i) for i in places]
    stored, index = [*codec.values(base)], dict(zip(base.texts(), range(base.count), strict=True))
    places = list(map(index.get, texts))
    return places, stored, [None if i is None else stored[i] for i in places]


def _changed(
    codec: BlockCodec, base: Block | None, rows: Rows, places: Sequence[int | None], stored: list[Any] | None
) -> Block | None:
    texts, values = rows
    if base is not None and stored is None and None not in places:
        block: Block | None = base
        for i, value in zip(places, values, strict=True):
            block = block and codec.with_value(block, i or 0, value)
        if block is not None:
            return block
    keys = b"" if base is None else base.keys
    if stored is None:
        stored = [] if base is None else [*codec.values(base)]
    more: list[str] = []
    for text, i, value in zip(texts, places, values, strict=True):
        if i is not None:
            stored[i] = value
        elif value is not None:
            more.append(text)
            stored.append(value)
    if more:
        keys += "\n".join([*more, ""]).encode()
    if None in values and None in stored:
        kept = [(key, value) for key, value in zip(keys.split(b"\n"), stored, strict=False) if value is not None]
        keys, stored = b"".join(key + b"\n" for key, _ in kept), [value for _, value in kept]
    return codec.block(keys, stored)
